"""`zdp-bench report`: everything on one HTML page that needs no network and no file beside it.

First what privacy costs and how the papers' tables stand, then the runs, from the records, then the
papers' tables, which the records fill. What other commands have written to `results/tables` and
`results/figures` is shown as it is there.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape

from zdp_bench import __version__, records
from zdp_bench.extras.page.curves import curves_of_all
from zdp_bench.records import Record, to_json
from zdp_bench.report import coverage, names, papers
from zdp_bench.report.cells import RULE
from zdp_bench.report.results import read_frame, tell_differences
from zdp_bench.report.sheet import Sheet
from zdp_bench.tasks.metric import BUILT_IN, describe

# What other commands write, by how the file's name begins: (anchor, heading, what it shows).
COST = (
    "The test metric without privacy and at three tight ε. The number in brackets is the "
    "share of the non-private gain over the trivial baseline that private training retains."
)
EPSILON = "Each ε in five papers, how it is reproduced, and the tight ε of its mechanism."
FACEOFF = "All algorithms on one network and data set at equal tight ε."
MEASURED = "Time and memory, and the numbers behind the figures, as last measured."
PARTS = {
    "cost": ("cost", "What privacy costs", COST),
    "epsilon": ("epsilon", "Every printed ε", EPSILON),
    "faceoff": ("faceoff", "Face-off", FACEOFF),
    "": ("measured", "Measurements and curves", MEASURED),
}
MADE_BY = r"\n`zdp-bench [^`]*`[^\n]* do not edit\.\n"  # the page is not edited
ASIDE = ("n", "δ", "runs")  # columns of a table that a phone leaves out
OWN = "outside papers"
# What the table of runs shows, sorts or filters by.
CELLS = (
    *("metric", "value", "epsilon_tight", "epsilon_claimed", "epsilon_of", "delta", "provenance"),
    *("recipe", "seed", "started_utc", "variant"),
)
COMPUTED_FROM = ("model", "dataset", "algorithm")  # columns of `records.COLUMNS`
# Heading in the page's view of one run -> section of its record.
SECTIONS = {
    "Name, tags and notes": "labels",
    "Privacy and ledger": "privacy",
    "Configuration": "config",
    "Data": "data",
    "Environment": "environment",
}


def write(tables: Mapping[str, Sheet], results: Path, path: Path) -> Path:
    """Write the page to `path`, whole or not at all; links to records are relative to it."""
    every = records.read_all(results)
    environment = Environment(
        loader=PackageLoader("zdp_bench.extras.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = [sheet.numbers for sheet in tables.values()]
    filled_tables = []
    for name, sheet in tables.items():
        if any(line.get("runs") for line in sheet.numbers):
            filled_tables.append(
                (papers.file_stem(name), sheet.title, _markdown(sheet.as_markdown()))
            )
    text = environment.get_template("page.html").render(
        data=escape_json(runs_of(every, results, path)),
        scripts=[_script(name) for name in SCRIPTS],
        styles=[Markup(_without_map(_read(name)).replace("</", "<\\/")) for name in STYLES],
        licences=[_read(name) for name in LICENCES],
        policy=_policy(),
        tables=filled_tables,
        parts=_parts({papers.file_stem(name) for name in tables}, results),
        figures=_figures(results),
        total=coverage.count(numbers),
        sentence=coverage.sentence(numbers),
        rule=RULE,
        records=len(every),
        own=sum(not run.claims.table for run in every),
        provenances=Counter(run.data.provenance for run in every),
        version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    records.write_text(path, text)
    return path


# -------------------------------------------------------------------------------------- the runs


def runs_of(every: list[Record], results: Path, page: Path) -> dict[str, Any]:
    """Return what the page's scripts read; paths of records are relative to the page.

    Runs have most settings in common, so each stands once, in `pairs`, and a run names its place.
    """
    frame, keys = read_frame(every)
    differs = tell_differences(frame, keys)
    shown = frame[[*CELLS, *COMPUTED_FROM]].astype(object)
    lines: list[dict[Any, Any]] = shown.where(shown.notna(), None).to_dict("records")
    titles = name_runs(every, list(differs))
    curves, pairs = curves_of_all(results), Pairs()
    from_page = Path(os.path.relpath(results, page.parent))
    runs = []
    for run, line, title in zip(every, lines, titles, strict=True):
        record = records.folder(from_page, run.recipe, run.run) / "record.json"
        link = quote(record.as_posix())
        facts: dict[str, Any] = {"cells": _cells(run, line, title), "record": link}
        for heading, section in SECTIONS.items():
            places = pairs.places_of(run.values.get(section) or {})
            if places:
                facts[heading] = places
        if run.path and curves.get(run.path):
            facts["curves"] = curves[run.path]
        runs.append(facts)
    metrics = dict.fromkeys(metric.name for metric in BUILT_IN)
    for run in every:
        metrics |= dict.fromkeys(run.metrics)
    described = map(describe, metrics)
    about = {metric.name: [metric.label, metric.unit] for metric in described}
    return {"metrics": about, "pairs": pairs.all, "runs": runs}


class Pairs:
    """Settings and their values, each once: (dotted key, value)."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Any]] = []
        self._places: dict[str, list[int]] = {}  # by a key and the text of its value

    def places_of(self, section: Mapping[str, Any], prefix: str = "") -> list[int]:
        """Return the places in `all` of a section of a record, which are added where new."""
        places: list[int] = []
        for key, value in section.items():
            known_by = f"{prefix}{key} {value!r}"
            if known_by not in self._places:
                self._places[known_by] = self._add(f"{prefix}{key}", value)
            places += self._places[known_by]
        return places

    def _add(self, key: str, value: Any) -> list[int]:
        if isinstance(value, dict):
            return self.places_of(value, f"{key}.")
        shown = json.dumps(value) if isinstance(value, list) else value
        self.all.append((key, shown))
        return [len(self.all) - 1]


