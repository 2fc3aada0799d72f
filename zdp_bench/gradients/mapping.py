"""`torch.vmap` without its warnings about speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import vmap


def map_rows(
    function: Callable[..., Any],
    *arguments: Any,
    in_dims: int | tuple[int | None, ...] = 0,
    randomness: str = "error",
) -> Any:
    """Return `torch.vmap(function, in_dims, randomness=randomness)(*arguments)`.

    At every step, torch would warn about each operation that has no batching rule. The warning is
    of no use to users, who do not call vmap themselves.
    """
    with _without_fallback_warnings():
        return vmap(function, in_dims=in_dims, randomness=randomness)(*arguments)


@contextmanager
def _without_fallback_warnings() -> Iterator[None]:
    functorch: Any = torch._C._functorch  # torch has no public name for it
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)
