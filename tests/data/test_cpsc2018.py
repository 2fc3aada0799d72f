"""CPSC 2018 in both its forms, real where it is; every broken recording named."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from tests.data.helpers import copy_folder
from zdp_bench.data import cpsc2018, files
from zdp_bench.data.cpsc2018 import FOLDER, Cpsc2018
from zdp_bench.data.formats.ecg import DIAGNOSES, parse_diagnosis, read_wfdb
from zdp_bench.errors import UserError
from zdp_bench.extras.standins.ecg import Cpsc2018Synthetic, draw_recording, write_wfdb


@pytest.fixture
def root(small_root: Path, tmp_path: Path) -> Path:
    """A data root with a few recordings in the WFDB form."""
    return copy_folder(small_root, tmp_path, FOLDER)


def matlab(root: Path, labels: str, count: int = 4, **data: Any) -> Path:
    """A data root with recordings in the challenge's own form."""
    folder = root / "CPSC2018" / "original_mat"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        leads = draw_recording(number % 2 == 1, 2.0, np.random.default_rng(number))
        savemat(
            folder / f"A{number:04d}.mat", {"ECG": {"sex": "Male", "age": 50, "data": leads} | data}
        )
    (folder / "REFERENCE.csv").write_text(
        "Recording,First_label,Second_label,Third_label\n" + labels
    )
    return folder


LABELS = "A0000,1,,\nA0001,4,,\nA0002,1,,\nA0003,4,7,\n"


def test_diagnoses_are_read_as_number_text_and_snomed() -> None:
    assert [
        parse_diagnosis(word) for word in ("1", "4", "lbbb", " RBBB", "164909002", "426783006")
    ] == [
        "Normal",
        "LBBB",
        "LBBB",
        "RBBB",
        "LBBB",
        "Normal",
    ]
    assert [parse_diagnosis(word) for word in ("0", "10", "999", "flutter")] == [None] * 4
    assert len(DIAGNOSES) == 9


def test_the_spectrum_is_numpys_fft_of_the_first_512_samples() -> None:
    signal = np.random.default_rng(0).normal(size=3000)
    expected = np.array(
        [
            sum(signal[n] * np.exp(-2j * np.pi * k * n / 512) for n in range(512))
            for k in (0, 1, 100, 511)
        ]
    )
    np.testing.assert_allclose(Cpsc2018().transform(signal)[[0, 1, 100, 511]], expected, rtol=1e-4)
    short = Cpsc2018().transform(signal[:100])  # padded with zeros at the end
    np.testing.assert_allclose(
        short, np.fft.fft(np.r_[signal[:100], np.zeros(412)]), rtol=1e-5, atol=1e-5
    )


def test_both_forms_give_the_same_spectra(tmp_path: Path) -> None:
    folder = matlab(tmp_path / "m", LABELS)
    wfdb_form = tmp_path / "w" / "CPSC2018" / "cinc2020_wfdb"
    wfdb_form.mkdir(parents=True)
    for number in range(4):
        leads = draw_recording(number % 2 == 1, 2.0, np.random.default_rng(number))
        write_wfdb(
            wfdb_form,
            f"A{number:04d}",
            leads,
            ("426783006", "LBBB", "Normal", "164909002,164884008")[number],
        )
    first, second = (
        Cpsc2018(test_share=0.5).load(root) for root in (folder.parents[1], tmp_path / "w")
    )
    assert torch.equal(first.train.targets, second.train.targets)
    torch.testing.assert_close(
        first.train.inputs, second.train.inputs, rtol=1e-3, atol=0.3
    )  # 16-bit samples: 1 µV
    assert (first.outputs, first.input_shape, first.provenance) == (1, (512,), "derived")


def test_a_recording_counts_by_its_first_label(tmp_path: Path) -> None:
    """The paper's 1,125 are first labels: 918 and 207."""
    labels = "A0000,1,4,\nA0001,4,1,\nA0002,7,4,\nA0003,4,7,\nA0004,1,,\n"
    matlab(tmp_path, labels, count=5)
    splits = Cpsc2018(test_share=0.5).load(tmp_path)
    assert splits.notes == "an excerpt of the release: 2 Normal, 2 LBBB"


def write_headers(root: Path, diagnoses: dict[str, str]) -> Path:
    """Write recordings of the WFDB form: name -> diagnoses."""
    folder = root / FOLDER / "cinc2020_wfdb"
    folder.mkdir(parents=True)
    for number, (name, diagnosis) in enumerate(diagnoses.items()):
        leads = draw_recording(number % 2 == 1, 2.0, np.random.default_rng(number))
        write_wfdb(folder, name, leads, diagnosis)
    return folder