def name_runs(every: list[Record], differs: list[str]) -> list[str]:
    """Return distinct names of runs: 'mine: mnist, lr 0.1, seed 2', with digits for twins."""
    names_of_runs = []
    for run, difference in zip(every, differs, strict=True):
        parts = [run.recipe, difference, f"seed {run.seed}"]
        names_of_runs.append(_named(run) + ", ".join(filter(None, parts)))
    times = Counter(names_of_runs)
    distinct = []
    for name, run in zip(names_of_runs, every, strict=True):
        distinct.append(f"{name} ({run.run[:6]})" if times[name] > 1 else name)
    return distinct


def _named(run: Record) -> str:
    """Return the name that the user gave a run, with a colon."""
    name = run.labels.name
    return f"{name}: " if name else ""


def _cells(run: Record, line: dict[Any, Any], title: str) -> dict[str, Any]:
    """Return the values of a row of the table of runs, those that the run has."""
    cells = {key: line.get(key) for key in CELLS} | {
        "name": title,
        "what": names.words(" on ".join(filter(None, (line["model"], line["dataset"])))),
        "algorithm": names.algorithm(line["algorithm"] or ""),
        "dataset": names.words(line["dataset"]),
        "model": names.words(line["model"] or ""),
        "paper": run.claims.table or OWN,
        "run": run.run[:16],
    }
    return {key: value for key, value in cells.items() if value not in (None, "")}


# ---------------------------------------------------------------------------- tables and figures


def _parts(shown: set[str], results: Path) -> list[tuple[str, str, str, list[tuple[str, Markup]]]]:
    """Return (anchor, heading, what it shows, [(name, table)]) of each part that has a file."""
    tables_of: dict[str, list[tuple[str, Markup]]] = {start: [] for start in PARTS}
    for file in sorted((results / "tables").glob("*.md")):
        if file.stem in shown:
            continue
        start = next(start for start in PARTS if file.stem.startswith(start))
        text = file.read_text(encoding="utf-8", errors="replace").lstrip()
        title = text.partition("\n")[0].removeprefix("# ")
        tables_of[start].append((title, _markdown(text)))
    return [(*PARTS[start], tables) for start, tables in tables_of.items() if tables]


def _figures(results: Path) -> list[tuple[str, str, str, str]]:
    """Return (file's name, caption, address, class) of each drawing; a photograph stays as it is.

    Others are turned light on dark with the page.
    """
    files = sorted((results / "figures").glob("*.svg"))
    captions = papers.captions() if files else {}
    figures = []
    for file in files:
        drawing = file.read_bytes()
        caption = captions.get(file.stem, file.stem.replace("_", " "))
        # Scripts and links in an image do nothing.
        address = f"data:image/svg+xml;base64,{b64encode(drawing).decode()}"
        look = "photograph" if b"<image" in drawing else "lines"
        figures.append((file.stem, caption, address, look))
    return figures


def _markdown(text: str) -> Markup:
    """Return a generated page as HTML without its title; raw HTML in it stays text."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    body = text.partition("\n")[2] if text.startswith("# ") else text
    tokens = parser.parse(re.sub(MADE_BY, "", body, count=1))
    _mark_aside(tokens)
    html = parser.renderer.render(tokens, parser.options, {})
    html = html.replace("h2>", "h5>").replace("h1>", "h4>")
    for paper, title in papers.titles().items():
        html = html.replace(f"<td>{paper}</td>", f"<td>{escape(title)}</td>")
    html = html.replace("<table>", '<div class="wide"><table>')
    return Markup(html.replace("</table>", "</table></div>"))


def _mark_aside(tokens: Sequence[Token]) -> None:
    """Give the cells of columns that a phone has no room for the class `aside`."""
    column, aside = 0, set[int]()
    for token, content in pairwise(tokens):
        if token.type == "thead_open":
            aside.clear()
        elif token.type == "tr_open":
            column = 0
        elif token.type in ("th_open", "td_open"):
            if token.type == "th_open" and content.content in ASIDE:
                aside.add(column)
            if column in aside:
                token.attrJoin("class", "aside")
            column += 1


# -------------------------------------------------------------------------- scripts and safety

_REPORT = files("zdp_bench.extras.page")
SCRIPTS = (
    "bundled/tabulator.min.js",
    "bundled/chart.umd.min.js",
    "templates/charts.js",
    "templates/curves.js",
    "templates/runs.js",
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
    """Return JSON that no HTML parser or script misreads; ∞ and NaN become 'inf' and 'nan'."""
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
