"""The learning rate's schedule: torch's own, one step an epoch, the same after a kill."""

from __future__ import annotations

import dataclasses
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
    carry_out(tmp_path, *STEP, "optimizer.lr=0.8")
    assert rates == [0.8] * 10 + [0.4] * 10 + [0.2] * 10 + [0.1] * 10


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
        build.build_scheduler(config, torch.optim.SGD([torch.zeros(1)], lr=1.0), UNVALIDATED)


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
    scheduler = build.build_scheduler(config, optimizer, data)
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
        UserError, match=r"dataset=phase_digits has none: .*or a data set that has some"
    ) as run:
        build.build_scheduler(config, torch.optim.SGD([torch.zeros(1)], lr=1.0), UNVALIDATED)
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
