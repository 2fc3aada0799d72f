"""Sweeps: processes that share one, what a killed one leaves, launchers, and failures.

Processes that a command starts end with it, however it ends, and begin nothing more.
"""

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

from tests.test_records import record
from tests.training.test_interrupts import files_of_at_most
from zdp_bench import assets, records
from zdp_bench.config.compose import hydra_session
from zdp_bench.errors import Busy, UserError
from zdp_bench.experiments.sweep import (
    Job,
    RunSummary,
    Shared,
    launch,
    name_job,
    show_sweep,
    sweep,
)
from zdp_bench.training.interrupts import Stopped
from zdp_bench.training.run_folder import Outcome, only_one_process

QUICK = ["recipe=quickstart", "model.hidden=[4]", "accountant=gdp_clt", "threads=1"]
SHORT = [*QUICK, "trainer.epochs=1", "trainer.sample_rate=0.5"]
LONG = [*QUICK, "trainer.epochs=10000", "trainer.sample_rate=0.01"]
SWEEP = [sys.executable, "-m", "zdp_bench", "run", "-m"]


def carry_out(results: Path, *words: str) -> list[Job]:
    with hydra_session() as driver:
        return sweep(driver, ["recipe=quickstart", *words, f"paths.results={results}"])


def finish_each_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = record(seed=1)
    path = tmp_path / made["run"] / "record.json"
    outcome = Outcome(records.Record.of(made), path, was_recorded=False)
    monkeypatch.setattr("zdp_bench.experiments.sweep.carry_out", lambda *_, **__: outcome)


