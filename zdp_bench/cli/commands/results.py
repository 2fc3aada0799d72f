"""The records as a table."""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_format, add_results, require_records
from zdp_bench.errors import UserError

HELP = "the records as a table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "filters", nargs="*", metavar="column=value", help="only records with these values"
    )
    parser.add_argument("--columns", help="comma-separated columns (default: the most telling)")
    parser.add_argument(
        "--by", metavar="COLUMN,...", help="one line a group: n, mean and deviation of the value"
    )
    parser.add_argument("--sort", metavar="COLUMN", help="sort by a column")
    add_format(parser, "md", "csv", "json")
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.report import results
    from zdp_bench.training.progress import console

    folder = options.results
    require_records(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{folder}: is a file and no folder, so there are no records. "
            "Name the results folder of your runs."
        )
    frame = results.select(folder, options.filters, options.columns, options.sort, options.by)
    sheet = results.sheet(frame)
    if options.format == "rich":
        console().print(sheet.as_rich())
    else:
        print(sheet.as_text(options.format))
    return 0
