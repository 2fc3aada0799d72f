"""Counts how much of the papers is filled: `zdp-bench coverage`, and the head line of each table.

The counts are those of the tables in `results/tables`; a table that is not there counts as empty.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from zdp_bench.report import curves, papers
from zdp_bench.report.cells import AGAIN, Count, Standing, count_once, rules_of
from zdp_bench.report.sheet import Sheet


def of_tables(results: Path) -> dict[str, Count]:
    """Return the count of every table and figure that records fill, by name."""
    return {
        name: curves.count(_lines(name, results))
        if papers.is_figure(name)
        else Count.count(standing for _, standing in _lines(name, results))
        for name in papers.available()
        if papers.recipes_of(name)
    }


def sheet(results: Path) -> Sheet:
    """Return the counts as a table: a line for each table and figure, and all tables together.

    In the sum a run that fills cells of two tables counts once; the notes name such cells.
    """
    lines = of_tables(results)
    once = _count_once(results)
    again = [f"{row}: the same run as in another table." for row, s in once if s.status == AGAIN]
    lines["all tables"] = total(results)
    lines["all figures (curves)"] = total(results, figures=True)
    numbers = [{"table": name, **count.numbers} for name, count in lines.items()]
    heads = list(numbers[0])
    shown = [[str(value) for value in line.values()] for line in numbers]
    return Sheet("Coverage", heads, shown, [lines["all tables"].sentence, *again], "", numbers)


def total(results: Path, paper: str = "", figures: bool = False) -> Count:
    """Return the count of all tables, or figures, of a paper, or of all papers."""
    if figures:
        return curves.count(_all_lines(results, figures, paper))
    return Count.count(s for row, s in _count_once(results) if row.startswith(paper))


def _count_once(results: Path) -> list[tuple[str, Standing]]:
    """Return the lines of all tables; a run that filled an earlier table's cell is `AGAIN`."""
    lines = _all_lines(results)
    once = count_once(standing for _, standing in lines)
    return [(row, standing) for (row, _), standing in zip(lines, once, strict=True)]


def _all_lines(results: Path, figures: bool = False, paper: str = "") -> list[tuple[str, Standing]]:
    """Return 'TABLE, ROW' and standing of each line of all tables, or of all figures."""
    names = [n for n in papers.available() if papers.recipes_of(n) and n.startswith(paper)]
    return [
        (f"{name}, {row}", standing)
        for name in names
        if papers.is_figure(name) == figures
        for row, standing in _lines(name, results)
    ]


def _lines(name: str, results: Path) -> list[tuple[str, Standing]]:
    """Return the row and standing of each line of a table's CSV, and of rows that it lacks."""
    path = results / "tables" / f"{papers.file_stem(name)}.csv"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = [
        (line["row"], Standing(line["status"], line["protection"], line.get("runs") or ""))
        for line in csv.DictReader(io.StringIO(text))
        if line.get("status")
    ]
    if papers.is_figure(name):
        rules = rules_of(name)
        rows = dict.fromkeys(number.row for number in papers.reference(name))
        found += [(row, Standing(rules.lacking(row)[0])) for row in rows]
    elif not found:
        wanted = (n for n in papers.reference(name) if n.number is not None)
        found = [(n.row, Standing("not run")) for n in wanted if n.column[:7] != "epsilon"]
    return found
