"""TensorBoard's files hold the record's numbers and no more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.training.test_run import Silent, configured
from zdp_bench.errors import UserError
from zdp_bench.training.run import run
from zdp_bench.training.tensorboard import Board


def test_event_files_hold_what_the_record_holds(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = configured(tmp_path, "execution.tensorboard=true")
    watcher = Silent()
    record = run(config, Board(watcher, config)).record
    (folder,) = (tmp_path / "tensorboard").iterdir()
    assert folder.name == f"quickstart-{record['experiment'][:8]}-seed0"
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    told = set(record["metrics"])
    assert set(events.Tags()["scalars"]) == {f"test/{name}" for name in told} | {
        "privacy/epsilon_tight"
    }
    for name in ("test/accuracy", "privacy/epsilon_tight"):
        key = name.split("/")[1]
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        assert shown == [(epoch["step"], pytest.approx(epoch[key])) for epoch in record["epochs"]]
    assert len(watcher.told) == 2


def test_without_tensorboard_it_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(
        UserError, match=r"needs TensorBoard: `pip install 'zdp-bench\[tensorboard\]'`"
    ):
        Board(Silent(), configured(tmp_path))
