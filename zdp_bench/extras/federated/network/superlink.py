"""Run the server of a federation over the network (`zdp-bench federate server`).

One process per node, TLS between them and the server. The server holds Flower's SuperLink state and
serves its Fleet API, and nothing else of it, over HTTPS; a client is a SuperNode that runs its
ClientApp in its own process (`fleet_api` says why). So a node needs no open port, and no code
travels: every site installs zdp-bench and starts it with the recipe.

A client knows its server by the server's certificate. The server knows a node by its key, as
Flower's SuperLink does with `--enable-supernode-auth`: `federated.node_keys` holds the public half
of each.
"""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import torch

from zdp_bench.config.digests import run_digest
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.flower import FIRST, RUN, SERVER, Context, RecordDict, identify
from zdp_bench.extras.federated.network.endpoint import endpoint, node_keys, pem
from zdp_bench.extras.federated.network.fleet_api import fleet_api
from zdp_bench.extras.federated.server import Result, ServerContext, server_app
from zdp_bench.records import Record
from zdp_bench.training import distributed
from zdp_bench.training.distributed import ALONE
from zdp_bench.training.interrupts import stop_signals
from zdp_bench.training.machine import plugin_digests
from zdp_bench.training.run import Watcher
from zdp_bench.training.run_folder import Outcome, find_or_run
from zdp_bench.training.setup import load_data

PAUSE = 0.05  # seconds between two checks whether the clients have gone
GOODBYE = 10.0  # seconds that a server waits for its clients to hear that the run is over


def run_server(config: Run, watcher: Watcher, device: torch.device, wait: bool) -> Outcome:
    """Run a federation whose nodes come over the network; `training.run` calls it for such a run.

    Raises:
        UserError: the certificate, its key, the nodes' keys or the port is not usable, or what
            `server.conduct` raises.
    """
    if distributed.is_distributed():
        raise UserError(
            "torchrun carries out central runs; start `zdp-bench federate server` by itself."
        )
    host, port = endpoint(config)
    certificate, key = pem(config, "certificate"), pem(config, "key")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certificate, key, password=""
        )
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"federated.certificate={certificate} and federated.key={key} are no certificate "
            f"with its key: {error}."
        ) from None
    keys = node_keys(config)
    data = load_data(config)
    digest = run_digest(config, data.digest, plugin_digests(config.plugins))

    def train(home: Path) -> Record:
        result = Result()
        identify()
        with stop_signals() as asked, fleet_api(host, port, certificate, key, keys) as grid:
            owners = {FIRST + number: number for number in range(len(keys))}
            conducting = ServerContext(config, data, digest, home, device, watcher, asked, owners)
            server_app(conducting, result)(grid, Context(RUN, SERVER, {}, RecordDict(), {}))
            until = time.monotonic() + (GOODBYE if result.record else 0)
            while time.monotonic() < until and list(grid.get_node_ids()):
                time.sleep(PAUSE)
        return result.get()

    return find_or_run(config, digest, ALONE, wait, train)
