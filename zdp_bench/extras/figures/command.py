"""Draw a paper's figure (PAPER/figN), one of our own tables, `epsilon` or `reconstructions`. With
--runs, draw a metric of your runs against any column of records.csv or key of the configuration.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zdp_bench.cli.arguments import add_results, read_path, require_records
from zdp_bench.errors import UserError

GROUP = "reproduce"
HELP = "draw a paper's figure or your runs as PNG, SVG and PDF"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "figures", nargs="*", metavar="PAPER/figN", help="see `zdp-bench list tables`"
    )
    parser.add_argument(
        "--runs",
        nargs="*",
        metavar="COLUMN=VALUE",
        help="draw the runs with these values; all runs if none is given",
    )
    parser.add_argument("--x", metavar="KEY", help="with --runs, such as epsilon_tight")
    parser.add_argument("--y", metavar="METRIC", help="with --runs, such as accuracy")
    parser.add_argument(
        "--by",
        metavar="KEY,KEY",
        help="with --runs: one colour for each combination of these values (default: algorithm)",
    )
    parser.add_argument(
        "--out",
        type=read_path,
        metavar="FILE",
        help="with --runs: a .png, .svg or .pdf file (default: all three, as own_KEY_METRIC in "
        "the results folder's figures)",
    )
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.extras.figures import drawing, figures
    from zdp_bench.training.interrupts import require_writable

    draws_runs = options.runs is not None
    has_figures = bool(options.figures)
    has_axes = bool(options.x and options.y)
    runs_options = (options.out, options.by, options.x, options.y)
    if has_figures and not draws_runs and any(runs_options):
        raise UserError(
            "--x, --y, --by and --out need --runs: the figure of a paper or table is written to "
            "the results folder's figures, with its own axes and colours."
        )
    if draws_runs == has_figures or draws_runs != has_axes:
        raise UserError(
            "`zdp-bench figure` needs PAPER/figN, or --runs with --x and --y; "
            "see `zdp-bench figure --help`."
        )
    require_records(options.results, runs=draws_runs)
    if options.out is None:
        require_writable(options.results)
    paths: list[Path] = []
    if draws_runs:
        by = (options.by or "algorithm").split(",")
        figure = figures.draw_runs(
            options.results,
            options.runs,
            options.x,
            options.y,
            by,
        )
        if options.out is not None:
            drawing.save(figure, options.out)
            paths = [options.out]
        else:
            name = f"own_{options.x}_{options.y}".replace(".", "_")
            paths = drawing.write(figure, name, options.results)
    for name in options.figures:
        figure = figures.draw(name, options.results)
        paths += drawing.write(figure, name, options.results)
    print("\n".join(f"written: {path}" for path in paths))
    return 0
