"""Map a function over a batch's rows by `torch.vmap`, without its warnings about speed."""

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

    torch warns about each operation without a rule of its own for a batch, at every step. A user
    cannot act on that, because the operation is in the model and the mapping is ours.
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
