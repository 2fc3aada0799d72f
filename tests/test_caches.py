"""Nothing is read from, or kept in, a cache folder that anybody else could have written to."""

import logging
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from zdp_bench import caches, cli, disk
from zdp_bench.data.cache import load_or_make
from zdp_bench.privacy.memory import call_cached

ROWS = np.arange(40, dtype=np.float32).reshape(10, 4)


def use_arrays() -> bool:
    """True if the array is what was asked for, although what is kept would be another."""
    load_or_make("rows", "d" * 64, (10, 4), np.float32, iter([ROWS + 1]))
    return bool((load_or_make("rows", "d" * 64, (10, 4), np.float32, iter([ROWS])) == ROWS).all())


def use_numbers() -> bool:
    return bool(call_cached(tick) != call_cached(tick))


def tick(clock: Iterator[int] = count()) -> int:  # noqa: B008 - one clock for all calls
    return next(clock)


def as_a_link(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))
    root.symlink_to(root.with_name("elsewhere"))


WEAK: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "writable by a group": lambda root, _: root.chmod(0o770),
    "writable by others": lambda root, _: root.chmod(0o702),
    "a link": lambda root, _: as_a_link(root),
    "another user's": lambda root, patch: patch.setattr(os, "geteuid", lambda: os.getuid() + 1),
    "exchangeable": lambda root, _: root.parent.chmod(0o777),
    "exchangeable, further up": lambda root, _: root.parent.parent.chmod(0o777),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own" / "cache"))
    caches._warn.cache_clear()
    root = tmp_path / "own" / "cache" / "zdp-bench"
    root.mkdir(parents=True)
    return root


@pytest.mark.parametrize("use", [use_arrays, use_numbers])
@pytest.mark.parametrize("weakness", WEAK)
def test_a_folder_that_others_can_write_to_is_not_used(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    weakness: str,
    use: Callable[[], bool],
) -> None:
    assert not use()  # what is kept is read
    WEAK[weakness](root, monkeypatch)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with caplog.at_level(logging.WARNING):
        assert use()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    (warning,) = caplog.messages
    assert str(root) in warning
    assert "Set XDG_CACHE_HOME to another" in warning


def test_the_folder_is_closed_to_others(root: Path) -> None:
    root.chmod(0o755)  # as older versions made it
    assert caches.cache_folder("rows") == root / "rows"
    assert root.stat().st_mode & 0o777 == 0o700
    root.rmdir()
    before = os.umask(0)
    caches.cache_folder("rows")
    os.umask(before)
    assert root.stat().st_mode & 0o777 == 0o700


def test_the_whole_cache_is_counted_and_deleted(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What killed processes left, which can be gigabytes, was neither."""
    load_or_make("spectrograms", f"64-16-{'d' * 64}", (10, 4), np.float32, iter([ROWS]))
    call_cached(tick)
    array, number = "a" * 32, "b" * 64
    for name in (f".{array}.npy.{'0' * 16}.partial", f".{array}.17.npy", f"{array}.npy"):
        (root / "spectrograms" / name).write_bytes(bytes(1_000_000))
    partial = disk.name_partial(root / "numbers" / f"{number}.json")
    partial.write_bytes(b"")
    with pytest.raises(SystemExit):
        cli.main(["data", "cache", "--delete"])
    assert "0.003 GB deleted" in capsys.readouterr().out
    assert not [path for path in root.rglob("*") if path.is_file()]


def test_deleting_the_cache_deletes_no_data_set_which_is_in_the_same_folder(root: Path) -> None:
    """Data that was downloaded by hand was deleted, under the name of the cache."""
    names = ("physionet2012/Outcomes-a.txt", "cifar-10-batches-bin/data_batch_1.bin")
    own_names = ("spectrograms/mine.npy", "numbers/mine.json", f"mine/{'a' * 32}.txt", "mine.npy")
    paths = [root / name for name in (*names, *own_names)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    call_cached(tick)
    with pytest.raises(SystemExit):
        cli.main(["data", "cache", "--delete"])
    assert sorted(path for path in root.rglob("*") if path.is_file()) == sorted(paths)


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    """A ledger that its owner had hidden could be read by all after a kill."""
    path = tmp_path / "a"
    disk.write_bytes(path, b"a")
    path.chmod(mode)
    disk.write_bytes(path, b"b")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"b", mode)


def test_ctrl_c_in_a_write_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "rename", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        disk.write_bytes(tmp_path / "a", b"a")
    assert not list(tmp_path.iterdir())
