"""Several augmented views of an example: one share, the mean of their gradients, clipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zdp_bench.audit.subject import Subject
from zdp_bench.config import configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.gradients import reference
from zdp_bench.gradients.clipping import groups
from zdp_bench.training.setup import Setup
from zdp_bench.training.step import sum_contributions

FILMS = [
    "recipe=chest_xray_small_strict",
    "dataset=chest_xray_synthetic",
    "dataset.count=60",
    "dataset.size=32",
    "trainer.epochs=1",
    "trainer.sample_rate=0.2",
]


def config(root: Path, *overrides: str) -> Run:
    return configured([*FILMS, f"paths.data={root}", "trainer.augmentations=3", *overrides])


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup.of(config(tmp_path_factory.mktemp("films")))


def test_an_example_comes_in_so_many_views_of_its_own(setup: Setup) -> None:
    batches, divisor = setup.draw("key", 0)
    ((inputs, targets),) = batches
    assert batches.shares == (3,) * (len(inputs) // 3)
    assert divisor == setup.plan.sampling.expected_batch_size
    views = inputs.unflatten(0, (-1, 3))
    assert (views[:, 0] - views[:, 1]).abs().flatten(1).amax(1).min() > 0
    assert (targets.view(-1, 3) == targets.view(-1, 3)[:, :1]).all()
    ((again, _),) = setup.draw("key", 0)[0]
    assert torch.equal(again, inputs)


def test_the_first_view_is_the_one_there_is_without_the_key(setup: Setup) -> None:
    plain = Setup.of(config(setup.config.data_root, "trainer.augmentations=null"), data=setup.data)
    ((one, _),), ((three, _),) = (s.draw("key", 0)[0] for s in (plain, setup))
    assert torch.equal(three[::3], one)


def test_the_clipped_mean_of_its_gradients_is_an_examples_share(setup: Setup) -> None:
    batches, _ = setup.draw("key", 1)
    got = sum_contributions(setup.algorithm, setup.mechanism, batches, setup.device)
    (batch,) = batches
    each = reference.per_sample_gradients(setup.model, setup.task.loss, batch)
    means = {name: g.unflatten(0, (-1, 3)).mean(1) for name, g in each.items()}
    bound = setup.algorithm.max_grad_norm
    clipped, norms = reference.clip(means, groups(setup.model, bound, per_layer=False))
    assert (norms > bound).any()
    for name, value in clipped.items():
        torch.testing.assert_close(got[name], value.sum(0), rtol=1e-4, atol=1e-5)


def test_pieces_hold_whole_examples_and_come_to_the_same_sum(setup: Setup) -> None:
    pieces = Setup.of(config(setup.config.data_root, "trainer.micro_batch=4"), data=setup.data)
    whole, cut = (
        sum_contributions(s.algorithm, s.mechanism, s.draw("key", 2)[0], s.device)
        for s in (setup, pieces)
    )
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=1e-5)


def test_it_is_part_of_what_is_computed_and_costs_no_epsilon(setup: Setup) -> None:
    plain = Setup.of(config(setup.config.data_root, "trainer.augmentations=null"), data=setup.data)
    assert experiment_digest(plain.config) != experiment_digest(setup.config)
    assert plain.mechanism == setup.mechanism
    assert plain.epsilon(5) == setup.epsilon(5)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.augmentations=1"], "must be 2 or more"),
        (["algorithm=sgd"], "clips nobody's share"),
        (["dataset.augment=false"], "changes no example as it is drawn"),
    ],
)
def test_what_it_cannot_mean_is_refused(setup: Setup, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Setup.of(config(setup.config.data_root, *overrides))


def test_an_audit_refuses_it(setup: Setup) -> None:
    with pytest.raises(UserError, match="augmentations"):
        Subject.prepare(setup.config)


def test_the_data_set_of_these_tests_augments(setup: Setup) -> None:
    assert isinstance(setup.data, Splits)
    assert setup.data.augment is not None
