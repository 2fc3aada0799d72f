"""Sound files and WFDB records as other libraries read them; every data set reads them here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import wfdb

import zdp_bench
from tests.data.helpers import assert_refused
from tests.extras.own_data.own_data import RATE, write_wfdb
from zdp_bench.data import signals

WAVE = np.sin(np.arange(400) / 9) / 2
# file -> how soundfile writes it
SOUNDS: dict[str, dict[str, str]] = {
    **{f"{kind}.wav": {"subtype": kind} for kind in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32")},
    "float.wav": {"subtype": "FLOAT"},
    "extensible.wav": {"format": "WAVEX", "subtype": "PCM_16"},
    "a.flac": {},
    "a.ogg": {},
}


@pytest.mark.parametrize("name", SOUNDS)
def test_every_sound_is_read_and_a_cut_one_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    soundfile.write(path, WAVE, RATE, **SOUNDS[name])
    found = signals.read_sound(path, RATE, 1, 1000)
    assert (found.dtype, found.shape) == (np.float32, (400, 1))
    np.testing.assert_allclose(found[:, 0], WAVE, atol=0.05 if name == "a.ogg" else 0.01)
    path.write_bytes(path.read_bytes()[:-90])
    assert_refused(lambda: signals.read_sound(path, RATE, 1, 1000), name, "")


def edit(old: str, new: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(path.read_text().replace(old, new))


def write_segments(folder: Path) -> Path:
    """A record of 40 and 30 samples in two segments of other gains, and its header."""
    for name, samples, level in (("a", 40, 5), ("b", 30, 9)):
        write_wfdb(folder / f"{name}.hea", level, samples)
    (folder / "m.hea").write_text(f"m/2 2 {RATE} 70\na 40\nb 30\n")
    return folder / "m.hea"


def test_a_long_lead_is_summed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_wfdb(tmp_path / "long.hea", 7, samples=200)
    record = signals.open_record(path, RATE, 1000)
    whole = wfdb.rdrecord(str(path.with_suffix("")))
    np.testing.assert_array_equal(signals.read_leads(record, [1, 0]), whole.p_signal[:, ::-1])
    monkeypatch.setattr(signals, "AT_ONCE", 30)
    found = signals.read_leads(record, [1], end=40)
    np.testing.assert_array_equal(found, whole.p_signal[:40, 1:])


def test_segments_follow_each_other_and_all_their_files_count(tmp_path: Path) -> None:
    record = signals.open_record(write_segments(tmp_path), RATE, 1000)
    whole = wfdb.rdrecord(str(tmp_path / "m")).p_signal
    np.testing.assert_array_equal(signals.read_leads(record, [1, 0]), whole[:, ::-1])
    np.testing.assert_array_equal(signals.read_leads(record, [0], end=55), whole[:55, :1])
    assert [path.name for path in record.files] == ["m.hea", "a.hea", "a.dat", "b.hea", "b.dat"]
    assert record.length == 70


def test_a_header_without_a_length_is_as_long_as_its_signal(tmp_path: Path) -> None:
    path = write_wfdb(tmp_path / "r.hea", 7, samples=40)
    whole = wfdb.rdrecord(str(tmp_path / "r")).p_signal
    edit(f"{RATE} 40", f"{RATE}")(path)
    record = signals.open_record(path, RATE, 1000)
    assert record.length == 40
    np.testing.assert_array_equal(signals.read_leads(record, [0, 1], end=30), whole[:30])


REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (edit("m/2", "m.mat/2"), "calls itself 'm.mat/2'; WFDB wants the name alone, 'm'"),
    (edit("a 40", "~ 40"), "variable layout|a gap between"),
    (edit("a 40", "a 0"), "variable layout"),
    (edit("b 30", "b 29"), "another length or other leads"),
    (edit("a 40", "m 40"), "or of itself"),
    (lambda path: edit(" 16 ", " 16:3 ")(path.with_name("b.hea")), "leads that are skewed in time"),
    (lambda path: edit("V5", "V6")(path.with_name("b.hea")), "another length or other leads"),
    (lambda path: path.with_name("b.hea").unlink(), "b.hea: is missing"),
]


@pytest.mark.parametrize(("spoil", "says"), REFUSED)
def test_segments_are_refused_for_their_true_reason(
    tmp_path: Path, spoil: Callable[[Path], object], says: str
) -> None:
    path = write_segments(tmp_path)
    spoil(path)
    assert_refused(lambda: signals.open_record(path, RATE, 1000), "", says)


def test_no_other_module_reads_a_signal_of_wfdb() -> None:
    sources = Path(zdp_bench.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "rdrecord" in path.read_text()] == ["signals.py"]
