"""`zdp-bench report`: everything on one HTML page that needs no network, script or file beside it.

The papers' tables come from the records. What other commands have written to `results/tables` and
`results/figures` is shown as it is there. Only the links to the records lead out of the page.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from zdp_bench import __version__, records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.report import epsilon_curves, lines
from zdp_bench.report.coverage import Count, total
from zdp_bench.report.lines import Line
from zdp_bench.report.tables import Table


@dataclass(frozen=True)
class Section:
    """One paper's table as the page shows it."""

    anchor: str
    table: Table
    lines: list[dict[str, Any]]
    count: Count
    curve: Markup | None


def write(tables: list[Table], results: Path, path: Path) -> Path:
    """Write the page to `path`, whole or not at all; links to records are relative to it."""
    every = records.read_all(results)
    shown = {table.stem for table in tables}
    pages = [p for p in sorted((results / "tables").glob("*.md")) if p.stem not in shown]
    environment = Environment(
        loader=PackageLoader("zdp_bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        sections=[_section(table, every, results, path) for table in tables],
        others=[(file.stem, _markdown(file)) for file in pages],
        figures=[(file.stem, _image(file)) for file in sorted((results / "figures").glob("*.svg"))],
        total=total(table.count for table in tables),
        columns=lines.COLUMNS,
        rule=lines.RULE,
        records=len(every),
        provenances=Counter(run["data"]["provenance"] for run in every),
        version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    records.write_text(path, page)
    return path


def _section(table: Table, every: list[Record], results: Path, page: Path) -> Section:
    shown = {run["run"] for row in table.rows for run in row.runs}
    curve = epsilon_curves.draw([run for run in every if run["run"] in shown])
    label = f"{table.title}: test metric against tight ε"
    drawn = Markup(epsilon_curves.inline_svg(curve, label)) if curve else None
    made = [_line(line, results, page) for line in table.lines]
    return Section(table.stem, table, made, table.count, drawn)


def _line(line: Line, results: Path, page: Path) -> dict[str, Any]:
    """Return a line's cells, its status, and links to the records behind it."""
    pools = [pool for pool in (line.own, line.best) if pool]
    runs = [run for pool in pools for row in pool.rows for run in row.runs]
    spent = [(pool.tight, pool.rows[0].privacy["epsilon_claimed"]) for pool in pools]
    return {
        "cells": list(line.cells.items()),
        "kind": line.status.replace(" ", "-"),
        "links": [(run["seed"], _link(run, results, page)) for run in runs],
        "over": any(tight > 1.01 * claimed for tight, claimed in spent),
        "provenances": dict.fromkeys(row.provenance for pool in pools for row in pool.rows),
    }


def _link(run: Record, results: Path, page: Path) -> str:
    record = records.folder(results, run["recipe"], run["run"]) / "record.json"
    return quote(Path(os.path.relpath(record, page.parent)).as_posix())


def _markdown(file: Path) -> Markup:
    """Return a generated table as HTML, two levels of headings down; raw HTML in it stays text."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    try:
        made = parser.render(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise UserError(
            f"{file}: is not UTF-8 text, so it is no table of zdp-bench. Save it as UTF-8, or move "
            "it away."
        ) from None
    for ours, pages in (("h2>", "h4>"), ("h1>", "h3>")):
        made = made.replace(ours, pages)
    wide = made.replace("<table>", '<div class="wide"><table>')
    return Markup(wide.replace("</table>", "</table></div>"))


def _image(file: Path) -> str:
    """Return a drawing as the address of an image. Scripts and links in an image do nothing.

    Raises:
        UserError: it is no SVG.
    """
    body = file.read_bytes()
    if b"<svg" not in body:
        raise UserError(
            f"{file}: is no SVG drawing. Let `zdp-bench figure` draw it again, or move it away."
        )
    return f"data:image/svg+xml;base64,{b64encode(body).decode()}"
