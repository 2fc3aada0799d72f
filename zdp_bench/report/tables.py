"""A paper's table, its numbers beside ours: row, paper, ours, difference, claimed ε, tight ε, provenance.

The paper's numbers come from `papers/PAPER/tableN.csv`; which recipe fills which row stands in the recipe's
`claims`; a recipe that sweeps (`hydra.sweeper.params`) fills a row with each of its jobs. A record fills a cell only if it ran
the recipe as it stands now, nothing overridden but the seed; a run on another data set has a line of its own, marked. A cell
without a record is empty and says which command fills it.
"""

from __future__ import annotations

import csv
import io
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.table import Table as RichTable

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.report import papers
from zdp_bench.report.comparisons import Family
from zdp_bench.report.number_format import epsilon, interval, mean_and_deviation
from zdp_bench.report.papers import Reference, file_stem

INTERVAL = (
    "ε 'A to B': batches of fixed size have no exact law known. A is what an attack on two data sets that exist reaches, "
    "B is proven; quote B."
)

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


@dataclass(frozen=True)
class Filling:
    """What fills a row: the runs of a recipe that have one digest.

    Attributes:
        overrides: beside `recipe=`: a recipe that sweeps fills a row with each of its jobs.
        digest: the experiment digest its runs must have: the recipe as it stands now.
        on: the data set, where it is another than the recipe's own.
    """

    recipe: str
    overrides: tuple[str, ...]
    row: str
    variant: str | None
    digest: str
    on: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of a table: the cells as shown, and the plain numbers behind them."""

    cells: dict[str, str]
    numbers: dict[str, object]


@dataclass(frozen=True)
class Table:
    """A table ready to print."""

    name: str
    title: str
    rows: list[Row]
    notes: list[str]

    @property
    def columns(self) -> list[str]:
        """The columns shown: a patient's or image's ε only where one is in more than one record."""
        return [column for column in COLUMNS if column != "ε per unit" or _units_differ(self.rows)]


def build(table: str, results: Path, fillings: Sequence[Filling]) -> Table:
    """Lay a table out, a line for each metric of each row, in the paper's order; a variant of ours follows the row it varies.

    Args:
        fillings: what may stand in the table (see `claims.fillings`).

    Raises:
        UserError: no such table, or one that no recipe fills.
    """
    numbers = papers.reference(table)
    if not papers.recipes_of(table):
        raise UserError(
            f"table '{table}' is filled by no recipe; its numbers are measured by `zdp-bench bench {table}`."
        )
    order = list(dict.fromkeys(number.row for number in numbers))
    fillings = sorted(fillings, key=lambda f: (order.index(f.row), f.variant or "", f.on or ""))
    every = records.read_all(results)
    rows, shown = [], []
    families: dict[
        tuple[str, str], Family
    ] = {}  # metric and data digest -> rows that can be compared with one another
    for filling in fillings:
        runs = [
            r for r in every if (r["recipe"], r["experiment"]) == (filling.recipe, filling.digest)
        ]
        shown += runs
        printed = {number.column: number for number in numbers if number.row == filling.row}
        for metric in (number for column, number in printed.items() if column != "epsilon"):
            rows.append(_row(filling, metric, printed.get("epsilon"), runs))
            if runs:
                family = families.setdefault(
                    (metric.column, runs[0]["data"]["digest"]), Family(metric.column, {})
                )
                family.rows[rows[-1].cells["row"]] = runs
    notes = [
        "ε claimed: by the paper's own accountant and convention. ε tight: the privacy loss distribution of what was really run.",
        "Hyper-parameter search is not counted in any ε.",
        *papers.notes(table),
    ]
    notes += sorted(
        {
            f"{r['data']['name']}: {r['data']['provenance']}, {r['data']['notes']}."
            for r in shown
            if r["data"]["notes"]
        }
    )
    notes += sorted({words for run in shown if (words := _baseline(run))})
    notes += [sentence for family in families.values() for sentence in family.sentences(results)]
    if any(" to " in row.cells["ε tight"] for row in rows):
        notes.append(INTERVAL)
    if _units_differ(rows):
        notes.append(
            "ε per unit: of all training records that one patient, or the unit named behind it, is in, together; the other ε "
            "are of one record."
        )
    ours = dict.fromkeys(f.recipe for f in fillings if f.variant)
    notes += [
        f"Rows marked 'ours' are variants of ours, not of the paper; recipe {recipe}."
        for recipe in ours
    ]
    if any(f.on for f in fillings):
        notes.append(
            "Rows 'on' another data set than the paper's are no reproduction, and are compared with no number of it."
        )
    return Table(table, f"{numbers[0].paper}, Table {numbers[0].table}", rows, notes)


def _units_differ(rows: list[Row]) -> bool:
    """Whether, in some row, a patient's or image's ε is another than a record's."""
    return any(row.cells["ε per unit"] not in ("", row.cells["ε tight"]) for row in rows)


def _baseline(run: Record) -> str:
    """What the metrics are of the zero-filled image that a reconstruction starts from; empty for a run without one."""
    of = {
        name.removeprefix("zero_filled_"): value
        for name, value in run["metrics"].items()
        if name.startswith("zero_filled_")
    }
    return (
        f"{run['data']['name']}, zero-filled: "
        + ", ".join(f"{n} {v:.4g}" for n, v in of.items())
        + "."
        if of
        else ""
    )


