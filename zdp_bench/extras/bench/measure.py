"""Time the sides of a comparison by turns.

A shared machine is never twice the same, so the sides run one after the other, round after round, a
few repetitions each. A side's time is its best round, a ratio that of two best rounds; the
quartiles of the round-by-round ratio say how far to trust it. Timing is torch.utils.benchmark's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zdp_bench.errors import UserError

ROUND_SECONDS = 0.05  # a side repeats for about this long before the next has its turn


@dataclass(frozen=True)
class Step:
    """One side of a comparison, ready to run.

    Attributes:
        run: takes the step that is timed.
        answer: returns what the step computes before noise; sides that compute the same must agree
            in it.
    """

    run: Callable[[], object]
    answer: Callable[[], Tensor]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the best round, and the quartiles of the round-by-round ratio to the
    baseline's time.
    """

    milliseconds: float
    low: float
    high: float


def require_agreement(
    steps: Mapping[str, Step], computes: Mapping[str, str], tolerance: float = 2e-2
) -> dict[str, float | None]:
    """Return each side's deviation from the first side that computes the same, relative to its
    norm.

    The first side itself has None.

    Args:
        tolerance: float32 alone makes 7e-3 on VGG-11, where kernels of different layouts round
            differently before a max-pooling; a wrong kernel is off by its whole size.

    Raises:
        UserError: a side deviates by more than `tolerance`, so that times cannot be compared.
    """
    firsts: dict[str, Tensor] = {}
    deviations: dict[str, float | None] = {}
    for name, step in steps.items():
        answer = step.answer().detach()
        first = firsts.setdefault(computes[name], answer)
        deviation = float((answer - first).norm() / first.norm())
        if not deviation <= tolerance:
            raise UserError(
                f"bench: '{name}' is off by {deviation:.1e} from what it is compared with; nothing "
                "was timed."
            )
        deviations[name] = None if answer is first else deviation
    return deviations


def by_turns(
    runs: Mapping[str, Callable[[], object]], baseline: Callable[[str], bool], seconds: float
) -> dict[str, Timing]:
    """Time every side by turns for about `seconds` in all, three rounds at least.

    Args:
        baseline: tells which sides may be the baseline; it is the fastest of them.
    """
    # Imported here: it looks for a CUDA toolkit and prints where it finds none.
    from torch.utils.benchmark import Timer

    timers = {
        name: Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        for name, run in runs.items()
    }
    repeats = {}
    for name, timer in timers.items():
        first = timer.timeit(1).median  # builds what later calls reuse
        repeats[name] = max(
            1, int(ROUND_SECONDS / (timer.timeit(1).median if first < 1 else first))
        )
    rounds: list[dict[str, float]] = []
    until = time.perf_counter() + seconds
    while len(rounds) < 3 or time.perf_counter() < until:
        rounds.append(
            {name: 1e3 * timer.timeit(repeats[name]).median for name, timer in timers.items()}
        )
    best = {name: min(one[name] for one in rounds) for name in runs}
    base = min((name for name in runs if baseline(name)), key=best.__getitem__)

    def timing(name: str) -> Timing:
        quartiles = statistics.quantiles([one[name] / one[base] for one in rounds], n=4)
        return Timing(best[name], quartiles[0], quartiles[2])

    return {name: timing(name) for name in runs}
