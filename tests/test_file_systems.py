"""File systems that lack locks or the fsync of a folder, and folders of several users: a run ends
well or in one sentence, and no step is left out of any ε."""

import errno
import fcntl
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.library.conftest import Make
from tests.library.conftest import make as make  # a fixture
from tests.test_cli import run as command
from tests.training.test_run import TINY, carry_out
from zdp_bench import disk, records
from zdp_bench.data.cache import load_or_make
from zdp_bench.disk import hold_lock
from zdp_bench.errors import UserError
from zdp_bench.training.spending import find_spendings, read_spendings

ERRORS = (errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS)
SMALL = ("threads=1",)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with two finished runs, to be copied."""
    results = tmp_path_factory.mktemp("finished")
    for seed in range(2):
        carry_out(results, f"seed={seed}", *SMALL)
    records.rebuild_csv(results)
    return results


@pytest.fixture
def results(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "results"))


def refuse(number: int) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return act


# ------------------------------------------------------------------------- links to folders


def test_a_walk_yields_each_folder_once_and_real_ones_first(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    for folder in ("results/b/c", "results/runs", "outside/d"):
        (tmp_path / folder).mkdir(parents=True)
    top = tmp_path / "results"
    (top / "a").symlink_to(top / "b")  # a folder of its own
    (top / "b" / "round").symlink_to(top)
    (top / "out").symlink_to(outside)
    (top / "broken").symlink_to(tmp_path / "nothing")
    (outside / "file").write_text("")
    visited = {
        str(folder.relative_to(top)): names for folder, names in disk.walk(top, first="runs")
    }
    assert [*visited] == [".", "runs", "b", "b/c", "out", "out/d"]
    assert visited["out"] == ["file"]
    unlinked = [str(folder.relative_to(top)) for folder, _ in disk.walk(top, follow_links=False)]
    assert unlinked == [".", "b", "b/c", "runs"]


# ------------------------------------------------------------------------- what a file system lacks


def test_without_locks_nothing_is_trained_and_all_is_read(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spent = read_spendings(results)
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    place = f"paths.results={results}"
    code, _, err = command(capsys, "run", *TINY, *SMALL, "seed=7", place)
    assert (code, err.count("\n")) == (2, 1), err
    assert "cannot be locked" in err
    assert read_spendings(results) == spent
    code, _, err = command(capsys, "run", *TINY, *SMALL, "seed=1", place)  # finished before
    assert code == 0, err
    for words in (["results"], ["budget"]):
        code, _, err = command(capsys, *words, "--results", str(results))
        assert (code, "Traceback" in err) == (0, False), err
    home = next(results.glob("runs/*/*/record.json")).parent
    code, _, err = command(capsys, "delete", home.name, "--results", str(results))
    assert (code, (home / "record.json").exists()) == (2, True), err


@pytest.mark.parametrize("number", ERRORS)
def test_without_locks_no_loop_begins(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse(number))
    with pytest.raises(UserError, match=r"cannot be locked .* ledger= in your own loop"):
        make()
    assert not list(tmp_path.glob("*.jsonl"))


def test_without_locks_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    assert load_or_make("rows", "d" * 64, (0, 4), float, iter([])).shape == (0, 4)
    assert [*tmp_path.glob("zdp-bench/rows/*.npy")]


def test_a_lock_that_cannot_be_released_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def lock_only(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, "no locks")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_only)
    for _ in range(2):  # closing the file has released it
        with hold_lock(tmp_path / "a.lock", wait=False):
            pass


def test_a_file_system_that_hangs_at_a_lock_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # capsys would lose what another thread prints while it is read
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    answer = threading.Event()
    monkeypatch.setattr(disk, "PATIENCE", 0.01)
    monkeypatch.setattr(fcntl, "flock", lambda *_: answer.wait(60))

    def wait() -> None:
        with hold_lock(tmp_path / "a.lock"):
            pass

    waiting = threading.Thread(target=wait)
    waiting.start()
    while "waiting for the file system to lock" not in errors.getvalue():
        assert waiting.is_alive()
    answer.set()
    waiting.join(60)


def test_a_buffer_is_released_although_an_error_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 and later wrote "Exception ignored" below the error of a full disk."""
    monkeypatch.setattr(disk, "rename", refuse(errno.ENOSPC))
    content = io.BytesIO(b"content")
    with pytest.raises(OSError, match="No space left") as error:
        disk.write_bytes(tmp_path / "file", content)
    content.close()
    assert error.traceback


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_folder_without_fsync_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(number))
    disk.fsync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        disk.fsync_folder(tmp_path)


