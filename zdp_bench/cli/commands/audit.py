"""Attack a recipe's own mechanism and run, and built-in mechanisms known to be sound or broken.
Exits with 1 when a verdict is not the expected one: when the recipe's own mechanism is caught, or
a broken one is not.
"""

from __future__ import annotations

import argparse
import sys

from zdp_bench.cli.arguments import add_format, add_overrides, add_results, number, whole

GROUP = "understand"
HELP = "attack a recipe's mechanism: a lower bound on its ε"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    parser.add_argument(
        "--cases",
        default="all",
        metavar="all|recipe|NAME,...",
        help="built-in cases to attack (default all)",
    )
    parser.add_argument(
        "--confidence",
        type=number("0.5 or more, and below 1"),
        default=0.99,
        help="of every bound (default 0.99)",
    )
    parser.add_argument(
        "--canaries",
        type=whole(10),
        default=1000,
        metavar="M",
        help="in the attacks on a whole run (default 1000)",
    )
    parser.add_argument(
        "--steps",
        type=whole(1),
        default=1000,
        metavar="N",
        help="at most N steps of the run (default 1000)",
    )
    add_format(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    import dataclasses

    from zdp_bench.audit import audit
    from zdp_bench.config import configured
    from zdp_bench.report import audit as report
    from zdp_bench.training.interrupts import require_writable
    from zdp_bench.training.progress import console

    all_cases = options.cases == "all"
    if all_cases:
        require_writable(options.results)
    config = configured(options.overrides)
    title = f"Audit of recipe {config.recipe}, seed {config.seed}"
    settings = (options.cases, options.confidence, options.canaries, options.steps)
    with console().status("attacking ..."):
        findings = [dataclasses.asdict(finding) for finding in audit(config, *settings)]
    if options.format == "rich":
        console().print(report.as_rich(findings, title))
    else:
        print(report.sheet(findings, title).as_text(options.format))
    if all_cases:
        for path in report.write(findings, options.results, config.recipe, title):
            print(f"written: {path}", file=sys.stderr)
    return int(not all(report.as_expected(finding) for finding in findings))
