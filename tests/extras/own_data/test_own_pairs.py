"""`dataset=folder` with references: what each image should be, for `task=reconstruction`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.helpers import assert_refused
from tests.extras.own_data.own_data import folder, write_nifti, write_wav
from tests.training.test_run import Silent
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.export import export
from zdp_bench.extras.sharing.loading import predict_file
from zdp_bench.training.run import run


def pixels(number: int, noise: int) -> np.ndarray:
    """A square of 8 pixels: a ramp of its own, with noise on it."""
    random = np.random.default_rng([number, noise])
    ramp = np.linspace(0, 100 + 10 * number, 8) + np.zeros((8, 1))
    return (ramp + noise * random.integers(0, 60, (8, 8))).astype(np.uint8)


def save(path: Path, values: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """A CSV of six patients with two noisy pictures and what they should be."""
    lines = ["path,reference,patient"]
    for number in range(12):
        save(tmp_path / f"noisy/{number:02}.png", pixels(number, 1))
        save(tmp_path / f"clean/{number:02}.png", pixels(number, 0))
        lines.append(f"noisy/{number:02}.png,clean/{number:02}.png,p{number // 2}")
    (tmp_path / "films.csv").write_text("\n".join(lines))
    return tmp_path / "films.csv"


def test_targets_are_the_reference_and_the_image(films: Path, tmp_path: Path) -> None:
    splits = folder(films, mean=0.0, deviation=1.0).load(tmp_path)
    inputs, targets = splits.train.batch(torch.arange(len(splits.train)))
    for row, number in enumerate(splits.train.rows.tolist()):
        noisy, clean = (torch.from_numpy(pixels(number, noise) / 255).float() for noise in (1, 0))
        torch.testing.assert_close(inputs[row, 0], noisy)
        torch.testing.assert_close(targets[row], torch.stack([clean, noisy]))
    assert splits.notes == "a reference for each image"
    assert (splits.outputs, splits.examples_per_patient, splits.unit) == (1, 2, "patient")
    info = folder(films).info(tmp_path)
    assert (info.target_shape, info.target_dtype) == (targets.shape[1:], targets.dtype)
    assert (info.train, info.test) == (len(splits.train), len(splits.test))
    assert info.classes == {}


def test_references_stand_in_a_folder_of_the_same_names(tmp_path: Path) -> None:
    for number in range(6):
        for name, level in (("images", 1), ("references", 9)):
            write_nifti(tmp_path / "pairs" / name / f"p{number}" / "scan.nii.gz", level)
    options: dict[str, Any] = {"size": 12, "window": [0, 20], "mean": 0.0, "deviation": 1.0}
    planes = folder(tmp_path / "pairs", **options).load(tmp_path)
    assert planes.test.batch(torch.arange(2))[1].shape == (2, 2, 12, 12)
    whole = folder(tmp_path / "pairs", depth=4, **options).load(tmp_path)
    inputs, targets = whole.test.batch(torch.arange(1))
    assert (inputs.shape, targets.shape) == ((1, 4, 1, 12, 12), (1, 4, 2, 12, 12))
    torch.testing.assert_close(targets[:, :, 1:], inputs)
    assert targets[0, 0, 0].max() == pytest.approx(9 / 20, abs=0.01)
    info = folder(tmp_path / "pairs", depth=4, **options).info(tmp_path)
    assert info.target_shape == (4, 2, 12, 12)
    (tmp_path / "pairs/references").rename(tmp_path / "pairs/reference")
    refused = r"has images/, and neither masks/ nor references/ beside it"
    assert_refused(lambda: folder(tmp_path / "pairs").find(), "pairs", refused)
    (tmp_path / "pairs/reference").rename(tmp_path / "pairs/references")
    (tmp_path / "pairs/references/p3/scan.nii.gz").unlink()
    refused = r"has no reference of the same name below .*references"
    assert_refused(lambda: folder(tmp_path / "pairs").find(), "p3", refused)


def test_a_private_run_reconstructs_and_its_export_predicts(films: Path, tmp_path: Path) -> None:
    words = ["recipe=quickstart", "dataset=folder", f"dataset.path={films}", "dataset.size=8"]
    words += ["model=real_unet", "model.width=2", "model.depth=1", "task=reconstruction"]
    words += ["algorithm=dp_sgd", "privacy.unit=patient", "trainer.epochs=1"]
    record = run(configured([*words, f"paths.results={tmp_path}"]), Silent()).record
    assert {"ssim", "psnr", "nmse", "zero_filled_ssim"} <= set(record["metrics"])
    assert record["privacy"]["epsilon_of"] == "patient"
    assert record["privacy"]["epsilon_patient"] == record["privacy"]["epsilon_tight"]
    export(tmp_path, "quickstart", tmp_path / "model")
    out = tmp_path / "out.npy"
    assert predict_file(tmp_path / "model", tmp_path / "noisy/00.png", out) == (1, 1, 8, 8)


def test_what_fits_no_reference_is_refused(films: Path, tmp_path: Path) -> None:
    for options, says in [
        ({"size": 6}, "dataset.size=6: must be at least 7"),
        ({"channels": 3}, "dataset.channels=3: must be 1 for references"),
    ]:
        with pytest.raises(UserError, match=says):
            folder(films, **options).info(tmp_path)
    save(tmp_path / "clean/03.png", np.zeros((9, 8), np.uint8))
    says = "9×8 pixels, but its image"
    assert_refused(lambda: folder(films).load(tmp_path), "clean/03.png", says)
    write_nifti(tmp_path / "clean/03.nii.gz", 3)
    films.write_text(films.read_text().replace("clean/03.png", "clean/03.nii.gz"))
    assert_refused(lambda: folder(films).load(tmp_path), "03.nii.gz", "it is of kind volume")
    films.write_text("path,reference,mask\na.png,b.png,c.png\n")
    assert_refused(lambda: folder(films).load(tmp_path), "films.csv", "or path and reference")
    lines = [f"{write_wav(tmp_path / f'{n}.wav', 3).name},{n}.wav" for n in range(4)]
    films.write_text("\n".join(["path,reference", *lines]))
    recording = folder(films, length=20, rate=100)
    assert_refused(lambda: recording.load(tmp_path), "0.wav", "is a reference, but a clip can have")
