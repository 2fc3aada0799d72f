"""Write the HTML page of `zdp-bench report`, which needs neither a network nor other files.

It shows what privacy costs, how many of the papers' results are reproduced, the runs, and the
papers' tables filled from the records. Tables and figures of other commands are shown as they are
in `results/tables` and `results/figures`.
"""

from __future__ import annotations

import json
import math
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
from zdp_bench.errors import UserError
from zdp_bench.extras.page.curves import curves_of_all
from zdp_bench.foreign_files import MAX_JSON, MAX_TABLE, read_bytes, read_text, reading
from zdp_bench.records import Record
from zdp_bench.report import coverage, names, papers
from zdp_bench.report.cells import RULE
from zdp_bench.report.results import read_frame, tell_differences
from zdp_bench.report.sheet import Sheet
from zdp_bench.tasks.metric import BUILT_IN, describe

# Descriptions of the page's parts with tables of other commands.
COST = (
    "The test metric without privacy and at three tight ε. The number in brackets is the "
    "fraction of the non-private gain over the trivial baseline that private training retains."
)
EPSILON = "Each ε in five papers, how it is reproduced, and the tight ε of its mechanism."
FACEOFF = "All algorithms on one network and data set at equal tight ε."
MEASURED = "Time and memory, and the numbers behind the figures, as last measured."
# The beginning of a file's name -> (anchor, heading, description); the last one matches any name.
PARTS = {
    "cost": ("cost", "What privacy costs", COST),
    "epsilon": ("epsilon", "Every printed ε", EPSILON),
    "faceoff": ("faceoff", "Face-off", FACEOFF),
    "": ("measured", "Measurements and curves", MEASURED),
}
# The note at the top of generated tables, which the page does not show.
GENERATED_NOTE = r"\n`zdp-bench [^`]*`[^\n]* do not edit\.\n"
HIDDEN_ON_PHONES = ("n", "δ", "runs")  # columns of a table
OWN = "outside papers"
# The columns that the table of runs shows, or by which it sorts or filters.
CELLS = (
    *("metric", "value", "epsilon_tight", "epsilon_claimed", "epsilon_of", "delta", "provenance"),
    *("recipe", "seed", "started_utc", "variant"),
)
CELL_SOURCES = ("model", "dataset", "algorithm")  # columns from which other cells are computed
# The heading in the view of one run -> the section of its record.
SECTIONS = {
    "Name, tags and notes": "labels",
    "Privacy and ledger": "privacy",
    "Configuration": "config",
    "Data": "data",
    "Environment": "environment",
}


def write(tables: Mapping[str, Sheet], results: Path, path: Path) -> Path:
    """Write the page atomically.

    Args:
        tables: the papers' tables, by name.
        results: the results folder.
        path: the file to write; links to records are relative to its folder.
    """
    all_runs = records.read_all(results)
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
        data=escape_json(runs_of(all_runs, results, path)),
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
        records=len(all_runs),
        own=sum(not run.claims.table for run in all_runs),
        provenances=Counter(run.data.provenance for run in all_runs),
        version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    records.write_text(path, text)
    return path


# -------------------------------------------------------------------------------------- the runs


def runs_of(all_runs: list[Record], results: Path, page: Path) -> dict[str, Any]:
    """Return the data that the page's scripts read.

    Runs have most settings in common. Each setting is therefore stored once, in `pairs`, and a run
    has the indices of its settings.

    Args:
        all_runs: the records of the results folder.
        results: the results folder.
        page: the path of the page, to which the paths of records are relative.
    """
    frame, keys = read_frame(all_runs)
    differs = tell_differences(frame, keys)
    shown = frame[[*CELLS, *CELL_SOURCES]].astype(object)
    lines: list[dict[Any, Any]] = shown.where(shown.notna(), None).to_dict("records")
    titles = name_runs(all_runs, list(differs))
    curves, pairs = curves_of_all(results), Pairs()
    runs = []
    for run, line, title in zip(all_runs, lines, titles, strict=True):
        facts: dict[str, Any] = {"cells": _cells(run, line, title)}
        if run.path:
            from_page = Path(os.path.relpath(run.path, page.parent))
            facts["record"] = quote(os.fsencode(from_page))
        for heading, section in SECTIONS.items():
            indices = pairs.indices_of(run.values.get(section) or {})
            if indices:
                facts[heading] = indices
        if run.path and curves.get(run.path):
            facts["curves"] = curves[run.path]
        runs.append(facts)
    metrics = dict.fromkeys(metric.name for metric in BUILT_IN)
    for run in all_runs:
        metrics |= dict.fromkeys(run.metrics)
    described = map(describe, metrics)
    about = {metric.name: [metric.label, metric.unit] for metric in described}
    return {"metrics": about, "pairs": pairs.all, "runs": runs}


