"""Measure the peak memory of one step in a process of its own.

So nothing that another side left behind counts, nor what this process's allocator keeps in hand.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from zdp_bench.errors import UserError
from zdp_bench.extras.bench.steps import SIDES
from zdp_bench.extras.bench.workload import Workload


def peak_memory(workload: dict[str, Any], side: str, threads: int) -> float | None:
    """Return the peak memory of a side's step in MiB: weights, batch and noise, without the
    interpreter and its libraries.

    None where the system does not say; Linux does.

    Raises:
        UserError: the process failed.
    """
    if torch.cuda.is_available():
        return _measure(workload, side)
    if not Path("/proc/self/clear_refs").exists():
        return None
    _call_glibc("malloc_trim", 0)  # both processes must fit
    question = json.dumps({"workload": workload, "side": side, "threads": threads})
    child = subprocess.run(
        [sys.executable, "-m", "zdp_bench.extras.bench.peak_memory", question],
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


def _measure(workload: dict[str, Any], side: str) -> float:
    """Run two steps in this process."""
    cuda = torch.cuda.is_available()
    _read_status("VmRSS")
    SIDES["warm"](Workload(**workload))  # loads what libraries load when they are first used
    before = 0.0 if cuda else _read_status("VmRSS")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    step = SIDES[side](Workload(**workload))
    for _ in range(2):
        step.run()
    return torch.cuda.max_memory_allocated() / 2**20 if cuda else _read_status("VmHWM") - before


def _read_status(field: str) -> float:
    """A memory field of this process, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def hold_memory() -> bool:
    """Let freed memory stay with this process if the C library is glibc; returns whether it is.

    glibc gives blocks above 32 MiB back to the system at once, so every step of every side would
    pay for fresh pages: a real convolution took 19 ms instead of 4.
    """
    # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h; -1 means no threshold
    return _call_glibc("mallopt", -4, 0) and _call_glibc("mallopt", -1, -1)


def _return_memory() -> bool:
    """Let every freed block of 64 KiB or more go back to the system at once if the C library is
    glibc.

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
    question = json.loads(sys.argv[1])
    torch.set_num_threads(question["threads"])
    _return_memory()
    print(_measure(question["workload"], question["side"]))
