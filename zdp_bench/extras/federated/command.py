"""Train a recipe with federated.nodes over the network: one server, one client a node, TLS between
them. `zdp-bench run` does the same on one machine. Needs the extra federated.
"""

from __future__ import annotations

import argparse

from zdp_bench.cli.arguments import add_overrides

GROUP = "run"
HELP = "be the server, or one node, of a federation over the network"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "role", choices=["server", "client"], help="what this process is; a client is one node"
    )
    add_overrides(parser, "recipe=NAME, and any key; federated.* says where")


def run(options: argparse.Namespace) -> int:
    if options.role == "client":
        from zdp_bench.config import configured
        from zdp_bench.extras.federated.network.supernode import run_client

        run_client(configured(options.overrides), lambda line: print(line, flush=True))
    else:
        from zdp_bench.experiments.sweep import run_one
        from zdp_bench.extras.federated.network.superlink import run_server

        run_one(options.overrides, run_server)
    return 0
