"""Shares of several examples: a patient's, whose ε the record then has, and augmented views of one
example."""

from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.training.model_checks.models import NOTHING_FOUND
from tests.training.test_run import Silent
from zdp_bench.config import configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import step_key
from zdp_bench.training import model_checks
from zdp_bench.training.batches import MicroBatches, Size
from zdp_bench.training.plan import Patients
from zdp_bench.training.run import Outcome, execute
from zdp_bench.training.setup import Setup
from zdp_bench.training.step import sum_shares

OWNERS = np.array([7, 3, 7, 9, 3, 7, 5])  # patients 3, 5, 7, 9 with 2, 1, 3, 1 records
HEADS = "recipe=quickstart dataset=mri_sequences_synthetic privacy.unit=patient"
# 12 patients to train with 12 examples each
HEADS += " dataset.patients=16 dataset.test_share=0.25 dataset.size=8 dataset.slices=3"
HEADS += " accountant=rdp algorithm.noise_multiplier=2 trainer.sample_rate=0.3 trainer.epochs=3"


def config(root: Path, *overrides: str) -> Run:
    paths = [f"paths.data={root / 'data'}", f"paths.results={root / 'results'}"]
    return configured([*HEADS.split(), *paths, *overrides])


def carry_out(root: Path, *overrides: str) -> Outcome:
    return execute(config(root, *overrides), Silent())


def test_a_drawn_patient_brings_all_records() -> None:
    patients = Patients.of(OWNERS, None)
    indices, shares = patients.take(np.array([0, 2]), step_key("key", "records", 0, False))
    assert indices.tolist() == [1, 4, 0, 2, 5]
    assert shares == (2, 3)
    nobody, none = patients.take(np.array([], dtype=np.int64), step_key("key", "records", 0, False))
    assert (len(nobody), none) == (0, ())
    assert patients.largest == 3


def test_at_most_k_records_are_drawn_evenly_and_of_each_patient_alone() -> None:
    patients = Patients.of(OWNERS, 2)
    assert patients.largest == 2
    counts: Counter[int] = Counter()
    for step in range(600):
        alone, shares = patients.take(np.array([2]), step_key("key", "records", step, False))
        others, _ = patients.take(np.array([0, 1, 2, 3]), step_key("key", "records", step, False))
        assert shares == (2,)
        assert set(alone) <= {0, 2, 5}
        assert others[3:5].tolist() == alone.tolist()  # whoever else is drawn
        counts.update(alone.tolist())
    assert all(abs(count - 400) < 60 for count in counts.values())  # 5 deviations
    again, _ = patients.take(np.array([2]), step_key("key", "records", 599, False))
    assert again.tolist() == alone.tolist()


def test_whole_patients_are_drawn_at_the_rate(tmp_path: Path) -> None:
    setup = Setup.of(config(tmp_path, "trainer.sample_rate=0.3", "trainer.epochs=200"))
    assert setup.patients is not None
    assert setup.data.train.groups is not None
    owners = setup.data.train.groups.numpy()
    owned, drawn, pairs = Counter(owners.tolist()), Counter(), 0
    sampling = setup.plan.sampling
    assert sampling == Sampling("poisson", 0.3, 0.3 * len(owned), len(owned))
    first, second, *_ = owned
    for step in range(setup.plan.steps):
        indices, divisor = setup.plan.draw("key", step)
        assert divisor == 0.3 * len(owned)
        records, shares = setup.patients.take(indices, step_key("key", "records", step, False))
        here = Counter(owners[records].tolist())
        assert here == {owner: owned[owner] for owner in here}  # all of them or none
        assert sorted(shares) == sorted(here.values())
        drawn.update(here.keys())
        pairs += first in here and second in here
    steps = setup.plan.steps
    for owner in owned:
        assert abs(drawn[owner] - 0.3 * steps) < 5 * (0.21 * steps) ** 0.5
    assert abs(pairs - 0.09 * steps) < 5 * (0.0819 * steps) ** 0.5  # independently


