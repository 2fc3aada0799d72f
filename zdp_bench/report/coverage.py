"""Counts how much of the papers is filled: `zdp-bench coverage`, and the head line of each table.

The counts are those of the tables in `results/tables`; a table that is not there counts as empty.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zdp_bench.report import papers
from zdp_bench.report.sheet import Sheet

PUBLISHED = ("as published", "reproduced", "close", "different")  # curves have the first only
OTHER = ("other data", "reduced")
EMPTY = ("no data", "too dear", "not run")
STATUSES = (*PUBLISHED, *OTHER, *EMPTY)


@dataclass(frozen=True)
class Count:
    """How many cells of a table, or curves of a figure, have each status."""

    of: Counter[str]
    unit: str = "cells"

    @classmethod
    def count(cls, statuses: Iterable[str], unit: str = "cells") -> Count:
        """Count statuses, each one of `STATUSES`."""
        return cls(Counter(statuses), unit)

    def __add__(self, other: Count) -> Count:
        return Count(self.of + other.of, self.unit)

    @property
    def numbers(self) -> dict[str, int]:
        """The counts by name, as CSV holds them."""
        sums = {
            "cells": self.of.total(),
            "as published": self._sum(PUBLISHED),
            "other or reduced": self._sum(OTHER),
            "empty": self._sum(EMPTY),
        }
        return sums | {status: self.of[status] for status in STATUSES[1:]}

    @property
    def sentence(self) -> str:
        """'24 cells: 4 as published (2 reproduced, 2 different), 20 on other or reduced data, 0
        empty.'
        """
        total, unit = self.of.total(), self.unit if self.of.total() != 1 else self.unit[:-1]
        return (
            f"{total} {unit}: {self._sum(PUBLISHED)} as published{self._named(PUBLISHED[1:])}, "
            f"{self._sum(OTHER)} on other or reduced data, "
            f"{self._sum(EMPTY)} empty{self._named(EMPTY)}."
        )

    def _sum(self, statuses: Iterable[str]) -> int:
        return sum(self.of[status] for status in statuses)

    def _named(self, statuses: Iterable[str]) -> str:
        found = [f"{self.of[status]} {status}" for status in statuses if self.of[status]]
        return f" ({', '.join(found)})" if found else ""


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
    rules = papers.coverage(name)
    best = {number.row: rules.lacking(number.row)[0] for number in papers.reference(name)}
    for line in found:
        best[line["row"]] = min(best[line["row"]], line["status"], key=STATUSES.index)
    return Count.count(best.values(), unit)
