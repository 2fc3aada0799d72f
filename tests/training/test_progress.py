"""A run's progress on terminals of several widths."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.training.test_run import Silent, configured
from zdp_bench import registry
from zdp_bench.errors import UserError
from zdp_bench.report.console import console
from zdp_bench.report.sheet import Sheet
from zdp_bench.training import progress
from zdp_bench.training.progress import Evaluation, Live, Reporter
from zdp_bench.training.run import execute


@pytest.mark.parametrize("width", [40, 80, 110])
def test_steps_epsilon_and_time_left_stand_whole_at_every_width(width: int, tmp_path: Path) -> None:
    config = replace(configured(tmp_path), recipe="msd_hippocampus_private", seed=12)
    metrics = {"accuracy": 0.8444, "roc_auc": 0.9884, "loss": 1.698}
    file = io.StringIO()
    with Live(Console(file=file, force_terminal=True, width=width, color_system=None)) as live:
        live.started(config, tmp_path, 1200, 0)
        live.stepped(600)
        live.evaluated(Evaluation(1, 600, metrics, 0.6456))
        assert live._bar is not None
        live._bar.refresh()
    drawn = next(
        line for line in reversed(file.getvalue().replace("\r", "\n").split("\n")) if "ε" in line
    )
    assert " 600/1200 " in drawn
    assert "ε 0.646" in drawn
    assert "-:--:--" in drawn or "0:00:0" in drawn
    assert "ms" in drawn
    assert ("loss 1.698" in drawn) == (width >= 110)


def test_time_left_is_told_without_the_first_epoch_and_under_the_jobs_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    now = iter([5.0, 6.0, 7.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with Live(console(), "#2/4 lr=1") as live:
        live.started(configured(tmp_path, "seed=1"), tmp_path, 300, 0)
        for epoch in (1, 2, 3):
            live.evaluated(Evaluation(epoch, 100 * epoch, {"loss": 1.0}, 1.0))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "#2/4 lr=1  quickstart seed 1: epoch 1, step 100/300  loss 1  ε 1"
    assert lines[1].endswith("  ε 1  1 s left")
    assert lines[2].endswith("  0 s left")


def test_piped_text_is_as_wide_as_columns_says_or_a_row_needs_and_ends_in_no_blanks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    title, rows = "a title " + "x" * 30, [["one", "two " * 30, "0.5"]]
    for width in ("50", ""):
        monkeypatch.setenv("COLUMNS", width)
        console().print(Sheet(title, ("a", "b", "epsilon_tight"), rows, ["a note"]))
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= int(width or 200)
        assert width or f"│ one │ {'two ' * 30} │ 0.5           │" in lines, "a row is one line"
        assert width or any("┃ epsilon_tight ┃" in line for line in lines), "so is the heading"
        assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("important", "lacks"),
    [((), "what for, value"), (("value",), "why, what for"), (("value", "why"), "where, what for")],
)
def test_the_least_important_columns_make_room(important: tuple[str, ...], lacks: str) -> None:
    words = ("name", "where", "why", "what for")
    rows = [["w" * 20] * 4 + ["0.123456"]]
    file = io.StringIO()
    Console(file=file, width=44).print(Sheet("t", (*words, "value"), rows, important=important))
    text = file.getvalue()
    assert ("0.123456" in text) == ("value" not in lacks)
    assert f"No room for {lacks}:" in text
    assert "…" not in text


def test_facts_are_a_box_on_a_terminal_and_plain_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = Sheet("a run", (), [["tight ε", "1.98"], ["data", "long " * 40 + "end"]])
    monkeypatch.delenv("COLUMNS", raising=False)
    console().print(sheet)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["a run", "tight ε   1.98", f"data      {'long ' * 40}end"]
    monkeypatch.setenv("COLUMNS", "50")
    console().print(sheet)
    assert "│ tight ε │ 1.98" in capsys.readouterr().out


def test_no_rows_without_columns_are_no_box(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(Sheet("nothing", (), [], ["why"]))
    assert capsys.readouterr().out.splitlines() == ["nothing", "why"]


def test_a_callback_is_told_the_records_numbers_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[dict[str, float]] = []
    registry.names("callback")
    monkeypatch.setitem(registry._builders["callback"], "mine", lambda run: received.append)
    config = configured(tmp_path, "execution.callbacks=[mine]")
    record = execute(config, Reporter(Silent(), config)).record.document
    assert received == record["epochs"]
    with pytest.raises(UserError, match="callback 'other' is not known"):
        Reporter(Silent(), configured(tmp_path, "execution.callbacks=[other]"))
