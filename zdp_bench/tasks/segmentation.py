"""Segmentation of one organ: logistic loss and soft Dice per record, Dice per volume."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.registry import register

Loss = Literal["bce", "dice", "bce_dice"]


@register("task", "segmentation")
class Segmentation:
    """Logits [B, 1, H, W], masks of 0 and 1 [B, H, W]; a pixel is the organ where its logit is positive.

    Dice is taken over a whole VOLUME, 2|A∩B| / (|A| + |B|) with the voxels of all its slices, and then averaged over volumes; a
    volume in which both are empty counts 1. Averaged over slices it would come out higher: empty slices are easy.
    Where records belong to no volume, each is one.

    loss: bce (mean over pixels), dice (1 − soft Dice of the record), or their sum. All are a record's own.
    """

    headline = "dice"

    def __init__(self, *, loss: Loss = "bce_dice") -> None:
        self.parts = {"bce": ("bce",), "dice": ("dice",), "bce_dice": ("bce", "dice")}[loss]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits, mask = outputs.flatten(1), targets.flatten(1).to(outputs.dtype)  # each [B, H·W]
        total = torch.zeros(len(logits), dtype=logits.dtype, device=logits.device)
        if "bce" in self.parts:
            total = total + F.binary_cross_entropy_with_logits(logits, mask, reduction="none").mean(
                dim=1
            )
        if "dice" in self.parts:
            chance = logits.sigmoid()
            total = (
                total
                + 1
                - (2 * (chance * mask).sum(dim=1) + 1) / (chance.sum(dim=1) + mask.sum(dim=1) + 1)
            )
        return total  # [B]

    def condense(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """All that `metrics` needs of a batch, [B, 4]: overlap, predicted and true pixels, loss. Maps need not be kept."""
        found, mask = outputs.flatten(1) > 0, targets.flatten(1) > 0
        counts = [(found & mask).sum(dim=1), found.sum(dim=1), mask.sum(dim=1)]
        return torch.stack(
            [*(count.double() for count in counts), self.loss(outputs, targets).double()], dim=1
        )

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        """Over maps [n, 1, H, W], or over what `condense` made of them [n, 4]."""
        rows = (outputs if outputs.dim() == 2 else self.condense(outputs, targets)).cpu()
        _, volume = torch.unique(
            torch.arange(len(rows)) if groups is None else groups, return_inverse=True
        )
        overlap, found, mask = torch.zeros(
            3, int(volume.max()) + 1, dtype=torch.float64
        ).index_add_(1, volume, rows[:, :3].T)
        dice = torch.where(
            found + mask > 0, 2 * overlap / (found + mask).clamp(min=1), 1.0
        )  # [volumes]
        return {
            "dice": float(dice.mean()),
            "dice_worst": float(dice.min()),
            "loss": float(rows[:, 3].mean()),
        }
