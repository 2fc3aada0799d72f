"""Write a commented start: a recipe NAME.yaml, or a package zdp_NAME with a dataset or an
algorithm of your own, which runs as it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

GROUP = "run"
HELP = "a commented start of a recipe, a dataset or an algorithm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=["recipe", "dataset", "algorithm"], help="what to start")
    parser.add_argument("name", metavar="NAME", help="a-z, 0-9 and _")


def run(options: argparse.Namespace) -> int:
    from zdp_bench.starts import write_start

    for path in write_start(options.kind, options.name, Path()):
        print(f"written: {path}")
    if options.kind == "recipe":
        print(f"next: zdp-bench validate recipe=./{options.name}.yaml")
    else:
        print(f"next: pip install --no-deps -e zdp_{options.name}")
    return 0
