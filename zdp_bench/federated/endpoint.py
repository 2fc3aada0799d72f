"""Where the server of a federation is, and the files that say who it is."""

from __future__ import annotations

from pathlib import Path

from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError, require


def endpoint(config: Run) -> tuple[str, int]:
    """(host, port) of `federated.address`.

    Raises:
        UserError: it is no HOST:PORT, or the run is no federation.
    """
    if config.federated.nodes is None:
        raise UserError("federated.nodes is not set: say how many nodes the federation has, such as federated.nodes=3.")
    address = config.federated.address
    host, colon, port = address.rpartition(":")
    right = bool(colon and host and port.isdigit() and 0 < int(port) < 2**16)
    require(right, "federated.address", address, "must be HOST:PORT, such as 127.0.0.1:9092")
    return host.strip("[]"), int(port)


def pem(config: Run, key: str) -> str:
    """The file that `federated.KEY` names.

    Raises:
        UserError: the key is not set, or there is no such file.
    """
    value = getattr(config.federated, key)
    if value is None:
        raise UserError(f"federated.{key} is not set: name a PEM file; docs/federated.md shows how to make one.")
    path = Path(value).expanduser()
    require(path.is_file(), f"federated.{key}", value, "there is no such file")
    return str(path)
