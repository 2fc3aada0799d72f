"""The device of a run, and its precision.

    precision: null    float32 in forward and backward pass
               tf32    TensorFloat-32 products (10 bits). Not for private algorithms: their clipped
                       sums are such products too, and would exceed the bound they were clipped to
               bf16    forward pass under autocast, for real networks and for algorithms that keep
                       their sums in float32

Norms, sums of clipped gradients and noise are in float32 or wider with any of them. torch's
defaults are not relied on: they allow TF32 in cuDNN's convolutions.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from zdp_bench.errors import Busy, UserError, unknown
from zdp_bench.records import hold_lock

T = TypeVar("T")

PRECISIONS = ("tf32", "bf16")


def pick_device(name: str) -> torch.device:
    """Return the device. `auto` is CUDA if there is one, and of several ranks' GPUs this rank's.

    Raises:
        UserError: there is no such CUDA device.
    """
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
def reserve_gpu(name: str, folder: Path | None = None) -> Iterator[str]:
    """Hold a GPU that no other job of this user holds, for `device=auto` in a sweep.

    Yields the device's name, or `name` itself if every GPU is held or there is at most one: then
    the jobs share them.

    Raises:
        UserError: the locks' folder is not this user's own.
    """
    several = (
        name == "auto"
        and "LOCAL_RANK" not in os.environ
        and torch.cuda.is_available()
        and torch.cuda.device_count() > 1
    )
    if not several:
        yield name
        return
    folder = folder or Path(tempfile.gettempdir()) / f"zdp-bench-{os.getuid()}"
    _make_own(folder)
    # Slurm numbers the GPUs of each job anew: locks go by the GPU behind a number.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    with ExitStack() as held:
        for number in range(torch.cuda.device_count()):
            behind = visible[number] if len(visible) == torch.cuda.device_count() else str(number)
            path = folder / f"gpu-{behind.replace('/', '-')}.lock"
            try:
                held.enter_context(hold_lock(path, wait=False))
            except Busy:
                continue
            yield f"cuda:{number}"
            return
        yield name


def _make_own(folder: Path) -> None:
    """Make a folder in which nobody else can write; what another user left in /tmp is refused.

    Raises:
        UserError: it is a link, another user's, or open to others.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"{folder}: is not a folder that only you can write to, so no GPU is reserved by a "
            "file in it. Delete it, let TMPDIR name another place, or name the GPU: device=cuda:0."
        )


@contextmanager
def arithmetic(
    precision: str | None,
    deterministic: bool,
    model: nn.Module,
    algorithm: Any,
    device: torch.device,
) -> Iterator[None]:
    """Have torch compute in the precision within; see the module for what each means.

    Raises:
        UserError: the precision does not suit the model or the algorithm.
    """
    check_precision(precision, model, algorithm)
    before = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )
    hooks = _autocast(model, device) if precision == "bf16" else []
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if deterministic:
        # Read when CUDA's context is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        torch.use_deterministic_algorithms(before[2])


def check_precision(precision: str | None, model: nn.Module, algorithm: Any) -> None:
    """Refuse a precision that does not suit the model or the algorithm.

    Raises:
        UserError: says why.
    """
    if precision is None:
        return
    if precision not in PRECISIONS:
        raise unknown("precision", precision, [*PRECISIONS, "null"])
    private = getattr(algorithm, "private", True)
    if precision == "tf32" and private:
        raise UserError(
            "precision=tf32 is for non-private training: a clipped sum made of TF32 products "
            "passes its bound. Leave it out, or take precision=bf16."
        )
    if precision == "bf16" and private and not getattr(algorithm, "sums_in_float32", False):
        raise UserError(
            f"precision=bf16: {type(algorithm).__name__} does not keep its clipped sums in "
            "float32. Leave it out."
        )
    if precision == "bf16" and any(parameter.is_complex() for parameter in model.parameters()):
        raise UserError(
            "precision=bf16: there are no complex numbers of bfloat16, and this model has complex "
            "parameters."
        )


def _autocast(model: nn.Module, device: torch.device) -> list[Any]:
    """Have the model's forward pass compute in bfloat16 and return float32; return the hooks."""
    region = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
        region.__exit__(None, None, None)
        return output.float() if isinstance(output, torch.Tensor) else output

    def enter(module: nn.Module, inputs: Any) -> None:
        region.__enter__()

    return [
        model.register_forward_pre_hook(enter),
        model.register_forward_hook(leave, always_call=True),
    ]
