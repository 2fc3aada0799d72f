"""The parts of a federation: the split of patients, the messages, telemetry off."""

import importlib
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from scipy import stats

from tests.drivers import start
from tests.extras.federated.conftest import Make, carried_out
from zdp_bench import cli
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest
from zdp_bench.data import Examples, Splits
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.extras.federated.messages import ARRAYS, content, digest, tensors_of, values_of
from zdp_bench.extras.federated.node import Site, split_by_patient
from zdp_bench.extras.federated.simulation import set_sender

SHUFFLED = ["trainer=shuffled", "trainer.batch_size=8", "trainer.sample_rate=null"]


def splits(patients: int, each: int) -> Splits:
    groups = torch.arange(patients).repeat_interleave(each)
    rows = torch.arange(patients * each)
    train = Examples(rows.float()[:, None], groups % 4, groups)
    test = Examples(train.inputs, train.targets)
    return Splits(train, test, (1,), 4, "synthetic", "0" * 64)


def test_every_record_is_at_one_node_and_a_patients_records_together() -> None:
    data = splits(440, 5)
    parts = split_by_patient(data, 11, seed=1)
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(2200))
    owners = [set(part.groups.tolist()) for part in parts if part.groups is not None]
    assert sum(len(owners_of_part) for owners_of_part in owners) == len(set().union(*owners)) == 440
    inputs, targets = parts[3].batch(torch.tensor([2, 0]))
    assert inputs[:, 0].tolist() == parts[3].rows[[2, 0]].tolist()
    assert len(targets) == 2
    rows, again, other = (
        [part.rows.tolist() for part in split_by_patient(data, 11, seed)] for seed in (1, 1, 2)
    )
    assert rows == again != other


def test_patients_that_cannot_be_dealt_are_refused() -> None:
    with pytest.raises(UserError, match=r"node \d .*3 patients"):
        split_by_patient(splits(3, 5), 4, seed=0)
    some = [Examples(torch.randn(n, 1), torch.zeros(n)) for n in (90, 1)]
    unknown = Splits(*some, (1,), 4, "synthetic", "")
    assert len(split_by_patient(unknown, 3, 0)) == 3  # every record is a patient


def test_nodes_have_as_many_patients_as_chance_gives_them() -> None:
    """Whatever the data set: 600 patients a node, ± 25; by any rule that favours some, more."""
    for seed in range(5):
        sizes = [len(part) / 2 for part in split_by_patient(splits(6600, 2), 11, seed)]
        assert max(abs(size - 600) for size in sizes) < 4 * math.sqrt(600)
        assert stats.chisquare(sizes).pvalue > 1e-4


@pytest.mark.parametrize("kind", ["named", "numbered", "single examples", "single and named"])
@pytest.mark.parametrize("removed", ["patient", "example"])
def test_whoever_is_removed_the_others_stay_at_their_nodes(kind: str, removed: str) -> None:
    """A permutation sent most other patients elsewhere, so that every node's data changed."""
    several = not kind.startswith("single")
    patient_of = np.arange(60) // 4 * 2 + np.arange(60) % 2 if several else np.arange(60)
    inputs, targets = torch.randn(60, 3), torch.arange(60) % 4
    test = Examples(inputs, targets)

    def node_of(rows: np.ndarray) -> dict[int, int]:
        names, groups = np.unique(patient_of[rows], return_inverse=True)
        numbers = {"numbered": patient_of[rows], "single examples": None}.get(kind, groups)
        known = None if numbers is None else torch.from_numpy(numbers)
        train = Examples(inputs[rows], targets[rows], known)
        named = [f"patient {name}" for name in names] if "named" in kind else []
        data = Splits(train, test, (3,), 4, "synthetic", "", owner_names=named)
        parts = split_by_patient(data, 3, seed=5)
        return {
            int(rows[row]): node for node, part in enumerate(parts) for row in part.rows.tolist()
        }

    everyone = np.arange(60)
    whole = node_of(everyone)
    assert len({*whole.values()}) == 3
    for example in range(50):
        gone = patient_of == patient_of[example] if removed == "patient" else everyone == example
        rest = everyone[~gone]
        assert node_of(rest) == {row: whole[row] for row in rest.tolist()}, f"{removed} {example}"


