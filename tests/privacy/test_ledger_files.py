"""The files of ledgers: which are any, which are copies, how they are set aside."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.privacy.ledger_runs import MECHANISM, reopen, run_process, write
from zdp_bench.errors import UserError
from zdp_bench.privacy import ledger_files as module
from zdp_bench.privacy import tally
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.ledger_files import find_ledgers, set_aside, set_aside_others
from zdp_bench.privacy.ledger_lines import MAX_LEDGER, LedgerError

# ---------------------------------------------------------------------------------------- set aside


def test_a_lost_secure_ledger_is_named_and_one_more_counts(path: Path) -> None:
    aside, renamed = path.with_name("ledger.jsonl.1"), path.with_name("found.jsonl")
    write(path, *range(5), repeatable=False)
    set_aside(path)
    write(path, *range(3), repeatable=False)
    aside.rename(renamed)
    with pytest.raises(LedgerError, match=r"line 1: states 5 releases .* is missing"):
        reopen(path, repeatable=False)
    set_aside_others(path)
    assert reopen(path, repeatable=False).releases == 8
    write(renamed, *range(7), repeatable=False)
    set_aside_others(path)
    assert reopen(path, repeatable=False).releases == 15


def test_a_ledger_that_the_system_cannot_look_for_is_not_begun_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since Python 3.14, `Path.exists` returns False then, so its steps did not count."""
    write(path, 0)
    stat = os.stat

    def fail_at_it(file: str | Path, *more: Any, **named: Any) -> os.stat_result:
        if file == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(file, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail_at_it)
        for act in (reopen, set_aside, set_aside_others):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                act(path)
    assert reopen(path).releases == 1


def test_ledgers_whose_numbers_are_equal_all_count(path: Path) -> None:
    for name, steps in (("ledger.jsonl.1", 5), ("ledger.jsonl.01", 7), ("ledger.jsonl.10", 2)):
        write(path.with_name(name), *range(steps), repeatable=False)
    names = [aside.name for aside in module.list_set_aside(path)]
    assert names == ["ledger.jsonl.01", "ledger.jsonl.1", "ledger.jsonl.10"]
    assert reopen(path, repeatable=False).releases == 14


@pytest.mark.parametrize("name", ["ledger.jsonl", "of [my] *.jsonl"])
def test_a_copy_that_somebody_keeps_beside_a_ledger_is_none_that_was_set_aside(
    path: Path, name: str
) -> None:
    path = path.with_name(name)
    for _ in range(11):
        run_process(path, "code", 0, "new", 5, secure=True)
        set_aside(path)
    for copy in (f"{name}.bak", f"{name}.1.bak", f"{name}.bak.1", "1"):
        path.with_name(copy).write_bytes(path.with_name(f"{name}.1").read_bytes())
    names = [aside.name for aside in module.list_set_aside(path)]
    assert names == [f"{name}.{number}" for number in range(1, 12)]


def test_the_ledger_of_another_run_that_a_link_leads_to_stays_there(path: Path) -> None:
    other = path.parent.with_name("other") / "ledger.jsonl"
    write(other, 0, 1)
    path.parent.mkdir()
    (path.parent / "best").symlink_to(other.parent)
    assert find_ledgers(path.parent) == [path.parent / "best" / "ledger.jsonl"]
    set_aside_others(path)
    assert other.exists()
    assert not [*path.parent.glob("ledger.jsonl*")]


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_ledger_with_a_second_path_is_refused(
    path: Path, link: Callable[[Path, Path], None]
) -> None:
    """Another run could write to it there at the same time."""
    write(path, 0)
    other = path.with_name("other.jsonl")
    link(other, path)
    with pytest.raises(UserError, match="is a link, or has a second hard link"):
        reopen(other)
    other.unlink()
    assert reopen(path).releases == 1


# -------------------------------------------------------------------------- which files are ledgers


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda ledger: None, False),
        (lambda ledger: ledger.choose_generation("code", 0, "new"), False),
        (lambda ledger: ledger.revoke_starts(0), False),
        (lambda ledger: ledger.append(0), True),
    ],
)
def test_only_a_step_or_damage_makes_a_ledger_one_with_steps(
    path: Path, act: Callable[[Ledger], object], expected: bool
) -> None:
    ledger = Ledger(path, MECHANISM, True)
    act(ledger)
    ledger.close()
    assert module.has_steps(path) == expected
    path.write_bytes(path.read_bytes() + b"damaged\n")
    assert module.has_steps(path)


