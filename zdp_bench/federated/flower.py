"""The one door to Flower: the telemetry of Flower and Ray is off before either is imported; without them, one sentence."""

from __future__ import annotations

import logging
import os

from zdp_bench.errors import UserError

# Read when the packages are imported, and inherited by the processes that Ray starts.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.supercore.run import Run as FlowerRun
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise UserError(f"a federation needs Flower ({error}): `pip install 'zdp-bench[federated]'`.") from None

logging.getLogger("flwr").setLevel(logging.ERROR)  # it tells of every message

SERVER = 1  # the server's number among Flower's nodes

__all__ = [
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
    "RecordDict",
    "ServerApp",
    "identify",
]


def identify(run: int) -> None:
    """Say who speaks: Flower's messages carry the run's number, and the server's."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, SERVER, 1
