"""`dataset=folder`: shapes, patients, masks, references and splits, for every kind of file."""

import errno
import inspect
import logging
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.helpers import ELSEWHERE, assert_refused, move, shift
from tests.extras.own_data import own_data as make
from tests.extras.own_data.own_data import KINDS, folder
from tests.test_cli import run as run_command
from tests.training.test_run import Silent
from zdp_bench import records
from zdp_bench.config import configured
from zdp_bench.data import nifti, pictures
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.extras.own_data.listing import find_items
from zdp_bench.extras.own_data.readers import PICTURE, VOLUME_MASK, Form
from zdp_bench.extras.sharing.export import export
from zdp_bench.extras.sharing.loading import predict_file, read_inputs
from zdp_bench.foreign_files import reading
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.report import budget
from zdp_bench.report.terminal import show_validation
from zdp_bench.training.plan import Plan
from zdp_bench.training.reservation import reserve
from zdp_bench.training.run import execute
from zdp_bench.training.setup import load_data
from zdp_bench.training.spending import find_spendings, keep_spending

CLASSES = ("sick", "well")


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    return make.write_classes(tmp_path / "scans", "picture")


def test_validate_shows_the_classes(scans: Path, tmp_path: Path) -> None:
    info = folder(scans, max_per_patient=1).info(tmp_path)
    assert (info.train, info.test, info.examples_per_patient) == (10, 4, 1)
    assert list(info.classes) == list(CLASSES)
    words = ["recipe=quickstart", "dataset=folder", f"dataset.path={scans}", "dataset.size=8"]
    words += ["model=real_mlp", "model.hidden=[4]", "algorithm=dp_sgd"]
    report = validate(configured(words), trial=False)
    facts = dict(show_validation(vars(report) | {"layers": []})[0].rows)
    assert facts["classes"].startswith("0 sick: ")


def test_parts_share_one_file_of_bytes_and_normalisation_is_by_the_constants(
    scans: Path, tmp_path: Path
) -> None:
    splits = folder(scans).load(tmp_path)
    assert splits.train.whole is splits.test.whole
    assert splits.train.whole.inputs.untyped_storage().nbytes() == 24 * 8 * 8
    plain, _ = folder(scans, mean=0.0, deviation=1.0).load(tmp_path).train.batch(torch.arange(4))
    scaled, _ = folder(scans, mean=0.4, deviation=0.2).load(tmp_path).train.batch(torch.arange(4))
    torch.testing.assert_close(scaled, (plain - 0.4) / 0.2)


