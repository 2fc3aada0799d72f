"""Classification: cross-entropy, accuracy."""

from __future__ import annotations

import torch.nn.functional as F
from sklearn.metrics import accuracy_score
from torch import Tensor

from zdp_bench.registry import register


@register("task", "classification")
class Classification:
    """Softmax cross-entropy over real logits [B, classes]; targets are class indices [B]."""

    headline = "accuracy"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")  # [B]

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return {
            "accuracy": float(accuracy_score(targets.cpu().numpy(), outputs.argmax(dim=1).cpu().numpy())),
            "loss": float(self.loss(outputs, targets).mean()),
        }
