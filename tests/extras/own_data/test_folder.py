"""`dataset=folder`: a person's own pictures, in class folders or by a CSV."""

from __future__ import annotations

import hashlib
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.helpers import assert_refused
from tests.training.test_run import Silent
from zdp_bench.config import compose, parse
from zdp_bench.data import Part
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.extras.own_data.folder import Folder
from zdp_bench.report.terminal import show_validation
from zdp_bench.training.run import run

CLASSES = ("benign", "malignant")


def write_picture(path: Path, level: int, colour: bool = False) -> Path:
    """A picture of 12 × 10 pixels, all of one grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (10, 12, 3) if colour else (10, 12)
    Image.fromarray(np.full(shape, level, dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Two classes of ten patients each, with two pictures: the second patient's are JPEG."""
    folder = tmp_path / "scans"
    for label, name in enumerate(CLASSES):
        for patient in range(10):
            for number in range(2):
                kind = "jpeg" if patient == 1 else "png"
                level = 100 * label + 10 * patient + number
                write_picture(folder / name / f"{name[0]}{patient}" / f"{number}.{kind}", level)
    return folder


def folder(path: Path, **options: Any) -> Folder:
    return Folder(path=str(path), size=8, **options)


def test_pictures_their_classes_and_patients_are_read(scans: Path, tmp_path: Path) -> None:
    splits = folder(scans, mean=0.0, deviation=1.0).load(tmp_path)
    assert splits.provenance == "own"
    assert splits.notes == "classes 0 benign, 1 malignant"
    assert (splits.outputs, splits.input_shape, splits.unit) == (2, (1, 8, 8), "patient")
    assert splits.examples_per_patient == 2
    assert (len(splits.train), len(splits.test)) == (32, 8)
    inputs, targets = splits.train.batch(torch.arange(32))
    for picture, label, owner in zip(inputs, targets, splits.train.groups, strict=True):
        level = float(picture.mean()) * 255  # 100 · class + 10 · patient + number
        assert level // 100 == label
        assert abs(level - 10 * int(owner)) < 3  # owners are numbered by name: b0 … b9, m0 …
    assert not set(splits.train.groups.tolist()) & set(splits.test.groups.tolist())


def test_info_is_what_is_loaded_and_shows_the_classes(scans: Path, tmp_path: Path) -> None:
    data = folder(scans, max_per_patient=1)
    info, splits = data.info(tmp_path), data.load(tmp_path)
    assert (info.train, info.test) == (len(splits.train), len(splits.test)) == (16, 8)
    assert info.examples_per_patient == splits.examples_per_patient == 1
    assert splits.train.groups is not None
    assert info.owners == len(splits.train.groups.unique())
    assert sum(info.classes.values()) == 16
    assert list(info.classes) == list(CLASSES)
    words = ["recipe=quickstart", "dataset=folder", f"dataset.path={scans}", "dataset.size=8"]
    words += ["model=real_mlp", "model.hidden=[4]", "algorithm=dp_sgd"]
    report = validate(parse(compose(words)), trial=False)
    facts = dict(show_validation(vars(report) | {"layers": []})[0].rows)
    assert facts["classes"].startswith("0 benign: ")


def test_normalisation_is_by_the_constants(scans: Path, tmp_path: Path) -> None:
    plain, _ = folder(scans, mean=0.0, deviation=1.0).load(tmp_path).train.batch(torch.arange(4))
    scaled, _ = folder(scans, mean=0.4, deviation=0.2).load(tmp_path).train.batch(torch.arange(4))
    torch.testing.assert_close(scaled, (plain - 0.4) / 0.2)


