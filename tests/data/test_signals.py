"""Sound files and WFDB records as other libraries read them; every data set reads them here."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import wfdb

import zdp_bench
from tests.data.helpers import assert_refused, edit
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
    samples = signals.read_sound(path, RATE, 1, 1000)
    assert (samples.dtype, samples.shape) == (np.float32, (400, 1))
    np.testing.assert_allclose(samples[:, 0], WAVE, atol=0.05 if name == "a.ogg" else 0.01)
    path.write_bytes(path.read_bytes()[:-90])
    assert_refused(lambda: signals.read_sound(path, RATE, 1, 1000), name, "")


def test_leads_are_read_as_wfdb_reads_them(tmp_path: Path) -> None:
    path = write_wfdb(tmp_path / "long.hea", 7, samples=200)
    record = signals.open_record(path, RATE, 1000)
    whole = wfdb.rdrecord(str(path.with_suffix("")))
    np.testing.assert_array_equal(signals.read_leads(record, [1, 0]), whole.p_signal[:, ::-1])
    leads = signals.read_leads(record, [1], end=40)
    np.testing.assert_array_equal(leads, whole.p_signal[:40, 1:])


def test_a_header_without_a_length_is_as_long_as_its_signal(tmp_path: Path) -> None:
    path = write_wfdb(tmp_path / "r.hea", 7, samples=40)
    whole = wfdb.rdrecord(str(tmp_path / "r")).p_signal
    edit(f"{RATE} 40", f"{RATE}")(path)
    record = signals.open_record(path, RATE, 1000)
    assert record.length == 40
    np.testing.assert_array_equal(signals.read_leads(record, [0, 1], end=30), whole[:30])


def test_no_other_module_reads_a_signal_of_wfdb() -> None:
    sources = Path(zdp_bench.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "rdrecord" in path.read_text()] == ["signals.py"]