def test_a_csv_names_label_patient_and_split(scans: Path, tmp_path: Path) -> None:
    files = sorted(path.relative_to(tmp_path) for path in scans.rglob("*.png"))
    lines = ["path,label,patient,split"]
    for number, path in enumerate(files):
        part = ("train", "test", "validation")[number // 2 % 3]
        lines.append(f"{path},{10 if 'well' in str(path) else 9},{path.parts[2]},{part}")
    (tmp_path / "scans.csv").write_text("\n".join(lines))
    splits = folder(tmp_path / "scans.csv").load(tmp_path)
    assert splits.notes == "classes 0 9, 1 10"  # by value, not by letter
    assert [len(part or ()) for part in (splits.train, splits.test, splits.validation)] == [8] * 3


@pytest.mark.parametrize(
    "names",
    [
        ("train", "test", "test"),
        ("Train", "TEST", "val"),
        ("training", "testing", "valid"),
        ("train", "test", "Validation"),
    ],
)
def test_folders_of_parts_are_the_split(
    names: tuple[str, str, str], scans: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "split"
    for patient in scans.glob("*/*"):
        part = names[max(0, int(patient.name[1]) - 3)]
        target = moved / part / patient.parent.name
        target.mkdir(parents=True, exist_ok=True)
        patient.rename(target / patient.name)
    splits = folder(moved).load(tmp_path)
    held = 0 if names[1] == names[2] else 4
    counts = [len(part or ()) for part in (splits.train, splits.test, splits.validation)]
    assert counts == [16, 8 - held, held]
    assert splits.notes == "classes 0 sick, 1 well"


@pytest.mark.parametrize(
    ("folders", "says"),
    [
        (("train/a", "val/a"), "has the folders train, val. A split has train/ and test/"),
        (("Train/a", "valid/a", "docs/a"), "has the folders Train, valid. A split has"),
        (("train/a", "test/a", "Test/b"), "A split has train/ and test/"),
        (("train/a",), "has the folders train. A split has"),
        (("train/a", "train/b", "held/a", "held/b"), "held: has the same folders as train/ beside"),
        (("train/a", "test/a", "dev/a"), "dev: is beside train/ and test/, and belongs to no part"),
        (("Train/a", "test/a", "val/a", "."), r"0.png: is beside|p1: is beside Train/ and test/"),
        (
            ("a/train", "a/test", "b/train", "b/test"),
            "(test|train): is the folder of a patient in this",
        ),
        (("images/Train", "masks/Train", "images/val", "masks/val"), "above images/"),
    ],
)
def test_a_split_in_another_layout_is_refused(
    folders: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    """Its parts were taken for the classes, and its classes for the patients."""
    for number, name in enumerate(folders):
        make.write_png(tmp_path / "own" / name / "p1" / f"{number % 2}.png", 9)
    assert_refused(lambda: folder(tmp_path / "own").info(tmp_path), "", says)


@pytest.mark.parametrize(
    ("names", "in_order"),
    [
        (["1", "-1"], ["-1", "1"]),
        (["1", "0", "0.5"], ["0", "0.5", "1"]),
        (["b", "10", "9", "-2.5", "a"], ["-2.5", "9", "10", "a", "b"]),
    ],
)
def test_classes_that_are_numbers_are_numbered_by_value(
    tmp_path: Path, names: list[str], in_order: list[str]
) -> None:
    for name in names:
        for number in range(5):
            make.write_png(tmp_path / "own" / name / f"{number}.png", 20 * number)
    assert folder(tmp_path / "own").find().classes == in_order


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("bus", "train"):
        for number in range(5):
            make.write_png(tmp_path / "own" / name / f"{number}.png", 9)
    assert [*folder(tmp_path / "own").info(tmp_path).classes] == ["bus", "train"]


def test_the_patient_may_stand_in_the_name(tmp_path: Path) -> None:
    for name in CLASSES:
        for patient in range(8):
            for eye in "LR":
                make.write_png(tmp_path / "eyes" / name / f"p{patient}_{eye}.png", 9)
    info = folder(tmp_path / "eyes", patient=r"^(p\d+)_").info(tmp_path)
    assert (info.unit, info.examples_per_patient) == ("patient", 4)  # p0 has two in each class
    alone = folder(tmp_path / "eyes").info(tmp_path)
    assert (alone.unit, alone.examples_per_patient) == ("picture", 1)
    other = folder(tmp_path / "eyes", patient="(x)")
    assert_refused(lambda: other.info(tmp_path), "p0_L.png", "first group")


def test_a_folder_may_be_deeper_than_python_recurses(scans: Path) -> None:
    deep = scans / "sick/s0" / "/".join("d" * 300)
    deep.mkdir(parents=True)
    (scans / "sick/s0/0.png").rename(deep / "0.png")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        items = find_items(scans, patient=None)
    finally:
        sys.setrecursionlimit(limit)
    assert len(items) == 24
    assert deep / "0.png" in [item.path for item in items]
    assert [item.patient for item in items][:2] == ["s0", "s0"]


def test_colour_and_crop(tmp_path: Path) -> None:
    colour = np.zeros((10, 30, 3), dtype=np.uint8)
    colour[:, 10:20, 1] = 200
    Image.fromarray(colour).save(tmp_path / "c.png")
    cropped = PICTURE.read(tmp_path / "c.png", Form(size=5, channels=3, fit="crop"))[0]
    assert cropped.shape == (3, 5, 5)
    assert (cropped[1] > 150).all()  # the middle square, and green
    assert not cropped[0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_with_its_class_and_split_by_patient(tmp_path: Path, kind: str) -> None:
    plain = {"mean": 0.0, "deviation": 1.0} if kind in ("picture", "image", "volume") else {}
    data = folder(make.write_classes(tmp_path / "d", kind), kind, **plain)
    info, splits = data.info(tmp_path), data.load(tmp_path)
    planes = 4 if kind == "volume" else 1
    is_signal = kind in ("clip", "recording", "table", "array")
    assert info.input_shape == ((1, 32) if is_signal else (1, 8, 8))
    assert (info.train + info.test, info.examples_per_patient) == (24 * planes, 2 * planes)
    assert (info.unit, info.owners, splits.provenance) == ("patient", 10, "own")
    assert splits.notes == "classes 0 sick, 1 well"
    assert not set(splits.train.groups.tolist()) & set(splits.test.groups.tolist())
    inputs, targets = splits.train.batch(torch.arange(info.train))
    unit = {"clip": 1 / 256}.get(kind, 1 / 100 if is_signal else 1 / 255)
    levels = inputs.flatten(1).amax(dim=1) / unit  # 100 · class + 10 · patient + number + plane
    assert torch.equal(levels.round().long() // 100, targets)
    patients = splits.train.groups % 6  # s0 … s5, w0 … w5 are 0 … 11
    assert torch.equal(levels.round().long() % 100 // 10, patients)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_of_every_kind_is_named_or_skipped(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make.write_classes(tmp_path / "d", kind, 3)
    bad = tmp_path / "d" / "well/w2" / f"1{KINDS[kind][0]}"
    bad.write_bytes(bad.read_bytes()[:30] + b"x")
    says = r"dataset.bad_examples=skip skips such files\.$"
    assert_refused(lambda: folder(tmp_path / "d", kind).load(tmp_path), str(bad), says)
    data = folder(tmp_path / "d", kind, bad_examples="skip")
    with caplog.at_level(logging.WARNING):
        splits = data.load(tmp_path)
    assert len(splits.train) + len(splits.test) == 11 * (4 if kind == "volume" else 1)
    assert f"{bad}: " in caplog.text
    assert "Skipped." in caplog.text


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.EIO, "failed"), OSError(errno.EMFILE, "too many files")]
)
@pytest.mark.parametrize("reader", ["inspect_picture", "read_picture"])
def test_a_sound_file_that_the_system_refuses_is_not_skipped(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reader: str
) -> None:
    """The run trained on one picture less, and the next run was another."""
    read = getattr(pictures, reader)

    def fail_once(path: Path, *options: Any) -> Any:
        if path.parts[-2:] == ("w2", "1.png"):
            with reading(path):
                raise error
        return read(path, *options)

    monkeypatch.setattr(pictures, reader, fail_once)
    data = folder(scans, bad_examples="skip")
    assert_refused(lambda: data.load(tmp_path), "w2/1.png", r"cannot be read \([\w :]+\)\.$")


@pytest.mark.parametrize("kind", ["picture", "image", "volume"])
def test_masks_fit_their_images_and_are_augmented_alike(tmp_path: Path, kind: str) -> None:
    make.write_masks(tmp_path / "d", kind)
    data = folder(tmp_path / "d", kind, augment="crop_flip", mean=0.0, deviation=1.0)
    info, splits = data.info(tmp_path), data.load(tmp_path)
    assert (info.target_shape, info.outputs, info.classes) == ((8, 8), 1, {})
    inputs, masks = splits.train.batch(torch.arange(len(splits.train)))
    assert masks.dtype == torch.uint8
    assert torch.equal(masks > 0, inputs[:, 0] > 0.4)
    assert masks.max() > 1, "values stay: each may be an organ"
    uniforms = torch.rand(len(masks), 8, generator=torch.Generator().manual_seed(0))
    moved, moved_masks = splits.augment(inputs, uniforms), splits.augment_targets(masks, uniforms)
    assert torch.equal(moved_masks > 0, moved[:, 0] > 0.4)
    assert not torch.equal(moved_masks, masks)


def test_predictions_lie_on_the_axes_that_the_page_states(tmp_path: Path) -> None:
    """Whatever axes the file is stored along, its code turns planes to voxels in RAS axes."""
    page = " ".join((Path(__file__).parents[3] / "docs/own_data.md").read_text().split())
    assert "planes run to superior, rows to posterior and columns to right" in page
    (code,) = re.findall(r"`(m\[.*?)` is \[x, y, z\] in RAS axes", page)
    ras = np.random.default_rng(0).integers(0, 200, (8, 8, 4)).astype(np.int16)
    sizes = (1.0, 1.0, 2.0)
    nibabel = pytest.importorskip("nibabel")
    for orientation in ("RAS", "LPI", "SAL"):
        image = nibabel.Nifti1Image(ras, np.diag([*sizes, 1.0]))
        wanted = nibabel.orientations.axcodes2ornt(orientation)
        now = nibabel.orientations.io_orientation(image.affine)
        turned = image.as_reoriented(nibabel.orientations.ornt_transform(now, wanted))
        nibabel.save(turned, tmp_path / "scan.nii")
        scale = {"window": [0, 255], "mean": 0.0, "deviation": 1.0}
        m = folder(tmp_path, "volume", **scale).prepare(tmp_path / "scan.nii").numpy()
        voxels = eval(code, {"m": m})
        assert np.abs(voxels * 255 - ras).max() < 1.01, orientation


def test_a_whole_volume_is_one_example_of_planes_spread_evenly(tmp_path: Path) -> None:
    make.write_masks(tmp_path / "d", "volume")
    data = folder(tmp_path / "d", "volume", depth=3, mean=0.0, deviation=1.0)
    info, splits = data.info(tmp_path), data.load(tmp_path)
    assert (info.input_shape, info.target_shape) == ((3, 1, 8, 8), (3, 8, 8))
    assert (info.train, info.examples_per_patient) == (8, 1)
    inputs, _ = splits.train.batch(torch.arange(1))
    levels = (255 * inputs[0, :, 0].amax(dim=(1, 2))).round()
    assert (levels - levels[0]).tolist() == [0, 2, 3]  # of 4 planes, the nearest to 0, 1.5 and 3


def test_one_plane_of_a_volume_or_example_of_a_patient_is_from_the_middle(tmp_path: Path) -> None:
    make.write_masks(tmp_path / "d", "volume")
    unscaled = {"mean": 0.0, "deviation": 1.0}
    whole = folder(tmp_path / "d", "volume", **unscaled).load(tmp_path)
    planes, _ = whole.train.batch(torch.arange(4))
    for options in ({"depth": 1}, {"max_per_patient": 1}):
        splits = folder(tmp_path / "d", "volume", **options, **unscaled).load(tmp_path)
        single, _ = splits.train.batch(torch.arange(1))
        assert torch.equal(single.view(8, 8), planes[2, 0])


def test_a_recording_is_cut_padded_scaled_and_made_a_spectrogram(tmp_path: Path) -> None:
    data = folder(tmp_path, "clip", length=50, scale=256.0)
    wave = data.prepare(make.write_wav(tmp_path / "a.wav", 7, samples=40))
    assert wave.shape == (1, 1, 50)
    assert wave[0, 0].tolist() == [7 * 128 * 256 / 2**15] * 40 + [0] * 10
    leads = folder(tmp_path, "recording", length=30, channels=2, leads=["V5", "I"])
    signal = leads.prepare(make.write_wfdb(tmp_path / "r.hea", 50))
    assert signal[0, :, 0].tolist() == pytest.approx([-0.5, 0.5])
    spectrum = folder(tmp_path, "clip", length=50, spectrum=16).prepare(tmp_path / "a.wav")
    assert (spectrum.shape, spectrum.dtype) == ((1, 1, 5, 9), torch.complex64)
    reference = np.fft.rfft(np.hanning(17)[:16] * 7 / 256)
    np.testing.assert_allclose(spectrum[0, 0, 0].numpy(), reference, atol=1e-6)
    home = make.write_classes(tmp_path / "d", "clip")
    info = folder(home, "clip", spectrum=8).info(tmp_path)
    assert (info.dtype, info.input_shape) == (torch.complex64, (1, 7, 5))


def test_channels_are_kept_and_a_mask_has_none(tmp_path: Path) -> None:
    data = folder(tmp_path, "volume", channels=2, mean=0.0, deviation=1.0)
    voxels = np.broadcast_to(np.array([255, 51], dtype=np.int16), (8, 8, 3, 2))
    nifti.write(tmp_path / "v.nii", voxels, (1.0, 1.0, 1.0))
    made = data.prepare(tmp_path / "v.nii")
    assert made.shape == (3, 2, 8, 8)
    assert made.amin(dim=(0, 2, 3)).tolist() == pytest.approx([1.0, 0.2])
    with pytest.raises(UserError, match="a mask has three dimensions"):
        VOLUME_MASK.inspect(tmp_path / "v.nii", data)
    nifti.write(tmp_path / "m.nii", voxels[..., :1], (1.0, 1.0, 1.0))
    assert (VOLUME_MASK.read(tmp_path / "m.nii", data) == 255).sum() == 3 * 8 * 8


def test_an_mr_plane_is_scaled_by_itself_alone(tmp_path: Path) -> None:
    data = folder(tmp_path, "volume", window=None, mean=0.0, deviation=1.0)
    alone = data.prepare(make.write_nifti(tmp_path / "a.nii", 50))
    assert float(alone.min()) == 0
    assert float(alone.max()) == 1  # each plane, whatever its units
    louder = data.prepare(make.write_nifti(tmp_path / "b.nii", 500))
    torch.testing.assert_close(alone, louder)


def test_a_split_of_one_s_own_is_obeyed(tmp_path: Path) -> None:
    make.write_masks(tmp_path / "d", "volume")
    lines = ["path,mask,patient,split"]
    for n in range(10):
        part = "test" if n in (2, 5) else "train"
        lines.append(f"images/p{n}/scan.nii.gz,masks/p{n}/scan.nii,p{n % 9},{part}")
    table = tmp_path / "d/list.csv"
    table.write_text("\n".join(lines))
    splits = folder(table, "volume").load(tmp_path)
    assert set(splits.test.groups.tolist()) == {2, 5}
    assert splits.train.groups.unique().tolist() == [0, 1, 3, 4, 6, 7, 8]
    # Otherwise it would have another digest, and the same run would spend its ε again.
    for key, value in (("test_share", 0.5), ("split_seed", 3)):
        redundant = folder(table, "volume", **{key: value})
        assert_refused(
            lambda data=redundant: data.load(tmp_path), f"dataset.{key}", "are split already"
        )


@pytest.mark.parametrize("into", ["train", "test"])
@pytest.mark.parametrize("how", ["bytes", "pixels"])
def test_an_example_under_two_owners_is_told(
    scans: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, into: str, how: str
) -> None:
    items = folder(scans).find().items
    *_, first, own = [item for item in items if item.part == "train"]
    assert first.patient == own.patient
    Image.fromarray(np.arange(120, dtype=np.uint8).reshape(10, 12)).save(first.path)
    copy_to(first.path, own.path, how)
    folder(scans).load(tmp_path)
    assert "under two owners" not in caplog.text
    other = next(i for i in items if i.part == into and i.patient != first.patient)
    copy_to(first.path, other.path, how)
    folder(scans).load(tmp_path)
    names = sorted([f"{first.name} (train)", f"{other.name} ({into})"])
    assert f"examples are there under two owners, such as {' and '.join(names)};" in caplog.text


def copy_to(path: Path, to: Path, how: str) -> None:
    """Give a file another's content, with or without other bytes."""
    to.write_bytes(path.read_bytes())
    if how == "pixels":
        with Image.open(path) as picture:
            picture.save(to, format="PNG", compress_level=0)


def test_masks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    make.write_masks(tmp_path / "d", "volume")
    mask = tmp_path / "d/masks/p3/scan.nii"

    def refuse(says: str, names: str = "scan") -> None:
        assert_refused(lambda: folder(tmp_path / "d", "volume").info(tmp_path), names, says)

    make.write_nifti(mask, 3, (12, 10, 5))
    refuse(r"has \[12, 10, 5\] voxels, but its image has \[12, 10, 4\]")
    mask.rename(mask.with_name("other.nii"))
    refuse("has no mask of the same name")
    mask.with_name("other.nii").rename(mask)
    make.write_nifti(mask.with_name("more.nii"), 3)
    refuse("is a mask without an image", "more.nii")
    mask.with_name("more.nii").rename(mask.with_suffix(".nii.gz"))
    refuse("is a mask without an image of the same name, or the second mask of one", "scan.nii:")
    scan = tmp_path / "d/images/p3/scan.nii.gz"
    scan.rename(scan.with_suffix(".GZ"))
    refuse("is a mask of the same image as")
    scan.with_suffix(".GZ").rename(scan)
    mask.with_suffix(".nii.gz").unlink()
    mask.unlink()
    make.write_png(mask.with_suffix(".png"), 9)
    refuse("is of kind picture, not volume", "scan.png")
    (tmp_path / "d/notes.txt").write_text("x")
    refuse("is beside images/ and masks/", "notes.txt")


@pytest.mark.parametrize("partner", ["masks", "references"])
@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_partner_that_lies_elsewhere_than_its_image_is_refused(
    partner: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make.write_masks(tmp_path / "d", "volume")
    (tmp_path / "d/masks").rename(tmp_path / "d" / partner)
    move(ELSEWHERE[where])(tmp_path / "d" / partner / "p3/scan.nii")
    says = "mm beside its image|but its image"
    assert_refused(lambda: folder(tmp_path / "d", "volume").load(tmp_path), "p3/scan.nii:", says)
    code, _, err = run_command(capsys, "data", "check", str(tmp_path / "d"))
    assert (code, "p3/scan.nii: " in err) == (2, True)


def test_a_mask_that_is_stored_along_other_axes_lies_where_its_image_does(tmp_path: Path) -> None:
    make.write_masks(tmp_path / "d", "volume")
    expected = folder(tmp_path / "d", "volume").load(tmp_path).train.batch(torch.arange(4))
    for path in (tmp_path / "d/masks").rglob("*.nii"):
        nifti.write(path, nifti.read(path), (1.0, 1.0, 2.0), axes="SPL")
        move(partial(shift, axis=0, distance=0.3))(path)  # less than a voxel, as rounding does
    batch = folder(tmp_path / "d", "volume").load(tmp_path).train.batch(torch.arange(4))
    torch.testing.assert_close(batch, expected)


def test_complex_volumes_stay_complex(tmp_path: Path) -> None:
    for n in range(12):
        path = tmp_path / "d" / CLASSES[n % 2] / f"p{n}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = np.random.default_rng(n).normal(size=(2, 12, 10, 4))
        nifti.write(path, (parts[0] + 1j * parts[1]).astype(np.complex64), (1.0, 1.0, 2.0))
    data = folder(tmp_path / "d")
    info, splits = data.info(tmp_path), data.load(tmp_path)
    assert (info.dtype, info.input_shape) == (torch.complex64, (1, 8, 8))
    assert info.unit == "complex volume"
    inputs, _ = splits.train.batch(torch.arange(3))
    torch.testing.assert_close(inputs.abs().flatten(1).std(1), torch.ones(3))
    same = folder(tmp_path / "d", size=10, fit="crop").load(tmp_path)
    whole = nifti.read_complex(tmp_path / "d" / CLASSES[0] / "p0.nii.gz")
    plane = torch.from_numpy(whole[1:11, ::-1, 0].T.copy())
    every = torch.cat([part.batch(torch.arange(len(part)))[0] for part in (same.train, same.test)])
    assert (every[:, 0] * plane.abs().std() - plane).abs().amax(dim=(1, 2)).min() < 1e-5
    windowed = folder(tmp_path / "d", window=[0, 1])
    assert_refused(lambda: windowed.info(tmp_path), "", "window=.*changes")
    make.write_nifti(tmp_path / "d" / CLASSES[1] / "z.nii", 9)
    assert_refused(lambda: folder(tmp_path / "d").info(tmp_path), "z.nii", "real ones|complex")


def test_what_a_file_holds_decides_and_not_its_name(tmp_path: Path) -> None:
    """Scanners write DICOM without an ending, VinDr calls it .dicom, and a .png may be a JPEG."""
    for kind, name in (("image", "IM0001"), ("clip", "a.dat"), ("picture", "a.bmp")):
        home = make.write_classes(tmp_path / kind, kind, 3)
        for path in sorted(home.rglob(f"0{KINDS[kind][0]}")):
            path.rename(path.with_name(name))
        info = folder(home, kind).info(tmp_path)
        assert info.train + info.test == 12


def test_a_model_of_recordings_says_that_a_picture_is_none(tmp_path: Path) -> None:
    says = "is a picture, and the model takes recordings"
    path = make.write_png(tmp_path / "0.png", 9)
    assert_refused(lambda: folder(tmp_path, length=32, rate=make.RATE).prepare(path), "0.png", says)
    clip = make.write_wfdb(tmp_path / "0.hea", 9)
    says = "is a recording, and the model takes images"
    assert_refused(lambda: folder(tmp_path).prepare(clip), "0.hea", says)


def test_a_set_of_black_pictures_is_told(
    scans: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder(scans).load(tmp_path)
    assert "tenth of white" not in caplog.text
    folder(scans, window=[0, 4095]).load(tmp_path)
    assert "no pixel to test on is above a tenth of white; see dataset.window" in caplog.text
    caplog.clear()
    black = np.zeros((8, 8), dtype=np.uint8)
    for item in folder(scans).find().items:
        if item.part == "train":
            Image.fromarray(black).save(item.path)
    folder(scans).load(tmp_path)
    assert "tenth of white" not in caplog.text  # the log states nothing of training images


# ------------------------------------------- references: what each image should be


def pixels(number: int, noise: int) -> np.ndarray:
    """A square of 8 pixels: a ramp of its own, with noise on it."""
    random = np.random.default_rng([number, noise])
    ramp = np.linspace(0, 100 + 10 * number, 8) + np.zeros((8, 1))
    return (ramp + noise * random.integers(0, 60, (8, 8))).astype(np.uint8)


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """A CSV of six patients with two noisy pictures and what they should be."""
    lines, kinds = ["path,reference,patient"], ("clean", "noisy")
    for kind in kinds:
        (tmp_path / kind).mkdir()
    for number in range(12):
        for noise, kind in enumerate(kinds):
            Image.fromarray(pixels(number, noise)).save(tmp_path / f"{kind}/{number:02}.png")
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
            make.write_nifti(tmp_path / "pairs" / name / f"p{number}" / "scan.nii.gz", level)
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
    refused = r"has images/, but neither masks/ nor references/ beside it"
    assert_refused(lambda: folder(tmp_path / "pairs").find(), "pairs", refused)
    (tmp_path / "pairs/reference").rename(tmp_path / "pairs/references")
    (tmp_path / "pairs/references/p3/scan.nii.gz").unlink()
    refused = r"has no reference of the same name below .*references"
    assert_refused(lambda: folder(tmp_path / "pairs").find(), "p3", refused)


def test_a_private_run_reconstructs_and_its_export_predicts(films: Path, tmp_path: Path) -> None:
    words = ["recipe=quickstart", "dataset=folder", f"dataset.path={films}", "dataset.size=8"]
    words += ["model=real_unet", "model.width=2", "model.depth=1", "task=reconstruction"]
    words += ["algorithm=dp_sgd", "privacy.unit=patient", "trainer.epochs=1"]
    record = execute(configured([*words, f"paths.results={tmp_path}"]), Silent()).record.document
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
    Image.fromarray(np.zeros((9, 8), np.uint8)).save(tmp_path / "clean/03.png")
    says = "9×8 pixels, but its image"
    assert_refused(lambda: folder(films).load(tmp_path), "clean/03.png", says)
    make.write_nifti(tmp_path / "clean/03.nii.gz", 3)
    films.write_text(films.read_text().replace("clean/03.png", "clean/03.nii.gz"))
    assert_refused(
        lambda: folder(films).load(tmp_path), "03.nii.gz", "is of kind volume, not picture"
    )
    films.write_text("path,reference,mask\na.png,b.png,c.png\n")
    assert_refused(lambda: folder(films).load(tmp_path), "films.csv", "or path and reference")
    lines = [f"{make.write_wav(tmp_path / f'{n}.wav', 3).name},{n}.wav" for n in range(4)]
    films.write_text("\n".join(["path,reference", *lines]))
    recording = folder(films, length=20, rate=100)
    assert_refused(lambda: recording.load(tmp_path), "0.wav", "is a reference, but a clip can have")


def write_list(path: Path, scans: Path, owner: str, examples: int = 24) -> Path:
    """List pictures of `make.write_classes`; the owner is the person or the visit."""
    lines = ["path,label,patient"]
    for file in sorted(scans.rglob("*.png"))[:examples]:
        label, person, picture = file.relative_to(scans).parts
        patient = person if owner == "person" else f"{person}{picture[0]}"
        lines.append(f"{file.relative_to(path.parent)},{label},{patient}")
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("unit", ["patient", "example"])
def test_a_total_budget_holds_for_the_owners_of_all_its_runs(
    scans: Path, tmp_path: Path, unit: str
) -> None:
    """The same files with a corrected column: runs by visit counted as runs by person."""
    words = ["recipe=quickstart", "dataset=folder", "dataset.size=8", "model=real_linear"]
    words += ["algorithm=dp_sgd", f"paths.results={tmp_path}", f"privacy.unit={unit}"]

    def begin(owner: str, number: int, examples: int = 24, limit: str = "100") -> None:
        path = write_list(tmp_path / "list.csv", scans, owner, examples)
        config = configured([*words, f"dataset.path={path}", f"privacy.total_budget={limit}"])
        data = load_data(config)
        mechanism = Mechanism.of_z(2.0, Plan.of(config, 8).sampling)
        home = records.folder(tmp_path, "quickstart", str(number) * 64)
        reserve(config, data, mechanism, 5, home)

    def joint_epsilon() -> float | None:
        spendings, _ = find_spendings(tmp_path)
        (line,) = budget.sheet(spendings, None, [], tmp_path).numbers
        assert (line["epsilon"] is None) == (unit == "patient" and line["epsilon_unit"] is None)
        epsilon: float | None = line["epsilon_unit"]
        return epsilon

    begin("person", 1)
    alone = joint_epsilon() or 0.0
    begin("person", 2, examples=22)  # as if others were added later
    assert (joint_epsilon() or 0.0) > alone > 0
    if unit == "patient":
        with pytest.raises(UserError, match=r"each patient has other files.*unit and owners"):
            begin("visit", 3)
    begin("visit", 3, limit="null")
    assert joint_epsilon() is None
    for path in tmp_path.glob("runs/*/*"):
        keep_spending(path)
    assert joint_epsilon() is None, "also after the runs are deleted"


def test_own_data_are_called_by_the_name_of_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scans = make.write_classes(tmp_path / "scans", "picture")
    words = ["recipe=quickstart", "dataset=folder", f"dataset.path={scans}", "dataset.size=8"]
    words += ["model=real_linear", "algorithm=dp_sgd", "trainer.epochs=1"]
    execute(configured([*words, f"paths.results={tmp_path}"]), Silent())
    (record,) = records.read_all(tmp_path)
    assert (record.data.name, record.data.title) == ("folder", "scans")
    assert record.data.shown == "scans: folder, own"
    assert records.frame([record])["dataset"].tolist() == ["scans"]
    (spending,) = find_spendings(tmp_path)[0]
    assert (spending.dataset, spending.shown) == ("folder", "scans")
    (line,) = budget.sheet([spending], None, [], tmp_path, "scans").numbers
    assert line["dataset"] == "scans"
    export(tmp_path, "quickstart", tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    for words_of_card in ("# real_linear on scans\n", "name: scans\n", "scans, own: "):
        assert words_of_card in card
    again = configured(
        [*words, "seed=1", "privacy.total_budget=0.001", f"paths.results={tmp_path}"]
    )
    with pytest.raises(UserError, match=r"1 runs in .* on files of scans have"):
        execute(again, Silent())
    for path in tmp_path.glob("runs/*/*/record.json"):
        path.unlink()
    assert find_spendings(tmp_path)[0][0].shown == "scans", "also of a run that is under way"
    code, out, _ = run_command(capsys, "delete", "quickstart", f"--results={tmp_path}")
    assert code == 0
    assert "steps on scans still count" in out


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (" I\n", " II\n", r"has II \(mV\) where .*has I \(mV\); set dataset.leads"),
        (" V5\n", " I\n", ""),  # is not read
        ("/mV", "/uV", r"has I \(uV\) where .*has I \(mV\); store both in the same unit"),
    ],
)
def test_leads_of_another_name_or_unit_are_refused(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    """Files in mV and in µV, and with other leads, were mixed without a word."""
    home = make.write_classes(tmp_path / "d", "recording")
    header = home / "well/w5/1.hea"
    header.write_text(header.read_text().replace(old, new))
    data = folder(home, "recording")
    if says:
        assert_refused(lambda: data.load(tmp_path), str(header), says)
    else:
        assert data.load(tmp_path).unit == "patient"


def test_the_suffix_of_a_mask_may_be_in_capitals(tmp_path: Path) -> None:
    for patient in range(3):
        make.write_nifti(tmp_path / f"images/p{patient}.nii.gz", 50 + patient)
        mask = make.write_nifti(tmp_path / f"masks/p{patient}.nii.gz", 0)
        mask.rename(mask.with_name(f"p{patient}.NII.GZ"))
    assert folder(tmp_path, "volume").info(tmp_path).train > 0


def test_the_suffix_of_a_signal_may_be_in_capitals(tmp_path: Path) -> None:
    tables = make.write_classes(tmp_path / "tables", "table")
    for path in tables.rglob("*.csv"):
        path.rename(path.with_suffix(".CSV"))
    assert folder(tables, "table").info(tmp_path).train > 0
    records = make.write_classes(tmp_path / "records", "recording")
    for path in records.rglob("*.hea"):
        path.rename(path.with_suffix(".HEA"))  # which wfdb does not read
    data = folder(records, "recording")
    assert_refused(lambda: data.info(tmp_path), "0.HEA", "suffix .HEA; WFDB needs .hea, so rename")


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("IM.{:03}", "IM.{:03}"),
        ("1.2.840.{}", "1.2.840.{}.png"),
        ("1.2.{}.4", "1.2.{}.4.png"),
        ("scan.p{}", "scan.p{}"),
        ("p.{}.dcm", "p.{}.png"),
    ],
)
def test_names_with_dots_have_masks_of_the_same_name(tmp_path: Path, image: str, mask: str) -> None:
    """What follows the last dot was taken for a suffix, so all names were the same."""
    for number in range(12):
        make.write_dicom(tmp_path / "images" / image.format(number), 200)
        written = make.write_png(tmp_path / "mask.png", number + 1)
        (tmp_path / "masks").mkdir(exist_ok=True)
        written.rename(tmp_path / "masks" / mask.format(number))
    for item in find_items(tmp_path, None):
        number = int(np.asarray(Image.open(item.partner or "")).max()) - 1
        assert item.name == f"images/{image.format(number)}"
    assert folder(tmp_path, "image").info(tmp_path).train > 0


def test_signal_files_may_have_other_names_than_their_header(tmp_path: Path) -> None:
    """They were listed as examples, and refused with the advice to move them away."""
    home = make.write_classes(tmp_path / "d", "recording")
    for signal in home.rglob("*.dat"):
        header = signal.with_suffix(".hea")
        header.write_text(header.read_text().replace(signal.name, f"s_{signal.name}"))
        signal.rename(signal.with_name(f"s_{signal.name}"))
    for advice in ("refuse", "skip"):
        data = folder(home, "recording", bad_examples=advice)
        assert "skipped" not in data.load(tmp_path).notes
    (home / "well/w0/1.hea").write_bytes(b"\0")
    assert_refused(lambda: folder(home, "recording").load(tmp_path), "w0", "")


def test_a_recording_in_an_array_is_prepared_for_predictions(tmp_path: Path) -> None:
    """Every .npy file was taken for prepared examples, so that one of training was refused."""
    home = make.write_classes(tmp_path / "d", "array")
    path = home / "well/w0/0.npy"
    record = {"config": {"dataset": {"name": "folder", "path": str(home), "length": 32}}}
    expected = folder(home, "array").prepare(path)
    assert torch.equal(read_inputs(record, path), expected)
    np.save(tmp_path / "prepared.npy", expected.numpy())
    assert torch.equal(read_inputs(record, tmp_path / "prepared.npy"), expected)
