"""Read the papers' printed numbers: `papers/PAPER/tableN.csv`, `figN.csv` and `paper.yaml`.

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
    """One number of a paper as it is printed: a line of a `tableN.csv` or `figN.csv`.

    Attributes:
        paper: name of the paper, as in its citations.
        table: number of the table or figure.
        row: identifier of the row.
        label: the row as the paper names it.
        column: metric, or 'METRIC at X' for a point of a curve.
        value: the number, or words such as 'not given'.
        unit: its unit, such as '%'.
        where: where the paper prints it.
        deviation: the number after ±. Default: empty, if the paper prints none.
        range: lowest and highest value of all runs, such as '0.814 to 0.881'. Default: empty.
    """

    paper: str
    table: str
    row: str
    label: str
    column: str
    value: str
    unit: str
    where: str
    deviation: str = ""
    range: str = ""

    @property
    def number(self) -> float | None:
        """The value as a number; None if the paper prints words instead."""
        try:
            return float(self.value)
        except ValueError:
            return None

    @property
    def printed(self) -> str:
        """The number as the paper prints it: '93.4 ± 0.01 %'."""
        parts = [self.value]
        if self.deviation:
            parts.append(f"± {self.deviation}")
        if self.range:
            parts.append(f"({self.range})")
        if self.number is not None:  # words have no unit
            parts.append(self.unit)
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Axes:
    """How a figure's curves are drawn: an entry of `figures` in `paper.yaml`.

    Attributes:
        title: what the figure shows, in one sentence.
        x: dotted path in a record, or several paths joined by ' or '; the first one that has a
            value is used. With "epoch", each epoch of a run is a point.
        label: label of the x axis.
        log: whether the x axis is logarithmic. Default: False.
        columns: number of panels side by side. Default: all.
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
    """Return the definitions of our own tables by name: title, rows and notes."""
    return assets.read_yaml(assets.PAPERS / "ours.yaml")


def published(name: str) -> dict[str, list[dict[str, Any]]]:
    """Return results of other authors, by row of one of our own tables; {} if it has none."""
    results: dict[str, list[dict[str, Any]]] = _read_published().get(name, {})
    return results


def works() -> dict[int, str]:
    """Return the works that `published` results are from, by the numbers that cite them."""
    cited_works: dict[int, str] = _read_published()["works"]
    return cited_works


@cache
def _read_published() -> dict[str, Any]:
    """Return `published.yaml`: table -> row -> results, and "works" -> number -> work."""
    return assets.read_yaml(assets.PAPERS / "published.yaml")


@cache
def titles() -> dict[str, str]:
    """Return how each paper is cited: {'zeta_dp_2021': 'Ziller et al. 2021 (ζ-DP)'}."""
    names: dict[str, str] = {}
    for table in available():
        names.setdefault(table.partition("/")[0], reference(table)[0].paper)
    return names


def is_figure(table: str) -> bool:
    """Return True for PAPER/figN, a figure whose curves are shown as a table."""
    return table.partition("/")[2].startswith("fig")


def reference(table: str) -> list[Reference]:
    """Return the paper's numbers of a table or figure."""
    _require(table)
    text = _path(table).read_text(encoding="utf-8")
    return [Reference(**line) for line in csv.DictReader(io.StringIO(text))]


def settings(table: str) -> dict[str, Any]:
    """Return the contents of a paper's paper.yaml; empty if there is none.

    Args:
        table: name of the paper, or of one of its tables or figures.
    """
    path = assets.PAPERS / table.partition("/")[0] / "paper.yaml"
    return assets.read_yaml(path) if path.is_file() else {}


def rows_of(table: str) -> list[str]:
    """Return the rows of a table or figure, or of a table of our own, in order."""
    if table in ours():
        return list(ours()[table]["rows"])
    return list(dict.fromkeys(number.row for number in reference(table)))


def notes(table: str) -> list[str]:
    """Return the sentences that are below all tables and figures of a table's paper."""
    return list(settings(table).get("notes") or [])


def axes(figure: str) -> Axes:
    """Return how a figure's curves are drawn."""
    return Axes(**settings(figure)["figures"][figure.partition("/")[2]])


def captions() -> dict[str, str]:
    """Return the captions of all figures of papers and of our own tables, by file stem."""
    shown = {file_stem(name): table["title"] for name, table in ours().items()}
    for name in filter(is_figure, available()):
        number = name.rpartition("fig")[2]
        shown[file_stem(name)] = f"{reference(name)[0].paper}, Figure {number}: {axes(name).title}"
    return shown


def seeds(table: str) -> int:
    """Return the number of seeds per row. Default: 1 in papers' tables, 3 in our own."""
    if table in ours():
        return int(ours()[table].get("seeds", 3))
    return int((settings(table).get("seeds") or {}).get(table.partition("/")[2], 1))


def file_stem(table: str) -> str:
    """Return the stem of a table's files: 'dp_dfa_2020_table1' for 'dp_dfa_2020/1'."""
    return table if table in ours() else f"{table.partition('/')[0]}_{_path(table).stem}"


def file_of(table: str, results: Path) -> Path:
    """Return the path, without suffix, to which `zdp-bench table --write` writes a table."""
    return results / "tables" / file_stem(table)


def recipes_of(table: str) -> list[str]:
    """Return the names of the recipes that claim rows of a table."""
    _require(table)
    recipes = assets.group(assets.RECIPES).items()
    return [name for name, path in recipes if _table_claimed(path) == table]


@cache
def _table_claimed(recipe: Path) -> str | None:
    """Return the table whose row a recipe claims; None if it claims none."""
    claims: dict[str, str] = assets.read_yaml(recipe).get("claims") or {}
    return claims.get("table")


def check_claims(table: str | None, row: str | None) -> None:
    """Reject a claim to a row that does not exist.

    Raises:
        UserError: there is no such table, or the table has no such row.
    """
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
