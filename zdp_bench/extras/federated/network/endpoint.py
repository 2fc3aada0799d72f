"""Where the server of a federation is, and the files that say who it is and who its nodes are."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError, require

BEAT = 10  # seconds between heartbeats that a node promises; after twice that it counts as gone
CURVES = ec.SECP256R1 | ec.SECP384R1 | ec.SECP521R1  # those that Flower registers
MAKING = "make it as docs/federated.md shows, with ssh-keygen -t ecdsa"


def endpoint(config: Run) -> tuple[str, int]:
    """(host, port) of `federated.address`.

    Raises:
        UserError: it is no HOST:PORT, or the run is no federation.
    """
    if config.federated.nodes is None:
        raise UserError(
            "federated.nodes is not set: say how many nodes the federation has, "
            "such as federated.nodes=3."
        )
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
        raise UserError(
            f"federated.{key} is not set: name a file; docs/federated.md shows how to make one."
        )
    path = Path(value).expanduser()
    require(path.is_file(), f"federated.{key}", value, "there is no such file")
    return str(path)


def node_key(config: Run) -> ec.EllipticCurvePrivateKey:
    """Read the private key of `federated.node_key` (the format that Flower's SuperNode reads).

    Raises:
        UserError: there is none, or it is not one of the kind that Flower takes.
    """
    path = pem(config, "node_key")
    try:
        key = serialization.load_ssh_private_key(Path(path).read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(
            f"federated.node_key={path}: not a private key without a password ({error}); {MAKING}."
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVES):
        raise UserError(f"federated.node_key={path}: not an elliptic-curve key; {MAKING}.")
    return key


def node_keys(config: Run) -> list[bytes]:
    """Read the nodes' public keys (PEM) by number: one line each of `federated.node_keys`.

    Raises:
        UserError: the file does not hold one key for each node.
    """
    path, keys = pem(config, "node_keys"), list[bytes]()
    lines = [line for line in Path(path).read_bytes().splitlines() if line.strip()]
    for number, line in enumerate(lines):
        try:
            key = serialization.load_ssh_public_key(line)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise UserError(
                f"federated.node_keys={path}, key {number}: not a public key ({error}); {MAKING}."
            ) from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVES):
            raise UserError(
                f"federated.node_keys={path}, key {number}: not an elliptic-curve key; {MAKING}."
            )
        keys.append(public_pem(key))
    nodes = config.federated.nodes
    require(
        len(keys) == nodes,
        "federated.node_keys",
        path,
        f"holds {len(keys)} keys, and there are {nodes} nodes: a line each",
    )
    require(
        len(set(keys)) == len(keys),
        "federated.node_keys",
        path,
        "holds one key twice: each node needs its own",
    )
    return keys


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """The bytes that Flower knows a key by."""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
