"""Check the fast engine against plain autograd, on two examples of a model's first batch.

`tape.py` refuses what it can see: a parameter used elsewhere, an input whose length is not the
batch's. It cannot see a layer whose first dimension has the batch's length by chance (time first,
as many steps as examples), nor examples mixed between layers. Two examples alone show both.

A model with dropout is compared with itself on other batches, where seeds alone do not give an
example its masks again: a batch of two draws other numbers than two batches of one. `same_draws`
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from zdp_bench.gradients import fast, reference
from zdp_bench.gradients.clipping import Batch, Loss, groups
from zdp_bench.gradients.losses import kept_draws, seed_torch, set_seed

# For float32 on a badly conditioned network; a wrong gradient is off by its whole size.
TOLERANCE = 1e-2


def agrees(model: nn.Module, loss: Loss, batch: Batch) -> bool:
    """True if fast's norms and clipped sum of the first two examples are those of each alone.

    Dropout draws the same masks for an example in all passes (`same_draws`).
    """
    two = batch[0][:2], batch[1][:2]
    full = torch.autocast(two[0].device.type, enabled=False)
    with full, same_draws():
        # First, as it raises: what fast cannot serve may not run on one example either.
        fast.clipped_sum(model, loss, two, 1.0)
        gradients = reference.one_by_one(model, loss, two)
        norms = reference.clip(gradients, groups(model, 1.0, per_layer=False))[1][:, 0]
        if not torch.isfinite(norms).all():
            return True  # such examples contribute nothing, whatever the engine
        bound = float(norms.max()) / 2 or 1.0
        clipped, _ = reference.clip(gradients, groups(model, bound, per_layer=False))
        ours = fast.clipped_sum(model, loss, two, bound)
    right = bool(((ours.norms - norms).abs() <= TOLERANCE * norms).all())
    return right and all(
        float((ours.sums[name] - each.sum(dim=0)).abs().max()) <= TOLERANCE * bound
        for name, each in clipped.items()
    )


# ------------------------------------------------------------------ the same draws in every batch

SEED = 7  # its first number is 0.53: a mask of one number lets everything pass


@contextmanager
def same_draws() -> Iterator[None]:
    """Inside, a random number follows from its place in the last dimension, and nothing else.

    Fused kernels that draw within (attention's, and cuDNN's of recurrent layers) give way to plain
    ones, and cuDNN's convolutions too, which round otherwise for another number of examples.
    Python's and numpy's start anew. All random states are left where they were.
    """
    cudnn, enabled = torch.backends.cudnn, torch.backends.cudnn.enabled
    cudnn.enabled = False  # not by `cudnn.flags`, which turns TF32 on
    try:
        plain = sdpa_kernel(SDPBackend.MATH)
        with kept_draws(), plain, _SameDraws():
            set_seed(SEED)
            yield
    finally:
        cudnn.enabled = enabled


class _SameDraws(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        kwargs = {key: None if key == "generator" else held for key, held in kwargs.items()}
        seed_torch(SEED)
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
            seed_torch(SEED)
            own = [
                a[at : at + 1] if isinstance(a, Tensor) and a.dim() and len(a) == rows else a
                for a in args
            ]
            found.append(func(*own, **kwargs))
        if not rows or not isinstance(found[0], Tensor):
            return func(*args, **kwargs)
        return torch.cat(found)
