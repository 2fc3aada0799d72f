"""Every metric that a task declares: its number for outputs of ±1,000 against one in exact or
extended precision, its direction and its range.

A new metric is tested as soon as its task declares it, and fails until it has a reference here.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tasks.batches import BATCHES, OPTIONS, right_outputs
from zdp_bench.registry import lookup, names
from zdp_bench.tasks import Task
from zdp_bench.tasks.classification import log_odds
from zdp_bench.tasks.metric import Metric
from zdp_bench.tasks.reconstruction import EPS, volume_metrics

DIGITS = 1000  # that ROC-AUC needs: e^-2000 is 10^-869
EXAMPLES = 24

CASES = [
    pytest.param(name, case, metric, id=f"{name}{case or ''}-{metric.name}")
    for name in names("task")
    for case in range(len(BATCHES[name]))
    for metric in lookup("task", name)(**OPTIONS.get((name, case), {})).measures
]
SPREADS: dict[str, Callable[[Tensor], Tensor]] = {
    "between": lambda outputs: 1000 * torch.erf(outputs),
    "at the ends": lambda outputs: 1000 * outputs.sign() + 0.1 * outputs,
    "above the rest": lambda outputs: 1000 + 50 * outputs,
}


# ------------------------------------------------------------------------------------- references


def exact(values: Tensor) -> list[mpmath.mpf]:
    return [mpmath.mpf(value) for value in values.double().flatten().tolist()]


def mean(values: list[Any]) -> float:
    return float(sum(values) / len(values))


def odds_of(logits: Tensor, chosen: int) -> mpmath.mpf:
    each = [mpmath.exp(z) for z in exact(logits)]
    if len(each) == 1:  # of class 1, against a logit of 0
        return each[0]
    return each[chosen] / sum(z for k, z in enumerate(each) if k != chosen)


def area(odds: list[mpmath.mpf], is_class: list[bool]) -> Fraction:
    """The share of ordered pairs; of equal scores one half."""
    inside = [score for score, of in zip(odds, is_class, strict=True) if of]
    outside = [score for score, of in zip(odds, is_class, strict=True) if not of]
    count = Fraction(0)
    for above in inside:
        for below in outside:
            tied = mpmath.almosteq(above, below, rel_eps=mpmath.mpf(10) ** (50 - DIGITS))
            count += Fraction(1, 2) if tied else Fraction(int(above > below))
    return count / (len(inside) * len(outside))


def roc_auc(outputs: Tensor, targets: Tensor) -> float:
    classes = range(outputs.shape[1]) if outputs.shape[1] > 2 else [1]
    areas = []
    with mpmath.workdps(DIGITS):
        for chosen in classes:
            odds = [odds_of(logits, chosen) for logits in outputs]
            areas.append(area(odds, (targets == chosen).tolist()))
    return mean(areas)


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    if outputs.shape[1] == 1:
        return mean([Fraction(int((z > 0) == t)) for z, t in zip(outputs, targets, strict=True)])
    predicted = [row.index(max(row)) for row in outputs.tolist()]
    return mean([Fraction(int(k == t)) for k, t in zip(predicted, targets.tolist(), strict=True)])


def logistic(logit: mpmath.mpf, target: float) -> mpmath.mpf:
    return mpmath.log(1 + mpmath.exp(-logit if target else logit))


def loss_of_classes(outputs: Tensor, targets: Tensor) -> float:
    losses = []
    for logits, target in zip(outputs, targets.tolist(), strict=True):
        if len(logits) == 1:
            losses.append(logistic(exact(logits)[0], target))
        else:
            losses.append(mpmath.log(1 + 1 / odds_of(logits, target)))
    return mean(losses)


def organs_of(outputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Logits and mask of each organ of each example."""
    if outputs.shape[1] == 1:
        return [*zip(outputs[:, 0], targets, strict=True)]
    return [
        (logits, (mask == number + 1).to(mask.dtype))
        for maps, mask in zip(outputs, targets, strict=True)
        for number, logits in enumerate(maps)
    ]


def loss_of_masks(outputs: Tensor, targets: Tensor) -> float:
    losses = []
    for logits, mask in organs_of(outputs, targets):
        z, truth = exact(logits), mask.flatten().tolist()
        pairs = [*zip(z, truth, strict=True)]
        organ = [1 / (1 + mpmath.exp(-logit)) for logit in z]
        overlap = sum(p * t for p, t in zip(organ, truth, strict=True))
        dice = 1 - (2 * overlap + 1) / (sum(organ) + sum(truth) + 1)
        losses.append(sum(logistic(*pair) for pair in pairs) / len(pairs) + dice)
    return mean(losses)


