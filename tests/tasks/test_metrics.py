"""ROC-AUC, Dice per volume, and the losses, by their definitions; condensing changes no number."""

import math

import pytest
import torch

from zdp_bench.errors import UserError
from zdp_bench.tasks.classification import BinaryClassification, Classification
from zdp_bench.tasks.segmentation import Segmentation


def area(outputs: list[list[float]], targets: list[int]) -> float:
    metrics = Classification().metrics(torch.tensor(outputs), torch.tensor(targets))
    return metrics["roc_auc"]


def test_roc_auc_is_nan_where_a_class_is_missing() -> None:
    """Its numbers, and those of every loss: `test_large_outputs.py`."""
    assert math.isnan(area([[0.0, 1.0], [1.0, 0.0]], [1, 1]))
    assert math.isnan(area([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], [0, 1]))
    one_logit = BinaryClassification().metrics(torch.randn(4, 1), torch.ones(4))
    assert math.isnan(one_logit["roc_auc"])


MASKS = torch.zeros(4, 2, 2, dtype=torch.uint8)
MASKS[0, 0, 0] = MASKS[0, 0, 1] = MASKS[1, 1, 1] = 1
LOGITS = torch.full((4, 1, 2, 2), -3.0)
LOGITS[0, 0, 0, 0] = LOGITS[1, 0, 0, 0] = 2.0
VOLUMES = torch.tensor([7, 7, 9, 9])


def test_dice_of_several_organs_is_the_mean_of_each() -> None:
    """Organ 1 as above: 0.4 and 1. Organ 2 is true nowhere, and found in volume 9: 1 and 0."""
    other = torch.full_like(LOGITS, -3.0)
    other[2, 0, 1, 1] = 2.0
    task = Segmentation(organs=2)
    outputs = torch.cat([LOGITS, other], dim=1)
    metrics = task.metrics(outputs, MASKS, VOLUMES)
    assert metrics["dice_1"] == pytest.approx(0.7)
    assert metrics["dice_2"] == pytest.approx(0.5)
    assert metrics["dice"] == pytest.approx(0.6)
    assert metrics["dice_worst"] == pytest.approx(0.5)
    assert task.metrics(task.condense(outputs, MASKS), MASKS, VOLUMES) == metrics


def test_dice_is_that_of_volumes_not_of_slices() -> None:
    """Volume 7: 1 voxel right, 2 found, 3 true: 2·1/(2 + 3). Volume 9: empty, found empty: 1."""
    metrics = Segmentation().metrics(LOGITS, MASKS, VOLUMES)
    assert metrics["dice"] == pytest.approx((0.4 + 1) / 2)
    assert metrics["dice_worst"] == pytest.approx(0.4)
    alone = Segmentation().metrics(LOGITS, MASKS)  # each slice its own volume: 2/3, 0, 1, 1
    assert alone["dice"] == pytest.approx((2 / 3 + 0 + 1 + 1) / 4)


def test_condensed_batches_give_the_same_numbers() -> None:
    task = Segmentation()
    parts = [task.condense(LOGITS[i : i + 2], MASKS[i : i + 2]) for i in (0, 2)]
    assert task.metrics(torch.cat(parts), MASKS, VOLUMES) == task.metrics(LOGITS, MASKS, VOLUMES)


@pytest.mark.parametrize("loss", ["bce", "dice", "bce_dice"])
def test_the_loss_of_a_perfect_answer_is_zero(loss: str) -> None:
    task = Segmentation(loss=loss)
    perfect = task.loss(torch.where(MASKS.unsqueeze(1) > 0, 40.0, -40.0), MASKS)
    torch.testing.assert_close(perfect, torch.zeros(4), atol=1e-5, rtol=0)


def test_the_sum_is_both_parts() -> None:
    losses = ("bce_dice", "bce", "dice")
    both, bce, dice = (Segmentation(loss=name).loss(LOGITS, MASKS) for name in losses)
    torch.testing.assert_close(both, bce + dice)
    torch.testing.assert_close(bce[2], torch.tensor(0.0485874), atol=1e-6, rtol=0)  # log(1 + e⁻³)


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 0.0], [1.0, math.nan], [math.nan, 1.0], [1.0, math.inf]]
)
def test_weights_that_are_not_two_positive_numbers_are_refused(weights: list[float]) -> None:
    with pytest.raises(UserError, match=r"task\.weights=.* must be two positive numbers"):
        BinaryClassification(weights=weights)