@pytest.mark.parametrize("fault", [PermissionError(13, "Permission denied"), OSError(5, "Fault")])
def test_a_subfolder_that_cannot_be_listed_hides_no_ledger(
    path: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError
) -> None:
    write(path, 0)
    (path.parent / "closed").mkdir()
    list_folder = os.scandir

    def scandir(folder: str) -> Any:
        if Path(folder).name == "closed":
            fault.filename = folder
            raise fault
        return list_folder(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=rf"closed: cannot be read \({fault.strerror}\)"):
        find_ledgers(path.parent)


def test_a_folder_that_is_not_there_has_no_ledgers(path: Path) -> None:
    """Another process may have moved or deleted it."""
    assert find_ledgers(path.parent / "moved") == []


def test_a_file_of_any_size_beside_a_ledger_is_no_ledger(path: Path) -> None:
    """Such as the checkpoint of a large model."""
    write(path, 0)
    with open(path.with_name("checkpoint.pt"), "wb") as file:
        file.write(b"PK")
        file.truncate(MAX_LEDGER + 1)
    assert find_ledgers(path.parent) == [path]
    set_aside_others(path)
    assert reopen(path).releases == 1


def test_a_log_of_metrics_is_no_ledger(path: Path) -> None:
    write(path, 0)
    log = path.with_name("metrics.jsonl")
    log.write_text('{"epoch": 1, "accuracy": 0.9}\n' * 50)
    log.with_name("lost.jsonl").symlink_to("nowhere")
    set_aside_others(path)
    assert reopen(path).releases == 1
    assert log.exists()


def test_a_renamed_ledger_is_one_although_its_head_is_damaged(path: Path) -> None:
    write(path, 0, 1, 2)
    _, *lines = path.read_bytes().splitlines(keepends=True)
    other = path.with_name("before.jsonl")
    other.write_bytes(b"damage\n" + b"".join(lines))
    path.unlink()
    assert find_ledgers(path.parent) == [other]
    set_aside_others(path)
    assert reopen(path).releases >= 3


