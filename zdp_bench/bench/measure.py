"""Timing by turns, and peak memory by a process of its own.

A shared machine is never twice the same, so the sides of a comparison run one after the other, round after round, a few
repetitions each. A side's time is its best round, a ratio that of two best rounds; the quartiles of the round-by-round ratio say
how far to trust it. Timing is torch.utils.benchmark's.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zdp_bench.errors import UserError

ROUND_SECONDS = 0.05  # a side repeats for about this long before the next has its turn


@dataclass(frozen=True)
class Step:
    """One side of a comparison, ready to run.

    Attributes:
        run: what is timed.
        answer: what it computes, before any noise: sides that claim to compute the same are held to it.
    """

    run: Callable[[], object]
    answer: Callable[[], Tensor]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the best round, and the quartiles of the round-by-round ratio to the baseline's time."""

    milliseconds: float
    low: float
    high: float


def require_agreement(
    steps: Mapping[str, Step], computes: Mapping[str, str], tolerance: float = 2e-2
) -> dict[str, float | None]:
    """Largest deviation of every side from the first side that computes the same, relative to its norm; None of that first side.

    Raises:
        UserError: one deviates by more than `tolerance`: then their times cannot be compared. (float32 alone makes 7e-3 on
            VGG-11, where kernels of different layouts round differently before a max-pooling; a wrong one is off by its size.)
    """
    firsts: dict[str, Tensor] = {}
    deviations: dict[str, float | None] = {}
    for name, step in steps.items():
        answer = step.answer().detach()
        first = firsts.setdefault(computes[name], answer)
        deviation = float((answer - first).norm() / first.norm())
        if not deviation <= tolerance:
            raise UserError(
                f"bench: '{name}' is off by {deviation:.1e} from what it is compared with; nothing was timed."
            )
        deviations[name] = None if answer is first else deviation
    return deviations


def by_turns(
    runs: Mapping[str, Callable[[], object]], baseline: Callable[[str], bool], seconds: float
) -> dict[str, Timing]:
    """Time every side by turns for about `seconds` in all, three rounds at least.

    Args:
        baseline: which sides may be the baseline; it is the fastest of them.
    """
    from torch.utils.benchmark import (
        Timer,
    )  # which looks for a CUDA toolkit, and tells the terminal where it finds none

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


def hold_memory() -> bool:
    """Let freed memory stay with this process, where the C library is glibc; says whether it is.

    glibc hands blocks above 32 MiB back to the system at once, so that every step of every side would pay for fresh pages: seen,
    a real convolution's 4 ms becoming 19.
    """
    no_mmap, no_trim = (
        (-4, 0),
        (-1, -1),
    )  # M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h; of which -1 is that there is none
    return _of_glibc("mallopt", *no_mmap) and _of_glibc("mallopt", *no_trim)


def _hand_memory_back() -> bool:
    """Let every freed block of 64 KiB or more go back to the system at once, where the C library is glibc; says whether it does.

    What glibc would keep for later is no need of the step, and differs from run to run: seen, 1.04 to 1.13 times the memory of
    the non-private step where what both hold at once is the same to 0.2 %.
    """
    return _of_glibc("mallopt", -3, 2**16)  # M_MMAP_THRESHOLD


def _let_go() -> None:
    """Hand back what was held and is not used, once, where the C library is glibc."""
    _of_glibc("malloc_trim", 0)


def _of_glibc(function: str, *numbers: int) -> bool:
    """Whether a function of glibc did as it was told; False where the C library is another."""
    try:
        return bool(getattr(ctypes.CDLL("libc.so.6"), function)(*numbers))
    except (OSError, AttributeError):
        return False


# ---------------------------------------------------------------------------------------------------------- memory


def peak_memory(workload: dict[str, Any], side: str, threads: int) -> float | None:
    """Peak memory of a side's step in MiB, weights, batch and noise included, without the interpreter and its libraries.

    A fresh process runs two steps, so that no other side's leavings count, nor what its own allocator keeps in hand. None where
    the system does not say (Linux does).
    """
    if torch.cuda.is_available():
        return _peak_of(workload, side)
    if not Path("/proc/self/clear_refs").exists():
        return None
    _let_go()  # both processes must fit
    asked = json.dumps({"workload": workload, "side": side, "threads": threads})
    child = subprocess.run(
        [sys.executable, "-m", "zdp_bench.bench.measure", asked],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        said = child.stderr.strip().splitlines() or [
            f"it was ended with {child.returncode}, as where memory runs out"
        ]
        raise UserError(f"bench: '{side}' failed while its memory was measured: {said[-1]}")
    return float(child.stdout.strip().splitlines()[-1])


def _peak_of(workload: dict[str, Any], side: str) -> float:
    from zdp_bench.bench.steps import SIDES, Workload

    cuda = torch.cuda.is_available()
    _resident("VmRSS")
    SIDES["warm"](Workload(**workload))  # libraries that load when first used
    before = 0.0 if cuda else _resident("VmRSS")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    step = SIDES[side](Workload(**workload))
    for _ in range(2):
        step.run()
    return torch.cuda.max_memory_allocated() / 2**20 if cuda else _resident("VmHWM") - before


def _resident(field: str) -> float:
    """A memory field of this process, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


if __name__ == "__main__":
    question = json.loads(sys.argv[1])
    torch.set_num_threads(question["threads"])
    _hand_memory_back()
    print(_peak_of(question["workload"], question["side"]))
