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

# For float32 on a badly conditioned network; a wrong gradient is off by its whole size.
TOLERANCE = 1e-2


def agrees(model: nn.Module, loss: Loss, batch: Batch) -> bool:
    """True if fast's norms and clipped sum of the first two examples are those of each alone.

    A model that draws random numbers (dropout) is not checked: no two passes of it are the same.

    Raises:
        NoRule: fast cannot serve the model.
    """
    two = batch[0][:2], batch[1][:2]
    device = two[0].device
    with torch.random.fork_rng(), torch.autocast(device.type, enabled=False), kernels.disabled():
        # First, as it raises: what fast cannot serve may not run on one example either.
        fast.clipped_sum(model, loss, two, 1.0)
        before = _random_state(device)
        gradients = _one_by_one(model, loss, two)
        if not torch.equal(before, _random_state(device)):
            return True
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
            one = loss(model(x), target).sum()
        found: Sequence[Tensor | None] = [None] * len(parameters)
        if one.requires_grad:
            found = torch.autograd.grad(one, [*parameters.values()], allow_unused=True)
        for (name, parameter), g in zip(parameters.items(), found, strict=True):
            each[name].append(torch.zeros_like(parameter) if g is None else g)
    return {name: torch.stack(gradients) for name, gradients in each.items()}


def _random_state(device: torch.device) -> Tensor:
    cpu = torch.get_rng_state()
    return torch.cat([cpu, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else cpu
