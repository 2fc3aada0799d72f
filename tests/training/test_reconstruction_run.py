"""Reconstruction from end to end on the phantom: by slice and by volume, with an example to look
at; figure 3 of two runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.training.test_run import Silent
from zdp_bench.config import compose, parse
from zdp_bench.errors import UserError
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.records import Record, read
from zdp_bench.report import figures
from zdp_bench.training.plan import Plan
from zdp_bench.training.run import run

PHANTOM = [
    "dataset=kspace_phantom",
    "dataset.patients=4",
    "dataset.slices=2",
    "dataset.test_share=0.25",
    "trainer.epochs=1",
    "threads=1",
]


def carried_out(tmp_path: Path, recipe: str, *more: str) -> tuple[Record, dict[str, np.ndarray]]:
    places = [f"paths.data={tmp_path / 'data'}", f"paths.results={tmp_path / 'results'}"]
    outcome = run(parse(compose([f"recipe={recipe}", *PHANTOM, *places, *more])), Silent())
    with np.load(outcome.path.parent / "example.npz", allow_pickle=False) as arrays:
        return read(outcome.path) or {}, dict(arrays)


def test_a_private_run_by_slice_and_by_volume(tmp_path: Path) -> None:
    by_slice, example = carried_out(tmp_path, "mri_recon_small")
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

    by_volume, again = carried_out(tmp_path, "mri_recon_small", "dataset.unit=volume")
    assert by_volume["privacy"]["sampling"]["records"] == 3
    assert by_volume["privacy"]["epsilon_patient"] == by_volume["privacy"]["epsilon_tight"]
    for name in ("zero_filled_nmse", "zero_filled_psnr", "zero_filled_ssim"):
        assert by_volume["metrics"][name] == pytest.approx(by_slice["metrics"][name], rel=1e-4)
    assert np.allclose(again["reference"], example["reference"])


def test_a_run_whose_loss_grows_a_thousandfold_says_so(tmp_path: Path) -> None:
    record, _ = carried_out(tmp_path, "mri_recon_small", "optimizer.lr=1e4")
    assert "training diverged, the test loss rose from" in record["warning"]


def test_figure_3_needs_a_private_and_a_non_private_run_on_the_same_data(tmp_path: Path) -> None:
    carried_out(tmp_path, "mri_recon_small", "trainer.batch_size=3")
    with pytest.raises(UserError, match=r"zdp-bench run recipe=NAME.*mri_recon_small_nonprivate"):
        figures.draw("reconstructions", tmp_path / "results")
    carried_out(tmp_path, "mri_recon_small_nonprivate", "trainer.batch_size=3")
    figure = figures.draw("reconstructions", tmp_path / "results")
    titles = [
        axes.get_title(loc="center").split("\n")[0]
        for axes in figure.axes
        if axes.get_title(loc="center")
    ]
    assert titles == ["reference", "zero-filled", "non-private", "private"]
    assert figure.axes[1].get_title(loc="center").startswith("zero-filled\nSSIM 0.")
    carried_out(tmp_path, "mri_recon_tuned")  # another network: its pair stands beside the first
    carried_out(tmp_path, "mri_recon_tuned_nonprivate", "trainer.batch_size=3")
    figure = figures.draw("reconstructions", tmp_path / "results")
    titles = [
        axes.get_title(loc="center").replace("\n", ", ")
        for axes in figure.axes
        if axes.get_title(loc="center")
    ]
    wanted = [
        "unet, non-private, SSIM",
        "unet, private, batch 3",
        "harmonic, non-private, SSIM",
        "harmonic, private, batch 1",
    ]
    assert all(title.startswith(start) for title, start in zip(titles[2:], wanted, strict=True)), (
        titles
    )


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
