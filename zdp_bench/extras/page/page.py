"""`zdp-bench report`: everything on one HTML page that needs no network and no file beside it.

First what privacy costs and how the papers' tables stand, then the runs, from the records, then the
papers' tables, which the records fill. What other commands have written to `results/tables` and
`results/figures` is shown as it is there.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from zdp_bench import __version__, records
from zdp_bench.errors import UserError
from zdp_bench.extras.page import run_data
from zdp_bench.records import Record, to_json
from zdp_bench.report import coverage, figures, names, papers
from zdp_bench.report.cells import RULE, Line
from zdp_bench.report.tables import Table

# What other commands write, by how the file's name begins: (anchor, heading, what it shows).
PARTS = {
    "cost": (
        "cost",
        "What privacy costs",
        "The test metric without privacy and at three tight ε, and which part of it is kept.",
    ),
    "epsilon": (
        "epsilon",
        "Every printed ε",
        "Each ε that five papers print, what reproduces it, and the tight ε of its mechanism.",
    ),
    "faceoff": (
        "faceoff",
        "Face-off",
        "All algorithms on one network and data set at equal tight ε.",
    ),
    "": (
        "measured",
        "Measurements and curves",
        "Time and memory, audits, and the numbers behind the figures, as last measured.",
    ),
}
MADE_BY = r"\n`zdp-bench [^`]*`[^\n]* do not edit\.\n"  # the page is not edited


@dataclass(frozen=True)
class Section:
    """One paper's table as the page shows it.

    Attributes:
        lines: those that were run.
        empty: those that nothing fills, as shown.
        charts: for each headline metric, (its axis, the places of the runs that have it).
    """

    table: Table
    lines: list[dict[str, Any]]
    empty: list[dict[str, str]]
    charts: list[tuple[str, str]]

    @property
    def count(self) -> str:
        return coverage.sentence([self.table.sheet.numbers])


def write(
    tables: Sequence[Table],
    results: Path,
    path: Path,
    card: Callable[[Record], str] = lambda record: "",
) -> Path:
    """Write the page to `path`, whole or not at all; links to records are relative to it.

    Args:
        card: gives a record's model card in Markdown; empty where the record lacks what one states.

    Raises:
        UserError: a file among the tables or figures is none.
    """
    every = records.read_all(results)
    environment = Environment(
        loader=PackageLoader("zdp_bench.extras.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        data=escape_json(run_data.build(every, results, path, card)),
        scripts=[_script(name) for name in SCRIPTS],
        styles=[Markup(_without_map(_read(name)).replace("</", "<\\/")) for name in STYLES],
        licences=[_read(name) for name in LICENCES],
        policy=_policy(),
        sections=[s for s in (_section(t, every) for t in tables) if s.lines],
        parts=_parts({papers.file_stem(table.name) for table in tables}, results),
        figures=_figures(results),
        total=coverage.count(table.sheet.numbers for table in tables),
        sentence=coverage.sentence(table.sheet.numbers for table in tables),
        rule=RULE,
        records=len(every),
        own=sum(not (run.get("claims") or {}).get("table") for run in every),
        provenances=Counter(run["data"]["provenance"] for run in every),
        version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    records.write_text(path, page)
    return path


def _section(table: Table, every: list[Record]) -> Section:
    shown = {run["run"] for line in table.lines for run in line.runs}
    by_metric: dict[str, list[int]] = {}
    for place, run in enumerate(every):
        if run["run"] in shown:
            by_metric.setdefault(run["headline"]["name"], []).append(place)
    charts = [(names.axis(name), " ".join(map(str, places))) for name, places in by_metric.items()]
    rows = [dict(zip(table.sheet.columns, row, strict=True)) for row in table.sheet.rows]
    both = list(zip(table.lines, rows, strict=True))
    filled = [_line(line, row) for line, row in both if line.runs]
    return Section(table, filled, [row for line, row in both if not line.runs], charts)


def _line(line: Line, row: dict[str, str]) -> dict[str, Any]:
    """Return a line as shown, its status, and the runs behind it."""
    spent = line.privacy
    return {
        "cells": [(name, cell.strip("`")) for name, cell in row.items()],
        "kind": line.status.replace(" ", "-"),
        "runs": [(run["seed"], run["run"][:16]) for run in line.runs],
        "over": spent["epsilon_tight"] > 1.01 * spent["epsilon_claimed"],
        "provenances": dict.fromkeys(run["data"]["provenance"] for run in line.runs),
    }


def _parts(shown: set[str], results: Path) -> list[tuple[str, str, str, list[tuple[str, Markup]]]]:
    """Return (anchor, heading, what it shows, [(name, table)]) of each part that has a file."""
    files = [f for f in sorted((results / "tables").glob("*.md")) if f.stem not in shown]
    found: dict[str, list[tuple[str, Markup]]] = {start: [] for start in PARTS}
    for file in files:
        start = next(start for start in PARTS if file.stem.startswith(start))
        heading, _, body = _text(file).lstrip().removeprefix("# ").partition("\n")
        found[start].append((heading, _markdown(re.sub(MADE_BY, "", body, count=1))))
    return [(*PARTS[start], tables) for start, tables in found.items() if tables]


def _figures(results: Path) -> list[tuple[str, str, str, str]]:
    """Return (file's name, caption, address, class) of each drawing; a photograph stays as it is.

    Others are turned light on dark with the page.
    """
    files = sorted((results / "figures").glob("*.svg"))
    captions = figures.captions() if files else {}
    return [
        (
            file.stem,
            captions.get(file.stem, file.stem.replace("_", " ")),
            _image(file),
            "photograph" if b"<image" in file.read_bytes() else "lines",
        )
        for file in files
    ]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(
            f"{file}: is not UTF-8 text, so it is no table of zdp-bench. Save it as UTF-8, or move "
            "it away."
        ) from None


def _markdown(text: str) -> Markup:
    """Return a generated table as HTML, its papers by name; raw HTML in it stays text."""
    made = run_data.markdown_parser().render(text)
    for ours, pages in (("h2>", "h5>"), ("h1>", "h4>")):
        made = made.replace(ours, pages)
    for paper, title in papers.titles().items():
        made = made.replace(f"<td>{paper}</td>", f"<td>{escape(title)}</td>")
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


_REPORT = files("zdp_bench.extras.page")
SCRIPTS = (
    "bundled/tabulator.min.js",
    "bundled/chart.umd.min.js",
    "templates/charts.js",
    "templates/runs.js",
    "templates/dialog.js",
)
STYLES = ("bundled/tabulator_simple.min.css", "templates/page.css")
LICENCES = ("bundled/tabulator.LICENSE", "bundled/chart.LICENSE")


def _policy() -> str:
    """Return the Content-Security-Policy: our scripts by their hashes, pictures, and no network."""
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in map(_script, SCRIPTS)]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "form-action 'none'; base-uri 'none'"
    )


def escape_json(value: Any) -> Markup:
    """Return a value as JSON that no HTML parser reads as markup, and no script as an end of line.

    ∞ and NaN become the words "inf" and "nan".
    """
    text = json.dumps(to_json(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _script(name: str) -> Markup:
    """Return a script in which no HTML parser sees its end or a comment."""
    return Markup(re.sub(r"<(/script|!--)", r"<\\\1", _without_map(_read(name)), flags=re.I))


def _without_map(text: str) -> str:
    return re.sub(r"(//|/\*)# sourceMappingURL=\S+( ?\*/)?", "", text).strip() + "\n"


def _read(name: str) -> str:
    return _REPORT.joinpath(name).read_text(encoding="utf-8")