def _row(filling: Filling, metric: Reference, printed: Reference | None, runs: list[Record]) -> Row:
    marks = ([f"{filling.variant}, ours"] if filling.variant else []) + (
        [f"on {filling.on}"] if filling.on else []
    )
    label = metric.label + (f" ({'; '.join(marks)})" if marks else "")
    cells = dict.fromkeys(COLUMNS, "")
    cells |= {"row": label, "metric": metric.column.replace("_", " ")}
    plain: dict[str, object] = {
        "recipe": filling.recipe,
        "overrides": " ".join(filling.overrides),
        "on": filling.on,
    }
    plain |= {"variant": filling.variant, "metric": metric.column, "unit": metric.unit}
    plain |= {"paper": None, "epsilon_printed": None}
    if not filling.on:  # a number on other data is compared with nothing
        cells["paper"] = metric.printed
        plain["paper"] = metric.number
        if printed:
            cells["ε printed"] = printed.value.replace("inf", "∞")
            plain["epsilon_printed"] = printed.value
    if not runs:
        words = [f"recipe={filling.recipe}", *filling.overrides, *_dataset_words(filling.on)]
        cells["ours"] = f"not run: `zdp-bench run {' '.join(words)}`"
        return Row(cells, plain | {"n": 0})
    values = [run["metrics"][metric.column] for run in runs]
    scale = 100.0 if metric.unit == "%" else 1.0
    ours = mean(values) * scale
    privacy = runs[0]["privacy"]  # the same for every seed: no ε depends on data
    provenance = runs[0]["data"]["provenance"]
    cells |= {
        "ours": mean_and_deviation(values, metric.unit),
        "ε claimed": epsilon(privacy["epsilon_claimed"]),
        "ε tight": interval(privacy.get("epsilon_tight_at_least"), privacy["epsilon_tight"]),
        "δ": f"{privacy['delta']:g}",
        "provenance": provenance,
    }
    if isinstance(plain["paper"], float) and not math.isnan(ours):
        cells["difference"] = (
            f"{ours - plain['paper']:+.2f}" if scale == 100.0 else f"{ours - plain['paper']:+.3g}"
        )
    unit = privacy.get("unit", "patient")  # records of older versions do not name it
    if "epsilon_patient" in privacy:
        together = interval(privacy.get("epsilon_patient_at_least"), privacy["epsilon_patient"])
        cells["ε per unit"] = together if together == cells["ε tight"] else f"{together} ({unit})"
    return Row(
        cells,
        plain
        | {
            "n": len(runs),
            "mean": round(ours, 6),
            "lowest": round(min(values) * scale, 6),
            "highest": round(max(values) * scale, 6),
            "values": " ".join(f"{value * scale:.6g}" for value in values),
            "seeds": " ".join(str(run["seed"]) for run in runs),
            "epsilon_claimed": privacy["epsilon_claimed"],
            "claimed_by": privacy["claimed_by"],
            "epsilon_tight": privacy["epsilon_tight"],
            "epsilon_tight_at_least": privacy.get("epsilon_tight_at_least"),
            "epsilon_patient": privacy.get("epsilon_patient"),
            "records_per_patient": privacy.get("records_per_patient"),
            "privacy_unit": unit,
            "delta": privacy["delta"],
            "z": privacy["z"],
            "steps": privacy["steps"],
            "provenance": provenance,
            "runs": " ".join(run["run"][:16] for run in runs),
        },
    )


def _dataset_words(on: str | None) -> list[str]:
    """The overrides that put the data set of a filling's label, `NAME, OPTION=VALUE, ...`, in its recipe."""
    name, *options = re.split(r", (?=\w+=)", on) if on else [""]
    return [
        shlex.quote(word)
        for word in ([f"dataset={name}"] if name else [])
        + [f"dataset.{option}" for option in options]
    ]


# ---------------------------------------------------------------------------------------------------------- writing


def as_rich(table: Table) -> RichTable:
    """The table on a terminal."""
    shown = RichTable(
        title=table.title,
        title_justify="left",
        caption="\n".join(table.notes),
        caption_justify="left",
    )
    for column in table.columns:
        shown.add_column(column)
    for row in table.rows:
        shown.add_row(*(row.cells[column] for column in table.columns))
    return shown


def as_markdown(table: Table) -> str:
    """The table as Markdown."""
    lines = [
        f"# {table.title}",
        "",
        f"`zdp-bench table {table.name}` made this from the records; do not edit.",
        "",
    ]
    lines += ["| " + " | ".join(table.columns) + " |", "|" + " --- |" * len(table.columns)]
    lines += [
        "| " + " | ".join(row.cells[column] for column in table.columns) + " |"
        for row in table.rows
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes)]) + "\n"


def as_csv(table: Table) -> str:
    """The numbers behind the table, unrounded, one column each."""
    columns = list(dict.fromkeys(key for row in table.rows for key in row.numbers))
    out = io.StringIO()
    writer = csv.DictWriter(out, ["row", *columns], lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        writer.writerow({"row": row.cells["row"], **row.numbers})
    return out.getvalue()


def write(table: Table, results: Path) -> list[Path]:
    """Write `results/tables/PAPER_tableN.md` and `.csv`."""
    stem = results / "tables" / file_stem(table.name)
    paths = [stem.with_suffix(".md"), stem.with_suffix(".csv")]
    records.write_text(paths[0], as_markdown(table))
    records.write_text(paths[1], as_csv(table))
    return paths
