"""A figure's curves: points from runs of the recipe as it stands, an ε at each, what the paper prints, and the picture."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_records import record, save
from zdp_bench.errors import UserError
from zdp_bench.privacy.accountants import Claim, claimed_epsilon
from zdp_bench.registry import names
from zdp_bench.report import curves, figures, papers
from zdp_bench.report.tables import Filling

FIGURE = "dp_dfa_2020/fig2"
EPOCHS = 3


def filling(recipe: str, row: str, **more: Any) -> Filling:
    return replace(Filling(recipe, (), row, None, recipe.ljust(64, "e")), **more)


FILLINGS = [
    filling("bp", "bp_5.12"),
    filling("hybrid", "hybrid_5.12"),
    filling("plain", "nonprivate"),
    filling("dfa", "dfa_5.12", overrides=("algorithm.convolutions=dfa",)),
]


def run(
    recipe: str, seed: int, start: float, tight: float = 0.5, sigma: float = 5.12
) -> dict[str, Any]:
    """A run of three epochs of 117 steps, whose accuracy grows by 0.1 an epoch."""
    epochs = [
        {
            "epoch": e,
            "step": 117 * e,
            "epsilon_tight": tight * e,
            "accuracy": start + 0.1 * e,
            "loss": 1.0,
        }
        for e in range(1, EPOCHS + 1)
    ]
    made = record(recipe, seed, start + 0.1 * EPOCHS, epochs=epochs)
    sampling = {
        "scheme": "uniform",
        "sample_rate": 512 / 60_000,
        "expected_batch_size": 512,
        "records": 60_000,
    }
    claimed = {
        "claimed_by": "dp_dfa_2020",
        "noise_multiplier": sigma,
        "sampling": sampling,
        "epsilon_tight": tight * EPOCHS,
    }
    return made | {
        "privacy": made["privacy"] | claimed,
        "config": {"optimizer": {"lr": 0.1 * seed}},
    }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    save(
        tmp_path,
        run("bp", 1, 0.1),
        run("bp", 2, 0.2),
        run("hybrid", 1, 0.5),
        run("plain", 1, 0.6, math.inf, 0.0),
    )
    return tmp_path


def built(results: Path) -> curves.Curves:
    return curves.build(FIGURE, results, FILLINGS)


def test_an_epsilon_that_is_claimed_and_not_there_is_shown(tmp_path: Path) -> None:
    """As GReDP's with real noise: it is no non-private curve, and its ∞ stands beside what it claims."""
    save(tmp_path, run("bp", 1, 0.1, tight=math.inf), run("plain", 1, 0.6, math.inf, 0.0))
    head, lines = curves.cells(built(tmp_path), "b: σ = 0.03")
    assert head == ["epoch", "ε claimed", "ε tight", "DP-BP, %", "non-private, %"]
    assert [line[2] for line in lines] == ["∞"] * EPOCHS
    assert all(0 < float(line[1]) < 10 for line in lines)


def test_points_are_means_over_seeds_at_every_epoch(results: Path) -> None:
    of = built(results)
    head, lines = curves.cells(of, "b: σ = 0.03")
    assert head == [
        "epoch",
        "ε claimed",
        "ε tight",
        "DP-BP, %",
        "DP-DFA hybrid, %",
        "non-private, %",
    ]
    assert [line[0] for line in lines] == ["1", "2", "3"]
    assert lines[1][2:] == ["1", "35.00 ± 7.07", "70.00", "80.00"]


def test_every_point_claims_what_the_papers_accountant_would(results: Path) -> None:
    bp = next(curve for curve in built(results).curves if curve.points and curve.label == "DP-BP")
    for point in bp.points:
        epochs = int(point.x)
        claim = Claim(5.12, 512 / 60_000, 117 * epochs, 1e-5, 60_000, epochs)
        assert point.epsilon_claimed == claimed_epsilon("dp_dfa_2020", claim)


def test_curves_that_spend_differently_have_their_own_epsilon(results: Path) -> None:
    save(results, run("dfa", 1, 0.3, tight=0.7))
    head, lines = curves.cells(built(results), "b: σ = 0.03")
    assert head[1:5] == [
        "ε claimed (DP-BP, DP-DFA hybrid)",
        "ε tight (DP-BP, DP-DFA hybrid)",
        "ε claimed (DP-DFA)",
        "ε tight (DP-DFA)",
    ]
    assert (lines[2][2], lines[2][4]) == ("1.5", "2.1")


def test_the_non_private_curve_stands_in_every_panel_and_in_no_panel_of_its_own(
    results: Path,
) -> None:
    of = built(results)
    assert of.panels == ["a: σ = 0.01", "b: σ = 0.03", "c: σ = 0.05"]
    for panel in of.panels:
        assert "non-private" in [curve.label for curve in of.of_panel(panel)]
    assert [curve.label for curve in of.of_panel("a: σ = 0.01") if curve.points] == ["non-private"]


