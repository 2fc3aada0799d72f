"""Figures: the papers', by name and the same file each time, and those of runs of your own."""

import math
import os
from dataclasses import replace
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.report.test_curves import FIGURE, build, filling, make_run
from tests.report.test_curves import results as curves_results
from tests.test_cli import leave
from tests.test_cli import run as command
from tests.test_records import record, save
from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.extras.figures import drawing, figures
from zdp_bench.extras.figures.reconstructions import ROWS, TABLE, choose_runs, read_example
from zdp_bench.report import papers

TABLES = Path(__file__).resolve().parents[3] / "results" / "tables"
OURS = [*filter(papers.is_figure, papers.available()), *papers.ours()]

curve_runs = curves_results  # a fixture of the table's tests


def lines(axes: Axes) -> dict[str, list[float]]:
    return {str(line.get_label()): list(line.get_ydata()) for line in axes.get_lines()}


def note_of(figure: Figure) -> str:
    (legend,) = figure.legends
    return legend.get_title().get_text().replace("\n", " ")


def test_a_figure_is_the_same_file_each_time(tmp_path: Path) -> None:
    made = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        figure = Figure(figsize=(2, 1))
        figure.subplots().set_title("tight ε")
        paths = drawing.write(figure, "p/fig1", folder)
        assert [path.name for path in paths] == ["p_fig1.png", "p_fig1.svg", "p_fig1.pdf"]
        assert len([*(folder / "figures").iterdir()]) == 3
        made.append([path.read_bytes() for path in paths])
    assert made[0] == made[1]
    assert "tight ε" in made[0][1].decode()


@pytest.mark.parametrize("name", [*OURS, "epsilon", "reconstructions"])
def test_a_figure_without_records_says_how_to_get_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="zdp-bench"):
        figures.draw(name, tmp_path / "results")


def test_the_papers_epsilons_stand_beside_the_tight_ones(tmp_path: Path) -> None:
    (tmp_path / "tables").symlink_to(TABLES)
    (axes,) = figures.draw("epsilon", tmp_path).axes
    assert len(axes.get_lines()) == len(papers.titles()) + 1
    undrawn = "claims not drawn: 15 with a tight ε of ∞, 1 printed as a bound"
    assert axes.get_title(loc="left").endswith(undrawn)
    with pytest.raises(UserError, match=r"'epsilom'.*'epsilon'"):
        figures.draw("epsilom", tmp_path)


def kept_table(folder: Path, kept: dict[str, tuple[float, ...]]) -> Path:
    rows = [
        {
            "row": row,
            "variant": "",
            "target_epsilon": x,
            "retained_gain": share,
            "metric": "accuracy",
            "unit": "patient",
            "values": "0.5",
        }
        for row, shares in kept.items()
        for x, share in zip((8, 3), shares, strict=True)
    ]
    (folder / "tables").mkdir()
    pd.DataFrame(rows).to_csv(folder / "tables" / "cost.csv", index=False)
    return folder


def test_rows_that_keep_little_have_a_panel_of_their_own(tmp_path: Path) -> None:
    kept = {"MNIST": (0.99, 0.97), "ICU": (0.9, 0.4), "MRI": (0.07, -0.05)}
    figure = figures.draw("cost", kept_table(tmp_path, kept))
    much, little = figure.axes
    assert much.get_title(loc="left") == "What privacy costs, at a tight ε of a patient"
    path = tmp_path / "tables" / "cost.csv"
    path.write_text(path.read_text().replace("patient", "image", 1))
    title = figures.draw("cost", tmp_path).axes[0].get_title(loc="left")
    assert title == "What privacy costs, at a tight ε of each row's unit"
    assert [label.get_text() for label in much.get_yticklabels()] == ["MNIST", "ICU"]
    assert [label.get_text() for label in little.get_yticklabels()] == ["MRI"]
    assert lines(little)["ε = 8"] == [0]
    assert much.get_xlim()[0] > 30
    assert little.get_xlim()[0] < -5


def test_a_row_whose_runs_diverged_is_named(tmp_path: Path) -> None:
    """It vanished without a word."""
    kept_table(tmp_path, {"MNIST": (0.99, 0.97), "MRI": (0.9, math.nan)})
    note = note_of(figures.draw("cost", tmp_path))
    assert note == "not drawn, because the share of the gain is undefined: MRI at 3"


