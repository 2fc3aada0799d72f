"""Search hyper-parameters within one ε. Give keys several values in Hydra's sweep grammar, such as
'optimizer.lr=tag(log,interval(0.01,1))' or algorithm.max_grad_norm=0.5,1,2. Optuna proposes
trials. Each is a run with a record; the best one has the best metric on validation examples. The
search prints the total ε of all trials, and --epsilon E limits it. The same command continues a
stopped search.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_format, add_overrides, print_sheet

GROUP = "run"
HELP = "search hyper-parameters within one ε"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trials", type=int, metavar="N", help="number of runs (default: the whole grid)"
    )
    parser.add_argument(
        "--sampler",
        choices=["tpe", "random", "grid"],
        help="default: grid if the values are lists and --trials is not given, else tpe",
    )
    parser.add_argument(
        "--epsilon",
        type=float,
        metavar="E",
        help="give each trial the noise that keeps the whole search within E",
    )
    parser.add_argument(
        "--metric", metavar="NAME", help="metric on validation examples (default: the task's)"
    )
    add_format(parser)
    add_overrides(parser, "recipe=NAME, and keys with one or several values")


def run(options: argparse.Namespace) -> int:
    from zdp_bench.extras.search.report import sheet
    from zdp_bench.extras.search.search import search
    from zdp_bench.extras.search.space import read_search

    search_options = read_search(
        options.overrides, options.sampler, options.trials, options.epsilon, options.metric
    )
    is_for_people = options.format == "rich"
    record, folder = search(search_options, "progress" if is_for_people else "nothing")
    print_sheet(sheet(record), options.format)
    for path in sheet(record).write(folder / "trials"):
        if is_for_people:
            print(f"written: {path}")
    return 0
