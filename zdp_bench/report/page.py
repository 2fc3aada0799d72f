"""`zdp-bench report`: everything there is on one HTML page that needs no network, no script and no file beside it.

The tables come from the records, paper beside ours and ε claimed beside tight; what other verbs have written under
`results/tables` and `results/figures` is shown as it stands there. Only the links to the records lead out of the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from zdp_bench import __version__, records
from zdp_bench.records import Record
from zdp_bench.report import epsilon_curves, verdicts
from zdp_bench.report.papers import file_stem
from zdp_bench.report.tables import Row, Table


@dataclass(frozen=True)
class Section:
    """One paper's table as the page shows it."""

    anchor: str
    table: Table
    lines: list[dict[str, Any]]
    counts: dict[str, int]
    curve: Markup | None


def write(tables: list[Table], results: Path, path: Path) -> Path:
    """Write the page to `path`, whole or not at all; links to records are relative to it."""
    every = records.read_all(results)
    sections = [_section(table, every, results, path) for table in tables]
    shown = {file_stem(table.name) for table in tables}
    found = sorted((results / "tables").glob("*.md"))
    others = [(file.stem, _markdown(file)) for file in found if file.stem not in shown]
    figures = [(file.stem, _svg(file)) for file in sorted((results / "figures").glob("*.svg"))]
    environment = Environment(
        loader=PackageLoader("zdp_bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    total = verdicts.counts([verdict for table in tables for verdict in verdicts.of_table(table)])
    page = environment.get_template("page.html").render(
        sections=sections,
        others=others,
        figures=figures,
        total=total,
        rule=verdicts.RULE,
        records=len(every),
        provenances={
            kind: sum(r["data"]["provenance"] == kind for r in every)
            for kind in ("official", "derived", "synthetic")
        },
        version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    records.write_text(path, page)
    return path


def _section(table: Table, every: list[Record], results: Path, page: Path) -> Section:
    wanted = {digest for row in table.rows for digest in str(row.numbers.get("runs", "")).split()}
    runs = [record for record in every if record["run"][:16] in wanted]
    curve = epsilon_curves.draw(runs)
    label = f"{table.title}: test metric against tight ε"
    drawn = Markup(epsilon_curves.inline_svg(curve, label)) if curve else None
    lines = [_line(row, table, runs, results, page) for row in table.rows]
    return Section(
        file_stem(table.name), table, lines, verdicts.counts(verdicts.of_table(table)), drawn
    )


def _line(row: Row, table: Table, runs: list[Record], results: Path, page: Path) -> dict[str, Any]:
    """A row's cells, its verdict, its provenance, and where its records lie."""
    kind, why = verdicts.judge(row)
    own = set(str(row.numbers.get("runs", "")).split())
    links = [
        (r["seed"], _relative(records.folder(results, r["recipe"], r["run"]), page))
        for r in runs
        if r["run"][:16] in own
    ]
    claimed, tight = row.numbers.get("epsilon_claimed"), row.numbers.get("epsilon_tight")
    over = isinstance(claimed, float) and isinstance(tight, float) and tight > 1.01 * claimed
    cells = [(column, row.cells[column]) for column in table.columns]
    return {
        "cells": cells,
        "verdict": kind,
        "why": why,
        "links": links,
        "over": over,
        "provenance": row.numbers.get("provenance", ""),
    }


def _relative(folder: Path, page: Path) -> str:
    import os
    from urllib.parse import quote

    return quote(Path(os.path.relpath(folder / "record.json", page.parent)).as_posix())


def _markdown(file: Path) -> Markup:
    """A generated table as HTML; raw HTML in it stays text."""
    made = (
        MarkdownIt("commonmark", {"html": False})
        .enable("table")
        .render(file.read_text(encoding="utf-8"))
    )
    made = (
        made.replace("<h2>", "<h4>")
        .replace("</h2>", "</h4>")
        .replace("<h1>", "<h3>")
        .replace("</h1>", "</h3>")
    )
    return Markup(
        made.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    )


def _svg(file: Path) -> Markup:
    return Markup(epsilon_curves.as_element(file.read_text(encoding="utf-8"), file.stem))
