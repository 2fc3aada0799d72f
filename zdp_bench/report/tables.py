"""A paper's table, its numbers beside ours: row, paper, ours, difference, claimed ε, tight ε, provenance.

The paper's numbers come from `results/reference/PAPER_tableN.csv`; which recipe fills which row stands in the recipe's
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

from zdp_bench import assets, records
from zdp_bench.errors import UserError, unknown
from zdp_bench.records import Record
from zdp_bench.report.comparisons import Family
from zdp_bench.report.number_format import epsilon, interval, mean_and_deviation

# What every table and figure of a paper has to say of its runs, beside what the runs say themselves.
OF_PAPER = {
    "zeta_dp_2021": "Private runs draw Poisson batches; the paper's A.3 draws them at a fixed size without replacement, and at "
    "its σ, q and steps those have a larger tight ε: PhaseMNIST 30 to 33, MNIST 10 to 11, ECG 6 to 7, speech 30 to 31, "
    "MRI 10 to 11 (`epsilon.md`).",
    "dp_dfa_2020": "C is read in two ways: `epsilon.md` takes it as what a modified record moves (Figure 2, σ = 0.03: z = 5.12), "
    "the runs here as the bound of one record's share (z = 2.56), so their tight ε is larger than there.",
}

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
class Reference:
    """One number of a paper, as printed: `results/reference/*.csv` has these columns."""

    paper: str
    table: str
    row: str
    label: str
    column: str
    value: str
    unit: str
    where: str
    deviation: str = ""  # printed behind ±, where the paper prints one

    @property
    def printed(self) -> str:
        """The number as the paper prints it: '93.4 ± 0.01 %'; where it prints none, that in words and without a unit."""
        unit = "" if _plain(self.value) is None else self.unit
        return " ".join(
            part for part in (self.value, self.deviation and f"± {self.deviation}", unit) if part
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


def available() -> list[str]:
    """Every table there is reference data for: PAPER/N, and PAPER/figN for a figure's curves (see `curves`)."""
    found = [
        path.stem
        for pattern in ("*_table*.csv", "*_fig*.csv")
        for path in sorted(assets.REFERENCE.glob(pattern))
    ]
    return [stem.replace("_table", "/").replace("_fig", "/fig") for stem in found]


def reference(table: str) -> list[Reference]:
    """The paper's numbers of a table.

    Raises:
        UserError: no such table.
    """
    if table not in available():
        raise unknown("table", table, available())
    text = (assets.REFERENCE / f"{file_stem(table)}.csv").read_text(encoding="utf-8")
    return [Reference(**line) for line in csv.DictReader(io.StringIO(text))]


def check_claims(table: str | None, row: str | None) -> None:
    """Refuse a claim to a cell that no paper has.

    Raises:
        UserError: there is no such table, or no such row in it.
    """
    if table is None:
        return
    if table not in available():
        raise unknown("claims.table", table, [*available(), "null"])
    rows = {number.row for number in reference(table)}
    if row not in rows:
        raise unknown(f"claims.table={table} has other rows: claims.row", row or "null", rows)


def file_stem(table: str) -> str:
    """'zeta_dp_2021/1' -> 'zeta_dp_2021_table1'; 'dp_dfa_2020/fig2' -> 'dp_dfa_2020_fig2'."""
    paper, _, number = table.partition("/")
    return f"{paper}_{number}" if number.startswith("fig") else f"{paper}_table{number}"


def recipes_of(table: str) -> list[str]:
    """The recipes that claim rows of a table, by name.

    Raises:
        UserError: no such table.
    """
    if table not in available():
        raise unknown("table", table, available())
    claims = {
        name: assets.read_yaml(path).get("claims") or {}
        for name, path in assets.group(assets.RECIPES).items()
    }
    return [name for name, claim in claims.items() if claim.get("table") == table]


def build(table: str, results: Path, fillings: Sequence[Filling]) -> Table:
    """Lay a table out, a line for each metric of each row, in the paper's order; a variant of ours follows the row it varies.

    Args:
        fillings: what may stand in the table (see `claims.fillings`).

    Raises:
        UserError: no such table, or one that no recipe fills.
    """
    numbers = reference(table)
    if not recipes_of(table):
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
        *of_paper(table),
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


def of_paper(table: str) -> list[str]:
    """What the paper's tables and figures all have to say."""
    return [note for paper, note in OF_PAPER.items() if table.startswith(f"{paper}/")]


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
        plain["paper"] = _plain(metric.value)
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


def _plain(value: str) -> float | None:
    """The number a paper prints, or None where it prints none ('not given')."""
    try:
        return float(value)
    except ValueError:
        return None


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
