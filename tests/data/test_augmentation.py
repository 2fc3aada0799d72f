"""Augmentation: each image by its own row of uniforms, and what the names promise."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from zdp_bench.data import N_UNIFORMS, Augment, chest_xray, msd
from zdp_bench.data.augmentation import PADDING, augmentation, crop, flip
from zdp_bench.data.mnist import FashionMnist, Mnist


def uniforms(count: int) -> Tensor:
    seeded = torch.Generator().manual_seed(1)
    return torch.rand(count, N_UNIFORMS, generator=seeded, dtype=torch.float64)


CHANGES: list[tuple[Augment | None, tuple[int, ...]]] = [
    (augmentation("flip", -0.4), (7, 6)),
    (augmentation("crop_flip", -0.4), (7, 6)),
    (augmentation("crop_flip", -0.4), (3, 7, 6)),
    (chest_xray.AUGMENT.images, (1, 24, 24)),
    (msd.AUGMENT.images, (1, 24, 24)),  # with noise
]


@pytest.mark.parametrize(("change", "shape"), CHANGES)
def test_an_examples_change_depends_on_nothing_but_itself(
    change: Augment | None, shape: tuple[int, ...]
) -> None:
    images, rows = torch.randn(9, *shape), uniforms(9)
    changed = change(images, rows)
    assert changed.shape == images.shape
    parts = [change(images[part], rows[part]) for part in (slice(4), slice(4, None))]
    torch.testing.assert_close(torch.cat(parts), changed)
    assert not torch.allclose(changed, images)
    assert change(images[:0], rows[:0]).shape == (0, *shape)


def test_in_the_middle_of_every_range_nothing_moves_and_no_seam_comes_in() -> None:
    images, change = torch.randn(4, 1, 24, 24), chest_xray.AUGMENT.images
    still = torch.full((4, N_UNIFORMS), 0.5, dtype=torch.float64)
    torch.testing.assert_close(change(images, still), images)
    dark = torch.full((1, 1, 24, 24), -2.0)
    torch.testing.assert_close(change(dark, uniforms(1)), dark)


def test_flip_mirrors_half_of_them_left_to_right() -> None:
    images = torch.randn(2000, 4, 5)
    mirrored = (flip(images, uniforms(2000)) != images).flatten(1).any(dim=1)
    assert 900 < int(mirrored.sum()) < 1100
    assert torch.equal(flip(images, uniforms(2000))[mirrored], images[mirrored].flip(-1))


def test_crop_moves_the_image_and_pads_with_black() -> None:
    black = torch.tensor([-0.5, 0.25, 0.0]).view(3, 1, 1)
    images, rows = torch.randn(400, 3, 8, 9), uniforms(400)
    moved = crop(images, rows, black)
    padded = black.expand(400, 3, 8 + 2 * PADDING, 9 + 2 * PADDING).clone()
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = images
    seen = set()
    for i, row in enumerate(rows):
        down, across = int(row[1] * 9), int(row[2] * 9)
        seen.add((down, across))
        torch.testing.assert_close(moved[i], padded[i, :, down : down + 8, across : across + 9])
    assert len(seen) > 75  # of 81


def test_fashion_mnist_offers_it_and_is_plain_by_default(small_root: Path) -> None:
    assert FashionMnist(check=False).load(small_root).augment is None
    assert Mnist(check=False).load(small_root).augment is None
    splits = FashionMnist(check=False, augment="crop_flip").load(small_root)
    changed = splits.augment(splits.train.inputs, uniforms(len(splits.train)))
    assert changed.min() >= splits.train.inputs.min()  # padded with black, not with grey
