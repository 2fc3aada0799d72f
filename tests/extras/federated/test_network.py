"""The page's app over Flower's own SuperLink and SuperNodes, with TLS and keys, on loopback."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.drivers import free_port
from tests.extras.federated.conftest import TINY, Make, carried_out
from tests.ledgers import steps_in
from tests.training.test_run import repeatable
from zdp_bench import records

ROOT = Path(__file__).resolve().parents[3]
SHORT = ["trainer.epochs=1", "trainer.sample_rate=0.5", "federated.nodes=2"]
CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=federation"
    " -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:TRUE"
    " -keyout server.key -out server.pem"
)


def environment(at: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "FLWR_HOME": f"{at}/flwr"}
    return os.environ | own | {"OMP_NUM_THREADS": "1"}


@contextmanager
def started(at: Path, *words: str) -> Iterator[None]:
    """One of Flower's programs in the background, its words in a file of its own."""
    with (at / f"{words[0]}-{len(list(at.iterdir()))}.log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=at, env=environment(at), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def within(seconds: float, find: Callable[[], bool], at: Path) -> None:
    until = time.monotonic() + seconds
    while not find():
        assert time.monotonic() < until, "".join(p.read_text()[-1500:] for p in at.glob("*.log"))
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_supernodes_come_to_what_one_process_comes_to(tmp_path: Path, configured: Make) -> None:
    def flwr(*words: str) -> bool:
        with (tmp_path / "flwr.log").open("a") as log:
            env = environment(tmp_path)
            done = subprocess.call(
                ["flwr", *words], cwd=tmp_path, env=env, stdout=log, stderr=log, timeout=1500
            )
        return done == 0

    def overrides(results: str) -> str:
        return f'overrides="{" ".join([*TINY, *SHORT])} paths.results={tmp_path / results}"'

    port, page = free_port(), (ROOT / "docs/federated.md").read_text()
    app, config = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    for folder in ("app", "flwr"):
        (tmp_path / folder).mkdir()
    (tmp_path / "app/pyproject.toml").write_text(app)
    (tmp_path / "flwr/config.toml").write_text(
        config.replace("fl.example.org:8000", f"127.0.0.1:{port}").replace(
            "/etc/federation", str(tmp_path)
        )
    )
    subprocess.run(CERTIFICATE.split(), cwd=tmp_path, check=True, capture_output=True)
    serves = f"--port {port} --ssl-certfile server.pem --ssl-keyfile server.key"
    serves += " --ssl-ca-certfile server.pem --enable-supernode-auth"
    serves += " --disable-runtime-dependency-installation"
    joins = f"--superlink 127.0.0.1:{port} --root-certificates server.pem"
    joins += " --auth-supernode-private-key"
    with started(tmp_path, "flower-superlink", *serves.split()):
        nodes = []
        for node in range(2):
            make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"node-{node}"]
            subprocess.run(make, cwd=tmp_path, check=True)
            public = f"node-{node}.pub"
            within(120, lambda: flwr("supernode", "register", public, "hospitals"), tmp_path)  # noqa: B023
            own = ["--port", str(free_port()), "--node-config"]
            own += [f"partition-id={node} {overrides(f'site-{node}')}"]
            nodes.append(["flower-supernode", *joins.split(), f"node-{node}", *own])
        with started(tmp_path, *nodes[0]), started(tmp_path, *nodes[1]):
            assert flwr("run", "app", "hospitals", "--stream", "--run-config", overrides("server"))
    log = (tmp_path / "flwr.log").read_text()
    path = next((tmp_path / "server").glob("runs/*/*/record.json"), None)
    assert path, log
    record = records.read_document(path)
    assert repeatable(record) == repeatable(carried_out(configured(*SHORT)))
    for node in range(2):
        (ledger,) = tmp_path.glob(f"site-{node}/runs/*/*/nodes/*/ledger.jsonl")
        assert len(steps_in(ledger)) == 2
