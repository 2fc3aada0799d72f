"""Inspect, check and download data sets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from zdp_bench.cli.arguments import add_data_root, add_format, data_root, print_sheet
from zdp_bench.errors import UserError

GROUP = "understand"
HELP = "inspect, check and download data sets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=["show", "check", "fetch", "cache"],
        default="show",
        help="list data sets (default), check their files, download missing files, or show the "
        "cache's size",
    )
    parser.add_argument(
        "dataset", nargs="?", help="a data set (required for fetch), or your own folder or CSV"
    )
    add_data_root(parser)
    add_format(parser)
    parser.add_argument("--delete", action="store_true", help="with cache: delete its contents")


def run(options: argparse.Namespace) -> int:
    from zdp_bench.data import files
    from zdp_bench.registry import lookup
    from zdp_bench.report.terminal import say_state, show_data_root

    if options.action == "cache":
        return _show_cache(options.delete)
    root, named = data_root(options), Path(options.dataset or "")
    if options.action == "check" and options.dataset and named.exists():
        own = lookup("dataset", "folder")(path=str(named))
        return _say_each(str(named), own.check_files(root))
    try:
        chosen = [files.card(options.dataset)] if options.dataset else files.cards()
    except UserError as error:
        where = f"{named}: no such folder or CSV, and " if options.action == "check" else ""
        raise UserError(f"{where}{error}") from None
    if options.action == "show":
        print_sheet(show_data_root(root, chosen), options.format)
        return 0
    if options.format != "rich":
        raise UserError(f"--format {options.format}: only `zdp-bench data show` prints a table.")
    if options.action == "fetch" and not options.dataset:
        names = ", ".join(card.name for card in chosen)
        raise UserError(f"zdp-bench data fetch needs a data set: one of {names}.")
    # those whose files they read, once each
    chosen = list(
        {of.name: of for of in (files.card(of.uses or of.name) for of in chosen)}.values()
    )
    if options.action == "fetch":
        fetched = [path for card in chosen for path in files.fetch(root, card)]
        print("\n".join(f"fetched: {path}" for path in fetched) or "nothing is missing")
        return 0
    code = 0
    for card in chosen:
        if not card.files and files.has_files(root, card):
            why = "a run checks its files" if card.holds else "it needs no files here"
            print(f"{card.name}: {say_state(root, card)}; {why}")
        code = max(code, _say_each(card.name, files.check_files(root, card)))
    return code


def _say_each(name: str, checked: Iterable[tuple[Path, str]]) -> int:
    """Print what is wrong, and how many files were read; return 2 if anything is wrong."""
    total = wrong = 0
    for _, problem in checked:
        total += 1
        wrong += bool(problem)
        if problem:
            print(f"zdp-bench: {problem}", file=sys.stderr)
    if total:
        print(f"{name}: {total:,} files checked, {wrong:,} refused")
    return 2 if wrong else 0


def _show_cache(delete: bool) -> int:
    """Print the cache's arrays by kind, and perhaps delete them; runs keep those that they map."""
    from zdp_bench.caches import cache_root

    root, total = cache_root(), 0
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        arrays = list(folder.glob("*.npy"))
        size = sum(path.stat().st_size for path in arrays)
        total += size
        if arrays:
            print(f"{folder.name}: {len(arrays):,} arrays, {size / 1e9:.3f} GB")
        for path in arrays if delete else ():
            path.unlink(missing_ok=True)
    print(f"{root}: {total / 1e9:.3f} GB {'deleted' if delete else 'in all'}")
    return 0
