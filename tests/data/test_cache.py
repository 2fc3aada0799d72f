"""A cache costs memory and time where it cannot be written, and a damaged one is made anew."""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.damage import within
from zdp_bench import disk
from zdp_bench.data import cache
from zdp_bench.data.cache import load_or_make
from zdp_bench.errors import UserError

ROWS = np.arange(40, dtype=np.float32).reshape(10, 4)


def make() -> np.ndarray:
    return load_or_make("rows", "d" * 64, (10, 4), np.float32, iter([ROWS[:6], ROWS[6:]]))


def test_an_array_is_made_once_and_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "zdp-bench" / "rows"
    folder.mkdir(parents=True)
    old, young = folder / f".{'a' * 32}.1.npy", disk.name_partial(folder / f"{'b' * 32}.npy")
    old.touch()
    young.touch()
    os.utime(old, (0, young.stat().st_mtime - disk.A_DAY - 1))
    np.testing.assert_array_equal(make(), ROWS)
    array = load_or_make("rows", "d" * 64, (10, 4), np.float32, iter([]))
    np.testing.assert_array_equal(array, ROWS)
    assert {path.name for path in folder.iterdir()} == {young.name, f"{'d' * 32}.npy"}
    (folder / f"{'d' * 32}.npy").unlink()
    (folder / f"{'d' * 32}.npy").mkdir()
    with pytest.raises(UserError, match="is a folder, but should be a file"):
        make()


def test_an_array_that_another_process_deletes_while_it_is_made_is_whole(tmp_path: Path) -> None:
    """As one does whose clock has jumped ahead by more than a day."""

    def blocks() -> Iterator[np.ndarray]:
        yield ROWS[:6]
        for partial in tmp_path.rglob("rows/.*"):
            partial.unlink()
        yield ROWS[6:]

    for _ in range(2):
        made = load_or_make("rows", "d" * 64, (10, 4), np.float32, blocks())
        np.testing.assert_array_equal(made, ROWS)
        assert not [*tmp_path.rglob("rows/*")]


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, ValueError, UserError])
def test_an_error_of_what_is_read_is_raised_and_nothing_is_stored(
    tmp_path: Path, error: type[Exception]
) -> None:
    """A missing file was taken for the deleted partial one: the other rows were 0."""

    def blocks() -> Iterator[np.ndarray]:
        yield ROWS[:6]
        raise error("x.png")

    with pytest.raises(error, match=r"x\.png"):
        load_or_make("rows", "d" * 64, (10, 4), np.float32, blocks())
    assert not [*tmp_path.rglob("rows/*")]


def test_an_array_that_its_blocks_do_not_fill_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="blocks have 6 rows, but the array has 10"):
        load_or_make("rows", "d" * 64, (10, 4), np.float32, iter([ROWS[:6]]))
    assert not [*tmp_path.rglob("rows/*")]


@pytest.mark.parametrize("place", [0, 148, 296])
def test_an_array_whose_bytes_changed_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    make()
    (path,) = (tmp_path / "cache" / "zdp-bench" / "rows").iterdir()
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    np.testing.assert_array_equal(make(), ROWS)
    assert "is damaged" in caplog.text
    caplog.clear()
    np.testing.assert_array_equal(make(), ROWS)
    assert not caplog.text


@pytest.mark.parametrize("size", [0, 31, 200, 10**6, 1 << 36])
def test_an_array_of_another_size_is_made_anew_without_reading_it(
    tmp_path: Path, size: int
) -> None:
    make()
    (path,) = (tmp_path / "cache" / "zdp-bench" / "rows").iterdir()
    os.truncate(path, size)
    with within(2):
        np.testing.assert_array_equal(make(), ROWS)


def test_an_array_that_is_larger_than_memory_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refused it, so it was called damaged and made anew, until the disk was full."""
    monkeypatch.setattr(cache, "_hash", lambda file: bytes(file.seek(-32, os.SEEK_END) and 32))
    rows = 2 * os.sysconf("SC_PHYS_PAGES")
    path = tmp_path / "cache" / "zdp-bench" / "rows" / f"{'d' * 32}.npy"
    path.parent.mkdir(parents=True)
    shape = (rows, os.sysconf("SC_PAGE_SIZE"))
    np.lib.format.open_memmap(path, "w+", np.uint8, shape)  # a hole: it takes no place
    array = load_or_make("rows", "d" * 64, shape, np.uint8, iter([]))
    assert array.shape == shape
    array[-1] = 7  # stays in memory
    assert array[-1].sum() == 7 * shape[1]
    again = load_or_make("rows", "d" * 64, shape, np.uint8, iter([]))
    assert not again[-1].any()
    path.unlink()


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_one_sentence_before_any_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: int
) -> None:
    def refuse(descriptor: int, start: int, count: int) -> None:
        assert count >= ROWS.nbytes
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(make(), ROWS)
    (warning,) = caplog.messages
    assert os.strerror(why) in warning
    assert "XDG_CACHE_HOME" in warning
    assert not list((tmp_path / "cache" / "zdp-bench" / "rows").iterdir())


def test_a_file_in_the_place_of_a_folder_keeps_the_array_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ended with NotADirectoryError."""
    folder = tmp_path / "cache" / "zdp-bench" / "rows"
    folder.parent.mkdir(parents=True, mode=0o700)
    folder.write_text("x")
    np.testing.assert_array_equal(make(), ROWS)
    assert "so this run keeps rows in memory" in caplog.text