def test_pieces_hold_whole_patients() -> None:
    def cut(size: int, *shares: int) -> list[tuple[int, ...]]:
        batches = MicroBatches(sum(shares), lambda _: None, Size(size), share_sizes=shares)  # type: ignore
        ends = [(of.start, of.stop) for of, _ in batches.cuts()]
        assert [start for start, _ in ends[1:]] == [stop for _, stop in ends[:-1]]
        assert [stop - start for start, stop in ends] == [sum(own) for _, own in batches.cuts()]
        return [own for _, own in batches.cuts()]

    assert cut(4, 1, 3, 2, 2, 1) == [(1, 3), (2, 2), (1,)]
    assert cut(2, 3, 1, 1, 5) == [(3,), (1, 1), (5,)]
    assert cut(9, 3, 1) == [(3, 1)]
    assert cut(9) == []


def test_micro_batches_change_nothing_and_a_patient_moves_the_sum_by_the_bound(
    tmp_path: Path,
) -> None:
    """With a bound so small that everyone is clipped, and noise left out."""
    setup = Setup.of(config(tmp_path, "algorithm.max_grad_norm=1.0e-3"))
    assert setup.patients is not None
    everyone = np.arange(setup.plan.sampling.records)

    def total(drawn: np.ndarray, size: int) -> torch.Tensor:
        assert setup.patients is not None
        indices, shares = setup.patients.take(drawn, step_key("key", "records", 0, False))

        def piece(cut: slice) -> tuple[torch.Tensor, torch.Tensor]:
            return setup.data.train.batch(torch.from_numpy(indices[cut]))

        batches = MicroBatches(len(indices), piece, Size(size), share_sizes=shares)
        sums_by_name = sum_shares(setup.algorithm, setup.mechanism, batches, setup.device)
        return torch.cat(
            [torch.view_as_real(sums.cdouble()).flatten() for sums in sums_by_name.values()]
        )

    whole = total(everyone, 2048)
    torch.testing.assert_close(total(everyone, 5), whole, rtol=1e-4, atol=1e-9)
    for patient in everyone:
        moved = whole - total(np.delete(everyone, patient), 2048)
        assert moved.norm() <= 1e-3 * (1 + 1e-4)
        assert moved.norm() > 0.9e-3
    assert total(everyone[:0], 5).abs().max() == 0


