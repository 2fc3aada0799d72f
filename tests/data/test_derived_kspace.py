"""k-space of NIfTI volumes and of public pictures: what is kept of them, and the phase."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from zdp_bench.data import cifar10
from zdp_bench.data.cifar10 import RECORD
from zdp_bench.data.derived_kspace import KSpaceFromVolumes, PublicKSpace, draw_phase, draw_scan
from zdp_bench.data.fastmri import KSpaceExamples
from zdp_bench.data.files import card
from zdp_bench.data.kspace import centre_crop, to_image

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


SMALL = {"train": 150, "test": 30}


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10's six files, 40 random pictures each, taken for the released ones."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number, batch in enumerate(cifar10.BATCHES):
        rows = np.random.default_rng(number).integers(0, 256, (40, RECORD), dtype=np.uint8)
        rows[:, 0] = 0
        (folder / batch).write_bytes(rows.tobytes())
    monkeypatch.setattr(cifar10, "release_of", lambda paths, of: "binary")
    return tmp_path


def test_a_scan_is_the_grey_picture_mirrored_at_its_edges() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (3, 32, 32)).astype(np.uint8)
    kspace, image = draw_scan(picture, (35, 51), np.random.default_rng(1))
    assert image.shape == kspace.shape == (35, 51)
    red, green, blue = picture.astype(float)
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    assert np.allclose(image[1:33, 9:41], grey)
    assert np.allclose(image[0, 9:41], grey[1])  # one row above, the edge itself not repeated
    assert np.allclose(image[1:33, 8], grey[:, 1])
    assert np.allclose(np.abs(to_image(kspace)), image)
    assert np.abs(to_image(kspace).imag).max() > 1  # there is a phase


def test_a_picture_is_an_example_of_its_own_part(pictures: Path) -> None:
    splits = PublicKSpace(**SMALL).load(pictures)
    test = splits.test
    assert isinstance(test, KSpaceExamples)
    assert (len(splits.train), len(test), splits.provenance) == (150, 30, "derived")
    assert splits.examples_per_patient == 1
    assert splits.unit == "image"
    assert card("public_kspace").public
    assert card("public_kspace").uses == "cifar10"  # a start that private CIFAR-10 runs refuse
    inputs, targets = test.batch(torch.arange(30))
    assert inputs.shape == (30, 1, 32, 40)
    stored = cifar10.read_binary(pictures / "cifar-10-batches-bin" / "test_batch.bin").images
    _, image = draw_scan(stored[7], (35, 51), np.random.default_rng())
    assert np.allclose(targets[7, 0].numpy(), centre_crop(image, 32, 40), atol=1e-3)
    assert PublicKSpace(**SMALL).load(pictures).digest == splits.digest
    assert PublicKSpace(**SMALL, seed=1).load(pictures).digest != splits.digest
