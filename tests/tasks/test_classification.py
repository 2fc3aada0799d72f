"""The task of several classes: ROC-AUC of two, of more, and with a class missing."""

from __future__ import annotations

import math

import pytest
import torch

from zdp_bench.tasks.classification import Classification

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
