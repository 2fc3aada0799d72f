"""Time the sides of a comparison by turns, and measure their memory.

A shared machine is never twice the same, so the sides run one after the other, round after round, a
few repetitions each. A side's time is its best round, a ratio that of two best rounds; the
quartiles of the round-by-round ratio say how far to trust it. Timing is torch.utils.benchmark's.

The peak memory of a step is measured in a process of its own: nothing that another side left behind
counts, nor what this process's allocator keeps in hand.
"""

from __future__ import annotations

import ctypes
import json
import operator
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zdp_bench.errors import UserError
from zdp_bench.extras.bench.steps import SIDES
from zdp_bench.extras.bench.workload import Step, Workload

ROUND_SECONDS = 0.05  # a side repeats for about this long before the next has its turn


def require_agreement(
    steps: Mapping[str, Step], tolerance: float = 2e-2
) -> dict[str, float | None]:
    """Return each side's relative deviation from the first that computes the same; None for that.

    Sides whose names are the same before the comma must compute the same.

    Args:
        tolerance: float32 alone makes 7e-3 on VGG-11, where kernels of different layouts round
            differently before a max-pooling; a wrong kernel is off by its whole size.
    """
    firsts: dict[str, Tensor] = {}
    deviations: dict[str, float | None] = {}
    for name, step in steps.items():
        answer = step.answer().detach()
        first = firsts.setdefault(name.split(",")[0], answer)
        deviation = float((answer - first).norm() / first.norm())
        if not deviation <= tolerance:
            raise UserError(
                f"bench: '{name}' is off by {deviation:.1e} from what it is compared with; nothing "
                "was timed."
            )
        deviations[name] = None if answer is first else deviation
    return deviations


def by_turns(
    runs: Mapping[str, Callable[[], object]], seconds: float
) -> tuple[str, dict[str, dict[str, float]]]:
    """Time every side by turns for about `seconds` in all, three rounds at least.

    Returns:
        the baseline (the fastest of 'real' and the non-private ones), and of each side the
        milliseconds of its best round, the ratio to the baseline's, and the quartiles of that
        ratio round by round.
    """
    # Imported here: it looks for a CUDA toolkit and prints where it finds none.
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()
    timers = {
        name: Timer("run()", globals={"run": run}, num_threads=threads)
        for name, run in runs.items()
    }
    repeats = {}
    for name, timer in timers.items():
        duration = timer.timeit(1).median  # builds what later calls reuse
        if duration < 1:
            duration = timer.timeit(1).median
        repeats[name] = max(1, int(ROUND_SECONDS / duration))
    times: dict[str, list[float]] = {name: [] for name in runs}  # ms, a round each
    until = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < until:
        rounds += 1
        for name, timer in timers.items():
            seconds_each = timer.timeit(repeats[name]).median
            times[name].append(1e3 * seconds_each)
    baselines = [name for name in runs if name == "real" or name.startswith("non-private")]
    base = min(baselines, key=lambda name: min(times[name]))
    timings = {}
    for name, own in times.items():
        ratios = list(map(operator.truediv, own, times[base]))
        low, _, high = statistics.quantiles(ratios, n=4)
        timings[name] = {
            "milliseconds": min(own),
            "ratio": min(own) / min(times[base]),
            "ratio_low": low,
            "ratio_high": high,
        }
    return base, timings


# ------------------------------------------------------------------------------------------ memory


def peak_memory(workload: Workload, side: str) -> float | None:
    """Return a step's peak MiB, without the interpreter and its libraries; None if unknown."""
    if torch.cuda.is_available():
        return _measure(asdict(workload), side)
    if not Path("/proc/self/clear_refs").exists():
        return None
    _call_glibc("malloc_trim", 0)  # both processes must fit
    arguments = json.dumps([asdict(workload), side, torch.get_num_threads()])
    child = subprocess.run(
        [sys.executable, "-m", "zdp_bench.extras.bench.measure", arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines()
        reason = f"it was ended with {child.returncode}, as where memory runs out"
        if lines:
            reason = lines[-1]
        raise UserError(f"bench: '{side}' failed while its memory was measured: {reason}")
    return float(child.stdout.strip().splitlines()[-1])


def _measure(workload: dict[str, Any], side: str) -> float:
    """Run two steps in this process."""
    SIDES["warm"](Workload(**workload))  # loads what libraries load when they are first used
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        _run_twice(workload, side)
        return torch.cuda.max_memory_allocated() / 2**20
    _read_status("VmRSS")  # what reading takes is there before
    before = _read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    _run_twice(workload, side)
    return _read_status("VmHWM") - before


def _run_twice(workload: dict[str, Any], side: str) -> None:
    step = SIDES[side](Workload(**workload))
    step.run()
    step.run()


def _read_status(field: str) -> float:
    """Return a memory field of this process in MiB."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)
    assert match is not None
    return int(match[1]) / 1024


def hold_memory() -> bool:
    """Let freed memory stay with this process if the C library is glibc; returns whether it is.

    glibc gives blocks above 32 MiB back to the system at once, so every step of every side would
    pay for fresh pages: a real convolution took 19 ms instead of 4.
    """
    # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h; -1 means no threshold
    maps_none = _call_glibc("mallopt", -4, 0)
    return maps_none and _call_glibc("mallopt", -1, -1)


def _return_memory() -> bool:
    """Let glibc return freed blocks of 64 KiB or more immediately; True if it can.

    What glibc keeps for later is no need of the step and differs from run to run: by 4 to 13 %
    where what is held at once is the same to 0.2 %.
    """
    return _call_glibc("mallopt", -3, 2**16)  # M_MMAP_THRESHOLD


def _call_glibc(function: str, *numbers: int) -> bool:
    """True if a function of glibc succeeded; False if the C library is another."""
    try:
        return bool(getattr(ctypes.CDLL("libc.so.6"), function)(*numbers))
    except (OSError, AttributeError):
        return False


if __name__ == "__main__":
    workload, side, threads = json.loads(sys.argv[1])
    torch.set_num_threads(threads)
    _return_memory()
    print(_measure(workload, side))
