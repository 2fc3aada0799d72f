"""Show your runs as a table. A column is one of records.csv, a metric (`accuracy`), or a key of the
configuration (`optimizer.lr`); `differs` shows the keys that differ between runs of a recipe.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_format, add_results, print_sheet, require_records
from zdp_bench.errors import UserError

GROUP = "understand"
HELP = "show your runs as a table"
MAX_LINES = 200  # lines that are shown on a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "filters", nargs="*", metavar="column=value,...", help="only runs with these values"
    )
    parser.add_argument("--columns", metavar="A,B,...", help="such as seed,optimizer.lr,accuracy")
    parser.add_argument(
        "--by",
        metavar="A,B,...",
        help="one line per group, with n, and mean and deviation of --columns (default: value)",
    )
    parser.add_argument("--sort", metavar="COLUMN", help="sort by a column")
    parser.add_argument("--descending", action="store_true", help="the largest first")
    add_format(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.report import results

    if options.descending and not options.sort:
        raise UserError("--descending needs --sort COLUMN: without it, the newest run comes first.")
    require_records(options.results)
    sheet = results.sheet(
        options.results,
        options.filters,
        options.columns,
        options.sort,
        by=options.by,
        descending=options.descending,
        limit=MAX_LINES if options.format == "rich" else None,
    )
    print_sheet(sheet, options.format)
    return 0
