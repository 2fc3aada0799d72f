"""Limit unauthenticated clients of a federation's server: their connections, time and memory.

A connection is a stranger's until a request on it is signed by a node's key. There are at most
`MAX_UNAUTHENTICATED` of these, none is older than `AUTH_TIMEOUT` seconds, and nothing of their
requests but the headers is read. A node has at most `MAX_PER_NODE` connections. Where there are too
many, the oldest is closed: a newcomer is never kept waiting by those who only sit there.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from zdp_bench.extras.federated.flower import FIRST

MAX_UNAUTHENTICATED = 128  # connections without a signed request
AUTH_TIMEOUT = 10.0  # seconds that such a connection may last, its TLS handshake included
MAX_PER_NODE = 8  # connections of one node; its client needs four
LARGEST = 32 * 2**20  # bytes of one request; Flower sends tensors in pieces of 20 MiB
MINUTE = 60.0  # seconds in which the log repeats no sentence about the same client
REMEMBERED = 1000  # sentences; a flood from many addresses takes no more memory

log = logging.getLogger(__name__)
_logged: dict[tuple[str, str], float] = {}  # (client, sentence) -> when it was last logged


def log_once_a_minute(who: str, what: str) -> None:
    """Log one line; a client that repeats itself fills no disk."""
    at = time.monotonic()
    if at - _logged.get((who, what), -MINUTE) >= MINUTE:
        if len(_logged) >= REMEMBERED:
            _logged.clear()
        _logged[who, what] = at
        log.warning("%s: %s", who, what)


class Connection(socket.socket):
    """A client's connection; its door forgets it when it is closed."""

    door: Door
    since: float
    node: int | None = None  # whose it is, once a request was signed

    def close(self) -> None:
        self.door.forget(self)
        super().close()

    def hang_up(self) -> None:
        """End it from this side; the server's loop then sees its end, and closes it."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class Door(socket.socket):
    """A listening socket that knows its connections, and whose they are."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._open: dict[Connection, None] = {}  # in the order of their coming
        self._lock = threading.Lock()

    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = super().accept()
        came = Connection(fileno=plain.detach())
        came.door, came.since = self, time.monotonic()
        with self._lock:
            self._open[came] = None
        self._bound(None, MAX_UNAUTHENTICATED)
        return came, address

    def admit(self, peer: tuple[str, int], node: int) -> None:
        """Remember that the connection from `peer` is a node's."""
        for one in self._connections():
            with suppress(OSError):
                if one.node != node and one.getpeername()[:2] == peer:
                    one.node = node
                    self._bound(node, MAX_PER_NODE)

    async def end_late_ones(self) -> None:
        """Hang up on strangers whose time is over."""
        for one in self._connections():
            if one.node is None and time.monotonic() - one.since > AUTH_TIMEOUT:
                one.hang_up()

    def forget(self, gone: Connection) -> None:
        with self._lock:
            self._open.pop(gone, None)

    def _connections(self) -> list[Connection]:
        with self._lock:
            return list(self._open)

    def _bound(self, node: int | None, most: int) -> None:
        """Hang up on the oldest of a node's connections, or of strangers', beyond so many."""
        theirs = [one for one in self._connections() if one.node == node]
        for one in theirs[: max(0, len(theirs) - most)]:
            self.forget(one)
            one.hang_up()


class Limit:
    """Answer a request only if its headers are signed by a node and announce a bounded body.

    Flower checks the signature too, but after it has read the body.
    """

    def __init__(self, app: ASGIApp, door: Door, keys: Mapping[bytes, int]) -> None:
        self._app, self._door, self._keys = app, door, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        who = f"a client at {scope['client'][0]}" if scope.get("client") else "a client"
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        length = headers.get("content-length", b"")
        if "transfer-encoding" in headers:  # in chunks: of any length
            length = b""
        if not length.isdigit() or len(length) > 12 or int(length) > LARGEST:
            log_once_a_minute(who, f"a request of more than {LARGEST} bytes; it is dropped")
            await _refuse(413, "too large")(scope, receive, send)
        elif (node := signer(headers, self._keys)) is None:
            log_once_a_minute(
                who, "has no key of federated.node_keys, or another clock; it is refused"
            )
            await _refuse(401, "not signed by a node")(scope, receive, send)
        else:
            if scope.get("client"):
                self._door.admit(tuple(scope["client"]), node)
            await self._app(scope, receive, send)


def _refuse(status: int, why: str) -> JSONResponse:
    return JSONResponse({"detail": why}, status_code=status, headers={"connection": "close"})


def signer(headers: Mapping[str, bytes], keys: Mapping[bytes, int]) -> int | None:
    """Return the node whose key signed a request's time, by Flower's rule; None if none did."""
    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        stamp = headers[TIMESTAMP_HEADER]
        age = (now() - datetime.fromisoformat(stamp.decode("ascii"))).total_seconds()
    except (KeyError, ValueError, TypeError):
        return None
    in_time = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
    if key not in keys or not in_time:
        return None
    if not verify_signature(bytes_to_public_key(key), stamp, signature):
        return None
    return keys[key] - FIRST
