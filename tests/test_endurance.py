"""kill -9 at any moment of a run, a sweep, a search, a federation and of `reproduce`: nothing
finished is lost, and the end is bit for bit that of the uninterrupted command, or the ledger is
higher.

`pytest --slow --kills 1000 --seed 7` says how often; the seed of a nightly run is in its first
lines, so that what failed can be repeated.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drivers import fork
from tests.test_kill import TINY, repeatable
from zdp_bench import cli, records
from zdp_bench.cli.parser import parse_arguments
from zdp_bench.report import papers

RUN = [*TINY, "execution.checkpoint_steps=3", "paths.results=RESULTS"]
SEARCH = ["--sampler", "random", "--trials", "3", "--epsilon", "3"]
COMMANDS: dict[str, list[str]] = {
    "run": ["run", *RUN],
    "secure": ["run", *RUN, "privacy.secure=true"],
    "sweep": ["run", "-m", *RUN, "seed=1,2,3", "algorithm.noise_multiplier=1.0,2.0"],
    "search": [
        *("search", *RUN, "dataset.validation_share=0.2", "optimizer.lr=interval(0.1,2)", *SEARCH)
    ],
    "federation": ["run", *RUN, "federated.nodes=3"],
    "reproduce": ["reproduce", "--profile", "smoke", "paths.results=RESULTS", "--seeds", "1"],
}


def attempt(name: str, results: Path, seconds: float | None) -> bool:
    """Carry out the command in a child, killed after so many seconds; True if it was killed."""
    words = [word.replace("RESULTS", str(results)) for word in COMMANDS[name]]
    log = results.with_suffix(".txt")
    child = fork(lambda: cli.main(words), log)
    if seconds is not None:
        ended = os.pidfd_open(child)
        select.select([ended], [], [], seconds)
        os.close(ended)
        os.kill(child, signal.SIGKILL)  # a child that has ended keeps its number until waited for
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), (name, results, log.read_text()[-2000:])
    return status == signal.SIGKILL


def kill(name: str, folder: Path, kills: int, seed: int) -> list[Path]:
    """Give the command again and again, killed at moments drawn from the time T of a whole one.

    Whenever it ends all the same, it starts in a new results folder. Returns the folders: that of
    the whole command, and those of the killed ones, finished.
    """
    began = time.monotonic()
    ends = [folder / "whole", folder / "killed-1"]
    assert not attempt(name, ends[0], None)
    lasts, rng, landed = time.monotonic() - began, random.Random(f"{name}{seed}"), 0
    while landed < kills:
        if attempt(name, ends[-1], rng.uniform(0, lasts)):
            landed += 1
        else:
            ends.append(folder / f"killed-{len(ends)}")
    attempt(name, ends[-1], None)
    return ends


def read(results: Path) -> dict[str, records.Record]:
    """Every record under a results folder, by where it lies."""
    found = {path: records.read(path) for path in results.rglob("record.json")}
    return {
        str(path.relative_to(results)): repeatable(record)
        for path, record in found.items()
        if record
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_is_one_that_exists(name: str) -> None:
    parse_arguments(COMMANDS[name])


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_killed_over_and_over_ends_as_the_whole_one(
    name: str,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
    set_threads: Callable[[int], None],
) -> None:
    if name == "federation":
        pytest.importorskip("flwr")
    set_threads(1)  # a fork of several may wait for threads that it lacks
    # Of `reproduce`; all tables take ten minutes.
    monkeypatch.setattr(papers, "available", lambda: ["zeta_dp_2021/1"])
    with contextlib.suppress(SystemExit):  # its children have what this process imported
        cli.main([word.replace("RESULTS", str(tmp_path / "warm")) for word in COMMANDS[name]])
    seed = pytestconfig.getoption("seed")
    kills = -(-pytestconfig.getoption("kills") // len(COMMANDS))
    first, *ends = (read(end) for end in kill(name, tmp_path, kills, seed))
    assert first
    for killed in ends:
        assert killed.keys() == first.keys(), f"--seed {seed}"
        if name != "secure":
            assert killed == first, f"--seed {seed}"
            continue
        for where, record in killed.items():
            privacy, least = record["privacy"], first[where]["privacy"]
            assert privacy["steps"] == privacy["ledger"]["entries"] >= least["steps"]
            assert privacy["epsilon_tight"] >= least["epsilon_tight"]
