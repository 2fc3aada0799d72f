"""CPSC 2018 in both its forms, real where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from zdp_bench.data import cpsc2018
from zdp_bench.data.cpsc2018 import DIAGNOSES, FOLDER, Cpsc2018, parse_diagnosis, read_wfdb
from zdp_bench.errors import UserError
from zdp_bench.extras.standins.ecg import draw_recording, write_wfdb


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
    ] == ["Normal", "LBBB", "LBBB", "RBBB", "LBBB", "Normal"]
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
    assert splits.notes == "recordings in CPSC 2018's form: 2 Normal, 2 LBBB"


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
    assert (
        splits.notes == "recordings in CPSC 2018's form: 3 Normal, 3 LBBB"
    )  # REFERENCE.csv's labels
    assert (info.train, info.test) == (len(splits.train), len(splits.test)) == (3, 3)


@pytest.mark.parametrize(
    ("labels", "test_share", "message"),
    [
        ("A0000,1,,\nA0001,4,,\nA0002,1,,\nA0003,1,,\n", 0.25, "3 recordings of Normal and 1 of"),
        (LABELS, 0.25, r"dataset\.test_share=0\.25: of 2 .* and 2 of LBBB, 1 to test on leave one"),
    ],
)
def test_a_part_without_one_of_the_two_is_refused_by_run_and_info(
    tmp_path: Path, labels: str, test_share: float, message: str
) -> None:
    """Its ROC-AUC would be undefined."""
    matlab(tmp_path, labels, count=labels.count("\n"))
    for read in (Cpsc2018(test_share=test_share).load, Cpsc2018(test_share=test_share).info):
        with pytest.raises(UserError, match=message):
            read(tmp_path)


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
    assert splits.notes == "recordings in CPSC 2018's form: 4 AF, 3 RBBB"
    one = read_wfdb(data_root / "CPSC2018" / "cinc2020_wfdb" / "A0001.hea", channel=3)
    assert (one.diagnosis, len(one.signal)) == ("RBBB", 7500)
    assert one.signal[0] == pytest.approx(
        -0.021
    )  # the header's first value of lead III, -21 units of 1 µV
    with pytest.raises(UserError, match="1 recordings of Normal and 0 of LBBB"):
        Cpsc2018().load(data_root)
