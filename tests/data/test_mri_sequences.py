"""Contrasts that are simulated from one volume."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import dataset
from zdp_bench.data import nifti
from zdp_bench.data.mri_sequences import SEQUENCES, map_to_contrasts


def test_volumes_are_not_called_patients(small_root: Path) -> None:
    made = dataset("mri_sequences_from_volumes", size=8, slices=2).load(small_root)
    assert made.notes.endswith("volumes: 4 to train, 1 to test")


@pytest.mark.parametrize("name", ["mri_sequences_from_volumes", "kspace_from_volumes"])
@pytest.mark.parametrize("files", ["0 100 200 300", "a b none c", "scan_1 scan_01 scan_2 scan_3"])
def test_names_of_volumes_need_only_be_distinct(name: str, files: str, tmp_path: Path) -> None:
    """They were taken for a missing name, and for two spellings of one."""
    (tmp_path / "scans").mkdir()
    for number, file in enumerate(files.split()):
        voxels = np.random.default_rng(number).random((9, 9, 4))
        nifti.write(tmp_path / "scans" / f"{file}.nii.gz", voxels, (1.0, 1.0, 1.0))
    options = {"size": 8} if name == "mri_sequences_from_volumes" else {"height": 8, "width": 8}
    made = dataset(name, folder="scans", slices=2, **options).load(tmp_path)
    assert sorted(made.owner_names) == sorted(files.split())


@pytest.mark.parametrize("shape", [(5, 6, 1), (1, 6, 7), (5, 1, 1), (1, 1, 1), (5, 6, 7)])
def test_volumes_of_one_slice_have_contrasts(shape: tuple[int, int, int]) -> None:
    """A gradient needs two voxels along its axis."""
    volume = np.random.default_rng(0).random(shape)
    contrasts = map_to_contrasts(volume, np.random.default_rng(1))
    assert contrasts.shape == (*shape, len(SEQUENCES))
    assert np.isfinite(contrasts).all()
