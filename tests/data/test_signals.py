"""A lead is read in parts and summed; every data set reads its samples here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import wfdb

import zdp_bench
from tests.extras.own_data.own_data import write_wfdb
from zdp_bench.data import signals


def test_a_long_lead_is_summed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_wfdb(tmp_path / "long.dat", 7, samples=200)
    header = wfdb.rdheader(str(path.with_suffix("")))
    whole = wfdb.rdrecord(str(path.with_suffix("")))
    np.testing.assert_array_equal(signals.read_leads(path, header, [1, 0]), whole.p_signal[:, ::-1])
    monkeypatch.setattr(signals, "AT_ONCE", 30)
    found = signals.read_leads(path, header, [1], end=40)
    np.testing.assert_array_equal(found, whole.p_signal[:40, 1:])


def test_no_other_module_reads_a_signal_of_wfdb() -> None:
    sources = Path(zdp_bench.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "rdrecord" in path.read_text()] == ["signals.py"]
