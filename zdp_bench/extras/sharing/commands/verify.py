"""Check an exported model: digests, weights, ledger, recipe and card. Every ε is recomputed from
the mechanism and the ledger. Lists what cannot be checked, and exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zdp_bench.cli.arguments import add_format, print_sheet

GROUP = "share"
HELP = "check an exported model: ε, digests, ledger, card"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="an exported model",
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    import dataclasses

    from zdp_bench.extras.sharing.verification import verify
    from zdp_bench.report.sheet import Sheet

    checks = verify(options.folder)
    failed = sum(check.state == "failed" for check in checks)
    passed = sum(check.state == "passed" for check in checks)
    rows = [[check.what, check.state, check.found] for check in checks]
    title = f"{options.folder}: {passed} checks passed, {failed} failed"
    numbers = [dataclasses.asdict(check) for check in checks]
    sheet = Sheet(title, ("check", "state", "why"), rows, numbers=numbers)
    print_sheet(sheet, options.format)
    return int(failed > 0)
