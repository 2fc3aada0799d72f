"""The machine and the software of a run: device, versions, code, commit, memory."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from zdp_bench import __version__, kernels, registry
from zdp_bench.assets import CONF

Plugins = Sequence[tuple[str, str]]  # (kind, name) of those a run is made of


def environment(device: torch.device, used: Plugins = ()) -> dict[str, Any]:
    """Return the section of a record that names device, threads, versions, plug-ins and commit."""
    plugins = plugin_digests(used)
    named = ("torch", "numpy", "scipy", "dp-accounting", "hydra-core", "scikit-learn")
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"zdp-bench": __version__} | {name: _version(name) for name in named},
        "commit": git_commit(),
        **({"plugins": plugins} if plugins else {}),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Return the checkout's commit, with `-dirty` if its code was changed; None if installed."""
    root = CONF.parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if not (root / ".git").exists():
            return None
        changed = git("status", "--porcelain", "--", "zdp_bench", "conf", "recipes", "datasets")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def foreign_code(used: Plugins) -> str:
    """Return this package's version and a digest of the files of plug-ins from other packages.

    This package's own files are left out: a run repeats bit for bit from one commit to the next, as
    long as no number changes.
    """
    return f"{__version__}:{_digest_of(registry.foreign_packages(used))}"


def plugin_digests(used: Plugins) -> dict[str, str]:
    """Return a digest of the files of each other package that has a plug-in in use.

    It is part of what names a run: another code is another run.
    """
    packages = {registry.package_of(*one) for one in used} - {"zdp_bench"}
    return {package: _digest_of((package,)) for package in sorted(packages)}


def execution_digest(
    used: Plugins, device: torch.device, micro_batch: int, ranks: int, deterministic: bool
) -> str:
    """Return the SHA-256 of all that decides a step's bits, beside its key and starting state.

    It is empty on a GPU without `execution.deterministic`, where no step repeats bit for bit.
    """
    if device.type != "cpu" and not deterministic:
        return ""
    libraries = {name: _version(name) for name in ("torch", "numpy", "numba", "llvmlite", "scipy")}
    chip = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    what = (
        code_digest(used),
        libraries,
        device.type,
        chip,
        platform.machine(),
        torch.get_num_threads(),
        kernels.enabled(),
        ranks,
        micro_batch,
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()


def code_digest(used: Plugins) -> str:
    """Return the SHA-256 of all files of this package and of the plug-ins."""
    return _digest_of(("zdp_bench", *registry.foreign_packages(used)))


@cache
def _digest_of(packages: tuple[str, ...]) -> str:
    """Return the SHA-256 of the paths and contents of all Python files of imported packages."""
    chain = hashlib.sha256()
    for name in packages:
        module = sys.modules[name]
        folders = [Path(folder) for folder in getattr(module, "__path__", ())]
        files = [(file, folder) for folder in folders for file in sorted(folder.rglob("*.py"))]
        if not files and getattr(module, "__file__", None):
            files = [(Path(str(module.__file__)), Path(str(module.__file__)).parent)]
        for file, folder in files:
            chain.update(f"{name}/{file.relative_to(folder).as_posix()}:{_sha256(file)};".encode())
    return chain.hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: allocated on the GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilo = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo
