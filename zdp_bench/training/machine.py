"""Choose a run's device and precision, and describe its machine, software and code.

    precision: null    float32 in forward and backward pass
               tf32    TensorFloat-32 products (10 bits). Not for private algorithms, whose clipped
                       sums would also be such products and exceed their bound
               bf16    forward pass of training under autocast, for real networks and for
                       algorithms that keep their sums in float32

In any precision, private norms, sums of clipped gradients, noise and evaluation are in float32 or
wider. torch's defaults are overridden, because they allow TF32 in cuDNN's convolutions.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zdp_bench import __version__, registry
from zdp_bench.assets import CONF
from zdp_bench.disk import walk
from zdp_bench.errors import UserError, is_for_python, setting, unknown
from zdp_bench.nn.precision import REGIONS, float32_products, region_of, to_float32

PRECISIONS = ("tf32", "bf16")
# Packages that compute the bits of a step, or read the examples.
LIBRARIES = ("torch", "numpy", "scipy", "cryptography", "Pillow", "nibabel", "h5py", "SimpleITK")
# Environment variables with these prefixes choose the kernels of a product on a CPU.
KERNELS = ("MKL_", "ONEDNN_", "DNNL_", "ATEN_CPU_")

Plugins = Sequence[tuple[str, str]]  # (kind, name) of each plug-in that a run uses


def pick_device(name: str) -> torch.device:
    """Return the device. `auto` is CUDA if available, with one GPU for each local rank."""
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        )
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device={name}: this machine has {torch.cuda.device_count()} CUDA devices. Use "
            "device=auto or device=cpu."
        )
    return device


@contextmanager
def arithmetic(
    precision: str | None,
    deterministic: bool,
    model: nn.Module,
    algorithm: Any,
    device: torch.device,
) -> Iterator[None]:
    """Set torch's precision inside the block.

    Args:
        precision: None, "tf32" or "bf16"; see the module's docstring.
        deterministic: whether torch must use deterministic algorithms.
        model: the model, whose forward pass runs under autocast with "bf16".
        algorithm: the algorithm, whose demands on the precision are checked.
        device: where the model is.

    Raises:
        UserError: the precision does not suit the model or the algorithm.
    """
    check_precision(precision, model, algorithm)
    hooks = _autocast(model, device) if precision == "bf16" else []
    if deterministic:
        # CUDA reads this variable when its context is created.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        debug_mode = torch.get_deterministic_debug_mode()
        torch.use_deterministic_algorithms(True)
    try:
        with float32_products("tf32" if precision == "tf32" else "ieee"):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        REGIONS.pop(model, None)
        if deterministic:
            torch.set_deterministic_debug_mode(debug_mode)


def check_precision(
    precision: str | None,
    model: nn.Module,
    algorithm: Any,
) -> None:
    """Reject a precision that does not suit the model or the algorithm."""
    if precision is None:
        return
    if precision not in PRECISIONS:
        raise unknown("precision", precision, [*PRECISIONS, "None" if is_for_python() else "null"])
    private = algorithm.mechanism().is_private
    if precision == "tf32" and private:
        raise UserError(
            f"{setting('precision', 'tf32')} is for non-private training: a clipped sum of TF32 "
            f"products exceeds its bound. Remove it, or use {setting('precision', 'bf16')}."
        )
    if precision == "bf16" and private and not algorithm.sums_in_float32:
        raise UserError(
            f"{setting('precision', 'bf16')}: {type(algorithm).__name__} does not keep its clipped "
            "sums in float32. Remove it."
        )
    if precision == "bf16" and any(parameter.is_complex() for parameter in model.parameters()):
        raise UserError(
            f"{setting('precision', 'bf16')}: this model has complex parameters, and bfloat16 has "
            "no complex type."
        )


def _autocast(model: nn.Module, device: torch.device) -> list[Any]:
    """Make the model's forward pass run in bfloat16 and return float32. Return the hooks."""
    region = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    def leave(
        module: nn.Module,
        inputs: Any,
        output: Any,
    ) -> Any:
        if region_of(model) is None:
            return output
        region.__exit__(None, None, None)
        return to_float32(output) if isinstance(output, torch.Tensor) else output

    def enter(module: nn.Module, inputs: Any) -> None:
        if region_of(model):
            region.__enter__()

    REGIONS[model] = region
    return [
        model.register_forward_pre_hook(enter),
        model.register_forward_hook(leave, always_call=True),
    ]


