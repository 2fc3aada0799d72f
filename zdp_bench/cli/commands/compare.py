"""Show two runs side by side: data, every ε, metrics, and the configuration keys that differ. A
significance test compares them: DeLong's for ROC-AUCs on the same test set, Student's t over seeds.
A recipe selects all its seeds if they are one experiment; 'recipe=NAME seed=1,2' selects the runs
with these values.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_format, add_results, print_sheet, require_records

GROUP = "understand"
HELP = "compare two runs or groups of runs, with a significance test"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "RECIPE, RECIPE/RUN, a run's first digits, or 'column=value ...'"
    parser.add_argument("first", metavar="RUN", help=text)
    parser.add_argument("second", metavar="RUN", help="the run or group to compare with")
    add_format(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench import records
    from zdp_bench.report import compare

    require_records(options.results)
    all_records = records.read_all(options.results)
    first = compare.find_runs(options.first, all_records)
    second = compare.find_runs(options.second, all_records)
    print_sheet(compare.sheet(first, second, options.results), options.format)
    return 0
