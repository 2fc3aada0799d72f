"""Print a paper's table, with our runs beside its numbers, or one of our own tables.

--write also writes it to results/tables. Without a name, all tables and figures are written.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from zdp_bench.cli.arguments import add_format, add_results, print_sheet, require_records
from zdp_bench.errors import UserError

if TYPE_CHECKING:
    from zdp_bench.report.sheet import Sheet

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
        sheet = build_table(options.table, options.results)
        print_sheet(sheet, options.format)
        if options.write:
            write_sheet(sheet, options.table, options.results)
    elif options.write:
        if options.format != "rich":
            raise UserError(
                f"--format {options.format}: all tables are written, not printed. Name one with "
                "PAPER/N, or leave --format out."
            )
        write_tables(options.results)
    else:
        raise UserError("`zdp-bench table` needs PAPER/N, or --write alone for all tables.")
    return 0


def write_tables(results: Path) -> None:
    """Write all tables and figures of the papers that have a recipe, and our own.

    `records.csv`, to which each run appends a row, is written again in the order of its records.
    """
    from zdp_bench import records
    from zdp_bench.experiments.claims import build_table
    from zdp_bench.report import papers

    if (results / "records.csv").is_file():
        records.renew_csv(results)
    for name in [*filter(papers.recipes_of, papers.available()), *papers.ours()]:
        try:
            write_sheet(build_table(name, results), name, results)
        except UserError as error:  # one of our own tables that has no run yet
            print(error)


def write_sheet(sheet: Sheet, name: str, results: Path) -> None:
    """Write a table into a results folder, and print the paths of its files."""
    from zdp_bench.report.papers import file_of

    for path in sheet.write(file_of(name, results)):
        print(f"written: {path}", flush=True)