def dices(outputs: Tensor, targets: Tensor) -> list[list[Fraction]]:
    """The Dice of each organ of each example."""
    each = []
    for logits, mask in organs_of(outputs, targets):
        predicted, true = logits > 0, mask > 0
        size = int(predicted.sum() + true.sum())
        each.append(Fraction(2 * int((predicted & true).sum()), size) if size else Fraction(1))
    organs = outputs.shape[1]
    return [each[start : start + organs] for start in range(0, len(each), organs)]


def of_volumes(outputs: Tensor, targets: Tensor) -> list[Fraction]:
    return [sum(each, Fraction(0)) / len(each) for each in dices(outputs, targets)]


def dice_of(organ: int) -> Callable[[Tensor, Tensor], float]:
    return lambda outputs, targets: mean([each[organ] for each in dices(outputs, targets)])


Images = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # each [n, H, W]; the unit [n, 1, 1]


def images(outputs: Tensor, targets: Tensor) -> Images:
    """Reference, zero-filled and reconstructed image, and the unit, in extended precision."""
    reference, zero_filled = (targets[:, k].numpy().astype(np.longdouble) for k in (0, 1))
    unit = zero_filled.std(axis=(1, 2), keepdims=True, ddof=1) + EPS
    return reference, zero_filled, outputs[:, 0].numpy().astype(np.longdouble) * unit, unit


def nmse(a: np.ndarray, b: np.ndarray) -> Any:
    return ((a - b) ** 2).sum() / (a**2).sum()


def psnr(a: np.ndarray, b: np.ndarray) -> Any:
    return 10 * np.log10(a.max() ** 2 / ((a - b) ** 2).mean())


def ssim(a: np.ndarray, b: np.ndarray) -> Any:
    c1, c2 = (0.01 * a.max()) ** 2, (0.03 * a.max()) ** 2
    x, y = (np.lib.stride_tricks.sliding_window_view(image, (7, 7)) for image in (a, b))
    mean_x, mean_y = (w.mean(axis=(2, 3), keepdims=True) for w in (x, y))
    dx, dy = x - mean_x, y - mean_y
    cov, var_x, var_y = (p.sum(axis=(2, 3)) / 48 for p in (dx * dy, dx**2, dy**2))
    mean_x, mean_y = mean_x[..., 0, 0], mean_y[..., 0, 0]
    above = (2 * mean_x * mean_y + c1) * (2 * cov + c2)
    return (above / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean()


def of_images(measure: Callable[[np.ndarray, np.ndarray], Any], which: int) -> Any:
    def measure_all(outputs: Tensor, targets: Tensor) -> float:
        pictures = images(outputs, targets)
        return mean([measure(a, b) for a, b in zip(pictures[0], pictures[which], strict=True)])

    return measure_all


def loss_of_images(outputs: Tensor, targets: Tensor) -> float:
    reference, _, answer, unit = images(outputs, targets)
    return mean([*(np.abs(answer - reference) / unit).mean(axis=(1, 2))])


ZERO_FILLED, ANSWER = 1, 2  # places in `images`
REFERENCES: dict[tuple[str, str], Callable[[Tensor, Tensor], float]] = {
    **{
        (task, metric): reference
        for task in ("classification", "binary_classification")
        for metric, reference in (
            ("accuracy", accuracy),
            ("roc_auc", roc_auc),
            ("loss", loss_of_classes),
        )
    },
    ("segmentation", "dice"): lambda outputs, targets: mean(of_volumes(outputs, targets)),
    ("segmentation", "dice_worst"): lambda outputs, targets: float(
        min(of_volumes(outputs, targets))
    ),
    **{("segmentation", f"dice_{organ + 1}"): dice_of(organ) for organ in range(3)},
    ("segmentation", "loss"): loss_of_masks,
    **{
        ("reconstruction", start + measure.__name__): of_images(measure, which)
        for start, which in (("", ANSWER), ("zero_filled_", ZERO_FILLED))
        for measure in (nmse, psnr, ssim)
    },
    ("reconstruction", "loss"): loss_of_images,
}


# ------------------------------------------------------------------------------------------ tests


def drawn(name: str, case: int) -> tuple[Task, Tensor, Tensor]:
    torch.manual_seed(case)
    outputs, targets = BATCHES[name][case](EXAMPLES)
    return lookup("task", name)(**OPTIONS.get((name, case), {})), outputs, targets


@pytest.mark.parametrize("name", names("task"))
def test_a_task_declares_all_that_it_measures(name: str) -> None:
    for case in range(len(BATCHES[name])):
        task, outputs, targets = drawn(name, case)
        assert task.headline in task.metrics(outputs, targets)
        assert {metric.name for metric in task.measures} == {*task.metrics(outputs, targets)}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "case", "metric"), CASES)
