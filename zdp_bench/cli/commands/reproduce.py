"""Run what a table lacks and write it; or, with --profile, all tables of all papers: smoke
(generated data, minutes; fills no paper's cell), here (what the data root holds), paper
(everything, estimated first).
"""

from __future__ import annotations

import argparse
import sys

from zdp_bench.cli.arguments import add_overrides, add_results, whole
from zdp_bench.cli.commands.table import print_table
from zdp_bench.errors import UserError, unknown

HELP = "run what a table lacks, or all tables, then write them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "table", nargs="?", default="", metavar="PAPER/N", help="`zdp-bench list tables` names them"
    )
    parser.add_argument("--profile", metavar="smoke|here|paper", help="all tables of all papers")
    parser.add_argument(
        "--seeds",
        type=whole(1),
        default=1,
        metavar="N",
        help="seeds 1 to N of every row (default 1)",
    )
    add_overrides(parser, "where and how: paths.data, threads, device")
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.experiments.claims import require_unchanged
    from zdp_bench.training.interrupts import require_writable

    require_writable(options.results)
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: must be at least 1.")
    if "=" in options.table:
        options.table, options.overrides = "", [options.table, *options.overrides]
    if bool(options.table) == bool(options.profile):
        raise UserError(
            "zdp-bench reproduce needs a table, PAPER/N, or --profile smoke|here|paper, "
            "and not both."
        )
    require_unchanged(options.overrides)
    return _run_profile(options) if options.profile else _run_table(options)


def _run_table(options: argparse.Namespace) -> int:
    """Run what one table lacks, one job after another, and print the table."""
    from zdp_bench.experiments.claims import Equals, fillings
    from zdp_bench.experiments.sweep import run_one

    failed = False
    equals = Equals(options.results)
    for filling in fillings(options.table, options.results):
        if filling.on:  # records on other data stand in the table as they are
            continue
        job = [f"recipe={filling.recipe}", *filling.overrides]
        for seed in range(1, options.seeds + 1):
            maker = equals.claim(filling, seed)
            if maker != filling.recipe:
                print(f"{' '.join(job)} seed={seed}: done before, by the equal recipe={maker}")
                continue
            where = [f"paths.results={options.results}", *options.overrides]
            try:
                run_one([*job, f"seed={seed}", *where])
            except UserError as error:
                failed = True
                print(f"zdp-bench: {' '.join(job)} seed={seed}: {error}", file=sys.stderr)
    print_table(options.table, options.results)
    return 2 if failed else 0


def _run_profile(options: argparse.Namespace) -> int:
    """Run what the tables of all papers lack, and print the verdict on every cell."""
    from rich.table import Table

    from zdp_bench.experiments import reproduce
    from zdp_bench.report import verdicts
    from zdp_bench.training.progress import console

    if options.profile not in reproduce.PROFILES:
        raise unknown("profile", options.profile, reproduce.PROFILES)
    outcome = reproduce.reproduce_all(
        options.profile,
        options.seeds,
        options.results,
        options.overrides,
        lambda line: print(line, flush=True),
    )
    columns = ("table", "row", "metric", "verdict", "why")
    shown = Table(*columns, title="Every cell", title_justify="left")
    for verdict in outcome.verdicts:
        shown.add_row(*(getattr(verdict, column) for column in columns))
    console().print(shown)
    counts = verdicts.counts(outcome.verdicts).items()
    counted = ", ".join(f"{count} {kind}" for kind, count in counts)
    print(f"{len(outcome.verdicts)} cells: {counted}. {verdicts.RULE}")
    print("\n".join(f"written: {path}" for path in outcome.pages))
    for job, reason in outcome.failed:
        print(f"zdp-bench: {job}: {reason}", file=sys.stderr)
    return 2 if outcome.failed else 0
