"""Loggers against the real packages, offline: what was logged is read back."""

import json
import math
import os
import pty
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from tests.test_cli import run as run_command
from tests.training.test_run import TINY, Silent, configured
from zdp_bench import records
from zdp_bench.extras.loggers.mlflow_logger import MlflowLogger
from zdp_bench.training.interrupts import Stopped
from zdp_bench.training.loggers import LoggedRun
from zdp_bench.training.progress import Reporter
from zdp_bench.training.run import execute

LABELS = ["name=first", "tags=[small,a b]", "notes=A look at the noise."]
RESUMED_AT = 15  # the second of three epochs ends at step 20


@dataclass
class Logged:
    """What a tracker holds of its one run."""

    title: str
    tags: set[str]
    notes: str
    config: dict[str, str]
    record: dict[str, Any]  # as attached
    curves: dict[str, dict[int, float]] = field(default_factory=dict)  # metric -> step -> value
    final: dict[str, float] = field(default_factory=dict)


def read_tensorboard(results: Path) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = results.glob("tensorboard/quickstart/*")
    events = EventAccumulator(str(folder))
    events.Reload()
    texts = {}
    for name in ("run", "config", "record"):
        (text,) = events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val
        texts[name] = json.loads(text)
    curves = {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }
    config = {key: str(value) for key, value in texts["config"].items()}
    of = texts["run"]
    return Logged(of["name"], {*of["tags"]}, of["notes"], config, texts["record"], curves)


