"""Builds a figure's curves as a table: each point with its metric, its claimed and its tight ε.

A point is the runs of a job, all seeds (`cells.Filling`). Of the paper, only the numbers
that its text gives are shown; nothing is read off a picture. A curve stands in every panel whose
name ends with its own, so in all panels if it names none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.report import cells, names, papers
from zdp_bench.report.cells import STATUSES, Count, Filling, Measured, Standing, Verdict
from zdp_bench.report.number_format import epsilon
from zdp_bench.report.papers import Axes, Reference
from zdp_bench.report.sheet import (
    Sheet,
    html_page,
    markdown_page,
    markdown_table,
    to_csv,
    to_json,
    write_pair,
)
from zdp_bench.report.tables import EPSILONS, data_notes, not_run, origin


@dataclass(frozen=True)
class Point:
    """One point of a curve: the metric of each seed, as shown (percent where the unit is %)."""

    x: float
    values: tuple[float, ...]
    epsilon_claimed: float
    epsilon_tight: float

    @property
    def shown(self) -> str:
        """'71.23 ± 0.12': mean and sample standard deviation over seeds."""
        spread = f" ± {stdev(self.values):.2f}" if len(self.values) > 1 else ""
        return f"{mean(self.values):.2f}{spread}"


@dataclass(frozen=True)
class Curve:
    """One curve: its points, the runs behind them, and the numbers of the paper's text, by x.

    Attributes:
        row: of the paper's CSV.
        status: 'as published' if all its jobs were run with the paper's settings and data, else
            another of `cells.STATUSES`.
        ours: its jobs and their runs.
    """

    row: str
    status: str
    panel: str
    label: str
    ours: Measured
    points: tuple[Point, ...]
    paper: dict[float, str]
    epsilon_printed: dict[float, str]

    @property
    def private(self) -> bool:
        """True if a point has a finite claimed or tight ε; a claim that fails must show its ∞."""
        return any(math.isfinite(min(p.epsilon_claimed, p.epsilon_tight)) for p in self.points)

    @property
    def standing(self) -> Standing:
        """How it counts."""
        published = self.status == "as published"
        return Standing(self.status, self.ours.protection if published else "")


@dataclass(frozen=True)
class Curves:
    """The curves of a figure."""

    name: str
    title: str
    axes: Axes
    metric: str
    unit: str
    curves: list[Curve]
    notes: list[str]

    @property
    def count(self) -> Count:
        """How many of the paper's curves have which status; of several with one row, the best."""
        return count((curve.row, curve.standing) for curve in self.curves)

    @property
    def panels(self) -> list[str]:
        """The panels, in the paper's order."""
        return panels_of(curve.panel for curve in self.curves)

    def sheet(self, panel: str) -> Sheet:
        """Return a panel as a table: x, the ε of its private curves, the metric of each curve.

        Curves that spend the same ε share the columns of it. Of more than ten epochs, the
        first, every fifth, the last and those of which the paper prints a number; the CSV has all.
        """
        in_panel = [curve for curve in self.curves if panel.endswith(curve.panel)]
        curves = [curve for curve in in_panel if curve.points]
        unit = f", {self.unit}" if self.unit else ""
        columns = _epsilon_columns(curves)
        for curve in curves:
            columns.append((f"{curve.label}{unit}", {p.x: p.shown for p in curve.points}))
            if curve.paper:
                columns.append((f"{curve.label}, paper{unit}", curve.paper))
        every_x = sorted({x for _, column in columns for x in column})
        if self.axes.x == "epoch" and len(every_x) > 10:
            named = {x for curve in curves for x in curve.paper}
            every_x = [x for x in every_x if x % 5 == 0 or x in (1, every_x[-1]) or x in named]
        rows = [[f"{x:g}", *(column.get(x, "") for _, column in columns)] for x in every_x]
        printed = next((curve.epsilon_printed for curve in in_panel if curve.epsilon_printed), {})
        at = [f"{value} at {self.axes.label} {x:g}" for x, value in printed.items()]
        notes = [f"ε printed: {', '.join(at)}"] if at else []
        heads = [self.axes.label, *(head for head, _ in columns)]
        return Sheet(f"{self.title} {panel}".rstrip(), heads, rows, notes)

    def verdicts(self, missing: Mapping[str, str]) -> list[Verdict]:
        """Return what became of every curve: whether it was run.

        Args:
            missing: experiment digest -> why it was not run, where that is known.
        """
        found = []
        for curve in self.curves:
            known = [missing[job.digest] for job, _ in curve.ours.jobs if job.digest in missing]
            why = known[0] if known and not curve.points else ""
            label = f"{curve.panel}: {curve.label}"
            found.append(Verdict(self.name, label, self.metric, curve.standing, why))
        return found

    def as_rich(self) -> list[Any]:
        """Return what the terminal shows: each panel, then the notes."""
        sheets = [self.sheet(panel) for panel in self.panels]
        empty = "{}: nothing was run yet"
        shown = [s if s.rows else empty.format(s.title) for s in sheets]
        return [self.count.sentence, *shown, "\n".join(self.notes)]

    def as_text(self, form: str) -> str:
        """Return all panels in one of `sheet.FORMS`, without a line break at its end."""
        if form == "json":
            return to_json(self._points())
        if form == "html":
            panels = [self.sheet(panel) for panel in self.panels]
            return html_page(self.title, panels, [self.count.sentence, *self.notes]).rstrip()
        return (self.as_markdown() if form == "md" else self.as_csv()).rstrip()

    def as_markdown(self) -> str:
        """Return a page with a table for each panel."""
        body: list[str] = []
        for panel in self.panels:
            sheet = self.sheet(panel)
            body += [f"## {panel}", ""] if panel else []
            for note in sheet.notes:
                body += [note, ""]
            table = markdown_table(sheet.columns, sheet.rows)
            body += [*(table if sheet.rows else ["Nothing was run yet."]), ""]
        head = f"{self.count.sentence}\n\n{origin(self.name)}"
        return markdown_page(self.title, head, body, self.notes)

    def as_csv(self) -> str:
        """Return one line a point, unrounded: what `report/figures` draws from."""
        columns = ("row", "status", "protection", "panel", "curve", "x", "values", "epsilon_tight")
        return to_csv(self._points(), columns)

    def _points(self) -> list[dict[str, object]]:
        return [self._numbers(curve, point) for curve in self.curves for point in curve.points]

    def _numbers(self, curve: Curve, point: Point) -> dict[str, object]:
        jobs, runs = curve.ours.jobs, curve.ours.runs
        return {
            "row": curve.row,
            "status": curve.status,
            "protection": curve.standing.protection,
            "panel": curve.panel,
            "curve": curve.label,
            "axis": self.axes.label,
            "x": f"{point.x:g}",
            "metric": self.metric,
            "unit": self.unit,
            "mean": round(mean(point.values), 6),
            "values": " ".join(f"{value:.6g}" for value in point.values),
            "seeds": " ".join(dict.fromkeys(str(run["seed"]) for run in runs)),
            "epsilon_claimed": point.epsilon_claimed,
            "epsilon_tight": point.epsilon_tight,
            "provenance": curve.ours.data["provenance"],
            "recipe": curve.ours.filling.recipe,
            "overrides": " ".join(curve.ours.filling.overrides) if len(jobs) == 1 else "",
            "runs": " ".join(run["run"][:16] for run in runs),
        }

    def write(self, results: Path) -> list[Path]:
        """Write `results/tables/PAPER_figN.md` and `.csv`."""
        stem = results / "tables" / papers.file_stem(self.name)
        return write_pair(stem, self.as_markdown(), self.as_csv())


