"""What ends a run from outside: signals, full disks; and that the same command then ends as an
undisturbed run does."""

import itertools
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from tests.drivers import start
from tests.training.test_run import (
    TINY,
    Silent,
    after_each_step,
    carry_out,
    configured,
    repeatable,
    same,
    weights_of,
)
from zdp_bench import cli, records
from zdp_bench.cli.commands import COMMANDS
from zdp_bench.errors import UserError
from zdp_bench.training import batches, setup
from zdp_bench.training.interrupts import (
    CONTINUING,
    Stopped,
    stop_on_request,
    stop_workers_first,
    take_jobs,
)
from zdp_bench.training.run import Outcome, execute


@pytest.fixture(scope="module")
def whole(tiny: tuple[Path, Outcome]) -> records.Document:
    """The undisturbed run."""
    return repeatable(tiny[1].record.document)


def signal_after(patch: pytest.MonkeyPatch, at: int, *numbers: int) -> None:
    """Have signals sent at the end of step number `at`, from 0."""

    def act(_: object, step: int) -> None:
        for number in numbers if step == at else ():
            os.kill(os.getpid(), number)

    after_each_step(patch, act)


def stop_and_go_on(
    monkeypatch: pytest.MonkeyPatch, folder: Path, at: int, *words: str
) -> tuple[Outcome, Outcome]:
    """Return a whole run and one that was stopped after step `at`; both must end alike."""
    whole = carry_out(folder / "whole", *words)
    torch.manual_seed(2)  # another process stands elsewhere in its own stream
    with monkeypatch.context() as patch:
        signal_after(patch, at, signal.SIGTERM)
        with pytest.raises(Stopped):
            carry_out(folder / "stopped", *words)
    resumed = carry_out(folder / "stopped", *words)
    assert repeatable(resumed.record.document) == repeatable(whole.record.document)
    assert same(weights_of(whole), weights_of(resumed))
    return whole, resumed


