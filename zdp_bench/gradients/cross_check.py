"""Fast against plain autograd, on two records of a model's first batch, one record at a time.

`tape.py` refuses what it can see: a parameter used elsewhere, an input whose length is not the batch's. It cannot see a layer
whose first dimension has the batch's length by chance (time first, as many steps as records), nor records mixed between layers.
Two records show both: what has length two by chance has the wrong gradients.
"""

from __future__ import annotations

import torch
from torch import nn

from zdp_bench.gradients import fast, reference
from zdp_bench.gradients.clipping import Batch, Loss, groups, trainable
from zdp_bench.kernels.memory_format import rounded_alike

TOLERANCE = (
    1e-2  # float32 on a badly conditioned network; a wrong gradient is off by its whole size
)


def agrees(model: nn.Module, loss: Loss, batch: Batch) -> bool:
    """Whether fast's norms and clipped sum of the first two records are those of each record alone.

    A model that draws random numbers (dropout) is not checked: no two passes of it are the same.

    Raises:
        NoRule: fast cannot serve the model.
    """
    two = batch[0][:2], batch[1][:2]
    parameters = trainable(model)
    with (
        torch.random.fork_rng(),
        torch.autocast(two[0].device.type, enabled=False),
        rounded_alike(),
    ):
        fast.clipped_sum(
            model, loss, two, 1.0
        )  # raises first: what fast cannot serve may not run on one record either
        before = _random_state(two[0].device)
        rows = []
        for i in range(len(two[0])):
            with torch.enable_grad():
                one = loss(model(two[0][i : i + 1]), two[1][i : i + 1]).sum()
            found = (
                torch.autograd.grad(one, list(parameters.values()), allow_unused=True)
                if one.requires_grad
                else [None] * len(parameters)
            )
            rows.append(
                [
                    torch.zeros_like(p) if g is None else g
                    for g, p in zip(found, parameters.values(), strict=True)
                ]
            )
        if not torch.equal(before, _random_state(two[0].device)):
            return True
        each = {
            name: torch.stack(gradients)
            for name, gradients in zip(parameters, zip(*rows, strict=True), strict=True)
        }
        norms = reference.clip(each, groups(model, 1.0, per_layer=False))[1][:, 0]
        if not torch.isfinite(norms).all():
            return True  # such records contribute nothing, whatever the engine
        bound = float(norms.max()) / 2 or 1.0
        clipped, _ = reference.clip(each, groups(model, bound, per_layer=False))
        ours = fast.clipped_sum(model, loss, two, bound)
    right = bool(((ours.norms - norms).abs() <= TOLERANCE * norms).all())
    return right and all(
        float((ours.sums[name] - rows_.sum(dim=0)).abs().max()) <= TOLERANCE * bound
        for name, rows_ in clipped.items()
    )


def _random_state(device: torch.device) -> torch.Tensor:
    cpu = torch.get_rng_state()
    return torch.cat([cpu, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else cpu
