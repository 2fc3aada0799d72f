"""Look after the data root."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from zdp_bench.cli.arguments import add_data_root, add_format, data_root, print_sheet
from zdp_bench.errors import UserError

if TYPE_CHECKING:
    from zdp_bench.data.files import Card

GROUP = "understand"
HELP = "what is under the data root, and what is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=["show", "check", "fetch"],
        default="show",
        help="what is there (the default), whether each file is what was published, "
        "or download what is missing",
    )
    parser.add_argument("dataset", nargs="?", help="one data set only (needed for fetch)")
    add_data_root(parser)
    add_format(parser)
    parser.add_argument("--mirror", help="fetch from this address instead of the card's")


def run(options: argparse.Namespace) -> int:
    from zdp_bench.data import files
    from zdp_bench.report.terminal import say_state, show_data_root

    root = data_root(options)
    chosen = [files.card(options.dataset)] if options.dataset else files.cards()
    if options.action == "show":
        print_sheet(show_data_root(root, chosen), options.format)
        return 0
    if options.format != "rich":
        raise UserError(f"--format {options.format}: only `zdp-bench data show` prints a table.")
    if options.action == "fetch" and not options.dataset:
        names = ", ".join(card.name for card in chosen)
        raise UserError(f"zdp-bench data fetch needs a data set: one of {names}.")
    chosen = _sources(chosen)
    if options.action == "fetch":
        fetched = [path for card in chosen for path in files.fetch(root, card, options.mirror)]
        print("\n".join(f"fetched: {path}" for path in fetched) or "nothing is missing")
        return 0
    wrong = 0
    for card in chosen:
        if not (card.files or card.holds):
            print(f"{card.name}: {say_state(root, card)}; it needs no files here")
        for path, problem in files.check_files(root, card):
            if problem:
                wrong += 1
                print(f"zdp-bench: {problem}", file=sys.stderr)
            else:
                print(f"ok: {path}")
    return 2 if wrong else 0


def _sources(cards: list[Card]) -> list[Card]:
    """Return the cards whose files the given cards read, once each."""
    from zdp_bench.data.files import card

    return list({of.uses or of.name: card(of.uses) if of.uses else of for of in cards}.values())
