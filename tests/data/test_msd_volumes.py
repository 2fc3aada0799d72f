"""Whole volumes: their parts are those of the slices, and mask and image stay together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.data.helpers import dataset
from zdp_bench.data.msd_volumes import resize


def test_a_volume_of_the_grid_s_size_stays_as_it_is_and_a_finer_one_is_averaged() -> None:
    volume = torch.randn(4, 6, 5)
    assert torch.equal(resize(volume, [4, 6, 5]), volume)
    fine = volume.repeat_interleave(2, 0).repeat_interleave(3, 1).repeat_interleave(2, 2)
    torch.testing.assert_close(resize(fine, [4, 6, 5]), volume)


def test_the_parts_are_those_of_the_slices(tmp_path: Path) -> None:
    slices = dataset("msd_synthetic", volumes=6, size=16, augment=False).load(tmp_path)
    volumes = dataset("msd_volumes_synthetic", volumes=6, shape=[40, 40, 12]).load(tmp_path)
    assert slices.test.groups is not None
    assert len(volumes.test) == len(slices.test.groups.unique())
    image, mask = volumes.test.batch(torch.arange(len(volumes.test)))
    assert image.shape[1:] == (1, 40, 40, 12)
    organ = image[:, 0][mask > 0].mean()
    assert organ > image[:, 0][mask == 0].mean() + 1
    share = slices.test.batch(torch.arange(len(slices.test)))[1].double().mean()
    assert float(mask.double().mean()) == pytest.approx(float(share), rel=0.1)
