"""Show the tight ε of all runs on each data set together, per example and per patient, with seeded
and with secure noise. A stopped run counts with all its planned steps. `privacy.total_budget=E`
rejects a run that would exceed E.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_format, add_results, print_sheet, require_records
from zdp_bench.errors import unknown

GROUP = "understand"
HELP = "show the total ε of all runs on each data set"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", nargs="?", help="only this data set")
    parser.add_argument(
        "--delta",
        metavar="δ",
        type=float,
        help="δ for which ε is stated (default: the smallest of the data set's runs)",
    )
    add_format(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.privacy.statement import require_delta
    from zdp_bench.report import budget
    from zdp_bench.training.spending import find_spendings

    delta = options.delta
    if delta is not None:
        require_delta("--delta", delta)
    require_records(options.results)
    spendings, unexplained = find_spendings(options.results, skip_damaged=True)
    if options.dataset:
        names = {spending.dataset for spending in spendings}
        names |= {spending.shown for spending in spendings}
        if options.dataset not in names:
            raise unknown("data set with runs", options.dataset, sorted(names))
    sheet = budget.sheet(spendings, delta, unexplained, options.results, options.dataset)
    print_sheet(sheet, options.format)
    return 0
