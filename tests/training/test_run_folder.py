"""A run's folder: read by others, without locks, with FIFOs in it; and what shares noise with what:
two runs, a run and its resumption, a run and itself by force."""

import dataclasses
import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drivers import fork
from tests.privacy.ledger_runs import write
from tests.test_cli import run as command
from tests.training.test_run import (
    TINY,
    Silent,
    after_each_step,
    carry_out,
    configured,
    kill_after,
    same,
    weights_of,
)
from zdp_bench import records
from zdp_bench.config.schema import Run
from zdp_bench.data import Examples, Splits
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import read_json
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.report import papers
from zdp_bench.training import run
from zdp_bench.training.interrupts import Stopped
from zdp_bench.training.plan import Plan
from zdp_bench.training.progress import Reporter
from zdp_bench.training.run import Outcome
from zdp_bench.training.run_folder import find_weights, settle_replaced, start_anew
from zdp_bench.training.spending import find_other_ledgers, find_spendings
from zdp_bench.training.spending_file import FILE, is_node


@contextmanager
def as_another_user(folder: Path) -> Iterator[None]:
    """Within, this process may read `folder` and write nothing there."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if not os.geteuid():  # root may write all the same
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(os.getuid())
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_second_user_reads_a_finished_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "available", lambda: ["zeta_dp_2021/1"])  # a page of one table
    with tempfile.TemporaryDirectory() as place:
        results, own = Path(place) / "results", Path(place) / "own"
        for folder in (Path(place), own):  # pytest's own folders are closed to other users
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
        for name in ("HOME", "XDG_CACHE_HOME", "ZDP_DATA"):
            monkeypatch.setenv(name, str(own))
        words = ["run", *TINY, "seed=1", f"paths.results={results}"]

        def read(to: Path) -> list[tuple[int, str, str]]:
            """Return what each verb that reads says."""
            to.mkdir()
            report, export = f"report --output {to}/page.html", f"export quickstart --to {to}/model"
            verbs = ["results", report, export, "table zeta_dp_2021/1"]
            reading = [[*verb.split(), "--results", str(results)] for verb in verbs]
            return [command(capsys, *verb) for verb in (words, *reading)]

        first = read(own / "first")  # what it imports may be in a home that is closed to others
        with as_another_user(results):
            second = read(own / "second")
            refused = command(capsys, *words, "seed=2")
        assert [(code, err) for code, _, err in first] == [(0, "")] * 5
        assert [(code, err) for code, _, err in second[:-1]] == [(0, "")] * 4
        assert "done before" in second[0][1]
        assert (second[-1][0], second[-1][2]) == (0, "")  # as it was, so nothing is written
        assert (refused[0], refused[2].count("\n")) == (2, 1), refused[2]


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"locked .*paths\.results"):
        carry_out(tmp_path)
    assert not list(tmp_path.rglob("ledger.jsonl"))


@pytest.mark.timeout(120)  # a FIFO is waited for without end
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("record.json", carry_out),
        ("checkpoint.pt", carry_out),
        ("ledger.jsonl", carry_out),
        ("ledger.jsonl.1", carry_out),
        ("../{}.lock", carry_out),
        ("spending.json", find_spendings),
        ("other.jsonl", find_spendings),  # which nothing explains
    ],
)
def test_a_fifo_is_refused(
    finished: Outcome, tmp_path: Path, name: str, read: Callable[[Path], Any]
) -> None:
    finished.path.unlink()
    home = finished.path.parent
    path = home / name.format(home.name)
    path.unlink(missing_ok=True)
    if name == "other.jsonl":
        (home / "spending.json").unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"is not a regular file\."):
        read(tmp_path)


def test_a_fifo_in_the_place_of_a_record_is_left_out(finished: Outcome, tmp_path: Path) -> None:
    home = finished.path.parent.with_name("other")
    home.mkdir()
    os.mkfifo(home / "record.json")
    assert len(records.read_all(tmp_path)) == 1


def test_the_log_has_start_epochs_warnings_and_end_and_the_terminal_its_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    config = configured(tmp_path)
    kill_after(monkeypatch, 13, tmp_path)
    monkeypatch.setattr(run, "execution_digest", lambda *_: "other")  # its steps count again
    home = run.execute(config, Reporter(Silent(), config)).path.parent
    output = capsys.readouterr().err
    assert "4 steps of an earlier process are repeated" in output
    lines = [line.split(" ", 2)[2] for line in (home / "run.log").read_text().splitlines()]
    start, epoch = "INFO quickstart seed 0: starts at step 10 of 20", "INFO epoch 2, step 20  "
    assert lines[0] == "INFO stopped: PowerCut"
    assert lines[1] == f"WARNING {output.strip()}"
    assert (lines[2], lines[3].startswith(epoch), lines[4]) == (start, True, "INFO finished")
    assert not logging.getLogger("zdp_bench").handlers


def test_force_draws_new_noise_where_the_code_is_another(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two releases of different sums under one noise would show their difference."""
    first = weights_of(finished)
    monkeypatch.setattr(run, "execution_digest", lambda *_: "other code")
    assert not same(weights_of(carry_out(tmp_path, "force=true")), first)


