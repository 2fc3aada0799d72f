"""List plug-ins, recipes, tables or keys, with one line each: `zdp-bench list recipes`, or, to
search all kinds, `zdp-bench list mri`. The line of a recipe ends with its data set and the time of
its fastest run, that of a key with its default.
"""

from __future__ import annotations

import argparse
import csv
import io
import logging
from pathlib import Path

from zdp_bench.cli.arguments import add_format, print_sheet
from zdp_bench.errors import UserError, unknown

GROUP = "understand"
HELP = "list algorithms, models, data sets, recipes, keys, ..."
log = logging.getLogger(__name__)
KINDS = (
    "algorithms",
    "models",
    "representations",
    "datasets",
    "tasks",
    "optimizers",
    "schedulers",
    "accountants",
    "loggers",
    "recipes",
    "tables",
    "keys",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", metavar="KIND|WORD", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("word", nargs="?", help="list only lines that contain this word")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from rich.table import Table

    from zdp_bench.report.console import console
    from zdp_bench.report.sheet import Sheet

    only_kind = next((kind for kind in KINDS if options.kind in (kind, kind[:-1])), None)
    word = options.word if only_kind else options.kind
    kinds = KINDS if word else KINDS[:-1]  # a list of everything is too long with the keys
    lines_of = {kind: _list(kind) for kind in ((only_kind,) if only_kind else kinds)}
    if word:
        names = [*KINDS, *(name for lines in lines_of.values() for name, _ in lines)]
        lines_of = {
            kind: [line for line in lines if word.lower() in " ".join(line).lower()]
            for kind, lines in lines_of.items()
        }
        has_two_words = options.word and word != options.word
        if has_two_words:
            raise UserError(
                f"{options.kind} {options.word}: give one word, or a kind and a word; the kinds "
                f"are {', '.join(KINDS)}."
            )
        if not any(lines_of.values()):
            raise unknown("kind or word", word, names)
    if options.format != "rich":
        rows = [[kind, name, line] for kind, lines in lines_of.items() for name, line in lines]
        print_sheet(Sheet.of_words("", ("kind", "name", "what"), rows), options.format)
        return 0
    for kind, lines in lines_of.items():
        if not lines:
            continue
        table = Table(title=kind, show_header=False, title_justify="left", box=None, padding=(0, 2))
        for name, line in lines:
            table.add_row(name, line)
        console().print(table, "")
    return 0


def _list(kind: str) -> list[tuple[str, str]]:
    """Return (name, description) of everything of a kind."""
    from zdp_bench import assets

    if kind == "datasets":
        cards = {n: assets.read_yaml(p)["card"] for n, p in assets.group(assets.DATASETS).items()}
        line = "{title}: {provenance}, {licence}"
        return [(n, line.format(**card)) for n, card in cards.items()] + _list_others("dataset")
    if kind == "tables":
        from zdp_bench.report import papers

        tables = [*papers.ours(), *papers.available()]
        return [(name, ", ".join(papers.recipes_of(name)) or "no recipe yet") for name in tables]
    if kind == "keys":
        from zdp_bench.config.plugins import list_all_keys

        return list_all_keys()
    from zdp_bench.registry import FOREIGN, HOMES

    group = kind.removesuffix("s")
    folder = assets.RECIPES if kind == "recipes" else assets.CONF / group
    ours = [(name, _first_comment(path)) for name, path in assets.group(folder).items()]
    if kind == "recipes":
        times = _read_times()
        return [(name, f"{line} {_describe_cost(name, times)}") for name, line in ours]
    return ours + (_list_others(group) if group in {*HOMES, *FOREIGN} else [])


def _read_times() -> dict[str, float]:
    """Return the seconds of the fastest run of each "RECIPE DATASET", from `results`.

    Only warn if a file is damaged, because the list is useful without times.
    """
    times: dict[str, float] = {}
    for path in (Path("results/records.csv"), Path("results/tables/records.csv")):
        try:
            rows = _read_rows(path) if path.is_file() else []
        except UserError as error:
            log.warning("%s The times in it are not shown.", error)
            continue
        for key, seconds in rows:
            times[key] = min(seconds, times.get(key, seconds))
    return times


def _read_rows(path: Path) -> list[tuple[str, float]]:
    """Return ("RECIPE DATASET", seconds) of each run in a `records.csv` that has a time."""
    from zdp_bench.foreign_files import expect, read_text, reading
    from zdp_bench.records.files import MAX_CSV

    text = read_text(path, MAX_CSV)
    rows = []
    with reading(path):
        for row in csv.DictReader(io.StringIO(text)):
            if row["train_seconds"]:
                seconds = float(row["train_seconds"])
                expect(0 <= seconds < 1e9, f"states a time of {seconds:g} s")
                rows.append((f"{row['recipe']} {row['dataset']}", seconds))
    return rows


def _describe_cost(recipe: str, times: dict[str, float]) -> str:
    """Return a recipe's data set and the time of its fastest run: '[mnist, 12 min]'."""
    from zdp_bench import assets
    from zdp_bench.report.number_format import duration

    defaults = assets.read_yaml(assets.RECIPES / f"{recipe}.yaml").get("defaults", [])
    dataset = next((d["override /dataset"] for d in defaults if "override /dataset" in d), "")
    seconds = times.get(f"{recipe} {dataset}")
    return f"[{dataset}]" if seconds is None else f"[{dataset}, {duration(seconds)}]"


def _list_others(kind: str) -> list[tuple[str, str]]:
    """Return (name, description) of the plug-ins that other packages registered."""
    from zdp_bench.registry import lookup, names_of_others, package_of

    lines = []
    for name in names_of_others(kind):
        summary = (lookup(kind, name).__doc__ or "").strip().partition("\n")[0]
        lines.append((name, f"{summary} (plug-in of {package_of(kind, name)})".strip()))
    return lines


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ") if first.startswith("# ") else ""
