"""The phantom is read as fastMRI is, is the same each time, and looks like a head in a coil."""

from __future__ import annotations

from pathlib import Path

import torch

from zdp_bench.data.fastmri import KSpaceExamples
from zdp_bench.extras.standins.kspace_phantom import KSpacePhantom


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
