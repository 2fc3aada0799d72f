"""A lead is held to its header's checksum, by every data set that reads WFDB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import wfdb

import zdp_bench
from tests.data.helpers import assert_refused, copy_folder, dataset
from tests.extras.own_data.own_data import KINDS, write_classes, write_wfdb
from zdp_bench.data.formats import wfdb_leads

# data set -> its options, and the signal of one of its recordings
SETS = {
    "cpsc2018": ({"test_share": 0.4}, "CPSC2018/cinc2020_wfdb/S0002.mat"),
    "folder": ({"path": "own", **KINDS["recording"][2]}, "own/sick/s0/0.dat"),
    "mitbih": ({}, "mit-bih-arrhythmia-database-1.0.0/109.dat"),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("share", [0.3, 0.95])  # behind the samples that are used, too
def test_a_changed_signal_is_refused(
    name: str, share: float, small_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, changed = SETS[name]
    monkeypatch.chdir(tmp_path)
    if name == "folder":
        write_classes(tmp_path / "own", "recording")
    else:
        copy_folder(small_root, tmp_path, Path(changed).parts[0])
    signal = tmp_path / changed
    raw = bytearray(signal.read_bytes())
    start = 24 if name == "cpsc2018" else 0  # behind MATLAB's header
    place = start + int(share * (len(raw) - start)) // 48 * 48
    raw[place : place + 36] = bytes(byte ^ 5 for byte in raw[place : place + 36])  # of every lead
    signal.write_bytes(raw)
    load = dataset(name, **options).load
    assert_refused(lambda: load(tmp_path), signal.stem, "does not have its header's checksum")


def test_a_long_lead_is_summed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_wfdb(tmp_path / "long.dat", 7, samples=200)
    header = wfdb.rdheader(str(path.with_suffix("")))
    whole = wfdb.rdrecord(str(path.with_suffix("")))
    np.testing.assert_array_equal(
        wfdb_leads.read_leads(path, header, [1, 0]), whole.p_signal[:, ::-1]
    )
    monkeypatch.setattr(wfdb_leads, "AT_ONCE", 30)
    found = wfdb_leads.read_leads(path, header, [1], end=40)
    np.testing.assert_array_equal(found, whole.p_signal[:40, 1:])


def test_no_other_module_reads_a_signal_of_wfdb() -> None:
    sources = Path(zdp_bench.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "rdrecord" in path.read_text()] == ["wfdb_leads.py"]
