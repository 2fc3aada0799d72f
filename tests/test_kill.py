"""kill -9 at any moment of a step: ε after the resume is never below an uninterrupted run's at the
same step."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.drivers import fork
from zdp_bench import records
from zdp_bench.config import configured
from zdp_bench.config.schema import Run
from zdp_bench.privacy.accounting import pld
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.training import checkpoint
from zdp_bench.training import run as experiment
from zdp_bench.training import step as engine
from zdp_bench.training.progress import Watcher

MOMENTS = ("in the ledger's line", "before the noise", "before the update", "after the update")
MOMENTS += ("before the checkpoint", "in it")
STEPS, EVERY = 16, 8  # 4 epochs of 4 steps, a checkpoint every 2 epochs
TINY = ["recipe=quickstart", "trainer.epochs=4", "trainer.sample_rate=0.25", "model.hidden=[4]"]
# The claimed ε is not looked at here, and this accountant is quick.
TINY += ["trainer.checkpoint_epochs=2", "threads=1", "accountant=gdp_clt"]
# A budget that is never spent must never stop a resumed run.
SECURE = ["privacy.secure=true", "privacy.max_epsilon=50"]
BUDGET = "privacy.max_epsilon=2.6"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arrange(moment: str, at: int) -> None:
    """Kill this process at `moment` of step `at` (from 0), or at the first checkpoint after it."""
    here = {"step": -1}
    step_ = experiment.private_step

    def private_step(training: Any, step: int, *rest: Any) -> None:
        here["step"] = step
        step_(training, step, *rest)
        if moment == "after the update" and step == at:
            die()

    def in_line(ledger: Ledger, body: dict[str, Any]) -> bool:
        own = range(body.get("step", -1), body.get("to", body.get("step", -1) + 1))
        if found := at in own and "state" not in body:
            ledger._file.write(b'{"sha256": "0')
        return found

    def now(*_: Any) -> bool:
        return here["step"] == at

    def late(*_: Any) -> bool:
        return here["step"] >= at

    def in_place(source: Any, target: Any) -> bool:
        return str(target).endswith("checkpoint.pt") and late()

    experiment.private_step = private_step
    places: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "in the ledger's line": (Ledger, "_put", in_line),
        "before the noise": (engine, "add_noise", now),
        "before the update": (engine, "descend", now),
        "before the checkpoint": (checkpoint, "save", late),
        "in it": (os, "replace", in_place),
    }
    if moment in places:
        where, name, when = places[moment]
        real = getattr(where, name)
        setattr(where, name, lambda *given, **more: die() if when(*given) else real(*given, **more))


def attempt(config: Run, kill: list[Any] | None) -> int:
    """Carry out the run in a child; its wait status: 0, or 9 when it killed itself."""

    def work() -> None:
        if kill:
            arrange(*kill)
        experiment.run(config, Watcher())

    return os.waitpid(fork(work), 0)[1]


def random_kills(count: int, seed: int) -> list[list[Any]]:
    """`count` random times; every moment once among six."""
    rng = random.Random(seed)
    return [[MOMENTS[i % len(MOMENTS)], rng.randrange(STEPS)] for i in range(count)]


def jobs() -> dict[str, tuple[list[str], list[list[Any]]]]:
    """Return name -> (overrides, kills): each kill ends one attempt at the run."""
    found: dict[str, tuple[list[str], list[list[Any]]]] = {
        "whole": (TINY, []),
        "seeded-thrice": (TINY, [["before the update", step] for step in (13, 11, 15)]),
        "budget": ([*TINY, BUDGET], []),
        "budget-killed": ([*TINY, BUDGET], [["before the update", 7]]),
    }
    for i, kill in enumerate(random_kills(6, 1)):
        found[f"seeded-{i}"] = TINY, [kill]
    for i, kill in enumerate(random_kills(2, 2)):
        found[f"secure-{i}"] = [*TINY, *SECURE], [kill]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every job, carried out: name -> {"kills", "statuses", "record"}.

    At night `tests/test_endurance.py` kills these and other commands at random moments.
    """
    folder, found = tmp_path_factory.mktemp("killed"), {}
    for name, (overrides, kills) in jobs().items():
        config = configured([*overrides, f"paths.results={folder / name}"])
        if kills:
            statuses = [attempt(config, kill) for kill in [*kills, None]]
        else:  # in this process: its children find each ε worked out
            experiment.run(config, Watcher())
            statuses = [0]
        (home,) = (folder / name).glob("runs/*/*.lock")
        record = records.read(home.with_suffix("") / "record.json")
        assert record, name
        found[name] = {"kills": kills, "statuses": statuses, "record": record}
    return found


