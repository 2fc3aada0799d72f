"""Builds a paper's table: a cell for each of its numbers, and beside it all runs that fill it.

`PAPER_tableN.md` and `.csv` hold the cells (`cells.Cell`), a line each: as published, our best,
what differs, and a status. `PAPER_tableN_runs.md` and `.csv` hold every run with its command, the
statistics and the notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import stdev
from typing import Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.report import cells, names, papers
from zdp_bench.report.cells import (
    EPSILON_COLUMNS,
    RULE,
    Cell,
    Count,
    Filling,
    Measured,
    Rules,
    Verdict,
)
from zdp_bench.report.comparisons import Family
from zdp_bench.report.number_format import epsilon
from zdp_bench.report.sheet import Sheet

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
# What the CSV of the cells holds of each number of ours.
MEASURED = (
    "mean",
    "deviation",
    "n",
    "over",
    "paper_data",
    "recipe",
    "variant",
    "data",
    "provenance",
    "epsilon_claimed",
    "epsilon_tight",
    "epsilon_unit",
    "unit",
)
# Of a record's section on privacy, what the CSV of the runs holds.
SPENT = (
    "epsilon_claimed",
    "claimed_by",
    "epsilon_tight",
    "epsilon_tight_at_least",
    "epsilon_patient",
    "examples_per_patient",
)
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
    "± is over seeds, or over folds where it says so. In brackets: on other data than the paper's, "
    "compared with nothing. Reduced: with less training, or a smaller network, than the paper's, "
    "on whatever data. Best of ours: the one variant of a row that `paper.yaml` leaves, not the "
    "best on the test set; its recipe says what its settings were chosen on. It is not shown if "
    "its tight ε is larger than that of the row as published, or its result is worse. ε tight is "
    "the privacy loss distribution of what was really run; hyper-parameter search is in no ε."
)


@dataclass(frozen=True)
class Table:
    """A paper's table.

    Attributes:
        rows: all that may stand in it, with or without runs: a job by a metric.
        cells: one for each number of the paper.
        notes: sentences below all runs.
        remarks: sentences below the cells and below all runs.
    """

    name: str
    title: str
    rows: list[Measured]
    cells: list[Cell]
    notes: list[str]
    remarks: Sequence[str] = ()

    @property
    def count(self) -> Count:
        """How many of its cells have which status."""
        return Count.count(cell.standing for cell in self.cells)

    @property
    def stem(self) -> str:
        """The name of its files."""
        return papers.file_stem(self.name)

    def sheet(self) -> Sheet:
        """Return the cells ready to show, a line each."""
        lines = [show(cell) for cell in self.cells]
        notes = [*self.remarks, READING, RULE]
        if any(" to " in line["ε printed / tight"] for line in lines):
            notes.append(INTERVAL)
        notes.append(f"Commands, other variants and statistics: `{self.stem}_runs.md`.")
        head = f"{self.count.sentence}\n\n{origin(self.name)}"
        shown = [list(line.values()) for line in lines]
        return Sheet(self.title, list(lines[0]), shown, notes, head, [*map(_numbers, self.cells)])

    def runs_sheet(self) -> Sheet:
        """Return every run, ready to show; what was not run is in the notes."""
        shown = [_show_runs(row) for row in self.rows if row.runs]
        notes = [*self.remarks, *self.notes]
        numbers = [*map(_numbers_of_runs, self.rows)]
        title = f"{self.title}: the runs"
        return Sheet(title, RUN_COLUMNS, shown, notes, origin(self.name), numbers)

    def verdicts(self, missing: Mapping[str, str]) -> list[Verdict]:
        """Return what became of every cell.

        Args:
            missing: experiment digest -> why it was not run, where that is known.
        """
        return [
            Verdict(
                self.name,
                cell.metric.label,
                show(cell)["metric"],
                cell.standing,
                self._explain(cell, missing),
            )
            for cell in self.cells
        ]

    def _explain(self, cell: Cell, missing: Mapping[str, str]) -> str:
        """Return in words why a cell has its status."""
        if cell.difference is not None:
            return f"Δ {show(cell)['Δ']}"
        if cell.measured:
            return cell.differs
        rows = [row for row in self.rows if row.metric == cell.metric]
        known = [missing[row.filling.digest] for row in rows if row.filling.digest in missing]
        runs = [run for row in rows for run in row.runs]
        made_up = bool(runs) and all(run["data"]["provenance"] == "synthetic" for run in runs)
        generated = "run on generated data" if made_up else ""
        return next(filter(None, [*known, generated]), cell.reason)

    def as_rich(self) -> list[Any]:
        """Return what the terminal shows, part by part."""
        return [replace(self.sheet(), title=f"{self.title}. {self.count.sentence}")]

    def as_text(self, form: str) -> str:
        """Return the cells in one of `sheet.FORMS`."""
        return self.sheet().as_text(form)

    def write(self, results: Path) -> list[Path]:
        """Write `results/tables/PAPER_tableN.md` and `.csv`, and both with `_runs`."""
        folder = results / "tables"
        runs = self.runs_sheet().write(folder / f"{self.stem}_runs")
        return [*self.sheet().write(folder / self.stem), *runs]


def show(cell: Cell) -> dict[str, str]:
    """Return what each column shows of a cell."""
    difference = "" if cell.difference is None else f"{cell.difference:+.3g}"
    if cell.difference is not None and cell.metric.unit == "%":
        difference = f"{cell.difference:+.2f}"
    return {
        "row": cell.metric.label,
        "metric": names.metric(cell.metric.column),
        "paper": cell.metric.printed,
        "as published": _show_measured(cell.published),
        "Δ": difference,
        "best of ours": _show_measured(cell.best),
        "what differs": cell.differs,
        "ε printed / tight": _show_epsilons(cell),
        "status": f"{cell.status} ({cell.reason})" if cell.reason else cell.status,
    }


def _show_measured(ours: Measured | None) -> str:
    """Return mean and deviation, in brackets if it is not on the paper's data."""
    if not ours:
        return ""
    return ours.shown if ours.on_paper_data else f"[{ours.shown}]"


