"""Time the sides of a comparison in turn, and measure their memory.

The speed of a shared machine varies. In each round, every side therefore runs a few times, one side
after the other. The time of a side is that of its best round, and a ratio is that of two best
rounds. The quartiles of the ratio over the rounds state how reliable it is. Rounds are timed by
torch.utils.benchmark.

The peak memory of a step is measured in a separate process, so that it includes nothing that other
sides or this process's allocator hold.
"""

from __future__ import annotations

import ctypes
import gc
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

ROUND_SECONDS = 0.05  # approximate time of a side in each round


def require_agreement(
    steps: Mapping[str, Step], tolerance: float = 2e-2
) -> dict[str, float | None]:
    """Return each side's relative deviation from the first side that computes the same.

    Sides compute the same if their names are equal up to the comma.

    Args:
        steps: the sides, by name.
        tolerance: the largest relative deviation. Rounding in float32 alone causes 7e-3 on VGG-11,
            whose layouts round differently before a max-pooling; a wrong kernel causes about 1.

    Returns:
        the relative deviation of each side, None for the first sides themselves.

    Raises:
        UserError: a side deviates by more than the tolerance.
    """
    firsts: dict[str, Tensor] = {}
    deviations: dict[str, float | None] = {}
    for name, step in steps.items():
        answer = step.answer().detach()
        first = firsts.setdefault(name.split(",")[0], answer)
        deviation = float((answer - first).norm() / first.norm())
        if not deviation <= tolerance:  # NaN is rejected too
            raise UserError(
                f"bench: the result of '{name}' has a relative deviation of {deviation:.1e} from "
                "the first side's, so nothing was timed."
            )
        deviations[name] = None if answer is first else deviation
    return deviations


def by_turns(
    runs: Mapping[str, Callable[[], object]], seconds: float
) -> tuple[str, dict[str, dict[str, float]]]:
    """Time all sides in turn for about `seconds` in total, with at least three rounds.

    Args:
        runs: the sides, by name.
        seconds: the total time.

    Returns:
        the name of the baseline, the fastest of 'real' and the non-private sides; and the times of
        each side, as `compare_times` returns them.
    """
    # Imported only here, because the module looks for a CUDA toolkit and prints if there is none.
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()
    timers = {
        name: Timer("run()", globals={"run": run}, num_threads=threads)
        for name, run in runs.items()
    }
    repeats = {}
    for name, timer in timers.items():
        duration = timer.timeit(1).median
        if duration < 1:
            # The first call also built what later calls reuse, so time a second one if it is short.
            duration = timer.timeit(1).median
        repeats[name] = max(1, int(ROUND_SECONDS / duration))
    times: dict[str, list[float]] = {name: [] for name in runs}  # milliseconds in each round
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < deadline:
        rounds += 1
        for name, timer in timers.items():
            seconds_each = timer.timeit(repeats[name]).median
            times[name].append(1e3 * seconds_each)
    baselines = [name for name in runs if name == "real" or name.startswith("non-private")]
    baseline = min(baselines, key=lambda name: min(times[name]))
    return baseline, compare_times(times, baseline)


def compare_times(times: Mapping[str, list[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Return for each side the milliseconds of its best round, and ratios to the baseline.

    Args:
        times: milliseconds of each round, by the side's name.
        baseline: name of the baseline.

    Returns:
        for each side, the milliseconds of its best round, their ratio to the baseline's, and the
        quartiles of the ratio over the rounds.
    """
    timings = {}
    for name, milliseconds in times.items():
        ratios = list(map(operator.truediv, milliseconds, times[baseline]))
        low, _, high = statistics.quantiles(ratios, n=4)
        timings[name] = {
            "milliseconds": min(milliseconds),
            "ratio": min(milliseconds) / min(times[baseline]),
            "ratio_low": low,
            "ratio_high": high,
        }
    return timings


# ------------------------------------------------------------------------------------------ memory


def peak_memory(workload: Workload, side: str) -> float | None:
    """Return the peak memory of a step in MiB, without that of the interpreter and libraries.

    It is None if the system cannot measure it.

    Raises:
        UserError: the process that measures it failed.
    """
    if not torch.cuda.is_available() and not Path("/proc/self/clear_refs").exists():
        return None
    _call_glibc("malloc_trim", 0)  # return free memory, so that both processes fit
    arguments = json.dumps([asdict(workload), side, torch.get_num_threads()])
    child = subprocess.run(
        [sys.executable, "-m", "zdp_bench.extras.bench.measure", arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines()
        reason = f"its exit code was {child.returncode}; memory may have run out"
        if lines:
            reason = lines[-1]
        raise UserError(f"bench: '{side}' failed while its memory was measured: {reason}")
    return float(child.stdout.strip().splitlines()[-1])


def _measure(workload: dict[str, Any], side: str) -> float:
    """Run two steps in this process, and return their peak memory in MiB."""
    SIDES["warm"](Workload(**workload))  # so that libraries load what they load at first use
    gc.collect()
    if torch.cuda.is_available():
        allocated_before = torch.cuda.memory_allocated()  # such as the workspaces of libraries
        torch.cuda.reset_peak_memory_stats()
        _run_twice(workload, side)
        return (torch.cuda.max_memory_allocated() - allocated_before) / 2**20
    _read_status("VmRSS")  # so that memory for the reading itself is already allocated
    before = _read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, VmHWM
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
    """Make glibc keep freed memory in this process, and return whether it does.

    By default, glibc returns blocks above 32 MiB to the system immediately, so that every step has
    to request new pages: a real convolution took 19 ms instead of 4.
    """
    # M_MMAP_MAX = 0 and M_TRIM_THRESHOLD = -1 (no threshold), with the numbers of malloc.h.
    keeps_large_blocks = _call_glibc("mallopt", -4, 0)
    return keeps_large_blocks and _call_glibc("mallopt", -1, -1)


def _return_memory() -> bool:
    """Make glibc return freed blocks of 64 KiB or more immediately, and return whether it does.

    The step does not need the memory that glibc would keep. Its amount varies between runs by 4 to
    13 %, while the memory in use varies by 0.2 %.
    """
    return _call_glibc("mallopt", -3, 2**16)  # M_MMAP_THRESHOLD


def _call_glibc(function: str, *numbers: int) -> bool:
    """Call a function of glibc; return False if it fails, or if this is another C library."""
    try:
        return bool(getattr(ctypes.CDLL("libc.so.6"), function)(*numbers))
    except (OSError, AttributeError):
        return False


if __name__ == "__main__":
    workload, side, threads = json.loads(sys.argv[1])
    torch.set_num_threads(threads)
    _return_memory()
    print(_measure(workload, side))
