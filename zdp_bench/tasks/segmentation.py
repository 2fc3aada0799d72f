"""Segmentation of one organ: logistic loss and soft Dice per example, Dice per volume."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.errors import require
from zdp_bench.registry import register
from zdp_bench.tasks import keeps_apart, mean_of
from zdp_bench.tasks.metric import DICE, DICE_WORST, LOSS

Loss = Literal["bce", "dice", "bce_dice"]
PARTS: dict[Loss, tuple[str, ...]] = {
    "bce": ("bce",),
    "dice": ("dice",),
    "bce_dice": ("bce", "dice"),
}


@register("task", "segmentation")
class Segmentation:
    """Logits [B, 1, H, W], masks of 0 and 1 [B, H, W]; positive logits are the organ.

    Volumes are likewise [B, 1, D, H, W] and [B, D, H, W].

    Dice is taken over a whole VOLUME, 2|A∩B| / (|A| + |B|) with the voxels of all its slices, and
    then averaged over volumes; a volume in which both are empty counts 1. Averaged over slices it
    would be higher: empty slices are easy. Without groups, each example is a volume.

    loss: bce (mean over pixels), dice (1 − soft Dice), or their sum, each of one example.
    organ_weight: how many times a pixel of the organ counts in bce; a constant of the recipe.
        None: once.
    """

    headline = DICE.name
    measures = (DICE, DICE_WORST, LOSS)
    targets = "a mask [height, width]"

    def __init__(
        self,
        *,
        loss: Loss = "bce_dice",
        organ_weight: float | None = None,
    ) -> None:
        is_valid = organ_weight is None or organ_weight > 0
        require(is_valid, "task.organ_weight", organ_weight, "must be positive")
        self.organ_weight = organ_weight
        self.parts = PARTS[loss]

    @keeps_apart
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = outputs.flatten(1)  # [B, H·W]
        mask = targets.flatten(1).to(outputs.dtype)
        total = logits.new_zeros(len(logits))
        if "bce" in self.parts:
            total = total + self._bce(logits, mask)
        if "dice" in self.parts:
            organ = logits.sigmoid()
            overlap = (organ * mask).sum(dim=1)
            sizes = organ.sum(dim=1) + mask.sum(dim=1)
            total = total + 1 - (2 * overlap + 1) / (sizes + 1)
        return total  # [B]

    def _bce(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over the pixels of each example, [B]."""
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
        """Return overlap, predicted and true pixels, and loss: [B, 4], all that `metrics` needs."""
        predicted = outputs.flatten(1) > 0
        mask = targets.flatten(1) > 0
        columns = [
            (predicted & mask).sum(dim=1),
            predicted.sum(dim=1),
            mask.sum(dim=1),
            self.loss(outputs, targets),
        ]
        return torch.stack([column.double() for column in columns], dim=1)

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        """Measure maps [n, 1, H, W], or what `condense` made of them [n, 4]."""
        is_condensed = outputs.dim() == 2
        rows = outputs if is_condensed else self.condense(outputs, targets)
        rows = rows.cpu()
        if groups is None:
            groups = torch.arange(len(rows))
        volumes, volume_of_row = torch.unique(groups, return_inverse=True)
        sums = torch.zeros(3, len(volumes), dtype=torch.float64)
        overlap, predicted, mask = sums.index_add_(1, volume_of_row, rows[:, :3].T)
        sizes = predicted + mask
        dice = torch.where(sizes > 0, 2 * overlap / sizes.clamp(min=1), 1.0)  # [volumes]
        return {
            "dice": float(dice.mean()),
            "dice_worst": float(dice.min()),
            "loss": mean_of(rows[:, 3]),
        }