def test_both_forms_are_joined_and_no_recording_counts_twice(tmp_path: Path) -> None:
    """A0000 to A0003 in the challenge's form; A0003 again, A0004 and A0005 in WFDB's."""
    matlab(tmp_path, LABELS + "A0005,4,,\n")
    write_headers(tmp_path, {"A0003": "Normal", "A0004": "Normal", "A0005": "Normal"})
    dataset = Cpsc2018(test_share=0.5)
    splits, info = dataset.load(tmp_path), dataset.info(tmp_path)
    assert splits.notes == "an excerpt of the release: 3 Normal, 3 LBBB"  # REFERENCE.csv's labels
    assert (info.train, info.test) == (len(splits.train), len(splits.test)) == (3, 3)


@pytest.mark.parametrize(
    ("name", "diagnosis", "message"),
    [
        ("A0001", "164909002,55827005", "A0001.hea: its diagnosis '55827005' is none of Normal"),
        ("E0001", "426783006", "E0001.hea: its diagnosis 426783006, sinus rhythm, means Normal in"),
    ],
)
def test_a_diagnosis_of_another_database_is_refused(
    tmp_path: Path, name: str, diagnosis: str, message: str
) -> None:
    write_headers(tmp_path, {name: diagnosis, "A0002": "164909002", "A0003": "426783006"})
    with pytest.raises(UserError, match=message):
        Cpsc2018().load(tmp_path)


@pytest.mark.parametrize(
    ("labels", "test_share", "message"),
    [
        ("A0000,1,,\nA0001,4,,\nA0002,1,,\nA0003,1,,\n", 0.25, "3 recordings of Normal and 1 of"),
        ("A0000,1,,\nA0001,1,,\nA0002,1,,\nA0003,1,,\n", 0.25, "4 recordings of Normal and 0 of"),
        (LABELS, 0.25, r"dataset\.test_share=0\.25: of 2 .* and 2 of LBBB, 1 to test on leave one"),
        (LABELS, 0.75, "3 to test on leave one part without"),
    ],
)
def test_a_part_without_one_of_the_two_is_refused_by_run_and_info(
    tmp_path: Path, labels: str, test_share: float, message: str
) -> None:
    """Its ROC-AUC would be undefined."""
    matlab(tmp_path, labels)
    for read in (Cpsc2018(test_share=test_share).load, Cpsc2018(test_share=test_share).info):
        with pytest.raises(UserError, match=message):
            read(tmp_path)


def test_a_rare_diagnosis_must_reach_both_parts(tmp_path: Path) -> None:
    matlab(tmp_path, "".join(f"A{n:04d},{4 if n < 2 else 1},,\n" for n in range(20)), count=20)
    with pytest.raises(UserError, match="of 18 recordings of Normal and 2 of LBBB, 2 to test"):
        Cpsc2018(test_share=0.1).load(tmp_path)


def test_only_recordings_that_are_read_make_it_official(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpsc2018, "RELEASE", frozenset(f"A{n:04d}" for n in range(4)))
    matlab(tmp_path, LABELS)
    dataset = Cpsc2018(test_share=0.5)
    assert dataset.load(tmp_path).provenance == "official"
    folder = tmp_path / FOLDER
    (folder / "copies").mkdir()
    for name in ("A0002.mat", "A0003.mat"):  # nobody looks there
        (folder / "original_mat" / name).rename(folder / "copies" / name)
    write_headers(tmp_path, {"A0007": "Normal", "A0008": "LBBB"})
    assert dataset.load(tmp_path).provenance == "derived"


@pytest.mark.real_data
def test_the_real_recordings(data_root: Path) -> None:
    splits = Cpsc2018(positive="RBBB", negative="AF", test_share=0.3).load(data_root)
    assert splits.notes == "an excerpt of the release: 4 AF, 3 RBBB"
    one = read_wfdb(data_root / "CPSC2018" / "cinc2020_wfdb" / "A0001.hea", channel=3)
    assert (one.diagnosis, len(one.signal)) == ("RBBB", 7500)
    assert one.signal[0] == pytest.approx(
        -0.021
    )  # the header's first value of lead III, -21 units of 1 µV
    with pytest.raises(UserError, match="1 recordings of Normal and 0 of LBBB"):
        Cpsc2018().load(data_root)


def test_the_synthetic_set_is_written_once_and_learnable(tmp_path: Path) -> None:
    first, again = (Cpsc2018Synthetic(count=20).load(tmp_path) for _ in range(2))
    assert first.digest == again.digest
    assert first.provenance == "synthetic"
    assert len(list((tmp_path / "synthetic").iterdir())) == 1
    power = first.train.inputs.abs()[:, 10:30].sum(
        1
    )  # a narrow QRS has more above 10 Hz than a broad one
    assert power[first.train.targets == 0].mean() > 1.3 * power[first.train.targets == 1].mean()


