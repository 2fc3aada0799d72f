"""Export the trained model of a finished run to a folder with weights (safetensors), model card,
record, recipe and ledger. `zdp_bench.load(FOLDER)` loads it.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_results, read_path
from zdp_bench.errors import printable

GROUP = "share"
HELP = "write a run's trained model, with its model card, to a folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_of", metavar="RUN", help="RECIPE, RECIPE/RUN, RUN, or a run's folder"
    )
    parser.add_argument(
        "--to",
        type=read_path,
        required=True,
        metavar="FOLDER",
        help="a new or empty folder, or one with this export",
    )
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from zdp_bench.extras.sharing.export import export

    record = export(options.results, options.model_of, options.to)
    run = f"recipe {record['recipe']}, run {record['run'][:16]}"
    print(printable(f"written: {options.to}, {run}"))
    if record["privacy"]["randomness"] == "seeded":
        print(
            "Its noise follows from the seed: do not release it to an adversary (privacy.secure)."
        )
    return 0
