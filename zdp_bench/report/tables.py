"""Builds the table of a paper's table or figure: our runs beside its numbers, a line each.

Of a figure each line is a point of a curve. `PAPER_tableN.md` and `.csv`, or `PAPER_figN`, hold
them. Of the paper's figures, only the numbers that its text gives are shown; nothing is read off a
picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.report import cells, coverage, names, papers
from zdp_bench.report.cells import EPSILON_COLUMNS, RULE, Filling, Line
from zdp_bench.report.comparisons import Family
from zdp_bench.report.number_format import epsilon, mean_and_deviation
from zdp_bench.report.papers import Axes, Reference
from zdp_bench.report.sheet import Numbers, Sheet

MOST = 12  # points of a curve that a page shows; the CSV holds all
# Of a record's section on privacy, what the CSV of a table holds.
SPENT = (
    *("epsilon_claimed", "claimed_by", "epsilon_tight", "epsilon_tight_at_least"),
    *("epsilon_patient", "examples_per_patient", "delta", "z", "steps"),
)
READING = (
    "± is over seeds, or over folds where it says so. In brackets: on other data than the paper's. "
    "Reduced: less training, a smaller network or a part of the curve. ε claimed is by the "
    "paper's own accountant and convention; ε tight is the privacy loss distribution of what was "
    "run. Behind it stands that of a patient, or of another unit, that owns several examples. "
    "No ε includes hyper-parameter search."
)
INTERVAL = (
    "ε 'A to B': no exact privacy law is known for fixed-size batches. A is what an attack on two "
    "data sets that exist reaches, B is proven; quote B."
)


@dataclass(frozen=True)
class Table:
    """A paper's table, or the curves of a figure.

    Attributes:
        lines: the paper's settings of each row, and below them every variant that was run.
        sheet: all of it, ready to show.
    """

    name: str
    lines: list[Line]
    sheet: Sheet

    def write(self, results: Path) -> list[Path]:
        """Write `results/tables/PAPER_tableN.md` and `.csv`."""
        return self.sheet.write(results / "tables" / papers.file_stem(self.name))


def build(table: str, results: Path, fillings: Sequence[Filling]) -> Table:
    """Lay a table or figure out, in the paper's order.

    Args:
        fillings: what may stand in it (see `experiments.claims.fillings`).

    Raises:
        UserError: no such table, or one that no recipe fills.
    """
    numbers = papers.reference(table)
    if not papers.recipes_of(table):
        raise UserError(
            f"table '{table}' is filled by no recipe; "
            f"its numbers are measured by `zdp-bench bench {table}`."
        )
    every, rules = records.read_all(results), cells.rules_of(table)
    if figure := papers.is_figure(table):
        # The line of a row that no number of the text is in says what its curve shows.
        drawn = {number.row: number for number in reversed(numbers) if " at " not in number.column}
        shown = [drawn[row] for row in dict.fromkeys(number.row for number in numbers)]
    else:
        rows = list(dict.fromkeys(number.row for number in numbers))
        shown = [number for number in numbers if number.column not in EPSILON_COLUMNS]
        shown.sort(key=lambda number: rows.index(number.row))
    lines = cells.make_lines(shown, fillings, every, rules)
    form = _curves if figure else _cells
    columns, rows_shown, of_csv = form(table, lines, numbers)
    kind, number = ("Figure", table.partition("/fig")[2]) if figure else ("Table", numbers[0].table)
    sheet = Sheet(
        f"{numbers[0].paper}, {kind} {number}",
        columns,
        rows_shown,
        _notes(table, lines, results),
        f"{coverage.sentence([of_csv], 'curve' if figure else 'number')}\n\n{origin(table)}",
        of_csv,
    )
    return Table(table, lines, sheet)


def origin(table: str) -> str:
    """The sentence on what generated a page of `results/tables`."""
    return f"`zdp-bench table {table}` made this from the records; do not edit."


Forms = tuple[list[str], list[list[str]], list[Numbers]]  # columns, rows as shown, rows of the CSV


# ------------------------------------------------------------------------------ a table's cells


def _cells(table: str, lines: Sequence[Line], numbers: Sequence[Reference]) -> Forms:
    printed = {(number.row, number.column): number.value for number in numbers}
    shown: list[dict[str, str]] = []
    of_csv: list[Numbers] = []
    for line in lines:
        row, ours = line.number.row, not line.variant and not line.on
        claim, rdp = (printed.get((row, column)) for column in EPSILON_COLUMNS)
        said = (claim or "–").replace("inf", "∞") + (f" ({rdp} by RDP)" if rdp else "")
        shown.append(
            {
                "row": line.number.label,
                "metric": names.metric(line.number.column),
                "paper": line.number.printed if ours else "",
                "ours": line.shown,
                "Δ": _show_difference(line),
                "what differs": line.differs,
                "ε printed": said if ours else "",
                "ε claimed": epsilon(line.privacy["epsilon_claimed"]) if line.runs else "",
                "ε tight": line.tight if line.runs else "",
                "δ": f"{line.privacy['delta']:g}" if line.runs else "",
                "status": f"{line.status} ({line.reason})" if line.reason else line.status,
                "command": f"`{line.command}`" if line.command else "",
            }
        )
        of_csv.append(_numbers(line) | {"epsilon_printed": claim, "epsilon_rdp": rdp})
    return list(shown[0]), [list(one.values()) for one in shown], of_csv


def _show_difference(line: Line) -> str:
    if line.difference is None:
        return ""
    return f"{line.difference:+.2f}" if line.number.unit == "%" else f"{line.difference:+.3g}"


def _numbers(line: Line) -> dict[str, object]:
    """Return what the CSV holds of a line: the numbers behind it, unrounded."""
    found: dict[str, object] = {
        "row": line.number.row,
        "label": line.label,
        "metric": line.number.column,
        "unit": line.number.unit,
        "paper": line.number.number,
        # A number that the paper does not print is no cell of its table.
        "status": "" if line.number.number is None else line.status,
        "reason": line.reason,
        "variant": line.variant,
        "on": line.on,
        "differs": line.differs,
        "recipe": line.jobs[0][0].recipe if line.jobs else "",
        "overrides": line.command.partition("recipe=")[2].partition(" ")[2],
        "n": len(line.values) if line.runs else 0,
    }
    if not line.runs:
        return found
    spread = stdev(line.values) * line.scale if len(line.values) > 1 else None
    return found | {
        "mean": round(line.mean, 6),
        "deviation": None if spread is None else round(spread, 6),
        "difference": None if line.difference is None else round(line.difference, 6),
        "over": "folds" if line.over_folds else "seeds",
        "values": " ".join(f"{value * line.scale:.6g}" for value in line.values),
        "seeds": " ".join(dict.fromkeys(str(run["seed"]) for run in line.runs)),
        **{name: line.privacy.get(name) for name in SPENT},
        "privacy_unit": line.privacy["unit"],
        "data": line.runs[0]["data"]["name"],
        "provenance": line.runs[0]["data"]["provenance"],
        "runs": " ".join(run["run"][:16] for run in line.runs),
    }


# ----------------------------------------------------------------------------- a figure's curves


def _curves(table: str, lines: Sequence[Line], numbers: Sequence[Reference]) -> Forms:
    axes = papers.axes(table)
    at = {(n.row, *n.column.rpartition(" at ")[::2]): n.value for n in numbers}
    columns = ["panel", "curve", axes.label, "paper", "ours", "ε printed", "ε claimed", "ε tight"]
    shown: list[list[str]] = []
    of_csv: list[Numbers] = []
    for line in lines:
        ours, row, metric = not line.on, line.number.row, line.number.column
        points = _points(line, axes)
        place, digits = [line.number.where, line.label], 2 if line.number.unit == "%" else 4
        if not points:
            of_csv.append(_numbers_at(line, axes, None, None))
            status = f"{line.status} ({line.reason})" if line.reason else line.status
            shown.append([*place, *[""] * 6, status, f"`{line.command}`" if line.command else ""])
            continue
        printed, claims = (
            {p.x: at.get((row, name, f"{p.x:g}"), "") if ours else "" for p in points}
            for name in (metric, "epsilon")
        )
        of_csv += [_numbers_at(line, axes, point, printed[point.x]) for point in points]
        step = math.ceil(len(points) / MOST)
        for number, point in enumerate(points, start=1):
            named = printed[point.x] or claims[point.x]
            if named or number in (1, len(points)) or number % step == 0:
                shown.append(
                    [
                        *place,
                        f"{point.x:g}",
                        printed[point.x],
                        mean_and_deviation(point.values, "", digits).partition(" (n")[0],
                        claims[point.x],
                        epsilon(point.epsilon_claimed),
                        epsilon(point.epsilon_tight),
                        line.status,
                        f"`{line.command}`" if number == 1 else "",
                    ]
                )
    return [*columns, "status", "command"], shown, of_csv


@dataclass(frozen=True)
class Point:
    """One point of a curve: the metric of each seed, in the paper's unit."""

    x: float
    values: tuple[float, ...]
    epsilon_claimed: float
    epsilon_tight: float