def tight(privacy: dict[str, Any], steps: int) -> float:
    """The ε of so many steps of a run with this privacy section."""
    mechanism = Mechanism.of_z(privacy["z"], Sampling(**privacy["sampling"]))
    return tight_epsilon(mechanism, steps, privacy["delta"])


def test_two_processes_that_force_a_secure_run_at_once_lose_no_release(
    finished: Outcome, tmp_path: Path
) -> None:
    """One waits for the other, then sets its ledger aside as well: all three count, in ε too."""
    secure, own = "privacy.secure=true", finished.record.document["privacy"]
    first = carry_out(tmp_path / "secure", secure)
    before = weights_of(first)
    forced = [fork(lambda: carry_out(tmp_path / "secure", secure, "force=true")) for _ in range(2)]
    assert [os.waitpid(child, 0)[1] for child in forced] == [0, 0]
    assert not same(weights_of(first), before)
    privacy = (records.read_document(first.path) or {})["privacy"]
    assert privacy["steps"] == 3 * own["steps"]
    assert privacy["epsilon_tight"] == pytest.approx(tight(privacy, 60))
    assert len([*first.path.parent.glob("ledger.jsonl*")]) == 3
    (spending,), _ = find_spendings(tmp_path / "secure")
    assert spending.spent.steps == 60 == read_json(spending.home / FILE)["privacy"]["steps"]
    # and a run says whether it is one
    secured = first.record.document["privacy"]
    assert (own["randomness"], secured["randomness"]) == ("seeded", "cryptographic")
    assert own["epsilon_tight"] == secured["epsilon_tight"]
    assert first.record.document["run"] != finished.record.document["run"]


def test_a_secure_run_without_its_ledger_is_not_forced(tmp_path: Path) -> None:
    """The steps of its record counted no more: 25 of 45 steps after a kill."""
    first = carry_out(tmp_path, "privacy.secure=true")
    first.path.with_name("ledger.jsonl").unlink()
    with pytest.raises(UserError, match="but not its ledger"):
        carry_out(tmp_path, "privacy.secure=true", "force=true")
    assert first.path.exists()


def test_a_run_of_a_recipe_called_nodes_is_no_node(finished: Outcome, tmp_path: Path) -> None:
    """Its ledger in a renamed folder is found, so that no noise is drawn for two sums."""
    run_digest = finished.record.run
    nodes = tmp_path / "runs" / "nodes"
    finished.path.parent.parent.rename(nodes)
    home = nodes / finished.path.parent.name
    assert not is_node(home)
    moved = home.rename(nodes / "before")
    assert find_other_ledgers(tmp_path, run_digest, home) == [moved / "ledger.jsonl"]
    (spending,), unknown = find_spendings(tmp_path)
    assert (spending.home, unknown) == (moved, [])


def test_a_node_is_recognised_by_its_ledger_or_its_name(tmp_path: Path) -> None:
    mechanism = Mechanism.of_z(1.0, Sampling("poisson", 0.1, 10.0, 100))
    renamed, empty = tmp_path / "nodes" / "site", tmp_path / "nodes" / "03-0123abcd"
    Ledger(renamed / "ledger.jsonl", mechanism, True, identity="node 3").close()
    empty.mkdir()
    assert is_node(renamed)
    assert is_node(empty)


def test_the_name_of_a_recipe_does_not_make_its_runs_deleted() -> None:
    assert not records.is_deleted(Path("runs/x.deleted-1/0123456789abcdef"))
    assert records.is_deleted(Path("runs/x/0123456789abcdef.deleted-1"))
    assert records.is_deleted(Path("runs/x/0123456789abcdef.deleted-1/nodes/00"))


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b", "\ud800"])
def test_a_name_that_no_path_can_have_names_no_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="no finished run with weights"):
        find_weights(tmp_path, name)


