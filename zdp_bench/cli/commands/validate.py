"""Check a recipe without training it: data, parameters, how each layer is clipped, replaced layers,
sampling, z, claimed and tight ε per example and per patient, time and memory.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_format, add_overrides

GROUP = "understand"
HELP = "check a recipe before training: layers, every ε, time, data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_format(parser, "json")


def run(options: argparse.Namespace) -> int:
    import dataclasses

    from zdp_bench.config import configured
    from zdp_bench.errors import printable
    from zdp_bench.experiments.validate import validate
    from zdp_bench.report.console import console
    from zdp_bench.report.sheet import to_json
    from zdp_bench.report.terminal import show_validation
    from zdp_bench.training.interrupts import require_writable

    config = configured(options.overrides)
    require_writable(config.results)  # as its run would
    report = dataclasses.asdict(validate(config, as_run=True))
    if options.format == "json":
        print(printable(to_json(report)))
    else:
        for sheet in show_validation(report):
            console().print(sheet)
    return 0
