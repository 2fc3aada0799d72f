"""The Flower app that SuperLink and SuperNodes run: `server` and `client`.

docs/federated.md has the commands. A site's overrides come from its own SuperNode's
`--node-config`, never from the server.
"""

from __future__ import annotations

import shlex
from functools import partial

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from zdp_bench.config import configured
from zdp_bench.experiments.sweep import run_one
from zdp_bench.extras.federated.node import call_handler, client_app
from zdp_bench.extras.federated.server import conduct, run_federation


class NodeApp(ClientApp):
    """The ClientApp of one node, configured by the overrides of its SuperNode."""

    def __call__(self, message: Message, context: Context) -> Message:
        # Flower's runtime would send the text of an error, such as one about the site's overrides.
        return call_handler(self._answer, message, context)

    def _answer(self, message: Message, context: Context) -> Message:
        config = configured(shlex.split(str(context.node_config["overrides"])))
        return client_app(config, "node")(message, context)


client = NodeApp()
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation configured by the overrides of `flwr run --run-config`."""
    runner = partial(run_federation, partial(conduct, grid))
    run_one(shlex.split(str(context.run_config["overrides"])), runner)
