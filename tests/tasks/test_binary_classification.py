"""The binary task: its loss per example, ROC-AUC, and what a magnitude as logit does."""

from __future__ import annotations

import math

import pytest
import torch

from zdp_bench.tasks.classification import BinaryClassification

TASK = BinaryClassification()


def test_the_loss_is_one_logistic_loss_an_example() -> None:
    logits, targets = torch.tensor([[0.3], [-1.2]]), torch.tensor([1, 0])
    expected = [-math.log(1 / (1 + math.exp(-0.3))), -math.log(1 - 1 / (1 + math.exp(1.2)))]
    assert TASK.loss(logits, targets).tolist() == pytest.approx(expected, rel=1e-5)


def test_roc_auc_counts_ordered_pairs_and_ignores_the_scale() -> None:
    scores, truth = torch.tensor([[0.1], [0.4], [0.35], [0.8]]), torch.tensor([0, 0, 1, 1])
    assert (
        TASK.metrics(scores, truth)["roc_auc"]
        == TASK.metrics(scores * 9 + 100, truth)["roc_auc"]
        == 0.75
    )
    assert math.isnan(TASK.metrics(scores, torch.ones(4, dtype=torch.long))["roc_auc"])
