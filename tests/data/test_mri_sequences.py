"""MRI sequences: the right slices and classes, and whitening."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from zdp_bench.data.kspace import to_kspace
from zdp_bench.data.mri_sequences import MriSequences, transform_slices, whiten
from zdp_bench.extras.standins.scans import draw_head

OPTIONS: dict[str, Any] = {"size": 16, "slices": 3, "validation_patients": 1}


def test_examples_are_the_centre_slices_of_each_sequence_in_turn(root: Path) -> None:
    splits = MriSequences(**OPTIONS).load(root)
    inputs, labels = splits.train.batch(torch.arange(len(splits.train)))
    assert (inputs.shape, inputs.dtype) == ((4 * 12, 1, 16, 16), torch.complex64)
    four = [label for label in range(4) for _ in range(3)]
    assert labels.tolist() == 4 * four
    for number in (0, 1):  # number 1 is stored as LPS
        middle = draw_head(np.random.default_rng([0, number]))[:, :, 4:7]  # of 12 slices
        torch.testing.assert_close(
            inputs[12 * number : 12 * number + 12], torch.from_numpy(transform_slices(middle, 16))
        )


def test_an_example_depends_on_no_other_and_is_whitened_by_itself() -> None:
    random = np.random.default_rng(3)
    images = random.random((5, 16, 16)) * np.array([1, 50, 1e4, 1e-3, 1]).reshape(-1, 1, 1)
    made = whiten(to_kspace(images))
    np.testing.assert_allclose(whiten(to_kspace(images[2:3])), made[2:3])
    for example in made:
        parts = np.stack([example.real.ravel(), example.imag.ravel()])
        np.testing.assert_allclose(np.cov(parts, bias=True), np.eye(2), atol=1e-9)
        assert abs(example.mean()) < 1e-9
    # units do not matter
    np.testing.assert_allclose(whiten(to_kspace(1e3 * images)), made, atol=1e-9)


def test_a_slice_without_anything_on_it_stays_finite() -> None:
    flat = np.stack([np.zeros((16, 16)), np.full((16, 16), 7.0)])
    made = whiten(to_kspace(flat))
    assert np.isfinite(made).all()
    assert np.abs(made[0]).max() == 0
    assert np.abs(made[1].imag).max() < 1e-6  # rounding, which is not blown up