# ------------------------------------------------------------------------------------ several users

NOBODY = 65534
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root acts as another user"
)


@pytest.fixture
def shared(finished: Path) -> Iterator[Path]:
    """A copy of the results where every user may go."""
    place = Path(tempfile.mkdtemp(prefix="zdp-bench-users-"))
    place.chmod(0o755)
    yield Path(shutil.copytree(finished, place / "results"))
    shutil.rmtree(place)


def as_nobody(act: Callable[[], str]) -> str:
    """Return what `act` returns in a fork of this process that belongs to another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            text = act()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def allow(folder: Path, for_folders: int, for_files: int) -> None:
    """Set the modes of a folder and all below."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(for_folders if path.is_dir() else for_files)


@needs_root
def test_a_folder_that_another_user_may_read_is_counted_as_by_its_owner(shared: Path) -> None:
    allow(shared, 0o755, 0o644)
    own = repr([spending.spent for spending in read_spendings(shared)])
    assert as_nobody(lambda: repr([each.spent for each in read_spendings(shared)])) == own


@needs_root
@pytest.mark.parametrize(
    "pattern", [".", "runs", "runs/quickstart", "runs/*/*", "runs/*/*/record.json"]
)
def test_what_another_user_may_not_read_is_one_sentence_and_never_left_out(
    shared: Path, pattern: str
) -> None:
    allow(shared, 0o755, 0o644)
    path = shared if pattern == "." else next(shared.glob(pattern))
    path.chmod(0o700 if path.is_dir() else 0o600)
    (shared / records.index.NAME).unlink(missing_ok=True)
    message = as_nobody(lambda: f"counted {len(read_spendings(shared))}")
    assert message.startswith("UserError: "), message
    assert "cannot be read" in message
    assert "Permission denied" in message
    assert "Delete" not in message
    number = as_nobody(lambda: repr(len(find_spendings(shared, skip_damaged=True)[1])))
    assert number == "1", number


@needs_root
@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_a_lock_file_of_one_user_shuts_no_other_out_who_may_write(shared: Path, umask: int) -> None:
    shared.chmod(0o777)
    before = os.umask(umask)
    try:
        with hold_lock(shared / "new.lock"):
            pass
        (shared / "old.lock").touch(0o644)
    finally:
        os.umask(before)
    (shared / "old.lock").chmod(0o644)  # as older versions made them

    def lock(name: str) -> str:
        with hold_lock(shared / name, "busy", wait=False):
            return "locked"

    for name in ("new.lock", "old.lock"):
        assert as_nobody(lambda name=name: lock(name)) == "locked"  # type: ignore[misc]
        with hold_lock(shared / name):
            assert as_nobody(lambda name=name: lock(name)) == "Busy: busy"  # type: ignore[misc]
    shared.chmod(0o755)
    with hold_lock(shared / "own.lock"):
        pass
    assert (shared / "own.lock").stat().st_mode & 0o022 == 0


@needs_root
def test_a_folder_that_another_user_may_not_write_is_one_sentence(shared: Path) -> None:
    allow(shared, 0o755, 0o644)

    def write() -> str:
        with hold_lock(shared / "runs" / "new" / "run.lock"):
            return "locked"

    message = as_nobody(write)
    # The command line puts it in a sentence.
    assert message.startswith("PermissionError: "), message
    assert str(shared) in message


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "recipe=~nobody-of-this-name/x.yaml"],
        ["run", "recipe=quickstart", "paths.results='~nobody-of-this-name/x'"],
        [
            "validate",
            "recipe=quickstart",
            "dataset=folder",
            "dataset.path='~nobody-of-this-name/x'",
        ],
        ["data", "check", "mnist", "--root", "~nobody-of-this-name/x"],
        ["reproduce", "cost", "paths.results='~nobody-of-this-name/x'"],
    ],
    ids=" ".join,
)
def test_a_home_folder_that_is_not_there_is_named(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback of pathlib."""
    code, _, error = command(capsys, *words)
    assert code == 2
    assert "~nobody-of-this-name/x" in error
    assert "there is no such home folder; write the path without ~" in error


def test_only_one_function_reads_the_home_folder() -> None:
    """Each caller of `expanduser` needs its sentence."""
    package = Path(disk.__file__).parent
    callers = [path for path in package.rglob("*.py") if "expanduser(" in path.read_text()]
    assert callers == [Path(disk.__file__)]
