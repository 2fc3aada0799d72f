"""Loggers' files hold the record's numbers and configuration, and no more."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_run import Silent, configured
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.training.progress import Reporter
from zdp_bench.training.run import run

EPSILON = "privacy/epsilon_tight"
QUICK = ("threads=1", "accountant=gdp_clt")


def carry_out(folder: Path, logger: str) -> Record:
    config = configured(folder, f"execution.loggers=[{logger}]", *QUICK)
    watcher = Silent()
    with Reporter(watcher, config) as reporter:
        record = run(config, reporter).record
    assert len(watcher.told) == 2
    return record


def expected(record: Record, name: str) -> list[tuple[int, Any]]:
    return [(e["step"], pytest.approx(e[name.split("/")[1]])) for e in record["epochs"]]


def names_told(record: Record) -> set[str]:
    return {f"test/{name}" for name in record["metrics"]} | {EPSILON}


def test_tensorboard_has_the_records_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = carry_out(tmp_path, "tensorboard")
    (folder,) = (tmp_path / "tensorboard").iterdir()
    assert folder.name == f"quickstart-{record['experiment'][:8]}-seed0"
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    assert set(events.Tags()["scalars"]) == names_told(record)
    for name in ("test/accuracy", EPSILON):
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        assert shown == expected(record, name)


@pytest.mark.slow
def test_mlflow_has_the_records_numbers_and_configuration(tmp_path: Path) -> None:
    pytest.importorskip("mlflow.tracking")
    from mlflow.tracking import MlflowClient

    record = carry_out(tmp_path, "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "quickstart"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert set(found.data.metrics) == names_told(record)
    for name in ("test/accuracy", EPSILON):
        history = client.get_metric_history(found.info.run_id, name)
        assert [(one.step, one.value) for one in history] == expected(record, name)
    assert found.data.params["privacy.delta"] == "0.0001"
    assert not [key for key in found.data.params if key.startswith(("paths.", "execution."))]
    assert found.info.status == "FINISHED"


def read_wandb(path: Path) -> Iterator[Any]:
    """The entries of a run's file: after 7 bytes, each has its CRC, length and kind before it."""
    from wandb.proto import wandb_internal_pb2

    data, at = path.read_bytes(), 7
    assert data[:4] == b":W&B"
    assert len(data) < 2**15  # a longer file is cut into blocks
    while at < len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(data[at + 7 : at + 7 + length])
        yield entry
        at += 7 + length


@pytest.mark.slow
def test_wandb_writes_offline_the_records_numbers_and_configuration(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    record = carry_out(tmp_path, "wandb")
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows, keys = [], set()
    end = time.monotonic() + 60
    while not any(entry.WhichOneof("record_type") == "exit" for entry in read_wandb(path)):
        assert time.monotonic() < end  # its own process writes the file
        time.sleep(0.1)
    for entry in read_wandb(path):
        rows += [entry.history.item] if entry.history.item else []
        keys |= {item.key for item in entry.run.config.update}
        assert not entry.stats.item, "no system metrics"
        assert not entry.output.line, "no console"
    shown = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in r} for r in rows
    ]
    own = ("_step", "_runtime", "_timestamp", "_wandb")
    assert {key for row in shown for key in row if key not in own} == names_told(record)
    assert [(row["_step"], row[EPSILON]) for row in shown] == expected(record, EPSILON)
    assert "privacy.delta" in keys
    assert not [key for key in keys if key.startswith(("paths.", "execution."))]


MISSING = {"tensorboard": "torch.utils.tensorboard.writer", "mlflow": "mlflow", "wandb": "wandb"}


@pytest.mark.parametrize("logger", MISSING)
def test_without_its_package_it_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{MISSING[logger]}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, MISSING[logger], None)
    monkeypatch.delitem(sys.modules, f"zdp_bench.extras.loggers.{logger}", raising=False)
    with pytest.raises(UserError, match=rf"`pip install 'zdp-bench\[{logger}\]'`"):
        Reporter(Silent(), configured(tmp_path, f"execution.loggers=[{logger}]"))


def test_the_nearest_logger_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'mlflow'"):
        Reporter(Silent(), configured(tmp_path, "execution.loggers=[mlflo]"))
