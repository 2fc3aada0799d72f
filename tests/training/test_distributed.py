"""Several processes with gloo come to what one process comes to, for every algorithm; rank 0 alone
writes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed_driver import FEW, STEPS, train_cases, trained
from tests.drivers import Child, start
from tests.ports import free_port
from zdp_bench import cli
from zdp_bench.config import compose, parse
from zdp_bench.training.distributed import ALONE, Ranks, is_distributed, join, leave, rank
from zdp_bench.training.progress import Watcher
from zdp_bench.training.run import run


def together(
    size: int, work: Callable[[], object], at: Path
) -> list[subprocess.CompletedProcess[str]]:
    """Fork `size` processes as torchrun would, have each do `work`, and wait."""
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}

    def one(rank: int) -> Child:
        def begin() -> None:
            join.cache_clear()
            work()
            leave(0)

        return start(begin, at=at, RANK=str(rank), LOCAL_RANK=str(rank), **meeting)

    return [child.wait() for child in [one(rank) for rank in range(size)]]


def command(*words: str) -> Callable[[], object]:
    return lambda: cli.main(["run", *words])


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def joint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict]:
    """Every case's steps, taken by 2 (and 4) processes: the folder they wrote into, and the
    weights."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    for done in together(request.param, lambda: train_cases(folder), at=folder):
        assert done.returncode == 0, done.stderr[-3000:]
    return folder, torch.load(folder / "weights.pt", weights_only=True)


@pytest.mark.parametrize("number", range(len(FEW)), ids=lambda at: f"{FEW[at][0]}-{FEW[at][2]}")
def test_several_processes_come_to_what_one_comes_to(
    number: int, joint: tuple[Path, dict], tmp_path: Path
) -> None:
    folder, found = joint
    weights, everywhere = found["cases"][number]
    alone = trained(FEW[number], ALONE, tmp_path)
    for name in alone:
        torch.testing.assert_close(weights[name], alone[name], rtol=1e-5, atol=1e-5)
    assert everywhere, "a rank came to other weights"
    kept = [(root / "ledger.jsonl").read_text() for root in (folder / f"case{number}", tmp_path)]
    assert kept[0] == kept[1]
    assert len(kept[0].splitlines()) == STEPS + 1


def test_ranks_that_differ_all_say_so_before_they_wait(joint: tuple[Path, dict]) -> None:
    """Each in one fact; the last pair does not differ, and trains."""
    *differing, last = joint[1]["refused"].items()
    for name, said in differing:
        for sentence in said:
            assert f"rank 1 has another {name.partition(':')[0]} than rank 0" in sentence, name
    assert set(last[1]) == {""}
    assert len([*joint[0].glob("own_runs/runs/quickstart/*/record.json")]) == 1


@pytest.mark.timeout(120)
def test_no_rank_waits_for_one_that_ends(tmp_path: Path) -> None:
    words = ["recipe=quickstart", f"paths.results={tmp_path / 'results'}"]
    done = together(2, command(*words, "privacy.total_budget=0.1"), at=tmp_path)
    says = ["privacy.total_budget=0.1", "another process of this run has stopped"]
    for one, sentence in zip(done, says, strict=True):
        assert one.returncode == 2
        assert sentence in one.stderr
        assert len(one.stderr.splitlines()) <= 2  # and how many runs were counted
    assert not [*tmp_path.rglob("record.json")]


def test_secure_noise_is_drawn_once_for_all(joint: tuple[Path, dict]) -> None:
    assert joint[1]["secure"]


def test_a_run_by_two_processes_equals_the_run_of_one(tmp_path: Path) -> None:
    words = [
        "recipe=quickstart",
        "trainer.epochs=1",
        "trainer.sample_rate=0.2",
        "model.hidden=[4]",
        "accountant=gdp_clt",
    ]
    words += ["threads=1", "optimizer=adam", "trainer.micro_batch=64"]
    two = together(2, command(*words, f"paths.results={tmp_path / 'two'}"), at=tmp_path)
    assert [done.returncode for done in two] == [0, 0], two[0].stderr + two[1].stderr
    assert "tight ε" in two[0].stdout
    assert two[1].stdout == ""
    run(parse(compose([*words, f"paths.results={tmp_path / 'one'}"])), Watcher())
    homes = [
        next((tmp_path / name / "runs" / "quickstart").glob("*/record.json")).parent
        for name in ("one", "two")
    ]
    assert homes[0].name == homes[1].name
    weights = [torch.load(home / "checkpoint.pt", weights_only=True)["model"] for home in homes]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-5, atol=1e-5)
    single, joint = (json.loads((home / "record.json").read_text()) for home in homes)
    assert single["privacy"] == joint["privacy"]
    assert (single["environment"]["ranks"], joint["environment"]["ranks"]) == (1, 2)


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
