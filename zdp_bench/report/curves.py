"""A paper's figure as a table: curves over epoch, ε, batch size or learning rate, each point with its claimed and tight ε.

Like a table's, a curve's points are runs of a recipe as it stands now (`tables.Filling`), all of its seeds; what the paper prints
of the curves stands in `papers/PAPER/figN.csv`, one line a curve for what is drawn and one for each number that its
text gives, as column `accuracy at X` or `epsilon at X`. What a paper only draws is left out: nothing is read off a picture.
The panel of a curve is its `where`; it stands in every panel whose name ends with that, so in all where it is empty.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.table import Table as RichTable

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.privacy.accountants import Claim, claimed_epsilon
from zdp_bench.records import Record
from zdp_bench.report import papers
from zdp_bench.report.number_format import epsilon
from zdp_bench.report.papers import Axes, Reference, file_stem
from zdp_bench.report.tables import Filling


@dataclass(frozen=True)
class Point:
    """One point of a curve: the metric of each seed, as it is shown (percent where the unit is %)."""

    x: float
    values: tuple[float, ...]
    epsilon_claimed: float
    epsilon_tight: float

    @property
    def shown(self) -> str:
        """'71.23 ± 0.12': mean and sample standard deviation over seeds."""
        return f"{mean(self.values):.2f}" + (
            f" ± {stdev(self.values):.2f}" if len(self.values) > 1 else ""
        )


@dataclass(frozen=True)
class Curve:
    """One curve: the points there are, what ran for them, and the numbers the paper's text gives, x -> number."""

    panel: str
    label: str
    fillings: tuple[Filling, ...]
    points: tuple[Point, ...]
    runs: tuple[Record, ...]
    paper: dict[float, str]
    epsilon_printed: dict[float, str]

    @property
    def private(self) -> bool:
        """Whether an ε is claimed for it, or it has one: an ε that is claimed and is not there must be seen."""
        return any(
            math.isfinite(min(point.epsilon_claimed, point.epsilon_tight)) for point in self.points
        )

    @property
    def lacking(self) -> list[Filling]:
        """What was not run."""
        ran = {(run["recipe"], run["experiment"]) for run in self.runs}
        return [filling for filling in self.fillings if (filling.recipe, filling.digest) not in ran]


@dataclass(frozen=True)
class Curves:
    """A figure's curves, ready to print or to draw; `axes` is what they run over."""

    name: str
    title: str
    axes: Axes
    metric: str
    unit: str
    curves: list[Curve]
    notes: list[str]

    @property
    def panels(self) -> list[str]:
        """The panels, in the paper's order."""
        return panels_of(curve.panel for curve in self.curves)

    def of_panel(self, panel: str) -> list[Curve]:
        """Its curves, and those that stand in several panels."""
        return [curve for curve in self.curves if panel.endswith(curve.panel)]


def panels_of(names: Iterable[str]) -> list[str]:
    """Return the distinct names, without those that another one ends with: a curve of 'ε = 2' is in 'a: ε = 2' and 'b: ε = 2'."""
    distinct = list(dict.fromkeys(names))
    return [
        name
        for name in distinct
        if not any(other != name and other.endswith(name) for other in distinct)
    ]


def build(table: str, results: Path, fillings: Sequence[Filling]) -> Curves:
    """Lay a figure's curves out, in the paper's order.

    Args:
        fillings: what may stand in them (see `claims.fillings`).

    Raises:
        UserError: no such figure, or one that no recipe fills.
    """
    numbers = papers.reference(table)
    if not papers.recipes_of(table):
        raise UserError(f"figure '{table}' is filled by no recipe.")
    axes, every = papers.axes(table), records.read_all(results)
    drawn = {
        number.row: number for number in reversed(numbers) if " at " not in number.column
    }  # row -> what its curve shows
    curves = []
    for row in dict.fromkeys(number.row for number in numbers):
        of_row = [filling for filling in fillings if filling.row == row]
        for variant, on in dict.fromkeys((f.variant, f.on) for f in of_row) or {(None, None): None}:
            marks = ([f"{variant}, ours"] if variant else []) + ([f"on {on}"] if on else [])
            label = drawn[row].label + (f" ({'; '.join(marks)})" if marks else "")
            chosen = tuple(f for f in of_row if (f.variant, f.on) == (variant, on))
            known = {(f.recipe, f.digest) for f in chosen}
            runs = tuple(run for run in every if (run["recipe"], run["experiment"]) in known)
            points = tuple(_points(runs, axes, drawn[row]))
            printed = (
                ({}, {})
                if on
                else (_printed(numbers, row, drawn[row].column), _printed(numbers, row, "epsilon"))
            )
            curves.append(Curve(drawn[row].where, label, chosen, points, runs, *printed))
    metric = next(iter(drawn.values()))
    number = table.partition("/")[2].removeprefix("fig")
    return Curves(
        table,
        f"{numbers[0].paper}, Figure {number}",
        axes,
        metric.column,
        metric.unit,
        curves,
        _notes(table, curves),
    )


