"""A server under attack: nodes lose no round, and its memory stays flat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.drivers import driven
from tests.extras.federated.conftest import node_keys
from tests.extras.federated.test_network import certificate

HELD = 512.0  # MB: TLS buffers of 128 strangers, and of those that are gone but not yet collected
LEAST = 64.0  # MB that allocators and messages on their way may move the memory


def attacked(folder: Path, seconds: int, honest: int, hostile: int) -> dict[str, Any]:
    certificate(folder, "server")
    node_keys(folder, honest + 1)
    words = str(folder), str(seconds), str(honest), str(hostile)
    (found,) = driven("extras/federated/load_driver.py", *words)
    return found


@pytest.mark.slow
def test_a_server_that_is_attacked_for_seconds_loses_no_round(tmp_path: Path) -> None:
    found = attacked(tmp_path, 8, honest=4, hostile=5)
    assert found["lost"] == 0
    assert len(found["seconds"]) >= 1
    assert max(found["memory"]) - min(found["memory"]) < HELD


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_clients_of_which_ten_are_hostile_for_minutes(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    found = attacked(tmp_path, pytestconfig.getoption("attacked"), honest=40, hostile=10)
    print(json.dumps(found))  # `pytest -rP` shows it
    rounds = len(found["seconds"])
    assert found["lost"] == 0
    assert rounds >= 3
    memory = found["memory"]
    assert max(memory) - min(memory) < HELD, memory
    assert max(memory[rounds // 2 :]) < max(memory[: rounds // 2]) + LEAST, memory
