"""Measure time and memory of private training relative to other implementations."""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_results, print_sheet
from zdp_bench.errors import unknown

GROUP = "understand"
HELP = "measure time and memory of private and complex training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        help="zeta_dp_2021/6, zeta_dp_2021/7, deepee_2021/3, zoo, library, startup (default: all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller cases: under two minutes on two cores"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        metavar="N",
        help="CPU threads of each implementation (default 2)",
    )
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.config.types import Threads, check_value
    from zdp_bench.extras.bench import tables
    from zdp_bench.report.sheet import Sheet
    from zdp_bench.training.interrupts import require_writable

    require_writable(options.results)
    check_value("--threads", Threads, options.threads)
    for name in options.tables:
        if name not in tables.TABLES:
            raise unknown("table", name, tables.TABLES)
    for name in options.tables or tables.TABLES:
        for rows in tables.run(name, options.quick, options.threads, options.results):
            lines = [tables.cells(row) for row in rows]
            print_sheet(Sheet(rows[0]["case"], [*tables.COLUMNS.values()], lines), "rich")
        for path in tables.paths_of(name, options.quick, options.results):
            print(f"written: {path}")
    return 0
