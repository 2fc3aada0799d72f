"""k-space of public pictures: what of a picture is kept, and that options are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from zdp_bench.data import cifar10
from zdp_bench.data.cifar10 import RECORD
from zdp_bench.data.fastmri import KSpaceExamples
from zdp_bench.data.files import card
from zdp_bench.data.formats.kspace import centre_crop, to_image
from zdp_bench.errors import UserError
from zdp_bench.extras.standins.public_kspace import PublicKSpace, draw_scan

SMALL = {"train": 150, "test": 30}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10's six files, 40 random pictures each, taken for the released ones."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number, batch in enumerate(cifar10.BATCHES):
        rows = np.random.default_rng(number).integers(0, 256, (40, RECORD), dtype=np.uint8)
        rows[:, 0] = 0
        (folder / f"{batch}.bin").write_bytes(rows.tobytes())
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


def test_a_picture_is_an_example_of_its_own_part(root: Path) -> None:
    splits = PublicKSpace(**SMALL).load(root)
    test = splits.test
    assert isinstance(test, KSpaceExamples)
    assert (len(splits.train), len(test), splits.provenance) == (150, 30, "derived")
    assert splits.examples_per_patient == 1
    assert splits.unit == "image"
    inputs, targets = test.batch(torch.arange(30))
    assert inputs.shape == (30, 1, 32, 40)
    pictures = cifar10.read_binary(root / "cifar-10-batches-bin" / "test_batch.bin").images
    _, image = draw_scan(pictures[7], (35, 51), np.random.default_rng())
    assert np.allclose(targets[7, 0].numpy(), centre_crop(image, 32, 40), atol=1e-3)
    assert PublicKSpace(**SMALL).load(root).digest == splits.digest
    assert PublicKSpace(**SMALL, seed=1).load(root).digest != splits.digest


def test_its_info_is_what_it_loads(root: Path) -> None:
    info, splits = PublicKSpace(**SMALL).info(root), PublicKSpace(**SMALL).load(root)
    assert (info.train, info.test, info.found) == (len(splits.train), len(splits.test), True)
    assert (info.input_shape, info.examples_per_patient) == (splits.input_shape, 1)
    assert not PublicKSpace(**SMALL).info(root / "nothing").found


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"columns": 64}, r"dataset\.columns=64: must lie between 40 and 63"),
        ({"rows": 31}, r"dataset\.rows=31: must lie between 32 and 63"),
        ({"train": 0}, r"dataset\.train=0: must lie between 1 and CIFAR-10's 50,000"),
        ({"slices": 3}, r"dataset\.slices=3: must be null"),
        ({"unit": "volume", "slices": 3}, r"dataset\.unit=volume: a picture is a slice"),
    ],
)
def test_what_means_nothing_is_refused(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        PublicKSpace(**wrong)  # type: ignore[arg-type]


def test_its_card_says_that_it_is_public_and_made_of_cifar() -> None:
    assert card("public_kspace").public
    assert card("public_kspace").uses == "cifar10"  # a start that private CIFAR-10 runs refuse
