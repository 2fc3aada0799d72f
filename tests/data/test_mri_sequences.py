"""MRI sequences: the right slices and classes, whitening, splits by patient, broken volumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.helpers import copy_folder
from zdp_bench.data import nifti
from zdp_bench.data.kspace import to_kspace
from zdp_bench.data.mri_sequences import (
    FOLDER,
    SEQUENCES,
    MriSequences,
    MriSequencesFromVolumes,
    map_to_contrasts,
    scan,
    transform_slices,
    whiten,
)
from zdp_bench.extras.standins.scans import (
    HEAD_SPACING,
    draw_head,
)

OPTIONS: dict[str, Any] = {"size": 16, "slices": 3, "validation_patients": 1}
DERIVED: dict[str, Any] = {"folder": "volumes", "size": 16, "slices": 3, "test_share": 0.25}


@pytest.fixture
def root(small_root: Path, tmp_path: Path) -> Path:
    """A data root with four patients to train and three to test, some with turned axes."""
    return copy_folder(small_root, tmp_path, FOLDER)


@pytest.fixture
def one_contrast(tmp_path: Path) -> Path:
    """A data root with eight volumes of one contrast, T1-weighted."""
    (tmp_path / "volumes").mkdir()
    for number in range(8):
        t1 = draw_head(np.random.default_rng([0, number]))[..., SEQUENCES.index("T1w")]
        nifti.write(tmp_path / "volumes" / f"brain_{number}.nii.gz", t1, HEAD_SPACING)
    return tmp_path


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


def test_patients_are_in_one_part_and_the_patient_owns_every_sequence(root: Path) -> None:
    splits = MriSequences(**OPTIONS).load(root)
    assert splits.validation is not None
    people = [set(part.groups.tolist()) for part in (splits.train, splits.validation, splits.test)]
    assert [len(part) for part in people] == [4, 1, 2]
    assert len(set.union(*people)) == 7
    assert splits.examples_per_patient == 12
    assert splits.provenance == "derived"  # for these are not the released 484 and 266
    again = MriSequences(**OPTIONS).load(root)
    assert again.digest == splits.digest
    assert (
        MriSequences(**OPTIONS | {"split_seed": 2, "validation_patients": 2}).load(root).digest
        != splits.digest
    )
    assert MriSequences(**OPTIONS | {"validation_patients": 0}).load(root).validation is None


def test_an_example_depends_on_no_other_and_is_whitened_by_itself() -> None:
    random = np.random.default_rng(3)
    images = random.random((5, 16, 16)) * np.array([1, 50, 1e4, 1e-3, 1]).reshape(-1, 1, 1)
    made = whiten(to_kspace(images))
    np.testing.assert_allclose(whiten(to_kspace(images[2:3])), made[2:3])
    for example in made:
        parts = np.stack([example.real.ravel(), example.imag.ravel()])
        np.testing.assert_allclose(np.cov(parts, bias=True), np.eye(2), atol=1e-9)
        assert abs(example.mean()) < 1e-9
    np.testing.assert_allclose(
        whiten(to_kspace(1e3 * images)), made, atol=1e-9
    )  # units do not matter


def test_a_slice_without_anything_on_it_stays_finite() -> None:
    flat = np.stack([np.zeros((16, 16)), np.full((16, 16), 7.0)])
    made = whiten(to_kspace(flat))
    assert np.isfinite(made).all()
    assert np.abs(made[0]).max() == 0
    assert np.abs(made[1].imag).max() < 1e-6  # rounding, which is not blown up


# -------------------------------------------------------------------------------------------------
# simulated contrasts


def test_the_four_contrasts_differ_where_sequences_differ() -> None:
    """Fluid is bright in T2w only, white matter in T1w; contrast agent shows at borders."""
    tissue = np.concatenate(
        [np.full((8, 8, 8), level) for level in (0.0, 0.45, 1.0)]
    )  # fluid, grey, white
    made = map_to_contrasts(tissue, np.random.default_rng(0))
    fluid, grey, white = (made[8 * i + 2 : 8 * i + 6].mean(axis=(0, 1, 2)) for i in range(3))
    flair, t1, gd, t2 = range(4)
    assert fluid[t2] > grey[t2] > white[t2]
    assert white[t1] > grey[t1] > fluid[t1]
    assert grey[flair] > max(fluid[flair], white[flair])
    assert made[15:17, ..., gd].mean() > made[15:17, ..., t1].mean() + 0.2
    assert made[18:22, ..., gd].mean() == pytest.approx(made[18:22, ..., t1].mean(), abs=0.5)


def test_a_scanner_adds_a_smooth_field_and_noise() -> None:
    picture = np.ones((20, 20, 20))
    a, b = (scan(picture, np.random.default_rng(seed)) for seed in (1, 2))
    assert abs(a / b - 1).max() > 0.1  # each its own field
    assert np.abs(np.diff(a, axis=0)).mean() < 0.1
    assert np.abs(np.diff(a, axis=0)).mean() > 0.01


def test_derived_examples_come_from_the_files_name_and_voxels(one_contrast: Path) -> None:
    splits = MriSequencesFromVolumes(**DERIVED).load(one_contrast)
    assert (
        len(splits.train),
        len(splits.test),
        splits.examples_per_patient,
        splits.provenance,
    ) == (
        6 * 12,
        2 * 12,
        12,
        "derived",
    )
    assert not set(splits.train.groups.tolist()) & set(splits.test.groups.tolist())  # type: ignore[union-attr]
    other = MriSequencesFromVolumes(**DERIVED | {"split_seed": 1}).load(one_contrast)
    assert other.digest != splits.digest