def test_a_csv_names_label_patient_and_split(scans: Path, tmp_path: Path) -> None:
    files = sorted(path.relative_to(tmp_path) for path in scans.rglob("*.*g"))
    lines = ["path,label,patient,split"]
    for number, path in enumerate(files):
        part = ("train", "test", "validation")[number // 2 % 3]
        lines.append(f"{path},{10 if 'malignant' in str(path) else 9},{path.parts[2]},{part}")
    (tmp_path / "scans.csv").write_text("\n".join(lines))
    splits = folder(tmp_path / "scans.csv").load(tmp_path)
    assert splits.notes == "classes 0 9, 1 10"  # by value, not by letter
    assert splits.validation is not None
    counts = len(splits.train), len(splits.test), len(splits.validation)
    assert counts == (14, 14, 12)


def test_the_folders_train_and_test_are_the_split(scans: Path, tmp_path: Path) -> None:
    moved = tmp_path / "split"
    for part, patients in (("train", range(7)), ("test", range(7, 10))):
        for name in CLASSES:
            for patient in patients:
                target = moved / part / name
                target.mkdir(parents=True, exist_ok=True)
                (scans / name / f"{name[0]}{patient}").rename(target / f"{name[0]}{patient}")
    splits = folder(moved).load(tmp_path)
    assert (len(splits.train), len(splits.test)) == (28, 12)


def test_the_patient_may_stand_in_the_name(tmp_path: Path) -> None:
    for name in CLASSES:
        for patient in range(8):
            for eye in "LR":
                write_picture(tmp_path / "eyes" / name / f"p{patient}_{eye}.png", 9)
    found = folder(tmp_path / "eyes", patient=r"^(p\d+)_").info(tmp_path)
    assert (found.unit, found.examples_per_patient) == ("patient", 4)  # p0 has two in each class
    alone = folder(tmp_path / "eyes").info(tmp_path)
    assert (alone.unit, alone.examples_per_patient) == ("picture", 1)
    assert_refused(
        lambda: folder(tmp_path / "eyes", patient="(x)").info(tmp_path), "p0_L.png", "first group"
    )


def test_colour_crop_and_sixteen_bits(tmp_path: Path) -> None:
    from zdp_bench.extras.own_data.pictures import read_picture

    colour = np.zeros((10, 30, 3), dtype=np.uint8)
    colour[:, 10:20, 1] = 200
    Image.fromarray(colour).save(tmp_path / "c.png")
    cropped = read_picture(tmp_path / "c.png", 5, 3, "crop")
    assert cropped.shape == (3, 5, 5)
    assert (cropped[1] > 150).all()  # the middle square, and green
    assert not cropped[0].any()
    deep = np.full((6, 6), 0x8000, dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "d.png")
    assert (read_picture(tmp_path / "d.png", 6, 1, "resize") == 0x80).all()


def test_damaged_files_are_named_and_may_be_skipped(
    scans: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = scans / "benign/b3/1.png"
    bad.write_bytes(bad.read_bytes()[:40])
    assert_refused(lambda: folder(scans).load(tmp_path), str(bad), "dataset.bad_records=skip")
    with caplog.at_level(logging.WARNING):
        splits = folder(scans, bad_records="skip").load(tmp_path)
    assert splits.notes.endswith("; 1 unusable skipped")
    assert len(splits.train) + len(splits.test) == 39
    assert str(bad) in caplog.text


def csv_of(tmp_path: Path, text: str) -> Path:
    (tmp_path / "list.csv").write_text(text)
    return tmp_path / "list.csv"


REFUSED = [
    ("path,label\na.png,\n", "line 2", "columns path and label"),
    ("path,label\nnone.png,x\n", "line 2", "there is no file"),
    ("path,label,split\na.png,x,dev\n", "line 2", "split must be train, test or validation"),
    ("path,label,patient\na.png,x,\n", "line 2", "patient must be filled"),
    ("path,label\na.png,x\na.png,y\n", "a.png", "twice"),
    (
        "path,label,patient,split\na.png,x,7,train\nb.png,y,7,test\n",
        "patient 7",
        "is in train and in test",
    ),
    ("path,label\nlist.csv,x\n", "list.csv", "none of .png, .jpg, .jpeg"),
    ("path,label\na.png,x\n", "list.csv", "one class only"),
    ("path,label\na.png,x\nb.png,y\n", "list.csv", "has no (train|test) example"),
    ("path,label\n", "list.csv", "holds no file"),
]


@pytest.mark.parametrize(("text", "names", "says"), REFUSED, ids=lambda part: part[:24])
def test_a_wrong_csv_is_refused_by_line(tmp_path: Path, text: str, names: str, says: str) -> None:
    for name in ("a.png", "b.png"):
        write_picture(tmp_path / name, 3)
    path = csv_of(tmp_path, text)
    assert_refused(lambda: folder(path).info(tmp_path), names, says)


def test_a_folder_larger_than_memory_trains(tmp_path: Path) -> None:
    """Examples stay in one mapped file: what Python holds does not grow with the files."""

    def held(count: int) -> int:
        """Return the peak of what is allocated while so many pictures are read and drawn."""
        place = tmp_path / str(count)
        for number in range(count):
            write_picture(place / CLASSES[number % 2] / f"p{number}" / "a.png", number % 256)
        tracemalloc.start()
        splits = Folder(path=str(place), size=256).load(tmp_path)
        for step in range(20):
            splits.train.batch(torch.arange(4) + step % 4)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        parts = [part for part in (splits.train, splits.test) if isinstance(part, Part)]
        assert [part.whole.inputs.untyped_storage().nbytes() for part in parts] == [
            count * 256 * 256
        ] * 2
        assert parts[0].whole is parts[1].whole  # neither is a copy
        return peak

    held(60)  # what is imported and made once
    assert held(200) - held(40) < 0.1 * 160 * 256 * 256


def test_options_that_mean_nothing_are_refused(scans: Path, tmp_path: Path) -> None:
    for options, says in [
        ({"mean": "train"}, "dataset.mean=train: must be a number that is public"),
        ({"deviation": 0.0}, "dataset.deviation=0.0: must be positive"),
        ({"channels": 0}, "dataset.channels=0: must lie"),
        ({"test_share": 1.0}, "dataset.test_share=1.0: must lie"),
        ({"max_per_patient": 0}, "dataset.max_per_patient=0"),
        ({"augment": "spin"}, "dataset.augment 'spin' is not known"),
    ]:
        with pytest.raises(UserError, match=says):
            folder(scans, **options)
    with pytest.raises(UserError, match=r"dataset.channels=2: must be 1 \(grey\) or 3"):
        folder(scans, channels=2).info(tmp_path)
    with pytest.raises(UserError, match=r"dataset.path=null: name your data"):
        Folder().info(tmp_path)
    with pytest.raises(UserError, match="there is no such folder or CSV"):
        folder(tmp_path / "none").info(tmp_path)
    (scans / "note.txt").write_text("x")
    with pytest.raises(UserError, match=r"note.txt: is no class folder"):
        folder(scans).info(tmp_path)
    (scans / "note.txt").unlink()
    (scans / "benign/out.png").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="leads out of"):
        folder(scans).info(tmp_path)


def test_it_trains_and_no_count_of_a_class_is_recorded(scans: Path, tmp_path: Path) -> None:
    words = ["recipe=quickstart", "dataset=folder", f"dataset.path={scans}", "dataset.size=8"]
    words += ["model=real_mlp", "model.hidden=[4]", "algorithm=dp_sgd", "trainer.epochs=1"]
    record = run(parse(compose([*words, f"paths.results={tmp_path}"])), Silent()).record
    assert record["data"]["provenance"] == "own"
    assert record["privacy"]["records_per_patient"] == 2
    assert record["privacy"]["epsilon_patient"] > record["privacy"]["epsilon_tight"]
    assert "classes" not in record["data"]


def test_the_digest_of_plain_pictures_is_that_of_older_records(scans: Path, tmp_path: Path) -> None:
    found = folder(scans).find()
    sums = [hashlib.sha256(item.path.read_bytes()).hexdigest() for item in found.items]
    names = "".join(f"{i.name}:{sum_};" for i, sum_ in zip(found.items, sums, strict=True))
    files = hashlib.sha256(f"(1, 8, 8):resize:{names}".encode()).hexdigest()
    owners = "".join(
        f"{item.name}:{item.label}:{item.patient}:{part};"
        for item, part in zip(found.items, found.parts, strict=True)
    )
    whole = hashlib.sha256(f"{files}:{owners}:(0.5, 0.25):None".encode()).hexdigest()
    assert folder(scans).load(tmp_path).digest == whole


def test_the_digest_follows_files_labels_patients_and_split(scans: Path, tmp_path: Path) -> None:
    digests = {folder(scans, split_seed=seed).load(tmp_path).digest for seed in (0, 0, 1)}
    write_picture(scans / "benign/b3/1.png", 99)
    digests.add(folder(scans).load(tmp_path).digest)
    assert len(digests) == 3