def test_what_the_text_prints_is_shown_and_what_was_not_run_is_named(results: Path) -> None:
    markdown = curves.as_markdown(built(results))
    assert (
        "ε printed: 1.28 at epoch 50, 1.82 at epoch 100, 2.25 at epoch 150, 2.61 at epoch 200"
        in markdown
    )
    assert "Not run: `zdp-bench run recipe=dfa algorithm.convolutions=dfa`." in markdown
    assert "what it only draws is left out" in markdown
    more = [*FILLINGS, filling("dfa", "dfa_8.5333333")]
    assert (
        "Not run: 2 of the curves that `zdp-bench run -m recipe=dfa` makes."
        in curves.build(FIGURE, results, more).notes
    )
    shown = list(curves.as_rich(built(results)))
    assert sum(isinstance(part, str) and "ε printed" in part for part in shown) == 3


def test_only_runs_of_the_recipe_as_it_stands_make_points(results: Path) -> None:
    save(results, run("hybrid", 2, 0.0) | {"experiment": "x" * 64})
    hybrid = next(
        curve for curve in built(results).curves if curve.points and "hybrid" in curve.label
    )
    assert [len(point.values) for point in hybrid.points] == [1, 1, 1]


def test_other_data_is_another_curve(results: Path) -> None:
    moved = filling("hybrid", "hybrid_5.12", digest="m" * 64, on="mnist")
    save(results, run("hybrid", 5, 0.4) | {"experiment": "m" * 64, "run": "m" * 64})
    of = curves.build(FIGURE, results, [*FILLINGS, moved])
    head, lines = curves.cells(of, "b: σ = 0.03")
    assert "DP-DFA hybrid (on mnist), %" in head
    assert lines[0][head.index("DP-DFA hybrid, %")] == "60.00"


def test_a_curve_over_a_setting_takes_each_runs_last_metric(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_rates = papers.Axes("", "config.optimizer.lr", "learning rate")
    monkeypatch.setattr(papers, "axes", lambda figure: over_rates)
    bp = next(curve for curve in built(results).curves if curve.points and curve.label == "DP-BP")
    assert [(point.x, round(point.values[0], 6)) for point in bp.points] == [
        (0.1, 40.0),
        (0.2, 50.0),
    ]
    assert bp.points[0].epsilon_tight == 1.5


def test_numbers_of_the_text_stand_beside_ours(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = papers.Reference(
        "P", "fig2", "bp_5.12", "DP-BP", "accuracy at 2", "41.5", "%", "b: σ = 0.03"
    )
    numbers = [*papers.reference(FIGURE), printed]
    monkeypatch.setattr(papers, "reference", lambda table: numbers)
    head, lines = curves.cells(built(results), "b: σ = 0.03")
    assert [line[head.index("DP-BP, paper, %")] for line in lines] == ["", "41.5", ""]


def test_the_csv_holds_every_point_and_the_figure_draws_them(results: Path) -> None:
    with pytest.raises(
        UserError, match=r"fig2\.csv: not there\. Make it with `zdp-bench table dp_dfa_2020/fig2"
    ):
        figures.draw(FIGURE, results, results)
    paths = curves.write(built(results), results)
    assert [path.name for path in paths] == ["dp_dfa_2020_fig2.md", "dp_dfa_2020_fig2.csv"]
    lines = list(csv.DictReader(io.StringIO(paths[1].read_text())))
    assert len(lines) == 3 * EPOCHS
    assert lines[0]["values"] == "20 30"
    figure = figures.draw(FIGURE, results, results)
    by_title = {axes.get_title(loc="left"): axes for axes in figure.axes}
    panel = by_title["b: σ = 0.03"]
    drawn = {line.get_label(): list(line.get_ydata()) for line in panel.get_lines()}
    assert drawn["DP-BP"] == pytest.approx([25, 35, 45])
    assert drawn["non-private"] == pytest.approx([70, 80, 90])
    assert len(panel.collections) == 1  # a band where there are two seeds, and only there


def test_a_table_without_a_point_cannot_be_drawn(tmp_path: Path) -> None:
    curves.write(built(tmp_path), tmp_path)
    with pytest.raises(UserError, match="holds no point yet"):
        figures.draw(FIGURE, tmp_path, tmp_path)


def test_every_figure_with_reference_numbers_is_drawn_has_an_axis_and_recipes() -> None:
    known = {name for name in papers.available() if papers.is_figure(name)}
    assert known <= set(names("figure"))
    for name in known:
        assert papers.recipes_of(name)
        assert papers.axes(name).label
