"""Reconstruction from end to end on the phantom, with an example to look at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.training.test_run import Silent
from zdp_bench.config import compose, parse
from zdp_bench.errors import UserError
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.records import read
from zdp_bench.training.plan import Plan
from zdp_bench.training.run import run


def test_a_private_run_by_slice(tmp_path: Path) -> None:
    words = "recipe=mri_recon_small dataset=kspace_phantom dataset.patients=4 dataset.slices=2"
    words += f" dataset.test_share=0.25 trainer.epochs=1 threads=1 paths.data={tmp_path}"
    outcome = run(parse(compose([*words.split(), f"paths.results={tmp_path}"])), Silent())
    with np.load(outcome.path.parent / "example.npz", allow_pickle=False) as arrays:
        example = dict(arrays)
    by_slice = read(outcome.path) or {}
    assert by_slice["privacy"]["sampling"] == {
        "scheme": "poisson",
        "sample_rate": 1 / 6,
        "expected_batch_size": 1.0,
        "records": 6,
    }
    assert by_slice["privacy"]["examples_per_patient"] == 2
    assert by_slice["privacy"]["epsilon_patient"] > by_slice["privacy"]["epsilon_tight"]
    assert {image.shape for image in example.values()} == {(32, 40)}
    assert set(example) == {"reference", "zero_filled", "reconstruction"}
    assert by_slice["headline"]["name"] == "ssim"


def test_poissons_rate_follows_the_expected_batch() -> None:
    words = ["trainer.sample_rate=null", "trainer.batch_size=4", "trainer.epochs=2"]
    config = parse(compose(["recipe=quickstart", *words]))
    plan = Plan.of(config, 100)
    assert plan.sampling == Sampling("poisson", 0.04, 4.0, 100)
    assert plan.steps == 50
    with pytest.raises(UserError, match=r"trainer\.batch_size=4: the training set has only 3"):
        Plan.of(config, 3)
    with pytest.raises(UserError, match="not both"):
        parse(compose(["recipe=quickstart", "trainer.batch_size=4"]))
