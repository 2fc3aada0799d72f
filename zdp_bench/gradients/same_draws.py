"""Random numbers that are the same for an example whatever batch it is in, for checks.

A model with dropout is compared with itself on other batches. Seeds alone do not give an example
its masks again: a batch of two draws other numbers than two batches of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

SEED = 7  # its first number is 0.53: a mask of one number lets everything pass


@contextmanager
def same_draws(model: nn.Module) -> Iterator[None]:
    """Inside, a random number follows from its place in the last dimension, and nothing else.

    Fused kernels that draw within (attention's, and cuDNN's of recurrent layers) give way to plain
    ones. torch's random state is left where it was.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with (
        torch.random.fork_rng(),
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled and not recurrent),
        _SameDraws(),
    ):
        torch.manual_seed(SEED)
        yield


class _SameDraws(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        kwargs = {key: None if key == "generator" else held for key, held in kwargs.items()}
        torch.manual_seed(SEED)
        kind, tensors = func.overloadpacket.__name__, [a for a in args if isinstance(a, Tensor)]
        first: Any = args[0] if args else None
        if isinstance(first, Tensor) and len(tensors) == 1 and kind.endswith("_"):
            row = first.new_empty(first.shape[-1:])
            return first.copy_(func(row, *args[1:], **kwargs))
        if kind.endswith("_like") or func is torch.ops.aten.bernoulli.p:
            row = func(first.new_empty(first.shape[-1:]), *args[1:], **kwargs)
            return row.expand_as(first).clone()
        if kind == "native_dropout" and args[2]:
            keep = torch.rand(first.shape[-1:], device=first.device) >= args[1]
            keep = keep.expand_as(first).clone()
            return first * keep / max(1 - args[1], 1e-30), keep
        if kind in ("bernoulli", "bernoulli_"):
            p = tensors[-1]
            drawn = (torch.rand(p.shape[-1:], device=p.device) < p).to(first.dtype)
            return first.copy_(drawn) if kind == "bernoulli_" else drawn
        if kind == "normal" and tensors:
            both = (torch.as_tensor(a, device=tensors[0].device) for a in (*args, 1.0)[:2])
            mean, std = torch.broadcast_tensors(*both)
            return mean + std * torch.randn(mean.shape[-1:], device=mean.device, dtype=mean.dtype)
        sizes = [at for at, argument in enumerate(args) if isinstance(argument, list | tuple)]
        if not tensors and sizes:
            size = list(args[sizes[0]])
            row = func(*args[: sizes[0]], size[-1:], *args[sizes[0] + 1 :], **kwargs)
            return row.expand(size).clone()
        if tensors and tensors[0].dim() and not kind.startswith("_scaled_dot_product"):
            return self._by_rows(func, args, kwargs, len(tensors[0]))
        return func(*args, **kwargs)

    @staticmethod
    def _by_rows(func: Any, args: Any, kwargs: Any, rows: int) -> Any:
        """Run it on one example after another, each from the same seed."""
        found = []
        for at in range(rows):
            torch.manual_seed(SEED)
            own = [
                a[at : at + 1] if isinstance(a, Tensor) and a.dim() and len(a) == rows else a
                for a in args
            ]
            found.append(func(*own, **kwargs))
        if not rows or not isinstance(found[0], Tensor):
            return func(*args, **kwargs)
        return torch.cat(found)
