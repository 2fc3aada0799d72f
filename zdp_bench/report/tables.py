"""Build the table of a paper's table or figure, with our runs beside each number of the paper.

In a figure, each line is a point of a curve. Only numbers that the paper's text states are compared
with ours, because reading numbers off a plot is inexact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import mean

from zdp_bench import records
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Record
from zdp_bench.report import cells, coverage, papers
from zdp_bench.report.cells import RULE, Filling, Line, show_tight
from zdp_bench.report.comparisons import compare_pairs
from zdp_bench.report.number_format import deviation, mean_and_deviation
from zdp_bench.report.sheet import Sheet
from zdp_bench.tasks.metric import describe

ZERO_FILLED = "zero_filled_"  # prefix of metrics of the zero-filled images, before reconstruction
MAX_POINTS = 12  # points of a curve on a page; the CSV contains all
# Fields of a record's privacy section that the CSV of a table contains.
SPENT = (
    "epsilon_claimed",
    "claimed_by",
    "epsilon_tight",
    "epsilon_tight_at_least",
    "epsilon_patient",
    "examples_per_patient",
    "delta",
    "z",
    "steps",
)
IMPORTANT = ("row", "paper", "ours", "ε printed", "ε tight", "status", "Δ", "what differs")
READING = (
    "± is over seeds, or over folds if stated. Numbers in brackets are on data other than the "
    "paper's. Reduced means less training, a smaller network, or part of the curve or of the "
    "folds. ε claimed follows the paper's accountant and convention; ε tight is computed from what "
    "ran, and followed by the ε per patient, or other owner, of several examples. No ε includes "
    "hyper-parameter search."
)
INTERVAL = (
    "ε 'A to B': no exact privacy law is known for fixed-size batches. An attack on two existing "
    "data sets reaches A, and B is proven. Quote B."
)


def build(table: str, results: Path, fillings: Sequence[Filling]) -> Sheet:
    """Return a table or figure, in the order of the paper.

    Args:
        table: the table, PAPER/N, or figure, PAPER/figN.
        results: results folder.
        fillings: the jobs of recipes that fill its rows (`experiments.claims.fillings`).

    Raises:
        UserError: there is no such table, or no recipe fills it.
    """
    numbers = papers.reference(table)
    papers.require_recipes(table)
    axes = papers.axes(table) if papers.is_figure(table) else None
    all_records = records.read_all(results)
    lines = cells.make_lines(numbers, fillings, all_records, cells.rules_of(table), axes)
    csv_rows = [_numbers(line) for line in lines]
    page_rows = [_show(line) for line in _thin_out(lines)]
    if axes:
        _show_commands_once(page_rows)
        title = f"{numbers[0].paper}, Figure {table.partition('/fig')[2]}"
        counts = coverage.sentence([csv_rows], "curve")
    else:
        title = f"{numbers[0].paper}, Table {numbers[0].table}"
        counts = coverage.sentence([csv_rows], "number")
    return Sheet(
        title,
        columns=list(page_rows[0]),
        rows=[list(row.values()) for row in page_rows],
        notes=_notes(table, lines, results),
        origin=f"{counts}\n\n{origin(table)}",
        numbers=csv_rows,
        important=IMPORTANT,
    )


def _show_commands_once(shown: Sequence[dict[str, str]]) -> None:
    """Remove the command from all points of a curve except the first."""
    for above, below in pairwise(shown):
        if all(above[key] == below[key] for key in ("row", "what differs")):
            below["command"] = ""


def _thin_out(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield about a dozen points of each curve, and all points that the paper's text states."""
    for _, curve in groupby(lines, key=lambda line: (line.jobs, line.number.row)):
        points = list(curve)
        step = math.ceil(len(points) / MAX_POINTS)
        for number, line in enumerate(points, start=1):
            is_stated = line.is_papers and (line.number.value or any(line.claims))
            if is_stated or number in (1, len(points)) or number % step == 0:
                yield line


def origin(table: str) -> str:
    """Return the sentence that states which command generated a page of `results/tables`."""
    return f"`zdp-bench table {table}` made this from the records; do not edit."


def _show(line: Line) -> dict[str, str]:
    """Return the cells of a line by column."""
    number, spent = line.number, line.spent
    row, column, metric = number.label, "metric", describe(number.column).label
    if line.axes:
        row, column, metric = f"{number.where}: {number.label}", line.axes.label, line.x
    return {
        "row": row,
        column: metric,
        "paper": number.printed if line.is_papers else "",
        "ours": _show_ours(line),
        "Δ": _show_difference(line),
        "what differs": line.differs,
        "ε printed": _show_claim(line) if line.is_papers else "",
        "ε claimed": show_epsilon(spent.epsilon_claimed) if spent else "",
        "ε tight": show_tight(spent) if spent else "",
        "δ": f"{spent.delta:g}" if spent else "",
        "status": f"{line.status} ({line.lacking})" if line.lacking else line.status,
        "command": f"`{line.command}`" if line.command else "",
    }


