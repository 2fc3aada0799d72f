"""Builds a paper's table: one line for each of its numbers, and beside it all runs that fill it.

`PAPER_tableN.md` and `.csv` hold the lines (`lines.Line`): as published, our best, what differs,
and a status. `PAPER_tableN_runs.md` and `.csv` hold every run with its command (`rows.Row`), the
statistics and the notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.report import lines, papers
from zdp_bench.report.comparisons import Family
from zdp_bench.report.coverage import Count
from zdp_bench.report.lines import EPSILON_COLUMNS, Line
from zdp_bench.report.rows import Filling, Row, fitting
from zdp_bench.report.sheet import Sheet

EPSILONS = (
    "ε claimed: by the paper's own accountant and convention. ε tight: the privacy loss "
    "distribution of what was really run.",
    "Hyper-parameter search is not counted in any ε.",
)
INTERVAL = (
    "ε 'A to B': batches of fixed size have no exact law known. A is what an attack on two data "
    "sets that exist reaches, B is proven; quote B."
)
PER_UNIT = (
    "ε per unit: of all training records that one patient, or the unit named behind it, is in, "
    "together; the other ε are of one record."
)

READING = (
    "In brackets: on other data than the paper's, compared with nothing. Best of ours: the one "
    "variant of a row that `paper.yaml` leaves, not the best on the test set; its recipe says what "
    "its settings were chosen on. It is not shown if its tight ε is larger than that of the row as "
    "published, or its result is worse. ε tight is the privacy loss distribution of what was "
    "really run; hyper-parameter search is in no ε."
)
RUN_COLUMNS = (
    "row",
    "metric",
    "ours",
    "ε claimed",
    "ε tight",
    "ε per unit",
    "δ",
    "data",
    "command",
)


@dataclass(frozen=True)
class Table:
    """A paper's table.

    Attributes:
        rows: all that may stand in it, with or without runs.
        lines: one for each number of the paper.
        notes: sentences below all runs.
        remarks: sentences below the lines and below all runs.
    """

    name: str
    title: str
    rows: list[Row]
    lines: list[Line]
    notes: list[str]
    remarks: Sequence[str] = ()

    @property
    def count(self) -> Count:
        """How many of its cells have which status."""
        return Count.count(line.status for line in self.lines)

    @property
    def stem(self) -> str:
        """The name of its files."""
        return papers.file_stem(self.name)

    def sheet(self) -> Sheet:
        """Return the lines ready to show."""
        cells = [list(line.cells.values()) for line in self.lines]
        numbers = [line.numbers for line in self.lines]
        notes = [*self.remarks, READING, lines.RULE]
        if any(" to " in line.cells["ε printed / tight"] for line in self.lines):
            notes.append(INTERVAL)
        notes.append(f"Commands, other variants and statistics: `{self.stem}_runs.md`.")
        head = f"{self.count.sentence}\n\n{origin(self.name)}"
        return Sheet(self.title, lines.COLUMNS, cells, notes, head, numbers)

    def runs_sheet(self) -> Sheet:
        """Return every run, ready to show; what was not run is in the notes."""
        cells = [[row.cells[column] for column in RUN_COLUMNS] for row in self.rows if row.runs]
        numbers = [row.numbers for row in self.rows]
        head = origin(self.name)
        notes = [*self.remarks, *self.notes]
        return Sheet(f"{self.title}: the runs", RUN_COLUMNS, cells, notes, head, numbers)

    def as_rich(self) -> list[Any]:
        """Return what the terminal shows, part by part."""
        return [replace(self.sheet(), title=f"{self.title}. {self.count.sentence}").as_rich()]

    def as_text(self, form: str) -> str:
        """Return the lines in one of `sheet.FORMS`."""
        return self.sheet().as_text(form)

    def write(self, results: Path) -> list[Path]:
        """Write `results/tables/PAPER_tableN.md` and `.csv`, and both with `_runs`."""
        folder = results / "tables"
        runs = self.runs_sheet().write(folder / f"{self.stem}_runs")
        return [*self.sheet().write(folder / self.stem), *runs]


def build(table: str, results: Path, fillings: Sequence[Filling]) -> Table:
    """Lay a table out: a line for each of its numbers, in the paper's order.

    Args:
        fillings: what may stand in the table (see `experiments.claims.fillings`).

    Raises:
        UserError: no such table, or one that no recipe fills.
    """
    numbers = papers.reference(table)
    if not papers.recipes_of(table):
        raise UserError(
            f"table '{table}' is filled by no recipe; "
            f"its numbers are measured by `zdp-bench bench {table}`."
        )
    order = list(dict.fromkeys(number.row for number in numbers))
    fillings = sorted(fillings, key=lambda f: (order.index(f.row), f.variant or "", f.on or ""))
    every = records.read_all(results)
    rules = papers.coverage(table)
    rows = []
    for filling in fillings:
        runs = fitting(every, [filling])
        published = all(rules.is_published(filling.recipe, run["data"]) for run in runs)
        metrics = [n for n in numbers if n.row == filling.row and n.column not in EPSILON_COLUMNS]
        published = published and not filling.on
        job = _job(filling, fillings)
        differs = filling.variant and rules.of_variant(filling.variant)
        rows += [Row(filling, metric, runs, published, differs, job) for metric in metrics]
    title = f"{numbers[0].paper}, Table {numbers[0].table}"
    made = lines.lines(numbers, rows, rules)
    return Table(table, title, rows, made, _notes(table, rows, results))


def _job(filling: Filling, fillings: Sequence[Filling]) -> str:
    """Return the overrides that tell a filling from others of its row, variant and data set."""
    same = [
        f
        for f in fillings
        if (f.row, f.variant, f.on) == (filling.row, filling.variant, filling.on)
    ]
    common = set.intersection(*(set(f.overrides) for f in same))
    return " ".join(word for word in filling.overrides if word not in common)


def _notes(table: str, rows: list[Row], results: Path) -> list[str]:
    ran = [row for row in rows if row.runs]
    runs = [run for row in ran for run in row.runs]
    notes = [*EPSILONS, *papers.notes(table), *data_notes(runs), *_baselines(runs)]
    notes += [sentence for family in _families(ran) for sentence in family.sentences(results)]
    if any(" to " in row.tight for row in ran):
        notes.append(INTERVAL)
    if any(row.per_unit not in ("", row.tight) for row in ran):
        notes.append(PER_UNIT)
    return [*notes, *not_run(row.filling for row in rows if not row.runs)]


def not_run(fillings: Iterable[Filling]) -> list[str]:
    """Return a sentence for each recipe with jobs that were not run: the command."""
    lacking: dict[str, dict[str, Filling]] = {}
    for filling in fillings:
        if not filling.on:
            lacking.setdefault(filling.recipe, {})[filling.digest] = filling
    notes = []
    for recipe, jobs in lacking.items():
        several = f"{len(jobs)} jobs of `zdp-bench run -m recipe={recipe}`"
        one = f"`{next(iter(jobs.values())).command}`"
        notes.append(f"Not run: {one if len(jobs) == 1 else several}.")
    return notes


def _families(rows: list[Row]) -> list[Family]:
    """Return the rows that can be compared with one another: one metric, run on the same data."""
    families: dict[tuple[str, str], Family] = {}
    for row in rows:
        key = row.metric.column, row.runs[0]["data"]["digest"]
        families.setdefault(key, Family(row.metric.column, {})).rows[row.label] = row.runs
    return list(families.values())


def _baselines(runs: list[Record]) -> list[str]:
    """Return the metrics of the zero-filled images that reconstructions start from."""
    notes = set()
    for run in runs:
        shown = [
            f"{name.removeprefix('zero_filled_')} {value:.4g}"
            for name, value in run["metrics"].items()
            if name.startswith("zero_filled_")
        ]
        if shown:
            notes.add(f"{run['data']['name']}, zero-filled: {', '.join(shown)}.")
    return sorted(notes)


def data_notes(runs: Iterable[Record]) -> list[str]:
    """Return what the runs' data sets say of themselves, each once."""
    notes = {
        f"{data['name']}: {data['provenance']}, {data['notes']}."
        for data in (run["data"] for run in runs)
        if data["notes"]
    }
    return sorted(notes)


def origin(table: str) -> str:
    """The sentence that says what made a page of `results/tables`."""
    return f"`zdp-bench table {table}` made this from the records; do not edit."
