"""The learning rate's schedule: torch's own, one step an epoch; ours, one step a step; the same
after a kill."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_run import Silent, carry_out, configured, repeatable
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Plugin
from zdp_bench.data import Examples, Splits
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.training import build, evaluation
from zdp_bench.training import run as experiment

RECORDS, VALIDATION = (Examples(torch.zeros(2, 3), torch.zeros(2)) for _ in range(2))
UNVALIDATED = Splits(RECORDS, RECORDS, (3,), 1, "synthetic", "")
STEP = ["scheduler=step_lr", "scheduler.step_size=1", "scheduler.gamma=0.5", "trainer.epochs=4"]


def test_the_rate_follows_torchs_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = experiment.private_step

    def watched(training: Any, *rest: Any) -> None:
        rates.append(training.optimizer.param_groups[0]["lr"])
        step(training, *rest)

    monkeypatch.setattr(experiment, "private_step", watched)
    carry_out(tmp_path / "torchs", *STEP, "optimizer.lr=0.8")
    assert rates == [0.8] * 10 + [0.4] * 10 + [0.2] * 10 + [0.1] * 10
    rates.clear()
    scaled = carry_out(
        tmp_path / "scaled", *STEP, "optimizer.lr=0.8", "trainer.lr_batch=36", "trainer.epochs=1"
    )
    expected = scaled.record["privacy"]["sampling"]["expected_batch_size"]
    assert expected > 100
    assert rates == pytest.approx([0.8 * expected / 36] * 10)


def test_warmup_cosine_takes_a_step_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    step = experiment.private_step

    def watched(training: Any, *rest: Any) -> None:
        rates.append(training.optimizer.param_groups[0]["lr"])
        step(training, *rest)

    monkeypatch.setattr(experiment, "private_step", watched)
    own = ["scheduler=warmup_cosine", "scheduler.warmup=0.2", "scheduler.final=0.1"]
    carry_out(tmp_path, *own, "optimizer.lr=1.0")  # of 20 steps 4 rise
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[12] == pytest.approx(0.55)  # half way down to the tenth
    assert rates[-1] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 15 / 16)) / 2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_warmup_cosine_without_a_warm_up_starts_at_the_rate() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    config = parse(compose(["recipe=quickstart", "scheduler=warmup_cosine", "scheduler.warmup=0"]))
    schedule = build.build_scheduler(config, optimizer, UNVALIDATED, 1)
    assert schedule is not None
    assert optimizer.param_groups[0]["lr"] == 2.0
    with pytest.raises(UserError, match=r"scheduler\.warmup=1.*in \[0, 1\)"):
        parse(compose(["recipe=quickstart", "scheduler=warmup_cosine", "scheduler.warmup=1"]))


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the killed run's ledger stays open
@pytest.mark.parametrize(
    "name", ["step_lr", "multi_step_lr", "exponential_lr", "cosine_annealing_lr", "linear_lr"]
)
def test_a_killed_run_resumes_its_schedule(name: str, tmp_path: Path) -> None:
    overrides = [
        f"scheduler={name}",
        "trainer.epochs=3",
        *(["scheduler.milestones=[1,2]"] if name == "multi_step_lr" else []),
    ]
    whole = carry_out(tmp_path / "whole", *overrides).record

    class KilledError(Exception): ...

    class Killer(Silent):
        def stepped(self, step: int) -> None:
            if step == 25:
                raise KilledError

    with pytest.raises(KilledError):
        experiment.run(configured(tmp_path / "cut", *overrides), Killer())
    assert repeatable(carry_out(tmp_path / "cut", *overrides).record) == repeatable(whole)


def test_no_scheduler_leaves_the_digest_as_it_was() -> None:
    plain = parse(compose(["recipe=quickstart"]))
    assert plain.scheduler is None
    without = {key: value for key, value in plain.resolved.items() if key != "scheduler"}
    assert experiment_digest(plain) == experiment_digest(
        type(plain)(**{**vars(plain), "resolved": without})
    )
    assert experiment_digest(
        parse(compose(["recipe=quickstart", "scheduler=step_lr"]))
    ) != experiment_digest(plain)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("scheduler=stp_lr", "scheduler 'stp_lr' is not known. Did you mean 'step_lr'"),
        ("+scheduler.gama=1", "scheduler.gama"),
    ],
)
def test_a_wrong_scheduler_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse(
            compose(
                [
                    "recipe=quickstart",
                    *([] if override.startswith("scheduler=") else ["scheduler=step_lr"]),
                    override,
                ]
            )
        )


def test_torchs_refusal_of_a_value_is_one_sentence() -> None:
    config = parse(compose(["recipe=quickstart"]))
    config = dataclasses.replace(
        config, scheduler=Plugin("linear_lr", {"start_factor": 7})
    )  # what the key's range would refuse
    with pytest.raises(UserError, match=r"scheduler=linear_lr: .*factor"):
        build.build_scheduler(config, torch.optim.SGD([torch.zeros(1)], lr=1.0), UNVALIDATED, 1)


def test_the_rate_is_halved_when_the_public_validation_loss_stagnates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses 3, 2, 2, 2, 1: the second epoch in a row without a better one is the fourth; torch
    lowers the rate after it."""
    losses = iter([3.0, 2.0, 2.0, 2.0, 1.0])
    watched: list[Examples] = []

    def evaluated(model: Any, task: Any, records: Examples, device: Any) -> dict[str, float]:
        if records is VALIDATION:
            watched.append(records)
            return {"loss": next(losses)}
        return {"loss": 0.0, "accuracy": 1.0}

    monkeypatch.setattr(evaluation, "evaluate", evaluated)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    data = dataclasses.replace(UNVALIDATED, validation=VALIDATION)
    config = parse(compose(["recipe=quickstart", "scheduler=reduce_on_plateau"]))
    scheduler = build.build_scheduler(config, optimizer, data, 1)
    assert scheduler is not None
    rates = []
    for _ in range(5):
        evaluation.step_schedule(
            scheduler,
            torch.nn.Identity(),
            None,
            data.validation,
            torch.device("cpu"),  # type: ignore[arg-type]
        )
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert len(watched) == 5


def test_a_plateau_needs_validation_records() -> None:
    config = parse(compose(["recipe=quickstart", "scheduler=reduce_on_plateau"]))
    with pytest.raises(
        UserError, match=r"dataset=phase_digits has none: .*or more dataset\.validation_share"
    ) as run:
        build.build_scheduler(config, torch.optim.SGD([torch.zeros(1)], lr=1.0), UNVALIDATED, 1)
    with pytest.raises(UserError) as told:  # as early as that, and in the same words
        validate(config)
    assert str(told.value) == str(run.value)
    films = [
        "recipe=chest_xray_small_strict",
        "dataset=chest_xray_synthetic",
        "scheduler=reduce_on_plateau",
    ]
    validate(parse(compose(films)), trial=False)
    with pytest.raises(
        UserError, match=r"has none: use another scheduler, or more dataset\.validation_share\."
    ):
        validate(parse(compose([*films, "dataset.validation_share=0"])), trial=False)
