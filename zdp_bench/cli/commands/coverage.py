"""Count how much of the papers is filled: as published, on other or reduced data, empty. It reads
the tables in results/tables, as `zdp-bench table` and `reproduce` write them.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_format, add_results

HELP = "how much of the papers is filled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_format(parser, "md", "csv", "json")
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.report import coverage
    from zdp_bench.training.progress import console

    sheet = coverage.sheet(options.results)
    if options.format == "rich":
        console().print(sheet.as_rich())
    else:
        print(sheet.as_text(options.format))
    return 0