def test_epsilon_is_the_patients(tmp_path: Path) -> None:
    outcome = carry_out(tmp_path, "privacy.max_examples=4")
    privacy = outcome.record.document["privacy"]
    drawn = Sampling("poisson", 0.3, 0.3 * 12, 12)
    assert Sampling(**privacy["sampling"]) == drawn
    assert privacy["steps"] == 10
    alone = Mechanism((Block("all", (1,), "complex64", 1.0, 2.0, "circular"),), drawn)
    right = tight_epsilon(alone, 10, privacy["delta"])
    assert privacy["epsilon_tight"] == pytest.approx(right)
    assert privacy["epsilon_patient"] == privacy["epsilon_tight"]
    assert privacy["epsilon_patient_at_least"] == privacy["epsilon_tight_at_least"]
    assert privacy["examples_per_patient"] == 4
    assert (privacy["epsilon_of"], privacy["unit"]) == ("patient", "patient")
    assert outcome.record.document["config"]["privacy"]["unit"] == "patient"
    by_example = carry_out(tmp_path, "privacy.unit=example").record.document["privacy"]
    assert by_example["examples_per_patient"] == 12
    assert by_example["epsilon_claimed"] == pytest.approx(privacy["epsilon_claimed"])
    assert by_example["epsilon_patient"] > 5 * privacy["epsilon_patient"]
    assert by_example["epsilon_of"] == "example"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=sgd"], "cannot clip several examples together"),
        (["algorithm=gredp"], "cannot clip several examples together"),
        (["federated.nodes=2", "trainer.augmentations=2"], "a node draws one view of an example"),
        (["privacy.unit=example", "privacy.max_examples=3"], "privacy.unit=patient only"),
        (["privacy.max_examples=0"], "greater than or equal to 1"),
        (["privacy.unit=person"], "privacy.unit"),
        # such a run said 'ε of a patient', with each example taken for a patient
        (["recipe=ecg", "dataset=cpsc2018_synthetic"], "data set does not state who owns"),
        *(
            ([f"dataset={name}"], "data set does not state who owns")
            for name in ("mnist", "fashion_mnist", "cifar10")
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(overrides: list[str], words: str) -> None:
    plain = ["recipe=quickstart", "privacy.unit=patient", *overrides]
    with pytest.raises(UserError, match=words):
        configured(plain)


def test_a_batch_of_more_patients_than_there_are_is_refused(tmp_path: Path) -> None:
    many = ["trainer.sample_rate=null", "trainer.batch_size=60"]
    with pytest.raises(UserError, match="has only 12 patients"):
        Setup.of(config(tmp_path, *many))


def test_images_that_share_examples_are_one_unit() -> None:
    """Two images make two examples of theirs alone, so what hides the couple hides either."""
    given = configured(["recipe=quickstart", "privacy.unit=patient"])
    setup = Setup.of(given)
    assert setup.patients
    assert np.diff(setup.patients.starts).tolist() == [2] * (len(setup.data.train) // 2)
    assert setup.plan.sampling.records == len(setup.data.train) // 2
    assert validate(given, trial=False).sampling["records"] == setup.plan.sampling.records


def test_the_model_check_tries_shares_also_where_every_patient_has_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Mock(return_value=NOTHING_FOUND)
    monkeypatch.setattr(model_checks, "check", check)
    for word in ("privacy.max_examples=null", "privacy.unit=example", "privacy.max_examples=1"):
        Setup.of(config(tmp_path, word)).check_model()
    assert [call.args[-1] for call in check.call_args_list] == [True, False, True]


FILMS = "recipe=chest_xray_small_strict dataset=chest_xray_synthetic dataset.count=60"
FILMS += " dataset.size=32 trainer.epochs=1 trainer.sample_rate=0.2 trainer.augmentations=3"


def films(root: Path, *overrides: str) -> Run:
    return configured([*FILMS.split(), f"paths.data={root}", *overrides])


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup.of(films(tmp_path_factory.mktemp("films")))


@pytest.fixture(scope="module")
def plain(setup: Setup) -> Setup:
    """The same without augmented views."""
    return Setup.of(films(setup.config.data_root, "trainer.augmentations=null"), data=setup.data)


def test_an_example_comes_in_so_many_views_of_its_own(setup: Setup) -> None:
    batches, divisor = setup.draw("key", 0)
    ((inputs, targets),) = batches
    assert batches.share_sizes == (3,) * (len(inputs) // 3)
    assert divisor == setup.plan.sampling.expected_batch_size
    views = inputs.unflatten(0, (-1, 3))
    assert (views[:, 0] - views[:, 1]).abs().flatten(1).amax(1).min() > 0
    assert (targets.view(-1, 3) == targets.view(-1, 3)[:, :1]).all()
    ((again, _),) = setup.draw("key", 0)[0]
    assert torch.equal(again, inputs)


def test_the_first_view_is_the_one_there_is_without_the_key(setup: Setup, plain: Setup) -> None:
    ((plain_view, _),), ((three, _),) = (s.draw("key", 0)[0] for s in (plain, setup))
    assert torch.equal(three[::3], plain_view)


def test_it_is_part_of_what_is_computed_and_costs_no_epsilon(setup: Setup, plain: Setup) -> None:
    assert experiment_digest(plain.config) != experiment_digest(setup.config)
    assert plain.mechanism == setup.mechanism
    assert plain.epsilon(5) == setup.epsilon(5)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.augmentations=1"], "must be greater than or equal to 2"),
        (["algorithm=sgd"], "cannot clip several examples together"),
        (["dataset.augment=false"], "does not augment examples"),
    ],
)
def test_what_it_cannot_mean_is_refused(setup: Setup, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Setup.of(films(setup.config.data_root, *overrides))
