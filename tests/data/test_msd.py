"""Decathlon volumes, whole and in slices, and masks that move with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.helpers import ELSEWHERE, assert_refused, dataset, move
from zdp_bench.data import nifti
from zdp_bench.data.msd import AUGMENT, Msd, find_cases, square_pixels
from zdp_bench.data.msd_volumes import resize
from zdp_bench.errors import UserError
from zdp_bench.extras.standins.scans import GRID, SPACING, draw_abdomen

FOLDER = "Task03_Liver"
SHARES: dict[str, Any] = {"validation_share": 0.2, "test_share": 0.4}


def test_slices_are_the_volumes_whatever_axes_the_file_has(small_root: Path) -> None:
    """Number 1 is stored as LPS; the slices must be those of the phantom as it was drawn."""
    for number in (0, 1):
        case = find_cases(small_root / FOLDER)[number]
        volume, labels = draw_abdomen(np.random.default_rng([0, number]))
        made = Msd(size=40).read_slices(case, np.array([3, 8]))
        assert made.shape == (2, 2, 40, 40)
        mask = labels[:, ::-1, [3, 8]].transpose(2, 1, 0) > 0  # tumour and organ are one
        np.testing.assert_array_equal(made[:, 1], mask)
        windowed = ((volume[:, ::-1, [3, 8]].transpose(2, 1, 0) + 150) / 400).clip(0, 1) * 255
        assert abs(made[:, 0] - windowed).max() <= 0.5


def test_pixels_are_made_square() -> None:
    header = nifti.Header((64, 60, 16), (5.0, 4.0, 8.0))
    assert square_pixels(header) == (60, 80)  # 64 columns of 5 mm at 4 mm
    assert square_pixels(nifti.Header((35, 51, 35), (1.0, 1.0, 1.0))) == (51, 35)


def test_one_or_two_slices_of_a_volume_are_not_its_edges(small_root: Path) -> None:
    """They were the first and the last one, where no organ is."""
    case = find_cases(small_root / FOLDER)[0]
    middle = Msd(size=40, max_per_patient=1).read(case, "train")
    np.testing.assert_array_equal(middle, Msd(size=40).read_slices(case, np.array([GRID[2] // 2])))
    assert middle[:, 1].any()
    halves = np.array([GRID[2] // 4, 3 * GRID[2] // 4])
    two = Msd(size=40, max_per_patient=2).read(case, "train")
    np.testing.assert_array_equal(two, Msd(size=40).read_slices(case, halves))


def test_padding_keeps_area_in_mm(small_root: Path) -> None:
    case = find_cases(small_root / FOLDER)[0]
    made = Msd(size=80, fit="pad").read_slices(case, np.arange(GRID[2]))
    _, labels = draw_abdomen(np.random.default_rng([0, 0]))
    drawn = (labels > 0).sum() * SPACING[0] * SPACING[1]
    assert made[:, 1].sum() * min(SPACING[:2]) ** 2 == pytest.approx(drawn, rel=0.03)


def test_masks_move_as_their_images_do() -> None:
    mask = torch.zeros(5, 32, 32, dtype=torch.uint8)
    mask[:, 8:20, 10:16] = 1
    chance = torch.rand(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved = AUGMENT.masks(mask, chance)
    images = AUGMENT.images(4 * mask[:, None].float() - 2, chance)
    agree = ((images[:, 0] > 0) == (moved > 0)).float().mean()
    assert agree > 0.97
    assert set(moved.unique().tolist()) == {0, 1}
    assert not torch.equal(moved, mask)


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_mask_that_lies_elsewhere_than_its_image_is_refused(where: str, tmp_path: Path) -> None:
    for number in range(3):
        for side in ("imagesTr", "labelsTr"):
            path = tmp_path / FOLDER / side / f"liver_{number}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nifti.write(path, np.zeros((12, 10, 4), np.int16), (1.0, 1.0, 2.0))
    move(ELSEWHERE[where])(path)
    says = "mm beside its image|but its image"
    assert_refused(lambda: find_cases(tmp_path / FOLDER), "labelsTr/liver_2.nii.gz:", says)


def test_a_mask_of_several_channels_is_refused(tmp_path: Path) -> None:
    for number in range(3):
        for side, shape in (("imagesTr", (12, 10, 4)), ("labelsTr", (12, 10, 4, 2))):
            path = tmp_path / FOLDER / side / f"liver_{number}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nifti.write(path, np.zeros(shape, np.int16), (1.0, 1.0, 2.0))
    says = "a mask has three dimensions"
    assert_refused(lambda: find_cases(tmp_path / FOLDER), "labelsTr/liver_0.nii.gz", says)


@pytest.mark.real_data
def test_the_real_hippocampus_headers(data_root: Path) -> None:
    cases = find_cases(data_root / "Task04_Hippocampus")
    assert len(cases) == 260
    assert sum(case.header.shape[2] for case in cases) == 9270


def test_what_does_not_fit_is_refused(root: Path) -> None:
    with pytest.raises(UserError, match=r"do not fit dataset\.size=40"):
        Msd(size=40, fit="pad", **SHARES).load(root)
    channels = np.zeros((*GRID, 2), np.int16)
    for path in nifti.paths_of(root / FOLDER / "imagesTr"):
        nifti.write(path, channels, SPACING)
    second = Msd(size=32, channel=1, max_per_patient=2, **SHARES)
    assert len(second.load(root).train) == 4
    with pytest.raises(UserError, match="Task09_Spleen: is missing"):
        Msd(task="spleen").load(root)


@pytest.mark.parametrize("part", ["imagesTr", "labelsTr"])
def test_two_files_of_one_volume_are_refused(part: str, root: Path) -> None:
    """Which of two masks was taken depended on the names of the files."""
    first, *_ = nifti.paths_of(root / FOLDER / part)
    ending = ".nii" if first.name.endswith(".gz") else ".nii.gz"
    nifti.write(first.with_name(nifti.name_of(first) + ending), nifti.read(first), SPACING)
    with pytest.raises(UserError, match=r"is the same volume as .*; each may occur once"):
        Msd(size=32, **SHARES).load(root)


def test_a_volume_of_the_grid_s_size_stays_as_it_is_and_a_finer_one_is_averaged() -> None:
    volume = torch.randn(4, 6, 5)
    assert torch.equal(resize(volume, [4, 6, 5]), volume)
    fine = volume.repeat_interleave(2, 0).repeat_interleave(3, 1).repeat_interleave(2, 2)
    torch.testing.assert_close(resize(fine, [4, 6, 5]), volume)


@pytest.mark.parametrize(("side", "target"), [(23, 4), (31, 8), (95, 32), (36, 32), (9, 12)])
def test_a_resized_volume_shows_the_whole_of_each_axis(side: int, target: int) -> None:
    """Up to a half of the last voxels was dropped, and the rest stretched."""
    position = torch.arange(side).float()
    centres = (torch.arange(target) + 0.5) * side / target - 0.5
    shape = [target, 6, 5]
    resized = resize(position[:, None, None].expand(side, 6, 5), shape)[:, 0, 0]
    inside = (centres >= 0) & (centres <= side - 1)  # outside, the first or last voxel is repeated
    torch.testing.assert_close(resized[inside], centres[inside], rtol=0, atol=0.3)
    noise = torch.rand(side, 6, 5, generator=torch.Generator().manual_seed(0))
    mirrored = resize(noise.flip(0), shape).flip(0)
    torch.testing.assert_close(resize(noise, shape), mirrored)


def test_the_parts_are_those_of_the_slices(tmp_path: Path) -> None:
    slices = dataset("msd_synthetic", volumes=6, size=16, augment=False).load(tmp_path)
    volumes = dataset("msd_volumes_synthetic", volumes=6, shape=[40, 40, 12]).load(tmp_path)
    assert len(volumes.test) == len(slices.test.groups.unique())
    image, mask = volumes.test.batch(torch.arange(len(volumes.test)))
    assert image.shape[1:] == (1, 40, 40, 12)
    organ = image[:, 0][mask > 0].mean()
    assert organ > image[:, 0][mask == 0].mean() + 1
    share = slices.test.batch(torch.arange(len(slices.test)))[1].double().mean()
    assert float(mask.double().mean()) == pytest.approx(float(share), rel=0.1)
