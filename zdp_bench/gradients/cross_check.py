"""Check the fast engine against plain autograd, on two examples of a model's first batch.

`tape.py` refuses what it can see: a parameter used elsewhere, an input whose length is not the
batch's. It cannot see a layer whose first dimension has the batch's length by chance (time first,
as many steps as examples), nor examples mixed between layers. Two examples alone show both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zdp_bench import kernels
from zdp_bench.gradients import fast, reference
from zdp_bench.gradients.clipping import Batch, Loss, groups, trainable
from zdp_bench.gradients.losses import per_example
from zdp_bench.gradients.same_draws import same_draws

# For float32 on a badly conditioned network; a wrong gradient is off by its whole size.
TOLERANCE = 1e-2


def agrees(model: nn.Module, loss: Loss, batch: Batch) -> bool:
    """True if fast's norms and clipped sum of the first two examples are those of each alone.

    Dropout draws the same masks for an example in all passes (`same_draws`).

    Raises:
        NoRule: fast cannot serve the model.
    """
    two = batch[0][:2], batch[1][:2]
    full = torch.autocast(two[0].device.type, enabled=False)
    with full, kernels.disabled(), same_draws(model):
        # First, as it raises: what fast cannot serve may not run on one example either.
        fast.clipped_sum(model, loss, two, 1.0)
        gradients = _one_by_one(model, loss, two)
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


def _one_by_one(model: nn.Module, loss: Loss, batch: Batch) -> dict[str, Tensor]:
    """Return the gradients of every example from a pass of its own, [B, *shape] by name."""
    parameters = trainable(model)
    each: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for x, target in zip(batch[0].split(1), batch[1].split(1), strict=True):
        with torch.enable_grad():
            one = per_example(loss).of_one(model(x), target).sum()
        found: Sequence[Tensor | None] = [None] * len(parameters)
        if one.requires_grad:
            found = torch.autograd.grad(one, [*parameters.values()], allow_unused=True)
        for (name, parameter), g in zip(parameters.items(), found, strict=True):
            each[name].append(torch.zeros_like(parameter) if g is None else g)
    return {name: torch.stack(gradients) for name, gradients in each.items()}