def read_mlflow(results: Path) -> Logged:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{results}/mlflow.db")
    experiment = client.get_experiment_by_name("zdp-bench")
    assert experiment is not None
    tracked_runs = client.search_runs([experiment.experiment_id])
    (tracked_run,) = [run for run in tracked_runs if run.info.status == "FINISHED"]
    tags = tracked_run.data.tags
    (attached,) = client.list_artifacts(tracked_run.info.run_id)
    record = client.download_artifacts(tracked_run.info.run_id, attached.path)
    curves = {}
    for name in tracked_run.data.metrics:
        history = client.get_metric_history(tracked_run.info.run_id, name)
        curves[name] = {metric.step: metric.value for metric in history}
        assert len(curves[name]) == len(history), "an evaluation is there once"
    return Logged(
        tags["mlflow.runName"],
        {tag for tag, value in tags.items() if value == "true"},
        tags["mlflow.note.content"],
        tracked_run.data.params,
        json.loads(Path(record).read_text()),
        {name: steps for name, steps in curves.items() if 0 not in steps},
        {name: steps[0] for name, steps in curves.items() if 0 in steps},
    )


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file, which is a log as LevelDB writes it."""
    content, block, header = path.read_bytes(), 1 << 15, 7
    at, parts = header, b""
    while at + header <= len(content):
        if block - at % block < header:
            at += block - at % block
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + header : at + header + size]
        at += header + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_wandb(results: Path) -> Logged:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # it writes until its process ends

    curves: dict[str, dict[int, float]] = defaultdict(dict)
    logged = Logged("", set(), "", {}, {}, curves)
    identities = set()
    for folder in sorted(results.glob("wandb/offline-run-*")):
        (file,) = folder.glob("*.wandb")
        for content in read_blocks(file):
            entry = Record.FromString(content)
            if entry.HasField("run"):
                identities.add(entry.run.run_id)
                logged.title, logged.notes = entry.run.display_name, entry.run.notes
                logged.tags = {*entry.run.tags}
                logged.config |= {
                    item.key: str(json.loads(item.value_json)) for item in entry.run.config.update
                }
            if entry.HasField("history"):
                row = {
                    (item.key or ".".join(item.nested_key)): json.loads(item.value_json)
                    for item in entry.history.item
                }
                for name, value in row.items():
                    curves[name][row["_step"]] = value
            for item in entry.summary.update:
                name = item.key or ".".join(item.nested_key)
                logged.final[name] = json.loads(item.value_json)
            assert not entry.HasField("stats")
    assert len(identities) == 1
    (attached,) = results.glob("wandb/offline-run-*/files/record.json")
    assert not attached.is_symlink()
    logged.record = json.loads(attached.read_text())
    return logged


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}


class Interrupting(Silent):
    """Stops a run in the middle of its second epoch."""

    def stepped(self, step: int) -> None:
        if step == RESUMED_AT + 1:
            raise Stopped(15)


SAVED = "execution.checkpoint_steps=5", RESUMED_AT
NOT_SAVED = "trainer.checkpoint_epochs=3", None  # logged before the run starts again


@pytest.mark.parametrize(
    ("name", "saving", "resumed_at"),
    [
        *((name, *SAVED) for name in READERS),
        *((name, *NOT_SAVED) for name in READERS if name != "mlflow"),
        pytest.param("mlflow", *NOT_SAVED, marks=pytest.mark.slow),  # its database takes seconds
    ],
)
@pytest.mark.filterwarnings("ignore")  # the packages' own
def test_a_run_that_was_interrupted_is_one_curve_in_the_tracker(
    name: str, saving: str, resumed_at: int | None, tmp_path: Path
) -> None:
    pytest.importorskip(name)
    config = configured(tmp_path, *LABELS, f"logger={name}", "trainer.epochs=3", saving)
    with pytest.raises(Stopped), Reporter(Interrupting(), config) as reporter:
        execute(config, reporter)
    with Reporter(Silent(), config) as reporter:
        outcome = execute(config, reporter)
        reporter.finished(outcome.record)
    assert outcome.record.document["measured"]["resumed_at_step"] == resumed_at
    logged = READERS[name](tmp_path)
    assert (logged.title, logged.notes) == ("first", "A look at the noise.")
    assert logged.tags == {"small", "a b"}
    assert logged.record == json.loads(outcome.path.read_text())
    flat = records.flatten(outcome.record.document["config"])
    assert {key: str(value) for key, value in flat.items()}.items() <= logged.config.items()
    for metric in ("accuracy", "loss", "epsilon_tight"):
        of_record = {epoch["step"]: epoch[metric] for epoch in outcome.record.document["epochs"]}
        assert logged.curves[metric] == pytest.approx(of_record), metric
    if logged.final:
        spent = [value for key, value in logged.final.items() if key.endswith("y.epsilon_tight")]
        assert spent == [outcome.record.document["privacy"]["epsilon_tight"]]


@pytest.mark.filterwarnings("ignore")
def test_wandb_has_what_a_killed_process_did_not_write(tmp_path: Path) -> None:
    """All evaluations of a killed process were lost, and the resumed run logged later ones only."""
    wandb = pytest.importorskip("wandb")
    config = configured(tmp_path, *LABELS, "logger=wandb", "trainer.epochs=3", SAVED[0])
    with pytest.raises(Stopped), Reporter(Interrupting(), config) as reporter:
        execute(config, reporter)
    wandb.teardown()
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    shutil.rmtree(folder)
    with Reporter(Silent(), config) as reporter:
        outcome = execute(config, reporter)
        reporter.finished(outcome.record)
    of_record = {epoch["step"]: epoch["loss"] for epoch in outcome.record.document["epochs"]}
    assert read_wandb(tmp_path).curves["loss"] == pytest.approx(of_record)


def describe(results: Path, *evaluations: dict[str, Any]) -> LoggedRun:
    """Return a run that was evaluated before."""
    step = max((evaluation["step"] for evaluation in evaluations), default=0)
    config = {f"model.{n}": n for n in range(150)}
    return LoggedRun("a-1", "title", "quickstart", [], "", config, results, step, evaluations)


def evaluate(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "epoch": step // 10, "loss": loss}


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_each_step_once_and_all_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill, steps with new noise were there twice, and parameters were missing for good."""
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", Mock(side_effect=ConnectionError))
        patch.setattr(mlflow.MlflowClient, "log_param", Mock(side_effect=ConnectionError))
        with pytest.raises(ConnectionError):
            MlflowLogger().start(describe(tmp_path))

    def read_runs() -> dict[str, Any]:
        experiment = client.get_experiment_by_name("zdp-bench")
        found = client.search_runs([experiment.experiment_id])
        return {tracked.data.tags["zdp_bench.run"]: tracked for tracked in found}

    def read_losses() -> list[tuple[int, float]]:
        history = client.get_metric_history(read_runs()["a-1"].info.run_id, "loss")
        return sorted((point.step, point.value) for point in history)

    killed = MlflowLogger()
    killed.start(describe(tmp_path))
    assert len(read_runs()) == 1
    assert len(read_runs()["a-1"].data.params) == 150
    for step in (10, 20, 30):
        killed.log(evaluate(step, 0.5))
    resumed = MlflowLogger()
    resumed.start(describe(tmp_path, evaluate(10, 0.5)))
    for step in (20, 30):
        resumed.log(evaluate(step, 0.4))
    assert read_losses() == [(10, 0.5), (20, 0.4), (30, 0.4)]
    assert read_runs()["a-1 (replaced)"].info.status == "KILLED"
    assert len(read_runs()["a-1"].data.params) == 150
    again = MlflowLogger()
    again.start(describe(tmp_path, *(evaluate(step, 0.4) for step in (10, 20, 30, 40))))
    assert len(read_runs()) == 2
    assert [step for step, _ in read_losses()] == [10, 20, 30, 40]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_one_of_several_runs_of_an_identity(tmp_path: Path) -> None:
    """The oldest got the metrics and lacked the parameters of a newer one, which stayed open."""
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    MlflowLogger().start(describe(tmp_path))
    experiment = client.get_experiment_by_name("zdp-bench").experiment_id
    (first,) = client.search_runs([experiment])
    begun = first.info.start_time
    tags = {"zdp_bench.run": "a-1"}
    ids = {"complete": first.info.run_id}
    delays = {"oldest": -1000, "middle": 1000, "chosen": 2000, "ahead": 3000}
    for name, delay in delays.items():
        created = client.create_run(experiment, start_time=begun + delay, tags=tags)
        ids[name] = created.info.run_id
        client.log_param(ids[name], "model.0", 0)
    client.log_metric(ids["oldest"], "loss", 0.5, step=10)
    client.log_metric(ids["ahead"], "loss", 0.5, step=20)

    logger = MlflowLogger()
    logger.start(describe(tmp_path, evaluate(10, 0.5)))
    logger.log(evaluate(20, 0.4))

    tracked_runs = {name: client.get_run(run_id) for name, run_id in ids.items()}
    chosen = tracked_runs.pop("chosen")
    assert chosen.info.status == "RUNNING"
    assert chosen.data.tags["zdp_bench.run"] == "a-1"
    assert len(chosen.data.params) == 150
    losses = client.get_metric_history(ids["chosen"], "loss")
    assert [(point.step, point.value) for point in losses] == [(10, 0.5), (20, 0.4)]
    for name, tracked in tracked_runs.items():
        assert tracked.info.status == "KILLED", name
        assert tracked.data.tags["zdp_bench.run"] == "a-1 (replaced)", name