def _points(line: Line, axes: Axes) -> list[Point]:
    """Return one point for each x, over all seeds that have it, in order."""
    by_x: dict[float, list[tuple[float, float, float]]] = {}
    metric = line.number.column
    for run in line.runs:
        if axes.x == "epoch":
            for epoch in run["epochs"] if records.has_each_epoch(run) else ():
                if epoch["epoch"] is not None:
                    spent = _claimed(run, epoch), epoch["epsilon_tight"]
                    found = by_x.setdefault(float(epoch["epoch"]), [])
                    found.append((epoch[metric] * line.scale, *spent))
        else:
            spent = run["privacy"]["epsilon_claimed"], run["privacy"]["epsilon_tight"]
            known = (records.get(run, path) for path in axes.x.split(" or "))
            x = float(next(value for value in known if value is not None))
            by_x.setdefault(x, []).append((run["metrics"][metric] * line.scale, *spent))
    # Every seed has spent the same: no ε depends on data.
    columns = [(x, list(zip(*at_x, strict=True))) for x, at_x in sorted(by_x.items())]
    return [Point(x, values, max(claimed), max(tight)) for x, (values, claimed, tight) in columns]


def _claimed(run: Record, epoch: dict[str, Any]) -> float:
    """Return ε by the run's own claiming accountant, had the run ended with this epoch."""
    privacy = run["privacy"]
    # Imported here: printing a table needs neither dp-accounting nor torch.
    from zdp_bench.privacy.accountants import Claim, claimed_epsilon
    from zdp_bench.privacy.mechanism import Sampling

    sampling, steps = Sampling(**privacy["sampling"]).of_one(epoch["step"])
    claim = Claim(
        privacy["noise_multiplier"],
        sampling.sample_rate,
        steps,
        privacy["delta"],
        sampling.records,
        epoch["epoch"],
    )
    return claimed_epsilon(privacy["claimed_by"], claim)


