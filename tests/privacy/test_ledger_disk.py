"""A ledger on disk: what is written when, faults and kills at any moment, other writers, links."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from io import BytesIO
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest

from tests.ledgers import OnDisk, steps_in
from tests.privacy.ledger_runs import MECHANISM, reopen, write
from zdp_bench.errors import UserError
from zdp_bench.privacy import ledger as module
from zdp_bench.privacy import ledger_lines, tally
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.ledger_lines import LedgerError


class Disk:
    """Which lines of a ledger the last fsync left on disk. Each look at the clock is 1/16 s on."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.lines, self.fsyncs = path, 0, 0
        now, real = count(1), os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            self.fsyncs += 1
            self.lines = path.read_bytes().count(b"\n") if path.exists() else 0

        monkeypatch.setattr(module.os, "fsync", fsync)
        monkeypatch.setattr(module.time, "monotonic", lambda: next(now) / 16)

    @property
    def missing(self) -> int:
        return self.path.read_bytes().count(b"\n") - self.lines


@pytest.mark.parametrize("interval", [module.MIN_SYNC_INTERVAL, 4 / 16])
def test_a_line_is_in_the_file_at_once_and_on_disk_in_a_fifth_of_a_second(
    path: Path, monkeypatch: pytest.MonkeyPatch, interval: float
) -> None:
    held = Disk(path, monkeypatch)
    monkeypatch.setattr(module, "MIN_SYNC_INTERVAL", interval)
    ledger = Ledger(path, MECHANISM, repeatable=True)
    missing = []
    for step in range(12):
        ledger.append(step)
        assert steps_in(path) == list(range(step + 1))
        missing.append(held.missing)
    assert missing == [1, 2, 3, 0] * 3
    ledger.close()


