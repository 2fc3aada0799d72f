"""Draw a paper's curves, one of our tables against ε, the printed ε, or your runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zdp_bench import records
from zdp_bench.errors import UserError, unknown
from zdp_bench.extras.figures import drawing
from zdp_bench.extras.figures.reconstructions import draw_reconstructions
from zdp_bench.foreign_files import MAX_TABLE, exists, read_bytes, reading
from zdp_bench.privacy.statement import round_epsilon, show_epsilon
from zdp_bench.report import names, papers, results
from zdp_bench.report.number_format import name_one
from zdp_bench.tasks.metric import describe

NO_ROWS = b"\n"  # the CSV of a table without rows
HALF = 50  # percent of the gain
ROW_HEIGHT = 0.34  # inches
MAX_LABEL = 30  # characters of a row's label in one line
MAX_DIFFERING = 3  # settings that a legend names
LOG_RATIO = 8  # the x axis is logarithmic if max / min is at least this, in `draw_runs`


def draw(name: str, folder: Path) -> Figure:
    """Draw a figure by name.

    Args:
        name: PAPER/figN, the name of one of our tables, 'epsilon' or 'reconstructions'.
        folder: the results folder.

    Raises:
        UserError: the name is unknown, or the figure's data is missing.
    """
    drawings: dict[str, Callable[[str, Path], Figure]] = {
        "epsilon": draw_epsilon,
        "reconstructions": draw_reconstructions,
    }
    for paper_figure in filter(papers.is_figure, papers.available()):
        drawings[paper_figure] = draw_paper
    for table in papers.ours():
        drawings[table] = draw_ours
    if name not in drawings:
        raise unknown("figure", name, drawings)
    with mpl.rc_context(drawing.STYLE):
        return drawings[name](name, folder)


def read_table(
    name: str,
    folder: Path,
    command: str,
    columns: Collection[str],
    numbers: Collection[str] = (),
) -> pd.DataFrame:
    """Return a CSV file in `results/tables` as text, with `values` as lists of numbers.

    Args:
        name: the name of the table.
        folder: the results folder.
        command: the command that creates the file, for the error message.
        columns: columns that the file must have.
        numbers: other columns, which are read as numbers; NaN for an empty field.

    Raises:
        UserError: there is no such file, or it is damaged.
    """
    path = folder / "tables" / f"{name.replace('/', '_')}.csv"
    if not exists(path):
        raise UserError(f"{path}: not found. Create it with `{command} --results {folder}`.")
    with reading(path):
        content = read_bytes(path, MAX_TABLE)
    try:
        table = pd.DataFrame()
        if content != NO_ROWS:
            table = pd.read_csv(BytesIO(content), keep_default_na=False, dtype=str)
        if table.empty or ("n" in table and (table["n"] == "0").all()):
            # A table without any run is written without the columns of runs.
            every_column = dict.fromkeys([*table.columns, *columns, *numbers])
            table = table.reindex(columns=list(every_column), fill_value="")
        if "values" in table:
            table["values"] = [list(map(float, words.split())) for words in table["values"]]
        table[[*numbers]] = table[[*numbers]].apply(pd.to_numeric)
        is_whole = set(columns) <= {*table.columns}
    except (ValueError, KeyError):  # of pandas or float
        is_whole = False
    if not is_whole:
        raise UserError(f"{path}: is damaged. Write it again with `{command} --results {folder}`.")
    return table


def select(points: pd.DataFrame, is_drawn: pd.Series, name: str) -> pd.DataFrame:
    """Return the points that a figure draws; reject a figure without any."""
    require_any(is_drawn, name)
    return points[is_drawn].copy()


def require_any(is_drawn: pd.Series, name: str) -> None:
    """Reject a figure without a point."""
    if not is_drawn.any():
        raise UserError(
            f"{name}: its table has nothing to draw; carry out more of its runs, private and "
            "non-private, and write it again with `zdp-bench table`."
        )


def was_run(points: pd.DataFrame) -> pd.Series:
    """Return for each point whether it has values."""
    return points["values"].map(bool).astype(bool)


def has_number(points: pd.DataFrame) -> pd.Series:
    """Return for each point whether it has values and all are finite, so that they have a mean."""
    return was_run(points) & points["values"].map(lambda values: all(map(math.isfinite, values)))


def draw_paper(name: str, folder: Path) -> Figure:
    """Draw the curves of PAPER/figN that were run, and the numbers that the paper prints."""
    columns = ("panel", "label", "differs", "metric", "paper", "variant", "on", "status", "values")
    numbers = ("x", "epsilon_claimed", "epsilon_tight")
    command = f"zdp-bench table {name} --write"
    points = read_table(name, folder, command, columns, numbers)
    points = select(points, points["x"].notna(), name)
    if not (points["status"] == "as published").any():
        raise UserError(
            f"{name}: none of the paper's curves was run as published, so there is no figure. "
            f"`zdp-bench table {name}` shows what was run, and how it differs."
        )
    points["curve"] = _label_curves(points)
    points["y"] = [describe(metric).axis for metric in points["metric"]]
    points["printed"] = pd.to_numeric(points["paper"], errors="coerce")  # NaN for text like '>45'
    # Rows with a variant or on other data are ours; the paper's numbers belong to its own rows.
    is_ours = points["variant"] + points["on"] != ""
    points.loc[is_ours, "printed"] = math.nan
    has_runs = was_run(points)
    has_curve = has_runs.groupby([points["panel"], points["label"]]).transform("any")
    require_any(has_number(points), name)
    points = points[has_curve & (has_runs | points["printed"].notna())]
    panels = []
    for panel in panels_of(list(points["panel"])):
        is_part = points["panel"].map(panel.endswith)
        panels.append(points[is_part].assign(panel=panel))
    axes = papers.axes(name)
    return drawing.draw_panels(
        pd.concat(panels),
        axes.label,
        columns=axes.columns or 4,
        log=axes.log,
    )


def _label_curves(points: pd.DataFrame) -> pd.Series:
    """Return the label of each point's curve.

    It states how the runs differ from the paper, and whether their tight ε is ∞ although the
    claimed ε is finite. Two variants, or data sets, that differ in the same words have their names.
    """
    epsilons = points[["epsilon_claimed", "epsilon_tight"]]
    of_curve = [points[column] for column in ("label", "differs", "variant", "on")]
    smallest = epsilons.groupby(of_curve).transform("min")
    is_finite = smallest["epsilon_claimed"] < math.inf
    is_unbounded = is_finite & (smallest["epsilon_tight"] == math.inf)
    kinds = points.groupby(["label", "differs"])[["variant", "on"]].transform("nunique")
    differs = points["differs"]
    for column in ("variant", "on"):
        name = ("; " + points[column]).where(kinds[column] > 1, "")
        differs = differs + name.where(points[column] != "", "")
    differs = differs.str.removeprefix("; ").map(lambda words: f" ({words})" if words else "")
    unbounded = is_unbounded.map({True: ", tight ε = ∞", False: ""})
    return points["label"] + differs + unbounded


def panels_of(parts: Sequence[str]) -> list[str]:
    """Return the names of panels: the distinct names that are not the end of a longer name.

    The points of other names are drawn in every panel whose name ends with theirs.
    """
    distinct = list(dict.fromkeys(parts))
    panels = []
    for name in distinct:
        longer = [other for other in distinct if other.endswith(name) and other != name]
        if not longer:
            panels.append(name)
    return panels


def draw_ours(name: str, folder: Path) -> Figure:
    """Draw one of our tables: the gain that each row retains, or a panel for each row against ε."""
    columns = ("row", "variant", "metric", "unit", "values")
    numbers = ("target_epsilon", "retained_gain")
    points = read_table(name, folder, f"zdp-bench table {name} --write", columns, numbers)
    points["x"] = points["target_epsilon"]
    layout = papers.ours()[name]
    if layout.get("retained_gain"):
        is_private = points["x"] < math.inf
        has_gain = is_private & points["retained_gain"].notna()
        figure = draw_retained_gains(select(points, has_gain, name), layout["title"])
        undrawn = points[is_private & was_run(points) & ~has_gain]
        undrawn = undrawn.assign(panel=undrawn["row"], curve=undrawn["variant"])
        if len(undrawn):
            reason = "the share of the gain is undefined"
            note = drawing.name_undrawn(undrawn, reason, show_epsilon)
            figure.legends[0].set_title(note)
        return figure
    has_x = points["x"].notna()
    require_any(has_number(points) & has_x, name)
    points = points[was_run(points) & has_x].copy()
    metrics = points["metric"].map(describe)
    points["values"] = [
        [metric.scale * value for value in values]
        for metric, values in zip(metrics, points["values"], strict=True)
    ]
    points["y"] = [metric.axis for metric in metrics]
    points["curve"] = points["variant"].map(names.variant)
    points["panel"] = points["row"]
    return drawing.draw_panels(points, "tight ε", log=True, show_x=show_epsilon)


def draw_retained_gains(points: pd.DataFrame, title: str) -> Figure:
    """Draw a line for each row of a table, with a marker at the retained gain at each ε.

    Rows that retain less than half at every ε are in a separate panel, so that the other rows use
    the whole width of theirs.
    """
    points = points.assign(retained_gain=100 * points["retained_gain"])
    retains_half = points.groupby("row")["retained_gain"].transform("max") >= HALF
    panels = [panel for panel in (points[retains_half], points[~retains_half]) if len(panel)]
    heights = [panel["row"].nunique() + 1 for panel in panels]
    figure = Figure(figsize=(drawing.WIDTH, 1 + ROW_HEIGHT * sum(heights)))
    grid = figure.subplots(
        len(panels),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    column = grid[:, 0]
    targets = sorted(points["x"].unique())
    for axes, panel in zip(column, panels, strict=True):
        _draw_rows(axes, panel, targets)
    units = points["unit"].unique()
    of_unit = name_one(units[0]) if len(units) == 1 else "each row's unit"
    column[0].set_title(f"{title}, at a tight ε of {of_unit}")
    column[-1].set_xlabel("share of the non-private gain kept, %")
    handles, labels = column[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _draw_rows(axes: Axes, points: pd.DataFrame, targets: Sequence[float]) -> None:
    """Draw the rows of one panel, from top to bottom.

    Args:
        axes: the panel.
        points: the points of its rows.
        targets: the target ε of all panels, each with the same style and legend in every panel.
    """
    rows = list(dict.fromkeys(points["row"]))
    points = points.assign(height=points["row"].map(rows.index))
    smallest = points.groupby("height")["retained_gain"].min()
    axes.axvline(
        100,
        color="0.4",
        linewidth=1,
        linestyle="-",
        label="non-private",
    )
    axes.hlines(smallest.index, smallest, 100, color="0.8", linewidth=1)
    for index, target in enumerate(targets):
        markers = points[points["x"] == target]
        style = drawing.curve_style(index) | {"linestyle": "none"}
        label = f"ε = {show_epsilon(target)}"
        axes.plot(markers["retained_gain"], markers["height"], label=label, **style)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10]))
    axes.set_yticks(range(len(rows)), list(map(_wrap_label, rows)), linespacing=1.0)
    axes.set_ylim(len(rows) - 0.5, -0.5)


def _wrap_label(label: str) -> str:
    """Return a label; a long one is broken into two lines at its last comma."""
    if len(label) <= MAX_LABEL:
        return label
    return ",\n".join(label.rsplit(", ", 1))


def draw_epsilon(name: str, folder: Path) -> Figure:
    """Draw each finite ε that the five papers print against the tight ε of its mechanism."""
    columns = ("paper", "printed", "tight")
    claims = read_table(name, folder, "zdp-bench epsilon --write", columns)
    is_printed = claims["printed"] != ""
    for column in ("printed", "tight"):
        claims[column] = pd.to_numeric(claims[column], errors="coerce")
    is_number = claims["printed"].between(0, math.inf, "neither")
    is_bound = is_printed & claims["printed"].isna()  # such as '<1'
    finite = select(claims, is_number & claims["tight"].between(0, math.inf, "neither"), name)
    figure = Figure(figsize=(drawing.WIDTH, 0.75 * drawing.WIDTH))
    axes = figure.subplots()
    titles = papers.titles()
    by_paper = finite.groupby("paper")
    for index, (paper, points) in enumerate(by_paper):
        style = drawing.curve_style(index)
        axes.plot(
            points["printed"],
            points["tight"],
            style["marker"],
            color=style["color"],
            label=drawing.as_label(titles.get(str(paper), str(paper))),
            linestyle="none",
        )
    epsilons = finite[["printed", "tight"]].to_numpy()
    ends = [epsilons.min() / 1.5, epsilons.max() * 1.5]
    axes.plot(
        ends,
        ends,
        color="0.4",
        linewidth=1,
        linestyle="-",
        label="as printed",
    )
    for axis in ("x", "y"):
        drawing.set_log_scale(axes, axis)
    axes.set(xlim=ends, ylim=ends)
    axes.set(xlabel="ε as the paper prints it", ylabel="ε tight, of the mechanism as described")
    title = "Above the line, a run has spent more than its paper says"
    undrawn = []  # stated in the title, which covers no points
    for words, is_kind in (
        ("with a tight ε of ∞", (claims["tight"] == math.inf) & (claims["printed"] < math.inf)),
        ("printed as a bound", is_bound & (claims["tight"] < math.inf)),
        ("without a tight ε", is_number & claims["tight"].isna()),
    ):
        count = int(is_kind.sum())
        if count:
            undrawn.append(f"{count} {words}")
    if undrawn:
        title += f"\nclaims not drawn: {', '.join(undrawn)}"
    axes.set_title(title)
    axes.legend(loc="lower right")
    return figure


def draw_runs(
    folder: Path,
    filters: list[str],
    x: str,
    y: str,
    by: Sequence[str],
) -> Figure:
    """Draw a metric of your runs against a column.

    A point is the mean of runs, so it is not drawn if one of them has no finite number: the mean of
    the others would hide that this run diverged. Runs without the metric are left out.

    Args:
        folder: the results folder.
        filters: COLUMN=VALUE, which a run must satisfy to be drawn.
        x: the column of the x axis; a column of records.csv or a key of the configuration.
        y: the metric of the y axis, or another column with numbers.
        by: columns or keys; there is a curve for each combination of their values.

    Raises:
        UserError: a column or key is unknown or has no numbers, an axis would have several metrics
            or ε of several kinds, or there are too many curves.
    """
    frame, keys = results.read_frame(records.read_all(folder))
    frame = results.keep(frame, filters)
    x = results.find(x, frame, "--x")
    y = results.find(y, frame, "--y")
    by = [results.find(column, frame, "--by") for column in dict.fromkeys(by)]
    frame = results.drop_repeated(frame, by)
    has_y = _numbers_of(y, frame).notna() | results.is_undefined(frame[y])
    choose = "Choose other runs: --runs COLUMN=VALUE."
    if not has_y.any():
        raise UserError(f"--y {y}: none of these runs has a number. {choose}")
    frame = frame[has_y]
    positions = _numbers_of(x, frame)
    if not (positions > -math.inf).all():
        raise UserError(f"--x {x}: one of these runs has no number. {choose}")
    for column in (x, y):  # an infinite ε is the same for every unit and δ
        is_bounded = _numbers_of(column, frame) != math.inf
        compared = frame[is_bounded] if results.is_epsilon(column) else frame
        results.require_comparable(column, compared, by, "axis")
    if results.is_epsilon(x):  # as shown elsewhere: calibration is exact to three digits
        at_least = x.endswith("at_least")
        positions = positions.map(lambda epsilon: round_epsilon(epsilon, at_least))
    y_label, scale = _describe_axis(y, frame, keys)
    curve = frame[by].map(str).agg(", ".join, axis=1)
    heights = _numbers_of(y, frame) * scale
    runs = pd.DataFrame({"x": positions, "y": heights, "curve": curve})
    curves = runs["curve"].nunique()
    if curves > len(drawing.COLOURS):
        raise UserError(
            f"--by {','.join(by)}: has {curves} values, but a figure shows at most "
            f"{len(drawing.COLOURS)}. Choose another column, or draw fewer runs: "
            "--runs COLUMN=VALUE."
        )
    groups = runs.groupby(["curve", "x"])["y"]
    differing: dict[str, None] = {}  # without repetition, in order
    for _, group in groups:
        differing |= dict.fromkeys(results.list_differing(frame.loc[group.index], keys))
    if results.repeats_seeds(frame, [*by, x]):
        differing["code or starting weights"] = None
    values = groups.agg(list)
    points = values.rename("values").reset_index()
    if not has_number(points).any():
        raise UserError(f"--y {y}: no point has a finite number of each of its runs. {choose}")
    finite = points.loc[points["x"] < math.inf, "x"]
    smallest, largest = finite.min(), finite.max()
    log = bool(smallest > 0 and largest >= LOG_RATIO * smallest)
    with mpl.rc_context(drawing.STYLE):
        points = points.assign(panel="", y=y_label)
        return drawing.draw_panels(
            points,
            x.replace("_", " "),
            log=log,
            averaged=_name_averaged(list(differing)),
            show_x=lambda number: results.show(x, number),
        )


def _numbers_of(column: str, frame: pd.DataFrame) -> pd.Series:
    """Return the numbers in a column; NaN for undefined values, words and missing values."""
    return pd.to_numeric(frame[column], errors="coerce").astype(float)


def _describe_axis(y: str, frame: pd.DataFrame, keys: Sequence[str]) -> tuple[str, float]:
    """Return the label of the y axis, and the factor from a recorded value to a displayed one."""
    metric = describe(y.removeprefix("metrics."))
    recorded = frame["metric"].unique()
    if y == "value" and len(recorded) == 1:
        metric = describe(recorded[0])
    elif y in records.COLUMNS or y in keys:
        return names.words(y), 1.0
    return metric.axis, metric.scale


def _name_averaged(differing: Sequence[str]) -> str:
    """Return what the runs of a point differ in: 'seeds', or 'runs that differ in KEY, KEY'."""
    if not differing:
        return "seeds"
    listed = ", ".join(differing[:MAX_DIFFERING])
    if len(differing) > MAX_DIFFERING:
        listed += f" and {len(differing) - MAX_DIFFERING} more"
    return f"runs that differ in {listed}"