def test_a_metric_of_large_outputs_is_that_of_exact_arithmetic(
    name: str, case: int, metric: Metric, dtype: torch.dtype, spread: str
) -> None:
    reference = REFERENCES.get((name, metric.name))
    assert reference, f"write a reference of {metric.name}, in exact or extended precision"
    task, outputs, targets = drawn(name, case)
    outputs = SPREADS[spread](outputs).to(dtype)
    with mpmath.workdps(30):
        expected = reference(outputs, targets)
    value = task.metrics(outputs, targets)[metric.name]
    assert value == pytest.approx(expected, rel=2e-6, abs=2e-7)
    assert metric.lowest <= value <= metric.highest


@pytest.mark.parametrize(("name", "case", "metric"), CASES)
def test_right_outputs_gain_over_wrong_ones(name: str, case: int, metric: Metric) -> None:
    task, outputs, targets = drawn(name, case)
    right = right_outputs(outputs, targets)
    good, bad = (task.metrics(each, targets)[metric.name] for each in (right, -right))
    is_of_outputs = not metric.name.startswith("zero_filled_")
    assert (metric.gain(good, bad) > 0) == is_of_outputs
    assert all(metric.lowest <= value <= metric.highest for value in (good, bad))


def test_log_odds_are_those_of_softmax_where_it_is_exact() -> None:
    logits = torch.randn(200, 5)
    share = logits.double().softmax(dim=1)
    torch.testing.assert_close(log_odds(logits), (share / (1 - share)).log())
    assert log_odds(torch.zeros(1, 4)).tolist() == [[pytest.approx(-math.log(3))] * 4]


@pytest.mark.parametrize("classes", [2, 3, 5, 11])
def test_probabilities_that_are_equal_tie_whatever_is_added_to_the_logits(classes: int) -> None:
    """What a class adds to all logits of its examples does not tell it from the others."""
    targets = torch.arange(20 * classes) % classes
    one_row = 64.0 * torch.randint(-2, 3, (1, classes)).expand(len(targets), -1)
    in_any_order = one_row.gather(1, torch.stack([torch.randperm(classes) for _ in targets]))
    for logits in (one_row, in_any_order):
        shift = 64.0 * 3.0 ** (targets % 7)[:, None]
        assert torch.equal(log_odds(logits + shift), log_odds(logits))
    task = lookup("task", "classification")()
    for value in (0.0, 5.0, 1000.3):
        tied = (value * targets[:, None]).expand(-1, classes)
        assert task.metrics(tied, targets)["roc_auc"] == 0.5


def test_an_area_with_ties_is_that_of_pair_counts() -> None:
    logits = torch.tensor([[1000.0, 1000, 0], [1000, 1000, 0], [0, 0, 0], [5, 5, 5]])
    task, targets = lookup("task", "classification")(), torch.tensor([1, 0, 2, 0])
    assert task.metrics(logits, targets)["roc_auc"] == pytest.approx((1 / 2 + 5 / 6 + 5 / 6) / 3)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e20])
def test_metrics_of_a_volume_do_not_depend_on_its_units(scale: float) -> None:
    rng = np.random.default_rng(0)
    reference = rng.random((3, 16, 16)).astype(np.float32)
    answer = reference + 0.1 * rng.standard_normal(reference.shape).astype(np.float32)
    scaled = volume_metrics(*((scale * each).astype(np.float32) for each in (reference, answer)))
    assert scaled == pytest.approx(volume_metrics(reference, answer), rel=1e-5)


@pytest.mark.parametrize("name", ["binary_classification", "classification"])
def test_the_mean_of_losses_that_add_up_beyond_float32_is_finite(name: str) -> None:
    outputs = 1e37 * torch.ones(400, 1) if "binary" in name else 1e37 * torch.eye(2)[[0] * 400]
    targets = torch.arange(400) % 2
    mean_loss = lookup("task", name)().metrics(outputs, targets)["loss"]
    assert mean_loss == pytest.approx(0.5e37, rel=1e-6)
