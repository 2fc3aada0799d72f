"""Write every run, table, ε and figure to one HTML page that needs no network."""

from __future__ import annotations

import argparse
from pathlib import Path

from zdp_bench.cli.arguments import add_results, require_records

GROUP = "share"
HELP = "write one HTML page with all runs, tables and figures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write (default: report.html in the results folder)",
    )
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.disk import require_regular
    from zdp_bench.experiments.claims import build_table
    from zdp_bench.extras.page import page
    from zdp_bench.records import read_all
    from zdp_bench.report import papers
    from zdp_bench.training.interrupts import require_writable

    require_records(options.results)
    output = options.output or options.results / "report.html"
    require_writable(output.parent)
    require_regular(output)
    # The page shows a figure's table as `zdp-bench table` wrote it.
    names = [n for n in papers.available() if papers.recipes_of(n) and not papers.is_figure(n)]
    if not any(
        run.claims.table for run in read_all(options.results)
    ):  # own runs only: their page is there at once
        names = []
    made = {name: build_table(name, options.results) for name in names}
    written = page.write(made, options.results, output)
    print(f"written: {written}")
    return 0
