"""A federation equals central training; every node has its ε; a killed run ends the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.extras.federated.conftest import Make, Sound, carried_out
from tests.ledgers import OnDisk, steps_in
from tests.training.test_run import repeatable
from zdp_bench import records
from zdp_bench.config.schema import Run
from zdp_bench.data.owners import count_owners
from zdp_bench.extras.federated import node as nodes
from zdp_bench.extras.federated import server
from zdp_bench.extras.federated.node import Node, RefusalError, Site
from zdp_bench.extras.federated.roster import Roster
from zdp_bench.extras.sharing.export import export
from zdp_bench.extras.sharing.verification import verify
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.accounting import pld
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.training import checkpoint
from zdp_bench.training.plan import Patients
from zdp_bench.training.setup import load_data
from zdp_bench.training.step import private_step

# Every record in every step: then a central run and a federation's nodes together draw the same
# ones.
WHOLE = ["trainer.sample_rate=1.0", "algorithm.noise_multiplier=0.0", "model.hidden=[8]"]
PATIENT = ["privacy.unit=patient"]
ADAPTIVE = ["optimizer=nadam", "optimizer.lr=0.01", "optimizer.betas=[0.9,0.999]"]


def weights(config: Run) -> dict[str, torch.Tensor]:
    run = carried_out(config)["run"]
    home = records.folder(config.results, config.recipe, run)
    saved = checkpoint.load(home / "checkpoint.pt", run)
    assert saved
    return saved.model


def test_all_steps_are_on_disk_before_a_message_leaves(
    configured: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, config = OnDisk(monkeypatch), configured("federated.nodes=2")
    take_round = Node.take_round

    def checked(node: Node, *given: Any) -> Any:
        answer = take_round(node, *given)
        assert isinstance(node.ledger, Ledger)
        held.check(node.ledger.path)
        return answer

    def rounds() -> list[Path]:
        return list(config.results.glob("runs/*/*/rounds.jsonl"))

    monkeypatch.setattr(Node, "take_round", checked)
    monkeypatch.setattr(Roster, "round", held.before(Roster.round, rounds))
    monkeypatch.setattr(checkpoint, "save", held.before(checkpoint.save, rounds))
    carried_out(config)
    assert held.checks >= 6


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        (["optimizer.lr=0.5", *PATIENT], 1e-5),
        (ADAPTIVE, 1e-3),  # its quotient makes a rounding of a tiny gradient as large as a step
    ],
    ids=["sgd by patient", "nadam"],
)
def test_without_noise_a_federation_is_central_training(
    configured: Make, overrides: list[str], tolerance: float
) -> None:
    theirs = weights(configured(*WHOLE, *overrides, results="central"))
    ours = weights(configured(*WHOLE, *overrides, "federated.nodes=5"))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance)


def test_a_record_states_every_nodes_epsilon_and_ledger(configured: Make) -> None:
    config = configured("federated.nodes=3", "privacy.claimed_epsilon=2.0")
    record = carried_out(config)
    privacy = record["privacy"]
    home = records.folder(config.results, config.recipe, record["run"])
    assert [node["node"] for node in privacy["nodes"]] == [0, 1, 2]
    for node in privacy["nodes"]:
        ledger = home / "nodes" / f"{node['node']:02d}" / "ledger.jsonl"
        assert len(steps_in(ledger)) == node["ledger"]["entries"] == node["steps"] == 8
        assert node["ledger"]["digest"] in ledger.read_text().splitlines()[-1]
        assert node["epsilon_claimed"] <= 2.0
        assert node["unconfirmed"] == 0
    assert len({node["ledger"]["digest"] for node in privacy["nodes"]}) == 3
    for key in ("epsilon_claimed", "epsilon_tight", "epsilon_rdp", "epsilon_patient"):
        assert privacy[key] == max(node[key] for node in privacy["nodes"])
    assert sum(node["sampling"]["records"] for node in privacy["nodes"]) == record["data"]["train"]
    assert record["epochs"][-1]["epsilon_tight"] == privacy["epsilon_tight"]
    assert repeatable(carried_out(config)) == repeatable(record)


def test_by_patient_a_node_s_epsilon_is_of_its_patients(
    configured: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node draws patients, with all their records as one share; the export says the same."""
    seen: list[tuple[int, ...]] = []
    real = Patients.take

    def spy(self: Patients, drawn: np.ndarray, choice_key: bytes) -> Any:
        taken, shares = real(self, drawn, choice_key)
        seen.append(shares)
        return taken, shares

    monkeypatch.setattr(Patients, "take", spy)
    config = configured("federated.nodes=3", *PATIENT, "privacy.target_epsilon=4")
    record = carried_out(config)
    privacy, nodes = record["privacy"], record["privacy"]["nodes"]
    assert len(seen) == 3 * 8
    assert {max(shares) for shares in seen} == {2}
    assert privacy["epsilon_of"] == privacy["unit"] == "image"
    assert privacy["epsilon_patient"] == privacy["epsilon_tight"] <= 4
    assert (privacy["examples_per_patient"], record["data"]["train"]) == (2, 1426)
    patients = [node["sampling"]["records"] for node in nodes]
    assert sum(patients) == count_owners(load_data(config), "test")
    for node in nodes:
        sampling = node["sampling"]
        assert sampling["expected_batch_size"] == 0.25 * sampling["records"]
        assert node["epsilon_tight"] == pld(node["z"], 0.25, 8, config.privacy.delta)
    export(config.results, "quickstart", tmp_path / "model")
    assert not [check for check in verify(tmp_path / "model") if check.state == "failed"]


