"""ECGs: CPSC 2018 in PhysioNet's form, real where it is, and roahd's, by folds of whole people."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import write_ecg
from zdp_bench.data import cpsc2018
from zdp_bench.data.cpsc2018 import FOLDER, Cpsc2018
from zdp_bench.data.roahd import FOLDS, Roahd
from zdp_bench.errors import UserError


def write_headers(root: Path, *diagnoses: str, first: int = 1) -> Path:
    """Write recordings A0001, A0002, …, or from number `first` on, of some diagnoses."""
    folder = root / FOLDER / "cinc2020_wfdb"
    for number, diagnosis in enumerate(diagnoses, start=first):
        write_ecg(folder, f"A{number:04d}", number, diagnosis)
    return folder


NORMAL, LBBB, PVC = "426783006", "164909002", "164884008"


def test_the_spectrum_is_numpys_fft_of_the_first_512_samples() -> None:
    signal = np.random.default_rng(0).normal(size=3000)
    bins, n = np.array([0, 1, 100, 511]), np.arange(512)
    expected = np.exp(-2j * np.pi / 512 * np.outer(bins, n)) @ signal[:512]
    np.testing.assert_allclose(Cpsc2018().transform(signal)[bins], expected, rtol=1e-4)
    short = Cpsc2018().transform(signal[:100])  # padded with zeros at the end
    padded = np.r_[signal[:100], np.zeros(412)]
    np.testing.assert_allclose(short, np.fft.fft(padded), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("unit", "size"), [("V", 1e3), ("mV", 1), ("uV", 1e-3), ("nV", 1e-6)])
def test_leads_are_in_millivolts_whatever_unit_the_header_names(
    unit: str, size: float, tmp_path: Path
) -> None:
    write_ecg(tmp_path, "A0001", 1, "Normal")
    header = tmp_path / "A0001.hea"
    _, expected = cpsc2018.read_wfdb(header, [3, 1])
    header.write_text(header.read_text().replace("/mV", f"/{unit}"))
    _, leads = cpsc2018.read_wfdb(header, [3, 1])
    np.testing.assert_allclose(leads, expected * size)


def test_a_lead_in_another_unit_is_refused(tmp_path: Path) -> None:
    write_ecg(tmp_path, "A0001", 1, "Normal")
    header = tmp_path / "A0001.hea"
    header.write_text(header.read_text().replace("/mV", "/mmHg"))
    with pytest.raises(UserError, match=r"A0001\.hea: has a lead in 'mmHg', but V, mV, uV"):
        cpsc2018.read_wfdb(header, [3])


def test_leads_are_found_by_name(tmp_path: Path) -> None:
    """The third lead of any header was read as lead III."""
    write_ecg(tmp_path, "A0001", 1, "Normal")
    header = tmp_path / "A0001.hea"
    _, expected = cpsc2018.read_wfdb(header, [7, 3])
    text = header.read_text()
    swapped = text.replace(" III\n", " X\n").replace(" V1\n", " III\n").replace(" X\n", " V1\n")
    header.write_text(swapped)
    _, leads = cpsc2018.read_wfdb(header, [3, 7])
    np.testing.assert_array_equal(leads, expected)
    header.write_text(text.replace(" III\n", " MLII\n"))
    with pytest.raises(UserError, match=r"has the leads i, ii, mlii, .* and 'iii' was expected"):
        cpsc2018.read_wfdb(header, [3])


def test_a_recording_counts_by_its_first_label(tmp_path: Path) -> None:
    """The paper's 1,125 are first labels: 918 and 207."""
    many = (f"{NORMAL},{LBBB}", f"{LBBB},{NORMAL}", f"{PVC},{LBBB}", f"{LBBB}, {PVC}")
    folder = write_headers(tmp_path, *many, NORMAL, NORMAL)
    dataset = Cpsc2018(test_share=0.5)
    splits = dataset.load(tmp_path)
    assert splits.notes == "5 recordings of Normal or LBBB, not exactly those of CPSC 2018"
    assert (len(splits.train), len(splits.test)) == (2, 3)
    assert (splits.outputs, splits.input_shape, splits.provenance) == (1, (512,), "derived")
    for name in ("A0002.hea", "A0002.mat"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="holds 3 recordings of Normal and 1 of LBBB"):
        dataset.load(tmp_path)


def test_only_recordings_that_are_read_make_it_official(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpsc2018, "RELEASED_NAMES", frozenset(f"A{n:04d}" for n in range(1, 7)))
    folder = write_headers(tmp_path, NORMAL, LBBB, NORMAL, LBBB, PVC, PVC)
    dataset = Cpsc2018(test_share=0.5)
    assert dataset.load(tmp_path).provenance == "official"
    (tmp_path / "copies").mkdir()
    for file in ("A0005.hea", "A0005.mat", "A0006.hea", "A0006.mat"):  # nobody looks there
        (folder / file).rename(tmp_path / "copies" / file)
    write_headers(tmp_path, PVC, PVC, first=7)
    assert dataset.load(tmp_path).provenance == "derived"


def test_a_test_part_without_one_of_the_diagnoses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lacks one of these classes"):
        Cpsc2018(test_share=0.1).split(tmp_path, [0] * 98 + [1] * 2)


@pytest.mark.real_data
def test_the_real_recordings(data_root: Path) -> None:
    splits = Cpsc2018(positive="RBBB", negative="AF", test_share=0.3).load(data_root)
    assert splits.notes == "7 recordings of AF or RBBB, not exactly those of CPSC 2018"
    path = data_root / "CPSC2018" / "cinc2020_wfdb" / "A0001.hea"
    diagnosis, signal = Cpsc2018(channel=3).read(path)
    assert (diagnosis, len(signal)) == ("RBBB", 7500)
    assert signal[0] == pytest.approx(-0.021)  # the header's first value of lead III, in µV
    with pytest.raises(UserError, match="1 recordings of Normal and 0 of LBBB"):
        Cpsc2018().load(data_root)


def test_ten_folds_test_each_person_once_and_as_many_of_either_diagnosis() -> None:
    targets = [0, 1] * 50
    tested = []
    for fold in range(FOLDS):
        train, test = Roahd(fold=fold).split(targets)
        assert sum(targets[person] for person in test) == len(test) / 2 == 5
        assert {*train} & {*test} == set()
        tested += test.tolist()
    assert sorted(tested) == list(range(100))
    moved = Roahd(split_seed=1).split(targets)[1]
    assert moved.tolist() != Roahd().split(targets)[1].tolist()
