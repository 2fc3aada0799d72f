"""Figures: the papers', by name and the same file each time, and those of runs of your own."""

from __future__ import annotations

import csv
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from tests.test_cli import leave
from tests.test_cli import run as command
from tests.test_records import record, save
from zdp_bench.errors import UserError
from zdp_bench.registry import names
from zdp_bench.report import epsilon, figures
from zdp_bench.report.figures import own
from zdp_bench.report.sheet import Sheet

TABLES = Path(__file__).resolve().parents[2] / "results" / "tables"


def test_a_figure_is_the_same_file_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = list(csv.DictReader((TABLES / "epsilon.csv").read_text().splitlines()))
    monkeypatch.setattr(epsilon, "rows", list)  # which takes seconds
    monkeypatch.setattr(epsilon, "sheet", lambda rows: Sheet("", (), (), numbers=lines))
    made = []
    for _ in range(2):
        paths = figures.write(figures.draw("epsilon", tmp_path), "epsilon", tmp_path)
        assert [path.name for path in paths] == ["epsilon.png", "epsilon.svg", "epsilon.pdf"]
        made.append([path.read_bytes() for path in paths])
    assert made[0] == made[1]
    assert made[0][0].startswith(b"\x89PNG")
    assert "ε tight" in made[0][1].decode()
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "epsilon.pdf",
        "epsilon.png",
        "epsilon.svg",
    ]


def test_the_nearest_figure_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"figure 'epsilom' is not known\. Did you mean 'epsilon'"):
        figures.draw("epsilom", tmp_path)


@pytest.mark.parametrize("name", [name for name in names("figure") if name != "epsilon"])
def test_a_figure_without_records_says_how_to_get_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="zdp-bench"):
        figures.draw(name, tmp_path / "results")


@pytest.mark.parametrize("labels", [["a"], ["short"] * 4, ["a curve with a long name " * 3] * 5])
def test_a_legend_is_as_wide_as_its_figure_at_most(labels: list[str]) -> None:
    figure = Figure(figsize=(7, 3))
    axes = figure.subplots()
    for place, label in enumerate(labels):
        axes.plot([0, 1], label=f"{label} {place}")
    figures.legend_below(figure)
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width
    assert len(legend.get_texts()) == len(labels)


def test_a_figure_may_be_saved_by_two_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, figure = tmp_path / "figure.png", Figure()

    def save_between(target: object, **options: object) -> None:
        Figure.savefig(figure, target, **options)  # type: ignore[arg-type]
        figures.save(Figure(), path)

    monkeypatch.setattr(figure, "savefig", save_between)
    figures.save(figure, path)
    assert [file.name for file in tmp_path.iterdir()] == ["figure.png"]


