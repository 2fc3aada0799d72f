"""Draw a paper's figure."""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_data_root, add_results, data_root, require_records

GROUP = "reproduce"
HELP = "draw a paper's figure, as PNG and SVG"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "figures", nargs="+", metavar="PAPER/figN", help="`zdp-bench list figures` names them"
    )
    add_data_root(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.report import figures
    from zdp_bench.training.interrupts import require_writable

    require_records(options.results)
    require_writable(options.results)
    for name in options.figures:
        drawn = figures.draw(name, options.results, data_root(options))
        for path in figures.write(drawn, name, options.results):
            print(f"written: {path}")
    return 0