def _epsilon_columns(curves: list[Curve]) -> list[tuple[str, dict[float, str]]]:
    """Return claimed and tight ε of the private curves, (heading, {x: cell}), each pair once."""
    sharing: dict[tuple[tuple[float, float, float], ...], list[str]] = {}
    for curve in curves:
        if curve.private:
            spent = tuple((p.x, p.epsilon_claimed, p.epsilon_tight) for p in curve.points)
            sharing.setdefault(spent, []).append(curve.label)
    columns = []
    for spent, labels in sharing.items():
        whose = "" if len(sharing) == 1 else f" ({', '.join(labels)})"
        columns.append((f"ε claimed{whose}", {x: epsilon(claimed) for x, claimed, _ in spent}))
        columns.append((f"ε tight{whose}", {x: epsilon(tight) for x, _, tight in spent}))
    return columns


def count(of: Iterable[tuple[str, Standing]]) -> Count:
    """Count the paper's curves, (row, standing); of several with one row, the best."""
    best: dict[str, Standing] = {}
    for row, standing in of:
        found = standing, best.get(row, standing)
        best[row] = min(found, key=lambda one: STATUSES.index(one.status))
    return Count.count(best.values(), "curves")


def panels_of(names: Iterable[str]) -> list[str]:
    """Return the distinct names that no other name ends with; the rest are parts of panels."""
    distinct = list(dict.fromkeys(names))
    return [
        name
        for name in distinct
        if not any(other != name and other.endswith(name) for other in distinct)
    ]