def make(recipe: str, seed: int, value: float, epsilon: float, **config: Any) -> dict[str, Any]:
    name = sha256(f"{recipe} {seed} {config} {epsilon}".encode()).hexdigest()
    run = record(recipe, seed, value, run=name)
    run["config"] = {"seed": seed, "optimizer": {"lr": 0.1, "momentum": 0.0}, **config}
    run["privacy"]["epsilon_tight"] = epsilon
    return run


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two algorithms at three ε, which a target sets; two seeds of one; and one without privacy."""
    runs = [
        make("a", seed, 0.5 + 0.01 * e + 0.01 * seed, e, algorithm={"name": name, "target": e})
        for e in (1, 2, 16)
        for name, seeds in (("dp_sgd", (0, 1)), ("gredp", (0,)))
        for seed in seeds
        if (name, e) != ("gredp", 2)
    ]
    open_run = make("b", 0, 0.9, math.inf, algorithm={"name": "sgd", "target": None})
    save(tmp_path, *runs, open_run)
    return tmp_path


def curves(drawing: own.Drawing) -> dict[str, list[float]]:
    (axes,) = drawing.figure.axes
    return {str(line.get_label()): list(line.get_ydata()) for line in axes.get_lines()}


def test_each_algorithm_is_a_curve_with_its_gap_and_the_non_private_run_a_line(
    results: Path,
) -> None:
    drawing = own.draw(results, [], "epsilon_tight", "accuracy", ["algorithm"])
    (axes,) = drawing.figure.axes
    found = curves(drawing)
    assert set(found) == {"dp_sgd", "gredp", "sgd, ∞"}
    assert found["dp_sgd"] == pytest.approx([51.5, 52.5, 66.5])
    assert found["gredp"] == pytest.approx([51, math.nan, 66], nan_ok=True)
    assert found["sgd, ∞"] == pytest.approx([90, 90])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epsilon tight", "test accuracy, %")
    assert axes.get_xscale() == "log"
    assert not drawing.notes
    (legend,) = drawing.figure.legends
    assert "n = 1 to 2" in legend.get_title().get_text()


def test_runs_that_differ_at_one_x_are_points_and_named(results: Path) -> None:
    rates = [0.01 * 1.1**n for n in range(30)]
    runs = [make("e", n, 0.5, 1.0 + n % 3, optimizer={"lr": lr}) for n, lr in enumerate(rates)]
    for place, run in enumerate(runs):
        run["metrics"]["loss"] = math.inf if place == 7 else 10.0 ** (place % 8)
    save(results, *runs)
    drawing = own.draw(results, ["recipe=e"], "epsilon_tight", "loss", ["recipe"])
    (axes,) = drawing.figure.axes
    assert [line.get_linestyle() for line in axes.get_lines()] == ["None"]
    assert len(curves(drawing)["e"]) == 29
    assert drawing.notes == (
        "Points of one colour also differ in optimizer.lr; --by separates them.",
        "Not drawn: 1 runs without a finite loss.",
    )
    along = own.draw(results, ["recipe=e"], "optimizer.lr", "loss", ["recipe"]).figure.axes[0]
    assert (along.get_xscale(), along.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in along.get_xticklabels()][:3] == ["0.01", "0.02", "0.05"]


@pytest.mark.parametrize(
    ("filters", "x", "y", "says"),
    [
        (["recipe=none"], "seed", "accuracy", "recipe=none: none of 9 records has it"),
        ([], "optimizer.lrr", "accuracy", "Did you mean 'optimizer.lr'"),
        ([], "seed", "accuracies", "Did you mean 'accuracy'"),
        ([], "algorithm.name", "accuracy", "--x algorithm.name: is .* in a run, not a number"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    results: Path, filters: list[str], x: str, y: str, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        own.draw(results, filters, x, y, ["recipe"])


@pytest.mark.parametrize(
    ("by", "says"),
    [("algorithm.nam", "Did you mean 'algorithm.name'"), ("epsilon_tight", "--by .* 9 values")],
)
def test_what_cannot_tell_runs_apart_is_one_sentence(tmp_path: Path, by: str, says: str) -> None:
    options = {"name": "dp_sgd"}
    save(tmp_path, *(make("a", 0, 0.5, e, algorithm=options) for e in range(1, 10)))
    with pytest.raises(UserError, match=says):
        own.draw(tmp_path, [], "seed", "accuracy", [by])


def test_the_command_writes_the_file_asked_for_or_all_formats(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["figure", "--results", str(results), "--x", "epsilon_tight", "--y", "accuracy"]
    out = results / "mine.pdf"
    for more in (["--out", str(out)], []):
        assert command(capsys, *words, *more, "--runs", "recipe=a", "seed=0")[0] == 0
    assert out.read_bytes().startswith(b"%PDF")
    assert sorted(path.suffix for path in (results / "figures").iterdir()) == [
        ".pdf",
        ".png",
        ".svg",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "needs PAPER/figN, or --runs"),
        (["--by", "seed"], "--by: applies to your own runs"),
        (["--x", "seed"], "--x: applies to your own runs"),
        (["--runs"], "--runs needs --x KEY and --y METRIC"),
        (["epsilon", "--runs", "--x", "seed"], "epsilon: is a paper's figure"),
        (["--runs", "--x", "seed", "--y", "accuracy", "--out", "a.bmp"], "a figure ends in .png"),
    ],
)
def test_words_that_do_not_fit_together_are_one_sentence(
    results: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in leave(["figure", "--results", str(results), *words], capsys)
