"""Name what there is, each with a line on it; `zdp-bench list keys` shows every key with its
default.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zdp_bench.cli.arguments import add_format, print_sheet
from zdp_bench.errors import unknown

GROUP = "understand"
HELP = "what there is: algorithms, models, datasets, recipes, keys, ..."
KINDS = (
    "algorithms",
    "models",
    "representations",
    "datasets",
    "tasks",
    "optimizers",
    "schedulers",
    "accountants",
    "recipes",
    "tables",
    "figures",
    "keys",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=[*KINDS], help="one kind only")
    parser.add_argument("word", nargs="?", help="only what has this word in its name or line")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from rich.table import Table

    from zdp_bench.report.sheet import Sheet
    from zdp_bench.training.progress import console

    found = {kind: _list(kind) for kind in ([options.kind] if options.kind else KINDS[:-1])}
    if options.word:
        found = {kind: _having(options.word, lines) for kind, lines in found.items()}
        if not any(found.values()):
            names = [name for name, _ in _list(options.kind)]
            raise unknown(f"word of {options.kind}", options.word, names)
    if options.format != "rich":
        rows = [[kind, name, line] for kind, lines in found.items() for name, line in lines]
        print_sheet(Sheet.of_words("", ("kind", "name", "what"), rows), options.format)
        return 0
    for kind, lines in found.items():
        if not lines:
            continue
        table = Table(title=kind, show_header=False, title_justify="left", box=None, padding=(0, 2))
        for name, line in lines:
            table.add_row(name, line)
        console().print(table, "")
    return 0


def _having(word: str, lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [line for line in lines if word.lower() in " ".join(line).lower()]


def _list(kind: str) -> list[tuple[str, str]]:
    """Return (name, one line) of everything of a kind."""
    from zdp_bench import assets

    if kind == "datasets":
        cards = {n: assets.read_yaml(p)["card"] for n, p in assets.group(assets.DATASETS).items()}
        line = "{title}: {provenance}, {licence}"
        return [(n, line.format(**card)) for n, card in cards.items()] + _list_others("dataset")
    if kind == "tables":
        from zdp_bench.report import papers

        every = [*papers.ours(), *papers.available()]
        return [(name, ", ".join(papers.recipes_of(name)) or "no recipe yet") for name in every]
    if kind == "figures":
        from zdp_bench.registry import lookup, names

        docs = {name: str(lookup("figure", name).__doc__) for name in names("figure")}
        return [(name, doc.splitlines()[0]) for name, doc in docs.items()]
    if kind == "keys":
        from zdp_bench.config.plugins import every_key

        return every_key()
    from zdp_bench.registry import FOREIGN, HOMES

    group = kind.removesuffix("s")
    folder = assets.RECIPES if kind == "recipes" else assets.CONF / group
    ours = [(name, _first_comment(path)) for name, path in assets.group(folder).items()]
    return ours + (_list_others(group) if group in {*HOMES, *FOREIGN} else [])


def _list_others(kind: str) -> list[tuple[str, str]]:
    """Return what other packages registered, with a line of its own and the package's name."""
    from zdp_bench.registry import lookup, names_of_others, package_of

    words = {name: (lookup(kind, name).__doc__ or "").strip() for name in names_of_others(kind)}
    return [
        (name, f"{text.partition(chr(10))[0]} (plug-in of {package_of(kind, name)})".strip())
        for name, text in words.items()
    ]


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ") if first.startswith("# ") else ""