def _points(runs: Sequence[Record], axes: Axes, metric: Reference) -> Iterator[Point]:
    """One point for each x, over all seeds that have it, in order."""
    scale = 100.0 if metric.unit == "%" else 1.0
    by_x: dict[float, list[tuple[float, float, float]]] = {}
    for run in runs:
        privacy = run["privacy"]
        if axes.x == "epoch":
            for epoch in run["epochs"]:
                if epoch["epoch"] is not None:
                    found = (
                        epoch[metric.column] * scale,
                        _claimed(run, epoch),
                        epoch["epsilon_tight"],
                    )
                    by_x.setdefault(float(epoch["epoch"]), []).append(found)
        else:
            found = (
                run["metrics"][metric.column] * scale,
                privacy["epsilon_claimed"],
                privacy["epsilon_tight"],
            )
            by_x.setdefault(_x(run, axes), []).append(found)
    for x, found_there in sorted(by_x.items()):
        values, claimed, tight = zip(*found_there, strict=True)
        yield Point(
            x, values, max(claimed), max(tight)
        )  # the ε are the same for every seed: none depends on data


def _claimed(run: Record, epoch: dict[str, Any]) -> float:
    """ε by the run's own claiming accountant, had it ended with this epoch."""
    privacy = run["privacy"]
    sampling, sigma = privacy["sampling"], privacy["noise_multiplier"]
    claim = Claim(
        sigma,
        sampling["sample_rate"],
        epoch["step"],
        privacy["delta"],
        sampling["records"],
        epoch["epoch"],
    )
    return claimed_epsilon(privacy["claimed_by"], claim)


def _x(run: Record, axes: Axes) -> float:
    found = (_at(run, path) for path in axes.x.split(" or "))
    return float(next(value for value in found if value is not None))


def _at(run: Record, path: str) -> Any:
    value: Any = run
    for key in path.split("."):
        value = value[key]
    return value


def _printed(numbers: list[Reference], row: str, column: str) -> dict[float, str]:
    """What the paper's text gives of a row: x -> number, from columns named 'COLUMN at X'."""
    start = f"{column} at "
    of_row = (number for number in numbers if number.row == row and number.column.startswith(start))
    return {float(number.column.removeprefix(start)): number.value for number in of_row}


def _notes(table: str, curves: list[Curve]) -> list[str]:
    notes = [
        "Of this figure the paper's text gives only the numbers shown as printed; what it only draws is left out.",
        "ε claimed: by the paper's own accountant and convention. ε tight: the privacy loss distribution of what was really run.",
        "Hyper-parameter search is not counted in any ε.",
        *papers.notes(table),
    ]
    runs = [run for curve in curves for run in curve.runs]
    notes += sorted(
        {
            f"{r['data']['name']}: {r['data']['provenance']}, {r['data']['notes']}."
            for r in runs
            if r["data"]["notes"]
        }
    )
    lacking: dict[str, list[Filling]] = {}
    for curve in curves:
        for filling in curve.lacking:
            if not filling.on:
                lacking.setdefault(filling.recipe, []).append(filling)
    for recipe, jobs in lacking.items():
        if len(jobs) == 1:
            notes.append(
                f"Not run: `zdp-bench run {' '.join([f'recipe={recipe}', *jobs[0].overrides])}`."
            )
        else:
            notes.append(
                f"Not run: {len(jobs)} of the curves that `zdp-bench run -m recipe={recipe}` makes."
            )
    return notes


# -------------------------------------------------------------------------------------------------- cells of a panel


