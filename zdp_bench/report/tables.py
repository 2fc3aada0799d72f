"""A paper's table, its numbers beside ours: row, paper, ours, difference, claimed ε, tight ε, provenance.

The paper's numbers come from `results/reference/PAPER_tableN.csv`; which recipe fills which row stands in the recipe's
`claims`. A record fills a cell only if it ran the recipe as it stands now, nothing overridden but the seed. A cell without a
record is empty and says which command fills it.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.table import Table as RichTable

from zdp_bench import assets, records
from zdp_bench.errors import UserError, unknown
from zdp_bench.records import Record
from zdp_bench.report.numbers import epsilon, mean_and_deviation

COLUMNS = ("row", "metric", "paper", "ours", "difference", "ε printed", "ε claimed", "ε tight", "δ", "provenance")


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
        """The number as the paper prints it: '93.4 ± 0.01 %'."""
        return " ".join(part for part in (self.value, self.deviation and f"± {self.deviation}", self.unit) if part)


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


def available() -> list[str]:
    """Every table there is reference data for: PAPER/N."""
    return [path.stem.replace("_table", "/") for path in sorted(assets.REFERENCE.glob("*_table*.csv"))]


def reference(table: str) -> list[Reference]:
    """The paper's numbers of a table.

    Raises:
        UserError: no such table.
    """
    if table not in available():
        raise unknown("table", table, available())
    text = (assets.REFERENCE / f"{file_stem(table)}.csv").read_text(encoding="utf-8")
    return [Reference(**line) for line in csv.DictReader(io.StringIO(text))]


def file_stem(table: str) -> str:
    """'zeta_dp_2021/1' -> 'zeta_dp_2021_table1'."""
    paper, _, number = table.partition("/")
    return f"{paper}_table{number}"


def recipes_of(table: str) -> list[str]:
    """The recipes that fill a table's rows, in the table's order; a variant of ours follows the row it varies.

    Raises:
        UserError: no such table.
    """
    order = list(dict.fromkeys(number.row for number in reference(table)))
    claims = {name: assets.read_yaml(path).get("claims") or {} for name, path in assets.group(assets.RECIPES).items()}
    here = [name for name, claim in claims.items() if claim.get("table") == table]
    return sorted(here, key=lambda name: (order.index(claims[name]["row"]), claims[name].get("variant") or ""))


def build(table: str, results: Path, expected: dict[str, str]) -> Table:
    """Lay a table out.

    Args:
        expected: recipe -> the experiment digest its runs must have (see `config.experiment_digest`).

    Raises:
        UserError: no such table, or one that no recipe fills.
    """
    numbers = reference(table)
    if not recipes_of(table):
        raise UserError(f"table '{table}' is filled by no recipe; its numbers are measured by `zdp-bench bench {table}`.")
    found = [r for r in records.read_all(results) if expected.get(r["recipe"]) == r["experiment"]]
    rows = []
    for recipe in recipes_of(table):
        claim = assets.read_yaml(assets.group(assets.RECIPES)[recipe])["claims"]
        printed = {number.column: number for number in numbers if number.row == claim["row"]}
        rows.append(_row(recipe, claim, printed, [r for r in found if r["recipe"] == recipe]))
    notes = [
        "ε claimed: by the paper's own accountant and convention. ε tight: the privacy loss distribution of what was really run.",
        "Hyper-parameter search is not counted in any ε.",
    ]
    notes += sorted(
        {f"{r['data']['name']}: {r['data']['provenance']}, {r['data']['notes']}." for r in found if r["data"]["notes"]}
    )
    notes += [f"Rows marked 'ours' are variants of ours, not of the paper; recipe {r}." for r in recipes_of(table) if _variant(r)]
    return Table(table, f"{numbers[0].paper}, Table {numbers[0].table}", rows, notes)


def _variant(recipe: str) -> str | None:
    return assets.read_yaml(assets.group(assets.RECIPES)[recipe])["claims"].get("variant")


def _row(recipe: str, claim: dict[str, str], printed: dict[str, Reference], runs: list[Record]) -> Row:
    metric = next(number for column, number in printed.items() if column != "epsilon")
    variant = claim.get("variant")
    label = metric.label + (f" ({variant}, ours)" if variant else "")
    cells = dict.fromkeys(COLUMNS, "")
    cells |= {"row": label, "metric": metric.column.replace("_", " "), "paper": metric.printed}
    if "epsilon" in printed:
        cells["ε printed"] = printed["epsilon"].value.replace("inf", "∞")
    plain: dict[str, object] = {"recipe": recipe, "variant": variant, "metric": metric.column, "unit": metric.unit}
    plain |= {"paper": float(metric.value), "epsilon_printed": printed["epsilon"].value if "epsilon" in printed else None}
    if not runs:
        cells["ours"] = f"not run: `zdp-bench run recipe={recipe}`"
        return Row(cells, plain | {"n": 0})
    values = [run["metrics"][metric.column] for run in runs]
    scale = 100.0 if metric.unit == "%" else 1.0
    ours = mean(values) * scale
    privacy = runs[0]["privacy"]  # the same for every seed: no ε depends on data
    provenance = runs[0]["data"]["provenance"]
    cells |= {
        "ours": mean_and_deviation(values, metric.unit),
        "difference": f"{ours - float(metric.value):+.2f}",
        "ε claimed": epsilon(privacy["epsilon_claimed"]),
        "ε tight": epsilon(privacy["epsilon_tight"]),
        "δ": f"{privacy['delta']:g}",
        "provenance": provenance,
    }
    return Row(
        cells,
        plain
        | {
            "n": len(runs),
            "mean": round(ours, 6),
            "values": " ".join(f"{value * scale:.6g}" for value in values),
            "seeds": " ".join(str(run["seed"]) for run in runs),
            "epsilon_claimed": privacy["epsilon_claimed"],
            "claimed_by": privacy["claimed_by"],
            "epsilon_tight": privacy["epsilon_tight"],
            "delta": privacy["delta"],
            "z": privacy["z"],
            "steps": privacy["steps"],
            "provenance": provenance,
            "runs": " ".join(run["run"][:16] for run in runs),
        },
    )


# ---------------------------------------------------------------------------------------------------------- writing


def as_rich(table: Table) -> RichTable:
    """The table on a terminal."""
    shown = RichTable(title=table.title, title_justify="left", caption="\n".join(table.notes), caption_justify="left")
    for column in COLUMNS:
        shown.add_column(column)
    for row in table.rows:
        shown.add_row(*(row.cells[column] for column in COLUMNS))
    return shown


def as_markdown(table: Table) -> str:
    """The table as Markdown."""
    lines = [f"# {table.title}", "", f"`zdp-bench table {table.name}` made this from the records; do not edit.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(row.cells[column] for column in COLUMNS) + " |" for row in table.rows]
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
