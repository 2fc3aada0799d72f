"""Print a paper's table beside ours, and write it."""

from __future__ import annotations

import argparse
import errno
import sys
from pathlib import Path

from zdp_bench.cli.arguments import add_format, add_results, require_records

GROUP = "reproduce"
HELP = "print a paper's table beside ours, and write it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="PAPER/N", help="`zdp-bench list tables` names them")
    add_format(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    require_records(options.results, runs=False)
    print_table(options.table, options.results, options.format)
    return 0


def print_table(name: str, results: Path, form: str = "rich") -> None:
    """Print a table, or the curves of a figure as a table, and write it where one may."""
    from zdp_bench.experiments.claims import fillings
    from zdp_bench.report import curves, grids, papers, tables
    from zdp_bench.training.progress import console

    every = fillings(name, results)
    table: tables.Table | curves.Curves | grids.Grid
    if name in papers.ours():
        table = grids.build(name, results, every)
    else:
        build = curves.build if papers.is_figure(name) else tables.build
        table = build(name, results, every)
    try:
        written = [f"written: {path}" for path in table.write(results)]
    except OSError as error:  # somebody else's results can be read all the same
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        print(f"zdp-bench: {error.filename}: {error.strerror}; not written.", file=sys.stderr)
        written = []
    if form == "rich":
        console().print(*table.as_rich(), sep="\n")
        print(*written, sep="\n")
    else:
        print(table.as_text(form))
