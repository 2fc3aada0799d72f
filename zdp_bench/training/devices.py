"""Where a run computes, and in which arithmetic: the device, a GPU of its own for each job, float32 unless another was asked for.

Nothing here is left to torch's defaults, which allow TF32 in cuDNN's convolutions: a result must not depend on who built it.
Norms, sums of clipped gradients and noise are in float32 or wider whatever is asked for, so

    precision: null    float32 in forward and backward pass
               tf32    TensorFloat-32 products (10 bits). Not for private algorithms: their clipped sums are products too, and
                       would differ from what was measured and clipped by more than the clipping allows for
               bf16    forward pass under autocast, for real networks, and for algorithms that say they keep their sums in float32
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError, unknown

T = TypeVar("T")

PRECISIONS = ("tf32", "bf16")


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one; beside other ranks on this machine, the GPU of this one's number.

    Raises:
        UserError: a CUDA device was asked for that is not there.
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
            f"device={name}: this machine has {torch.cuda.device_count()} CUDA devices. Use device=auto or device=cpu."
        )
    return device


@contextmanager
def reserve_gpu(name: str, folder: Path | None = None) -> Iterator[str]:
    """A GPU that no other job of this user computes on, held until the end: for `device=auto` beside other jobs of a sweep.

    Yields the device's name. Where every GPU has its job, or there is at most one, `name` is yielded as it came: GPUs are then
    shared, as without this.
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
    import fcntl

    folder = folder or Path(tempfile.gettempdir()) / f"zdp-bench-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(
        ","
    )  # Slurm shows each job its own: name what is behind a number
    with ExitStack() as held:
        for number in range(torch.cuda.device_count()):
            behind = visible[number] if len(visible) == torch.cuda.device_count() else str(number)
            lock: TextIO = held.enter_context(
                open(folder / f"gpu-{behind.replace('/', '-')}.lock", "w")
            )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            yield f"cuda:{number}"
            return
        yield name


@contextmanager
def arithmetic(
    precision: str | None,
    deterministic: bool,
    model: nn.Module,
    algorithm: Any,
    device: torch.device,
) -> Iterator[None]:
    """Within, torch computes as the policy above says; what was set before is set again at the end.

    Raises:
        UserError: this precision would not do what it says for this model or algorithm.
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
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # read when CUDA's context is made
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
    """Refuse a precision that would not do what it says.

    Raises:
        UserError: as `arithmetic` does.
    """
    if precision is None:
        return
    if precision not in PRECISIONS:
        raise unknown("precision", precision, [*PRECISIONS, "null"])
    private = getattr(algorithm, "private", True)
    if precision == "tf32" and private:
        raise UserError(
            "precision=tf32 is for non-private training: a clipped sum made of TF32 products passes its bound. Leave it out, or "
            "take precision=bf16."
        )
    if precision == "bf16" and private and not getattr(algorithm, "sums_in_float32", False):
        raise UserError(
            f"precision=bf16: {type(algorithm).__name__} does not keep its clipped sums in float32. Leave it out."
        )
    if precision == "bf16" and any(parameter.is_complex() for parameter in model.parameters()):
        raise UserError(
            "precision=bf16: there are no complex numbers of bfloat16, and this model has complex parameters."
        )


def _autocast(model: nn.Module, device: torch.device) -> list[Any]:
    """bfloat16 in the model's forward pass and nowhere else; its output is float32 again."""
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


# ------------------------------------------------------------------------------------------------------------- input


def pinned(device: torch.device) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """What puts a batch where a GPU can fetch it by itself, while it computes; the batch as it is for a CPU."""
    if device.type != "cuda":
        return lambda batch: batch
    return lambda batch: (batch[0].pin_memory(), batch[1].pin_memory())


def read_ahead(values: Iterator[T], count: int) -> Iterator[T]:
    """The same values in the same order, `count` of them read ahead by another thread; none read ahead for 0."""
    if count < 1:
        yield from values
        return
    end: Any = object()
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, "input", initializer=torch.set_num_threads, initargs=(1,)) as reader:
        waiting = deque(reader.submit(next, values, end) for _ in range(count))
        torch.set_num_threads(threads)  # which the reader has changed for threads yet to come
        while (value := waiting.popleft().result()) is not end:
            waiting.append(reader.submit(next, values, end))
            yield value