def cells(of: Curves, panel: str) -> tuple[list[str], list[list[str]]]:
    """A panel as a table, head and lines: x, the ε of the private curves (once where they are the same), each curve's metric."""
    curves = [curve for curve in of.of_panel(panel) if curve.points]
    spent: dict[tuple[tuple[float, float, float], ...], list[Curve]] = {}
    for curve in curves:
        if curve.private:
            spent.setdefault(
                tuple((p.x, p.epsilon_claimed, p.epsilon_tight) for p in curve.points), []
            ).append(curve)
    unit = f", {of.unit}" if of.unit else ""
    head = [of.axes.label]
    columns: list[dict[float, str]] = []
    for points, sharing in spent.items():
        whose = "" if len(spent) == 1 else f" ({', '.join(curve.label for curve in sharing)})"
        head += [f"ε claimed{whose}", f"ε tight{whose}"]
        columns += [
            {x: epsilon(claimed) for x, claimed, _ in points},
            {x: epsilon(tight) for x, _, tight in points},
        ]
    for curve in curves:
        head.append(f"{curve.label}{unit}")
        columns.append({point.x: point.shown for point in curve.points})
        if curve.paper:
            head.append(f"{curve.label}, paper{unit}")
            columns.append(curve.paper)
    every_x = sorted({x for column in columns for x in column})
    return head, [[f"{x:g}", *(column.get(x, "") for column in columns)] for x in every_x]


def printed_epsilons(of: Curves, panel: str) -> str:
    """'ε printed: 1.28 at epoch 50, …': what the paper says of a panel's private curves; empty where it says nothing."""
    said = next(
        (curve.epsilon_printed for curve in of.of_panel(panel) if curve.epsilon_printed), {}
    )
    return (
        "ε printed: " + ", ".join(f"{value} at {of.axes.label} {x:g}" for x, value in said.items())
        if said
        else ""
    )


# ---------------------------------------------------------------------------------------------------------- writing


def as_rich(of: Curves) -> Iterator[RichTable | str]:
    """Each panel on a terminal, then the notes."""
    for panel in of.panels:
        head, lines = cells(of, panel)
        title = f"{of.title} {panel}".rstrip()
        if not lines:
            yield f"{title}: nothing was run yet"
            continue
        shown = RichTable(*head, title=title, title_justify="left")
        for line in lines:
            shown.add_row(*line)
        yield shown
        yield printed_epsilons(of, panel)
    yield "\n".join(of.notes)


def as_markdown(of: Curves) -> str:
    """One table a panel."""
    lines = [
        f"# {of.title}",
        "",
        f"`zdp-bench table {of.name}` made this from the records; do not edit.",
        "",
    ]
    for panel in of.panels:
        head, body = cells(of, panel)
        lines += [f"## {panel}", ""] if panel else []
        lines += [printed_epsilons(of, panel), ""] if printed_epsilons(of, panel) else []
        if body:
            lines += ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body)]
        else:
            lines.append("Nothing was run yet.")
        lines.append("")
    return "\n".join([*lines, *(f"- {note}" for note in of.notes)]) + "\n"


def as_csv(of: Curves) -> str:
    """One line a point, unrounded: what `report/figures` draws from."""
    lines = [_plain(of, curve, point) for curve in of.curves for point in curve.points]
    out = io.StringIO()
    writer = csv.DictWriter(
        out,
        lines[0] if lines else ["panel", "curve", "x", "values", "epsilon_tight"],
        lineterminator="\n",
    )
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _plain(of: Curves, curve: Curve, point: Point) -> dict[str, object]:
    return {
        "panel": curve.panel,
        "curve": curve.label,
        "axis": of.axes.label,
        "x": f"{point.x:g}",
        "metric": of.metric,
        "unit": of.unit,
        "mean": round(mean(point.values), 6),
        "values": " ".join(f"{value:.6g}" for value in point.values),
        "seeds": " ".join(dict.fromkeys(str(run["seed"]) for run in curve.runs)),
        "epsilon_claimed": point.epsilon_claimed,
        "epsilon_tight": point.epsilon_tight,
        "provenance": curve.runs[0]["data"]["provenance"],
        "recipe": curve.fillings[0].recipe,
        "overrides": " ".join(curve.fillings[0].overrides) if len(curve.fillings) == 1 else "",
        "runs": " ".join(run["run"][:16] for run in curve.runs),
    }


def write(of: Curves, results: Path) -> list[Path]:
    """Write `results/tables/PAPER_figN.md` and `.csv`."""
    stem = results / "tables" / file_stem(of.name)
    paths = [stem.with_suffix(".md"), stem.with_suffix(".csv")]
    records.write_text(paths[0], as_markdown(of))
    records.write_text(paths[1], as_csv(of))
    return paths
