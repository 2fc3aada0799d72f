"""A server and three clients over TLS on loopback; a killed client; wrong certificates."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.drivers import driven
from tests.extras.federated.conftest import TINY, Make, carried_out, node_keys, repeatable
from tests.ledgers import steps_in
from tests.ports import free_port
from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.network.superlink import fleet_api, run_server
from zdp_bench.extras.federated.network.supernode import reach, run_client
from zdp_bench.training.progress import Silent
from zdp_bench.training.run import run


def certificate(folder: Path, name: str, host: str = "127.0.0.1") -> tuple[str, str]:
    """A certificate that signs itself, and its key: paths of two PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "federation")])
    today = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    return str(paths[0]), str(paths[1])


def over_tls(
    folder: Path, jobs: list[dict[str, Any]], patience: float
) -> dict[str, dict[str, Any]]:
    """Run every job: name -> {"server", "clients", "killed", "record", "ledgers"}."""
    chain, key = certificate(folder, "server")
    keys = node_keys(folder)
    common = ["federated.nodes=3", f"federated.patience={patience}", f"federated.authority={chain}"]
    common += [
        f"federated.certificate={chain}",
        f"federated.key={key}",
        f"federated.node_keys={keys}",
    ]
    for job in jobs:
        job["overrides"] = [*TINY, *common, *job["overrides"]]
    (folder / "runs").mkdir()
    found = {}
    driver = "extras/federated/network_driver.py"
    for job in driven(driver, str(folder / "runs"), json.dumps(jobs)):
        logs = [log.read_text()[-800:] for log in (folder / "runs" / job["name"]).glob("*.log")]
        home = folder / "runs" / job["name"]
        job["record"] = next(
            (records.read(p) for p in home.glob("server/runs/*/*/record.json")), None
        )
        assert job["record"], logs
        job["ledgers"] = [
            sum(len(steps_in(p)) for p in home.glob(f"client{n}/runs/*/*/nodes/*/ledger.jsonl"))
            for n in range(3)
        ]
        found[job["name"]] = job
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_client_killed_at_a_random_moment_never_loses_or_under_counts_epsilon(
    tmp_path: Path, configured: Make
) -> None:
    """Ten runs of eight rounds, a kill -9 in each; in every other one the node comes back.

    And one without a kill, which comes to what one process comes to.
    """
    rng = random.Random(8)
    jobs: list[dict[str, Any]] = [
        {
            "name": f"killed-{i}",
            "overrides": ["federated.min_nodes=2", f"privacy.secure={i % 4 > 1}"],
            "kill": [rng.randrange(3), rng.randrange(1, 6), rng.uniform(0, 0.3), bool(i % 2)],
        }
        for i in range(10)
    ]
    kills = {job["name"]: job["kill"] for job in jobs}
    found = over_tls(tmp_path, [*jobs, {"name": "whole", "overrides": []}], patience=45)
    whole = found.pop("whole")
    assert (whole["clients"], whole["ledgers"]) == ([0, 0, 0], [8, 8, 8])
    assert repeatable(whole["record"]) == repeatable(carried_out(configured("federated.nodes=3")))
    for name, run_ in found.items():
        node, steps, *_ = kills[name]
        nodes = run_["record"]["privacy"]["nodes"]
        assert run_["killed"] == 9
        assert run_["server"] == 0
        assert [n["answers"] for n in nodes if n["node"] != node] == [8, 8], (name, nodes)
        for one in nodes:
            assert one["steps"] >= run_["ledgers"][one["node"]] >= one["answers"], (name, one)
            assert one["steps"] == one["ledger"]["entries"] + one["unconfirmed"]
        assert run_["ledgers"][node] >= steps
        assert run_["record"]["privacy"]["epsilon_tight"] >= max(n["epsilon_tight"] for n in nodes)
        assert all(one["steps"] >= 8 for one in nodes), (
            name,
            nodes,
        )  # every round that was asked for, heard of or not


@pytest.fixture
def port() -> int:
    return free_port()


def never() -> int:
    return 0


def test_a_server_without_a_usable_certificate_says_so(configured: Make, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "server")
    _, other = certificate(tmp_path, "other")
    for overrides, sentence in (
        ([], "federated.certificate is not set"),
        ([f"federated.certificate={chain}"], "federated.key is not set"),
        (
            [f"federated.certificate={chain}", f"federated.key={other}"],
            "are no certificate with its key",
        ),
        (
            [f"federated.certificate={chain}", f"federated.key={key}"],
            "federated.node_keys is not set",
        ),
        (["federated.address=nonsense"], "federated.address=nonsense: must be HOST:PORT"),
    ):
        with pytest.raises(UserError) as caught:
            run(configured("federated.nodes=3", *overrides), Silent(), runner=run_server)
        assert sentence in str(caught.value)


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "server")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match="cannot listen there: Address already in use"),
            fleet_api("127.0.0.1", number, chain, key, []),
        ):
            pass


def test_a_client_that_finds_no_server_says_so(configured: Make, tmp_path: Path, port: int) -> None:
    chain, _ = certificate(tmp_path, "server")
    where = ["federated.nodes=3", f"federated.address=127.0.0.1:{port}", "federated.patience=0.1"]
    with pytest.raises(UserError, match=r"federated\.authority is not set"):
        run_client(configured(*where), print)
    with pytest.raises(UserError, match=r"federated\.node is not set"):
        run_client(configured(*where, f"federated.authority={chain}"), print)
    whose = [*where, f"federated.authority={chain}", "federated.node=0"]
    with pytest.raises(UserError, match=r"federated\.node_key is not set"):
        run_client(configured(*whose), print)
    node_keys(tmp_path)
    with pytest.raises(UserError, match="no server of zdp-bench answers there"):
        run_client(configured(*whose, f"federated.node_key={tmp_path / 'node-0'}"), print)


def test_a_client_trusts_no_other_server(tmp_path: Path, port: int) -> None:
    chain, key = certificate(tmp_path, "server")
    other, _ = certificate(tmp_path, "other")
    wrong, wrong_key = certificate(tmp_path, "wrong", host="192.0.2.1")
    with fleet_api("127.0.0.1", port, chain, key, []):
        reach("127.0.0.1", port, chain, 10, never)
        with pytest.raises(UserError, match="is not vouched for by"):
            reach("127.0.0.1", port, other, 10, never)
        (tmp_path / "empty.pem").write_text("")
        with pytest.raises(UserError, match="holds no certificate in PEM"):
            reach("127.0.0.1", port, str(tmp_path / "empty.pem"), 10, never)
    with (
        fleet_api("127.0.0.1", port, wrong, wrong_key, []),
        pytest.raises(UserError, match="IP address mismatch"),
    ):
        reach("127.0.0.1", port, wrong, 10, never)
