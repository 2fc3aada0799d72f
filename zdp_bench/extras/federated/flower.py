"""Import Flower's public names, with the telemetry of Flower and Ray off.

Flower's private modules are imported here alone, for two names that a grid needs.
"""

from __future__ import annotations

import logging
import os

from zdp_bench.errors import UserError

# Read when the packages are imported, and inherited by the processes that Ray starts.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Seconds that Ray's agents look for a head that was killed, before they end too; its own are 60.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.supercore.run import Run as FlowerRun
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise UserError(
        f"a federation needs Flower ({error}): `pip install 'zdp-bench[federated]'`."
    ) from None

logging.getLogger("flwr").setLevel(logging.ERROR)  # it tells of every message

SERVER = 1  # the server's number among Flower's nodes
RUN = 1  # Flower's number of the one run that a server conducts
TASK = 1  # Flower's number of the one task of the one run
FIRST = 2  # node 0's number among them, where it is ours to choose

__all__ = [
    "FIRST",
    "SERVER",
    "Array",
    "ArrayRecord",
    "ClientApp",
    "ConfigRecord",
    "Context",
    "Error",
    "FlowerRun",
    "Grid",
    "Message",
    "OneRunGrid",
    "RecordDict",
    "ServerApp",
]


class OneRunGrid(Grid):
    """Methods of Flower's grid that the server of one run does not use."""

    def set_run(self, run: FlowerRun) -> None:
        raise NotImplementedError("a server conducts one run")

    @property
    def run(self) -> FlowerRun:
        return FlowerRun.create_empty(RUN)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


def identify() -> None:
    """Set the sender that Flower writes into messages: this run, the server."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, SERVER, TASK
