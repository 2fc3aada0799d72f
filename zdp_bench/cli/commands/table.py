"""Print a paper's table beside ours, and write it."""

from __future__ import annotations

import argparse
from pathlib import Path

from zdp_bench.cli.arguments import add_format, add_results, require_records

GROUP = "reproduce"
HELP = "print a paper's table beside ours, and write it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="PAPER/N", help="`zdp-bench list tables` names them")
    add_format(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.training.interrupts import require_writable

    require_records(options.results)
    require_writable(options.results)
    print_table(options.table, options.results, options.format)
    return 0


def print_table(name: str, results: Path, form: str = "rich") -> None:
    """Print a table, or the curves of a figure as a table, and write it."""
    from zdp_bench.experiments.claims import fillings
    from zdp_bench.records import rest_collector
    from zdp_bench.report import curves, papers, tables
    from zdp_bench.training.progress import console

    build = curves.build if papers.is_figure(name) else tables.build
    with rest_collector():
        table = build(name, results, fillings(name, results))
    written = [f"written: {path}" for path in table.write(results)]
    if form == "rich":
        console().print(*table.as_rich(), sep="\n")
        print("\n".join(written))
    else:
        print(table.as_text(form))
