"""What figures show: a paper's curves, a table of ours against ε, printed ε, and your own runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zdp_bench import records
from zdp_bench.errors import UserError, unknown
from zdp_bench.extras.figures import drawing
from zdp_bench.extras.figures.reconstructions import draw_reconstructions
from zdp_bench.report import names, papers, results
from zdp_bench.tasks.metric import describe

HALF = 50  # percent of the gain
SPREAD = 8  # of your runs, a positive x axis over this factor or more is logarithmic


def draw(name: str, folder: Path) -> Figure:
    """Draw a figure by name: PAPER/figN, a table of ours, 'epsilon' or 'reconstructions'."""
    drawings: dict[str, Callable[[str, Path], Figure]] = {
        **dict.fromkeys(filter(papers.is_figure, papers.available()), draw_paper),
        **dict.fromkeys(papers.ours(), draw_ours),
        "epsilon": draw_epsilon,
        "reconstructions": draw_reconstructions,
    }
    if name not in drawings:
        raise unknown("figure", name, drawings)
    with mpl.rc_context(drawing.STYLE):
        return drawings[name](name, folder)


def read_table(name: str, folder: Path, command: str) -> pd.DataFrame:
    """Return the words of a CSV of `results/tables`; the lists of `values` as numbers."""
    path = folder / "tables" / f"{name.replace('/', '_')}.csv"
    if not path.exists():
        raise UserError(f"{path}: not found. Create it with `{command} --results {folder}`.")
    table = pd.read_csv(path, keep_default_na=False, dtype=str)
    if "values" in table:
        table["values"] = [[float(word) for word in of.split()] for of in table["values"]]
    return table


def draw_paper(name: str, folder: Path) -> Figure:
    """Draw the curves of PAPER/figN that were run; what the paper's text gives of them is black."""
    points = read_table(name, folder, f"zdp-bench table {name} --write")
    points = points[points["x"] != ""].copy()
    if not (points["status"] == "as published").any():
        raise UserError(
            f"{name}: none of the paper's curves was run as published, so nothing is drawn as its "
            f"figure. `zdp-bench table {name}` shows what was run and what it lacks."
        )
    spent = ["epsilon_claimed", "epsilon_tight"]
    points["x"] = points["x"].astype(float)
    points[spent] = points[spent].apply(pd.to_numeric)
    least = points.groupby(["label", "differs"])[spent].transform("min")
    unbounded = (least["epsilon_claimed"] < math.inf) & (least["epsilon_tight"] == math.inf)
    points["curve"] = points["label"] + points["differs"].map(lambda of: of and f" ({of})")
    points["curve"] += unbounded.map({True: ", tight ε = ∞", False: ""})
    points["printed"] = pd.to_numeric(points["paper"], errors="coerce")  # '>45' is no point
    points.loc[points["variant"] + points["on"] != "", "printed"] = math.nan  # said at the paper's
    points["y"] = describe(points["metric"].iloc[0]).axis
    ran = (points["n"] != "0").groupby([points["panel"], points["label"]]).transform("any")
    points = points[ran & ((points["n"] != "0") | points["printed"].notna())]  # no ε alone
    of = papers.axes(name)
    shown = [
        points[[panel.endswith(part) for part in points["panel"]]].assign(panel=panel)
        for panel in panels_of([*points["panel"]])
    ]
    return drawing.draw_panels(pd.concat(shown), of.label, columns=of.columns or 4, log=of.log)


def panels_of(parts: Sequence[str]) -> list[str]:
    """Return the distinct names that no other name ends with; the rest are parts of panels."""
    distinct = list(dict.fromkeys(parts))
    return [n for n in distinct if not any(o != n and o.endswith(n) for o in distinct)]


def draw_ours(name: str, folder: Path) -> Figure:
    """Draw a table of our own: what is kept, a line for each row, or a panel for each against ε."""
    points = read_table(name, folder, f"zdp-bench table {name} --write")
    points["x"] = points["target_epsilon"].astype(float)
    if papers.ours()[name].get("kept"):
        return draw_kept(points[(points["x"] < math.inf) & (points["kept"] != "")])
    metrics = [describe(name) for name in points["metric"]]
    of_each = zip(metrics, points["values"], strict=True)
    points["values"] = [[metric.scale * x for x in values] for metric, values in of_each]
    points["y"] = [metric.axis for metric in metrics]
    points["curve"] = points["variant"].map(names.algorithm)
    return drawing.draw_panels(points.assign(panel=points["row"]), "tight ε", log=True)