def test_a_ledger_is_on_disk_after_sync_and_close(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Disk(path, monkeypatch)
    ledger = Ledger(path, MECHANISM, repeatable=True)
    assert held.missing == 0
    ledger.append(0)
    assert held.missing == 1
    ledger.sync()
    assert held.missing == 0
    before = held.fsyncs
    ledger.sync()
    assert held.fsyncs == before
    ledger.append(1)
    ledger.close()
    assert held.missing == 0


class Faulty:
    """A raw file that takes only some bytes at a time, or none after the first few."""

    closed = False

    def __init__(self, file: Any, full: bool = False) -> None:
        self.file, self.full, self.fileno, self.close = file, full, file.fileno, file.close

    def write(self, data: bytes) -> int:
        taken = int(self.file.write(data[:7]))
        if self.full:
            raise OSError(28, "No space left on device")
        return taken


def test_a_short_write_is_finished(path: Path) -> None:
    ledger = Ledger(path, MECHANISM, repeatable=True)
    ledger._file = Faulty(ledger._file)
    ledger.append(0)
    ledger.close()
    assert path.read_bytes().endswith(b"\n")
    assert reopen(path).releases == 1


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("fault", ["full", OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_line_that_fails_is_cut_off_before_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, repeatable: bool
) -> None:
    ledger = Ledger(path, MECHANISM, repeatable)
    ledger.append(0)
    before, whole = ledger.position, path.read_bytes()
    file = ledger._file
    with monkeypatch.context() as patch:
        if fault == "full":
            ledger._file = Faulty(file, full=True)
        else:
            patch.setattr(module, "MIN_SYNC_INTERVAL", 0)
            patch.setattr(module.os, "fsync", raising(fault))
        with pytest.raises((OSError, KeyboardInterrupt)):
            ledger.append(1)
    assert path.read_bytes() != whole
    ledger._file = file
    ledger.require_intact()  # as `save` asks
    assert (ledger.position, path.read_bytes()) == (before, whole)
    ledger.append(1)
    ledger.close()
    assert steps_in(path) == [0, 1]
    assert reopen(path, repeatable, ledger.position).releases == ledger.releases == 2


LAST_ACTS: dict[str, Callable[[Ledger], object]] = {
    "opening": lambda ledger: None,
    "step": lambda ledger: ledger.append(1),
    "recorded start": lambda ledger: ledger.record_start("made", 1, "state"),
    "forbidden repeats": lambda ledger: ledger.revoke_starts(1),
}


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("act", LAST_ACTS)
def test_a_line_of_another_writer_is_refused_and_never_removed(
    path: Path, act: str, is_new: bool
) -> None:
    """Only what this ledger itself began to write is removed: the line may be a release."""
    if not is_new:
        write(path, 0)
    ledger = Ledger(path, MECHANISM, repeatable=True)
    LAST_ACTS[act](ledger)
    with path.open("ab") as file:
        file.write(b"a line of another writer\n")
    for ask in (ledger.require_intact, ledger.sync, lambda: ledger.append(2), ledger.close):
        with pytest.raises(UserError, match="written to by something else"):
            ask()
    assert path.read_bytes().endswith(b"a line of another writer\n")


@pytest.mark.parametrize("failing", ["nothing was written", "all was written"])
def test_a_line_of_another_writer_is_refused_after_one_that_failed(
    path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    ledger = Ledger(path, MECHANISM, repeatable=True)
    with monkeypatch.context() as patch:
        if failing == "nothing was written":
            full = Mock(wraps=ledger._file, closed=False, write=raising(OSError("fault")))
            patch.setattr(ledger, "_file", full)
        else:
            patch.setattr(ledger, "_add_entry", raising(OSError("fault")))
        with pytest.raises(OSError, match="fault"):
            ledger.append(0)
    ledger.require_intact()
    with path.open("ab") as file:
        file.write(b"a line of another writer\n")
    with pytest.raises(UserError, match="written to by something else"):
        ledger.close()


def test_what_a_killed_process_wrote_is_on_disk_before_anything_depends_on_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are repeated without a line of their own, and a checkpoint counts them."""
    write(path, 0, 1)
    disk = OnDisk(monkeypatch)
    ledger = Ledger(path, MECHANISM, repeatable=True)
    ledger.append(0)
    ledger.sync()
    disk.check(path)
    ledger.close()


def test_a_ledgers_ending_is_its_size_and_last_bytes(path: Path) -> None:
    assert module.read_ending(path) is None
    write(path, 0, 1)
    content = path.read_bytes()
    assert module.read_ending(path) == (len(content), content)  # all of a short one
    write(path, *range(2, 900))
    content = path.read_bytes()
    size, last_bytes = module.read_ending(path) or (0, b"")
    assert size == len(content)
    assert 1000 < len(last_bytes) < size
    assert content.endswith(last_bytes)


def test_a_first_line_that_a_kill_cut_short_releases_nothing(path: Path) -> None:
    write(path, 0)
    head = path.read_bytes().splitlines()[0]
    path.write_bytes(head[:-5])
    assert list(ledger_lines.read_ledger(path)) == []


def test_a_ledger_follows_its_file_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(Path("ledger.jsonl"), MECHANISM, repeatable=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    ledger.append(0)
    ledger.close()
    assert steps_in(tmp_path / "ledger.jsonl") == [0]


@pytest.mark.parametrize("fault", ["continued", "deleted"])
def test_a_closed_ledger_counts_until_its_file_is_not_as_it_was_closed(
    path: Path, fault: str
) -> None:
    ledger = Ledger(path, MECHANISM, repeatable=True)
    ledger.append(0)
    ledger.close()
    ledger.sync()
    if fault == "continued":
        write(path, 1)
    else:
        path.unlink()
    with pytest.raises(UserError, match="after it was closed here"):
        ledger.sync()


def test_no_step_is_taken_with_a_closed_ledger(path: Path) -> None:
    """A step that it holds was let through, although nothing ties the process to the file."""
    ledger = write(path, 0, 1)
    for step in (0, 1, 2):
        with pytest.raises(UserError, match="the ledger is closed"):
            ledger.append(step)
    assert ledger.releases == 2


def test_a_ledger_that_could_not_be_closed_counts_no_more(path: Path) -> None:
    ledger = Ledger(path, MECHANISM, repeatable=True)
    ledger.append(0)
    path.unlink()
    for ask in (ledger.close, ledger.sync):
        with pytest.raises(UserError):
            ask()


def test_steps_between_damaged_lines_are_counted(path: Path) -> None:
    write(path, 0, 1, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], b"damaged\n", lines[-1], b"{}\n"]))
    assert ledger_lines.count_intact_steps(path) == 3


def test_damage_across_several_lines_lowers_no_count(path: Path) -> None:
    """Lines joined by printable bytes inside their digests were one step."""
    write(path, *range(10))
    content = path.read_bytes()
    whole = tally.count_releases([path])
    starts = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    for last in (3, 9):
        begin, end = starts[2] + 20, starts[last] + 20
        aside = path.with_name("ledger.jsonl.1")
        aside.write_bytes(content[:begin] + b"x" * (end - begin) + content[end:])
        assert tally.count_releases([aside]) >= whole


@pytest.mark.parametrize("filling", [b"[", b"x", b" ", b"}", b'"', b"\\", b"7"])
def test_bytes_without_the_end_of_a_line_are_counted_as_the_steps_that_they_may_cover(
    path: Path, filling: bytes
) -> None:
    """They looked like the last line, cut short by a kill, and counted as one step."""
    write(path, *range(40))
    content = path.read_bytes()
    for begin in range(20, 600, 7):
        path.with_name("ledger.jsonl.1").write_bytes(
            content[:begin] + filling * (len(content) - begin)
        )
        assert tally.count_releases([path.with_name("ledger.jsonl.1")]) >= 40, begin


def raising(fault: BaseException) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise fault

    return act


@pytest.mark.parametrize("repeatable", [True, False])
def test_an_interrupt_at_any_line_of_code_leaves_a_ledger_that_is_right(
    tmp_path: Path, repeatable: bool
) -> None:
    """Only the steps whose `append` returned are counted, and memory and file say the same."""
    for place in count(start=int(repeatable), step=2):
        path, taken = tmp_path / f"{place}.jsonl", []
        ledger = Ledger(path, MECHANISM, repeatable)
        ledger.choose_generation("made", 0, "state")
        left = place

        def interrupt(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in (module.__file__, tally.__file__):
                return None
            if event == "line" and (left := left - 1) < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        was = sys.gettrace()
        sys.settrace(interrupt)
        try:
            for step in (0, 1, 0):
                ledger.append(step)
                taken.append(step)
            ledger.record_start("made", 2, "other state")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(was)
        ledger.require_intact()
        assert steps_in(path) == (sorted({*taken}) if repeatable else taken), place
        ledger.append(2)
        ledger.append(3)
        ledger.close()
        assert ledger.releases == len(steps_in(path)), place
        assert reopen(path, repeatable, ledger.position).position == ledger.position, place
        if left >= 0:  # nothing was interrupted
            break
    assert place > 50


# ------------------------------------------------------------------------------- what a kill leaves


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_kill_inside_a_line_counts_the_step_it_cut(tmp_path: Path, repeatable: bool) -> None:
    whole = tmp_path / "whole"
    write(whole, 0, 1, 2, repeatable=repeatable)
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    near = {end + shift for end in [0, *ends] for shift in (-1, 0, 1, 2)}
    for length in sorted((near | set(range(0, len(data), 17))) & set(range(len(data) + 1))):
        path = tmp_path / "cut"
        path.write_bytes(data[:length])
        ledger = reopen(path, repeatable)
        # steps of which any byte was written
        begun = 0 if length <= ends[0] else sum(length > end for end in ends)
        assert ledger.releases == begun, length
        assert reopen(path, repeatable).releases == begun  # what was mended is whole
        write(path, *range(begun, 3), repeatable=repeatable)
        lines = [line for line in path.read_bytes().splitlines() if b'"state"' not in line]
        assert lines[1:] == data.splitlines()[1:]  # and the chain is that of an unbroken run


def test_a_kill_while_a_cut_line_is_mended_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, 0, 1, 2, repeatable=False)
    path.write_bytes(path.read_bytes()[:-10])
    path.chmod(0o600)
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(module.os, name, raising(SystemExit()))
            with pytest.raises(SystemExit):
                Ledger(path, MECHANISM, repeatable=False)
    assert reopen(path, repeatable=False).releases == 3
    assert path.stat().st_mode & 0o777 == 0o600


# ---------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize("lines_before", [0, 1, 3])
@pytest.mark.parametrize("garbage", [b"null", b"[" * 2000, b"{" * 900, b'{"a":1}{"b":2}', b"\xff"])
def test_an_end_that_no_kill_leaves_is_damage_and_counts_as_what_it_can_hold(
    path: Path, lines_before: int, garbage: bytes
) -> None:
    write(path, 0, 1, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:lines_before]) + garbage)
    with pytest.raises(LedgerError, match=rf"line {lines_before + 1}: not a ledger line"):
        reopen(path)
    steps_before = max(0, lines_before - 1)
    most = -(-len(garbage) // ledger_lines.MIN_STEP_LINE)
    assert tally.count_releases([path]) == steps_before + most


@pytest.mark.parametrize(
    "put",
    [
        lambda path: path.symlink_to("none"),
        lambda path: path.symlink_to(path.name),
        lambda path: (path.touch(), os.truncate(path, 2**36)),
        Path.mkdir,
        os.mkfifo,
    ],
    ids=["link", "loop", "64 GiB", "dir", "pipe"],
)
def test_a_ledger_set_aside_that_cannot_be_read_is_one_sentence(
    path: Path, put: Callable[[Path], object]
) -> None:
    write(path, 0, 1)
    put(path.with_name(f"{path.name}.1"))
    reasons = "cannot be read|is not a regular file|is larger than any"
    with pytest.raises(UserError, match=rf"ledger\.jsonl\.1: ({reasons})"):
        reopen(path)


@pytest.mark.parametrize(
    ("begun", "is_cut"),
    [
        ('{"step": 1, "of": "' + "a" * 80, True),
        ('{"step": 1, "of": "' + "a" * 81, False),
        ('{"step": 1, "of": "' + "a" * 80 + '", "ge', True),
        ('{"step": 1, "of": "' + "a" * 81 + '", "ge', False),
        ("{" + '"a": 1, ' * 7 + '"a": 1', True),
        ("{" + '"a": 1, ' * 8 + '"a": 1', False),
        ('{"facts": {' + '"a": "b", ' * 7 + '"a": "b"', True),
        ('{"facts": {' + '"a": "b", ' * 8 + '"a": "b"', False),
        ('{"facts": {' + '"a": "b", ' * 7 + '"a": "b"}, "le', True),
        ('{"facts": {' + '"a": "b", ' * 8 + '"a": "b"}, "le', False),
    ],
)
def test_only_what_is_no_longer_than_a_line_is_one_that_a_kill_cut_short(
    path: Path, begun: str, is_cut: bool
) -> None:
    """A text of 90 bytes may cover the line of a step. The longest line has eight entries."""
    path.parent.mkdir(parents=True)
    path.write_text(begun)
    if is_cut:
        assert list(ledger_lines.read_ledger(path)) == []
    else:
        with pytest.raises(LedgerError, match="line 1: not a ledger line"):
            list(ledger_lines.read_ledger(path))


def test_a_file_without_lines_is_read_in_parts_of_64_kib() -> None:
    """It may fill the memory otherwise."""
    parts = ledger_lines.lines_of(BytesIO(bytes(150_000)))
    assert [len(part) for part in parts] == [65_536, 65_536, 18_928]


@pytest.mark.parametrize("is_too_large", [True, False])
def test_a_ledger_of_up_to_4_gib_is_read(path: Path, is_too_large: bool) -> None:
    """It holds no line: such a file takes a byte of the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(2**32 + is_too_large)
    if is_too_large:
        with pytest.raises(UserError, match="is larger than any ledger"):
            ledger_lines.open_ledger_file(path)
    else:
        ledger_lines.open_ledger_file(path).close()
