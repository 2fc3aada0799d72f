"""How a product of float32 numbers is computed: torch may round its factors to TF32 or bfloat16.

A GPU's convolutions take TF32 unless they are told not to, which is off by 1e-3: a right sum then
differs from its shares by more than rounding, and a clipped gradient passes its bound.
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
    """Compute float32 products with this precision inside the context, on every device.

    torch has two interfaces for it, and reading one raises where they disagree: both are set, and
    both set back.
    """
    backends: Any = torch.backends  # whose annotations lack the newer interface
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
        for setting, one in zip(settings, kinds, strict=True):  # last: the older ones change them
            setting.fp32_precision = one

    before, matmul, convolutions = [each.fp32_precision for each in settings], None, None
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
    """Make an accelerator's sums repeatable where possible."""
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


# Models whose forward pass runs in bfloat16, and the region that it runs in.
REGIONS: WeakKeyDictionary[nn.Module, torch.autocast] = WeakKeyDictionary()


_in_float32: ContextVar[bool] = ContextVar("_in_float32", default=False)


@contextmanager
def float32_forward() -> Iterator[None]:
    """Run every model's forward pass in float32 inside, as whoever gets the weights will."""
    before = _in_float32.set(True)
    try:
        yield
    finally:
        _in_float32.reset(before)


def region_of(model: nn.Module) -> torch.autocast | None:
    """Return the region that a model's forward pass runs in now; None in float32."""
    return None if _in_float32.get() else REGIONS.get(model)


@contextmanager
def forward_precision(model: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Run a model's operations as its own forward function would run; yield what ends them."""
    region = region_of(model)
    if region is None:
        yield lambda output: output
        return
    with region:
        yield Tensor.float
