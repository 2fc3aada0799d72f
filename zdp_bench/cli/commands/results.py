"""The records as a table. A column is any of records.csv, or any key of the configuration
(`optimizer.lr`); what differs between the runs of a recipe is shown unasked.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_format, add_results, print_sheet, require_records

GROUP = "understand"
HELP = "the records as a table"
LONGEST = 200  # lines on a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "filters", nargs="*", metavar="column=value", help="only records with these values"
    )
    parser.add_argument(
        "--columns",
        metavar="A,B,...",
        help="columns, such as seed,optimizer.lr,value (default: the most telling)",
    )
    parser.add_argument(
        "--by", metavar="COLUMN,...", help="one line a group: n, mean and deviation of the value"
    )
    parser.add_argument("--sort", metavar="COLUMN", help="sort by a column")
    add_format(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.report import results

    folder = options.results
    require_records(folder)
    found = results.select(folder, options.filters, options.columns, options.sort, options.by)
    most = LONGEST if options.format == "rich" else None
    print_sheet(results.sheet(found, most), options.format)
    return 0