class Pairs:
    """The distinct settings of all runs.

    Attributes:
        all: (dotted key, value) of each setting.
    """

    def __init__(self) -> None:
        self.all: list[tuple[str, Any]] = []
        self._indices: dict[str, list[int]] = {}  # by a key and the text of its value

    def indices_of(self, section: Mapping[str, Any], prefix: str = "") -> list[int]:
        """Return the indices in `all` of the settings in a record's section; new ones are added."""
        indices: list[int] = []
        for key, value in section.items():
            key_and_value = f"{prefix}{key} {value!r}"
            if key_and_value not in self._indices:
                self._indices[key_and_value] = self._add(f"{prefix}{key}", value)
            indices += self._indices[key_and_value]
        return indices

    def _add(self, key: str, value: Any) -> list[int]:
        """Add a setting, or those in a nested section, and return their indices."""
        if isinstance(value, dict):
            return self.indices_of(value, f"{key}.")
        shown = json.dumps(value) if isinstance(value, list) else value
        self.all.append((key, shown))
        return [len(self.all) - 1]


def name_runs(all_runs: list[Record], differs: list[str]) -> list[str]:
    """Return distinct names of runs, such as 'mine: mnist, lr 0.1, seed 2'.

    Runs with the same name get the beginning of their digest.
    """
    names_of_runs = []
    for run, difference in zip(all_runs, differs, strict=True):
        parts = [run.recipe, difference, f"seed {run.seed}"]
        names_of_runs.append(_name_prefix(run) + ", ".join(filter(None, parts)))
    times = Counter(names_of_runs)
    distinct = []
    for name, run in zip(names_of_runs, all_runs, strict=True):
        distinct.append(f"{name} ({run.run[:6]})" if times[name] > 1 else name)
    return distinct


def _name_prefix(run: Record) -> str:
    """Return the user's name for a run with a colon, or ''."""
    name = run.labels.name
    return f"{name}: " if name else ""


def _cells(run: Record, line: dict[Any, Any], title: str) -> dict[str, Any]:
    """Return a run's values for its row in the table of runs, without missing ones."""
    cells = {key: line.get(key) for key in CELLS}
    model, dataset, algorithm = (  # text, whatever a file of unknown origin holds
        str(line[key] or "") for key in ("model", "dataset", "algorithm")
    )
    cells |= {
        "name": title,
        "what": names.words(" on ".join(filter(None, (model, dataset)))),
        "algorithm": names.variant(algorithm),
        "dataset": names.words(dataset),
        "model": names.words(model),
        "paper": run.claims.table or OWN,
        "value": run.headline.value,  # may be NaN, which `line` lacks
        "run": f"{run.recipe}/{run.run[:16]}",  # recipes may share a run
    }
    return {key: value for key, value in cells.items() if value not in (None, "")}


# ---------------------------------------------------------------------------- tables and figures


