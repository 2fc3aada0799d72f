"""A server whose nodes are asked round after round while strangers attack it, for `test_load`.

    python load_driver.py FOLDER SECONDS HONEST HOSTILE

FOLDER holds the server's certificate and the nodes' keys; the last key is a dishonest node's.
Clients are threads of two other processes. Prints one JSON line: the rounds, how long each took,
the answers that were lost, the server's memory (RSS) in MB after each round, and how often each
kind of attack was carried out.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization

from tests.ports import free_port
from zdp_bench.extras.federated.flower import (
    FIRST,
    Array,
    ArrayRecord,
    Message,
    RecordDict,
    identify,
)
from zdp_bench.extras.federated.messages import content, values_of
from zdp_bench.extras.federated.network.endpoint import public_pem
from zdp_bench.extras.federated.network.superlink import fleet_api
from zdp_bench.extras.federated.network.supernode import Link, Lost, Refused, connected

FLOATS = 2**16  # numbers in a message
GIGABYTE = 2**30
PATH = b"/v1/fleet/push-object"
ANNOUNCED = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


class Attack:
    """What a hostile client does, again and again; counts how often."""

    def __init__(self, port: int, chain: str) -> None:
        self.port, self.chain, self.counts = port, chain, dict[str, int]()

    def plain(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def tls(self) -> ssl.SSLSocket:
        trusting = ssl.create_default_context(cafile=self.chain)
        return trusting.wrap_socket(self.plain(), server_hostname="127.0.0.1")

    def send_much(self, head: bytes) -> None:
        """Send a gigabyte after `head`, or as much of it as is taken."""
        piece = b"x" * 2**16
        with self.tls() as wire:
            wire.sendall(head)
            for _ in range(GIGABYTE // len(piece)):
                wire.sendall(piece)

    def post_much(self) -> None:
        self.send_much(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (PATH, GIGABYTE)
        )

    def post_chunk(self) -> None:
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n"
        self.send_much(head % (PATH, GIGABYTE))

    def post_allowed(self) -> None:
        """A body just within the bound, without a signature."""
        self.send_much(ANNOUNCED % (PATH, 2**25))

    def send_header(self) -> None:
        self.send_much(b"POST %s HTTP/1.1\r\nHost: x\r\nX-Long: " % PATH)

    def send_url(self) -> None:
        self.send_much(b"GET /")

    def sit_idle(self) -> None:
        """Open many connections and say nothing; some of them not even in TLS."""
        held: list[socket.socket] = []
        try:
            for number in range(650):
                held.append(self.plain() if number % 5 else self.tls())
            time.sleep(2)
        finally:
            for one in held:
                one.close()

    def trickle(self) -> None:
        """A header that comes a byte at a time."""
        with self.tls() as wire:
            for byte in b"POST / HTTP/1.1\r\nX: " + b"y" * 200:
                wire.sendall(bytes([byte]))
                time.sleep(0.2)

    def send_garbage(self) -> None:
        for _ in range(20):
            with suppress(OSError), self.plain() as wire:
                wire.sendall(os.urandom(4096))
            with suppress(OSError), self.tls() as wire:
                wire.sendall(os.urandom(4096))
        time.sleep(0.2)

    def repeat(self, key: Any) -> None:
        """A dishonest node: joins, answers one question many times, and floods with connections."""
        with (
            suppress(Lost, Refused),
            connected(f"127.0.0.1:{self.port}", self.chain, key, 5) as link,
        ):
            if (asked := patiently(link, 20)) is None:
                return
            answer = Message(echo(asked), reply_to=asked)
            for _ in range(20):
                link.send(answer)
                time.sleep(0.05)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def run(self, what: Callable[[], None], until: float) -> None:
        while time.monotonic() < until:
            with suppress(OSError):
                what()
            self.count(what.__name__)


def patiently(link: Link, seconds: float) -> Message | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if message := link.receive():
            return message
        time.sleep(0.1)
    return None


def echo(asked: Message) -> RecordDict:
    """The answer of a node: the numbers that it was sent, plus one."""
    numbers = asked.content["arrays"]["x"].numpy()
    return RecordDict(
        {
            **content({"round": values_of(asked)["round"]}),
            "arrays": ArrayRecord({"x": Array(numbers + 1)}),
        }
    )


def be_honest(port: int, chain: str, key: Any, until: float) -> None:
    while time.monotonic() < until:
        with suppress(Lost, Refused), connected(f"127.0.0.1:{port}", chain, key, 30) as link:
            while time.monotonic() < until:
                if message := link.receive():
                    link.send(Message(echo(message), reply_to=message))
                time.sleep(0.25)


def in_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forked(work: Callable[[], None]) -> int:
    if child := os.fork():
        return child
    try:
        work()
    finally:
        os._exit(0)


def memory() -> float:
    """This process's RSS in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main(folder: Path, seconds: float, honest: int, hostile: int) -> None:
    chain, private = str(folder / "server.pem"), str(folder / "server.key")
    keys: list[Any] = [
        serialization.load_ssh_private_key((folder / f"node-{n}").read_bytes(), None)
        for n in range(honest + 1)
    ]
    port = free_port()
    until = time.monotonic() + seconds
    attack = Attack(port, chain)

    def repeat() -> None:
        attack.repeat(keys[-1])

    kinds: list[Callable[[], None]] = [
        *(attack.sit_idle, attack.post_much, attack.send_garbage, repeat),
        *(attack.send_header, attack.trickle, attack.post_chunk, attack.post_allowed),
        *(attack.send_url, attack.sit_idle),
    ]
    told = folder / "attacks.json"

    def attackers() -> None:
        time.sleep(2)
        chosen = [kind for kind, _ in zip(itertools.cycle(kinds), range(hostile), strict=False)]
        in_threads([lambda kind=kind: attack.run(kind, until) for kind in chosen])  # type: ignore[misc]
        told.write_text(json.dumps(attack.counts))

    nodes = forked(
        lambda: in_threads(
            [lambda key=key: be_honest(port, chain, key, until + 5) for key in keys[:-1]]  # type: ignore[misc]
        )
    )
    enemies = forked(attackers)
    identify()
    public = [public_pem(key.public_key()) for key in keys]
    took, lost, held = list[float](), 0, list[float]()
    with fleet_api("127.0.0.1", port, chain, private, public) as grid:
        everybody = range(FIRST, FIRST + honest)
        while not set(everybody) <= set(grid.get_node_ids()):
            time.sleep(0.1)
        while time.monotonic() < until:
            began, number = time.monotonic(), len(took)
            letters = [
                Message(
                    RecordDict(
                        {
                            **content({"round": number}),
                            "arrays": ArrayRecord(
                                {"x": Array(np.full(FLOATS, number, np.float32))}
                            ),
                        }
                    ),
                    node,
                    "query.step",
                )
                for node in [*everybody, FIRST + honest]
            ]
            if FIRST + honest in grid.get_node_ids():  # the dishonest one; nobody waits for it
                grid.push_messages(letters[-1:])
            answers = grid.send_and_receive(letters[:-1], timeout=120)
            good = {
                answer.metadata.src_node_id
                for answer in answers
                if not answer.has_error()
                and values_of(answer)["round"] == number
                and (answer.content["arrays"]["x"].numpy() == number + 1).all()
            }
            lost += honest - len(good)
            took.append(round(time.monotonic() - began, 2))
            held.append(round(memory(), 1))
        os.waitpid(enemies, 0)
        os.kill(nodes, signal.SIGKILL)
        os.waitpid(nodes, 0)
    print(
        json.dumps({"seconds": took, "lost": lost, "memory": held, **json.loads(told.read_text())})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:5]))
