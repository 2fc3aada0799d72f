"""k-space from NIfTI volumes: magnitudes are kept, and a smooth phase is added."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from tests.data.helpers import assert_refused
from zdp_bench.data.fastmri import KSpaceExamples
from zdp_bench.data.formats.kspace import centre_crop
from zdp_bench.extras.standins.kspace_from_volumes import KSpaceFromVolumes, draw_phase

OPTIONS = {"folder": "volumes", "height": 8, "width": 8, "test_share": 0.25}


def magnitudes(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 200, (9, 10 + number % 2, 4)).astype(np.uint8)


def save(path: Path, volume: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(8):
        save(tmp_path / "volumes" / f"brain_{number}.nii.gz", magnitudes(number))
    (tmp_path / "volumes" / "._brain_0.nii.gz").write_bytes(b"what macOS leaves behind")
    return tmp_path


def test_references_are_the_volumes_own_slices(root: Path) -> None:
    splits = KSpaceFromVolumes(**OPTIONS, slices=2).load(root)  # type: ignore[arg-type]
    test = splits.test
    assert isinstance(test, KSpaceExamples)
    assert (len(splits.train), len(test), splits.provenance) == (12, 4, "derived")
    inputs, targets = test.batch(torch.arange(4))
    for row, volume in enumerate(v for v in test.volumes for _ in range(2)):
        number = int(volume.path.stem.removeprefix("brain_"))
        expected = centre_crop(np.moveaxis(magnitudes(number), 2, 0)[1 + row % 2], 8, 8)
        assert np.allclose(targets[row, 0].numpy(), expected)
    assert (inputs.imag.abs() > 1e-3).any()  # there is a phase
    assert not torch.allclose(targets[:, 0], targets[:, 1], rtol=0.01)  # and something is missing
    assert splits.examples_per_patient == 2
    again = KSpaceFromVolumes(**OPTIONS, slices=2).load(root)  # type: ignore[arg-type]
    assert again.digest == splits.digest
    other = KSpaceFromVolumes(**OPTIONS, slices=2, split_seed=1).load(root)  # type: ignore[arg-type]
    assert other.digest != splits.digest


def test_the_phase_is_smooth_and_bounded() -> None:
    phase = draw_phase(40, 50, np.random.default_rng(0))
    assert np.abs(phase).max() <= 6 * np.pi / 2
    assert max(np.abs(np.diff(phase, axis=0)).max(), np.abs(np.diff(phase, axis=1)).max()) < 0.5


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-200]), "damaged"),
    "wrong shape": (
        lambda path: save(path, magnitudes(0)[..., None].repeat(2, 3)),
        "where three dimensions were expected",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_volume_is_named_and_refused(root: Path, kind: str) -> None:
    spoil, says = BROKEN[kind]
    spoil(root / "volumes" / "brain_0.nii.gz")
    assert_refused(lambda: KSpaceFromVolumes(**OPTIONS).load(root), "brain_0", says)  # type: ignore[arg-type]
    assert not list((root / "derived").glob("kspace-*"))  # nothing half made is left in place


def test_a_folder_without_volumes_is_refused(root: Path) -> None:
    shutil.rmtree(root / "volumes")
    assert_refused(lambda: KSpaceFromVolumes(**OPTIONS).load(root), "volumes", "is no folder")  # type: ignore[arg-type]
    (root / "volumes").mkdir()
    assert_refused(lambda: KSpaceFromVolumes(**OPTIONS).load(root), "volumes", "holds no .nii")  # type: ignore[arg-type]
    save(root / "volumes" / "one.nii", magnitudes(0))
    assert_refused(
        lambda: KSpaceFromVolumes(**OPTIONS).load(root),
        "dataset.test_share",
        "1 volumes to train on, 0",
    )  # type: ignore[arg-type]
