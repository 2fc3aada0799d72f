"""Reads what papers print, from `papers/PAPER/tableN.csv`, `figN.csv` and `paper.yaml`.

A table is named PAPER/N, a figure PAPER/figN, and a table of our own (`papers/ours.yaml`) has a
name of one word. `papers/README.md` describes the files.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zdp_bench import assets
from zdp_bench.errors import UserError, unknown


@dataclass(frozen=True)
class Reference:
    """One number of a paper, as printed: a line of a `tableN.csv` or `figN.csv`."""

    paper: str
    table: str
    row: str
    label: str
    column: str
    value: str
    unit: str
    where: str
    deviation: str = ""  # the number after ±, if the paper prints one
    range: str = ""  # lowest and highest of all runs, '0.814 to 0.881'

    @property
    def number(self) -> float | None:
        """The number; None if the paper prints none ('not given')."""
        try:
            return float(self.value)
        except ValueError:
            return None

    @property
    def printed(self) -> str:
        """The number as printed, '93.4 ± 0.01 %'; words instead of a number have no unit."""
        unit = "" if self.number is None else self.unit
        spread = self.deviation and f"± {self.deviation}", self.range and f"({self.range})"
        return " ".join(part for part in (self.value, *spread, unit) if part)


@dataclass(frozen=True)
class Axes:
    """How a figure's curves are drawn: an entry of `figures` in `paper.yaml`.

    Attributes:
        title: What the figure shows, in one sentence.
        x: Dotted path in a record, or several joined by ' or ', of which the first that has a value
            is used; "epoch" makes every epoch of a run a point.
        label: Label of the x axis.
        log: Whether the x axis is logarithmic.
        columns: Number of panels side by side. Default: all.
    """

    title: str
    x: str
    label: str
    log: bool = False
    columns: int | None = None


def available() -> list[str]:
    """Return the names of all tables, then of all figures."""
    return [
        f"{path.parent.name}/{path.stem.removeprefix('table')}"
        for pattern in ("*/table*.csv", "*/fig*.csv")
        for path in sorted(assets.PAPERS.glob(pattern))
    ]


@cache
def ours() -> dict[str, dict[str, Any]]:
    """Return the definition of each table of our own by name: title, rows, notes."""
    return assets.read_yaml(assets.PAPERS / "ours.yaml")


@cache
def published() -> dict[str, Any]:
    """Return others' results at a stated ε by table and row, and their `works` by number."""
    return assets.read_yaml(assets.PAPERS / "published.yaml")


@cache
def titles() -> dict[str, str]:
    """Return each paper's name as people cite it: {'zeta_dp_2021': 'Ziller et al. 2021 (ζ-DP)'}."""
    names: dict[str, str] = {}
    for table in available():
        names.setdefault(table.partition("/")[0], reference(table)[0].paper)
    return names


def is_figure(table: str) -> bool:
    """True for PAPER/figN, a figure whose curves are shown as a table."""
    return table.partition("/")[2].startswith("fig")


def reference(table: str) -> list[Reference]:
    """Return the paper's numbers of a table or figure."""
    _require(table)
    text = _path(table).read_text(encoding="utf-8")
    return [Reference(**line) for line in csv.DictReader(io.StringIO(text))]


def settings(table: str) -> dict[str, Any]:
    """Return the contents of the paper.yaml of a paper or a table's paper; {} if there is none."""
    path = assets.PAPERS / table.partition("/")[0] / "paper.yaml"
    return assets.read_yaml(path) if path.is_file() else {}


def rows_of(table: str) -> list[str]:
    """Return the rows of a table or figure, or of a table of our own, in order."""
    if table in ours():
        return list(ours()[table]["rows"])
    return list(dict.fromkeys(number.row for number in reference(table)))


def notes(table: str) -> list[str]:
    """Return the sentences below every table and figure of the table's paper."""
    return list(settings(table).get("notes") or [])


def axes(figure: str) -> Axes:
    """Return how a figure's curves are drawn."""
    return Axes(**settings(figure)["figures"][figure.partition("/")[2]])


def captions() -> dict[str, str]:
    """Return the caption of each figure of a paper and each table of ours, by file stem."""
    shown = {file_stem(name): table["title"] for name, table in ours().items()}
    for name in filter(is_figure, available()):
        number = name.rpartition("fig")[2]
        shown[file_stem(name)] = f"{reference(name)[0].paper}, Figure {number}: {axes(name).title}"
    return shown


def seeds(table: str) -> int:
    """Return the number of runs of each row in the paper, 1 if not stated; in our tables, 3."""
    if table in ours():
        return int(ours()[table].get("seeds", 3))
    return int((settings(table).get("seeds") or {}).get(table.partition("/")[2], 1))


def file_stem(table: str) -> str:
    """'zeta_dp_2021/1' -> 'zeta_dp_2021_table1'; 'dp_dfa_2020/fig2' -> 'dp_dfa_2020_fig2'."""
    return table if table in ours() else f"{table.partition('/')[0]}_{_path(table).stem}"


def file_of(table: str, results: Path) -> Path:
    """Return where `zdp-bench table --write` writes a table, without `.md` or `.csv`."""
    return results / "tables" / file_stem(table)


def recipes_of(table: str) -> list[str]:
    """Return the recipes that claim rows of a table, by name."""
    _require(table)
    recipes = assets.group(assets.RECIPES).items()
    return [name for name, path in recipes if _table_claimed(path) == table]


@cache
def _table_claimed(recipe: Path) -> str | None:
    """Return the table of which a recipe's file claims a row."""
    claims: dict[str, str] = assets.read_yaml(recipe).get("claims") or {}
    return claims.get("table")


def check_claims(table: str | None, row: str | None) -> None:
    """Reject a claim to a cell that no table has."""
    if table is None:
        return
    names = [*ours(), *available()]
    if table not in names:
        raise unknown("claims.table", table, [*names, "null"])
    rows = set(rows_of(table))
    if row not in rows:
        error = unknown(f"claims.table={table} has other rows: claims.row", row or "null", rows)
        raise UserError(f"{error} A run of your own fills no row: claims.table=null.")


def _require(table: str) -> None:
    names = [*ours(), *available()]
    if table not in names:
        of_paper = [name for name in names if name.startswith(f"{table}/")]
        raise unknown("table", table, of_paper or names)


def _path(table: str) -> Path:
    paper, _, number = table.partition("/")
    stem = number if is_figure(table) else f"table{number}"
    return assets.PAPERS / paper / f"{stem}.csv"


def require_recipes(table: str) -> None:
    """Reject a table whose numbers no recipe fills."""
    if not recipes_of(table):
        raise UserError(
            f"table '{table}': no recipe fills it; `zdp-bench bench {table}` measures its numbers."
        )
