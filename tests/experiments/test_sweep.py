"""Sweeps: processes that share one, what a killed one leaves, launchers, and failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_records import record
from zdp_bench.config.compose import hydra_session
from zdp_bench.errors import Busy, UserError
from zdp_bench.experiments.sweep import name_job, show_sweep, sweep
from zdp_bench.training.interrupts import Stopped
from zdp_bench.training.run_folder import Outcome, only_one_process

TINY = [
    "recipe=quickstart",
    "trainer.epochs=1",
    "trainer.sample_rate=0.5",
    "model.hidden=[4]",
    "accountant=gdp_clt",
    "threads=1",
]


def start(*words: str, at: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zdp_bench", "run", "-m", *words],
        cwd=at,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(at: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in at.glob("results/runs/quickstart/*/record.json")}


def test_a_job_that_another_process_is_at_is_left_to_it_and_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another holds job 2 until job 3 is done: the order shows that nobody waited in between."""
    done: list[int] = []
    held = only_one_process(tmp_path / "2")
    held.__enter__()

    def carry_out(config, overrides: list[str], wait: bool = True, **_) -> Outcome:
        if config.seed == 4:
            raise UserError("four is not to be had.")
        if config.seed == 3:
            held.__exit__(None, None, None)
        with only_one_process(tmp_path / str(config.seed), wait):
            done.append(config.seed)
        made = record(seed=config.seed)
        return Outcome(made, tmp_path / made["run"] / "record.json", found=False)

    monkeypatch.setattr("zdp_bench.experiments.sweep.carry_out", carry_out)
    with hydra_session() as driver:
        jobs = sweep(
            driver, ["recipe=quickstart", "seed=1,2,3,4", f"paths.results={tmp_path / 'results'}"]
        )
    assert done == [1, 3, 2]
    assert [(job.words[1], job.ended) for job in jobs if isinstance(job.ended, str)] == [
        ("seed=4", "four is not to be had.")
    ]
    shown = show_sweep(jobs)
    assert shown.columns == ["job", "test", "tight ε", "run"]
    assert shown.rows[1] == ["seed=2", "accuracy 0.5000", "∞", jobs[1].ended.home.name[:8]]
    assert shown.rows[3] == ["seed=4", "failed", "", ""]
    with (
        only_one_process(tmp_path / "5"),
        pytest.raises(Busy, match="another process"),
        only_one_process(tmp_path / "5", False),
    ):
        pass


@pytest.mark.parametrize("covering", [AttributeError("a hole"), UserError("seed: a hole")])
def test_a_stop_in_the_middle_of_a_librarys_work_is_none_of_its_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, covering: Exception
) -> None:
    """SIGTERM while OmegaConf filled a list, whose clean-up then failed, ends the sweep too."""
    done: list[int] = []

    def carry_out(config, overrides: list[str], wait: bool = True, **_) -> None:
        done.append(config.seed)
        try:
            try:
                raise Stopped(signal.SIGTERM)
            finally:
                raise AttributeError("in a clean-up")
        except AttributeError:
            raise covering from None

    monkeypatch.setattr("zdp_bench.experiments.sweep.carry_out", carry_out)
    with hydra_session() as driver, pytest.raises(Stopped):
        sweep(driver, ["recipe=quickstart", "seed=1,2", f"paths.results={tmp_path / 'results'}"])
    assert done == [1]


def test_a_bug_in_a_job_shows_its_traceback_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def carry_out(config, overrides: list[str], wait: bool = True, **_) -> Outcome:
        if config.seed == 1:
            raise ZeroDivisionError("one over nothing\nand more")
        return Outcome(record(), tmp_path / "none" / "record.json", found=False)

    monkeypatch.setattr("zdp_bench.experiments.sweep.carry_out", carry_out)
    with hydra_session() as driver:
        jobs = sweep(driver, ["recipe=quickstart", "seed=1,2", f"paths.results={tmp_path}"])
    assert jobs[0].ended == "ZeroDivisionError: one over nothing (a bug; its traceback is above)"
    assert not isinstance(jobs[1].ended, str)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_slurm_jobs_are_tried_by_submitits_local_executor(tmp_path: Path) -> None:
    ended = start("launcher=submitit", *TINY, "seed=1,-1", at=tmp_path)
    out, err = ended.communicate()
    assert ended.returncode == 2
    assert "sweep: 2 jobs, 1 failed" in out
    assert "seed=-1: must be greater than or equal to 0." in err
    assert [json.loads(body)["seed"] for body in records(tmp_path).values()] == [1]


def test_the_slurm_preset_puts_jobs_back_in_the_queue_and_says_where_there_is_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from omegaconf import OmegaConf

    from zdp_bench import assets

    body = assets.read_yaml(assets.CONF / "launcher" / "slurm.yaml")["hydra"]["launcher"]
    from hydra.core.config_store import ConfigStore

    with hydra_session():
        stored = OmegaConf.create(
            ConfigStore.instance().load("hydra/launcher/submitit_slurm.yaml").node
        )
    assert set(body) <= set(stored), "a key that hydra-submitit-launcher does not know"
    assert body["max_num_timeout"] > 0
    if shutil.which("srun"):
        pytest.skip("there is a Slurm here")
    words = ["recipe=quickstart", "launcher=slurm", "seed=1,2", f"paths.results={tmp_path}"]
    with hydra_session() as driver, pytest.raises(UserError, match="there is no Slurm here"):
        sweep(driver, words)


def test_a_job_is_called_by_its_overrides() -> None:
    words = ["recipe=q", "launcher=joblib", "optimizer.lr=0.1", "paths.results=x", "seed=9"]
    assert name_job(words) == "optimizer.lr=0.1 seed=9"


def test_a_sweep_without_jobs_is_refused(tmp_path: Path) -> None:
    words = ["recipe=quickstart", "algorithm=glob(nothing*)", f"paths.results={tmp_path}"]
    with hydra_session() as driver, pytest.raises(UserError, match="no jobs"):
        sweep(driver, words)
