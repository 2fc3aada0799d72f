"""Several processes with gloo come to what one process comes to, for every algorithm; rank 0 alone
writes."""

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms.test_properties import CASES, examples, make
from tests.drivers import Child, free_port, start
from zdp_bench import cli, records
from zdp_bench.config import compose, parse
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.noise import SecureNoise, SeededNoise
from zdp_bench.privacy.tally import Tally
from zdp_bench.training import run as module
from zdp_bench.training.distributed import ALONE, Ranks, is_distributed, join, leave, rank
from zdp_bench.training.progress import Watcher
from zdp_bench.training.setup import Setup, load_data
from zdp_bench.training.step import Training, private_step

Weights = dict[str, Tensor]
FEW = list({(name, kind): (name, options, kind) for name, options, kind in CASES}.values())
STEPS = 3
SIZES = (13, 0, 1)  # examples of each step: a share may be empty, and a batch too
QUICK = ["recipe=quickstart", "trainer.epochs=1", "model.hidden=[4]", "accountant=gdp_clt"]

# ---------------------------------------------------------------------------- what each rank does


def trained(case: tuple, ranks: Ranks, folder: Path, secure: bool = False) -> Weights:
    """The weights after a few steps of a case: rank 0 keeps the ledger in `folder`."""
    algorithm, model, kind = make(case)
    noise = SecureNoise() if secure else SeededNoise(5)
    folder.mkdir(parents=True, exist_ok=True)
    ledger: Any = Tally(noise.repeatable)
    if ranks.is_first:
        ledger = Ledger(folder / "ledger.jsonl", algorithm.mechanism(), noise.repeatable)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    training = Training(algorithm, model, optimizer, noise, ledger, None, ranks)
    for step, size in zip(range(STEPS), SIZES, strict=True):
        inputs, targets = examples(size, kind, seed=step)
        mine = ranks.take_share(np.arange(size))
        batches = [(inputs[mine], targets[mine])] if len(mine) else []
        private_step(training, step, iter(batches), 8.0)
    assert ledger.releases == STEPS
    ledger.close()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def everywhere(ranks: Ranks, weights: Weights) -> bool:
    """Whether every rank has rank 0's very bits."""
    theirs = ranks.broadcast(weights)
    return not ranks.max(int(not all(torch.equal(weights[name], theirs[name]) for name in weights)))


OTHER = Mechanism.of_z(1.0, Sampling("poisson", 0.5, 1.0, 2))
# What rank 1 does otherwise, by the fact that is named.
OTHERWISE: dict[str, Callable[[pytest.MonkeyPatch], list[str]]] = {
    "configuration: the bound": lambda _: ["algorithm.max_grad_norm=2"],
    "configuration: the rate": lambda _: ["trainer.sample_rate=0.2"],
    "configuration: the seed": lambda _: ["seed=5"],
    "configuration: how often is saved": lambda _: ["execution.checkpoint_steps=3"],
    "data set": lambda patch: patch.setattr(module, "load_data", other_data) or [],
    "code": lambda patch: patch.setattr(module, "code_digest", lambda _: "other") or [],
    "mechanism": lambda patch: patch.setattr(Setup, "mechanism", OTHER) or [],
    "nothing": lambda _: ["paths.data=/elsewhere", "trainer.micro_batch=64"],
}


def other_data(config: Run) -> Splits:
    return replace(load_data(config), digest="other")


def refused(ranks: Ranks, folder: Path) -> dict[str, list[str]]:
    """What each rank says to a run of which rank 1 does something otherwise."""
    refusals = {}
    for name, change in OTHERWISE.items():
        with pytest.MonkeyPatch.context() as patch:
            changed = change(patch) if ranks.rank == 1 else []
            message = ""
            try:
                carry_out(folder / "own_runs", *QUICK, *changed)
            except UserError as error:
                message = str(error)
        refusals[name] = ranks.gather(message)
    return refusals


def carry_out(results: Path, *words: str) -> module.Outcome:
    return module.execute(parse(compose([*words, f"paths.results={results}"])), Watcher())


def train_cases(folder: Path) -> None:
    """Do all that several ranks do for the tests; rank 0 writes what they found."""
    ranks = join("cpu")
    cases = []
    for number, case in enumerate(FEW):
        weights = trained(case, ranks, folder / f"case{number}")
        cases.append((weights, everywhere(ranks, weights)))
    first, other = (
        trained(CASES[0], ranks, folder / f"secure{number}", secure=True) for number in range(2)
    )
    results = {
        "cases": cases,
        "secure": everywhere(ranks, first),
        "refused": refused(ranks, folder),
    }
    if ranks.is_first:
        assert any(not torch.equal(first[name], other[name]) for name in first)
        torch.save(results, folder / "weights.pt")


def together(
    size: int, work: Callable[[], object], at: Path
) -> list[subprocess.CompletedProcess[str]]:
    """Fork `size` processes as torchrun would, have each do `work`, and wait."""
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}

    def start_rank(rank: int) -> Child:
        def begin() -> None:
            join.cache_clear()
            work()
            leave(0)

        return start(begin, at=at, RANK=str(rank), LOCAL_RANK=str(rank), **meeting)

    return [child.wait() for child in [start_rank(rank) for rank in range(size)]]


def command(*words: str) -> Callable[[], object]:
    return lambda: cli.main(["run", *words])


