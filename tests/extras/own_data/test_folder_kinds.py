"""`dataset=folder` with every kind of file: shapes, patients, masks, damage, the end-to-end run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.helpers import assert_refused
from tests.data.test_info import assert_described
from tests.extras.own_data.own_data import (
    KINDS,
    RATE,
    write_classes,
    write_dicom,
    write_masks,
    write_nifti,
    write_png,
    write_wav,
    write_wfdb,
)
from tests.training.test_run import Silent
from zdp_bench.config import compose, parse
from zdp_bench.data import nifti
from zdp_bench.errors import UserError
from zdp_bench.extras.own_data.folder import Folder
from zdp_bench.extras.own_data.readers import read_volume_mask
from zdp_bench.training.run import run

SHAPES = {
    "picture": (1, 8, 8),
    "image": (1, 8, 8),
    "volume": (1, 8, 8),
    "clip": (1, 32),
    "recording": (1, 32),
}


def folder(path: Path, kind: str, **options: Any) -> Folder:
    return Folder(path=str(path), size=8, **{**KINDS[kind][2], **options})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_with_its_class_and_split_by_patient(tmp_path: Path, kind: str) -> None:
    plain = {"mean": 0.0, "deviation": 1.0} if kind in ("picture", "image", "volume") else {}
    data = folder(write_classes(tmp_path / "d", kind), kind, **plain)
    info, splits = assert_described(data, tmp_path)
    planes = 4 if kind == "volume" else 1
    assert info.input_shape == SHAPES[kind]
    assert (info.train + info.test, info.examples_per_patient) == (24 * planes, 2 * planes)
    assert (info.unit, info.owners, splits.provenance) == ("patient", 9, "own")
    assert splits.notes == "classes 0 sick, 1 well"
    assert splits.train.groups is not None
    assert splits.test.groups is not None
    assert not set(splits.train.groups.tolist()) & set(splits.test.groups.tolist())
    inputs, targets = splits.train.batch(torch.arange(info.train))
    unit = {"clip": 1 / 256, "recording": 1 / 100}.get(kind, 1 / 255)
    levels = inputs.flatten(1).amax(dim=1) / unit  # 100 · class + 10 · patient + number + plane
    assert torch.equal(levels.round().long() // 100, targets)
    patients = splits.train.groups % 6  # s0 … s5, w0 … w5 are 0 … 11
    assert torch.equal(levels.round().long() % 100 // 10, patients)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_of_every_kind_is_named_or_skipped(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_classes(tmp_path / "d", kind)
    bad = tmp_path / "d" / "well/w3" / f"1{KINDS[kind][0]}"
    bad.write_bytes(bad.read_bytes()[:30])
    says = r"dataset.bad_records=skip leaves such files out\.$"
    assert_refused(lambda: folder(tmp_path / "d", kind).load(tmp_path), str(bad), says)
    data = folder(tmp_path / "d", kind, bad_records="skip")
    with caplog.at_level(logging.WARNING):
        splits = data.load(tmp_path)
    assert len(splits.train) + len(splits.test) == 23 * (4 if kind == "volume" else 1)
    assert f"{bad}: " in caplog.text
    assert "Skipped." in caplog.text


@pytest.mark.parametrize("kind", ["picture", "image", "volume"])
def test_masks_fit_their_images_and_are_augmented_alike(tmp_path: Path, kind: str) -> None:
    write_masks(tmp_path / "d", kind)
    data = folder(tmp_path / "d", kind, augment="crop_flip", mean=0.0, deviation=1.0)
    info, splits = assert_described(data, tmp_path)
    assert (info.target_shape, info.outputs, info.classes) == ((8, 8), 1, {})
    inputs, masks = splits.train.batch(torch.arange(len(splits.train)))
    assert masks.dtype == torch.uint8
    assert torch.equal(masks, (inputs[:, 0] > 0.4).byte())
    uniforms = torch.rand(len(masks), 8, generator=torch.Generator().manual_seed(0))
    assert splits.augment
    assert splits.augment_targets
    moved, moved_masks = splits.augment(inputs, uniforms), splits.augment_targets(masks, uniforms)
    assert torch.equal(moved_masks, (moved[:, 0] > 0.4).byte())
    assert not torch.equal(moved_masks, masks)


def test_a_whole_volume_is_one_example_of_planes_spread_evenly(tmp_path: Path) -> None:
    write_masks(tmp_path / "d", "volume")
    data = folder(tmp_path / "d", "volume", depth=3, mean=0.0, deviation=1.0)
    info, splits = assert_described(data, tmp_path)
    assert (info.input_shape, info.target_shape) == ((3, 1, 8, 8), (3, 8, 8))
    assert (info.train, info.examples_per_patient) == (8, 1)
    inputs, _ = splits.train.batch(torch.arange(1))
    levels = (255 * inputs[0, :, 0].amax(dim=(1, 2))).round() - 200
    assert levels.tolist() == [0, 2, 3]  # of 4 planes, the nearest to 0, 1.5 and 3


def test_a_recording_is_cut_padded_scaled_and_made_a_spectrogram(tmp_path: Path) -> None:
    data = folder(tmp_path, "clip", length=50, scale=256.0)
    wave = data.prepare(write_wav(tmp_path / "a.wav", 7, samples=40))
    assert wave.shape == (1, 1, 50)
    assert wave[0, 0].tolist() == [7 * 128 * 256 / 2**15] * 40 + [0] * 10
    leads = folder(tmp_path, "recording", length=30, channels=2, leads=["V5", "I"])
    signal = leads.prepare(write_wfdb(tmp_path / "r.hea", 50))
    assert signal[0, :, 0].tolist() == pytest.approx([-0.5, 0.5])
    spectrum = folder(tmp_path, "clip", length=50, spectrum=16).prepare(tmp_path / "a.wav")
    assert (spectrum.shape, spectrum.dtype) == ((1, 1, 5, 9), torch.complex64)
    reference = np.fft.rfft(np.hanning(17)[:16] * 7 / 256)
    np.testing.assert_allclose(spectrum[0, 0, 0].numpy(), reference, atol=1e-6)
    info, _ = assert_described(
        folder(write_classes(tmp_path / "d", "clip"), "clip", spectrum=8), tmp_path
    )
    assert (info.dtype, info.input_shape) == (torch.complex64, (1, 7, 5))


def test_channels_are_kept_and_a_mask_has_none(tmp_path: Path) -> None:
    data = folder(tmp_path, "volume", channels=2, mean=0.0, deviation=1.0)
    voxels = np.broadcast_to(np.array([255, 51], dtype=np.int16), (8, 8, 3, 2))
    nifti.write(tmp_path / "v.nii", voxels, (1.0, 1.0, 1.0))
    made = data.prepare(tmp_path / "v.nii")
    assert made.shape == (3, 2, 8, 8)
    assert made.amin(dim=(0, 2, 3)).tolist() == pytest.approx([1.0, 0.2])
    with pytest.raises(UserError, match="a mask has three dimensions"):
        read_volume_mask(tmp_path / "v.nii", data.form)
    nifti.write(tmp_path / "m.nii", voxels[..., :1], (1.0, 1.0, 1.0))
    assert read_volume_mask(tmp_path / "m.nii", data.form).sum() == 3 * 8 * 8


def test_an_mr_plane_is_scaled_by_itself_alone(tmp_path: Path) -> None:
    data = folder(tmp_path, "volume", window=None, mean=0.0, deviation=1.0)
    alone = data.prepare(write_nifti(tmp_path / "a.nii", 50))
    assert float(alone.min()) == 0
    assert float(alone.max()) == 1  # each plane, whatever its units
    louder = data.prepare(write_nifti(tmp_path / "b.nii", 500))
    torch.testing.assert_close(alone, louder)


def test_most_of_a_patient_are_spread_over_the_planes(tmp_path: Path) -> None:
    write_classes(tmp_path / "d", "volume")
    data = folder(tmp_path / "d", "volume", max_per_patient=3, mean=0.0, deviation=1.0)
    info, splits = assert_described(data, tmp_path)
    assert (info.train, info.examples_per_patient) == (27, 3)
    inputs, _ = splits.train.batch(torch.arange(3))
    levels = (255 * inputs.amax(dim=(1, 2, 3))).round().long().tolist()
    assert [level % 10 for level in levels] == [0, 1, 4]  # planes 0 of file 0; 0 and 3 of file 1


def test_a_split_of_one_s_own_is_obeyed_and_a_patient_in_two_parts_refused(tmp_path: Path) -> None:
    write_masks(tmp_path / "d", "volume")
    lines = ["path,mask,patient,split"]
    for n in range(10):
        part = "test" if n in (2, 5) else "train"
        lines.append(f"images/p{n}/scan.nii.gz,masks/p{n}/scan.nii,p{n % 9},{part}")
    table = tmp_path / "d/list.csv"
    table.write_text("\n".join(lines))
    splits = folder(table, "volume").load(tmp_path)
    assert splits.train.groups is not None
    assert splits.test.groups is not None
    assert set(splits.test.groups.tolist()) == {2, 5}
    assert splits.train.groups.unique().tolist() == [0, 1, 3, 4, 6, 7, 8]
    table.write_text("\n".join([*lines[:-1], lines[-1].replace("p0,train", "p2,train")]))
    assert_refused(
        lambda: folder(table, "volume").info(tmp_path), "patient p2", "is in (train|test) and in"
    )


def test_a_digest_follows_masks_and_options(tmp_path: Path) -> None:
    write_masks(tmp_path / "d", "volume")

    def found(**options: Any) -> str:
        return folder(tmp_path / "d", "volume", **options).load(tmp_path).digest

    digests = [found(), found(), found(window=[0, 99]), found(depth=4), found(max_per_patient=2)]
    write_nifti(tmp_path / "d/masks/p3/scan.nii", 0)
    digests.append(found())
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


def test_masks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_masks(tmp_path / "d", "volume")
    mask = tmp_path / "d/masks/p3/scan.nii"

    def refuse(says: str, names: str = "scan") -> None:
        assert_refused(lambda: folder(tmp_path / "d", "volume").info(tmp_path), names, says)

    write_nifti(mask, 3, (12, 10, 5))
    refuse("has 12×10×5 pixels, and its image 12×10×4")
    mask.rename(mask.with_name("other.nii"))
    refuse("has no mask of the same name")
    mask.with_name("other.nii").rename(mask)
    write_nifti(mask.with_name("more.nii"), 3)
    refuse("is the mask of no image", "more.nii")
    mask.with_name("more.nii").rename(mask.with_suffix(".nii.gz"))
    refuse("is a mask of the same image as")
    mask.with_suffix(".nii.gz").unlink()
    mask.unlink()
    write_png(mask.with_suffix(".png"), 9)
    refuse("a mask of a volume is a .nii or .nii.gz file", "scan.png")
    (tmp_path / "d/notes.txt").write_text("x")
    refuse("stands beside images/ and masks/", "notes.txt")


def test_one_kind_of_files_only(tmp_path: Path) -> None:
    write_classes(tmp_path / "d", "volume")
    write_dicom(tmp_path / "d/sick/s9/0.dcm", 4)
    assert_refused(
        lambda: folder(tmp_path / "d", "volume").info(tmp_path), ".nii.gz", "holds one kind of"
    )


def test_two_classes_give_an_area_with_either_task(tmp_path: Path) -> None:
    write_classes(tmp_path / "d", "recording")
    words = ["recipe=quickstart", "dataset=folder", f"dataset.path={tmp_path / 'd'}"]
    words += ["dataset.length=32", f"dataset.rate={RATE}", "model=real_mlp", "model.hidden=[4]"]
    words += ["algorithm=dp_sgd", "trainer.epochs=1", f"paths.results={tmp_path / 'results'}"]
    for task, outputs in (("classification", 2), ("binary_classification", 1)):
        record = run(parse(compose([*words, f"task={task}"])), Silent()).record
        assert 0 <= record["metrics"]["roc_auc"] <= 1
        assert record["data"]["example"]["outputs"] == outputs
    with pytest.raises(UserError, match=r"targets of shape \[\] where the task takes a mask"):
        run(parse(compose([*words, "task=segmentation"])), Silent())
