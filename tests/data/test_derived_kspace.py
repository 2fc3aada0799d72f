"""k-space of volumes, MRI sequences and public pictures: what is kept of them, and the phase."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.helpers import write_cifar10
from zdp_bench.data import cifar10, nifti
from zdp_bench.data.derived_kspace import KSpaceFromVolumes, PublicKSpace, draw_phase, draw_scan
from zdp_bench.data.files import card
from zdp_bench.data.kspace import centre_crop, to_image, to_kspace
from zdp_bench.data.mri_sequences import MriSequences, transform_slices, whiten
from zdp_bench.errors import UserError
from zdp_bench.extras.standins.scans import draw_head


def magnitudes(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 200, (9, 10 + number % 2, 4)).astype(np.uint8)


def test_pictures_of_no_known_release_are_not_advised_to_set_another_data_set_s_option(
    tmp_path: Path,
) -> None:
    write_cifar10(tmp_path)
    with pytest.raises(UserError, match=r"release\. Unpack the official archive\.$"):
        PublicKSpace(train=4, test=2).load(tmp_path)


def test_references_are_the_volumes_own_slices(tmp_path: Path) -> None:
    folder = tmp_path / "volumes"
    folder.mkdir()
    for number in range(8):
        nifti.write(folder / f"brain_{number}.nii.gz", magnitudes(number), (1.0, 1.0, 1.0))
    (folder / "._brain_0.nii.gz").write_bytes(b"what macOS leaves behind")
    options = {"height": 8, "width": 8, "test_share": 0.25, "slices": 2}
    splits = KSpaceFromVolumes(folder="volumes", **options).load(tmp_path)
    test = splits.test
    assert (len(splits.train), len(test), splits.provenance) == (12, 4, "derived")
    inputs, targets = test.batch(torch.arange(4))
    for row, volume in enumerate(v for v in test.volumes for _ in range(2)):
        number = int(volume.path.stem.removeprefix("brain_"))
        expected = centre_crop(np.moveaxis(magnitudes(number), 2, 0)[1 + row % 2], 8, 8)
        assert np.allclose(targets[row, 0].numpy(), expected)
    assert (inputs.imag.abs() > 1e-3).any()  # there is a phase
    assert not torch.allclose(targets[:, 0], targets[:, 1], rtol=0.01)  # and something is missing
    assert splits.examples_per_patient == 2


def test_the_phase_is_smooth_and_bounded() -> None:
    phase = draw_phase(40, 50, np.random.default_rng(0))
    assert np.abs(phase).max() <= 6 * np.pi / 2
    assert max(np.abs(np.diff(phase, axis=0)).max(), np.abs(np.diff(phase, axis=1)).max()) < 0.5


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


def test_a_picture_is_an_example_of_its_own_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = write_cifar10(tmp_path, count=30)
    monkeypatch.setattr(cifar10, "release_of", lambda paths, of: "binary")
    splits = PublicKSpace(train=150, test=30).load(tmp_path)  # 100 stand in a file
    test = splits.test
    assert (len(splits.train), len(test), splits.provenance) == (150, 30, "derived")
    assert splits.examples_per_patient == 1
    assert splits.unit == "image"
    assert card("public_kspace").public
    assert card("public_kspace").uses == "cifar10"  # a start that private CIFAR-10 runs refuse
    inputs, targets = test.batch(torch.arange(30))
    assert inputs.shape == (30, 1, 32, 40)
    stored = cifar10.read_binary(pictures / "test_batch.bin").images
    _, image = draw_scan(stored[7], (35, 51), np.random.default_rng())
    assert np.allclose(targets[7, 0].numpy(), centre_crop(image, 32, 40), atol=1e-3)


def test_examples_are_the_centre_slices_of_each_sequence_in_turn(small_root: Path) -> None:
    splits = MriSequences(size=16, slices=3, validation_patients=1).load(small_root)
    inputs, labels = splits.train.batch(torch.arange(len(splits.train)))
    assert (inputs.shape, inputs.dtype) == ((4 * 12, 1, 16, 16), torch.complex64)
    four = [label for label in range(4) for _ in range(3)]
    assert labels.tolist() == 4 * four
    for number in (0, 1):  # number 1 is stored as LPS
        middle = draw_head(np.random.default_rng([0, number]))[:, :, 4:7]  # of 12 slices
        expected = torch.from_numpy(transform_slices(middle, 16))
        torch.testing.assert_close(inputs[12 * number :][:12], expected)


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