def _numbers_at(line: Line, axes: Axes, point: Point | None, printed: str | None) -> Numbers:
    """Return what the CSV holds of a point, or of a curve without any."""
    found: dict[str, object] = {
        "row": line.number.row,
        "status": line.status,
        "reason": line.reason,
        "panel": line.number.where,
        "curve": line.label,
        "axis": axes.label,
        "x": f"{point.x:g}" if point else "",
        "metric": line.number.column,
        "unit": line.number.unit,
    }
    if not point:
        return found
    return found | {
        "paper": printed,
        "mean": round(mean(point.values), 6),
        "values": " ".join(f"{value:.6g}" for value in point.values),
        "seeds": " ".join(dict.fromkeys(str(run["seed"]) for run in line.runs)),
        "epsilon_claimed": point.epsilon_claimed,
        "epsilon_tight": point.epsilon_tight,
        "provenance": line.runs[0]["data"]["provenance"],
        "recipe": line.jobs[0][0].recipe,
        "overrides": " ".join(line.jobs[0][0].overrides) if len(line.jobs) == 1 else "",
        "runs": " ".join(run["run"][:16] for run in line.runs),
    }


# -------------------------------------------------------------------------------- what is below


def _notes(table: str, lines: Sequence[Line], results: Path) -> list[str]:
    runs = [run for line in lines for run in line.runs]
    notes = [READING, *([] if papers.is_figure(table) else [RULE]), *papers.notes(table)]
    if any(" to " in line.tight for line in lines if line.runs):
        notes.append(INTERVAL)
    notes += data_notes(runs)
    if papers.is_figure(table):
        return [*notes, "What the paper only draws is left out."]
    families: dict[tuple[str, str], Family] = {}  # rows that can be compared with one another
    for line in lines:
        if line.runs and not line.over_folds:
            key = line.number.column, line.runs[0]["data"]["digest"]
            families.setdefault(key, Family(line.number.column, {})).rows[line.label] = line.runs
    return [*notes, *(said for one in families.values() for said in one.sentences(results))]


def data_notes(runs: Iterable[Record]) -> list[str]:
    """Return the notes of the runs' data sets, and of the images they start from."""
    notes = set()
    for run in runs:
        data, start = run["data"], "zero_filled_"
        if data["notes"]:
            notes.add(f"{data['name']}: {data['provenance']}, {data['notes']}.")
        of = {k.removeprefix(start): v for k, v in run["metrics"].items() if k.startswith(start)}
        if of:
            said = ", ".join(f"{name} {value:.4g}" for name, value in of.items())
            notes.add(f"{data['name']}, zero-filled: {said}.")
    return sorted(notes)
