"""Write all runs, tables and figures to one HTML page that works offline."""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_results, read_path, require_records

GROUP = "share"
HELP = "write one HTML page with all runs, tables and figures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=read_path,
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
    names = []
    has_paper_runs = any(run.claims.table for run in read_all(options.results))
    if has_paper_runs:  # otherwise no table has numbers, and the page is ready at once
        # The tables of figures are not built: the page shows them as `zdp-bench table` wrote them.
        names = [n for n in papers.available() if papers.recipes_of(n) and not papers.is_figure(n)]
    tables = {name: build_table(name, options.results) for name in names}
    written = page.write(tables, options.results, output)
    print(f"written: {written}")
    return 0
