"""Count which of the papers' numbers have results of ours.

`zdp-bench coverage` shows the counts, and so does the first line of each table. They are counted in
`results/tables`. A table without a file there counts as empty.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zdp_bench.errors import UserError
from zdp_bench.foreign_files import MAX_TABLE, read_text
from zdp_bench.report import papers
from zdp_bench.report.cells import EMPTY, FAILED, OTHER, PUBLISHED
from zdp_bench.report.sheet import Sheet, markdown_table

AGAIN = "counted above"  # its run also fills a cell of an earlier table
STATUSES = (*PUBLISHED, *OTHER, *FAILED, *EMPTY, AGAIN)
UNBOUNDED = "of these, tight ε = ∞"
WHY = "why: "  # prefix of the counts of reasons

Lines = Iterable[Mapping[str, object]]  # lines of a table's CSV


def count(tables: Iterable[Lines]) -> Counter[str]:
    """Count the numbers of tables, or the curves of figures, by status.

    If a number has several lines, the one whose status comes first in `STATUSES` counts. A run
    counts once in all tables, and once in all figures with the same axis.

    Returns:
        The counts by status. Other keys are `UNBOUNDED`, and `WHY` followed by the reason why
        numbers are empty.
    """
    counts: Counter[str] = Counter()
    counted: set[tuple[str, str, str]] = set()  # (metric, axis, runs)
    for lines in tables:
        for line in _best_lines(lines):
            runs = str(line.get("runs") or "")
            key = str(line["metric"]), str(line.get("axis") or ""), runs
            status = str(line["status"])
            if runs and key in counted:
                status = AGAIN
            counted.add(key)
            counts[status] += 1
            if status in PUBLISHED and _is_unbounded(line):
                counts[UNBOUNDED] += 1
            if status in EMPTY:
                reason = line.get("reason") if status == "no data" else status
                counts[f"{WHY}{reason}"] += 1
    return counts


def _best_lines(lines: Lines) -> list[Mapping[str, object]]:
    """Return the best line of each number: by status, then lines with runs before others."""

    def rank(line: Mapping[str, object]) -> tuple[int, bool]:
        return STATUSES.index(str(line["status"])), not line.get("runs")

    best: dict[tuple[str, str], Mapping[str, object]] = {}
    for line in lines:
        number = str(line["row"]), str(line["metric"])
        if not line["status"]:
            continue
        if number not in best or rank(line) < rank(best[number]):
            best[number] = line
    return list(best.values())


def _is_unbounded(line: Mapping[str, object]) -> bool:
    """Return True if a run claims a finite ε although its tight ε is infinite."""
    claimed, tight = float(str(line["epsilon_claimed"])), float(str(line["epsilon_tight"]))
    return math.isfinite(claimed) and math.isinf(tight)


def sum_up(counts: Mapping[str, int]) -> str:
    """Describe the numbers as published: '14 as published (1 reproduced, 13 different)'."""
    published = _total(counts, PUBLISHED)
    kinds = [f"{counts[status]} {status}" for status in PUBLISHED[1:] if counts[status]]
    remarks = [", ".join(kinds)] if kinds else []
    unbounded = counts[UNBOUNDED]
    if unbounded:
        remarks.append(f"{unbounded} of {published} private with a tight ε of ∞")
    shown = f"{published} as published"
    return f"{shown} ({'; '.join(remarks)})" if remarks else shown


def _kinds(counts: Mapping[str, int]) -> str:
    """Describe the numbers as published, for a column with this heading: '14 (1 reproduced)'."""
    return sum_up(counts).replace(" as published", "")


def sentence(tables: Iterable[Lines], unit: str = "number") -> str:
    """Describe all counts: '16 numbers: 4 as published (4 different), 4 on other data, 8 not run.'

    Args:
        tables: lines of each table or figure.
        unit: what is counted. Default: "number".
    """
    counts = count(tables)
    total = _total(counts, STATUSES)
    words = {"other settings": "with other settings", "other data": "on other data"}
    parts = [sum_up(counts)]
    for status in (*OTHER, *FAILED, *EMPTY, AGAIN):
        if counts[status]:
            parts.append(f"{counts[status]} {words.get(status, status)}")
    plural = "" if total == 1 else "s"
    return f"{total} {unit}{plural}: {', '.join(parts)}."


def overview(results: Path) -> str:
    """Return the counts of all tables and figures as a Markdown table."""
    table_counts = count(of_paper(results))
    figure_counts = count(of_paper(results, figures=True))
    numbers = _total(table_counts, STATUSES)
    curves = _total(figure_counts, STATUSES)

    def row(head: str, *statuses: str) -> list[str]:
        return [head, str(_total(table_counts, statuses)), str(_total(figure_counts, statuses))]

    columns = ["", f"{numbers} table numbers", f"{curves} figure curves"]
    rows = [
        ["as published", _kinds(table_counts), _kinds(figure_counts)],
        row("reduced, or on other data or settings", *OTHER),
        row("did not learn", *FAILED),
        row("shares its run with another number", AGAIN),
        row("empty: no data, or not run", *EMPTY),
    ]
    return "\n".join(markdown_table(columns, rows))


def of_paper(results: Path, paper: str = "", figures: bool = False) -> list[Lines]:
    """Return the lines of each table or figure.

    Args:
        results: results folder.
        paper: name of a paper. Default: all papers.
        figures: whether to return figures instead of tables. Default: False.
    """
    names = [name for name in papers.available() if papers.recipes_of(name)]
    return [
        read(name, results)
        for name in names
        if name.startswith(paper) and papers.is_figure(name) == figures
    ]


def read(name: str, results: Path) -> Lines:
    """Return the lines of a table's CSV. Without a file, all numbers of the table are "not run".

    Raises:
        UserError: the file is damaged.
    """
    numbers: dict[tuple[str, str], dict[str, str]] = {}
    for number in papers.reference(name):
        is_cell = papers.is_figure(name) or number.number is not None
        if is_cell and not number.column.startswith("epsilon"):
            metric = number.column.partition(" at ")[0]
            line = {"row": number.row, "metric": metric, "status": "not run"}
            numbers.setdefault((number.row, metric), line)
    path = papers.file_of(name, results).with_suffix(".csv")
    if not path.is_file():
        return list(numbers.values())
    try:
        lines = list(csv.DictReader(io.StringIO(read_text(path, MAX_TABLE))))
        missing = numbers.keys() - {(line["row"], line["metric"]) for line in lines}
        is_whole = not missing and all(map(_is_whole, lines))
    except (UserError, csv.Error, KeyError):
        is_whole = False
    if not is_whole:
        raise UserError(
            f"{path}: is damaged or of another version. `zdp-bench table {name} --write` writes it "
            "again."
        )
    return lines


def _is_whole(line: Mapping[str, str | None]) -> bool:
    """Return True if a line of a table has a known status and, if it was run, its ε."""
    status = line["status"]
    if status and status not in STATUSES:
        return False
    if status not in PUBLISHED:
        return True
    try:
        _is_unbounded(line)
    except ValueError:
        return False
    return True


def sheet(results: Path) -> Sheet:
    """Return the counts of each table and figure, of all tables, and of all figures."""
    groups: dict[str, Sequence[Lines]] = {
        name: [read(name, results)] for name in papers.available() if papers.recipes_of(name)
    }
    groups["all tables"] = of_paper(results)
    groups["all figures"] = of_paper(results, figures=True)
    columns = ("table", "all", "as published", "in another way", *FAILED, AGAIN, "empty", "why")
    shown: list[list[str]] = []
    numbers: list[dict[str, object]] = []
    for name, tables in groups.items():
        counts = count(tables)
        total = _total(counts, STATUSES)
        why = _say_why(counts)
        numbers.append(
            {
                "table": name,
                "all": total,
                **{status: counts[status] for status in STATUSES},
                UNBOUNDED: counts[UNBOUNDED],
                "why": why,
            }
        )
        others = [str(_total(counts, kind)) for kind in (OTHER, FAILED, (AGAIN,), EMPTY)]
        shown.append([name, str(total), _kinds(counts), *others, why])
    important = ("table", "all", "as published", "in another way", "empty")
    return Sheet("Coverage", columns, shown, numbers=numbers, important=important)


def _total(counts: Mapping[str, int], statuses: Iterable[str]) -> int:
    return sum(counts[status] for status in statuses)


def _say_why(counts: Mapping[str, int]) -> str:
    """Return the reasons why numbers are empty: '8 not run; 4 needs ImageNet'."""
    reasons = [key for key in counts if key.startswith(WHY)]
    return "; ".join(f"{counts[key]} {key.removeprefix(WHY)}" for key in reasons)