def test_under_a_name_of_its_own_a_ledger_is_known_by_its_head(path: Path) -> None:
    write(path, 0, 1)
    backup, headless = path.with_name("backup"), path.with_name("headless")
    backup.write_bytes(path.read_bytes())
    headless.write_bytes(path.read_bytes().partition(b"\n")[2])
    assert find_ledgers(path.parent) == [backup, path]
    assert module.read_identity(backup) == ""
    with pytest.raises(LedgerError, match="line 1: not the first line of a ledger"):
        module.read_head(headless)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_only_a_file_is_opened_to_see_if_it_is_a_ledger(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    other = tmp_path / "other"
    write(path, 2)
    make = {"folder": other.mkdir, "pipe": lambda: os.mkfifo(other)}
    make.get(kind, lambda: other.symlink_to(path))()
    monkeypatch.setattr(module, "read_head", Mock(side_effect=AssertionError("it is opened")))
    assert not module.is_ledger(other)


# ------------------------------------------------------------------------------------------- copies


def without_nonce(path: Path) -> None:
    """Make a ledger one of an older version."""
    head, *lines = path.read_bytes().splitlines(keepends=True)
    body = json.loads(head)
    body.pop("nonce", None)
    path.write_bytes(json.dumps(body, sort_keys=True).encode() + b"\n" + b"".join(lines))


@pytest.mark.parametrize(
    ("repeatable", "is_old", "is_copied", "releases"),
    [
        (True, False, True, 10),
        (True, True, True, 10),
        (False, False, True, 10),
        (False, True, True, 15),  # nothing tells a copy from another attempt
        (True, False, False, 10),  # the same releases
        (False, False, False, 15),
        (False, True, False, 15),
    ],
)
def test_only_a_ledger_that_is_provably_a_copy_counts_as_one(
    path: Path, repeatable: bool, is_old: bool, is_copied: bool, releases: int
) -> None:
    """Secure attempts list the same steps, but none of their releases is the same."""
    other = path.with_name("other.jsonl")
    write(path, *range(5), repeatable=repeatable)
    if is_copied:
        other.write_bytes(path.read_bytes())
    else:
        write(other, *range(5), repeatable=repeatable)
    write(path, *range(5, 10), repeatable=repeatable)
    if is_old:
        without_nonce(path)
        without_nonce(other)
    assert tally.count_releases(module.drop_copies([path, other])) == releases
    set_aside_others(path)
    assert reopen(path, repeatable).releases == releases


@pytest.mark.parametrize("num_other", [5, 3])
def test_a_copy_of_a_secure_ledger_that_went_on_is_no_copy(path: Path, num_other: int) -> None:
    """Both went on from one backup. Their lines would be the same, but not their releases."""
    other = path.with_name("other.jsonl")
    write(path, *range(5), repeatable=False)
    other.write_bytes(path.read_bytes())
    write(path, *range(5, 10), repeatable=False)
    write(other, *range(5, 5 + num_other), repeatable=False)
    ledgers = module.drop_copies([path, other])
    assert tally.count_releases(ledgers) >= 5 + 5 + num_other
    set_aside_others(path)
    assert reopen(path, repeatable=False).releases >= 5 + 5 + num_other


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("is_damaged", [True, False])
@pytest.mark.parametrize("name", ["ledger.jsonl", "ledger.jsonl.1"])
def test_a_ledger_that_continues_the_one_in_its_place_is_renamed_to_it_unless_it_is_damaged(
    path: Path, name: str, is_damaged: bool, repeatable: bool
) -> None:
    """Such as a ledger that was put back from a backup. The lines of both counted twice."""
    short, longer = path.with_name(name), path.with_name("longer.jsonl")
    write(short, *range(5), repeatable=repeatable)
    longer.write_bytes(short.read_bytes())
    write(longer, *range(5, 8), repeatable=repeatable)
    if is_damaged:
        longer.write_bytes(longer.read_bytes() + b"damaged\n")
    lines = longer.read_bytes()
    set_aside_others(path)
    assert not longer.exists()
    releases = reopen(path, repeatable).releases
    if is_damaged:
        assert releases >= 9
        assert sorted(path.parent.glob("ledger*"))[-1].read_bytes() == lines
    else:
        assert releases == 8
        assert short.read_bytes() == lines
        write(path, 8, repeatable=repeatable)
        set_aside_others(path)
        assert reopen(path, repeatable).releases == 9


@pytest.mark.parametrize("longer_name", ["longer.jsonl", "ledger.jsonl.2"])
def test_a_longer_ledger_takes_the_place_of_one_of_its_copies_unless_it_has_one(
    path: Path, longer_name: str
) -> None:
    copy, longer = path.with_name("ledger.jsonl.1"), path.with_name(longer_name)
    write(path, *range(5))
    shutil.copy(path, copy)
    shutil.copy(path, longer)
    write(longer, *range(5, 8))
    set_aside_others(path)
    assert copy.exists()
    assert longer.exists() == (longer_name == "ledger.jsonl.2")
    assert reopen(path).releases == 8


def test_a_longer_ledger_that_a_kill_cut_short_counts_once_at_every_opening(path: Path) -> None:
    """The line that replaces its cut one made it another ledger, which counted at the second."""
    write(path, *range(5), repeatable=False)
    path.chmod(0o600)
    longer = path.with_name("longer.jsonl")
    shutil.copy(path, longer)
    write(longer, *range(5, 9), repeatable=False)
    longer.write_bytes(longer.read_bytes()[:-30])
    set_aside_others(path)
    assert path.stat().st_mode & 0o777 == 0o600
    for _ in range(2):
        set_aside_others(path)
        assert reopen(path, repeatable=False).releases == 9


def test_a_link_in_the_place_of_a_ledger_stays_and_the_longer_one_is_set_aside(path: Path) -> None:
    """It was an error that advised to choose another file."""
    archived = path.parent / "archive" / "ledger"
    archived.parent.mkdir(parents=True)
    write(path, *range(5))
    path.rename(archived)
    link = path.with_name("ledger.jsonl.1")
    link.symlink_to(archived)
    shutil.copy(archived, path.with_name("longer.jsonl"))
    write(path.with_name("longer.jsonl"), 5, 6)
    set_aside_others(path)
    assert link.is_symlink()
    assert reopen(path).releases == 7