def test_tensors_travel_without_loss() -> None:
    set_sender()
    torch.manual_seed(0)
    sent = {
        "weight": torch.randn(3, 4, dtype=torch.complex64),
        "conjugate": torch.randn(2, 5, dtype=torch.complex64).conj(),
        "turned": torch.randn(4, 3, dtype=torch.complex128).mT,
        "real": torch.randn(7, dtype=torch.float64),
        "odd": torch.tensor([0.0, -0.0, 1e-45, float("inf")]),
        "number": torch.tensor(1.5),
    }
    message = Message(content({"round": 7, "whole": True}, sent), 2, "train")
    assert isinstance(message.content[ARRAYS], ArrayRecord)
    arrived = tensors_of(message, {name: torch.zeros_like(value) for name, value in sent.items()})
    for name, value in sent.items():
        assert arrived[name].dtype == value.dtype
        assert torch.equal(arrived[name], value)
    assert digest(arrived) == digest(sent)
    assert {"round": 7, "whole": True}.items() <= values_of(message).items()
    with pytest.raises(ValueError, match=r"real float64 \[7\].*real float32 \[7\]"):
        tensors_of(message, sent | {"real": torch.zeros(7)})


def test_telemetry_is_off_before_flower_is_imported() -> None:
    code = """
import os; os.environ["FLWR_TELEMETRY_ENABLED"] = "1"
import zdp_bench.extras.federated
from flwr.supercore import telemetry
print(telemetry.FLWR_TELEMETRY_ENABLED)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]


def test_without_flower_all_else_works_and_a_federation_says_what_it_needs(tmp_path: Path) -> None:
    def begin() -> None:
        for name in list(sys.modules):
            if name.startswith(("flwr", "zdp_bench.extras.federated")):
                del sys.modules[name]
        sys.modules["flwr"] = None  # type: ignore[assignment]
        importlib.import_module("zdp_bench.extras.federated")
        cli.main(["run", "recipe=quickstart", "federated.nodes=2", f"paths.results={tmp_path}"])

    done = start(begin).wait()
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().endswith("`pip install 'zdp-bench[federated]'`.")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["federated.nodes=0"], "federated.nodes=0: must be greater than or equal to 1"),
        (["federated.nodes=3", "federated.patients=all"], "federated.patients 'all' is not known"),
        (["federated.nodes=3", "federated.min_nodes=4"], "federated.min_nodes=4: must lie"),
        (
            ["federated.nodes=3", "algorithm=sgd", *SHUFFLED],
            "trainer.sampling=shuffled: a node's steps are Poisson or uniform samples",
        ),
        (["federated.nodes=2", "federated.patients=own"], "each needs a SuperNode"),
        (["federated.nodes=2"], "start it without torchrun"),
    ],
)
def test_what_a_federation_on_one_machine_cannot_do_is_one_sentence(
    configured: Make, monkeypatch: pytest.MonkeyPatch, overrides: list[str], sentence: str
) -> None:
    if "torchrun" in sentence:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(sentence)):
        carried_out(configured(*overrides))


@pytest.mark.parametrize(("patients", "is_named"), [("split", True), ("own", False)])
def test_a_site_tells_nobody_a_digest_of_its_own_data(
    configured: Make, patients: str, is_named: bool
) -> None:
    """Whoever knows all records but one could try what that one is."""
    site = Site(configured("federated.nodes=2", f"federated.patients={patients}"))
    reply = site.node(0).join()
    assert ("data" in reply) is is_named
    assert (site.data.digest in str(reply)) is is_named


def test_keys_of_how_do_not_change_what_a_run_is(configured: Make) -> None:
    def digest_of(*words: str) -> str:
        return experiment_digest(configured(*words))

    assert digest_of("federated.min_nodes=1") == digest_of()  # a central run
    federation = digest_of("federated.nodes=3")
    assert federation != digest_of()
    assert digest_of("federated.nodes=3", "federated.patience=1") == federation
    assert digest_of("federated.nodes=3", "federated.local_lr=0.5") == federation
    assert digest_of("federated.nodes=3", "federated.min_nodes=2") != federation


def test_validate_tells_of_a_nodes_mechanism() -> None:
    """The paper's 73,333 steps of 24 among 3,520 examples, and the ε its accountant claims."""
    config = parse(compose(["recipe=mri_sequence_fl", "paths.data=/nowhere"]))
    report = validate(config, trial=False)
    expected = {"nodes": 11, "records": 3520, "steps": 73_333}
    assert expected.items() <= report.sampling.items()
    assert report.privacy["epsilon_claimed"] == pytest.approx(3.0, rel=1e-3)