def test_a_run_that_its_recipe_does_not_have_is_looked_up_among_its_runs(tmp_path: Path) -> None:
    for digest in ("a", "b"):
        records.write_text(tmp_path / f"runs/quickstart/{digest * 16}/record.json", "{}")
    with pytest.raises(UserError, match=r"weights under \S+runs\. `zdp-bench results` lists"):
        find_weights(tmp_path, "quickstart/zzz")


# ---------------------------------------------------------------- what is kept until a new run ends


def contents(home: Path) -> dict[str, bytes]:
    """The files of a folder, except those that any attempt at a run may write."""
    paths = [path for path in home.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(home)): path.read_bytes()
        for path in paths
        if path.name not in ("run.log", FILE) and path.suffix != ".partial"
    }


class Ending(Silent):
    """Ends a run before its first step."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def started(self, *_: Any) -> None:
        raise self.error


@pytest.mark.parametrize("error", [UserError("x"), KeyboardInterrupt(), Stopped(15), ValueError()])
def test_a_forced_run_that_ends_before_its_first_step_leaves_everything(
    finished: Outcome, tmp_path: Path, error: BaseException
) -> None:
    home = finished.path.parent
    before = contents(home)
    with pytest.raises(type(error)):
        run.execute(configured(tmp_path, "force=true"), Ending(error))
    assert contents(home) == before


def test_an_unfinished_run_continues_after_a_forced_one_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_after(monkeypatch, 13, tmp_path)
    with pytest.raises(UserError, match="total_budget"):
        carry_out(tmp_path, "force=true", "privacy.total_budget=0.001")
    assert carry_out(tmp_path).record.document["privacy"]["steps"] == 20


def test_the_checkpoint_of_a_partial_run_never_replaces_that_of_the_finished_one(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = finished.path.parent
    before = contents(home)
    kill_after(monkeypatch, 13, tmp_path, "force=true")
    assert (home / "checkpoint.pt").exists()
    with pytest.raises(UserError, match="total_budget"):
        carry_out(tmp_path, "force=true", "privacy.total_budget=0.001")
    partial = contents(home).keys() - before
    assert partial == {"ledger.jsonl.2"}  # its steps count
    assert contents(home).items() > before.items()


def make_home(home: Path) -> None:
    """Write the files of a run with two nodes."""
    for folder in (home, home / "nodes" / "00", home / "nodes" / "01"):
        folder.mkdir(parents=True)
        write(folder / "ledger.jsonl", 0, 1)
    own_names = ("nodes/00/notes.txt", "metrics.jsonl", "metrics.jsonl.1")  # of the user's files
    for name in ("record.json", "checkpoint.pt", *own_names):
        (home / name).write_text("{}")


class Kill(BaseException):
    pass


def kill_within(patch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> bool:
    """Kill `act` before its rename or deletion `number`. Return False if it ended before."""
    calls = iter(range(number))

    def count(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls, None) is None:
                raise Kill
            return real(*arguments, **options)

        return call

    with patch.context() as counting:
        counting.setattr(os, "replace", count(os.replace))
        counting.setattr(Path, "unlink", count(Path.unlink))
        try:
            act()
        except Kill:
            return True
    return False


OWN_NAMES = ("notes.txt", "metrics.jsonl", "metrics.jsonl.1", "slides.txt", "slides.txt.replaced")
OWN_NAMES += ("film.partial", "metrics.jsonl.1.replaced", "figures/record.json")


@pytest.mark.parametrize("words", [[], ["force=true"]])
def test_a_users_own_files_in_a_runs_folder_stay_as_they_are(
    finished: Outcome, tmp_path: Path, words: list[str]
) -> None:
    """A forced run deleted them. Any run took NAME.replaced for NAME of a run before."""
    home = finished.path.parent
    (home / "figures").mkdir()
    for name in OWN_NAMES:
        (home / name).write_text(f"my {name}")
    if not words:
        finished.path.unlink()
    carry_out(tmp_path, *words)
    assert {name: (home / name).read_text() for name in OWN_NAMES} == {
        name: f"my {name}" for name in OWN_NAMES
    }
    assert not (home / "record.json.replaced").exists()
    start_anew(home)  # as `delete` does
    left = {str(path.relative_to(home)) for path in home.rglob("*") if not path.is_dir()}
    assert {name for name in left if "ledger" not in name} == {*OWN_NAMES, FILE}


def test_a_run_that_a_checkout_before_the_first_release_replaced_is_restored(
    tmp_path: Path,
) -> None:
    """Its marker, an empty file, was renamed over the ledger."""
    write(tmp_path / "ledger.jsonl", 0, 1, 2)
    ledger = (tmp_path / "ledger.jsonl").rename(tmp_path / "ledger.jsonl.1").read_bytes()
    (tmp_path / "ledger.jsonl.1.replaced").touch()
    (tmp_path / "record.json.replaced").write_text("{}")
    settle_replaced(tmp_path)
    assert contents(tmp_path) == {"ledger.jsonl": ledger, "record.json": b"{}"}


def test_a_kill_while_a_run_is_replaced_or_restored_leaves_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, number = tmp_path / "0", 0
    make_home(home)
    before = contents(home)

    def replace_and_restore() -> None:
        start_anew(home, keep=True)
        settle_replaced(home)

    while kill_within(monkeypatch, number, replace_and_restore):
        settle_replaced(home)
        assert contents(home) == before, number
        number += 1
    assert number > 12


def test_a_kill_while_a_partial_run_is_replaced_loses_nothing_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, is_killed = 0, True

    def start_anew_again() -> None:
        start_anew(home, keep=True)

    while is_killed:
        home = tmp_path / str(number)
        make_home(home)
        before = contents(home)
        start_anew(home, keep=True)
        write(home / "ledger.jsonl", 0)
        (home / "checkpoint.pt").write_text("of the partial run")
        is_killed = kill_within(monkeypatch, number, start_anew_again)
        settle_replaced(home)
        if (home / "record.json.replaced").exists():  # the partial run's ledger is in place
            assert (home / "checkpoint.pt.replaced").read_text() == "{}"
            start_anew(home, keep=True)
            settle_replaced(home)
        assert contents(home).items() > before.items()
        assert (home / "ledger.jsonl.2").exists()
        number += 1
    assert number > 1


def write_other_weights(results: Path) -> None:
    (path,) = results.rglob("checkpoint.pt")
    body = torch.load(path, weights_only=True)
    next(iter(body["model"].values()))[0, 0] += 1
    torch.save(body, path)


@pytest.mark.parametrize(
    "change", ["trainer.micro_batch=50", "threads=1", "another code", "other weights"]
)
def test_a_killed_run_that_goes_on_otherwise_takes_its_steps_again_with_other_noise(
    change: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    set_threads: Callable[[int], None],
) -> None:
    keys: list[str] = []
    after_each_step(monkeypatch, lambda training, _: keys.append(training.noise.key))
    set_threads(2 if change == "threads=1" else 1)
    kill_after(monkeypatch, 13, tmp_path)  # four steps behind the checkpoint, which stands at 10
    if change == "another code":
        monkeypatch.setattr(run, "execution_digest", lambda *_: "a model file was changed")
    if change == "other weights":
        write_other_weights(tmp_path)
    resumed = carry_out(tmp_path, *([change] if "=" in change else [])).record.document
    assert resumed["privacy"]["steps"] == 24
    assert "4 steps of an earlier process are repeated" in caplog.text
    assert len(keys) == 24
    assert not set(keys[:14]) & set(keys[14:])


def test_two_runs_that_differ_share_neither_noise_nor_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In σ, in the rate, in one training example: with shared noise their difference would show the
    sums as they are."""
    keys: list[str] = []
    after_each_step(monkeypatch, lambda training, _: keys.append(training.noise.key))
    noise, rate, bound = "algorithm.noise_multiplier=1.6", "optimizer.lr=0.4", "max_grad_norm=2"
    for i, change in enumerate([[], [noise], [rate], [f"algorithm.{bound}"]]):
        kill_after(monkeypatch, 0, tmp_path / f"{i}", *change)
    load = run.load_data

    def without_one(config: Run) -> Splits:
        splits = load(config)
        fewer = Examples(splits.train.inputs[1:], splits.train.targets[1:])
        return dataclasses.replace(splits, train=fewer, digest=splits.digest[::-1])

    monkeypatch.setattr(run, "load_data", without_one)
    kill_after(monkeypatch, 0, tmp_path / "fewer")
    assert len(set(keys)) == 5
    plan = Plan(Sampling("poisson", 0.1, 100.0, 1000), 1, 10)
    batches = {plan.draw(key, 0)[0].tobytes() for key in keys}
    assert len(batches) == 5