def _show_ours(line: Line) -> str:
    """Return mean and deviation of our runs, in brackets if the data is not the paper's."""
    if not line.values:
        return ""
    ours = mean_and_deviation(line.values, line.number.unit)
    if line.over_folds:
        ours = ours.replace(" (n", " over folds (n")
    return ours if line.on_paper_data else f"[{ours}]"


def _show_difference(line: Line) -> str:
    difference = line.difference
    if difference is None:
        return ""
    return f"{difference:+.2f}" if line.number.unit == "%" else f"{difference:+.3g}"


def _show_claim(line: Line) -> str:
    """Return what the paper prints as ε: '3.4', or '3.4 (3.6 by RDP)'."""
    claim, by_rdp = line.claims
    shown = claim.replace("inf", "∞")
    return f"{shown} ({by_rdp} by RDP)" if by_rdp else shown


def _numbers(line: Line) -> dict[str, object]:
    """Return the CSV's values of a line, unrounded."""
    number = line.number
    point: dict[str, object] = {}
    if line.axes:
        point = {"panel": number.where, "axis": line.axes.label, "x": line.x}
    # Only a number that the paper prints is a cell of its table.
    is_cell = line.axes is not None or number.number is not None
    cells: dict[str, object] = {
        "row": number.row,
        "label": number.label,
        **point,
        "metric": number.column.partition(" at ")[0],
        "unit": number.unit,
        "paper": number.value if line.axes else number.number,
        "status": line.status if is_cell else "",
        "reason": line.lacking,
        "variant": line.variant,
        "on": line.substitute,
        "differs": line.differs,
        "recipe": line.jobs[0][0].recipe if line.jobs else "",
        "overrides": line.command.partition("recipe=")[2].partition(" ")[2],
        "n": len(line.values),
    }
    cells |= _numbers_of_runs(line)
    cells["epsilon_printed"], cells["epsilon_rdp"] = line.claims
    return cells


def _numbers_of_runs(line: Line) -> dict[str, object]:
    """Return the CSV's values that come from runs; empty if there are none."""
    values, spent = line.values, line.spent
    if not values or spent is None:
        return {}
    data, difference = line.runs[0].data, line.difference
    spread = deviation(values)
    privacy = {name: getattr(spent, name) for name in SPENT}
    if spent.epsilon_patient is None:  # after an epoch
        privacy["examples_per_patient"] = None
    return {
        "mean": round(mean(values), 6),
        "deviation": None if math.isnan(spread) else round(spread, 6),
        "difference": None if difference is None else round(difference, 6),
        "over": "folds" if line.over_folds else "seeds",
        "values": " ".join(f"{value:.6g}" for value in values),
        "seeds": " ".join(dict.fromkeys(str(run.seed) for run in line.runs)),
        **privacy,
        "privacy_unit": spent.unit,
        "data": data.name,
        "provenance": data.provenance,
        "runs": " ".join(run.run[:16] for run in line.runs),
    }


def _notes(table: str, lines: Sequence[Line], results: Path) -> list[str]:
    """Return the sentences below a table or figure."""
    runs = {run.run: run for line in lines for run in line.runs}.values()
    notes = [READING]
    if not papers.is_figure(table):
        notes.append(RULE)
    notes += papers.notes(table)
    if any(" to " in show_tight(line.spent) for line in lines if line.spent):
        notes.append(INTERVAL)
    notes += data_notes(runs)
    if papers.is_figure(table):
        return [*notes, "What the paper only draws is left out."]
    # The runs of each row by label, for rows with the same metric on the same data.
    families: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for line in lines:
        if line.runs and not line.over_folds:
            key = line.number.column, line.runs[0].data.digest
            label = f"{line.number.label} ({line.differs})" if line.differs else line.number.label
            families.setdefault(key, {})[label] = line.runs
    for (metric, _), rows in families.items():
        notes += compare_pairs(metric, rows, results)
    return notes


def data_notes(runs: Iterable[Record]) -> list[str]:
    """Return notes on the runs' data sets and on the metrics of zero-filled images."""
    notes = set()
    for run in runs:
        data = run.data
        parts = [data.notes] if data.notes else []
        zero_filled = [
            f"{name.removeprefix(ZERO_FILLED)} {value:.4g}"
            for name, value in run.metrics.items()
            if name.startswith(ZERO_FILLED)
        ]
        if zero_filled:
            parts.append(f"zero-filled: {', '.join(zero_filled)}")
        if parts:
            notes.add(f"{data.name}: {data.provenance}, {'; '.join(parts)}.")
    return sorted(notes)
