"""A task of another package, whose metric is an error: it is judged in the metric's direction."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.tasks.plugin import MAE, WORDS, DigitByNumber, register_task
from tests.training.test_run import carry_out
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.tasks.metric import ACCURACY, DICE, NMSE, PSNR, ROC_AUC, Metric, describe
from zdp_bench.training.build import check_fit
from zdp_bench.training.evaluation import doubt
from zdp_bench.training.setup import describe_data


@pytest.mark.parametrize(("rate", "learns"), [("1", True), ("1e-9", False)])
def test_a_model_with_a_small_error_has_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: str, learns: bool
) -> None:
    register_task(monkeypatch)
    record = carry_out(tmp_path, *WORDS, f"optimizer.lr={rate}").record.document
    assert record["headline"]["name"] == "mae"
    assert ("warning" not in record) == learns, record["headline"]


@pytest.mark.parametrize(
    ("metric", "value", "chance", "warns"),
    [
        (ACCURACY, 0.12, 0.1, True),
        (ACCURACY, 0.02, 0.1, True),
        (ACCURACY, 0.2, None, False),
        (ACCURACY, 0.2, 0.1, False),
        (MAE, 2.4, 2.5, True),
        (MAE, 3.0, 2.5, True),
        (MAE, 2.0, 2.5, False),
        (NMSE, 0.01, 0.02, False),
        (NMSE, 0.02, 0.01, True),
        (PSNR, 30.0, 20.0, False),
        (PSNR, 10.0, 20.0, True),
        (DICE, 0.0, None, True),
        (DICE, 0.01, None, True),
        (DICE, 0.02, None, False),
        (ROC_AUC, math.nan, math.nan, True),
        (DICE, math.nan, None, True),
        (PSNR, math.nan, None, True),
        (PSNR, 30.0, math.nan, False),
    ],
)
def test_a_metric_is_held_against_chance_in_its_direction_and_size(
    metric: Metric, value: float, chance: float | None, warns: bool
) -> None:
    warning = doubt(metric, {metric.name: value}, chance, 400, 0.5, 2.0)
    assert bool(warning) == warns
    assert not warns or "Change optimizer.lr (it is 0.5), the noise or the bound." in warning


class Answer(torch.nn.Module):
    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": inputs}


@pytest.mark.parametrize(
    ("loss", "fault"),
    [
        (lambda outputs, targets: 0.5, "the loss is a float, and not a tensor"),
        (lambda outputs, targets: outputs.logits, "has no attribute 'logits'"),
        (lambda outputs, targets: outputs["classes"], "there is no 'classes'"),
    ],
)
def test_a_loss_of_other_outputs_is_refused_in_one_sentence(
    loss: Callable[[Any, Tensor], Any], fault: str
) -> None:
    config = configured(["recipe=quickstart"])
    task = Mock(loss=loss, targets="", min_side=0)
    with pytest.raises(UserError, match=rf"do not fit dataset=.*{fault}\.$"):
        check_fit(config, Answer(), task, describe_data(config))


def test_what_a_plugin_declares_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe("mae") == Metric("mae")
    register_task(monkeypatch)
    assert describe("mae") is MAE
    assert (MAE.label, MAE.axis, MAE.scale) == ("mean error", "test mean error, digits", 1.0)


@pytest.mark.parametrize(
    ("measures", "headline", "sentence"),
    [
        ((), "mae", r"^task Other: does not declare its metric 'mae'\. Add Metric\('mae'\), with"),
        ((Metric("loss"),), "loss", "declares its metric 'loss' differently from another task"),
    ],
)
def test_a_headline_without_a_declaration_or_with_two_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measures: tuple[Metric, ...],
    headline: str,
    sentence: str,
) -> None:
    other = type("Other", (DigitByNumber,), {"measures": measures, "headline": headline})
    register_task(monkeypatch, other)
    with pytest.raises(UserError, match=sentence):
        carry_out(tmp_path, *WORDS)
    assert not list(tmp_path.glob("runs/*/*/ledger.jsonl"))


def replace_metrics(change: Callable[[dict[str, float]], dict[str, Any]]) -> type:
    """Return a task whose metrics are those of `DigitByNumber`, changed."""

    def metrics(self: DigitByNumber, *args: Any) -> dict[str, Any]:
        return change(DigitByNumber.metrics(self, *args))

    return type("Other", (DigitByNumber,), {"metrics": metrics})


PLATEAU = ["scheduler=reduce_on_plateau", "dataset.validation_share=0.2"]


@pytest.mark.parametrize(
    ("change", "words", "sentence"),
    [
        (lambda m: {"error": 1.0}, [], r"`metrics` returns error, and not 'mae', the task's head"),
        (lambda m: m | {"mae": torch.tensor(1.0)}, [], "returns a Tensor for 'mae', which a rec"),
        (lambda m: {"mae": m["mae"]}, PLATEAU, "returns mae, and not 'loss', by which scheduler="),
        (lambda m: {"mae": m["absent"]}, [], r"cannot be computed .*'absent'.* `Other\.metrics`"),
    ],
)
def test_metrics_that_cannot_be_recorded_are_refused_before_the_first_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, float]], dict[str, Any]],
    words: list[str],
    sentence: str,
) -> None:
    """They ended the run after its last step, or after its first epoch, without a record."""
    register_task(monkeypatch, replace_metrics(change))
    with pytest.raises(UserError, match=sentence):
        carry_out(tmp_path, *WORDS, *words)
    assert not list(tmp_path.glob("runs/*/*/ledger.jsonl"))


def test_metrics_that_need_many_examples_are_computed_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def metrics(self: DigitByNumber, outputs: Tensor, targets: Tensor, *groups: Any) -> Any:
        if len(targets) <= 16:
            raise ValueError("not all classes")
        return DigitByNumber.metrics(self, outputs, targets)

    register_task(monkeypatch, type("Other", (DigitByNumber,), {"metrics": metrics}))
    assert carry_out(tmp_path, *WORDS).record.document["headline"]["name"] == "mae"
