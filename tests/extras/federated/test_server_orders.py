"""What a dishonest server can order a node to do: nothing outside of its folder or its budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras.federated.conftest import Make
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.node import Node, Site, _prepare
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.composition import Spent, together
from zdp_bench.privacy.ledger import BudgetExceeded

OWN = ("federated.nodes=2", "federated.patients=own", "privacy.claimed_epsilon=2.0")
RUN = "f" * 64


def prepare(node: Node, run: str = RUN, rounds: int = 8) -> None:
    _prepare(node, {"run": run, "rounds": rounds, "entries": 0, "digest": ""})


def take_rounds(node: Node, most: int) -> int:
    """Take rounds until the budget ends; return how many were released."""
    weights = {name: p.detach().clone() for name, p in trainable(node.site.setup.model).items()}
    for round_ in range(most):
        try:
            node.release(round_, weights)
        except BudgetExceeded:
            return round_
    return most


@pytest.mark.parametrize("run", ["../../../x", "/tmp/x", "f" * 63, "F" * 64, "f" * 64 + "\n", ""])
def test_a_server_names_no_folder_outside_of_a_nodes_own(
    configured: Make, tmp_path: Path, run: str
) -> None:
    site = Site(configured(*OWN))
    with pytest.raises(UserError, match="64 hexadecimal digits"):
        prepare(site.node(0), run)
    assert not [*tmp_path.rglob("ledger.jsonl*")]
    site.close()


@pytest.mark.parametrize("rounds", [-1, 0, 1_000_001, 10**9])
def test_a_server_asks_for_no_more_rounds_than_a_run_can_have(
    configured: Make, rounds: int
) -> None:
    site = Site(configured(*OWN))
    with pytest.raises(UserError, match="rounds"):
        prepare(site.node(0), rounds=rounds)
    site.close()


def test_other_names_for_a_run_buy_a_server_no_more_releases(configured: Make) -> None:
    """Each name opened a ledger of its own, with the whole budget."""
    site = Site(configured(*OWN))
    prepare(site.node(0))
    whole = site.node(0).setup.epsilon(8)
    site.close()
    budget = f"privacy.max_epsilon={whole * 1.05}"
    site = Site(configured(*OWN, budget, results="honest"))
    prepare(site.node(0))
    assert take_rounds(site.node(0), 8) == 8
    taken = []
    for digit in "abc":
        prepare(site.node(0), digit * 64)
        taken.append(take_rounds(site.node(0), 8))
    mechanism = site.node(0).mechanism
    releases = [Spent(mechanism.z, mechanism.sampling, count) for count in (8, *taken)]
    assert together(releases, site.config.privacy.delta) <= whole * 1.05
    assert taken[1:] == [0, 0]
    site.close()


def test_a_run_that_goes_on_keeps_its_budget(configured: Make) -> None:
    site = Site(configured(*OWN))
    prepare(site.node(0))
    budget = f"privacy.max_epsilon={site.node(0).setup.epsilon(8)}"
    site.close()
    for _ in range(2):
        site = Site(configured(*OWN, budget, results="again"))
        prepare(site.node(0))
        assert take_rounds(site.node(0), 8) == 8
        site.close()
