"""kill -9 at any moment of a run, a sweep, a search, a federation and of `reproduce`: nothing
finished is lost, and the end is bit for bit that of the uninterrupted command, or the ledger is
higher.

`pytest --slow --kills 1000 --seed 7` says how often; the seed of a nightly run is in its first
lines, so that what failed can be repeated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.drivers import driven
from tests.test_kill import TINY, repeatable
from zdp_bench import records
from zdp_bench.cli.parser import parse_arguments

RUN = [*TINY, "execution.checkpoint_steps=3", "paths.results=RESULTS"]
COMMANDS: dict[str, list[str]] = {
    "run": ["run", *RUN],
    "secure": ["run", *RUN, "privacy.secure=true"],
    "sweep": ["run", "-m", *RUN, "seed=1,2,3", "algorithm.noise_multiplier=1.0,2.0"],
    "search": ["search", *RUN, "dataset.validation_share=0.2", "optimizer.lr=interval(0.1,2)"],
    "federation": ["run", *RUN, "federated.nodes=3"],
    "reproduce": ["reproduce", "--profile", "smoke", "paths.results=RESULTS", "--seeds", "1"],
}

COMMANDS["search"] += ["--sampler", "random", "--trials", "3", "--epsilon", "3"]


def carried_out(folder: Path, kills: dict[str, int], seed: int) -> list[dict[str, Any]]:
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


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_is_one_that_exists(name: str) -> None:
    parse_arguments(COMMANDS[name])


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
    (job,) = carried_out(tmp_path, {name: kills}, seed)
    assert job["kills"] == kills
    compare(job, seed)
