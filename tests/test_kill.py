"""kill -9 at any moment of a step or a command: nothing finished is lost, and ε is never lower.

A killed run ends bit for bit as the uninterrupted one, or its ledger is higher. For nightly runs,
`pytest --slow --kills 1000 --seed 7` says how often whole commands are killed; the seed is in the
first lines, so that what failed can be repeated.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.drivers import driven
from tests.kill_driver import MOMENTS
from zdp_bench import records
from zdp_bench.privacy.accounting import pld

STEPS, EVERY = 24, 12  # 6 epochs of 4 steps, a checkpoint every 3 epochs
TINY = [
    "recipe=quickstart",
    "trainer.epochs=6",
    "trainer.sample_rate=0.25",
    "model.hidden=[4]",
    "trainer.checkpoint_epochs=3",
]
TINY += ["accountant=gdp_clt"]  # the claimed ε is not looked at here, and this accountant is quick
SECURE = [
    "privacy.secure=true",
    "privacy.max_epsilon=50",
]  # a budget that is never spent must never stop a resumed run
BUDGET = "privacy.max_epsilon=3.0"


KILLS = [[moment, at] for moment, at in zip(MOMENTS, (5, 12, 20, 8, 3, 17), strict=True)]


def jobs() -> list[dict[str, Any]]:
    """A whole run; one killed at each moment, and thrice; with secure noise; with a budget."""
    asked: list[tuple[str, list[str], list[list[Any]]]] = [
        ("whole", TINY, []),
        *((f"seeded-{place}", TINY, [kill]) for place, kill in enumerate(KILLS)),
        ("seeded-thrice", TINY, [["before the update", step] for step in (20, 17, 23)]),
        ("secure-0", [*TINY, *SECURE], [["before the noise", 14]]),
        ("secure-1", [*TINY, *SECURE], [["in it", 6]]),
        ("budget-0", [*TINY, BUDGET], []),
        ("budget-1", [*TINY, BUDGET], [["before the update", 11]]),
    ]
    return [{"name": name, "overrides": words, "kills": kills} for name, words, kills in asked]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every job, carried out: name -> {"kills", "statuses", "home", "record"}."""
    return carried_out(tmp_path_factory.mktemp("killed"), jobs())


