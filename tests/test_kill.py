"""kill -9 at any moment of a step, or of a command: nothing finished is lost, the end is bit for
bit that of the uninterrupted one or the ledger is higher, and ε is never below it.

`pytest --slow --kills 1000 --seed 7 tests/test_kill.py` kills whole commands as often as it says;
the seed of a nightly run is in its first lines, so that what failed can be repeated.
"""

import contextlib
import os
import random
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.drivers import fork
from tests.training.test_run import repeatable
from zdp_bench import cli, records
from zdp_bench.cli.parser import parse_arguments
from zdp_bench.config import configured
from zdp_bench.config.schema import Run
from zdp_bench.privacy.accounting import pld
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.ledger_lines import Step
from zdp_bench.report import papers
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

    def in_line(ledger: Ledger, entry: Any) -> bool:
        is_now = isinstance(entry, Step) and entry.step == at
        if is_now:
            ledger._file.write(b'{"sha256": "0')
        return is_now

    def now(*_: Any) -> bool:
        return here["step"] == at

    def late(*_: Any) -> bool:
        return here["step"] >= at

    def in_place(source: Any, target: Any) -> bool:
        return str(target).endswith("checkpoint.pt") and late()

    experiment.private_step = private_step
    places: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "in the ledger's line": (Ledger, "_write_line", in_line),
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
        experiment.execute(config, Watcher())

    return os.waitpid(fork(work), 0)[1]


def random_kills(count: int, seed: int) -> list[list[Any]]:
    """`count` random times; every moment once among six."""
    rng = random.Random(seed)
    return [[MOMENTS[i % len(MOMENTS)], rng.randrange(STEPS)] for i in range(count)]


def jobs() -> dict[str, tuple[list[str], list[list[Any]]]]:
    """Return name -> (overrides, kills): each kill ends one attempt at the run."""
    jobs_by_name: dict[str, tuple[list[str], list[list[Any]]]] = {
        "whole": (TINY, []),
        "seeded-thrice": (TINY, [["before the update", step] for step in (13, 11, 15)]),
        "budget": ([*TINY, BUDGET], []),
        "budget-killed": ([*TINY, BUDGET], [["before the update", 7]]),
    }
    for i, kill in enumerate(random_kills(6, 1)):
        jobs_by_name[f"seeded-{i}"] = TINY, [kill]
    for i, kill in enumerate(random_kills(2, 2)):
        jobs_by_name[f"secure-{i}"] = [*TINY, *SECURE], [kill]
    return jobs_by_name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every job, carried out: name -> {"kills", "statuses", "record"}."""
    folder, finished = tmp_path_factory.mktemp("killed"), {}
    for name, (overrides, kills) in jobs().items():
        config = configured([*overrides, f"paths.results={folder / name}"])
        if kills:
            statuses = [attempt(config, kill) for kill in [*kills, None]]
        else:  # in this process: its children find each ε worked out
            experiment.execute(config, Watcher())
            statuses = [0]
        (home,) = (folder / name).glob("runs/*/*.lock")
        record = records.read_document(home.with_suffix("") / "record.json")
        assert record, name
        finished[name] = {"kills": kills, "statuses": statuses, "record": record}
    return finished


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
        steps = privacy["steps"]
        assert releases == steps == privacy["ledger"]["entries"], run["kills"]
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


# -------------------------------------------- at random moments of every command that takes long

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


def carry_out(name: str, results: Path, seconds: float | None) -> bool:
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
    assert not carry_out(name, ends[0], None)
    lasts, rng, landed = time.monotonic() - began, random.Random(f"{name}{seed}"), 0
    while landed < kills:
        if carry_out(name, ends[-1], rng.uniform(0, lasts)):
            landed += 1
        else:
            ends.append(folder / f"killed-{len(ends)}")
    carry_out(name, ends[-1], None)
    return ends


def read(results: Path) -> dict[str, records.Document]:
    """Every record under a results folder, by where it lies."""
    documents = {path: records.read_document(path) for path in results.rglob("record.json")}
    return {
        str(path.relative_to(results)): repeatable(record)
        for path, record in documents.items()
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
