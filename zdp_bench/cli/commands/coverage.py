"""Count which numbers of the papers we have: as published, with other settings or data, or none and
why. This reads the tables that `zdp-bench table --write` and `reproduce` write to results/tables.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_format, add_results, print_sheet
from zdp_bench.errors import UserError

GROUP = "reproduce"
HELP = "count which numbers of the papers are reproduced"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_format(parser)
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.report import coverage, papers

    folder = options.results / "tables"
    if not any((folder / f"{papers.file_stem(one)}.csv").is_file() for one in papers.available()):
        raise UserError(
            f"{folder.absolute()}: contains no tables of the papers. They are in zdp-bench's "
            "repository, not in the installed package; `zdp-bench reproduce PAPER/N` creates one "
            "here."
        )
    print_sheet(coverage.sheet(options.results), options.format)
    return 0