def test_an_epsilon_looks_the_same_in_all_panels_and_in_the_legend(tmp_path: Path) -> None:
    """If the rows of a panel lacked the smallest ε, its others had the styles of smaller ones."""
    kept_table(tmp_path, {"MNIST": (0.99, 0.97), "MRI": (0.07, math.nan)})
    figure = figures.draw("cost", tmp_path)
    for of_panel in zip(*(axes.get_lines() for axes in figure.axes), strict=True):
        looks = [(line.get_label(), line.get_color(), line.get_marker()) for line in of_panel]
        assert looks[0] == looks[1]
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["non-private", "ε = 3", "ε = 8"]


def test_without_rows_that_keep_little_there_is_one_panel(tmp_path: Path) -> None:
    figure = figures.draw("cost", kept_table(tmp_path, {"MNIST": (0.99, 0.97)}))
    assert len(figure.axes) == 1


def test_a_long_name_of_a_row_stands_on_two_lines(tmp_path: Path) -> None:
    rows = ("Hippocampus, whole volumes", "CIFAR-10, learnt from generated pictures", "x" * 40)
    figure = figures.draw("cost", kept_table(tmp_path, dict.fromkeys(rows, (0.99, 0.97))))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [rows[0], "CIFAR-10,\nlearnt from generated pictures", rows[2]]


def test_reconstructions_are_of_one_data_set_network_by_network(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    pairs = [f"mri_recon_{of}{end}" for of in ("public", "tuned") for end in ("_nonprivate", "")]
    others = ("mri_recon_small_nonprivate", "mri_recon_small")  # the same settings, but other data
    for recipe in (*pairs, *others):
        (tmp_path / "runs" / recipe).symlink_to(TABLES.parent / "runs" / recipe)
    runs = choose_runs(records.read_all(tmp_path), tmp_path)
    assert [run.recipe for run in runs] == pairs
    own = [replace(run, data=replace(run.data, provenance="own")) for run in runs]
    assert choose_runs([*own, *runs], tmp_path) == runs, "a plug-in's own data come last"
    titles = [axes.get_title("center") for axes in figures.draw("reconstructions", tmp_path).axes]
    assert titles[:2] == ["reference", "zero-filled\nSSIM 0.601"]
    assert titles[5] == "harmonic\nprivate\nbatch 414\ntight ε 0.485\nSSIM 0.624"


def test_reconstructions_of_changed_data_are_not_compared(tmp_path: Path) -> None:
    """Runs were compared if their settings were equal, whatever data they had read."""
    images = dict.fromkeys(("reference", "zero_filled", "reconstruction"), np.ones((4, 5)))
    examples = []
    for seed, (row, digest) in enumerate(zip(ROWS * 2, ("old", "old", "new", "new"), strict=True)):
        claims = {"table": TABLE, "row": row, "variant": None}
        run = make(row, seed, 0.5, 1.0) | {"claims": claims}
        run["data"]["digest"] = digest
        run["measured"] = {"started_utc": f"2026-01-0{seed + 1}T00:00:00+00:00"}
        save(tmp_path, run)
        examples.append(records.folder(tmp_path, row, run["run"]) / "example.npz")
        np.savez(examples[-1], **images)  # type: ignore[arg-type]
    chosen = choose_runs(records.read_all(tmp_path), tmp_path)
    assert [(run.claims.row, run.data.digest) for run in chosen] == [(row, "new") for row in ROWS]
    titles = [axes.get_title("center") for axes in figures.draw("reconstructions", tmp_path).axes]
    assert titles[2].startswith("network\nnon-private"), "whatever a record lacks"
    for changed in (np.full((4, 5), 3.0), np.ones((5, 5))):
        np.savez(examples[-1], **dict.fromkeys(images, changed))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"example\.npz: its reference is another image than"):
            figures.draw("reconstructions", tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"x" * 99])