def carried_out(folder: Path, wanted: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    asked = {job["name"]: job for job in wanted}
    found = {}
    for job in driven("kill_driver.py", str(folder), json.dumps([*asked.values()])):
        record = records.read(Path(job["home"]) / "record.json")
        assert record, job
        found[job["name"]] = asked[job["name"]] | job | {"record": record}
    assert found.keys() == asked.keys()
    return found


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_at_any_time_a_quickstart_ends_as_the_uninterrupted_one(tmp_path: Path) -> None:
    """kill -9 from outside, whatever the process is at: a step, the ledger, an evaluation, a
    checkpoint, the record."""
    count = 30
    quickstart = ["recipe=quickstart", "trainer.epochs=3", "execution.checkpoint_steps=7"]
    rng = random.Random(count)
    moments = [["any time", rng.randrange(61), rng.uniform(0, 0.02)] for _ in range(count)]
    killed = [
        {"name": f"killed-{i}", "overrides": quickstart, "kills": [moment]}
        for i, moment in enumerate(moments)
    ]
    found = carried_out(
        tmp_path, [{"name": "whole", "overrides": quickstart, "kills": []}, *killed]
    )
    for run in named(found, "killed"):
        assert run["statuses"][-1] == 0
        assert repeatable(run["record"]) == repeatable(found["whole"]["record"]), run["kills"]
        assert run["record"]["privacy"]["steps"] == 60
    landed = sum(run["statuses"][0] == 9 for run in named(found, "killed"))
    assert landed > count / 2, "the kills came after the end: nothing was tested"


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
    unbroken = {
        epoch["step"]: epoch["epsilon_tight"] for epoch in runs["whole"]["record"]["epochs"]
    }
    assert list(unbroken) == [4, 8, 12, 16, 20, 24]
    for run in [*named(runs, "seeded"), *named(runs, "secure")]:
        assert [epoch["step"] for epoch in run["record"]["epochs"]] == list(unbroken)
        for epoch in run["record"]["epochs"]:
            assert epoch["epsilon_tight"] >= unbroken[epoch["step"]], run["kills"]
        assert (
            run["record"]["privacy"]["epsilon_tight"]
            >= runs["whole"]["record"]["privacy"]["epsilon_tight"]
        )


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
        assert privacy["steps"] == privacy["ledger"]["entries"] == releases, run["kills"]
        assert run["record"]["stopped_by"] == "epochs"
        assert privacy["randomness"] == "cryptographic"
        assert privacy["epsilon_tight"] == pytest.approx(pld(1.5, 0.25, releases, 1e-4))


def test_a_killed_run_still_stops_where_its_budget_ends(runs: dict[str, dict[str, Any]]) -> None:
    """A step paid for before the kill is not paid for, and not refused, a second time."""
    whole, *killed = named(runs, "budget")
    record = whole["record"]
    assert record["stopped_by"] == "budget"
    assert 11 < record["privacy"]["steps"] < STEPS
    assert (
        record["privacy"]["epsilon_tight"]
        <= 3.0
        < pld(1.5, 0.25, record["privacy"]["steps"] + 1, 1e-4)
    )
    for run in killed:
        assert repeatable(run["record"]) == repeatable(record), run["kills"]


# whole commands, killed over and over

WHERE = [*TINY, "threads=1", "execution.checkpoint_steps=3", "paths.results=RESULTS"]
COMMANDS: dict[str, list[str]] = {
    "run": ["run", *WHERE],
    "secure": ["run", *WHERE, "privacy.secure=true"],
    "sweep": ["run", "-m", *WHERE, "seed=1,2,3", "algorithm.noise_multiplier=1.0,2.0"],
    "search": ["search", *WHERE, "dataset.validation_share=0.2", "optimizer.lr=interval(0.1,2)"],
    "federation": ["run", *WHERE, "federated.nodes=3", "trainer.epochs=2"],
    "reproduce": ["reproduce", "--profile", "smoke", "--results", "RESULTS", "--seeds", "1"],
}

COMMANDS["search"] += ["--sampler", "random", "--trials", "3", "--epsilon", "3"]


def kill_over_and_over(folder: Path, kills: dict[str, int], seed: int) -> list[dict[str, Any]]:
    """Kill each command so often; one line a command, as the driver prints it."""
    jobs = [
        {"name": name, "words": COMMANDS[name], "kills": count, "seed": seed}
        for name, count in kills.items()
    ]
    return driven("endurance_driver.py", str(folder), json.dumps(jobs))


def read(results: str) -> dict[str, records.Record]:
    """Every record under a results folder, by where it lies."""
    found = {
        str(path.relative_to(results)): records.read(path)
        for path in Path(results).rglob("record.json")
    }
    assert all(found.values())
    return {where: repeatable(record) for where, record in found.items() if record}


def compare(job: dict[str, Any], seed: int) -> None:
    """Hold what was killed against the whole command: bit-equal, or the ledger higher."""
    whole = read(job["whole"])
    assert whole, job
    for end in job["ends"]:
        killed = read(end)
        assert killed.keys() == whole.keys(), (end, f"--seed {seed}")
        if job["name"] != "secure":
            assert killed == whole, (end, f"--seed {seed}")
            continue
        for where, record in killed.items():
            privacy, least = record["privacy"], whole[where]["privacy"]
            assert privacy["steps"] == privacy["ledger"]["entries"] >= least["steps"], end
            assert privacy["epsilon_tight"] >= least["epsilon_tight"], end


@pytest.mark.slow
def test_a_command_that_is_killed_a_few_times_ends_as_the_whole_one(tmp_path: Path) -> None:
    (job,) = kill_over_and_over(tmp_path, {"sweep": 2}, seed=0)
    assert job["kills"] == 2
    compare(job, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_killed_over_and_over_ends_as_the_whole_one(
    name: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if name == "federation":
        pytest.importorskip("flwr")
    seed = pytestconfig.getoption("seed")
    kills = -(-pytestconfig.getoption("kills") // len(COMMANDS))
    (job,) = kill_over_and_over(tmp_path, {name: kills}, seed)
    assert job["kills"] == kills
    compare(job, seed)
