"""A figure's curves: points from runs, an ε at each, and what the paper prints."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_records import record, save
from zdp_bench import records
from zdp_bench.privacy.accountants import Claim, claimed_epsilon
from zdp_bench.records.record import Epoch
from zdp_bench.report import papers, tables
from zdp_bench.report.cells import Filling, privacy_after
from zdp_bench.report.sheet import Sheet

FIGURE = "dp_dfa_2020/fig2"
PANEL = "b: σ = 0.03"
EPOCHS = 3


def filling(recipe: str, row: str, **more: Any) -> Filling:
    return replace(Filling(recipe, (), row, None, recipe.ljust(64, "e")), **more)


FILLINGS = [
    filling("bp", "bp_10.24"),
    filling("hybrid", "hybrid_10.24"),
    filling("plain", "nonprivate"),
    filling("dfa", "dfa_10.24", overrides=("algorithm.convolutions=dfa",)),
]


def make_run(
    recipe: str, seed: int, start: float, tight: float = 0.5, sigma: float = 10.24
) -> dict[str, Any]:
    """Return a run of three epochs of 117 steps, whose accuracy grows by 0.1 an epoch."""
    epochs = [
        {"epoch": e, "step": 117 * e, "epsilon_tight": tight * e, "accuracy": start + 0.1 * e}
        for e in range(1, EPOCHS + 1)
    ]
    run = record(recipe, seed, start + 0.1 * EPOCHS, epochs=epochs)
    run["config"] = {"optimizer": {"lr": 0.1 * seed}}
    run["data"]["name"] = "fashion_mnist"
    run["privacy"] |= {
        "claimed_by": "dp_dfa_2020",
        "noise_multiplier": sigma,
        "epsilon_tight": tight * EPOCHS,
        "sampling": {
            "scheme": "uniform",
            "sample_rate": 512 / 60_000,
            "expected_batch_size": 512,
            "records": 60_000,
        },
    }
    return run


def test_what_a_record_does_not_state_is_not_a_number_in_a_curve() -> None:
    run, again = (records.Record.of(record("a")) for _ in range(2))
    assert run == again  # since Python 3.13, two records with the same NaN are not equal
    privacy = privacy_after(run.privacy, Epoch(1, 7, {}))
    assert math.isnan(privacy.epsilon_claimed)
    assert math.isnan(privacy.epsilon_tight)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    plain = make_run("plain", 1, 0.6, math.inf, 0.0)
    seeds = make_run("bp", 1, 0.1), make_run("bp", 2, 0.2)
    save(tmp_path, *seeds, make_run("hybrid", 1, 0.5), plain)
    return tmp_path


def build(results: Path, *more: Filling) -> Sheet:
    return tables.build(FIGURE, results, [*FILLINGS, *more])


def points(results: Path, curve: str, *more: Filling) -> list[dict[str, str]]:
    """The points of a curve, as shown."""
    sheet = build(results, *more)
    shown = [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]
    return [line for line in shown if line["row"] == f"{PANEL}: {curve}" and line["ours"]]


def test_points_are_means_over_seeds_at_every_epoch(results: Path) -> None:
    curve = points(results, "DP-BP")
    assert [line["epoch"] for line in curve] == ["1", "2", "3"]
    assert [curve[1][c] for c in ("ours", "ε tight", "status")] == [
        "35.00 ± 7.07 % (n = 2)",
        "1",
        "as published",
    ]
    assert [line["command"] for line in curve] == ["`zdp-bench run recipe=bp`", "", ""]


@pytest.mark.parametrize("numbers", [[EPOCHS], [None] * EPOCHS])
def test_a_run_without_metrics_of_each_epoch_is_left_out_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], numbers: list[int | None]
) -> None:
    run = make_run("bp", 1, 0.6)
    last = run["epochs"][-1]
    run["epochs"] = [last | {"epoch": number} for number in numbers]
    save(tmp_path, run)
    records.warn_left_out.cache_clear()
    lines = tables.build(FIGURE, tmp_path, FILLINGS).numbers
    assert {line["status"] for line in lines} <= {"not run", ""}
    assert "has no accuracy after each epoch" in capsys.readouterr().err


def test_of_many_epochs_a_page_shows_a_dozen_and_the_csv_all(tmp_path: Path) -> None:
    run = make_run("bp", 1, 0.1)
    run["epochs"] = [run["epochs"][0] | {"epoch": e, "step": 117 * e} for e in range(1, 61)]
    save(tmp_path, run)
    shown = [line["epoch"] for line in points(tmp_path, "DP-BP")]
    assert {"1", "50", "60"} <= set(shown), "the paper's text names an ε at epoch 50"
    assert len(shown) <= 14
    of_curve = [line for line in build(tmp_path).numbers if line.get("runs")]
    assert len(of_curve) == 60


def test_a_claimed_epsilon_that_does_not_hold_is_shown_beside_its_infinity(tmp_path: Path) -> None:
    """As GReDP's with real noise."""
    save(tmp_path, make_run("bp", 1, 0.1, tight=math.inf))
    curve = points(tmp_path, "DP-BP")
    assert [line["ε tight"] for line in curve] == ["∞"] * EPOCHS
    assert all(0 < float(line["ε claimed"]) < 10 for line in curve)


def test_every_point_claims_what_the_papers_accountant_would(results: Path) -> None:
    lines = build(results).numbers
    of_curve = [line for line in lines if line["row"] == "bp_10.24" and line["n"]]
    for point in of_curve:
        epochs = int(str(point["x"]))
        claim = Claim(10.24, 512 / 60_000, 117 * epochs, 1e-5, 60_000, epochs)
        assert point["epsilon_claimed"] == claimed_epsilon("dp_dfa_2020", claim)


def test_numbers_of_the_text_stand_beside_ours(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = papers.reference(FIGURE)
    for x in (2, 9):  # of which one was not run
        row = ("P", "fig2", "bp_10.24", "DP-BP", f"accuracy at {x}", "41.5", "%", PANEL)
        numbers = [*numbers, papers.Reference(*row)]
    monkeypatch.setattr(papers, "reference", lambda table: numbers)
    assert [line["paper"] for line in points(results, "DP-BP")] == ["", "41.5 %", ""]
    printed = [line["x"] for line in build(results).numbers if line["paper"] == "41.5"]
    assert printed == ["2", "9"]


def test_every_figure_of_a_paper_has_axes_and_recipes() -> None:
    for name in filter(papers.is_figure, papers.available()):
        assert papers.recipes_of(name)
        assert papers.axes(name).label