def edit_header(old: str, new: str) -> Callable[[Path, Path], object]:
    return lambda header, signal: header.write_text(header.read_text().replace(old, new))


def drop_lead(header: Path, signal: Path) -> None:
    lines = header.read_text().replace("S0002 12", "S0002 11").splitlines()
    header.write_text("\n".join(line for line in lines if not line.endswith("V6")))


def mark_missing(header: Path, signal: Path) -> None:
    body = bytearray(signal.read_bytes())
    body[24:48] = b"\x00\x80" * 12  # −32768 is WFDB's mark for a missing sample
    signal.write_bytes(bytes(body))
    lead = np.frombuffer(bytes(body[24:]), "<i2").reshape(-1, 12)[:, 2]  # with its own checksum
    total = lead.sum(dtype=int) % 2**16
    header.write_text(re.sub(r"-?\d+ 0 III\b", f"{total} 0 III", header.read_text()))


LENGTH = "S0002 12 500 1000"
BROKEN: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "truncated": (
        lambda header, signal: signal.write_bytes(signal.read_bytes()[:-100]),
        "bytes where its header announces",
    ),
    "no signal": (lambda header, signal: signal.unlink(), "S0002.mat is missing"),
    "empty header": (lambda header, signal: header.write_text(""), "cannot be read"),
    "no header at all": (
        lambda header, signal: header.write_bytes(bytes(range(256))),
        "cannot be read",
    ),
    "rate": (edit_header("S0002 12 500", "S0002 12 250"), "250 Hz where 500 Hz"),
    "huge size": (
        edit_header(LENGTH, "S0002 12 500 99999999999"),
        "announces 99,999,999,999 samples",
    ),
    "length": (edit_header(LENGTH, "S0002 12 500 900"), "bytes where its header announces"),
    "missing lead": (drop_lead, "11 leads where 12"),
    "no diagnosis": (edit_header("#Dx", "#Rx"), "no diagnosis"),
    "samples of another type": (
        edit_header("S0002.mat 16+24", "S0002.mat 212+24"),
        "its samples are stored in WFDB's format 212 where 16 was expected",
    ),
    "no header": (lambda header, signal: header.unlink(), "its header S0002.hea is missing"),
    "not the format": (
        lambda header, signal: signal.write_bytes(b"<html>not found</html>"),
        "22 bytes where its header announces",
    ),
    "points outside": (edit_header("S0002.mat", "../S0002.mat"), "cannot be read"),
    "points to another": (
        edit_header("S0002.mat", "S0004.mat"),
        r"points to 'S0004\.mat' where S0002\.mat",
    ),
    "several segments": (
        lambda header, signal: header.write_text("S0002/2 12 500 1000\nA 500\nB 500\n"),
        "its header is of several segments",
    ),
    "not a number": (mark_missing, "no numbers"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_recording_is_refused_by_name_or_skipped_with_a_count(
    root: Path, how: str
) -> None:
    spoil, message = BROKEN[how]
    folder = root / FOLDER / "cinc2020_wfdb"
    spoil(folder / "S0002.hea", folder / "S0002.mat")
    with pytest.raises(UserError, match=message) as caught:
        Cpsc2018(test_share=0.25).load(root)
    assert "S0002" in str(caught.value)
    assert "\n" not in str(caught.value)
    problems = [problem for _, problem in files.check_files(root, files.card("cpsc2018"))]
    assert len(problems) == 8
    assert [problem for problem in problems if problem] == [
        str(caught.value).split(" dataset.bad_records")[0]
    ]
    splits = Cpsc2018(test_share=0.25, bad_records="skip").load(root)
    assert splits.notes.endswith("3 Normal, 4 LBBB, 1 unusable skipped")


def test_a_link_out_of_the_root_and_a_name_twice_are_refused(root: Path) -> None:
    folder = root / FOLDER / "cinc2020_wfdb"
    (folder / "again").mkdir()
    (folder / "again" / "S0001.hea").write_text((folder / "S0001.hea").read_text())
    with pytest.raises(UserError, match="a recording named S0001 is already there"):
        Cpsc2018().load(root)
    (folder / "again" / "S0001.hea").unlink()
    outside = root / "outside.hea"
    outside.write_text((folder / "S0001.hea").read_text())
    (folder / "S0001.hea").unlink()
    (folder / "S0001.hea").symlink_to(outside)
    with pytest.raises(UserError, match="a link that leads out"):
        Cpsc2018().load(root)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("A0000,1,,\nA0001,99,,\n", r"line 3: labels \['99', '', ''\]"),
        ("A0000,1,,\nA0000,4,,\n", "line 3: recording A0000 stands here a second time"),
        ("A0000,,,\n", "line 2"),
        ("A0000,1,,\nA0001,4,,\n", "A0002.mat: has no line in REFERENCE.csv"),
    ],
)
def test_a_wrong_reference_file_is_refused_by_line(
    tmp_path: Path, labels: str, message: str
) -> None:
    matlab(tmp_path, labels)
    with pytest.raises(UserError, match=message):
        Cpsc2018().load(tmp_path)


