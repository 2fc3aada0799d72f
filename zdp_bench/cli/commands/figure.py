"""Draw a paper's figure, or with --runs one of your own: a metric of your runs against any column
of records.csv or key of the configuration.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zdp_bench.cli.arguments import add_results, require_records
from zdp_bench.errors import UserError

GROUP = "reproduce"
HELP = "draw a paper's figure or your runs as PNG, SVG and PDF"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "figures", nargs="*", metavar="PAPER/figN", help="see `zdp-bench list figures`"
    )
    parser.add_argument(
        "--runs",
        nargs="*",
        metavar="COLUMN=VALUE",
        help="draw the runs with these values; all runs if none is given",
    )
    parser.add_argument("--x", metavar="KEY", help="of --runs, such as epsilon_tight, optimizer.lr")
    parser.add_argument("--y", metavar="METRIC", help="of --runs, such as accuracy")
    parser.add_argument(
        "--by",
        metavar="KEY,KEY",
        help="of --runs: a colour for each value of these (default: algorithm)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="of --runs: a .png, .svg or .pdf (default: all three, as own_KEY_METRIC in the "
        "results folder's figures)",
    )
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.report import figures
    from zdp_bench.training.interrupts import require_writable

    _require_one_kind(options)
    require_records(options.results, runs=options.runs is not None)
    if options.out is None:
        require_writable(options.results)
    if options.runs is not None:
        return _draw_runs(options)
    for name in options.figures:
        drawn = figures.draw(name, options.results)
        for path in figures.write(drawn, name, options.results):
            print(f"written: {path}")
    return 0


def _require_one_kind(options: argparse.Namespace) -> None:
    own = {"--x": options.x, "--y": options.y, "--by": options.by, "--out": options.out}
    if options.runs is None:
        given = [name for name, value in own.items() if value is not None]
        if given:
            raise UserError(f"{given[0]}: applies to your own runs; add --runs COLUMN=VALUE.")
        if not options.figures:
            raise UserError(
                "`zdp-bench figure` needs PAPER/figN, or --runs with --x and --y; "
                "see `zdp-bench figure --help`."
            )
    elif options.figures:
        raise UserError(f"{options.figures[0]}: is a paper's figure; remove it or --runs.")
    elif options.x is None or options.y is None:
        raise UserError("--runs needs --x KEY and --y METRIC, such as --x epsilon_tight.")


def _draw_runs(options: argparse.Namespace) -> int:
    from zdp_bench.report import figures
    from zdp_bench.report.figures import own

    by = (options.by or "algorithm").split(",")
    drawing = own.draw(options.results, options.runs, options.x, options.y, by)
    name = f"own_{options.x}_{options.y}".replace(".", "_")
    if options.out is not None:
        figures.save(drawing.figure, options.out)
        paths = [options.out]
    else:
        paths = figures.write(drawing.figure, name, options.results)
    for note in drawing.notes:
        print(note)
    for path in paths:
        print(f"written: {path}")
    return 0