def test_a_job_that_fails_or_that_another_process_is_at_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another holds job 2 until job 3 is done: the order shows that nobody waited in between."""
    done: list[int] = []
    held = only_one_process(tmp_path / "2")
    held.__enter__()

    def carry_out_job(config, overrides: list[str], wait: bool = True, **_) -> Outcome:
        if config.seed == 4:
            raise UserError("four is not to be had.")
        if config.seed == 5:
            raise ZeroDivisionError("one over nothing\nand more")
        if config.seed == 3:
            held.__exit__(None, None, None)
        with only_one_process(tmp_path / str(config.seed), wait):
            done.append(config.seed)
        made = record(seed=config.seed)
        return Outcome(
            records.Record.of(made), tmp_path / made["run"] / "record.json", was_recorded=False
        )

    monkeypatch.setattr("zdp_bench.experiments.sweep.carry_out", carry_out_job)
    jobs = carry_out(tmp_path / "results", "seed=1,2,3,4,5")
    assert done == [1, 3, 2]
    assert [(job.words[1], job.result) for job in jobs if isinstance(job.result, str)] == [
        ("seed=4", "four is not to be had."),
        ("seed=5", "ZeroDivisionError: one over nothing (a bug; its traceback is above)"),
    ]
    assert "Traceback" in capsys.readouterr().err
    shown = show_sweep(jobs)
    assert shown.columns == ["job", "test", "tight ε", "run"]
    assert shown.rows[1] == ["seed=2", "accuracy 0.5000", "∞", jobs[1].result.home.name[:8]]
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

    def carry_out_job(config, *_: object, **__: object) -> None:
        done.append(config.seed)
        try:
            try:
                raise Stopped(signal.SIGTERM)
            finally:
                raise AttributeError("in a clean-up")
        except AttributeError:
            raise covering from None

    monkeypatch.setattr("zdp_bench.experiments.sweep.carry_out", carry_out_job)
    with pytest.raises(Stopped):
        carry_out(tmp_path, "seed=1,2")
    assert done == [1]


def launch_in_forks(launcher: Any, job_overrides: Any, initial_job_idx: int) -> list[Any]:
    """Carry out all jobs at once as joblib does: if a worker is killed, kill the others."""
    import cloudpickle
    from hydra_plugins.hydra_joblib_launcher._core import execute_job

    workers = {}
    for index, words in enumerate(job_overrides, initial_job_idx):
        output, end = os.pipe()
        if worker := os.fork():
            os.close(end)
            workers[worker] = output
            continue
        try:
            context, config, task = launcher.hydra_context, launcher.config, launcher.task_function
            job = execute_job(index, words, context, config, task, Singleton.get_state())
            with os.fdopen(end, "wb") as file:
                cloudpickle.dump(job, file)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    returned, is_broken = [], False
    for worker, output in workers.items():
        with os.fdopen(output, "rb") as file:
            content = file.read()
        is_broken |= os.waitpid(worker, 0)[1] != 0
        returned += [] if is_broken else [pickle.loads(content)]
    if is_broken:
        raise BrokenProcessPool
    return returned


@pytest.mark.parametrize("command", [sweep, launch])
def test_a_worker_that_is_killed_loses_no_other_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: Callable[..., Any],
) -> None:
    """It ended the command with joblib's traceback. A job ran again beside idle workers."""
    core = pytest.importorskip("hydra_plugins.hydra_joblib_launcher._core")
    loky = pytest.importorskip("joblib.externals.loky")
    begun = tmp_path / "begun"

    def carry_out_job(config: Any, *_: object, **__: object) -> Outcome:
        with begun.open("a") as file:
            file.write(f"{config.seed}\n")
        seeds = begun.read_text().split()
        if config.seed == 4 and seeds.count("4") == 1:
            raise Busy("another process does it.")
        if config.seed == 3 or (config.seed == 2 and seeds.count("2") == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if config.seed == 5:
            raise UserError("five is not to be had.")
        made = record(seed=config.seed)
        path = tmp_path / made["run"] / "record.json"
        return Outcome(records.Record.of(made), path, was_recorded=False)

    monkeypatch.setattr("zdp_bench.experiments.sweep.carry_out", carry_out_job)
    monkeypatch.setattr(core, "launch", launch_in_forks)

    def shut_down() -> None:
        with begun.open("a") as file:
            file.write("alone\n")

    executor = SimpleNamespace(shutdown=shut_down)
    monkeypatch.setattr(loky, "get_reusable_executor", lambda: executor)
    words = ["recipe=quickstart", f"paths.results={tmp_path / 'results'}"]
    with hydra_session() as driver:
        if command is sweep:
            jobs = sweep(driver, [*words, "launcher=joblib", "seed=1,2,3,4,5"])
            failed = [(job.words, job.result) for job in jobs if isinstance(job.result, str)]
            assert [job.result.value for job in jobs if isinstance(job.result, RunSummary)] == [
                0.5,
                0.5,
                0.5,
            ]
        else:
            all_words = [[*words, f"seed={seed}"] for seed in (1, 2, 3, 4, 5)]
            failed = launch(driver, all_words, "joblib", [])
    assert [job_words[-1] for job_words, _ in failed] == ["seed=3", "seed=5"]
    assert failed[0][1].startswith("its process died, usually because memory ran out.")
    assert failed[1][1] == "five is not to be had."
    times = begun.read_text().split()
    assert {seed: times.count(seed) for seed in "12345"} == {"1": 1, "2": 2, "3": 2, "4": 2, "5": 1}
    assert times[-4:] == ["alone", "2", "alone", "3"]
    (warning,) = [line for line in caplog.messages if "worker died" in line]
    assert warning.endswith("Their jobs continue after all others, one at a time.")
    (names,) = [line for line in caplog.messages if "workers that died" in line]
    assert names.endswith("continue, one at a time: seed=2; seed=3.")


def carry_out_with_a_death(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *launches: Callable[..., Any]
) -> list[Job]:
    """Carry out two jobs, whose second is killed and then launched alone by these functions."""
    core = pytest.importorskip("hydra_plugins.hydra_joblib_launcher._core")

    def carry_out_job(config: Any, *_: object, **__: object) -> Outcome:
        if config.seed == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        made = record(seed=config.seed)
        path = folder / made["run"] / "record.json"
        return Outcome(records.Record.of(made), path, was_recorded=False)

    starts = [launch_in_forks, launch_in_forks, *launches]
    monkeypatch.setattr("zdp_bench.experiments.sweep.carry_out", carry_out_job)
    monkeypatch.setattr(core, "launch", lambda *args, **named: starts.pop(0)(*args, **named))
    jobs = carry_out(folder / "results", "launcher=joblib", "seed=1,2")
    assert starts == []
    return jobs


@pytest.mark.parametrize(
    ("errors", "says"),
    [
        ([BrokenProcessPool()] * 5, "5 workers without a job died one after the other"),
        ([OSError(errno.ENOMEM, "Cannot allocate memory")], "out of memory"),
    ],
    ids=["workers", "memory"],
)
def test_a_job_whose_worker_does_not_start_again_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[Exception], says: str
) -> None:
    """The sweep ended with this error, and the other jobs were not reported."""
    launches = [Mock(side_effect=error) for error in errors]
    jobs = carry_out_with_a_death(tmp_path, monkeypatch, *launches)
    assert isinstance(jobs[0].result, RunSummary)
    assert isinstance(jobs[1].result, str)
    assert says in jobs[1].result


