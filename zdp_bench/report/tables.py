"""Builds a paper's table: its numbers beside ours, with difference, both ε and provenance.

A recipe's `claims` names the row it fills; a recipe that sweeps fills a row with each of its jobs.
A run on other data than the paper's has a row of its own. An empty cell shows the command that
fills it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.report import papers
from zdp_bench.report.comparisons import Family
from zdp_bench.report.number_format import epsilon, interval, mean_and_deviation
from zdp_bench.report.papers import Reference
from zdp_bench.report.sheet import Sheet

COLUMNS = (
    "row",
    "metric",
    "paper",
    "ours",
    "difference",
    "ε printed",
    "ε claimed",
    "ε tight",
    "ε per unit",
    "δ",
    "provenance",
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
OTHER_DATA = (
    "Rows 'on' another data set than the paper's are no reproduction, and are compared with no "
    "number of it."
)

Missing = Mapping[str, str]  # experiment digest -> why it was not run


@dataclass(frozen=True)
class Filling:
    """What fills a row: a job of a recipe, as the recipe stands now.

    Attributes:
        overrides: of the job, beside `recipe=`.
        digest: the experiment digest of its runs.
        on: the data set, where it is not the recipe's own: 'NAME, OPTION=VALUE, ...'.
    """

    recipe: str
    overrides: tuple[str, ...]
    row: str
    variant: str | None
    digest: str
    on: str | None = None

    def fits(self, run: Record) -> bool:
        """True if a run fills the cell: it has this experiment digest, whatever its recipe.

        The digest covers all that a run computes but its seed. A run with any other key
        overridden, or made before the recipe changed, has another digest and fills nothing.
        """
        return bool(run["experiment"] == self.digest)

    @property
    def command(self) -> str:
        """The command whose runs fill the cell."""
        name, *options = re.split(r", (?=\w+=)", self.on) if self.on else [""]
        words = [f"dataset={name}"] if name else []
        words = [shlex.quote(w) for w in [*words, *(f"dataset.{option}" for option in options)]]
        return " ".join(["zdp-bench run", f"recipe={self.recipe}", *self.overrides, *words])


@dataclass(frozen=True)
class Row:
    """One line of a table: a metric of one of the paper's rows, and our runs of it.

    Attributes:
        epsilon_printed: as the paper prints it; None where it prints none.
        epsilon_rdp: what the paper prints by RDP accounting beside it; None where it does not.
        missing: why there are no runs, if that is known.
    """

    filling: Filling
    metric: Reference
    epsilon_printed: str | None
    runs: Sequence[Record]
    missing: str = ""
    epsilon_rdp: str | None = None

    @property
    def label(self) -> str:
        """The paper's name of the row, with what is ours about it."""
        return mark(self.metric.label, self.filling.variant, self.filling.on)

    @property
    def paper(self) -> float | None:
        """The paper's number; None where it prints none, or ours is on other data."""
        return None if self.filling.on else self.metric.number

    @property
    def scale(self) -> float:
        """Turns a recorded metric into the paper's unit."""
        return 100.0 if self.metric.unit == "%" else 1.0

    @cached_property
    def values(self) -> list[float]:
        """The metric of each run, as recorded."""
        return [run["metrics"][self.metric.column] for run in self.runs]

    @property
    def mean(self) -> float:
        """The mean over all runs, in the paper's unit."""
        return mean(self.values) * self.scale

    @property
    def privacy(self) -> dict[str, Any]:
        """What the runs spent: the same for every seed, because no ε depends on data."""
        unnamed = {"unit": "patient"}  # in records of older versions
        return unnamed | self.runs[0]["privacy"]

    @property
    def provenance(self) -> str:
        """The provenance of the data; empty without runs."""
        return self.runs[0]["data"]["provenance"] if self.runs else ""

    @cached_property
    def cells(self) -> dict[str, str]:
        """What each column shows."""
        cells = dict.fromkeys(COLUMNS, "")
        cells |= {"row": self.label, "metric": self.metric.column.replace("_", " ")}
        if not self.filling.on:
            printed = (self.epsilon_printed or "").replace("inf", "∞")
            printed += f" ({self.epsilon_rdp} by RDP)" if self.epsilon_rdp else ""
            cells |= {"paper": self.metric.printed, "ε printed": printed}
        if not self.runs:
            return cells | {"ours": f"not run: {self.missing or f'`{self.filling.command}`'}"}
        spent = self.privacy
        return cells | {
            "ours": mean_and_deviation(self.values, self.metric.unit),
            "difference": self._difference(),
            "ε claimed": epsilon(spent["epsilon_claimed"]),
            "ε tight": interval(spent.get("epsilon_tight_at_least"), spent["epsilon_tight"]),
            "ε per unit": self._per_unit(),
            "δ": f"{spent['delta']:g}",
            "provenance": self.provenance,
        }

    def _difference(self) -> str:
        if self.paper is None or math.isnan(self.mean):
            return ""
        difference = self.mean - self.paper
        return f"{difference:+.2f}" if self.metric.unit == "%" else f"{difference:+.3g}"

    def _per_unit(self) -> str:
        spent = self.privacy
        if "epsilon_patient" not in spent:
            return ""
        tight = interval(spent.get("epsilon_tight_at_least"), spent["epsilon_tight"])
        together = interval(spent.get("epsilon_patient_at_least"), spent["epsilon_patient"])
        return together if together == tight else f"{together} ({spent['unit']})"

    @property
    def numbers(self) -> dict[str, object]:
        """What the CSV holds: the numbers behind the cells, unrounded."""
        numbers: dict[str, object] = {
            "row": self.label,
            "recipe": self.filling.recipe,
            "overrides": " ".join(self.filling.overrides),
            "on": self.filling.on,
            "variant": self.filling.variant,
            "metric": self.metric.column,
            "unit": self.metric.unit,
            "paper": self.paper,
            "epsilon_printed": None if self.filling.on else self.epsilon_printed,
            "n": len(self.runs),
        }
        if not self.runs:
            return numbers
        spent = self.privacy
        return numbers | {
            "mean": round(self.mean, 6),
            "lowest": round(min(self.values) * self.scale, 6),
            "highest": round(max(self.values) * self.scale, 6),
            "values": " ".join(f"{value * self.scale:.6g}" for value in self.values),
            "seeds": " ".join(str(run["seed"]) for run in self.runs),
            "epsilon_claimed": spent["epsilon_claimed"],
            "claimed_by": spent["claimed_by"],
            "epsilon_tight": spent["epsilon_tight"],
            "epsilon_tight_at_least": spent.get("epsilon_tight_at_least"),
            "epsilon_patient": spent.get("epsilon_patient"),
            "records_per_patient": spent.get("records_per_patient"),
            "privacy_unit": spent["unit"],
            "delta": spent["delta"],
            "z": spent["z"],
            "steps": spent["steps"],
            "provenance": self.provenance,
            "runs": " ".join(run["run"][:16] for run in self.runs),
        }


