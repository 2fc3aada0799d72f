"""Fork a server and its clients from a warm parent, and kill a client (-9), for `test_network`.

    python network_driver.py FOLDER JOBS

JOBS is a JSON list of {"name", "overrides", "kill": [node, steps, seconds, restart]}.

A kill comes so many seconds after so many steps stand in the node's ledger; `restart` says whether
the node comes back. Prints one JSON line a job: the wait status of the server, of each client and
of the killed one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.drivers import fork
from tests.ports import free_port
from zdp_bench.config import compose, parse
from zdp_bench.config.schema import Run
from zdp_bench.extras.federated.network.superlink import run_server
from zdp_bench.extras.federated.network.supernode import run_client
from zdp_bench.training.progress import Silent
from zdp_bench.training.run import run


def steps_of(folder: Path, node: int) -> int:
    """How many steps a node's ledger holds, whole lines only."""
    ledgers = folder.glob(f"client{node}/runs/*/*/nodes/*/ledger.jsonl")
    return sum(
        line.endswith(b"}") and b'"state"' not in line
        for p in ledgers
        for line in p.read_bytes().splitlines()[1:]
    )


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    address = f"federated.address=127.0.0.1:{free_port()}"

    def config(*own: str) -> Run:
        return parse(compose([*job["overrides"], address, *own]))

    conducting = config(f"paths.results={folder / 'server'}")
    clients = [
        config(
            f"paths.results={folder / f'client{n}'}",
            f"federated.node={n}",
            f"federated.node_key={folder.parent.parent}/node-{n}",
        )
        for n in range(3)
    ]

    def client(node: int) -> int:
        return fork(lambda: run_client(clients[node], print), folder / f"client{node}.log")

    serving = fork(lambda: run(conducting, Silent(), runner=run_server), folder / "server.log")
    numbers = [client(node) for node in range(3)]
    killed = 0
    if job.get("kill"):
        node, steps, seconds, restart = job["kill"]
        while steps_of(folder, node) < steps:
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(numbers[node], signal.SIGKILL)
        killed = os.waitpid(numbers[node], 0)[1]
        numbers[node] = client(node) if restart else 0
    status = os.waitpid(serving, 0)[1]
    statuses = [os.waitpid(number, 0)[1] if number else None for number in numbers]
    return {"name": job["name"], "server": status, "clients": statuses, "killed": killed}


def main(folder: Path, jobs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    for job in jobs:
        print(json.dumps(carry_out(job, folder / job["name"])), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
