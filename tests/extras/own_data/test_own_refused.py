"""Damaged files, crafted lists and options of `dataset=folder` end in one sentence each."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.helpers import WEB_PAGE, Spoil, assert_refused, bomb, edit, keep, overwrite
from tests.extras.own_data.own_data import KINDS, folder, write_classes, write_dicom, write_png
from zdp_bench.errors import UserError


def dicom(**changes: Any) -> Spoil:
    return lambda path: write_dicom(path, 9, **changes)


def deflate(path: Path) -> None:
    """Name the deflated syntax in a DICOM file's head, as long as the one it has."""
    syntax = b"1.2.840.10008.1.2.1"
    path.write_bytes(path.read_bytes().replace(syntax + b"\0", syntax + b".99", 1))


# kind -> what is done to a file, and what the sentence says
DAMAGED: list[tuple[str, Spoil, str]] = [
    ("picture", WEB_PAGE, r"is not a readable file \(PNG, JPEG, DICOM"),
    ("picture", bomb, "DecompressionBomb"),
    ("picture", keep(50), "cannot be read"),
    ("clip", overwrite(40, b"\xff" * 4), "announces 4294967295 bytes of samples, but has 80"),
    ("clip", overwrite(22, b"\2"), "has 2 channels"),
    ("recording", lambda path: path.with_suffix(".dat").unlink(), "0.dat: is missing"),
    ("recording", overwrite(0, b"\0\x80"), ""),
    ("recording", edit("0 2", "0.dat 2"), "calls itself '0.dat'; WFDB expects only the name, '0'"),
    ("recording", edit(" 1000", " 10\x0000"), "control character .* in its text in line 2"),
    ("recording", edit(" 1000", " 10é00"), "'Ã' in the line .*, but WFDB allows only ASCII"),
    ("recording", edit(" 1000(", " 1e-37("), "not finite, or not in float32"),
    ("recording", edit(" 16 ", " 16:3 "), "leads that are skewed in time"),
    ("volume", dicom(), "is of kind image, not volume; all files"),
    ("image", dicom(Rows=60_000, Columns=60_000), "announces 60,000×60,000 pixels"),
    ("image", dicom(Rows=9_000), "cannot be read"),
    ("image", dicom(PhotometricInterpretation="RGB"), "of RGB; expected one grey image per file"),
    ("image", dicom(NumberOfFrames=3), "has 3 frames"),
    ("image", deflate, "deflated|pydicom does not read"),
    ("image", dicom(RescaleSlope="inf"), "pixels"),
]


@pytest.mark.parametrize("case", range(len(DAMAGED)))
def test_a_crafted_file_is_refused_by_name(tmp_path: Path, case: int) -> None:
    kind, spoil, says = DAMAGED[case]
    write_classes(tmp_path / "d", kind, 2)
    bad = tmp_path / "d" / "sick/s1" / f"0{KINDS[kind][0]}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydicom's, while it writes what it would not
        spoil(bad)
    assert_refused(lambda: folder(tmp_path / "d", kind).load(tmp_path), "s1", says)


def test_a_mask_that_is_damaged_lossy_or_in_colour_is_refused(tmp_path: Path) -> None:
    for n in range(8):
        write_png(tmp_path / f"d/images/p{n}.png", 99)
        write_png(tmp_path / f"d/masks/p{n}.png", 255)
    mask, data = tmp_path / "d/masks/p3.png", folder(tmp_path / "d")
    keep(50)(mask)
    assert_refused(lambda: data.load(tmp_path), "masks/p3.png", "cannot be read")
    Image.fromarray(np.zeros((10, 12, 3), dtype=np.uint8)).save(mask)
    assert_refused(lambda: data.load(tmp_path), "masks/p3.png", "a colour picture")
    mask.unlink()
    Image.fromarray(np.zeros((10, 12), dtype=np.uint8)).save(mask.with_suffix(".jpg"))
    assert_refused(lambda: data.load(tmp_path), "p3.jpg", "is of kind picture, not grey PNG")
    mask.with_suffix(".jpg").unlink()
    deep = np.zeros((10, 12), dtype=np.uint16)
    deep[:, :6] = 1  # of 65,535: a label, not a grey
    Image.fromarray(deep).save(mask)
    made = folder(tmp_path / "d", size=12).load(tmp_path)
    (part,) = (part for part in (made.train, made.test) if 3 in part.groups)
    (at,) = (part.groups == 3).nonzero()
    assert part.batch(at)[1].sum() == 6 * 12


