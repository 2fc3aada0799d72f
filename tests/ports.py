"""A port for a test's own server."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