def _parts(shown: set[str], results: Path) -> list[tuple[str, str, str, list[tuple[str, Markup]]]]:
    """Return (anchor, heading, description, [(title, table)]) of each part with tables.

    Files that cannot be read are left out with a warning.

    Args:
        shown: the file stems of tables that the page shows elsewhere.
        results: the results folder.
    """
    tables_of: dict[str, list[tuple[str, Markup]]] = {start: [] for start in PARTS}
    for file in sorted((results / "tables").glob("*.md")):
        if file.stem in shown:
            continue
        start = next(start for start in PARTS if file.stem.startswith(start))
        try:
            text = read_text(file, MAX_TABLE).lstrip()
        except UserError as error:
            records.warn_left_out(str(error))
            continue
        title = text.partition("\n")[0].removeprefix("# ")
        tables_of[start].append((title, _markdown(text)))
    return [(*PARTS[start], tables) for start, tables in tables_of.items() if tables]


def _figures(results: Path) -> list[tuple[str, str, str, str]]:
    """Return (file stem, caption, data URL, CSS class) of each figure that can be read.

    In dark mode, the page inverts the colours of figures, except for those with photographs.
    """
    files = sorted((results / "figures").glob("*.svg"))
    captions = papers.captions() if files else {}
    figures = []
    for file in files:
        try:
            with reading(file):
                drawing = read_bytes(file, MAX_JSON)
        except UserError as error:
            records.warn_left_out(str(error))
            continue
        stem = os.fsencode(file.stem).decode(errors="replace")
        caption = captions.get(stem, names.words(stem))
        # As an image, an SVG cannot run scripts or follow links.
        address = f"data:image/svg+xml;base64,{b64encode(drawing).decode()}"
        look = "photograph" if b"<image" in drawing else "lines"
        figures.append((stem, caption, address, look))
    return figures


def _markdown(text: str) -> Markup:
    """Return a generated Markdown page as HTML, without its title; raw HTML in it stays text."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    body = text.partition("\n")[2] if text.startswith("# ") else text
    tokens = parser.parse(re.sub(GENERATED_NOTE, "", body, count=1))
    _mark_hidden_columns(tokens)
    html = parser.renderer.render(tokens, parser.options, {})
    html = html.replace("h2>", "h5>").replace("h1>", "h4>")
    for paper, title in papers.titles().items():
        html = html.replace(f"<td>{paper}</td>", f"<td>{escape(title)}</td>")
    html = html.replace("<table>", '<div class="wide"><table>')
    return Markup(html.replace("</table>", "</table></div>"))


def _mark_hidden_columns(tokens: Sequence[Token]) -> None:
    """Add the CSS class `aside` to the cells of columns that are hidden on phones."""
    column, aside = 0, set[int]()
    for token, content in pairwise(tokens):
        if token.type == "thead_open":
            aside.clear()
        elif token.type == "tr_open":
            column = 0
        elif token.type in ("th_open", "td_open"):
            if token.type == "th_open" and content.content in HIDDEN_ON_PHONES:
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
    """Return the Content-Security-Policy.

    It allows our scripts, by their hashes, and inline images, but no network access.
    """
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in map(_script, SCRIPTS)]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "form-action 'none'; base-uri 'none'"
    )


def escape_json(value: Any) -> Markup:
    """Return a value as JSON that is safe in an HTML script; ∞ becomes {"number": "Infinity"}."""
    wrapped = _wrap_numbers(value)
    text = json.dumps(wrapped, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _wrap_numbers(value: Any) -> Any:
    """Replace ∞ and NaN, which JSON lacks, by objects from which `charts.js` restores them."""
    if isinstance(value, float) and not math.isfinite(value):
        names_in_javascript = {math.inf: "Infinity", -math.inf: "-Infinity"}
        return {"number": names_in_javascript.get(value, "NaN")}
    if isinstance(value, Mapping):
        return {key: _wrap_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_wrap_numbers(entry) for entry in value]
    return value


def _script(name: str) -> Markup:
    """Return a script with '</script' and '<!--' escaped, so that it cannot end its element."""
    return Markup(re.sub(r"<(/script|!--)", r"<\\\1", _without_map(_read(name)), flags=re.I))


def _without_map(text: str) -> str:
    """Return a bundled file's text without the link to its source map."""
    return re.sub(r"(//|/\*)# sourceMappingURL=\S+( ?\*/)?", "", text).strip() + "\n"


def _read(name: str) -> str:
    return _REPORT.joinpath(name).read_text(encoding="utf-8")