CSVS: list[tuple[bytes, str]] = [
    (b"path,label\na.png,x\nb.png,caf\xe9\n", "is not UTF-8 in line 3; save it in UTF-8"),
    (b"path,label\na.png,x\nb.png,y\0z\n", "a control character .* in its text in line 3"),
    ("path,label\na.png,x\n".encode("utf-16-le"), "a control character"),
    (b"path,label\n" + b"a" * 200_000 + b",x\n", r"cannot be read"),
    (b"path;label\na.png;x\n", "only one class"),
    (b"path,classes\na.png,x\n", "path and label are required"),
    (b"path,label,mask\na.png,x,a.png\n", "path and label are required, or path and mask"),
    (b"path,label,label\na.png,x,y\n", "has several columns 'label'; leave one"),
    (b"path,label,Patients\na.png,x,1\n", "unknown column 'Patients'. Is it patient"),
    (b"path,label,cv_split\na.png,x,test\n", "unknown column 'cv_split'. Is it split"),
    (b"path,label\n../secret.png,x\n", "leads out of"),
    (b"path,label\n/etc/passwd,x\n", "leads out of"),
    (b"path,label\nlink.png,x\n", "is a link that leads out of"),
    (b"path,label\na.png,x\n./a.png,y\n", "names ./a.png twice, also as a.png"),
    (b"path,label\na.png,x\ntwin.png,y\n", "names twin.png twice, also as a.png"),
    (b"path,label\na.png\n", "line 2: columns path and label must exist"),
    (b"path,mask\na.png,../secret.png\n", "leads out of"),
    (b"path,label\nnone.png,x\n", "line 2: file not found"),
    (b"path,label,split\na.png,x,dev\n", "line 2: split 'dev' must be train, test or validation"),
    (b"path,label,split,patient\na.png,x,,7\n", "line 2: split '' must be"),
    (b"path,label,split,patient\na.png,x,test,\n", "line 2: patient is empty; fill it in"),
    (b"path,label,patient,split\na.png,x,7,train\nb.png,y,7,test\n", "patient 7 is in train and"),
    (b"path,label,patient,split\na.png,x,P7,train\nb.png,y,p7,test\n", "patient 'P7' and patient"),
    (b"path,label,patient\na.png,x,7\nb.png,y,nan\n", "patient 'nan' stands for a missing one"),
    (b"path,label,patient\na.png,x,-1\nb.png,y,7\n", "patient '-1' stands for a missing one"),
    (b"path,label,patient\na.png,x,007\nb.png,y,7\n", "patient '007' and patient '7' differ"),
    (b"path,label,patient\na.png,x,7\nb.png,y,7.0\n", "patient '7' and patient '7.0' differ"),
    (b"path,label\na.png,x\nb.png,nan\n", "line 3: columns path and label .* or NaN; leave"),
    (b"path,label\na.png,N/A\nb.png,x\n", "line 2: columns path and label .* or NaN; leave"),
    (b"path,label\na.png,Ill\nb.png,ill\n", "class 'Ill' and class 'ill' differ"),
    (b"path,label\nlist.csv,x\n", "give the samples of an example: list.csv is a table"),
    (b"path,label\na.png,x\n", "only one class"),
    (b"path,label\na.png,x\nb.png,y\n", "no (train|test) example"),
    (b"path,label\n", "contains no line below its header"),
    (b"", "is empty"),
    (b"path,label\n\n \n\nnone.png,x\n", "line 5: file not found"),
    (b'\n\npath,label\r\n\r\n"none\n.png",x\n', "line 6: file not found"),
    (b"path,label\na.png,x,y\n", "has 3 cells in line 2, and 2 columns"),
    (b'path,label\n"a.png,x\n', "cannot be read"),
]


@pytest.mark.parametrize(("body", "says"), CSVS)
def test_a_crafted_csv_is_refused(tmp_path: Path, body: bytes, says: str) -> None:
    home = tmp_path / "d"
    for name in "ab":
        write_png(home / f"{name}.png", 3)
    write_png(tmp_path / "secret.png", 3)
    (home / "link.png").symlink_to(tmp_path / "secret.png")
    (home / "twin.png").symlink_to(home / "a.png")
    (home / "list.csv").write_bytes(body)
    assert_refused(lambda: folder(home / "list.csv").load(tmp_path), "", says)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("clip", {"window": [0, 1]}, r"dataset.window=\[0, 1\]: changes nothing here: .* a clip"),
    ("picture", {"rate": 5}, "dataset.rate=5: changes nothing here"),
    ("clip", {"rate": None}, "dataset.rate=null: give the Hz of every file"),
    ("recording", {"length": None}, "dataset.length=null: give the samples of an example"),
    ("clip", {"augment": "flip"}, "dataset.augment=flip: changes nothing here"),
    ("clip", {"mean": 0.0}, "dataset.mean=0.0: is for images"),
    ("image", {"channels": 3}, r"dataset.channels=3: must be 1 \(grey\)"),
    ("array", {"scale": 1e-50}, "dataset.scale=1e-50: is 0 in float32"),
    ("clip", {"spectrum": 33}, "dataset.spectrum=33: must be at most"),
    ("recording", {"leads": ["I", "V5"]}, "must name as many leads as dataset.channels=1"),
    ("recording", {"leads": ["II"]}, "has the leads I, V5, and 'II' was expected"),
    ("volume", {"window": [5, 5]}, "must be .low, high. with low < high"),
    ("picture", {"channels": 2}, r"dataset.channels=2: must be 1 \(grey\) or 3"),
    ("picture", {"augment": "spin"}, "dataset.augment 'spin' is not known"),
    ("picture", {"path": None}, "dataset.path=null: set the path of your data"),
    ("picture", {"path": "none"}, "folder or CSV not found"),
]


