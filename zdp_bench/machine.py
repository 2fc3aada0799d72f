"""What a run was made on and with: device, versions, commit, memory."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from zdp_bench import __version__
from zdp_bench.assets import CONF


def environment(device: torch.device) -> dict[str, Any]:
    """What a run was made on and with."""
    named = ("torch", "numpy", "scipy", "dp-accounting", "hydra-core", "scikit-learn")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"zdp-bench": __version__} | {name: _version(name) for name in named},
        "commit": git_commit(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit of the checkout this code runs from, `-dirty` when its code was changed; None for an installed package."""
    root = CONF.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not (root / ".git").exists():
            return None
        changed = git("status", "--porcelain", "--", "zdp_bench", "conf", "recipes", "datasets")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilo = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo
