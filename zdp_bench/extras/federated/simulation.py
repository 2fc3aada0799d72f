"""Run all nodes on one machine: `zdp-bench run` of a recipe with `federated.nodes`."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

import torch

from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.flower import (
    FIRST,
    ClientApp,
    Context,
    Grid,
    Message,
    OneRunGrid,
    RecordDict,
    ServerApp,
    identify,
)
from zdp_bench.extras.federated.node import Site, client_app, open_site, reply_to
from zdp_bench.extras.federated.server import ServerContext, conduct, run_federation
from zdp_bench.records import Record
from zdp_bench.training import distributed
from zdp_bench.training.run import Watcher
from zdp_bench.training.run_folder import Outcome


def run_simulated(config: Run, watcher: Watcher, device: torch.device, wait: bool) -> Outcome:
    """Run a federation on this machine; `training.run` calls it for a recipe with nodes.

    Raises:
        UserError: it was started by torchrun, or asks for what only SuperNodes can do.
    """
    if distributed.is_distributed():
        raise UserError("federated.nodes: torchrun carries out central runs only.")
    if config.federated.patients == "own":
        raise UserError(
            "federated.patients=own: each node reads its own data root, so each needs a SuperNode; "
            "docs/federated.md has the commands."
        )
    over = run_on_ray if config.federated.backend == "ray" else run_serially
    return run_federation(over, config, watcher, device, wait)


def run_serially(given: ServerContext) -> Record:
    """Run server and nodes in this process: a message is answered when it is sent."""
    identify()
    config = given.config
    with open_site(given.run, Site(config, given.data, given.device)):
        grid = SerialGrid(client_app(config, given.run), config.federated.nodes or 1)
        return conduct(grid, given)


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


def run_on_ray(given: ServerContext) -> Record:
    """Run by Flower's own simulation, each node's work in a process of Ray's.

    Raises:
        UserError: Ray does not start or breaks off; its own words are above.
    """
    from flwr.simulation import run_simulation

    config, record, app = given.config, Future[Record](), ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            record.set_result(conduct(grid, given))
        except BaseException as error:
            record.set_exception(error)

    try:
        run_simulation(
            app,
            client_app(config, given.run),
            config.federated.nodes or 1,
            backend_name="ray",
            backend_config={"client_resources": {"num_cpus": config.threads or 1, "num_gpus": 0.0}},
        )
    except RuntimeError as error:
        while isinstance(error.__cause__, Exception):
            error = error.__cause__  # type: ignore[assignment]  # Flower wraps what Ray said twice
        raise UserError(
            f"federated.backend=ray: {error} Use federated.backend=serial, or give Ray more memory."
        ) from None
    if not record.done():
        raise UserError("Flower stopped the run early; see its messages above.")
    return record.result()
