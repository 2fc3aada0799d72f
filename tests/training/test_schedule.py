"""What follows a run's steps: the learning rate's schedule and `trainer.ema`, the same after a
kill."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.test_run import after_each_step, carry_out
from zdp_bench.config import compose, parse
from zdp_bench.config.schema import Plugin
from zdp_bench.data import Examples, Splits
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.nn.state import state_digest
from zdp_bench.training import evaluation
from zdp_bench.training.build import build_scheduler
from zdp_bench.training.checkpoint import load
from zdp_bench.training.run import Outcome, average_weights

RECORDS, VALIDATION = (Examples(torch.zeros(2, 3), torch.zeros(2)) for _ in range(2))
UNVALIDATED = Splits(RECORDS, RECORDS, (3,), 1, "synthetic", "")


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rate of every step that is taken from now on."""
    seen: list[float] = []
    after_each_step(monkeypatch, lambda of, _: seen.append(of.optimizer.param_groups[0]["lr"]))
    return seen


def build(*words: str, data: Splits = UNVALIDATED, lr: float = 1.0, **changes: Any) -> Any:
    """The schedule of a configuration, for an optimizer with one parameter."""
    config = replace(parse(compose(["recipe=quickstart", *words])), **changes)
    return build_scheduler(config, torch.optim.SGD([torch.zeros(1)], lr=lr), data, 1)


def test_the_rate_follows_torchs_schedule(tmp_path: Path, rates: list[float]) -> None:
    own = ["scheduler=step_lr", "scheduler.step_size=1", "scheduler.gamma=0.5", "optimizer.lr=0.8"]
    carry_out(tmp_path, *own)
    assert rates == [0.8] * 10 + [0.4] * 10


def test_warmup_cosine_takes_a_step_every_step(tmp_path: Path, rates: list[float]) -> None:
    own = ["scheduler=warmup_cosine", "scheduler.warmup=0.2", "scheduler.final=0.1"]
    carry_out(tmp_path, *own, "optimizer.lr=1.0")  # of 20 steps 4 rise
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[12] == pytest.approx(0.55)  # half way down to the tenth
    assert rates[-1] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 15 / 16)) / 2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_warmup_cosine_without_a_warm_up_starts_at_the_rate() -> None:
    words = ["scheduler=warmup_cosine", "scheduler.warmup=0"]
    assert build(*words, lr=2.0).optimizer.param_groups[0]["lr"] == 2.0
    with pytest.raises(UserError, match=r"scheduler\.warmup=1.*less than 1"):
        build(words[0], "scheduler.warmup=1")


def test_torchs_refusal_of_a_value_is_one_sentence() -> None:
    steep = Plugin("linear_lr", {"start_factor": 7})  # what the key's range would refuse
    with pytest.raises(UserError, match=r"scheduler=linear_lr: .*factor"):
        build(scheduler=steep)


def test_the_rate_is_halved_when_the_public_validation_loss_stagnates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses 3, 2, 2, 2, 1: the second epoch in a row without a better one is the fourth; torch
    lowers the rate after it."""
    losses = {id(VALIDATION): iter([3.0, 2.0, 2.0, 2.0, 1.0])}  # of no other examples
    monkeypatch.setattr(evaluation, "evaluate", lambda *given: {"loss": next(losses[id(given[2])])})
    validated = replace(UNVALIDATED, validation=VALIDATION)
    scheduler = build("scheduler=reduce_on_plateau", data=validated)
    rates = []
    for _ in range(5):
        watched: Any = (torch.nn.Identity(), None, VALIDATION, torch.device("cpu"))
        evaluation.step_schedule(scheduler, *watched)
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_a_plateau_needs_validation_records() -> None:
    plateau = "scheduler=reduce_on_plateau"
    with pytest.raises(UserError, match="dataset=phase_digits has none") as run:
        build(plateau)
    with pytest.raises(UserError) as refused:  # as early as that, and in the same words
        validate(parse(compose(["recipe=quickstart", plateau])))
    assert str(refused.value) == str(run.value)
    films = ["recipe=chest_xray_small_strict", "dataset=chest_xray_synthetic", plateau]
    validate(parse(compose(films)), trial=False)
    with pytest.raises(UserError, match=r"has none: set dataset\.validation_share=0\.1"):
        validate(parse(compose([*films, "dataset.validation_share=0"])), trial=False)


def test_the_average_moves_slowly_only_after_a_warm_up() -> None:
    """Weights 1, 2, …: the decay is 2/11, 3/12, … until it passes 0.3."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.complex64)
    average = average_weights(model, 0.3)
    expected = 1 + 1j
    for step, decay in enumerate([0.0, 2 / 11, 3 / 12, 0.3, 0.3]):
        weight = (step + 1) * (1 + 1j)
        nn.init.constant_(model.weight, weight)
        average.update_parameters(model)
        expected = decay * expected + (1 - decay) * weight
        assert torch.allclose(average.module.weight, torch.tensor(expected))


def test_the_average_of_all_steps_is_evaluated_and_saved_and_costs_no_epsilon(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Tensor]] = []
    after: list[dict[str, Tensor]] = []
    predict = evaluation.predict

    def copy(model: nn.Module) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    def predicted(model: nn.Module, *rest: Any) -> Any:
        seen.append(copy(model))
        return predict(model, *rest)

    after_each_step(monkeypatch, lambda training, _: after.append(copy(training.model)))
    monkeypatch.setattr(evaluation, "predict", predicted)
    outcome = carry_out(tmp_path, "trainer.ema=0.5")
    average = after[0]
    for t, weights in enumerate(after[1:], start=1):
        decay = min(0.5, (1 + t) / (10 + t))
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in weights}
    privacy = outcome.record.document["privacy"]
    assert privacy == finished.record.document["privacy"] | {"ledger": privacy["ledger"]}
    saved = load(outcome.path.parent / "checkpoint.pt", outcome.record.document["run"])
    assert saved is not None
    for name, value in average.items():
        assert torch.allclose(saved.model[name], value, atol=1e-6)
        assert not torch.allclose(after[-1][name], value, atol=1e-6)
        assert torch.equal(saved.last[name], after[-1][name])
        assert all(torch.equal(weights[name], saved.model[name]) for weights in seen[-2:])
    assert outcome.record.document["measured"]["weights"]["digest"] == state_digest(saved.model)
    assert outcome.record.document["model"]["weights"] == "averaged, decay 0.5"
