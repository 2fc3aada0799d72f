"""Control the precision of float32 products, whose factors torch may round to TF32 or bfloat16.

By default, convolutions on a GPU use TF32, with relative errors of 1e-3. A correct sum then differs
from the sum of its shares by more than rounding errors, and a clipped gradient can exceed its
bound.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


@contextmanager
def float32_products(kind: Literal["ieee", "tf32"] = "ieee") -> Iterator[None]:
    """Compute float32 products with the given precision inside the block, on all devices.

    torch has two interfaces for this precision, and reading one raises an error if they disagree.
    Both are therefore set, and both restored afterwards.
    """
    backends: Any = torch.backends  # `Any`, because its annotations lack the newer interface
    settings = [
        backends,
        backends.cuda.matmul,
        backends.cudnn,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    ]

    def put(
        kinds: list[str],
        matmul: str | None,
        convolutions: bool | None,
    ) -> None:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if convolutions is not None:
            backends.cudnn.allow_tf32 = convolutions
        # After the older interface, because setting that one changes these.
        for setting, precision in zip(settings, kinds, strict=True):
            setting.fp32_precision = precision

    before = [setting.fp32_precision for setting in settings]
    matmul = None
    convolutions = None
    with suppress(RuntimeError):
        matmul = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        convolutions = backends.cudnn.allow_tf32
    exact = kind == "ieee"
    put([kind] * len(settings), "highest" if exact else "high", not exact)
    try:
        yield
    finally:
        put(before, matmul, convolutions)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms on an accelerator inside the block, where they exist."""
    if device.type == "cpu":
        yield
        return
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Dd]eterministic")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


# model whose forward pass runs in bfloat16 -> the autocast context that it runs in
REGIONS: WeakKeyDictionary[nn.Module, torch.autocast] = WeakKeyDictionary()


_in_float32: ContextVar[bool] = ContextVar("_in_float32", default=False)


@contextmanager
def float32_forward() -> Iterator[None]:
    """Run the forward pass of all models in float32 inside the block, as users of weights do."""
    token = _in_float32.set(True)
    try:
        yield
    finally:
        _in_float32.reset(token)


def region_of(model: nn.Module) -> torch.autocast | None:
    """Return the autocast context of a model's forward pass; None if it runs in float32."""
    return None if _in_float32.get() else REGIONS.get(model)


@contextmanager
def forward_precision(model: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Run a model's operations in the precision of its forward pass.

    Yields:
        The function to apply to the output of the operations.
    """
    region = region_of(model)
    if region is None:
        yield lambda output: output
        return
    with region:
        yield to_float32


def to_float32(output: Tensor) -> Tensor:
    """Return the output of a forward pass in bfloat16 as float32; leave other types as they are."""
    return output.float() if output.dtype == torch.bfloat16 else output