def test_a_damaged_slice_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "example.npz"
    images = {name: np.zeros((4, 5)) for name in ("reference", "zero_filled", "reconstruction")}
    images["reference"][1, 2] = 1
    np.savez(path, **images)  # type: ignore[arg-type]
    assert read_example(path).keys() == images.keys()
    np.savez(path, **images | {"reference": np.zeros(3)})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"example\.npz: has images of several shapes"):
        read_example(path)
    for image in (np.full((4, 5), "text"), np.zeros((0, 5))):
        np.savez(path, **dict.fromkeys(images, image))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"example\.npz: has images without numbers"):
            read_example(path)
    for wrong, says in (
        ({"reference": np.zeros((4, 5))}, "has a reference without a positive value"),
        ({"zero_filled": np.full((4, 5), math.nan)}, "has images with NaN or ∞"),
    ):
        np.savez(path, **images | wrong)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=rf"example\.npz: {says}"):
            read_example(path)
    np.savez_compressed(path, **images | {"zero_filled": np.zeros((1 << 12, 1 << 12))})
    with pytest.raises(UserError, match=r"example\.npz: unpacks to more than"):
        read_example(path)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"example\.npz: cannot be read"):
        read_example(path)


@pytest.mark.parametrize("name", [FIGURE, "epsilon", "cost"])
def test_a_table_that_is_no_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    """A FIFO hung."""
    path = tmp_path / "tables" / f"{name.replace('/', '_')}.csv"
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"\.csv: is missing or not a file"):
        figures.draw(name, tmp_path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UserError, match=r"\.csv: is larger than"):
        figures.draw(name, tmp_path)


@pytest.mark.parametrize("name", [FIGURE, "epsilon", "cost"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a,b\n1,2\n", b'"a\n', b"values\nx\n"])
def test_a_damaged_table_is_one_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / "tables" / f"{name.replace('/', '_')}.csv"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"\.csv: is damaged\. Write it again with `zdp-bench"):
        figures.draw(name, tmp_path)


OURS_COLUMNS = "row,variant,metric,unit,target_epsilon,retained_gain,values"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("epsilon", ["paper,printed,tight", "deepee_2021,>3,inf"]),
        ("cost", [OURS_COLUMNS, "MNIST,,accuracy,image,inf,1,0.9"]),  # the non-private run
        ("cost", [OURS_COLUMNS, "MNIST,,accuracy,image,3,,0.9"]),  # the private run
        ("complex", [OURS_COLUMNS]),
        ("complex", [""]),  # as `table complex --write` writes it without runs
        ("complex", [OURS_COLUMNS, "PhaseMNIST,,accuracy,image,3,,"]),
        ("complex", [OURS_COLUMNS, "PhaseMNIST,,accuracy,image,3,,nan"]),
    ],
)
def test_a_table_with_nothing_to_draw_is_one_sentence(
    tmp_path: Path, name: str, lines: list[str]
) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / f"{name}.csv").write_text("\n".join([*lines, ""]))
    with pytest.raises(UserError, match=f"^{name}: its table has nothing to draw"):
        figures.draw(name, tmp_path)


def test_a_number_that_is_none_is_damage(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    table = f"{OURS_COLUMNS}\nPhaseMNIST,,accuracy,image,three,,0.9\n"
    (tmp_path / "tables" / "complex.csv").write_text(table)
    with pytest.raises(UserError, match=r"complex\.csv: is damaged\. Write it again"):
        figures.draw("complex", tmp_path)


# ------------------------------------------------------------------------------- a paper's curves


def panel_of(results: Path) -> Axes:
    figure = figures.draw(FIGURE, results)
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == "b: σ = 0.03")


def test_a_papers_curves_are_drawn_from_its_table(curve_runs: Path) -> None:
    build(curve_runs).write(papers.file_of(FIGURE, curve_runs))
    axes = panel_of(curve_runs)
    assert lines(axes)["DP-BP"][:3] == pytest.approx([25, 35, 45])
    assert lines(axes)["non-private"][:3] == pytest.approx([70, 80, 90])
    assert len(axes.collections) == 1, "a band where there are two seeds, and only there"


def test_without_a_curve_as_published_nothing_is_drawn(tmp_path: Path) -> None:
    save(tmp_path, make_run("short", 1, 0.1))
    build(tmp_path, filling("short", "bp_10.24", variant="10 of 200 epochs")).write(
        papers.file_of(FIGURE, tmp_path)
    )
    with pytest.raises(UserError, match="as published"):
        figures.draw(FIGURE, tmp_path)