def _show_epsilons(cell: Cell) -> str:
    """Return 'printed / tight'; behind that of a record a unit's, if it differs."""
    printed = (cell.epsilon_printed or "–").replace("inf", "∞")
    printed += f" ({cell.epsilon_rdp} by RDP)" if cell.epsilon_rdp else ""
    spent: list[str] = []
    for ours in cell.measured.values():
        value, _, unit = ours.per_unit.partition(" (")
        shown = f"{ours.tight} ({unit[:-1]} {value})" if unit else ours.tight
        if shown not in spent:
            spent.append(f"best {shown}" if spent else shown)
    if not spent or spent == [printed] == ["∞"]:
        return printed
    return f"{printed} / {', '.join(spent)}"


def _numbers(cell: Cell) -> dict[str, object]:
    """Return what the CSV holds of a cell: the numbers behind it, unrounded."""
    return {
        "row": cell.metric.row,
        "label": cell.metric.label,
        "metric": cell.metric.column,
        "unit": cell.metric.unit,
        "paper": cell.metric.number,
        "status": cell.status,
        "protection": cell.standing.protection,
        "runs": cell.standing.runs,
        "reason": cell.reason,
        "difference": None if cell.difference is None else round(cell.difference, 6),
        "differs": cell.differs,
        "epsilon_printed": cell.epsilon_printed,
        "epsilon_rdp": cell.epsilon_rdp,
        **_numbers_of(cell.published, "published"),
        **_numbers_of(cell.best, "best"),
    }


