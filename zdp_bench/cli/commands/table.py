"""Print a paper's table, with our runs beside its numbers, or one of our own tables.

--write also writes it to results/tables. Without a name, all tables and figures are written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zdp_bench.cli.arguments import add_format, add_results, print_sheet, require_records
from zdp_bench.errors import UserError

GROUP = "reproduce"
HELP = "print a paper's table with our results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", nargs="?", metavar="PAPER/N", help="see `zdp-bench list tables`")
    parser.add_argument(
        "--write", action="store_true", help="write to results/tables; without PAPER/N, write all"
    )
    add_format(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.experiments.claims import build_table

    require_records(options.results, runs=False)
    if options.table:
        table = build_table(options.table, options.results)
        print_sheet(table.sheet, options.format)
        written = table.write(options.results) if options.write else []
        print("".join(f"written: {path}\n" for path in written), end="")
    elif options.write:
        write_tables(options.results)
    else:
        raise UserError("`zdp-bench table` needs PAPER/N, or --write alone for all tables.")
    return 0


def write_tables(results: Path) -> None:
    """Write every table and figure of which recipes may fill a number, and those of our own."""
    from zdp_bench.experiments.claims import build_table
    from zdp_bench.report import papers

    for name in [*filter(papers.recipes_of, papers.available()), *papers.ours()]:
        try:
            paths = build_table(name, results).write(results)
        except UserError as error:  # a table of our own that has no run yet
            print(error)
        else:
            print("".join(f"written: {path}\n" for path in paths), end="", flush=True)
