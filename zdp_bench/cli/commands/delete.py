"""Delete runs: record, weights and logs. What they have spent still counts in `budget`,
`privacy.total_budget` and `search`, because their models and numbers may have been seen.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_results, require_records

GROUP = "understand"
HELP = "delete a run's files, but not what it has spent"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "RECIPE/RUN, a run's first digits, its name, or a recipe with one run"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench import records
    from zdp_bench.report.terminal import size
    from zdp_bench.training.deletion import delete, find_homes

    require_records(options.results)
    homes = find_homes(options.results, options.runs)
    try:
        for home in homes:
            deletion = delete(home)
            spending = deletion.spending
            print(
                f"{deletion.name}: deleted, {size(deletion.size)} freed. Its "
                f"{spending.spent.steps:,} steps on {spending.shown} still count: see "
                "`zdp-bench budget`."
            )
    finally:  # some runs may be deleted before another one cannot be
        records.renew_csv(options.results)
    return 0