def environment(device: torch.device, plugins: Plugins = ()) -> dict[str, Any]:
    """Return a record's section on device, threads, versions, plug-ins and commit.

    Args:
        device: device of the run.
        plugins: plug-ins that the run uses.
    """
    digests = plugin_digests(plugins)
    packages = ("torch", "numpy", "scipy", "dp-accounting", "hydra-core", "scikit-learn")
    is_cuda = device.type == "cuda"
    device_name = torch.cuda.get_device_name(device) if is_cuda else f"cpu ({platform.machine()})"
    return {
        "device": device_name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"zdp-bench": __version__} | {name: _version(name) for name in packages},
        "commit": git_commit(),
        **({"plugins": digests} if digests else {}),
    }


@cache
def git_commit() -> str | None:
    """Return the checkout's commit, with `-dirty` if its code was changed, or None if installed."""
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


def foreign_code(plugins: Plugins) -> str:
    """Return this package's version, and a digest of the files of third-party plug-ins.

    The digest does not cover this package's own files, so that a run has the same noise after the
    next commit.
    """
    return f"{__version__}:{_digest_of(registry.foreign_packages(plugins))}"


def plugin_digests(plugins: Plugins) -> dict[str, str]:
    """Return a digest of the files of each third-party package with one of the plug-ins."""
    packages = {registry.package_of(*plugin) for plugin in plugins} - {"zdp_bench"}
    return {package: _digest_of((package,)) for package in sorted(packages)}


def execution_digest(
    plugins: Plugins,
    device: torch.device,
    micro_batch: int,
    ranks: int,
    deterministic: bool,
) -> str:
    """Return a SHA-256 of what determines a step's bits, except for its key and starting state.

    It is empty on a GPU without `execution.deterministic`, where no step can be repeated bit for
    bit.

    Args:
        plugins: plug-ins that the run uses.
        device: device of the run.
        micro_batch: size of the micro-batches.
        ranks: number of processes.
        deterministic: whether torch's deterministic algorithms are used.
    """
    if device.type != "cpu" and not deterministic:
        return ""
    libraries = {name: _version(name) for name in LIBRARIES}
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    else:
        # Kernels are chosen by the model, not only by its instructions.
        chip = f"{processor_name()} {torch.backends.cpu.get_cpu_capability()}"
    kernels = {key: os.environ[key] for key in sorted(os.environ) if key.startswith(KERNELS)}
    machine = device.type, chip, platform.machine(), torch.get_num_threads()
    facts = code_digest(plugins), libraries, *machine, ranks, micro_batch, kernels
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def join_digests(digests: Sequence[str]) -> str:
    """Return one digest of the execution digests of all ranks; empty if one of them is."""
    if not all(digests):
        return ""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


@cache  # each call of `version` takes a millisecond
def _version(name: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@cache
def processor_name() -> str:
    """Return the model of the CPU or, if it is not known, its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    for line in lines:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def code_digest(plugins: Plugins) -> str:
    """Return a SHA-256 of all Python files of this package and of third-party plug-ins."""
    return _digest_of(("zdp_bench", *registry.foreign_packages(plugins)))


def _find_code(folder: Path) -> list[Path]:
    """Return the Python files of a package's folder, also those in linked subpackages, sorted."""
    paths = []
    for subfolder, names in walk(folder):
        paths += [subfolder / name for name in names if name.endswith(".py")]
    return sorted(paths)


@cache
def _digest_of(packages: tuple[str, ...]) -> str:
    """Return a SHA-256 of the paths and contents of all Python files in imported packages."""
    chain = hashlib.sha256()
    for name in packages:
        module = sys.modules[name]
        folders = [Path(folder) for folder in getattr(module, "__path__", ())]
        files = [(file, folder) for folder in folders for file in _find_code(folder)]
        if not files and getattr(module, "__file__", None):  # a package of a single file
            file = Path(str(module.__file__))
            files = [(file, file.parent)]
        for file, folder in files:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            chain.update(f"{name}/{file.relative_to(folder).as_posix()}:{content};".encode())
    return chain.hexdigest()


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if os.uname().sysname == "Darwin" else 1024  # macOS reports bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
