"""Try growing learning rates in private steps and watch the loss of public validation examples.
Every step is a release: the ε of the test, and of the recipe's run after it, are printed;
privacy.range_test_steps=N counts the test in that run.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_format, add_overrides, number, whole

GROUP = "run"
HELP = "a learning-rate range test, and what it costs in ε"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    parser.add_argument(
        "--lowest",
        type=number("above 0"),
        default=1e-5,
        metavar="LR",
        help="first rate (default 1e-5)",
    )
    parser.add_argument(
        "--highest",
        type=number("above --lowest"),
        default=1.0,
        metavar="LR",
        help="last rate (default 1)",
    )
    parser.add_argument(
        "--steps", type=whole(3), default=50, metavar="N", help="at most N steps (default 50)"
    )
    add_format(parser, "json")


def run(options: argparse.Namespace) -> int:
    import dataclasses
    import json

    from zdp_bench.config import configured
    from zdp_bench.experiments.lr_finder import range_test
    from zdp_bench.report.terminal import show_range_test
    from zdp_bench.training.progress import console

    with console().status("trying learning rates ..."):
        config = configured(options.overrides)
        found = range_test(config, options.lowest, options.highest, options.steps)
    report = dataclasses.asdict(found)
    if options.format == "json":
        print(json.dumps(report, indent=1))
    else:
        console().print(show_range_test(report))
    return 0