def test_a_stop_that_an_error_covers_is_no_failure_of_a_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        try:
            raise Stopped(signal.SIGTERM)
        finally:
            raise UserError("in a clean-up")

    with pytest.raises(Stopped):
        carry_out_with_a_death(tmp_path, monkeypatch, stop)


def test_a_full_temporary_folder_fails_no_job_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job failed if its worker could not write its name or how it ended."""
    core = pytest.importorskip("hydra_plugins.hydra_joblib_launcher._core")
    finish_each_run_at_once(tmp_path, monkeypatch)

    def launch_on_a_full_disk(*args: Any, **named: Any) -> list[Any]:
        with files_of_at_most(0):
            return launch_in_forks(*args, **named)

    monkeypatch.setattr(core, "launch", launch_on_a_full_disk)
    jobs = carry_out(tmp_path / "results", "launcher=joblib", "seed=1,2")
    assert [type(job.result) for job in jobs] == [RunSummary, RunSummary]
    shared = Shared(tmp_path / "shared")
    with files_of_at_most(0):
        shared.write_result("a1b2", UserError("not to be had."))
    assert shared.read_result("a1b2") is None


@pytest.mark.parametrize("deaths", [2, 5])
def test_a_worker_without_a_job_that_is_killed_ends_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    """The sweep ended without the other jobs, and without a table."""
    core = pytest.importorskip("hydra_plugins.hydra_joblib_launcher._core")
    finish_each_run_at_once(tmp_path, monkeypatch)
    started: list[int] = []

    def launch_and_kill(*args: Any, **options: Any) -> list[Any]:
        started.append(len(started))
        if len(started) <= deaths:
            raise BrokenProcessPool
        return launch_in_forks(*args, **options)

    monkeypatch.setattr(core, "launch", launch_and_kill)
    if deaths < 5:
        jobs = carry_out(tmp_path / "results", "launcher=joblib", "seed=1,2")
        assert [type(job.result) for job in jobs] == [RunSummary, RunSummary]
    else:
        with pytest.raises(UserError, match="5 workers without a job died one after the other"):
            carry_out(tmp_path / "results", "launcher=joblib", "seed=1,2")
    assert len(started) == min(deaths + 1, 5)


@pytest.mark.slow
def test_slurm_jobs_are_tried_by_submitits_local_executor(tmp_path: Path) -> None:
    words = [*SWEEP, "launcher=submitit", *SHORT, "seed=1,-1"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "sweep: 2 jobs, 1 failed" in ended.stdout
    assert "seed=-1: must be greater than or equal to 0." in ended.stderr
    (made,) = tmp_path.glob("results/runs/quickstart/*/record.json")
    assert json.loads(made.read_text())["seed"] == 1


def _submitit_workers(folder: Path) -> list[int]:
    """Return the processes of jobs whose folder is below `folder`."""
    workers = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"submitit.core._submit" in words and str(folder).encode() in b" ".join(words):
                workers.append(int(process.name))
    return workers


def has_begun(ledger: Path) -> bool:
    """Return True once a run takes steps: from then on it ends when it is asked to."""
    return ledger.read_bytes().count(b"\n") > 10


@pytest.mark.slow
def test_a_slurm_job_that_is_ended_is_one_failure_of_the_sweep(tmp_path: Path) -> None:
    words = [*SWEEP, "launcher=submitit", *LONG, "seed=1", f"paths.results={tmp_path}/results"]
    its = subprocess.PIPE
    with subprocess.Popen(words, cwd=tmp_path, stdout=its, stderr=its, text=True) as process:
        while not any(map(has_begun, tmp_path.glob("results/runs/quickstart/*/ledger.jsonl"))):
            assert process.poll() is None
            time.sleep(0.1)
        for worker in _submitit_workers(tmp_path):
            os.kill(worker, signal.SIGTERM)
        printed, errors = process.communicate()
    assert process.returncode == 2
    assert "sweep: 1 jobs, 1 failed" in printed
    assert "stopped by SIGTERM" in errors
    assert "Traceback" not in errors


def test_the_slurm_preset_puts_jobs_back_in_the_queue_and_says_where_there_is_no_slurm(
    tmp_path: Path,
) -> None:
    body = assets.read_yaml(assets.CONF / "launcher" / "slurm.yaml")["hydra"]["launcher"]
    with hydra_session():
        stored = ConfigStore.instance().load("hydra/launcher/submitit_slurm.yaml").node
    assert set(body) <= set(OmegaConf.create(stored)), "a key that hydra-submitit-launcher has not"
    assert body["max_num_timeout"] > 0
    if shutil.which("srun"):
        pytest.skip("there is a Slurm here")
    with pytest.raises(UserError, match="there is no Slurm here"):
        carry_out(tmp_path, "launcher=slurm", "seed=1,2")


def test_a_job_is_called_by_its_overrides() -> None:
    words = ["recipe=q", "launcher=joblib", "optimizer.lr=0.1", "paths.results=x", "seed=9"]
    assert name_job(words) == "optimizer.lr=0.1 seed=9"


def test_a_sweep_without_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no jobs"):
        carry_out(tmp_path, "algorithm=glob(nothing*)")


def alive(session: int) -> dict[int, str]:
    """Return the processes of a session that have not ended, each with its command line."""
    commands = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            rest = (process / "stat").read_text().rpartition(")")[2]
            command = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        state, _, _, its_session = rest.split()[:4]
        if int(its_session) == session and state not in "ZX":
            commands[int(process.name)] = command
    return commands


def wait_until(is_true: Callable[[], object], explanation: Callable[[], object]) -> None:
    until = time.monotonic() + 40
    while not is_true():
        assert time.monotonic() < until, explanation()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are listed by /proc")
@pytest.mark.skipif(find_spec("hydra_plugins") is None, reason="needs hydra_plugins")
@pytest.mark.parametrize(
    ("number", "receiver", "code"),
    [
        (signal.SIGKILL, "command", -signal.SIGKILL),
        (signal.SIGTERM, "command", 75),
        (signal.SIGTERM, "session", 75),
        (signal.SIGINT, "session", 130),
        (signal.SIGTERM, "worker", 75),
    ],
)
def test_workers_end_with_their_command(
    tmp_path: Path, number: signal.Signals, receiver: str, code: int
) -> None:
    """All save their runs, also if another has long saved its own, and no other job begins."""
    results = tmp_path / "results" / "runs"
    with (tmp_path / "output").open("w") as output:
        command = subprocess.Popen(
            [*SWEEP, "launcher=joblib", *LONG, "seed=1,2,3,4,5"],
            cwd=tmp_path,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # a shell's background jobs, of which the tests may be one, ignore Ctrl-C
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        while len(begun := list(results.glob("*/*/ledger.jsonl"))) < 2 or any(
            path.read_bytes().count(b"\n") < 4 for path in begun
        ):
            assert command.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.05)
        workers = [
            process for process, words in alive(command.pid).items() if "--process-name" in words
        ]
        assert len(workers) == 2
        slow, fast = workers
        os.kill(slow, signal.SIGSTOP)
        match receiver:
            case "command":
                command.send_signal(number)
            case "session":
                os.killpg(command.pid, number)
            case _:
                os.kill(fast, number)
        wait_until(lambda: list(results.glob("*/*/checkpoint.pt")), lambda: "no run was saved")
        time.sleep(1)
        os.kill(slow, signal.SIGCONT)
        wait_until(lambda: not alive(command.pid), lambda: alive(command.pid))
    finally:
        if alive(command.pid):
            os.killpg(command.pid, signal.SIGKILL)
        exit_code = command.wait()
    printed = (tmp_path / "output").read_text()
    assert exit_code == code, printed
    assert "Traceback" not in printed
    assert sorted(results.glob("*/*/ledger.jsonl")) == sorted(begun)
    assert len(list(results.glob("*/*/checkpoint.pt"))) == 2
