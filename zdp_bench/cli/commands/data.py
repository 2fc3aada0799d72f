"""Inspect, check and download data sets."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from zdp_bench.cli.arguments import add_data_root, add_format, data_root, print_sheet
from zdp_bench.errors import UserError, print_message

if TYPE_CHECKING:
    from zdp_bench.data import Splits

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
        "dataset",
        nargs="?",
        help="a data set (required for fetch); with check, also your own ./FOLDER or CSV, or "
        "recipe=NAME and any key, to count examples that are not finite",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=argparse.SUPPRESS)
    add_data_root(parser)
    add_format(parser)
    parser.add_argument("--delete", action="store_true", help="with cache: delete its files")


def run(options: argparse.Namespace) -> int:
    from zdp_bench import assets
    from zdp_bench.data import files
    from zdp_bench.foreign_files import exists
    from zdp_bench.registry import lookup, names_of_others
    from zdp_bench.report.terminal import describe_state, show_data_root

    if options.delete and options.action != "cache":
        raise UserError("--delete: only `zdp-bench data cache` deletes, and the whole cache.")
    if options.format != "rich" and options.action != "show":
        raise UserError(f"--format {options.format}: only `zdp-bench data show` prints a table.")
    if options.action == "cache":
        if options.root:
            raise UserError(
                f"--root {options.root}: the cache is in the user's cache folder; set "
                "XDG_CACHE_HOME to use another one."
            )
        if options.dataset:
            raise UserError(
                f"zdp-bench data cache {options.dataset}: all data sets share the cache, so leave "
                "out the name; --delete would delete all of it."
            )
        return _show_cache(options.delete)
    root = data_root(options)
    path = Path(options.dataset or "")  # of the user's own data, if it exists
    others = names_of_others("dataset") if options.dataset else []
    # A data set's name is the data set, whatever is in the working folder; a path has a slash.
    is_own = exists(path) and options.dataset not in {*assets.group(assets.DATASETS), *others}
    if options.action == "check" and "=" in str(options.dataset) and not is_own:
        return _check_recipe([options.dataset, *options.overrides], options.root)
    if options.overrides:
        raise UserError(
            f"{options.overrides[0]}: `zdp-bench data check recipe=NAME` takes keys, and nothing "
            "else of `zdp-bench data` does."
        )
    if options.action == "check" and options.dataset and is_own:
        if options.root:
            raise UserError(
                f"--root {options.root}: {path} is your own data, which is read from that path; "
                "leave --root out."
            )
        own_data = lookup("dataset", "folder")(path=str(path))
        return _print_problems(str(path), own_data.check_files(root))
    if options.action == "check" and options.dataset in others:
        return _count(options.dataset, root)
    try:
        cards = [files.card(options.dataset)] if options.dataset else files.cards()
    except UserError as error:
        missing = f"{path}: no such folder or CSV, and " if options.action == "check" else ""
        raise UserError(f"{missing}{error}") from None
    if options.action == "show":
        print_sheet(show_data_root(root, cards), options.format)
        return 0
    if options.action == "fetch" and not options.dataset:
        names = ", ".join(card.name for card in cards)
        raise UserError(f"zdp-bench data fetch needs a data set: one of {names}.")
    # Several data sets may read the files of the same source, which is checked once.
    sources = {card.uses or card.name: None for card in cards}
    cards = [files.card(name) for name in sources]
    if options.action == "fetch":
        fetched = [path for card in cards for path in files.fetch(root, card)]
        print("\n".join(f"fetched: {path}" for path in fetched) or "nothing is missing")
        return 0
    code = 0
    can_count = bool(options.dataset) and _is_present(root, options.dataset)
    for card in cards:
        if not card.files and files.has_files(root, card) and not can_count:
            why = "a run checks its files" if card.holds else "it needs no files here"
            print(f"{card.name}: {describe_state(root, card)}; {why}")
        code = max(code, _print_problems(card.name, files.check_files(root, card)))
    return _count(options.dataset, root) if can_count and code == 0 else code


def _is_present(root: Path, name: str) -> bool:
    """Return True if the files of a data set are under the root, so that none is generated."""
    from zdp_bench.data import files
    from zdp_bench.report.terminal import describe_state

    return describe_state(root, files.card(name)) == "present"


def _check_recipe(words: list[str], root: Path | None) -> int:
    """Load the data set of a configuration, and count its examples that are not finite."""
    from zdp_bench.config import configured
    from zdp_bench.config.words import split_word, write_word
    from zdp_bench.training.setup import load_data

    if root and any(split_word(word)[0] == "paths.data" for word in words):
        raise UserError(f"--root {root}: paths.data sets the data root too; leave one out.")
    config = configured([*words, *([write_word("paths.data", root)] if root else [])])
    return _print_counts(config.dataset.name, load_data(config))


def _count(name: str, root: Path) -> int:
    """Load a data set with its default options, and count its examples that are not finite."""
    from zdp_bench import assets
    from zdp_bench.config.plugins import check_plugin
    from zdp_bench.registry import lookup

    shipped = assets.group(assets.DATASETS)
    body = assets.read_yaml(shipped[name]) if name in shipped else {"name": name}
    body.pop("card", None)
    dataset = lookup("dataset", name)(**check_plugin("dataset", body).options)
    return _print_counts(name, dataset.load(root))


def _print_counts(name: str, splits: Splits) -> int:
    """Print how many examples each part has, and how many are not finite.

    Returns:
        The exit code: 2 if any example is not finite.
    """
    from zdp_bench.data.finite import count_not_finite

    code = 0
    for count in count_not_finite(splits):
        print(f"{name}: {count.examples:,} {count.part} examples, {count.not_finite:,} not finite")
        if count.not_finite:
            code = 2
            print_message(
                f"{name}: {count.not_finite:,} of {count.examples:,} {count.part} "
                f"examples are not finite, the first of which is number {count.first} (from 0). A "
                "run would spend ε on them without a warning: correct them, or leave them out."
            )
    return code


def _print_problems(name: str, checked: Iterable[tuple[Path, str]]) -> int:
    """Print the problem of each file that has one, and the number of files.

    Args:
        name: name of the data set.
        checked: (path, problem or '') of each file.

    Returns:
        The exit code: 2 if any file has a problem.
    """
    num_files = num_refused = 0
    for _, problem in checked:
        num_files += 1
        if problem:
            num_refused += 1
            print_message(problem)
    if num_files:
        print(f"{name}: {num_files:,} files checked, {num_refused:,} refused")
    return 2 if num_refused else 0


def _show_cache(delete: bool) -> int:
    """Print the number and size of the cached files of each kind; delete them if `delete`.

    A run that has memory-mapped a deleted array keeps it until it ends.
    """
    from zdp_bench.caches import cache_root, list_files

    total = 0
    for kind, files in list_files().items():
        size = sum(path.stat().st_size for path in files)
        total += size
        if files:
            print(f"{kind}: {len(files):,} files, {size / 1e9:.3f} GB")
        if delete:
            for path in files:
                path.unlink(missing_ok=True)
    print(f"{cache_root()}: {total / 1e9:.3f} GB {'deleted' if delete else 'in all'}")
    return 0