def build(table: str, results: Path, fillings: Sequence[Filling]) -> Curves:
    """Lay a figure's curves out, in the paper's order.

    Args:
        fillings: what may stand in them (see `experiments.claims.fillings`).

    Raises:
        UserError: no such figure, or one that no recipe fills.
    """
    numbers = papers.reference(table)
    if not papers.recipes_of(table):
        raise UserError(f"figure '{table}' is filled by no recipe.")
    axes, every, rules = papers.axes(table), records.read_all(results), cells.rules_of(table)
    # The line of a row that no number of the text is in says what its curve shows.
    drawn = {number.row: number for number in reversed(numbers) if " at " not in number.column}
    measured = cells.measure(list(drawn.values()), fillings, every, rules)
    curves = []
    for row in dict.fromkeys(number.row for number in numbers):
        metric = drawn[row]
        variants = cells.join([one for one in measured if one.metric.row == row])
        for ours in [one[metric.column] for one in variants] or [Measured(metric, (), False)]:
            job = ours.filling if ours.jobs else None
            variant, on = (job.variant, job.on) if job else (None, None)
            curves.append(
                Curve(
                    row=row,
                    status=cells.judge_curve(ours, rules),
                    panel=metric.where,
                    label=cells.mark(
                        metric.label,
                        variant and rules.of_variant(variant),
                        on and names.data(on),
                    ),
                    ours=ours,
                    points=tuple(_points(ours.runs, axes, metric)),
                    paper={} if on else _printed(numbers, row, metric.column),
                    epsilon_printed={} if on else _printed(numbers, row, "epsilon"),
                )
            )
    metric = next(iter(drawn.values()))
    title = f"{numbers[0].paper}, Figure {table.partition('/fig')[2]}"
    notes = _notes(table, curves)
    return Curves(table, title, axes, metric.column, metric.unit, curves, notes)


def _points(runs: Sequence[Record], axes: Axes, metric: Reference) -> Iterator[Point]:
    """Yield one point for each x, over all seeds that have it, in order."""
    scale = 100.0 if metric.unit == "%" else 1.0
    by_x: dict[float, list[tuple[float, float, float]]] = {}
    for run in runs:
        if axes.x == "epoch":
            for epoch in run["epochs"]:
                if epoch["epoch"] is not None:
                    spent = _claimed(run, epoch), epoch["epsilon_tight"]
                    found = by_x.setdefault(float(epoch["epoch"]), [])
                    found.append((epoch[metric.column] * scale, *spent))
        else:
            spent = run["privacy"]["epsilon_claimed"], run["privacy"]["epsilon_tight"]
            found = by_x.setdefault(_x(run, axes), [])
            found.append((run["metrics"][metric.column] * scale, *spent))
    for x, at_x in sorted(by_x.items()):
        values, claimed, tight = zip(*at_x, strict=True)
        # Every seed has spent the same: no ε depends on data.
        yield Point(x, values, max(claimed), max(tight))


def _claimed(run: Record, epoch: dict[str, Any]) -> float:
    """Return ε by the run's own claiming accountant, had the run ended with this epoch."""
    privacy = run["privacy"]
    # Imported here: printing a table needs neither dp-accounting nor torch.
    from zdp_bench.privacy.accountants import Claim, claimed_epsilon

    claim = Claim(
        privacy["noise_multiplier"],
        privacy["sampling"]["sample_rate"],
        epoch["step"],
        privacy["delta"],
        privacy["sampling"]["records"],
        epoch["epoch"],
    )
    return claimed_epsilon(privacy["claimed_by"], claim)


def _x(run: Record, axes: Axes) -> float:
    found = [records.get(run, path) for path in axes.x.split(" or ")]
    return float(next(value for value in found if value is not None))


def _printed(numbers: list[Reference], row: str, column: str) -> dict[float, str]:
    """Return the numbers of the text for a row, by x: those of columns named 'COLUMN at X'."""
    start = f"{column} at "
    of_row = (number for number in numbers if number.row == row and number.column.startswith(start))
    return {float(number.column.removeprefix(start)): number.value for number in of_row}


def _notes(table: str, curves: list[Curve]) -> list[str]:
    notes = [
        "Of this figure the paper's text gives only the numbers shown as printed; "
        "what it only draws is left out.",
        *EPSILONS,
        *papers.notes(table),
        *data_notes(run for curve in curves for run in curve.ours.runs),
    ]
    if not any(curve.status == "as published" for curve in curves):
        notes.insert(0, "Not drawn: none of the paper's curves was run as published.")
    jobs = [job for curve in curves for job in curve.ours.jobs]
    return [*notes, *not_run(filling for filling, runs in jobs if not runs)]
