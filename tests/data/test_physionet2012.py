"""A patient's features follow from the patient's own record and from constants alone."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import dataset
from tests.test_package import ROOT
from zdp_bench.data import physionet2012
from zdp_bench.data.files import card
from zdp_bench.data.physionet2012 import (
    HEADER,
    LIMIT,
    NUM_FEATURES,
    OUTCOMES,
    RANGES,
    STATISTICS,
    Range,
    make_features,
    read_outcomes,
    read_record,
)
from zdp_bench.errors import UserError

START = ["00:00,RecordID,7", "00:00,Age,65", "00:00,Gender,1", "00:00,ICUType,2"]


def features(tmp_path: Path, *lines: str) -> tuple[np.ndarray, np.ndarray]:
    """The statistics of each variable [variables, statistics], and what describes the patient."""
    path = tmp_path / "7.txt"
    path.write_text("\n".join([HEADER, *START, *lines]))
    made = make_features(path)
    assert made.shape == (NUM_FEATURES,)
    count = len(RANGES) * len(STATISTICS)
    return made[:count].reshape(len(RANGES), -1), made[count:]


def test_a_range_becomes_one_wide_around_0_and_what_is_far_is_cut() -> None:
    values = np.array([60, 85, 110, 300, 0])
    assert Range(60, 110).standardise(values).tolist() == [-0.5, 0, 0.5, LIMIT, -1.7]
    enzyme = Range(10, 40, is_log=True)
    expected = [-0.5, 0, 0.5, LIMIT, -LIMIT]
    assert enzyme.standardise(np.array([10, 20, 40, 1e6, 0])) == pytest.approx(expected)


def test_the_statistics_of_a_variable_are_over_time_in_any_order_of_lines(tmp_path: Path) -> None:
    lines = ["30:00,HR,110", "01:00,HR,60", "10:00,HR,85", "40:00,HR,85", "50:00,HR,85"][:4]
    heart = [*RANGES].index("HR")
    for order in (lines, lines[::-1]):
        values, _ = features(tmp_path, *order)
        expected = [0, -0.5, 0.5, 0, 0.25, np.sqrt(0.125), 0.5]
        assert values[heart] == pytest.approx(expected)
    early, _ = features(tmp_path, "01:00,HR,60", "02:00,HR,110")
    assert early[heart, STATISTICS.index("mean after 24 h")] == pytest.approx(0.5)  # the last


def test_what_is_missing_is_the_middle_of_its_range(tmp_path: Path) -> None:
    """The release writes −1 for what is not known."""
    for lines in ([], ["00:00,Weight,-1", "00:00,Height,-1"]):
        values, described = features(tmp_path, *lines)
        assert not values[:, :-1].any()
        assert (values[:, -1] == -0.5).all()
        assert described.tolist() == [0, 0.5, 0, 0, 1, 0, 0]


def test_another_patient_changes_nobody_s_features(small_root: Path, tmp_path: Path) -> None:
    """Constants standardise, not the data: ε would have to cover a mean over patients."""
    home = Path("physionet2012")
    shutil.copytree(small_root / home, tmp_path / home)
    of = dataset("physionet2012", norm=None)
    whole = of.load(tmp_path)
    table = tmp_path / home / "Outcomes-a.txt"
    lines = table.read_text().splitlines()
    table.write_text("\n".join(lines[:-1]))
    (tmp_path / home / "set-a" / f"{lines[-1].split(',')[0]}.txt").unlink()
    fewer = of.load(tmp_path)
    assert len(fewer.train) == len(whole.train) - 1
    assert fewer.train.inputs.equal(whole.train.inputs[:-1])  # type: ignore[attr-defined]
    assert fewer.test.inputs.equal(whole.test.inputs)  # type: ignore[attr-defined]


def test_every_patient_has_the_norm_that_is_set(small_root: Path) -> None:
    rows = dataset("physionet2012", norm=3.0).load(small_root).train
    assert rows.inputs.norm(dim=1).numpy() == pytest.approx(3.0)  # type: ignore[attr-defined]


def test_a_patient_in_both_sets_is_refused(small_root: Path, tmp_path: Path) -> None:
    home = tmp_path / "physionet2012"
    shutil.copytree(small_root / "physionet2012", home)
    shutil.copy(home / "set-a" / "132000.txt", home / "set-b")
    with (home / "Outcomes-b.txt").open("a") as table:
        table.write("132000,10,5,7,-1,1\n")
    with pytest.raises(UserError, match=r"1 owners .*test part"):
        dataset("physionet2012").load(tmp_path)


@pytest.mark.parametrize("number", ["1", "132539", "1000001", "999999999"])
def test_every_record_id_of_the_outcomes_can_be_that_of_a_record(
    tmp_path: Path, number: str
) -> None:
    table, record = tmp_path / "Outcomes-a.txt", tmp_path / f"{number}.txt"
    table.write_text(f"{','.join(OUTCOMES)}\n{number},10,5,7,-1,1\n")
    assert read_outcomes(table) == {number: True}
    record.write_text(f"{HEADER}\n00:00,RecordID,{number}\n")
    assert read_record(record)["RecordID"][1].tolist() == [int(number)]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("00:00,RecordID,1000002", "has the RecordID 1000002 in line 2, but not in its name"),
        ("00:00,RecordID,many", "has the value 'many' in line 2, not a number"),
        ("00:00,HR,1000001", "has the value '1000001' in line 2, outside ±1,000,000"),
        ("00:00,HR,inf", "has the value 'inf' in line 2, not a number"),
    ],
)
def test_a_value_that_cannot_be_one_is_named_with_its_fault(
    tmp_path: Path, line: str, fault: str
) -> None:
    record = tmp_path / "1000001.txt"
    record.write_text(f"{HEADER}\n{line}\n")
    with pytest.raises(UserError, match=re.escape(fault)):
        read_record(record)


def test_every_range_names_its_source_beside_it() -> None:
    """Half of them said only that they were written from memory."""
    path = Path("zdp_bench/data/physionet2012.py")
    module = (ROOT / path).read_text()
    units = {"bpm", "cm", "kg", "mL", "mmHg", "per minute", "years", "°C", "%"}
    for name in [*RANGES, "AGE", "HEIGHT"]:
        line = re.search(rf'^(?: *"{name}":|{name} =) Range\(.*', module, re.MULTILINE)
        assert line is not None
        remarks = line.group().partition("  # ")[2].split("; ")
        sources = [text for text in remarks if text not in {"", *units} and "/" not in text[:7]]
        assert sources, f"{name} names no source"
    assert str(path) in card("physionet2012").splits


@pytest.mark.slow
@pytest.mark.real_data
def test_the_real_patients(data_root: Path) -> None:
    splits = dataset("physionet2012").load(data_root)
    assert (len(splits.train), len(splits.test)) == (physionet2012.NUM_PATIENTS,) * 2
    assert splits.provenance == "official"
