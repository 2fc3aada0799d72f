"""Search hyper-parameters within one ε: 'optimizer.lr=tag(log,interval(0.01,1))',
algorithm.max_grad_norm=0.5,1,2, or any other value of Hydra's sweep grammar. Optuna proposes
trials; each is a run with a record, chosen by validation records. The ε of all trials together is
stated, and --epsilon E keeps it. After a stop, the same command continues the search.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from zdp_bench.cli.arguments import add_format, add_overrides, number, print_sheet, whole
from zdp_bench.errors import UserError, require, unknown

GROUP = "run"
HELP = "search hyper-parameters within one ε, and say what it cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trials", type=whole(1), metavar="N", help="how many runs (default: the whole grid)"
    )
    parser.add_argument(
        "--sampler", choices=["tpe", "random", "grid"], default="tpe", help="default tpe"
    )
    parser.add_argument(
        "--epsilon",
        type=number("above 0"),
        metavar="E",
        help="give each trial the noise that keeps the whole search within E",
    )
    parser.add_argument(
        "--metric", metavar="NAME", help="of the validation records (default: the task's own)"
    )
    parser.add_argument(
        "--choose-by-test",
        action="store_true",
        help="without validation records: choose by the test set, and overstate the best",
    )
    parser.add_argument(
        "--launcher",
        metavar="joblib|slurm",
        default="local",
        help="give the trials to one of Hydra's launchers (hydra.launcher.KEY=VALUE sets it up)",
    )
    parser.add_argument(
        "--at-once", type=whole(1), default=1, metavar="K", help="trials at a time (default 1)"
    )
    add_format(parser)
    add_overrides(parser, "recipe=NAME, and keys with a value or several")


def run(options: argparse.Namespace) -> int:
    from zdp_bench.config.compose import group_options

    if find_spec("optuna") is None:
        raise UserError("zdp-bench search needs Optuna: `pip install 'zdp-bench[search]'`.")
    from zdp_bench.extras.search.search import search, sheet
    from zdp_bench.extras.search.space import make_search, read_space
    from zdp_bench.extras.search.trials import Launch

    require(options.at_once >= 1, "--at-once", options.at_once, "must be 1 or more")
    if options.launcher not in group_options("launcher"):
        raise unknown("launcher", options.launcher, group_options("launcher"))
    settings = [word for word in options.overrides if word.startswith("hydra.launcher.")]
    words = [word for word in options.overrides if word not in settings]
    if not any(word.startswith("recipe=") for word in words):
        raise UserError(
            "zdp-bench search: recipe=NAME is missing; `zdp-bench list recipes` names them."
        )
    asked = make_search(
        read_space(words),
        options.sampler,
        options.trials,
        options.epsilon,
        options.metric,
        options.choose_by_test,
    )
    plain = options.format == "rich"
    launch = Launch(
        options.launcher, tuple(settings), options.at_once, "progress" if plain else "nothing"
    )
    found, folder = search(asked, launch, print if plain else _say_nothing)
    print_sheet(sheet(found), options.format)
    for path in sheet(found).write(folder / "trials"):
        if plain:
            print(f"written: {path}")
    return 0


def _say_nothing(line: str) -> None: ...
