"""Processes that a command starts end with it, however it ends, and begin nothing more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

LONG = [
    "recipe=quickstart",
    "trainer.epochs=10000",
    "trainer.sample_rate=0.01",
    "model.hidden=[4]",
    "accountant=gdp_clt",
    "threads=1",
]
SWEEP = ["-m", "zdp_bench", "run", "-m", "launcher=joblib", *LONG, "seed=1,2,3,4,5"]


def alive(session: int) -> list[str]:
    """Return the processes of a session that have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (process / "stat").read_text().rpartition(")")
        except OSError:
            continue
        state, _, _, of = rest.split()[:4]
        if int(of) == session and state not in "ZX":
            found.append(name)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are listed by /proc")
@pytest.mark.skipif(find_spec("hydra_plugins") is None, reason="needs hydra_plugins")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_command(tmp_path: Path, number: signal.Signals) -> None:
    with (tmp_path / "said").open("w") as said:
        started = subprocess.Popen(
            [sys.executable, *SWEEP],
            cwd=tmp_path,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        while len(begun := list(tmp_path.glob("results/runs/*/*/**/ledger.jsonl"))) < 2 or any(
            path.read_bytes().count(b"\n") < 4 for path in begun
        ):
            assert started.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        assert len(alive(started.pid)) > 2
        started.send_signal(number)
        until = time.monotonic() + 40
        while left := alive(started.pid):
            assert time.monotonic() < until, left
            time.sleep(0.1)
    finally:
        if alive(started.pid):
            os.killpg(started.pid, signal.SIGKILL)
        code = started.wait()
    assert code == (-number if number == signal.SIGKILL else 75), (tmp_path / "said").read_text()
    assert sorted(tmp_path.glob("results/runs/*/*/**/ledger.jsonl")) == sorted(begun)
    # The workers were asked to stop, and saved their runs.
    assert len(list(tmp_path.glob("results/runs/*/*/checkpoint.pt"))) == 2