@dataclass(frozen=True)
class Table:
    """A paper's table with our runs in it."""

    name: str
    title: str
    rows: list[Row]
    notes: list[str]

    @property
    def columns(self) -> list[str]:
        """The columns shown: ε per unit only where it differs from a record's."""
        return [column for column in COLUMNS if column != "ε per unit" or _units_differ(self.rows)]

    def sheet(self) -> Sheet:
        """Return the table ready to show."""
        columns = self.columns
        cells = [[row.cells[column] for column in columns] for row in self.rows]
        numbers = [row.numbers for row in self.rows]
        return Sheet(self.title, columns, cells, self.notes, origin(self.name), numbers)

    def as_rich(self) -> list[Any]:
        """Return what the terminal shows, part by part."""
        return [self.sheet().as_rich()]

    def write(self, results: Path) -> list[Path]:
        """Write `results/tables/PAPER_tableN.md` and `.csv`."""
        return self.sheet().write(results / "tables" / papers.file_stem(self.name))


def build(
    table: str, results: Path, fillings: Sequence[Filling], missing: Missing | None = None
) -> Table:
    """Lay a table out: a line for each metric of each row, in the paper's order, then our variants.

    Args:
        fillings: what may stand in the table (see `experiments.claims.fillings`).
        missing: why jobs were not run, where that is known.

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
    rows = []
    for filling in fillings:
        runs = fitting(every, [filling])
        why = (missing or {}).get(filling.digest, "")
        printed = {number.column: number for number in numbers if number.row == filling.row}
        claims = [printed.pop(name, None) for name in ("epsilon", "epsilon_rdp")]
        claim, rdp = (found.value if found else None for found in claims)
        rows += [Row(filling, metric, claim, runs, why, rdp) for metric in printed.values()]
    title = f"{numbers[0].paper}, Table {numbers[0].table}"
    return Table(table, title, rows, _notes(table, rows, results))


def fitting(every: Iterable[Record], fillings: Sequence[Filling]) -> list[Record]:
    """Return the runs that fit any of `fillings`; a run that two recipes made counts once."""
    runs: dict[str, Record] = {}
    for run in every:
        if any(filling.fits(run) for filling in fillings):
            runs.setdefault(run["run"], run)
    return sorted(runs.values(), key=lambda run: int(run["seed"]))


def _notes(table: str, rows: list[Row], results: Path) -> list[str]:
    runs = [run for row in rows for run in row.runs]
    notes = [*EPSILONS, *papers.notes(table), *data_notes(runs), *_baselines(runs)]
    notes += [sentence for family in _families(rows) for sentence in family.sentences(results)]
    if any(" to " in row.cells["ε tight"] for row in rows):
        notes.append(INTERVAL)
    if _units_differ(rows):
        notes.append(PER_UNIT)
    for recipe in dict.fromkeys(row.filling.recipe for row in rows if row.filling.variant):
        notes.append(f"Rows marked 'ours' are variants of ours, not of the paper; recipe {recipe}.")
    if any(row.filling.on for row in rows):
        notes.append(OTHER_DATA)
    return notes


def _families(rows: list[Row]) -> list[Family]:
    """Return the rows that can be compared with one another: one metric, run on the same data."""
    families: dict[tuple[str, str], Family] = {}
    for row in rows:
        if row.runs:
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


def _units_differ(rows: list[Row]) -> bool:
    """True if some row's ε of a patient or image differs from its ε of a record."""
    return any(row.cells["ε per unit"] not in ("", row.cells["ε tight"]) for row in rows)


def data_notes(runs: Iterable[Record]) -> list[str]:
    """Return what the runs' data sets say of themselves, each once."""
    notes = {
        f"{data['name']}: {data['provenance']}, {data['notes']}."
        for data in (run["data"] for run in runs)
        if data["notes"]
    }
    return sorted(notes)


def mark(label: str, variant: str | None, on: str | None) -> str:
    """'MNIST', 'tuned', 'fashion_mnist' -> 'MNIST (tuned, ours; on fashion_mnist)'."""
    marks = ([f"{variant}, ours"] if variant else []) + ([f"on {on}"] if on else [])
    return label + (f" ({'; '.join(marks)})" if marks else "")


def origin(table: str) -> str:
    """The sentence that says what made a page of `results/tables`."""
    return f"`zdp-bench table {table}` made this from the records; do not edit."
