"""ROC-AUC of two classes, of more, with a class missing, and from one logit with its loss."""

from __future__ import annotations

import math

import pytest
import torch

from zdp_bench.tasks.classification import BinaryClassification, Classification

TASK = Classification()


def area(outputs: list[list[float]], targets: list[int]) -> float:
    return TASK.metrics(torch.tensor(outputs), torch.tensor(targets))["roc_auc"]


def test_roc_auc_of_two_classes_counts_ordered_pairs() -> None:
    outputs = [[0.0, 0.1], [0.0, 0.4], [0.0, 0.35], [0.0, 0.8]]
    assert area(outputs, [0, 0, 1, 1]) == 0.75
    assert area(outputs, [1, 1, 0, 0]) == 0.25


def test_roc_auc_of_three_classes_is_the_mean_of_one_against_the_rest() -> None:
    shares = [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]]
    outputs = torch.tensor(shares).log().tolist()
    # Ordered pairs: 2 of 3, 3 of 4 (0.3 is above 0.2), and 3 of 3.
    assert area(outputs, [0, 1, 2, 1]) == pytest.approx((2 / 3 + 3 / 4 + 1) / 3)


def test_roc_auc_is_nan_where_a_class_is_missing() -> None:
    assert math.isnan(area([[0.0, 1.0], [1.0, 0.0]], [1, 1]))
    assert math.isnan(area([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], [0, 1]))


BINARY = BinaryClassification()


def test_the_loss_is_one_logistic_loss_an_example() -> None:
    logits, targets = torch.tensor([[0.3], [-1.2]]), torch.tensor([1, 0])
    expected = [-math.log(1 / (1 + math.exp(-0.3))), -math.log(1 - 1 / (1 + math.exp(1.2)))]
    assert BINARY.loss(logits, targets).tolist() == pytest.approx(expected, rel=1e-5)


def test_roc_auc_counts_ordered_pairs_and_ignores_the_scale() -> None:
    scores, truth = torch.tensor([[0.1], [0.4], [0.35], [0.8]]), torch.tensor([0, 0, 1, 1])
    assert (
        BINARY.metrics(scores, truth)["roc_auc"]
        == BINARY.metrics(scores * 9 + 100, truth)["roc_auc"]
        == 0.75
    )
    assert math.isnan(BINARY.metrics(scores, torch.ones(4, dtype=torch.long))["roc_auc"])
