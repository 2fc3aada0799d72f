"""A cache costs memory and time where it cannot be written, and holds what the files hold now."""

from __future__ import annotations

import errno
import gzip
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zdp_bench.data import Splits, cache, nifti
from zdp_bench.data.cache import A_DAY, load_or_make
from zdp_bench.data.derived_kspace import KSpaceFromVolumes
from zdp_bench.data.mri_sequences import MriSequencesFromVolumes
from zdp_bench.data.msd import Msd
from zdp_bench.errors import UserError

ROWS = np.arange(40, dtype=np.float32).reshape(10, 4)


def make() -> np.ndarray:
    return load_or_make("rows", "d" * 64, (10, 4), np.float32, iter([ROWS[:6], ROWS[6:]]))


def test_an_array_is_made_once_and_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "zdp-bench" / "rows"
    folder.mkdir(parents=True)
    old, young = folder / ".a.1.npy", folder / ".b.2.npy"
    old.touch()
    young.touch()
    os.utime(old, (0, young.stat().st_mtime - A_DAY - 1))
    np.testing.assert_array_equal(make(), ROWS)
    found = load_or_make("rows", "d" * 64, (10, 4), np.float32, iter([]))
    np.testing.assert_array_equal(found, ROWS)
    assert {path.name for path in folder.iterdir()} == {young.name, f"{'d' * 32}.npy"}


def test_without_fallocate_every_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has none."""
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(cache, "CHUNK", 100)
    mapped = cache._reserve(tmp_path / "rows.npy", (1000, 50), np.float32)
    found = (tmp_path / "rows.npy").stat()
    assert found.st_blocks * 512 >= found.st_size >= 1000 * 50 * 4
    assert not mapped.any()
    np.testing.assert_array_equal(make(), ROWS)


@pytest.mark.parametrize("place", range(0, 320, 37))
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
    found = load_or_make("rows", "d" * 64, shape, np.uint8, iter([]))
    assert found.shape == shape
    found[-1] = 7  # stays in memory
    assert found[-1].sum() == 7 * shape[1]
    again = load_or_make("rows", "d" * 64, shape, np.uint8, iter([]))
    assert not again[-1].any()
    path.unlink()


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_one_sentence_before_any_page_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: int,
) -> None:
    def refuse(descriptor: int, start: int, count: int) -> None:
        assert count >= ROWS.nbytes
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(make(), ROWS)
    (told,) = caplog.messages
    assert os.strerror(why) in told
    assert "XDG_CACHE_HOME" in told
    assert not list((tmp_path / "cache" / "zdp-bench" / "rows").iterdir())


TASK = "Task09_Spleen"
MADE: dict[str, Callable[[Path], Splits]] = {
    "slices": lambda root: Msd(task="spleen", size=16, validation_share=0.25, test_share=0.25).load(
        root
    ),
    "sequences": lambda root: MriSequencesFromVolumes(
        folder=f"{TASK}/imagesTr", size=16, slices=3, test_share=0.25
    ).load(root),
    "kspace": lambda root: KSpaceFromVolumes(
        folder=f"{TASK}/imagesTr", height=8, width=8, test_share=0.25
    ).load(root),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data root with four volumes and their segmentations."""
    for folder in ("imagesTr", "labelsTr"):
        (tmp_path / TASK / folder).mkdir(parents=True)
    for number in range(4):
        voxels = np.random.default_rng(number).integers(0, 200, (9, 10, 4)).astype(np.uint8)
        nifti.write(volume(tmp_path, number), voxels, (1.0, 1.0, 1.0))
        nifti.write(
            tmp_path / TASK / "labelsTr" / f"spleen_{number}.nii.gz",
            (voxels > 100).astype(np.uint8),
            (1.0, 1.0, 1.0),
        )
    return tmp_path


def volume(root: Path, number: int) -> Path:
    return root / TASK / "imagesTr" / f"spleen_{number}.nii.gz"


@pytest.mark.parametrize("kind", MADE)
def test_what_an_older_version_made_of_a_damaged_volume_is_not_used(
    root: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    voxels = gzip.decompress(volume(root, 0).read_bytes())
    packed = bytearray(gzip.compress(voxels + bytes(10**6)))
    packed[-8] ^= (
        1  # in the checksum of the stream, which reading up to the last voxel does not reach
    )
    volume(root, 0).write_bytes(packed)
    with monkeypatch.context() as before:
        before.setattr(nifti, "_unpack", lambda image, path: np.asanyarray(image.dataobj))
        before.setattr(nifti, "READING", 1, raising=False)
        MADE[kind](root)
    with pytest.raises(UserError, match=r"spleen_0\.nii\.gz: cannot be read"):
        MADE[kind](root)


@pytest.mark.parametrize("kind", MADE)
def test_a_volume_that_changed_is_read_again(root: Path, kind: str) -> None:
    before = MADE[kind](root)
    stamp = volume(root, 0).stat()
    voxels: Any = nifti.read(volume(root, 0))
    nifti.write(volume(root, 0), (200 - voxels).astype(np.uint8), (1.0, 1.0, 1.0))
    os.utime(volume(root, 0), ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # whatever its time says
    after = MADE[kind](root)
    assert after.digest != before.digest
    trained = torch.cat(
        [part.batch(torch.arange(len(part)))[0] for part in (before.train, before.test)]
    )
    again = torch.cat(
        [part.batch(torch.arange(len(part)))[0] for part in (after.train, after.test)]
    )
    assert not torch.equal(trained, again)
