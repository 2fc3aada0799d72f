"""A federation's section on privacy states no less than the worst of any node."""

from types import SimpleNamespace

import pytest
import torch

from tests.extras.federated.conftest import Make
from zdp_bench.extras.federated.roster import Standing
from zdp_bench.extras.federated.runner import steps_of
from zdp_bench.extras.federated.server import account_nodes
from zdp_bench.records import Document
from zdp_bench.training.setup import ModelSetup, load_data

ROUNDS = 3
BATCH = ["trainer.sample_rate=null", "trainer.batch_size=20"]  # a small site samples more often


def account(make: Make, sites: list[tuple[int, int]], *overrides: str) -> Document:
    """Return the section on privacy for sites of (records, examples of one patient)."""
    config = make(f"federated.nodes={len(sites)}", *BATCH, *overrides)
    setup = ModelSetup.of(config, load_data(config), torch.device("cpu"))
    setups, standings = {}, {}
    for number, (records, examples) in enumerate(sites):
        setups[number] = setup.with_plan(steps_of(config, records, ROUNDS))
        standings[number] = Standing(records, examples, ROUNDS, "0" * 64)
    roster = SimpleNamespace(standings=standings, spent=lambda number: ROUNDS)
    return account_nodes(roster, setups, True, "patient")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sites", "examples"),
    [
        ([(200, 1), (1000, 60)], [1, 60]),
        ([(1000, 60), (200, 1)], [60, 1]),
        ([(40, 90), (400, 90)], [40, 90]),  # one patient has no more than all of a site's records
        ([(400, 3), (400, 2)], [3, 2]),
    ],
)
def test_the_patient_that_an_epsilon_covers_is_that_of_the_node_with_the_most_examples(
    configured: Make, sites: list[tuple[int, int]], examples: list[int]
) -> None:
    """The smallest site has the largest tight ε, and its patients had passed for everyone's."""
    privacy = account(configured, sites)
    nodes = privacy["nodes"]
    assert privacy["examples_per_patient"] == max(examples)
    assert [node["examples_per_patient"] for node in nodes] == examples
    least_private = max(nodes, key=lambda node: node["epsilon_tight"])
    assert privacy["sampling"] == least_private["sampling"]
    for key in privacy:
        if key.startswith("epsilon_"):
            assert privacy[key] == max(node[key] for node in nodes), key


def test_by_patient_a_patient_of_any_site_is_covered(configured: Make) -> None:
    privacy = account(configured, [(200, 1), (400, 60)], "privacy.unit=patient")
    assert (privacy["epsilon_of"], privacy["examples_per_patient"]) == ("patient", 60)
    assert privacy["epsilon_patient"] == privacy["epsilon_tight"]