def test_a_reference_file_in_latin_1_is_refused(tmp_path: Path) -> None:
    folder = matlab(tmp_path, LABELS)
    (folder / "REFERENCE.csv").write_text("Recording,Étiquette\n" + LABELS, encoding="latin-1")
    with pytest.raises(UserError, match=r"REFERENCE\.csv: is not UTF-8 text"):
        Cpsc2018(test_share=0.5).load(tmp_path)


def test_a_reference_file_with_a_huge_field_is_refused(tmp_path: Path) -> None:
    matlab(tmp_path, "A" * 200_000 + ",1,,\n")
    with pytest.raises(UserError, match=r"REFERENCE\.csv: is no table .*field larger"):
        Cpsc2018(test_share=0.5).load(tmp_path)


def many_zeros(path: Path) -> None:
    """20 kB that unpack to 20 MB."""
    savemat(path, {"ECG": {"data": np.zeros((12, 210_000))}}, do_compression=True)


def many_cells(path: Path) -> None:
    """An array of a billion cells, of which the file holds none."""
    savemat(path, {"ECG": {"data": np.full((2, 3), "", dtype=object)}})
    body = path.read_bytes()
    sides = struct.pack("<2I", 2, 3)
    assert body.count(sides) == 1
    path.write_bytes(body.replace(sides, struct.pack("<2I", 2**20, 2**10)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (many_zeros, "unpacks to 19,200,000 bytes or more"),
        (many_cells, "announces a larger array than it holds"),
        (
            lambda path: path.write_bytes(struct.pack("<5i", 0, 2**30, 9, 0, 4)),
            r"is not a struct .*no MATLAB 5 file",
        ),
        (lambda path: os.truncate(path, 2**30), "has 1,073,741,824 bytes"),
    ],
)
def test_a_matlab_bomb_is_refused_by_size_or_skipped(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    folder = matlab(tmp_path, LABELS + "A0004,1,,\n", count=5)
    spoil(folder / "A0004.mat")
    with pytest.raises(UserError, match=rf"A0004\.mat: {message}"):
        Cpsc2018(test_share=0.5).load(tmp_path)
    problems = [problem for _, problem in files.check_files(tmp_path, files.card("cpsc2018"))]
    assert [bool(problem) for problem in problems] == [False] * 4 + [True]
    splits = Cpsc2018(test_share=0.5, bad_records="skip").load(tmp_path)
    assert splits.notes.endswith("1 unusable skipped")


def test_a_reference_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = matlab(tmp_path, LABELS)
    (folder / "REFERENCE.csv").write_text(LABELS)
    with pytest.raises(UserError, match="its first line is"):
        Cpsc2018().load(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((11, 100)), r"shape \(11, 100\)"),
        (np.zeros((12, 100), dtype=complex), "not real numbers"),
        (np.zeros((12, 0)), "it holds 0 samples"),
        (np.full((12, 100), np.nan), "no numbers"),
    ],
)
def test_a_wrong_matlab_struct_is_refused(tmp_path: Path, data: np.ndarray, message: str) -> None:
    matlab(tmp_path, LABELS, data=data)
    with pytest.raises(UserError, match=message):
        Cpsc2018().load(tmp_path)


NO_MATLAB: dict[str, Callable[[bytes], bytes]] = {
    "a web page": lambda whole: b"<html></html>",
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[: len(whole) // 2],
    "random": lambda whole: bytes(range(256)) * 8,
    # of the element of 12 × 1000 float64 samples: its type is 9
    "a huge announced size": lambda whole: whole.replace(
        struct.pack("<II", 9, 96_000), struct.pack("<II", 9, 2**31 - 8)
    ),
}


@pytest.mark.parametrize("how", NO_MATLAB)
def test_no_matlab_file_at_all_is_refused(tmp_path: Path, how: str) -> None:
    folder = matlab(tmp_path, LABELS)
    path = folder / "A0001.mat"
    path.write_bytes(NO_MATLAB[how](path.read_bytes()))
    with pytest.raises(UserError, match=r"A0001\.mat: is not a struct 'ECG'") as caught:
        Cpsc2018().load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"positive": "LBB"}, "Did you mean 'LBBB'"), ({"channel": 13}, "between 1 and 12")],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Cpsc2018(**options)


def test_an_empty_root_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dataset=cpsc2018_synthetic"):
        Cpsc2018().load(tmp_path)