def test_a_papers_table_without_any_run_is_not_damaged(tmp_path: Path) -> None:
    """The sentence said so, and the command that it named wrote the same file."""
    build(tmp_path, filling("short", "bp_10.24")).write(papers.file_of(FIGURE, tmp_path))
    with pytest.raises(UserError, match="none of the paper's curves was run as published"):
        figures.draw(FIGURE, tmp_path)


@pytest.fixture
def sweep(curve_runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The figure over the learning rate: 0.1, 0.2 and 0.3; the hybrid lacks 0.2."""
    axes = papers.Axes("", "config.optimizer.lr", "learning rate")
    monkeypatch.setattr(papers, "axes", lambda figure: axes)
    save(curve_runs, *(make_run("hybrid", seed, 0.5) for seed in (1, 3)), make_run("bp", 3, 0.1))
    build(curve_runs).write(papers.file_of(FIGURE, curve_runs))
    return curve_runs


def test_a_papers_point_with_a_seed_that_diverged_is_named(sweep: Path) -> None:
    """It vanished without a word."""
    path = sweep / "tables" / "dp_dfa_2020_fig2.csv"
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    at = table.index[(table["row"] == "bp_10.24") & (table["x"] == "0.1")]
    table.loc[at, "values"] = "nan 50"
    table.to_csv(path, index=False)
    figure = figures.draw(FIGURE, sweep)
    reason = "not drawn, because a value of a run is undefined or ∞"
    assert f"{reason}: b: σ = 0.03, DP-BP at 0.1" in note_of(figure)
    table.loc[at, "metric"] = "psnr"
    table.to_csv(path, index=False)
    with pytest.raises(UserError, match=r"one panel cannot show test .* and test"):
        figures.draw(FIGURE, sweep)


def test_a_point_that_is_missing_is_a_gap(sweep: Path) -> None:
    curve = lines(panel_of(sweep))["DP-DFA hybrid"]
    assert curve[:3] == pytest.approx([80, math.nan, 80], nan_ok=True)


def test_the_papers_numbers_are_black_beside_ours(sweep: Path) -> None:
    path = sweep / "tables" / "dp_dfa_2020_fig2.csv"
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    at = table.index[table["row"] == "bp_10.24"][:2]
    table.loc[at, "paper"] = ["42.5", ">45"]
    table.loc[table["row"] == "bp_3.4133333", ["paper", "x"]] = ["50", "0.1"]  # was not run
    again = table.loc[at].assign(variant="ours", differs="ours")
    pd.concat([table, again]).to_csv(path, index=False)
    drawn = [line for axes in figures.draw(FIGURE, sweep).axes for line in axes.get_lines()]
    (printed,) = (line for line in drawn if line.get_label() == "printed")
    (ours,) = (line for line in drawn if line.get_label() == "DP-BP")
    assert list(printed.get_ydata())[:2] == pytest.approx([42.5, math.nan], nan_ok=True)
    assert (printed.get_color(), printed.get_marker()) == (drawing.PRINTED, ours.get_marker())


@pytest.mark.parametrize("column", ["variant", "on"])
def test_curves_that_differ_in_the_same_words_have_their_own_names(
    sweep: Path, column: str
) -> None:
    """Two variants of a data set were one curve: a traceback, or one zigzag line."""
    path = sweep / "tables" / "dp_dfa_2020_fig2.csv"
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    own = table[(table["row"] == "bp_10.24") & (table["values"] != "")]
    ours = [own.assign(differs="on films", **{column: name}) for name in ("films", "films, size=8")]
    pd.concat([table, *ours]).to_csv(path, index=False)
    curves = lines(panel_of(sweep))
    assert {"DP-BP", "DP-BP (on films; films)", "DP-BP (on films; films, size=8)"} <= curves.keys()
    pd.concat([table, *ours, ours[0]]).to_csv(path, index=False)
    with pytest.raises(UserError, match=r"DP-BP \(on films; films\): has two points at learning"):
        figures.draw(FIGURE, sweep)


def test_each_panel_of_a_paper_has_axes_that_fit_its_curves(tmp_path: Path) -> None:
    save(tmp_path, make_run("low", 1, 0.1), make_run("high", 1, 0.6))
    more = filling("low", "bp_10.24"), filling("high", "bp_3.4133333")
    build(tmp_path, *more).write(papers.file_of(FIGURE, tmp_path))
    panels = figures.draw(FIGURE, tmp_path).axes
    assert len(panels) == 2
    for axes in panels:
        (heights,) = lines(axes).values()
        low, high = axes.get_ylim()
        assert high - low <= 1.2 * (max(heights) - min(heights))


# ----------------------------------------------------------------------------------- runs of yours


def make(recipe: str, seed: int, value: float, epsilon: float, **config: Any) -> dict[str, Any]:
    name = sha256(f"{recipe} {seed} {config} {epsilon}".encode()).hexdigest()
    experiment = sha256(f"{recipe} {config} {epsilon}".encode()).hexdigest()
    run = record(recipe, seed, value, run=name, experiment=experiment)
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


def test_each_algorithm_is_a_curve_with_its_gap_and_the_non_private_run_a_line(
    results: Path,
) -> None:
    figure = figures.draw_runs(results, [], "epsilon_tight", "accuracy", ["algorithm"])
    (axes,) = figure.axes
    curves = lines(axes)
    assert set(curves) == {"dp_sgd", "gredp", "sgd"}
    assert curves["dp_sgd"] == pytest.approx([51.5, 52.5, 66.5])
    assert curves["gredp"] == pytest.approx([51, math.nan, 66], nan_ok=True)
    assert curves["sgd"] == pytest.approx([90, 90])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epsilon tight", "test accuracy, %")
    assert axes.get_xscale() == "log"
    (legend,) = figure.legends
    assert "n = 1 to 2" in legend.get_title().get_text()


@pytest.mark.parametrize(
    ("by", "says"),
    [
        (["algorithm", "algorithm"], "the mean over seeds (n = 1 to 2), with"),
        (["recipe"], "the mean over runs that differ in algorithm.name (n = 1 to 3), with"),
    ],
)
def test_the_legend_says_what_the_runs_of_a_point_differ_in(
    results: Path, by: list[str], says: str
) -> None:
    """Runs with other settings were said to be seeds."""
    figure = figures.draw_runs(results, [], "epsilon_tight", "accuracy", by)
    (legend,) = figure.legends
    assert says in legend.get_title().get_text()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_point_with_a_run_that_diverged_is_named_and_not_drawn(
    results: Path, value: float
) -> None:
    """The mean of the other runs was drawn, and a point of that run alone vanished."""
    algorithm = {"name": "dp_sgd", "target": 2}
    alone = {"name": "gredp", "target": 2}
    save(
        results,
        make("a", 2, value, 2, algorithm=algorithm),
        make("a", 0, value, 2, algorithm=alone),
    )
    figure = figures.draw_runs(results, [], "epsilon_tight", "accuracy", ["algorithm"])
    curves = lines(figure.axes[0])
    assert curves["dp_sgd"] == pytest.approx([51.5, math.nan, 66.5], nan_ok=True)
    assert curves["gredp"] == pytest.approx([51, math.nan, 66], nan_ok=True)
    reason = "not drawn, because a value of a run is undefined or ∞"
    assert note_of(figure).endswith(f"{reason}: dp_sgd at 2; gredp at 2")
    with pytest.raises(UserError, match="--y accuracy: no point has a finite number of each"):
        figures.draw_runs(
            results, ["algorithm.target=2"], "epsilon_tight", "accuracy", ["algorithm"]
        )


@pytest.mark.parametrize("others", [[], ["b"]])
def test_a_curve_of_which_only_the_dotted_line_is_drawn_is_named(others: list[str]) -> None:
    """The legend did not name it, and without another curve there was a traceback."""
    curves = [("a", 1.0, [math.nan]), ("a", math.inf, [0.9])]
    curves += [(other, 1.0, [0.4]) for other in others]
    curves += [(other, math.inf, [math.nan]) for other in others]
    points = pd.DataFrame(curves, columns=["curve", "x", "values"]).assign(panel="", y="accuracy")
    figure = drawing.draw_panels(points, "tight ε")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", *others]


def test_values_of_two_metrics_have_no_common_axis(results: Path) -> None:
    """Their mean was drawn."""
    axis = figures.draw_runs(results, [], "epsilon_tight", "value", ["algorithm"]).axes[0]
    assert axis.get_ylabel() == "test accuracy, %"
    run = make("a", 3, 30.0, 2, algorithm={"name": "dp_sgd", "target": 2})
    run |= {"metrics": {"psnr": 30.0}, "headline": {"name": "psnr", "value": 30.0}}
    save(results, run)
    with pytest.raises(
        UserError, match=r"^value: runs with metric accuracy and psnr have no common"
    ):
        figures.draw_runs(results, [], "epsilon_tight", "value", ["algorithm"])
    by = ["algorithm", "metric"]
    axis = figures.draw_runs(results, [], "epsilon_tight", "value", by).axes[0]
    assert axis.get_ylabel() == "value"
    assert lines(axis)["dp_sgd, accuracy"] == pytest.approx([0.515, 0.525, 0.665])


@pytest.mark.parametrize(("key", "value"), [("epsilon_of", "patient"), ("delta", 1e-3)])
def test_epsilons_of_different_kinds_have_no_common_axis(
    results: Path, key: str, value: Any
) -> None:
    """They were one curve, and even one point."""
    run = make("a", 3, 0.5, 2, algorithm={"name": "dp_sgd", "target": 2})
    run["privacy"][key] = value
    open_run = make("a", 3, 0.9, math.inf, algorithm={"name": "sgd", "target": None})
    open_run["privacy"][key] = value
    save(results, run, open_run)
    for x, y in (("epsilon_tight", "accuracy"), ("seed", "epsilon_tight")):
        with pytest.raises(UserError, match=f"^epsilon_tight: runs with {key} .* no common axis"):
            figures.draw_runs(results, ["algorithm=dp_sgd"], x, y, ["algorithm"])
    figures.draw_runs(results, ["algorithm=sgd"], "epsilon_tight", "accuracy", ["algorithm"])
    axes = figures.draw_runs(results, [], "epsilon_tight", "accuracy", ["algorithm", key]).axes[0]
    assert f"dp_sgd, {value}" in lines(axes)


def test_an_epsilon_is_rounded_up_as_in_tables(tmp_path: Path) -> None:
    """2.004 was drawn and labelled as 2.00."""
    save(tmp_path, *(make("a", 0, 0.5, epsilon) for epsilon in (2.004, 20.01, 1234.2)))
    axes = figures.draw_runs(tmp_path, [], "epsilon_tight", "accuracy", ["algorithm"]).axes[0]
    assert list(axes.get_lines()[0].get_xdata()) == [2.01, 20.1, 1235]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2.01", "20.1", "1,235"]


def test_runs_without_the_metric_need_no_x(results: Path) -> None:
    """They are not drawn, but the figure was refused."""
    run = make("other", 0, 0.5, 2, algorithm={"name": "dp_sgd"})
    run |= {"metrics": {"dice": 0.5}, "headline": {"name": "dice", "value": 0.5}}
    save(results, run)
    filters = ["algorithm=dp_sgd"]
    figure = figures.draw_runs(results, filters, "algorithm.target", "accuracy", ["algorithm"])
    assert lines(figure.axes[0])["dp_sgd"] == pytest.approx([51.5, 52.5, 66.5])


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    """Dollar signs began a formula, and a name that began with '_' was left out."""
    for number, name in enumerate(("cost $x_{ and $y^", "a $5 and $6 b", "_hidden")):
        save(tmp_path, make("a", number, 0.5, 1, n=number) | {"labels": {"name": name}})
        figure = figures.draw_runs(tmp_path, [f"name={name}"], "seed", "accuracy", ["name"])
        (legend,) = figure.legends
        (text,) = legend.get_texts()
        assert text.get_text().strip() == name
        drawing.save(figure, tmp_path / "a.svg")
        assert name in unescape((tmp_path / "a.svg").read_text(encoding="utf-8"))


def test_the_ticks_of_a_logarithmic_axis_are_plain_numbers(tmp_path: Path) -> None:
    save(tmp_path, *(make("a", 0, 0.5, 10.0**n) for n in range(drawing.MAX_MARKED + 2)))
    figure = figures.draw_runs(tmp_path, [], "epsilon_tight", "accuracy", ["algorithm"])
    drawing.save(figure, tmp_path / "a.svg")
    assert "$" not in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_a_curve_with_few_points_has_markers_among_long_ones(tmp_path: Path) -> None:
    """A single point was invisible."""
    count = drawing.MAX_MARKED + 1
    save(tmp_path, *(make("a", 0, 0.5, epsilon) for epsilon in range(1, count + 1)))
    save(tmp_path, make("b", 0, 0.5, 1.5))
    figure = figures.draw_runs(tmp_path, [], "epsilon_tight", "accuracy", ["recipe"])
    markers = {line.get_label(): line.get_marker() for line in figure.axes[0].get_lines()}
    assert markers == {"a": "", "b": drawing.MARKERS[1]}


def test_many_curves_look_different() -> None:
    """The ninth looked like the first."""
    styles = [drawing.curve_style(index) for index in range(32)]
    assert len({(style["color"], style["linestyle"]) for style in styles}) == 32
    assert len({(style["color"], style["marker"]) for style in styles}) == 32


def test_runs_of_one_seed_with_other_code_are_no_seeds(results: Path) -> None:
    again = make("a", 0, 0.51, 1, algorithm={"name": "dp_sgd", "target": 1}) | {"run": "f" * 64}
    save(results, again)
    figure = figures.draw_runs(results, [], "epsilon_tight", "accuracy", ["algorithm"])
    assert "runs that differ in code or starting weights (n = 1 to 3)" in note_of(figure)


def test_a_run_that_two_recipes_share_is_drawn_once(results: Path) -> None:
    copy = make("a", 0, 0.51, 1, algorithm={"name": "dp_sgd", "target": 1})
    assert copy["run"] in {run.run for run in records.read_all(results)}
    save(results, copy | {"recipe": "copy"})
    figure = figures.draw_runs(results, [], "epsilon_tight", "accuracy", ["algorithm"])
    (legend,) = figure.legends
    assert "n = 1 to 2" in legend.get_title().get_text()


@pytest.mark.parametrize(
    ("filters", "x", "y", "by", "says"),
    [
        (["recipe=none"], "seed", "accuracy", "recipe", "recipe=none: none of 9 records has it"),
        ([], "optimizer.lrr", "accuracy", "recipe", "Did you mean 'optimizer.lr'"),
        ([], "seed", "accuracies", "recipe", "Did you mean 'accuracy'"),
        ([], "algorithm.name", "accuracy", "recipe", "--x algorithm.name: one of these"),
        ([], "seed", "algorithm.name", "recipe", "--y algorithm.name: none of these"),
        ([], "seed", "accuracy", "algorithm.nam", "Did you mean 'algorithm.name'"),
        ([], "seed", "accuracy", "epsilon_tight", "--by .* 9 values"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    tmp_path: Path, filters: list[str], x: str, y: str, by: str, says: str
) -> None:
    options = {"name": "dp_sgd"}
    save(tmp_path, *(make("a", 0, 0.5, e, algorithm=options) for e in range(1, 10)))
    with pytest.raises(UserError, match=says):
        figures.draw_runs(tmp_path, filters, x, y, [by])


def test_the_command_writes_the_file_asked_for_or_all_formats(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["figure", "--results", str(results), "--x", "epsilon_tight", "--y", "accuracy"]
    out = results / "mine.pdf"
    for more in (["--out", str(out)], []):
        assert command(capsys, *words, *more, "--runs", "recipe=a", "seed=0")[0] == 0
    assert out.read_bytes().startswith(b"%PDF")
    made = {path.suffix for path in (results / "figures").iterdir()}
    assert made == {".pdf", ".png", ".svg"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--runs"], "needs PAPER/figN, or --runs"),
        (["--x", "seed", "--y", "accuracy"], "needs PAPER/figN, or --runs"),
        (["--runs", "--x", "seed", "--y", "accuracy", "--out", "a.bmp"], "must end with one of"),
        (["epsilon", "--out", "a.png"], "--x, --y, --by and --out need --runs"),
        (["epsilon", "--by", "seed"], "--x, --y, --by and --out need --runs"),
        (["epsilon", "--x", "seed"], "--x, --y, --by and --out need --runs"),
        (["epsilon", "--y", "accuracy"], "--x, --y, --by and --out need --runs"),
    ],
)
def test_words_that_do_not_fit_together_are_one_sentence(
    results: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in leave(["figure", "--results", str(results), *words], capsys)
