"""The parts of a run: the plan of its steps and what each of them draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.test_run import configured
from zdp_bench.data import Examples
from zdp_bench.errors import UserError
from zdp_bench.registry import lookup
from zdp_bench.training.batches import micro_batches
from zdp_bench.training.build import build_optimizer
from zdp_bench.training.plan import Plan


def plan(tmp_path: Path, *overrides: str, size: int = 100) -> Plan:
    return Plan.of(configured(tmp_path, *overrides), size)


def test_poisson_epochs_are_expected_passes(tmp_path: Path) -> None:
    of = plan(tmp_path, "trainer.sample_rate=0.03", "trainer.epochs=10")
    assert of.steps == 333
    ends = [step for step in range(of.steps + 1) if of.epoch_ending_at(step) is not None]
    assert len(ends) == 10
    assert ends[-1] == 333
    assert [of.epoch_ending_at(step) for step in ends] == list(range(1, 11))
    assert [of.epoch_of(step) for step in ends] == list(range(1, 11))
    assert [of.epoch_of(step + 1) for step in ends[:-1]] == list(range(2, 11))
    assert of.draw(0, 5)[1] == pytest.approx(
        3.0
    )  # the divisor is the EXPECTED batch size, whatever was drawn
    assert len({len(of.draw(0, step)[0]) for step in range(50)}) > 1


def test_draws_are_functions_of_seed_and_step(tmp_path: Path) -> None:
    of = plan(tmp_path)
    assert (of.draw(1, 7)[0] == of.draw(1, 7)[0]).all()
    assert of.draw(1, 7)[0].tolist() != of.draw(1, 8)[0].tolist()
    assert of.draw(1, 7)[0].tolist() != of.draw(2, 7)[0].tolist()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("scheme", ["poisson", "uniform"])
def test_a_plan_draws_at_the_rate_that_is_accounted(
    tmp_path: Path, scheme: str, secure: bool
) -> None:
    """ε is computed from `sampling.sample_rate`: drawing at another one is invisible in every other
    number of a run."""
    size, rate = 400, 0.03
    of = plan(
        tmp_path,
        f"trainer.sampling={scheme}",
        f"trainer.sample_rate={rate}",
        "trainer.epochs=75",
        size=size,
    )
    assert (of.sampling.sample_rate, of.sampling.records) == (rate, size)
    assert of.steps > 2000
    taken = np.zeros((of.steps, size), dtype=bool)
    for step in range(of.steps):
        indices, divisor = of.draw("key", step, secure)
        taken[step, indices] = True
        assert taken[step].sum() == len(indices)  # no example twice
        assert divisor == pytest.approx(rate * size)
    assert_independent_at_the_rate(taken, rate, fixed_size=scheme == "uniform")


def assert_independent_at_the_rate(taken: np.ndarray, rate: float, fixed_size: bool) -> None:
    """Fail unless `taken` [steps, examples] are draws at the rate, each step's independent of the
    others'."""
    steps, size = taken.shape
    variance = rate * (1 - rate)
    batches = taken.sum(axis=1)
    if fixed_size:
        assert (batches == rate * size).all()
    else:
        assert abs(batches.mean() - rate * size) < 5 * np.sqrt(variance * size / steps)
        assert abs(batches.var() / (variance * size) - 1) < 5 * np.sqrt(2 / steps)
    # one in 10⁸ of all 400 examples would fail
    assert (np.abs(taken.mean(axis=0) - rate) < 6.5 * np.sqrt(variance / steps)).all()
    for apart in (1, 2, 16):
        both = (taken[apart:] & taken[:-apart]).sum()
        expected = rate**2 * taken[apart:].size
        assert abs(both - expected) < 5 * np.sqrt(expected)


def test_two_runs_draw_independent_batches(tmp_path: Path) -> None:
    of = plan(tmp_path, "trainer.sample_rate=0.03", "trainer.epochs=15", size=1000)
    overlap = [
        len(np.intersect1d(of.draw("one", step)[0], of.draw("other", step)[0]))
        for step in range(of.steps)
    ]
    expected = 0.03**2 * 1000 * of.steps
    assert abs(sum(overlap) - expected) < 5 * np.sqrt(expected)


def test_an_epoch_shorter_than_a_step_still_has_one(tmp_path: Path) -> None:
    of = plan(tmp_path, "trainer.sample_rate=1", "trainer.epochs=3")
    assert of.steps == 3
    assert [of.epoch_ending_at(step) for step in range(4)] == [None, 1, 2, 3]


def test_a_batch_larger_than_the_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has only 100 records"):
        plan(
            tmp_path,
            "trainer.sampling=uniform",
            "trainer.sample_rate=null",
            "trainer.batch_size=101",
        )


def test_the_shuffled_divisor_is_the_batch_there_is(tmp_path: Path) -> None:
    of = plan(
        tmp_path,
        "algorithm=sgd",
        "trainer=shuffled",
        "trainer.sample_rate=null",
        "trainer.batch_size=30",
        "trainer.epochs=2",
    )
    assert of.steps == 8
    sizes = [of.draw(0, step)[1] for step in range(8)]
    assert sizes == [30, 30, 30, 10] * 2
    epochs = [
        sorted(i for step in steps for i in of.draw(0, step)[0])
        for steps in (range(4), range(4, 8))
    ]
    assert epochs == [list(range(100))] * 2
    assert of.draw(0, 0)[0].tolist() != of.draw(0, 4)[0].tolist()


@pytest.mark.parametrize("secure", [False, True])
def test_one_record_more_changes_no_other_records_augmentation(
    tmp_path: Path, secure: bool
) -> None:
    """The seed stands in every record of a run: given it, neighbouring batches may differ in one
    share alone."""
    config = configured(tmp_path, f"privacy.secure={str(secure).lower()}", "trainer.micro_batch=4")
    records_ = Examples(torch.arange(100.0).view(100, 1), torch.zeros(100))

    def changed(*indices: int) -> dict[int, float]:
        pieces = micro_batches(
            records_,
            np.array(indices),
            config,
            torch.device("cpu"),
            "key",
            5,
            lambda x, chance: x + chance[:, :1],
        )
        values = torch.cat([inputs for inputs, _ in pieces]).flatten().tolist()
        return dict(zip(indices, values, strict=True))

    without, with_one_more = changed(3, 8, 20, 21, 50, 99), changed(2, 3, 8, 20, 21, 50, 99)
    assert with_one_more.pop(2) != 2.0
    assert with_one_more == without


def test_fused_optimisers_refuse_complex_parameters(tmp_path: Path) -> None:
    config = configured(tmp_path, "optimizer=adam", "+optimizer.fused=true")
    with pytest.raises(UserError, match=r"optimizer\.fused=true"):
        build_optimizer(config, lookup("model", "complex_mlp")((2,), 2, hidden=[3]))
