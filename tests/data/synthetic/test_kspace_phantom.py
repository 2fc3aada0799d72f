"""The phantom goes through fastMRI's adapter, is the same each time, and looks like something under a coil."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.helpers import assert_refused
from zdp_bench.data.fastmri import KSpaceExamples
from zdp_bench.data.synthetic.kspace_phantom import KSpacePhantom
from zdp_bench.registry import lookup


def test_the_phantom_is_read_as_fastmri_is_and_is_the_same_each_time(tmp_path: Path) -> None:
    splits = KSpacePhantom(patients=4, test_share=0.25).load(tmp_path / "a")
    again = KSpacePhantom(patients=4, test_share=0.25).load(tmp_path / "b")
    assert splits.provenance == "synthetic"
    assert splits.examples_per_patient == 2
    assert (len(splits.train), len(splits.test)) == (6, 2)
    one, two = splits.test, again.test
    assert isinstance(one, KSpaceExamples)
    assert isinstance(two, KSpaceExamples)
    inputs, targets = one.batch(torch.arange(2))
    assert torch.equal(targets, two.batch(torch.arange(2))[1])
    reference, zero_filled = targets.unbind(dim=1)
    assert (
        reference[:, 16, 20].min() > 3 * reference[:, 0, 0].max()
    )  # a head in the middle, air in the corner
    assert (reference - zero_filled).square().sum() > 0.02 * reference.square().sum()
    assert inputs.angle().std() > 0.3  # the coil's phase
    assert (
        KSpacePhantom(patients=4, test_share=0.25, seed=1).load(tmp_path / "a").digest
        != splits.digest
    )


@pytest.mark.parametrize("unit", ["slice", "volume"])
def test_the_outline_is_that_of_the_set(tmp_path: Path, unit: str) -> None:
    options: dict[str, Any] = {
        "patients": 4,
        "height": 32,
        "width": 40,
        "slices": 2,
        "unit": unit,
        "test_share": 0.25,
    }
    told = lookup("dataset", "kspace_phantom")(
        acceleration=4.0, center_fraction=0.08, **options
    ).info(tmp_path)
    splits = KSpacePhantom(**options).load(tmp_path)
    inputs, targets = splits.train.batch(torch.arange(2))
    assert (told.train, told.test, told.examples_per_patient) == (
        len(splits.train),
        len(splits.test),
        splits.examples_per_patient,
    )
    assert (told.input_shape, told.target_shape) == (
        tuple(inputs.shape[1:]),
        tuple(targets.shape[1:]),
    )
    assert (told.dtype, told.target_dtype) == (inputs.dtype, targets.dtype)


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    assert_refused(
        lambda: KSpacePhantom(patients=1).load(tmp_path), "dataset.patients=1", "at least 2"
    )
    assert_refused(lambda: KSpacePhantom(slices=0).load(tmp_path), "dataset.slices=0", "at least 1")
    assert_refused(
        lambda: KSpacePhantom(test_share=0.99).load(tmp_path),
        "dataset.test_share",
        "0 patients to train on",
    )
