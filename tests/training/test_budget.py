"""privacy.max_epsilon: training stops before the step that would exceed it, and what it stopped
with is kept and recorded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ledgers import steps_in
from zdp_bench import records
from zdp_bench.config import compose, parse
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.training import setup
from zdp_bench.training.run import run

TINY = [
    "recipe=quickstart",
    "trainer.epochs=3",
    "trainer.sample_rate=0.1",
    "model.hidden=[8]",
    "accountant=gdp_clt",
    "threads=1",
]


class Heard:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[tuple[int, int]] = []  # as they are shown: number, and step

    def started(self, *_: Any) -> None: ...
    def stepped(self, step: int) -> None:
        self.steps.append(step)

    def evaluated(self, epoch: int, step: int, *_: Any) -> None:
        self.epochs.append((epoch, step))


def carry_out(results: Path, *overrides: str) -> tuple[records.Record, Path, Heard]:
    heard = Heard()
    outcome = run(parse(compose([*TINY, f"paths.results={results}", *overrides])), heard)
    return outcome.record, outcome.path.parent, heard


def epsilon_at(record: records.Record, steps: int) -> float:
    """The tight ε of `steps` steps of what the record says was run."""
    blocks = tuple(
        Block(**{**b, "shape": tuple(b["shape"]), "fft_dims": ()})
        for b in record["privacy"]["mechanism"]["blocks"]
    )
    return tight_epsilon(
        Mechanism(blocks, Sampling(**record["privacy"]["sampling"])),
        steps,
        record["privacy"]["delta"],
    )


@pytest.mark.parametrize("budget", [0.6, 0.9, 1.1])
def test_one_more_step_would_exceed_the_budget(tmp_path: Path, budget: float) -> None:
    record, home, heard = carry_out(tmp_path, f"privacy.max_epsilon={budget}")
    steps = record["privacy"]["steps"]
    assert record["stopped_by"] == "budget"
    assert heard.steps == list(range(1, steps + 1))
    assert (
        record["privacy"]["epsilon_tight"]
        == epsilon_at(record, steps)
        <= budget
        < epsilon_at(record, steps + 1)
    )
    assert len(steps_in(home / "ledger.jsonl")) == steps == record["privacy"]["ledger"]["entries"]
    assert record["epochs"][-1]["step"] == steps
    assert heard.epochs[-1] == (-(-steps // 10), steps)  # the epoch under way, of ten steps
    assert record["epochs"][-1]["epsilon_tight"] == record["privacy"]["epsilon_tight"]
    assert [epoch["step"] for epoch in record["epochs"]] == sorted(
        {epoch["step"] for epoch in record["epochs"]}
    )


def test_the_last_weights_are_kept_and_are_those_that_were_evaluated(tmp_path: Path) -> None:
    stopped, home, _ = carry_out(tmp_path / "stopped", "privacy.max_epsilon=1.1")
    weights = torch.load(home / "checkpoint.pt", weights_only=True)
    assert weights["step"] == stopped["privacy"]["steps"]
    assert (
        stopped["epochs"][-1]["accuracy"]
        == stopped["metrics"]["accuracy"]
        == stopped["headline"]["value"]
    )


def test_a_budget_for_the_whole_run_stops_nothing(tmp_path: Path) -> None:
    free, _, _ = carry_out(tmp_path / "free")
    exact = free["privacy"]["epsilon_tight"]
    enough, _, _ = carry_out(tmp_path / "enough", f"privacy.max_epsilon={exact}")
    assert enough["stopped_by"] == "epochs"
    assert enough["privacy"]["steps"] == free["privacy"]["steps"] == 30


def test_a_budget_that_ends_with_an_epoch_records_that_epoch_once(tmp_path: Path) -> None:
    free, _, _ = carry_out(tmp_path / "free")
    at_first = free["epochs"][0]
    stopped, _, _ = carry_out(
        tmp_path / "stopped", f"privacy.max_epsilon={at_first['epsilon_tight']}"
    )
    assert [(epoch["step"], epoch["epsilon_tight"]) for epoch in stopped["epochs"]] == [
        (10, at_first["epsilon_tight"])
    ]
    assert stopped["stopped_by"] == "budget"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["privacy.max_epsilon=1e-9"],
            r"^privacy\.max_epsilon=1e-09: one step costs a tight ε of \d",
        ),
        (
            ["privacy.max_epsilon=0.6", "privacy.range_test_steps=25"],
            r"=0\.6: one step after privacy\.range_test_steps=25 costs",
        ),
        (
            ["privacy.max_epsilon=0.4", "federated.nodes=2", "federated.local_steps=9"],
            r"one round of federated\.local_steps=9",
        ),
    ],
)
def test_a_budget_too_small_for_one_step_is_refused(
    tmp_path: Path, words: list[str], said: str
) -> None:
    config = parse(compose([*TINY, f"paths.results={tmp_path}", *words]))
    with pytest.raises(UserError, match=said) as refused:
        validate(config, trial=False)
    if config.federated.nodes is None:  # a federation is carried out by tests/extras/federated
        with pytest.raises(UserError, match=said):
            run(config, Heard())
        assert not list(tmp_path.glob("runs/*/*/record.json"))
    named = re.search(r"ε of ([\d.]+)", str(refused.value))
    assert named
    enough = replace(config, privacy=replace(config.privacy, max_epsilon=float(named[1])))
    assert validate(enough, trial=False).privacy["max_epsilon"] == float(named[1])


def test_a_spent_budget_reads_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, home, _ = carry_out(tmp_path, "privacy.max_epsilon=0.6")
    (home / "record.json").unlink()

    def forbidden(*_: Any) -> Any:
        raise AssertionError("a training record was read")
        yield

    monkeypatch.setattr(setup, "micro_batches", forbidden)
    again, _, heard = carry_out(tmp_path, "privacy.max_epsilon=0.6")  # from its checkpoint
    assert heard.steps == []
    assert again["epochs"] == record["epochs"]
    assert again["privacy"] == record["privacy"]


def test_secure_runs_differ_and_say_so(tmp_path: Path) -> None:
    first, home, _ = carry_out(tmp_path / "a", "privacy.secure=true", "trainer.epochs=1")
    other, elsewhere, _ = carry_out(tmp_path / "b", "privacy.secure=true", "trainer.epochs=1")
    assert first["privacy"]["randomness"] == "cryptographic"
    assert first["run"] == other["run"]
    weights = [
        torch.load(path / "checkpoint.pt", weights_only=True)["model"] for path in (home, elsewhere)
    ]
    assert not all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    seeded, _, _ = carry_out(tmp_path / "c", "trainer.epochs=1")
    assert seeded["privacy"]["randomness"] == "seeded"
    assert seeded["run"] != first["run"]
    assert seeded["privacy"]["epsilon_tight"] == first["privacy"]["epsilon_tight"]
