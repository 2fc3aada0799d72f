"""Masks equal fastMRI's, the transforms are its centred unitary ones, the crop its crop."""

from __future__ import annotations

import numpy as np
import pytest

from zdp_bench.data.kspace import (
    Undersampling,
    centre_crop,
    draw_mask,
    fixed_mask,
    to_image,
    to_kspace,
    undersample,
)

HOW = Undersampling(acceleration=4, center_fraction=0.08, height=8, width=7)


def fastmris_mask(
    columns: int, acceleration: int, centre_fraction: float, file_name: str
) -> np.ndarray:
    """RandomMaskFunc of Zbontar et al., seeded as theirs, with numpy's global generator."""
    state = np.random.get_state()
    np.random.seed(tuple(map(ord, file_name)))
    np.random.randint(0, 1)  # their choice among one pair of acceleration and centre fraction
    low = round(columns * centre_fraction)
    mask = np.random.uniform(size=columns) < (columns / acceleration - low) / (columns - low)
    pad = (columns - low + 1) // 2
    mask[pad : pad + low] = True
    np.random.set_state(state)
    return mask


@pytest.mark.parametrize("columns", [368, 372, 50, 33])
@pytest.mark.parametrize("name", ["file1000001.h5", "file1002570.h5"])
def test_a_files_mask_is_fastmris(columns: int, name: str) -> None:
    assert np.array_equal(fixed_mask(columns, HOW, name), fastmris_mask(columns, 4, 0.08, name))


def test_a_mask_keeps_a_quarter_on_average_and_always_the_centre() -> None:
    random = np.random.default_rng(0)
    masks = np.stack([draw_mask(320, HOW, random) for _ in range(300)])
    assert abs(masks.mean() - 0.25) < 0.005
    always = np.flatnonzero(masks.all(axis=0))
    assert list(always) == list(
        range(147, 173)
    )  # 26 = round(0.08 * 320) columns round column 160, the zero frequency
    assert len(np.unique(masks, axis=0)) == 300


def test_the_transforms_are_unitary_centred_and_each_others_inverse() -> None:
    image = np.zeros((5, 6), dtype=np.complex64)
    image[2, 3] = 1  # the centre, whose spectrum is flat
    assert np.allclose(to_kspace(image), 1 / np.sqrt(30))
    noise = np.random.default_rng(0).normal(size=(2, 5, 6)) + 1j
    assert np.allclose(to_image(to_kspace(noise)), noise)
    assert np.isclose(np.linalg.norm(to_kspace(noise)), np.linalg.norm(noise))
    assert to_kspace(image).dtype == np.complex64


def test_the_crop_rounds_as_fastmri_does() -> None:
    image = np.arange(7 * 9).reshape(7, 9)
    assert centre_crop(image, 4, 4)[0, 0] == image[1, 2]
    assert centre_crop(image[None], 7, 9).shape == (1, 7, 9)


def test_an_input_has_unit_deviation_and_a_full_mask_loses_nothing() -> None:
    random = np.random.default_rng(1)
    kspace = (random.normal(size=(16, 12)) + 1j * random.normal(size=(16, 12))).astype(np.complex64)
    image, magnitude = undersample(kspace, np.ones(12, dtype=bool), HOW)
    assert image.shape == magnitude.shape == (8, 7)
    assert image.dtype == np.complex64
    assert magnitude.dtype == np.float32
    assert np.isclose(np.abs(image).std(ddof=1), 1, atol=1e-5)
    assert np.allclose(magnitude, np.abs(centre_crop(to_image(kspace), 8, 7)), atol=1e-6)
    assert np.allclose(np.angle(image), np.angle(centre_crop(to_image(kspace), 8, 7)), atol=1e-4)


def test_an_empty_slice_gives_zeros_and_no_nan() -> None:
    image, magnitude = undersample(np.zeros((16, 12), np.complex64), np.ones(12, dtype=bool), HOW)
    assert not image.any()
    assert not magnitude.any()
