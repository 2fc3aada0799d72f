"""Run all nodes on one machine: `zdp-bench run` of a recipe with `federated.nodes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zdp_bench.config.digests import run_digest
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.flower import (
    FIRST,
    ClientApp,
    Context,
    Message,
    OneRunGrid,
    RecordDict,
    ServerApp,
    identify,
)
from zdp_bench.extras.federated.node import (
    Site,
    client_app,
    find_patients,
    open_site,
    reply_to,
)
from zdp_bench.extras.federated.server import Result, ServerContext, server_app
from zdp_bench.records import Record
from zdp_bench.training import distributed
from zdp_bench.training.distributed import ALONE
from zdp_bench.training.interrupts import stop_signals
from zdp_bench.training.machine import plugin_digests
from zdp_bench.training.run import Watcher
from zdp_bench.training.run_folder import Outcome, find_or_run
from zdp_bench.training.setup import load_data


def run_simulated(config: Run, watcher: Watcher, device: torch.device, wait: bool) -> Outcome:
    """Run a federation on this machine; `training.run` calls it for a recipe with nodes.

    Raises:
        UserError: it was started by torchrun, or asks for what only `zdp-bench federate` can do.
    """
    if distributed.is_distributed():
        raise UserError(
            "federated.nodes: torchrun carries out central runs; "
            "a federation is `zdp-bench federate`."
        )
    if config.federated.patients == "own":
        raise UserError(
            "federated.patients=own: each node reads its own data root, "
            "so it is for `zdp-bench federate`."
        )
    data = load_data(config)
    find_patients(data, config.federated.nodes or 1)  # before any node is made
    digest = run_digest(config, data.digest, plugin_digests(config.plugins))

    def train(home: Any) -> Record:
        result = Result()
        with stop_signals() as asked:
            serving = server_app(
                ServerContext(config, data, digest, home, device, watcher, asked), result
            )
            nodes = config.federated.nodes or 1
            if config.federated.backend == "ray":
                run_on_ray(serving, client_app(config, digest), nodes, config.threads)
            else:
                with open_site(digest, Site(config, data, device)):
                    run_serially(serving, client_app(config, digest), nodes)
        return result.get()

    return find_or_run(config, digest, ALONE, wait, train)


def run_serially(serving: ServerApp, answering: ClientApp, nodes: int) -> None:
    """Run both apps in this process: a message is answered when it is sent."""
    identify()
    context = Context(1, 0, {}, RecordDict(), {})
    serving(SerialGrid(answering, nodes), context)


class SerialGrid(OneRunGrid):
    """Nodes in this process, one after the other."""

    def __init__(self, answering: ClientApp, nodes: int) -> None:
        self._app = answering
        self._answers: dict[str, Message] = {}
        self._sent = 0
        self._contexts = {
            FIRST + node: Context(
                1, FIRST + node, {"partition-id": node, "num-partitions": nodes}, RecordDict(), {}
            )
            for node in range(nodes)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            self._sent += 1
            message.metadata.__dict__["_message_id"] = str(self._sent)
            self._answers[str(self._sent)] = reply_to(
                self._app, message, self._contexts[message.metadata.dst_node_id]
            )
            pushed.append(str(self._sent))
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._answers.pop(number) for number in message_ids if number in self._answers]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def run_on_ray(serving: ServerApp, answering: ClientApp, nodes: int, threads: int | None) -> None:
    """Run both apps by Flower's own simulation, each node's work in a process of Ray's.

    Raises:
        UserError: Ray does not start or breaks off; its own words are above.
    """
    from flwr.simulation import run_simulation

    resources: Mapping[str, Any] = {"num_cpus": threads or 1, "num_gpus": 0.0}
    try:
        run_simulation(
            serving,
            answering,
            nodes,
            backend_name="ray",
            backend_config={"client_resources": dict(resources)},
        )
    except RuntimeError as error:
        while isinstance(error.__cause__, Exception):
            error = error.__cause__  # type: ignore[assignment]  # Flower wraps what Ray said twice
        raise UserError(
            f"federated.backend=ray: {error} Take federated.backend=serial, or give Ray more room."
        ) from None