def test_mlflow_without_its_server_is_given_up_in_seconds(tmp_path: Path) -> None:
    """It kept a run waiting for four minutes."""
    pytest.importorskip("mlflow")
    begun = time.monotonic()
    with pytest.raises(Exception, match="refused"):
        MlflowLogger(uri="http://127.0.0.1:9").start(describe(tmp_path))
    assert time.monotonic() - begun < 30


ONLINE = """
import sys
from pathlib import Path
from zdp_bench.extras.loggers.wandb_logger import WandbLogger
from zdp_bench.training.loggers import LoggedRun

results = Path(sys.argv[1])
WandbLogger(mode="online").start(LoggedRun("a-1", "title", "quickstart", [], "", {}, results, 0))
"""


def test_wandb_does_not_ask_for_an_account_on_a_terminal(tmp_path: Path) -> None:
    """It waited for an answer, for ever."""
    pytest.importorskip("wandb")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "TERM": "xterm"}
    master, terminal = pty.openpty()
    try:
        ended = subprocess.run(
            [sys.executable, "-c", ONLINE, tmp_path],
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            timeout=60,
            check=False,
        )
        printed = os.read(master, 100_000).decode()
    finally:
        os.close(terminal)
        os.close(master)
    assert ended.returncode == 1
    assert "No API key configured" in printed


class Client:
    """MLflow's client, as far as a run is logged to it."""

    def __init__(self) -> None:
        self.logged: list[Point] = []
        self.answers = True

    def log_batch(self, run: str, metrics: list["Point"]) -> None:
        self.logged += metrics
        if not self.answers:
            raise TimeoutError

    def get_run(self, run: str) -> SimpleNamespace:
        return SimpleNamespace(data=SimpleNamespace(metrics={p.key: p.value for p in self.logged}))

    def get_metric_history(self, run: str, key: str) -> list["Point"]:
        return [point for point in self.logged if point.key == key]


class Point(NamedTuple):
    """A value of a metric, as MLflow's `Metric`."""

    key: str
    value: float
    timestamp: int
    step: int


@pytest.fixture
def mlflow_logger(monkeypatch: pytest.MonkeyPatch) -> MlflowLogger:
    """A logger that logs to `Client`."""
    module = ModuleType("mlflow")
    module.entities = SimpleNamespace(Metric=Point)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    logger = MlflowLogger()
    logger._client = Client()
    return logger


def test_mlflow_gets_finite_numbers_alone(mlflow_logger: MlflowLogger) -> None:
    """It stored ∞ as 1.8e308, and NaN again at each resume."""
    mlflow_logger.log({"step": 3, "loss": math.nan, "epsilon_tight": math.inf, "accuracy": 0.5})
    assert [point[:2] for point in mlflow_logger._client.logged] == [("accuracy", 0.5)]


def test_mlflow_gets_metrics_once_whose_answer_was_lost(mlflow_logger: MlflowLogger) -> None:
    """The call was repeated at the end of the run, and the step was there twice."""
    client = mlflow_logger._client
    client.answers = False
    with pytest.raises(TimeoutError):
        mlflow_logger.log({"step": 3, "accuracy": 0.5})
    client.answers = True
    for step in (3, 4):
        mlflow_logger.log({"step": step, "accuracy": 0.5})
    assert [point.step for point in client.logged] == [3, 4]


@pytest.mark.parametrize("name", READERS)
def test_a_missing_package_is_told_before_the_first_step(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    words = [*TINY, f"paths.results={tmp_path}", f"logger={name}"]
    code, _, err = run_command(capsys, "run", *words)
    message = f"this needs {name}, which is not installed: `pip install 'zdp-bench[{name}]'`."
    assert (code, message in err) == (2, True), err
    assert not [*tmp_path.glob("runs/*/*/ledger.jsonl")]
