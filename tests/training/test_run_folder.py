"""A run's folder on file systems of all kinds: read by others, without locks, with FIFOs in it."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import run as command
from tests.training.test_run import TINY, carry_out
from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.report import papers
from zdp_bench.training.spending import read_spendings


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
        for folder in (place, own):  # pytest's own folders are closed to other users
            Path(folder).mkdir(exist_ok=True)
            Path(folder).chmod(0o777)
        for name in ("HOME", "XDG_CACHE_HOME", "ZDP_DATA"):
            monkeypatch.setenv(name, str(own))
        words = ["run", *TINY, "seed=1", f"paths.results={results}"]

        def read(to: Path) -> list[tuple[int, str, str]]:
            """Return what each verb that reads says."""
            to.mkdir()
            own = ("--results", str(results))
            return [
                command(capsys, *words),
                command(capsys, "results", *own),
                command(capsys, "report", "--output", str(to / "report.html"), *own),
                command(capsys, "export", "quickstart", "--to", str(to / "model"), *own),
                command(capsys, "table", "zeta_dp_2021/1", *own),
            ]

        first = read(own / "first")  # what it imports may be in a home that is closed to others
        with as_another_user(results):
            second = read(own / "second")
            refused = command(capsys, *words, "seed=2")
        assert [(code, err) for code, _, err in first] == [(0, "")] * 5
        assert [(code, err) for code, _, err in second[:-1]] == [(0, "")] * 4
        assert "done before" in second[0][1]
        assert second[-1][0] == 0
        assert second[-1][2].endswith("Permission denied; not written.\n")
        assert (refused[0], refused[2].count("\n")) == (2, 1), refused[2]


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"cannot be locked .*flock \(paths\.results\)\.$"):
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
        ("spending.json", read_spendings),
        ("other.jsonl", read_spendings),  # which nothing explains
    ],
)
def test_a_fifo_is_refused(tmp_path: Path, name: str, read: Callable[[Path], Any]) -> None:
    outcome = carry_out(tmp_path)
    outcome.path.unlink()
    home = outcome.path.parent
    path = home / name.format(home.name)
    path.unlink(missing_ok=True)
    if name == "other.jsonl":
        (home / "spending.json").unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"is no regular file\."):
        read(tmp_path)


def test_a_fifo_in_the_place_of_a_record_is_left_out(tmp_path: Path) -> None:
    home = carry_out(tmp_path).path.parent.with_name("other")
    home.mkdir()
    os.mkfifo(home / "record.json")
    assert len(records.read_all(tmp_path)) == 1
