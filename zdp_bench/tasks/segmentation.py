"""Segmentation of organs: logistic loss and soft Dice loss per example, Dice score per volume."""

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
    """Segmentation with logits [B, K, H, W] of K organs and masks [B, H, W].

    For volumes, the shapes are [B, K, D, H, W] and [B, D, H, W]. A positive logit predicts the
    organ.

    The Dice score, 2|A∩B| / (|A| + |B|), is computed over the voxels of a whole VOLUME and then
    averaged over volumes. It is 1 for a volume in which both masks are empty. An average over
    slices would be higher, because empty slices are easy. Without groups, each example is a volume.
    With several organs, loss and Dice are means over organs, and `dice_1` is the Dice of organ 1.

    Args:
        loss: "bce" (mean over pixels), "dice" (1 − soft Dice) or "bce_dice" (their sum), each per
            example. Default: "bce_dice".
        organ_weight: weight of a pixel of the organ in bce, a constant of the recipe. Default: 1.
        organs: number of organs K, if there are several. Values 1 to K in a mask then stand for one
            organ each, and others for background. Default: one organ, any value above 0. (The
            default is None rather than 1, so that earlier runs keep their digests.)
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
            organ_metrics = [replace(DICE, name=name, title="") for name in names]
            self.measures = (DICE, DICE_WORST, *organ_metrics, LOSS)

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
        """Return the mean logistic loss over the pixels of each map."""
        weight = None
        if self.organ_weight is not None:
            weight = logits.new_tensor(self.organ_weight)
        pixel_losses = F.binary_cross_entropy_with_logits(
            logits,
            mask,
            reduction="none",
            pos_weight=weight,
        )
        return pixel_losses.mean(dim=1)

    def condense(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the numbers that `metrics` needs, [B, 3 K + 1].

        They are each organ's number of correctly predicted pixels, predicted pixels and true
        pixels, and the loss.
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
        """Return Dice scores and the loss.

        Args:
            outputs: logits [n, K, H, W], or the results of `condense`, [n, 3 K + 1].
            targets: masks [n, H, W].
            groups: index of the volume of each slice, [n]. Default: each example is a volume.
        """
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
        organ_dice = torch.where(sizes > 0, 2 * overlap / sizes.clamp(min=1), 1.0)  # [volumes, K]
        dice = organ_dice.mean(dim=1)
        metrics = {"dice": float(dice.mean()), "dice_worst": float(dice.min())}
        if self.outputs > 1:
            for organ, values in enumerate(organ_dice.T, 1):
                metrics[f"dice_{organ}"] = float(values.mean())
        metrics["loss"] = mean_of(rows[:, -1])
        return metrics


def split_organs(masks: Tensor, organs: int) -> Tensor:
    """Return a boolean mask per organ, [B, organs, ...], from masks [B, ...]."""
    if organs == 1:
        return masks.unsqueeze(1) > 0
    values = torch.arange(1, organs + 1, device=masks.device)
    return masks.unsqueeze(1) == values.view(-1, *[1] * (masks.dim() - 1))
