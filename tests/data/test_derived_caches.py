"""Caches made from volumes are used for the same volumes and the same reader only."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zdp_bench.data import Splits, nifti
from zdp_bench.data.derived_kspace import KSpaceFromVolumes
from zdp_bench.data.mri_sequences import MriSequencesFromVolumes
from zdp_bench.data.msd import Msd
from zdp_bench.errors import UserError

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
    with pytest.raises(UserError, match=r"spleen_0\.nii\.gz: its voxels cannot be read"):
        MADE[kind](root)


@pytest.mark.parametrize("kind", MADE)
def test_a_volume_that_changed_is_read_again(root: Path, kind: str) -> None:
    before = MADE[kind](root)
    stamp = volume(root, 0).stat()
    voxels: Any = nifti.read(volume(root, 0)).data
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