def _numbers_of(ours: Measured | None, prefix: str) -> dict[str, object]:
    """Return the numbers behind what was measured, with `prefix` before each name."""
    values: tuple[object, ...] = (None,) * len(MEASURED)
    if ours:
        spread = stdev(ours.values) * ours.scale if len(ours.values) > 1 else None
        values = (
            round(ours.mean, 6),
            None if spread is None else round(spread, 6),
            len(ours.values),
            "folds" if ours.over_folds else "seeds",
            ours.on_paper_data,
            ours.filling.recipe,
            ours.filling.variant,
            ours.data["name"],
            ours.data["provenance"],
            ours.privacy["epsilon_claimed"],
            ours.privacy["epsilon_tight"],
            ours.privacy.get("epsilon_patient"),
            ours.privacy["unit"],
        )
    return {f"{prefix}_{name}": value for name, value in zip(MEASURED, values, strict=True)}


def _show_runs(row: Measured) -> list[str]:
    """Return what `RUN_COLUMNS` show of a job's runs."""
    return [
        row.label,
        names.metric(row.metric.column),
        row.shown,
        epsilon(row.privacy["epsilon_claimed"]),
        row.tight,
        row.per_unit,
        f"{row.privacy['delta']:g}",
        row.data["provenance"],
        f"`{row.filling.command}`",
    ]


def _numbers_of_runs(row: Measured) -> dict[str, object]:
    """Return what the CSV holds of a job: the numbers behind its cells, unrounded."""
    numbers: dict[str, object] = {
        "row": row.label,
        "recipe": row.filling.recipe,
        "overrides": " ".join(row.filling.overrides),
        "on": row.filling.on,
        "variant": row.filling.variant,
        "metric": row.metric.column,
        "unit": row.metric.unit,
        "n": len(row.runs),
    }
    if not row.runs:
        return numbers
    spent = row.privacy
    return numbers | {
        "mean": round(row.mean, 6),
        "lowest": round(min(row.values) * row.scale, 6),
        "highest": round(max(row.values) * row.scale, 6),
        "values": " ".join(f"{value * row.scale:.6g}" for value in row.values),
        "seeds": " ".join(str(run["seed"]) for run in row.runs),
        **{name: spent.get(name) for name in SPENT},
        "privacy_unit": spent["unit"],
        **{name: spent[name] for name in ("delta", "z", "steps")},
        "provenance": row.data["provenance"],
        "runs": " ".join(run["run"][:16] for run in row.runs),
    }


def build(table: str, results: Path, fillings: Sequence[Filling]) -> Table:
    """Lay a table out: a cell for each of its numbers, in the paper's order.

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
    rules = cells.rules_of(table)
    shown = [number for number in numbers if number.column not in EPSILON_COLUMNS]
    rows = [
        replace(row, label=_label(row, fillings, rules))
        for row in cells.measure(shown, fillings, every, rules)
    ]
    title = f"{numbers[0].paper}, Table {numbers[0].table}"
    made = cells.make_cells(numbers, rows, rules)
    return Table(table, title, rows, made, _notes(table, rows, results))


def _label(row: Measured, fillings: Sequence[Filling], rules: Rules) -> str:
    """Return the paper's name of a row, with what is ours about it.

    Behind it stand the overrides that tell a job from others of its row, variant and data set.
    """
    own = row.filling
    same = [
        set(one.overrides)
        for one in fillings
        if (one.row, one.variant, one.on) == (own.row, own.variant, own.on)
    ]
    job = " ".join(word for word in own.overrides if word not in set.intersection(*same))
    label = cells.mark(row.metric.label, own.variant and rules.of_variant(own.variant), own.on)
    return f"{label}, {job}" if job else label


def _notes(table: str, rows: list[Measured], results: Path) -> list[str]:
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


def _families(rows: list[Measured]) -> list[Family]:
    """Return the rows that can be compared with one another: one metric, run on the same data."""
    families: dict[tuple[str, str], Family] = {}
    for row in rows:
        key = row.metric.column, row.data["digest"]
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
