"""Run all nodes on one machine: `zdp-bench run` of a recipe with `federated.nodes`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.node import Site, call_handler, client_app, open_site
from zdp_bench.extras.federated.server import ServerContext, conduct, run_federation
from zdp_bench.records import Document
from zdp_bench.training import distributed
from zdp_bench.training.run import Watcher
from zdp_bench.training.run_folder import Outcome

SERVER = 1  # Flower's id of the server, and of its only run and task
FIRST = 2  # Flower's id of node 0


def run_simulated(
    config: Run,
    watcher: Watcher,
    device: torch.device,
    wait: bool,
) -> Outcome:
    """Run a federation on this machine; `training.run` calls it if `federated.nodes` is set."""
    if distributed.is_distributed():
        raise UserError(
            "federated.nodes: a federated run cannot be distributed; start it without torchrun."
        )
    if config.federated.patients == "own":
        raise UserError(
            "federated.patients=own: each node reads its own data root, so each needs a SuperNode; "
            "docs/federated.md has the commands."
        )
    return run_federation(run_serially, config, watcher, device, wait)


def run_serially(context: ServerContext) -> Document:
    """Run the server and all nodes in this process; a node answers a message when it is sent."""
    set_sender()
    config = context.config
    with open_site(context.run_digest, Site(config, context.data, context.device)):
        app = client_app(config, context.run_digest)
        grid = SerialGrid(app, config.federated.nodes or 1)
        return conduct(cast(Grid, grid), context)


def set_sender() -> None:
    """Make the server the sender that Flower writes into messages."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = SERVER


class SerialGrid:
    """Nodes that run in this process, one after the other.

    It implements the methods of Flower's `Grid` that the server uses.
    """

    def __init__(self, app: ClientApp, nodes: int) -> None:
        self._app = app
        self._answers: dict[str, Message] = {}
        self._sent = 0
        self._contexts = {}
        for node in range(nodes):
            address = FIRST + node
            settings: dict[str, Any] = {"partition-id": node}
            self._contexts[address] = Context(SERVER, address, settings, RecordDict(), {})

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=address) for address in self._contexts]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        message_ids = []
        for message in messages:
            self._sent += 1
            message_id = str(self._sent)
            message.metadata.__dict__["_message_id"] = message_id  # Flower has no public setter
            context = self._contexts[message.metadata.dst_node_id]
            self._answers[message_id] = call_handler(self._app, message, context)
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._answers.pop(key) for key in message_ids if key in self._answers]
