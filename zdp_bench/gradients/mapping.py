"""`torch.vmap` without its warnings about speed, and without decisions for all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, vmap
from torch._functorch.autograd_function import custom_function_call
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.overrides import TorchFunctionMode


def map_rows(
    function: Callable[..., Any],
    *arguments: Any,
    in_dims: int | tuple[int | None, ...] = 0,
    randomness: str = "error",
) -> Any:
    """Return `torch.vmap(function, in_dims, randomness=randomness)(*arguments)`.

    At every step, torch would warn about each operation that has no batching rule. The warning is
    of no use to users, who do not call vmap themselves.

    Raises:
        RuntimeError: an operation failed, even if `function` handled the error: it fails for all
            rows if it fails for one of them. Or `function` asked whether all rows are true, or its
            own code receives all rows: the `vmap` of an `autograd.Function`, or a hook for saved
            tensors.
    """
    no_hooks = disable_saved_tensors_hooks("hooks for saved tensors receive all rows")
    with no_hooks, _without_fallback_warnings(), _Watch() as watch:
        results = vmap(function, in_dims=in_dims, randomness=randomness)(*arguments)
    if watch.mixes_rows:
        raise RuntimeError("the function processes all rows at once")
    return results


class _Watch(TorchFunctionMode):
    """Notices calls that fail, decide or run for all rows together."""

    mixes_rows = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        is_decision = func in (torch._is_all_true, torch._is_any_true)
        if is_decision or _has_batching_rule_of_a_user(func, args):
            self.mixes_rows = True
        if func is F.one_hot:
            func = _one_hot
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.mixes_rows = True
            raise


def _one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """Do what `F.one_hot` does, whose batching rule accepts classes out of range.

    No other function of torch is known that checks less for several rows than for one.
    """
    if num_classes < 1:
        return F.one_hot(input, num_classes)
    zeros = torch.zeros(*input.shape, num_classes, dtype=torch.int64, device=input.device)
    return zeros.scatter(-1, input.unsqueeze(-1), 1)


def _has_batching_rule_of_a_user(function: Any, args: Any) -> bool:
    """Return True for a call of an `autograd.Function` or a custom operator with its own vmap."""
    if function is custom_function_call:
        return args[0].vmap is not torch.autograd.Function.vmap
    if isinstance(function, OpOverload | OpOverloadPacket):
        # Whether `torch.library.register_vmap` was called for an operator cannot be queried.
        return not str(function).startswith(("aten.", "prim.", "prims."))
    return False


@contextmanager
def _without_fallback_warnings() -> Iterator[None]:
    functorch: Any = torch._C._functorch  # torch has no public name for it
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)
