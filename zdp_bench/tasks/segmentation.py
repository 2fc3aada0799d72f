"""Segmentation of organs: logistic loss and soft Dice per example, Dice per volume."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor

from zdp_bench.errors import require
from zdp_bench.registry import register
from zdp_bench.tasks import keeps_apart, mean_of
from zdp_bench.tasks.metric import DICE, DICE_WORST, LOSS, Metric

Loss = Literal["bce", "dice", "bce_dice"]
PARTS: dict[Loss, tuple[str, ...]] = {
    "bce": ("bce",),
    "dice": ("dice",),
    "bce_dice": ("bce", "dice"),
}


@register("task", "segmentation")
class Segmentation:
    """Logits [B, K, H, W] of K organs, masks [B, H, W]; positive logits are the organ.

    Volumes are likewise [B, K, D, H, W] and [B, D, H, W].

    Dice is taken over a whole VOLUME, 2|A∩B| / (|A| + |B|) with the voxels of all its slices, and
    then averaged over volumes; a volume in which both are empty counts 1. Averaged over slices it
    would be higher: empty slices are easy. Without groups, each example is a volume. Of several
    organs, loss and Dice are the mean, and `dice_1` is the Dice of organ 1.

    organs: K, if there are several. The values 1 to K of a mask are then an organ each, and others
        background. None: one organ, every value above 0. (Not 1, which would give the runs made
        before this option other digests.)
    loss: bce (mean over pixels), dice (1 − soft Dice), or their sum, each of one example.
    organ_weight: how many times a pixel of the organ counts in bce; a constant of the recipe.
        None: once.
    """

    headline = DICE.name
    measures: tuple[Metric, ...] = (DICE, DICE_WORST, LOSS)
    targets = "a mask [height, width]"

    def __init__(
        self,
        *,
        loss: Loss = "bce_dice",
        organ_weight: float | None = None,
        organs: Annotated[int, Interval(ge=2, le=255)] | None = None,
    ) -> None:
        is_valid = organ_weight is None or organ_weight > 0
        require(is_valid, "task.organ_weight", organ_weight, "must be positive")
        self.organ_weight = organ_weight
        self.parts = PARTS[loss]
        self.outputs = organs or 1
        if organs is not None:
            names = [f"dice_{organ}" for organ in range(1, organs + 1)]
            of_organs = [replace(DICE, name=name, title="") for name in names]
            self.measures = (DICE, DICE_WORST, *of_organs, LOSS)

    @keeps_apart
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        organs = split_organs(targets, self.outputs).to(outputs.dtype)
        logits = outputs.flatten(2).flatten(0, 1)  # [B·K, H·W]
        mask = organs.flatten(2).flatten(0, 1)
        total = logits.new_zeros(len(logits))
        if "bce" in self.parts:
            total = total + self._bce(logits, mask)
        if "dice" in self.parts:
            organ = logits.sigmoid()
            overlap = (organ * mask).sum(dim=1)
            sizes = organ.sum(dim=1) + mask.sum(dim=1)
            total = total + 1 - (2 * overlap + 1) / (sizes + 1)
        return total.view(-1, self.outputs).mean(dim=1)  # [B]

    def _bce(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over the pixels of each map."""
        weight = None
        if self.organ_weight is not None:
            weight = logits.new_tensor(self.organ_weight)
        of_pixels = F.binary_cross_entropy_with_logits(
            logits,
            mask,
            reduction="none",
            pos_weight=weight,
        )
        return of_pixels.mean(dim=1)

    def condense(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return all that `metrics` needs [B, 3 K + 1].

        They are the overlap, the predicted and the true pixels of each organ, and the loss.
        """
        predicted = outputs.flatten(2) > 0
        mask = split_organs(targets, self.outputs).flatten(2)
        columns = [
            (predicted & mask).sum(dim=2),
            predicted.sum(dim=2),
            mask.sum(dim=2),
            self.loss(outputs, targets).unsqueeze(1),
        ]
        return torch.cat([column.double() for column in columns], dim=1)

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        """Measure maps [n, K, H, W], or what `condense` made of them [n, 3 K + 1]."""
        is_condensed = outputs.dim() == 2
        rows = outputs if is_condensed else self.condense(outputs, targets)
        rows = rows.cpu()
        if groups is None:
            groups = torch.arange(len(rows))
        volumes, volume_of_row = torch.unique(groups, return_inverse=True)
        sums = torch.zeros(len(volumes), 3 * self.outputs, dtype=torch.float64)
        sums.index_add_(0, volume_of_row, rows[:, :-1])
        overlap, predicted, mask = sums.chunk(3, dim=1)  # each [volumes, K]
        sizes = predicted + mask
        of_organs = torch.where(sizes > 0, 2 * overlap / sizes.clamp(min=1), 1.0)
        dice = of_organs.mean(dim=1)
        metrics = {"dice": float(dice.mean()), "dice_worst": float(dice.min())}
        if self.outputs > 1:
            for number, of_organ in enumerate(of_organs.T, 1):
                metrics[f"dice_{number}"] = float(of_organ.mean())
        metrics["loss"] = mean_of(rows[:, -1])
        return metrics


def split_organs(masks: Tensor, organs: int) -> Tensor:
    """Return where each organ is [B, organs, ...] in masks [B, ...]."""
    if organs == 1:
        return masks.unsqueeze(1) > 0
    numbers = torch.arange(1, organs + 1, device=masks.device)
    of_each = numbers.view(-1, *[1] * (masks.dim() - 1))
    return masks.unsqueeze(1) == of_each
