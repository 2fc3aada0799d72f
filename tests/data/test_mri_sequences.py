"""Contrasts that are simulated from one volume."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import dataset
from zdp_bench.data.mri_sequences import SEQUENCES, map_to_contrasts


def test_volumes_are_not_called_patients(small_root: Path) -> None:
    made = dataset("mri_sequences_from_volumes", size=8, slices=2).load(small_root)
    assert made.notes.endswith("volumes: 4 to train, 1 to test")


@pytest.mark.parametrize("shape", [(5, 6, 1), (1, 6, 7), (5, 1, 1), (1, 1, 1), (5, 6, 7)])
def test_volumes_of_one_slice_have_contrasts(shape: tuple[int, int, int]) -> None:
    """A gradient needs two voxels along its axis."""
    volume = np.random.default_rng(0).random(shape)
    contrasts = map_to_contrasts(volume, np.random.default_rng(1))
    assert contrasts.shape == (*shape, len(SEQUENCES))
    assert np.isfinite(contrasts).all()
