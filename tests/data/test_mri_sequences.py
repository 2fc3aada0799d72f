"""Contrasts that are simulated from one volume."""

import numpy as np
import pytest

from zdp_bench.data.mri_sequences import SEQUENCES, map_to_contrasts


@pytest.mark.parametrize("shape", [(5, 6, 1), (1, 6, 7), (5, 1, 1), (1, 1, 1), (5, 6, 7)])
def test_volumes_of_one_slice_have_contrasts(shape: tuple[int, int, int]) -> None:
    """A gradient needs two voxels along its axis."""
    volume = np.random.default_rng(0).random(shape)
    contrasts = map_to_contrasts(volume, np.random.default_rng(1))
    assert contrasts.shape == (*shape, len(SEQUENCES))
    assert np.isfinite(contrasts).all()