def repeatable(record: records.Record) -> records.Record:
    return {key: value for key, value in record.items() if key not in ("environment", "measured")}


def named(runs: dict[str, dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    return [run for name, run in runs.items() if name.startswith(prefix)]


def test_the_kills_were_kills(runs: dict[str, dict[str, Any]]) -> None:
    for run in runs.values():
        assert run["statuses"] == [9] * len(run["kills"]) + [0]


def test_epsilon_is_never_below_an_uninterrupted_runs_at_the_same_step(
    runs: dict[str, dict[str, Any]],
) -> None:
    whole = runs["whole"]["record"]
    unbroken = {epoch["step"]: epoch["epsilon_tight"] for epoch in whole["epochs"]}
    assert list(unbroken) == [4, 8, 12, 16]
    for run in [*named(runs, "seeded"), *named(runs, "secure")]:
        assert [epoch["step"] for epoch in run["record"]["epochs"]] == list(unbroken)
        for epoch in run["record"]["epochs"]:
            assert epoch["epsilon_tight"] >= unbroken[epoch["step"]], run["kills"]
        own, least = run["record"]["privacy"], whole["privacy"]
        assert own["epsilon_tight"] >= least["epsilon_tight"]


def test_with_seeded_noise_a_killed_run_ends_as_the_uninterrupted_one(
    runs: dict[str, dict[str, Any]],
) -> None:
    whole = repeatable(runs["whole"]["record"])
    assert whole["privacy"]["steps"] == STEPS
    assert len(named(runs, "seeded")) == 7
    for run in named(runs, "seeded"):
        assert repeatable(run["record"]) == whole, run["kills"]


def test_with_secure_noise_every_step_drawn_again_counts_again(
    runs: dict[str, dict[str, Any]],
) -> None:
    for run in named(runs, "secure"):
        ((moment, at),) = run["kills"]
        if moment in ("before the checkpoint", "in it"):  # the first checkpoint after that step
            at = EVERY - 1 if at < EVERY else STEPS - 1
        kept = at // EVERY * EVERY  # steps in the checkpoint it went on from
        releases = STEPS + at + 1 - kept
        privacy = run["record"]["privacy"]
        steps = privacy["steps"]  # and the ledger counts what it had reserved at a kill
        assert releases <= steps == privacy["ledger"]["entries"] <= releases + EVERY, run["kills"]
        assert run["record"]["stopped_by"] == "epochs"
        assert privacy["randomness"] == "cryptographic"
        assert privacy["epsilon_tight"] == pytest.approx(pld(1.5, 0.25, steps, 1e-4))


def test_a_killed_run_still_stops_where_its_budget_ends(runs: dict[str, dict[str, Any]]) -> None:
    """A step paid for before the kill is not paid for, and not refused, a second time."""
    whole, *killed = named(runs, "budget")
    record = whole["record"]
    assert record["stopped_by"] == "budget"
    privacy, steps = record["privacy"], record["privacy"]["steps"]
    assert 7 < steps < STEPS
    assert privacy["epsilon_tight"] <= 2.6 < pld(1.5, 0.25, steps + 1, 1e-4)
    for run in killed:
        assert repeatable(run["record"]) == repeatable(record), run["kills"]