# --------------------------------------------------------------------------------------- the tests


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def joint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict]:
    """Every case's steps, taken by 2 (and 4) processes: the folder they wrote into, and what they
    found."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    for done in together(request.param, lambda: train_cases(folder), at=folder):
        assert done.returncode == 0, done.stderr[-3000:]
    return folder, torch.load(folder / "weights.pt", weights_only=True)


@pytest.mark.parametrize("number", range(len(FEW)), ids=lambda at: f"{FEW[at][0]}-{FEW[at][2]}")
def test_several_processes_come_to_what_one_comes_to(
    number: int, joint: tuple[Path, dict], tmp_path: Path
) -> None:
    folder, results = joint
    weights, everywhere = results["cases"][number]
    alone = trained(FEW[number], ALONE, tmp_path)
    torch.testing.assert_close(weights, alone, rtol=1e-5, atol=1e-5)
    assert everywhere, "a rank came to other weights"
    kept = [(root / "ledger.jsonl").read_text() for root in (folder / f"case{number}", tmp_path)]
    assert kept[0] == kept[1]
    assert len(kept[0].splitlines()) == STEPS + 1


def test_ranks_that_differ_all_say_so_before_they_wait(joint: tuple[Path, dict]) -> None:
    """Each in one fact; the last pair does not differ, and trains."""
    *differing, last = joint[1]["refused"].items()
    for name, message in differing:
        for sentence in message:
            assert f"rank 1 has another {name.partition(':')[0]} than rank 0" in sentence, name
    assert set(last[1]) == {""}
    assert len([*joint[0].glob("own_runs/runs/quickstart/*/record.json")]) == 1


def test_secure_noise_is_drawn_once_for_all(joint: tuple[Path, dict]) -> None:
    assert joint[1]["secure"]


@pytest.mark.timeout(120)
def test_no_rank_waits_for_one_that_ends(tmp_path: Path) -> None:
    words = ["recipe=quickstart", f"paths.results={tmp_path / 'results'}"]
    done = together(2, command(*words, "privacy.total_budget=0.1"), at=tmp_path)
    says = ["privacy.total_budget=0.1", "another process of this run has stopped"]
    for process, sentence in zip(done, says, strict=True):
        assert process.returncode == 2
        assert sentence in process.stderr
        assert len(process.stderr.splitlines()) <= 2  # and how many runs were counted
    assert not [*tmp_path.rglob("record.json")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "killed"),
    [(2, 0), (2, 1), *(pytest.param(4, each, marks=pytest.mark.slow) for each in range(4))],
)
def test_a_rank_that_is_killed_ends_the_others_and_the_same_command_goes_on(
    tmp_path: Path, size: int, killed: int
) -> None:
    words = [*QUICK, "trainer.sample_rate=0.2", "threads=1", "execution.checkpoint_steps=2"]
    words.append(f"paths.results={tmp_path / 'results'}")

    def begin() -> None:
        def step_or_die(training: Training, step: int, *rest: Any) -> None:
            if (rank(), step) == (killed, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            private_step(training, step, *rest)

        module.private_step = step_or_die  # type: ignore[attr-defined] # in a fork
        cli.main(["run", *words])

    for number, done in enumerate(together(size, begin, at=tmp_path)):
        assert done.returncode == (-signal.SIGKILL if number == killed else 2), done.stderr
        if number != killed:
            assert "another process of this run has stopped" in done.stderr
    assert not [*tmp_path.rglob("record.json")]
    again = together(size, command(*words), at=tmp_path)
    assert [done.returncode for done in again] == [0] * size, again[0].stderr
    (record,) = records.read_all(tmp_path / "results")
    assert record.measured.resumed_at_step == 2
    alone = carry_out(tmp_path / "alone", *words[:-1]).record
    assert record.privacy.steps == alone.privacy.steps
    assert record.privacy.epsilon_tight == alone.privacy.epsilon_tight
    assert record.headline.value == pytest.approx(alone.headline.value, abs=1e-3)


def test_a_run_by_two_processes_equals_the_run_of_one(tmp_path: Path) -> None:
    words = [*QUICK, "trainer.sample_rate=0.2", "threads=1"]
    words += ["optimizer=adam", "trainer.micro_batch=64"]
    two = together(2, command(*words, f"paths.results={tmp_path / 'two'}"), at=tmp_path)
    assert [done.returncode for done in two] == [0, 0], two[0].stderr + two[1].stderr
    assert "tight ε" in two[0].stdout
    assert two[1].stdout == ""
    alone = carry_out(tmp_path / "one", *words)
    joint = records.read_all(tmp_path / "two")[0].document
    homes = [records.folder(tmp_path / name, "quickstart", joint["run"]) for name in ("one", "two")]
    weights = [torch.load(home / "checkpoint.pt", weights_only=True)["model"] for home in homes]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)
    assert alone.record.document["privacy"] == joint["privacy"]
    assert [document["environment"]["ranks"] for document in (alone.record.document, joint)] == [
        1,
        2,
    ]


def test_a_sweep_is_no_work_for_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_distributed()
    assert rank() == 0
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert is_distributed()
    assert rank() == 1
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "-m", "recipe=quickstart", "seed=1,2"])
    assert left.value.code == 2
    assert "torchrun performs one run: leave -m out" in capsys.readouterr().err


def test_every_example_is_in_one_share() -> None:
    shares = [Ranks(r, 3).take_share(np.arange(8)) for r in range(3)]
    assert sorted(np.concatenate(shares)) == list(range(8))
