"""The learning rate's schedule: torch's own, one step an epoch, the same after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_experiment import Silent, carry_out, configured, repeatable
from zdp_bench import experiment
from zdp_bench.config import compose, experiment_digest, parse
from zdp_bench.errors import UserError

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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the killed run's ledger stays open
@pytest.mark.parametrize("name", ["step_lr", "multi_step_lr", "exponential_lr", "cosine_annealing_lr", "linear_lr"])
def test_a_killed_run_resumes_its_schedule(name: str, tmp_path: Path) -> None:
    overrides = [f"scheduler={name}", "trainer.epochs=3", *(["scheduler.milestones=[1,2]"] if name == "multi_step_lr" else [])]
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
    assert experiment_digest(plain) == experiment_digest(type(plain)(**{**vars(plain), "resolved": without}))
    assert experiment_digest(parse(compose(["recipe=quickstart", "scheduler=step_lr"]))) != experiment_digest(plain)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("scheduler=stp_lr", "scheduler 'stp_lr' is not known. Did you mean 'step_lr'"),
        ("+scheduler.gama=1", "scheduler.gama"),
    ],
)
def test_a_wrong_scheduler_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse(compose(["recipe=quickstart", *([] if override.startswith("scheduler=") else ["scheduler=step_lr"]), override]))


def test_torchs_refusal_of_a_value_is_one_sentence() -> None:
    config = parse(compose(["recipe=quickstart", "scheduler=linear_lr", "scheduler.start_factor=7"]))
    with pytest.raises(UserError, match=r"scheduler=linear_lr: .*factor"):
        experiment.build_scheduler(config, torch.optim.SGD([torch.zeros(1)], lr=1.0))
