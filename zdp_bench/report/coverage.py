"""Counts how much of the papers is filled: `zdp-bench coverage`, and the head line of each table.

The counts are those of the tables in `results/tables`; a table that is not there counts as empty.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from zdp_bench.report import papers
from zdp_bench.report.cells import STATUSES, Count, rules_of
from zdp_bench.report.sheet import Sheet


def of_tables(results: Path) -> dict[str, Count]:
    """Return the count of every table and figure that records fill, by name."""
    return {name: _count(name, results) for name in papers.available() if papers.recipes_of(name)}


def total(counts: Iterable[Count], unit: str = "cells") -> Count:
    """Return the sum of counts."""
    return sum(counts, Count(Counter(), unit))


def sheet(results: Path) -> Sheet:
    """Return the counts as a table: a line for each table, each paper's tables, and all."""
    counts = of_tables(results)
    cells = {name: count for name, count in counts.items() if not papers.is_figure(name)}
    curves = {name: count for name, count in counts.items() if papers.is_figure(name)}
    lines = dict(cells)
    lines["all tables"] = total(cells.values())
    lines |= curves
    lines["all figures (curves)"] = total(curves.values(), "curves")
    numbers = [{"table": name, **count.numbers} for name, count in lines.items()]
    heads = list(numbers[0])
    shown = [[str(value) for value in line.values()] for line in numbers]
    return Sheet("Coverage", heads, shown, [lines["all tables"].sentence], "", numbers)


def _count(name: str, results: Path) -> Count:
    unit = "curves" if papers.is_figure(name) else "cells"
    path = results / "tables" / f"{papers.file_stem(name)}.csv"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = [line for line in csv.DictReader(io.StringIO(text)) if line.get("status")]
    if not papers.is_figure(name):
        if not found:
            wanted = (n for n in papers.reference(name) if n.number is not None)
            found = [{"status": "not run"} for n in wanted if not n.column.startswith("epsilon")]
        return Count.count((line["status"] for line in found), unit)
    rules = rules_of(name)
    best = {number.row: rules.lacking(number.row)[0] for number in papers.reference(name)}
    for line in found:
        best[line["row"]] = min(best[line["row"]], line["status"], key=STATUSES.index)
    return Count.count(best.values(), unit)