@pytest.mark.parametrize("secure", [False, True])
def test_a_run_killed_at_any_moment_goes_on_and_counts_every_release(
    configured: Make, sound: Sound, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies (an uncaught BaseException) between a release and the next checkpoint."""

    class Killed(BaseException):
        pass

    own = [f"privacy.secure={secure}", "federated.nodes=3", "execution.checkpoint_steps=3"]
    whole = sound("federated.nodes=3")
    config = configured(*own)
    descend = server.descend
    for at in (1, 4):
        seen = {"rounds": 0}

        def die(*arguments: Any, at: int = at, seen: dict[str, int] = seen) -> None:
            seen["rounds"] += 1
            if seen["rounds"] == at:
                raise Killed
            descend(*arguments)

        monkeypatch.setattr(server, "descend", die)
        with pytest.raises(Killed):
            carried_out(config)
    monkeypatch.setattr(server, "descend", descend)
    record = carried_out(config)
    if secure:  # rounds 0 | 0 1 2 (3) | 3 4 5 6 7: what was asked for again is a new release
        assert record["privacy"]["steps"] > whole["privacy"]["steps"]
        for node in record["privacy"]["nodes"]:
            assert node["ledger"]["entries"] == node["steps"] == record["privacy"]["steps"]
    else:
        assert repeatable(record) == repeatable(whole)


def test_on_other_weights_a_round_drawn_again_is_another_release(configured: Make) -> None:
    """Same seed and round, other weights: other examples, other noise, one more ledger line."""
    site = Site(configured("federated.nodes=2"))
    node = site.node(1)
    node.prepare("f" * 64, 8, None)
    first = {name: p.detach().clone() for name, p in trainable(site.setup.model).items()}
    other = {name: value + 1e-3 for name, value in first.items()}
    _, release = node.take_round(3, first)
    report, same = node.take_round(3, first)
    assert report["entries"] == 1
    assert all(torch.equal(release[name], same[name]) for name in release)
    report, _ = node.take_round(3, other)
    assert report["entries"] == 2
    site.close()


def test_a_round_is_not_repeated_with_smaller_micro_batches(
    configured: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would add the same noise to a sum that is rounded otherwise, and count once."""
    site = Site(configured("federated.nodes=2"))
    node = site.node(1)
    node.prepare("f" * 64, 8, None)
    weights = {name: p.detach().clone() for name, p in trainable(site.setup.model).items()}
    node.take_round(0, weights)

    def step_without_memory(*arguments: Any) -> None:
        private_step(*arguments)
        node.micro_batch_size.examples //= 2

    monkeypatch.setattr(nodes, "private_step", step_without_memory)
    node.take_round(1, weights)
    monkeypatch.setattr(nodes, "private_step", private_step)
    for round_ in (0, 1):
        with pytest.raises(RefusalError, match="join"):
            node.take_round(round_, weights)
    node.take_round(2, weights)
    site.close()