def draw_kept(points: pd.DataFrame) -> Figure:
    """Draw a line for each row of a table, with a mark at what is kept at each ε.

    Rows that keep less than half at every ε have a panel of their own, so that the others use
    their whole axis.
    """
    points = points.assign(kept=100 * points["kept"].astype(float))
    keeps_half = points.groupby("row")["kept"].transform("max") >= HALF
    panels = [panel for panel in (points[keeps_half], points[~keeps_half]) if len(panel)]
    heights = [panel["row"].nunique() + 1 for panel in panels]
    figure = Figure(figsize=(drawing.WIDTH, 1 + 0.28 * sum(heights)))
    grid = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _draw_rows(axes, panel)
    grid[0, 0].set_title("What privacy costs, at a tight ε")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    grid[-1, 0].set_xlabel("share of the non-private gain kept, %")
    return figure


def _draw_rows(axes: Axes, points: pd.DataFrame) -> None:
    rows = [*dict.fromkeys(points["row"])]
    points = points.assign(at=points["row"].map(rows.index))
    least = points.groupby("at")["kept"].min()
    axes.axvline(100, color="0.4", linewidth=1, linestyle="-", label="non-private")
    axes.hlines(least.index, least, 100, color="0.8", linewidth=1)
    for place, (x, of) in enumerate(points.groupby("x")):
        style = drawing.curve_style(place) | {"linestyle": "none"}
        axes.plot(of["kept"], of["at"], label=f"ε = {x:g}", **style)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)


def draw_epsilon(name: str, folder: Path) -> Figure:
    """Draw every finite printed ε of the five papers against the tight ε of its mechanism."""
    claims = read_table(name, folder, "zdp-bench epsilon --write")
    for column in ("printed", "tight"):
        claims[column] = pd.to_numeric(claims[column], errors="coerce")
    finite = claims[(claims["printed"] > 0) & claims["tight"].between(0, math.inf, "neither")]
    figure = Figure(figsize=(drawing.WIDTH, 0.75 * drawing.WIDTH))
    axes = figure.subplots()
    for marker, (paper, points) in zip(drawing.MARKERS, finite.groupby("paper"), strict=False):
        label = papers.titles().get(str(paper), str(paper))
        axes.plot(points["printed"], points["tight"], marker, label=label, linestyle="none")
    both = finite[["printed", "tight"]].to_numpy()
    ends = [both.min() / 1.5, both.max() * 1.5]
    axes.plot(ends, ends, color="0.4", linewidth=1, linestyle="-", label="as printed")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="ε as the paper prints it", ylabel="ε tight, of the mechanism as described")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    # Said here, where no point can lie.
    unbounded = int((claims["tight"] == math.inf).sum())
    not_drawn = f"\nnot drawn: {unbounded} claims whose tight ε is ∞" if unbounded else ""
    axes.set_title(f"Above the line, a run has spent more than its paper says{not_drawn}")
    axes.legend(loc="lower right")
    return figure


def draw_runs(folder: Path, filters: list[str], x: str, metric: str, by: Sequence[str]) -> Figure:
    """Draw the metric of the records that pass every filter, a curve for each value of `by`.

    `x` and `by` are columns of records.csv or keys of the configuration.
    """
    frame = results.keep(results.read_frame(records.read_all(folder))[0], filters)
    x, metric = results.find(x, frame, "--x"), results.find(metric, frame, "--y")
    by = [results.find(one, frame, "--by") for one in by]
    y = pd.to_numeric(frame[metric], errors="coerce").replace([math.inf, -math.inf], math.nan)
    numbers = pd.to_numeric(frame[x], errors="coerce")
    if y.isna().all() or numbers.isna().any():
        in_y, in_x = f"--y {metric}: is a finite number in none", f"--x {x}: is no number in one"
        wrong = in_y if y.isna().all() else in_x
        raise UserError(f"{wrong} of these runs. Choose other runs: --runs COLUMN=VALUE.")
    if x.startswith("epsilon_"):  # noise that is calibrated to an ε hits it to three digits
        numbers = numbers.map(lambda number: float(f"{number:.3g}"))
    curve = frame[by].map(str).agg(", ".join, axis=1)
    drawn = pd.DataFrame({"x": numbers, "y": y * describe(metric).scale, "curve": curve}).dropna()
    if (many := drawn["curve"].nunique()) > len(drawing.COLOURS):
        raise UserError(
            f"--by {','.join(by)}: has {many} values, and a figure shows {len(drawing.COLOURS)}. "
            "Choose another column, or draw fewer runs: --runs COLUMN=VALUE."
        )
    points = drawn.groupby(["curve", "x"])["y"].agg(list).rename("values").reset_index()
    finite = points.loc[points["x"] < math.inf, "x"]
    log = bool(finite.min() > 0 and finite.max() >= SPREAD * finite.min())
    with mpl.rc_context(drawing.STYLE):
        points = points.assign(panel="", y=describe(metric).axis)
        return drawing.draw_panels(points, x.replace("_", " "), log=log)