@pytest.mark.parametrize(
    "words",
    [
        ["scheduler=warmup_cosine", "optimizer=adam", "trainer.ema=0.95"],
        ["privacy.unit=patient", "privacy.max_examples=1"],
        ["algorithm=sgd", "dropout"],
    ],
    ids=lambda words: words[1],
)
def test_a_run_that_was_stopped_goes_on_with_all_that_its_steps_need(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = setup.build_model
    if "dropout" in words:
        words, drop = words[:1], nn.Dropout(0.5)
        monkeypatch.setattr(setup, "build_model", lambda *of: nn.Sequential(real(*of), drop))
    _, resumed = stop_and_go_on(monkeypatch, tmp_path, 13, *words)
    assert resumed.record.document["measured"]["resumed_at_step"] == 14


@pytest.mark.parametrize("force", ["force=true", "force=1", "+force=yes"])
@pytest.mark.parametrize("error", [Stopped(signal.SIGTERM), KeyboardInterrupt()])
def test_a_forced_run_is_continued_without_force(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    force: str,
) -> None:
    """With force=1, the advice led to a second run from the first step, which spent ε again."""

    def stop(_: Any) -> int:
        raise error

    monkeypatch.setattr(COMMANDS["run"], "run", stop)
    with pytest.raises(SystemExit):
        cli.main(["run", "recipe=quickstart", force])
    assert "the same command, without any force=true, continues" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_lets_the_step_end_saves_and_leaves_with_a_code_of_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    whole: Any,
    number: int,
    code: int,
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(COMMANDS["run"], "run", lambda _: carry_out(tmp_path))
    with monkeypatch.context() as patch:
        signal_after(patch, 6, number)
        with pytest.raises(SystemExit) as left:
            cli.main(["run"])
    assert left.value.code == code
    assert f"{CONTINUING} from here" in capsys.readouterr().err
    assert signal.getsignal(number) == before
    watcher = Silent()
    assert repeatable(execute(configured(tmp_path), watcher).record.document) == whole
    assert watcher.done_at_start == 7  # in the middle of an epoch: not one step is done twice


@pytest.mark.parametrize("words", ["bench", "reproduce zeta_dp_2021/1 --plan"])
@pytest.mark.parametrize(
    ("stop", "message"),
    [(Stopped(signal.SIGTERM), "stopped by SIGTERM"), (KeyboardInterrupt(), "interrupted")],
)
def test_a_command_that_saves_nothing_does_not_say_that_it_continues(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    stop: BaseException,
    message: str,
) -> None:
    monkeypatch.setattr(COMMANDS[words.split()[0]], "run", Mock(side_effect=stop))
    with pytest.raises(SystemExit):
        cli.main(words.split())
    assert capsys.readouterr().err == f"zdp-bench: {message}.\n"


def test_a_signal_in_the_last_step_finishes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    signal_after(monkeypatch, 19, signal.SIGTERM)
    assert repeatable(carry_out(tmp_path).record.document) == whole


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal_after(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        carry_out(tmp_path)


@pytest.mark.parametrize("covered", [False, True])
def test_sigterm_between_runs_leaves_with_the_same_code(
    covered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a library's error covers it."""

    def stop(_: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            if covered:
                raise AttributeError("in a clean-up")

    monkeypatch.setattr(COMMANDS["list"], "run", stop)
    with pytest.raises(SystemExit) as left:
        cli.main(["list"])
    assert left.value.code == 75
    assert not isinstance(Stopped(signal.SIGTERM), Exception)  # no sweep takes it for a failed job


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Handle Ctrl-C, which a shell's background jobs, of which the tests may be one, ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run_workers(request: Path, *numbers: int) -> None:
    """Receive signals while workers run."""
    with stop_workers_first(request):
        for number in numbers:
            os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_once_no_worker_has_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    job = tmp_path / "job"
    job.touch()

    def save(seconds: float) -> None:
        assert (tmp_path / "stop").exists()
        job.unlink(missing_ok=True)

    monkeypatch.setattr("multiprocessing.active_children", lambda: ["a worker"])
    monkeypatch.setattr("time.sleep", save)
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as stop:
        run_workers(tmp_path / "stop", number)
    assert not job.exists()
    assert stop.value.by == number
    assert stop.value.has_saved
    assert signal.getsignal(number) == before


def test_a_first_ctrl_c_waits_for_workers_although_one_made_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that had got the signal first made the session's first Ctrl-C count as a second."""
    (tmp_path / "stop").touch()
    monkeypatch.setattr("multiprocessing.active_children", lambda: ["a worker"])
    with pytest.raises(Stopped):
        run_workers(tmp_path / "stop", signal.SIGINT)


def test_workers_that_were_killed_are_not_waited_for_and_have_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").touch()
    alive = iter([["a worker"], []])
    monkeypatch.setattr("multiprocessing.active_children", lambda: next(alive))
    monkeypatch.setattr(
        COMMANDS["run"], "run", lambda _: run_workers(tmp_path / "stop", signal.SIGTERM)
    )
    with pytest.raises(SystemExit) as left:
        cli.main(["run"])
    assert left.value.code == 75
    assert f"{CONTINUING} from the last checkpoint" in capsys.readouterr().err


def test_a_second_ctrl_c_waits_for_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").touch()
    monkeypatch.setattr("multiprocessing.active_children", lambda: ["a worker"])
    monkeypatch.setattr("time.sleep", lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run_workers(tmp_path / "stop", signal.SIGINT)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_without_workers_signals_act_as_before(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_workers(tmp_path / "stop", signal.SIGINT)
    assert not (tmp_path / "stop").exists()
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from zdp_bench.training.interrupts import stop_workers_first\n"
        "with stop_workers_first(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGTERM)"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path / "stop"], check=False)
    assert ended.returncode == -signal.SIGTERM  # as by default


def test_a_thread_that_receives_no_signals_may_start_workers(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(run_workers, tmp_path / "stop").result()


@pytest.fixture
def keeps_handlers() -> Iterator[None]:
    """Set the handlers of both signals again at the end, because a worker keeps its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("keeps_handlers")
@pytest.mark.parametrize("reason", ["request", "orphan"])
def test_a_worker_begins_no_job_after_a_request_or_without_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """A worker whose parent was killed went on with the jobs that joblib had queued."""
    monkeypatch.setattr("zdp_bench.training.interrupts._watch", Mock())
    request = tmp_path / "stop"
    parent = os.getppid()
    if reason == "request":
        request.touch()
    else:
        parent += 1
    with pytest.raises(Stopped), stop_on_request(request, parent, "a"):
        raise AssertionError
    assert [path for path in tmp_path.iterdir() if path != request] == []


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """The system refuses to let any file grow over `count` bytes: what a full disk looks like."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("keeps_handlers")
def test_a_worker_on_a_full_disk_still_names_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job failed, because its name was written into the file."""
    monkeypatch.setattr("zdp_bench.training.interrupts._watch", Mock())
    request = tmp_path / "stop"
    with files_of_at_most(0), stop_on_request(request, os.getppid(), "a1b2"):
        request.touch()
        (job_file,) = (path for path in tmp_path.iterdir() if path != request)
        killed = tmp_path / "killed" / job_file.name  # what a killed worker leaves behind
        killed.parent.mkdir()
        killed.touch()
    assert take_jobs(killed.parent / "stop") == {"a1b2"}
    assert take_jobs(killed.parent / "stop") == set()


@pytest.mark.parametrize("count", [1000, 4000], ids=["ledger.jsonl", "checkpoint"])
def test_a_full_disk_is_one_sentence_and_loses_nothing(
    tmp_path: Path, whole: Any, count: int
) -> None:
    says = r"Everything saved is intact.*the same command"
    with files_of_at_most(count), pytest.raises(UserError, match=says) as refused:
        carry_out(tmp_path)
    assert "\n" not in str(refused.value)
    (home,) = (path.parent for path in tmp_path.glob("runs/*/*/ledger.jsonl"))
    assert not (home / "record.json").exists()
    assert not list(home.glob("*.partial")), "a full disk has no room for halves"
    assert not (home / "checkpoint.pt").exists()
    assert repeatable(carry_out(tmp_path).record.document) == whole


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("table zeta_dp_2021/1 --results {file}", ""),
        ("epsilon --write --results {file}/deeper", ""),
        ("report --results {file}", ""),
        ("figure epsilon --results {file}/deeper", ""),
        ("run recipe=quickstart paths.results={file}", ""),
        ("run -m seed=1,2 recipe=quickstart paths.results={file}", ""),
        ("run recipe=ecg dataset=cpsc2018_synthetic paths.results={none} paths.data={file}", ""),
        ("results --results {file}", "is a file, not a folder, so there are no records"),
        ("data --root {file}", "is a file, not a folder; set the data root"),
        ("results --results {none}", "folder not found"),
        ("table zeta_dp_2021/1 --results {none}", "folder not found"),
        ("report --results {none}", "folder not found"),
    ],
)
def test_a_folder_that_cannot_be_used_is_told_before_the_work(
    words: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"file": tmp_path / "file", "none": tmp_path / "none"}
    places["file"].write_text("")
    with pytest.raises(SystemExit) as left:
        cli.main(words.format(**places).split())
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert says in message
    assert any(str(place) in message for place in places.values())
    assert "Traceback" not in message
    if not words.startswith("run"):
        assert len(message.splitlines()) == 1
        assert not places["none"].exists()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_a_run_is_not_lost_over_its_output(tmp_path: Path, encoding: str) -> None:
    """Its reader may have left, or know fewer characters."""
    read, write = os.pipe()
    os.close(read)
    stdout = os.open(os.devnull, os.O_WRONLY) if encoding == "latin-1" else write
    words = ["run", *TINY, f"paths.results={tmp_path}"]
    done = start(lambda: cli.main(words), stdout, PYTHONIOENCODING=encoding).wait()
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.glob("runs/*/*/record.json"))) == 1


def test_a_verb_that_shows_ends_quietly_when_nobody_reads_or_nothing_is_open() -> None:
    read, write = os.pipe()
    os.close(read)
    piped = start(lambda: cli.main(["list", "keys"]), write, PYTHONIOENCODING="ascii").wait()
    os.close(write)

    def closed() -> None:
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]  # as Python does at its start
        try:
            cli.main(["list", "keys"])
        finally:
            sys.stdout = sys.stderr

    for done in (piped, start(closed).wait()):
        assert (done.returncode, done.stderr) == (0, "")


def test_what_layers_draw_is_a_function_of_seed_and_step() -> None:
    def draws(*of: int, secure: bool = False) -> list[float]:
        batches.seed_layers(*of, secure=secure)
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    first = draws(1, 7, 0)
    assert first == draws(1, 7, 0)
    others = [draws(*of) for of in ((2, 7, 0), (1, 8, 0), (1, 7, 1))]
    others += [draws(1, 7, 0, secure=True) for _ in range(2)]  # nobody's to foresee
    for draw, other in itertools.combinations([first, *others], 2):
        assert all(a != b for a, b in zip(draw, other, strict=True))