@pytest.mark.parametrize(("kind", "options", "says"), REFUSED)
def test_options_that_mean_nothing_for_a_kind_are_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], says: str
) -> None:
    write_classes(tmp_path / "d", kind, 2)
    with pytest.raises(UserError, match=says):
        folder(tmp_path / "d", kind, **options).load(tmp_path)


TABLE = (
    "Path;x;Label;PATIENT\na1.png;3;0;a1\na1.png;9;0;a1\na2.png;;1;a2\na3.png;;0;a3\na4.png;;1;a4\n"
)
LISTS: list[tuple[str, str]] = [
    (TABLE, ""),
    (TABLE.replace("a1.png;9;0", "a1.png;9;1"), "names a1.png twice"),  # as two radiologists do
    (TABLE.replace("Label", "target"), r"has the columns Path, x, target, .* Rename your columns"),
    (TABLE.replace(";x;", ";label;"), "has several columns 'label'; leave one"),
    (TABLE.replace("PATIENT", "patients"), "unknown column 'patients'. Is it patient"),
]


@pytest.mark.parametrize(("body", "says"), LISTS)
def test_a_csv_has_columns_of_the_documented_names(tmp_path: Path, body: str, says: str) -> None:
    """RSNA's list has a line for each box of a film; equal ones count once."""
    for name in ("a1", "a2", "a3", "a4"):
        write_png(tmp_path / f"{name}.png", 3)
    (tmp_path / "labels.csv").write_text(body)
    data = folder(tmp_path / "labels.csv", test_share=0.5, split_seed=1)
    if says:
        assert_refused(lambda: data.info(tmp_path), "", says)
    else:
        info = data.info(tmp_path)
        assert (info.train + info.test, info.unit, list(info.classes)) == (4, "patient", ["0", "1"])


@pytest.mark.parametrize(
    "name", ["participant_id", "Patienten-Nr", "PID", "person", "case_id", "MRN", "study_patient"]
)
def test_a_csv_that_names_patients_in_another_column_is_refused(tmp_path: Path, name: str) -> None:
    """Each picture was a patient of its own, whatever the column said."""
    home = write_classes(tmp_path / "d", "picture", 4)
    lines = [
        f"{file.relative_to(home)},{file.parts[-3]},{file.parts[-2]}"
        for file in home.rglob("*.png")
    ]
    table = home / "list.csv"
    table.write_text("\n".join([f"path,label,{name}", *lines]))
    data = folder(table, test_share=0.5)
    assert_refused(lambda: data.info(tmp_path), "list.csv", f"'{name}', which may name patients")
    by_name = folder(table, test_share=0.5, patient="/([sw][0-9])/")
    assert by_name.info(tmp_path).unit == "patient"
    table.write_text("\n".join(["path,label,patient,age,case,index", *lines]))
    assert data.info(tmp_path).unit == "patient"
    table.write_text("\n".join(["path,label,patient_age", *lines]))
    assert data.info(tmp_path).unit == "picture"


def test_patients_come_from_the_column_or_from_the_name(tmp_path: Path) -> None:
    """The pattern replaced the column silently."""
    lines = [f"{write_png(tmp_path / f'q{n}.png', n).name},{n % 2},p{n // 4}" for n in range(16)]
    table = tmp_path / "list.csv"
    table.write_text("\n".join(["path,label,Patient", *lines]))
    assert folder(table, test_share=0.5).info(tmp_path).examples_per_patient == 4
    both = folder(table, patient="q(.*)[.]")
    assert_refused(lambda: both.info(tmp_path), "list.csv", "column patient, which dataset.patient")
    table.write_text("\n".join(["path,label,patient_id", *lines]))
    assert (
        both.info(tmp_path).unit == "patient"
    )  # it was to be renamed to patient, and then removed


@pytest.mark.parametrize("kind", ["picture", "volume", "array"])
def test_a_path_that_is_one_example_is_refused_as_such(tmp_path: Path, kind: str) -> None:
    (file, *_) = sorted(file for file in write_classes(tmp_path, kind, 2).rglob("*.*"))
    says = "is one file; name its folder, or a CSV"
    assert_refused(lambda: folder(file, kind).load(tmp_path), file.name, says)


def test_patients_taken_for_classes_are_doubted(tmp_path: Path) -> None:
    """A path that is one folder too deep."""
    classes = write_classes(tmp_path, "picture", 2) / "sick"
    for file in classes.rglob("1.png"):
        file.unlink()
    says = "or dataset.path if s0 is no class"
    assert_refused(lambda: folder(classes).load(tmp_path), "sick", says)


def test_a_folder_has_classes_alone(tmp_path: Path) -> None:
    classes = write_classes(tmp_path / "d", "picture", 2)
    (classes / "note.txt").write_text("x")
    assert_refused(lambda: folder(classes).load(tmp_path), "note.txt", "is not a class folder")
