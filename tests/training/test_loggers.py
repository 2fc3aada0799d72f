"""Loggers and labels: outside of the digest; what a logger does wrong loses no run."""

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.training.test_run import TINY, Silent, configured
from zdp_bench import records, registry
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.experiments.sweep import run_one
from zdp_bench.registry import of_extras
from zdp_bench.training.interrupts import Stopped
from zdp_bench.training.loggers import LoggedRun, Tracker
from zdp_bench.training.progress import Evaluation, Reporter
from zdp_bench.training.run import execute


class Remembering:
    """A logger that remembers, and raises an error in the method that it is told to."""

    calls: ClassVar[list[tuple[str, Any]]] = []
    broken = ""

    def start(self, of: LoggedRun) -> None:
        self._call_cached("start", of)

    def log(self, metrics: dict[str, float]) -> None:
        self._call_cached("log", metrics)

    def finish(self, record: records.Record, path: Path) -> None:
        assert records.read(path) == record
        self._call_cached("finish", record)

    def close(self) -> None:
        self._call_cached("close", None)

    def _call_cached(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name == self.broken:
            raise ConnectionError("no\nnetwork")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What the logger `logger=tensorboard` is called with; it is `Remembering`, without options."""
    if "tensorboard" not in of_extras("logger"):
        pytest.skip("zdp_bench/extras/loggers is not there")
    monkeypatch.setattr(Remembering, "calls", [])
    monkeypatch.setattr(Remembering, "broken", "")
    monkeypatch.setitem(registry._builders["logger"], "tensorboard", _build)
    return Remembering.calls


def _build(*, folder: str | None = None) -> Remembering:
    return Remembering()


def test_names_tags_notes_and_the_logger_are_outside_of_the_digest(tmp_path: Path) -> None:
    plain = experiment_digest(configured(tmp_path))
    labels = ["name=first", "tags=[a,b]", "notes=why"]
    assert experiment_digest(configured(tmp_path, *labels)) == plain
    for name in of_extras("logger"):
        assert experiment_digest(configured(tmp_path, f"logger={name}")) == plain


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("name=''", "name=: "),
        ("tags=a", "tags=a: must be a valid list"),
        ("tags=['a,b']", "a tag has no comma"),
        ("logger=wand", "logger 'wand' is not known"),
        ("logger.folder=x", "logger"),
    ],
)
def test_labels_and_loggers_are_checked(tmp_path: Path, word: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        configured(tmp_path, word)


def test_a_record_keeps_its_labels_and_gets_new_ones_without_being_run_again(
    tmp_path: Path,
) -> None:
    words = [*TINY, f"paths.results={tmp_path}"]
    run_one([*words, "name=first", "tags=[a,b]"])
    run_one([*words, "name=second", "notes=why"])
    run_one(words)
    (path,) = tmp_path.glob("runs/*/*/record.json")
    record = records.read_document(path)
    assert record is not None
    assert record["labels"] == {"name": "second", "tags": ["a", "b"], "notes": "why"}
    assert "name" not in record["config"]
    run_one([*words, "name=null", "tags=[]"])
    assert (records.read_document(path) or {})["labels"] == {"notes": "why"}
    run_one([*words, "notes=null"])
    assert "labels" not in (records.read_document(path) or {})
    run_one([*words, "seed=2", "name=null", "tags=[]", "notes=null"])
    (other,) = set(tmp_path.glob("runs/*/*/record.json")) - {path}
    assert "labels" not in (records.read_document(other) or {})
    assert "labels" not in execute(configured(tmp_path, "seed=1"), Silent()).record.document


def test_a_finished_run_keeps_its_claims_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*TINY, f"paths.results={tmp_path}"]
    run_one(words)
    run_one(words)
    assert "claims" not in caplog.text
    run_one([*words, "claims.table=zeta_dp_2021/1", "claims.row=phasemnist_private"])
    assert "its record keeps the claims {'table': None" in caplog.text


def test_a_logger_is_told_the_records_numbers_and_no_more(
    tmp_path: Path, calls: list[tuple[str, Any]]
) -> None:
    words = ["logger=tensorboard", "name=first", "tags=[a]", "notes=why"]
    run_one([*TINY, f"paths.results={tmp_path}", *words])
    assert [name for name, _ in calls] == ["start", "log", "log", "finish"]
    start, record = calls[0][1], calls[-1][1].document
    assert [metrics for name, metrics in calls if name == "log"] == record["epochs"]
    assert (start.title, start.tags, start.notes) == ("first", ["a"], "why")
    assert start.config == records.flatten(record["config"])


def test_a_finished_run_is_not_logged_again_and_says_so(
    tmp_path: Path, calls: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    words = [*TINY, f"paths.results={tmp_path}"]
    run_one(words)
    run_one([*words, "logger=tensorboard"])
    assert calls == []
    assert "logger=tensorboard: this run was done before and is not logged again" in caplog.text
    run_one([*words, "logger=tensorboard", "force=true"])
    run_one([*words, "logger=tensorboard", "force=true"])
    first, second = (of.identity for name, of in calls if name == "start")
    assert first != second


@pytest.mark.parametrize("broken", ["start", "log", "finish"])
def test_a_logger_that_fails_loses_no_run(
    tmp_path: Path,
    calls: list[tuple[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    monkeypatch.setattr(Remembering, "broken", broken)
    run_one([*TINY, f"paths.results={tmp_path}", "logger=tensorboard"])
    assert len([*tmp_path.glob("runs/*/*/record.json")]) == 1
    names = [name for name, _ in calls]
    assert names.count(broken) == (1 if broken == "finish" else 2), "asked again at the end"
    assert names[-1] == "close"
    first, *others = caplog.text.split("logger=tensorboard: ConnectionError: no network. ")[1:]
    if broken != "finish":
        assert first.startswith("The run goes on without it, and calls it again at its end.")
        first, *others = others
    assert first.startswith("The tracker may lack a part of this run.")
    assert others == []


def test_a_logger_that_failed_does_not_delay_the_end_of_a_run_that_is_stopped(
    tmp_path: Path,
    calls: list[tuple[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was called again, and waited 20 s for a server that was down."""
    monkeypatch.setattr(Remembering, "broken", "log")
    tracker = Tracker(configured(tmp_path, "logger=tensorboard"))
    tracker.start(tmp_path, 0)
    tracker.log({"step": 1})
    tracker.close()
    assert [name for name, _ in calls] == ["start", "log"]
    monkeypatch.setattr(Remembering, "broken", "close")
    caplog.clear()
    tracker = Tracker(configured(tmp_path, "logger=tensorboard"))
    tracker.start(tmp_path, 0)
    tracker.close()
    assert "no network. The tracker may lack a part of this run." in caplog.text


@pytest.mark.parametrize("broken", ["start", "log"])
def test_a_tracker_that_is_back_at_the_end_lacks_nothing(
    tmp_path: Path,
    calls: list[tuple[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    """One moment without network lost all later evaluations, the record, and the run's end."""
    monkeypatch.setattr(Remembering, "broken", broken)

    class Repairing(Silent):
        def evaluated(self, evaluation: Evaluation) -> None:
            if evaluation.epoch == 2:
                Remembering.broken = ""

    config = configured(tmp_path, "logger=tensorboard", "trainer.epochs=3")
    with Reporter(Repairing(), config) as reporter:
        record = execute(config, reporter).record
        reporter.finished(record)
    names = [name for name, _ in calls]
    names.remove(broken)  # the call that failed
    assert names == ["start", "log", "log", "log", "finish"]
    logged = [metrics for name, metrics in calls if name == "log"]
    assert logged[-3:] == record.document["epochs"]
    assert caplog.text.count("WARNING") == 1


@pytest.mark.parametrize("content", [b"\xff", b"a'b", b""])
def test_a_damaged_identity_loses_no_run(
    tmp_path: Path, calls: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    tracker = Tracker(configured(tmp_path, "logger=tensorboard"))
    (tmp_path / "logged_as").write_bytes(content)
    tracker.start(tmp_path, 0)
    assert calls == []
    assert re.search(r"logged_as: is (damaged|not UTF-8)", caplog.text)
    assert "The run goes on without it" in caplog.text


def test_a_resumed_run_goes_on_under_its_identity(
    tmp_path: Path, calls: list[tuple[str, Any]]
) -> None:
    class Interrupting(Silent):
        def evaluated(self, evaluation: Evaluation) -> None:
            if evaluation.epoch == 2:
                raise Stopped(15)

    words = ["logger=tensorboard", "execution.checkpoint_steps=1", "trainer.epochs=3"]
    config = configured(tmp_path, *words)
    with pytest.raises(Stopped), Reporter(Interrupting(), config) as reporter:
        execute(config, reporter)
    assert [name for name, _ in calls] == ["start", "log", "log", "close"]
    with Reporter(Silent(), config) as reporter:
        record = execute(config, reporter).record
        reporter.finished(record)
    assert [name for name, _ in calls[4:]] == ["start", "log", "log", "finish"]
    first, second = (of for name, of in calls if name == "start")
    assert first.identity == second.identity
    assert first.steps_done == 0 < second.steps_done
    assert list(first.evaluations) == []
    assert list(second.evaluations) == [calls[1][1]]
    logged = [metrics["step"] for name, metrics in calls[5:] if name == "log"]
    assert all(step > second.steps_done for step in logged)


def test_a_resumed_runs_evaluations_are_those_that_were_logged(
    tmp_path: Path, calls: list[tuple[str, Any]]
) -> None:
    """The last one, within an epoch, had no number of its epoch, and MLflow's logger failed."""
    config = configured(tmp_path, "logger=tensorboard", "privacy.max_epsilon=1.2")
    with Reporter(Silent(), config) as reporter:
        outcome = execute(config, reporter)
        reporter.finished(outcome.record)
    assert outcome.record.document["epochs"][-1]["epoch"] is None
    logged = [metrics for name, metrics in calls if name == "log"]
    outcome.path.unlink()  # as if the process had been killed before it wrote the record
    with Reporter(Silent(), config) as reporter:
        execute(config, reporter)
    _, resumed = (of for name, of in calls if name == "start")
    assert list(resumed.evaluations) == logged
