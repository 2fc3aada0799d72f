"""Count how many of the papers' numbers are reproduced: as published, with other settings or data,
or not at all, and why. This reads the tables in results/tables, which `zdp-bench table --write` and
`reproduce` write.
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
    paths = [folder / f"{papers.file_stem(table)}.csv" for table in papers.available()]
    if not any(path.is_file() for path in paths):
        raise UserError(
            f"{folder.absolute()}: contains no tables of the papers. They are in zdp-bench's "
            "repository, not in the installed package; `zdp-bench reproduce PAPER/N` creates one "
            "here."
        )
    print_sheet(coverage.sheet(options.results), options.format)
    return 0
