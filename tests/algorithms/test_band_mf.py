"""Banded matrix factorisation: its noise, its ε, and what it does to a run."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from tests.training import test_run
from tests.training.test_interrupts import stop_and_go_on
from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.band_mf import BandMF, best_strategy, squared_error
from zdp_bench.algorithms.dp_sgd import DPSGD
from zdp_bench.data import Examples, Splits
from zdp_bench.errors import UserError
from zdp_bench.library import make_private
from zdp_bench.privacy import accounting
from zdp_bench.privacy.accounting import example_epsilon, tight_epsilon
from zdp_bench.privacy.calibration import calibrate_mechanism
from zdp_bench.privacy.composition import SpentSteps, compose_epsilon
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import CorrelatedNoise, SecureNoise, SeededNoise, White, correlate
from zdp_bench.privacy.sampling import subsets
from zdp_bench.tasks.classification import Classification
from zdp_bench.training.plan import Plan
from zdp_bench.training.setup import Setup
from zdp_bench.training.step import Training, private_step

BANDS = ["algorithm=band_mf", "algorithm.bands=4", "algorithm.noise_multiplier=1.5"]
BANDS += ["model=real_mlp", "model.complex_as=magnitude"]


def banded(strategy: tuple[float, ...], steps: int) -> np.ndarray:
    """C, [steps, steps]."""
    return sum(c * np.eye(steps, k=-j) for j, c in enumerate(strategy))


def cyclic(rate: float, cycle: int, z: float = 1.0) -> Mechanism:
    return Mechanism.of_z(z, Sampling("poisson", rate, 100 * rate / cycle, 100, cycle))


# -------------------------------------------------------------------------------------- strategy


# `loss(optimize_banded_toeplitz(n, bands), n)` of jax_privacy 2.2, in float64
@pytest.mark.parametrize(
    ("steps", "bands", "theirs"),
    [(16, 4, 3.7540235663615293), (100, 10, 8.681873898575267), (1000, 32, 24.115187091644405)],
)
def test_the_strategy_is_as_good_as_that_of_jax_privacy(
    steps: int, bands: int, theirs: float
) -> None:
    strategy = np.array(best_strategy(steps, bands))
    ours, _ = squared_error(strategy, steps)
    assert theirs * (1 - 1e-9) <= ours <= theirs * (1 + 1e-6)
    sums = np.tri(steps) @ np.linalg.inv(banded(tuple(strategy), steps))
    assert ours == pytest.approx((strategy @ strategy) * (sums**2).sum() / steps)


@pytest.mark.parametrize(("epsilon", "best"), [(20.0, 10), (0.1, 1)])
def test_many_bands_are_best_at_a_large_epsilon_and_one_at_a_small(
    epsilon: float, best: int
) -> None:
    """As jax_privacy's tests have it: 100 steps of 100 of 1,000 examples, δ 1e-6."""
    errors = {}
    for bands in (1, 2, 4, 5, 10):
        unit = cyclic(0.1 * bands, bands)
        z = calibrate_mechanism(epsilon, unit, 100, 1e-6)
        errors[bands] = z**2 * squared_error(np.array(best_strategy(100, bands)), 100)[0]
    assert min(errors, key=errors.__getitem__) == best


# ----------------------------------------------------------------------------------------- privacy


@pytest.mark.parametrize("bands", [1, 2, 3])
def test_what_one_example_moves_is_orthogonal_over_its_steps(bands: int) -> None:
    """Steps at a distance of `bands` or more move C·S by ‖c‖ each, at most, and independently."""
    steps, strategy = 7, best_strategy(7, bands)
    matrix, reach = banded(strategy, steps), math.hypot(*strategy)
    longest = 0.0
    for chosen in itertools.product((0, 1), repeat=steps):
        at = np.flatnonzero(chosen)
        apart = len(at) < 2 or np.diff(at).min() >= bands
        length = float(np.linalg.norm(matrix[:, at].sum(axis=1)))
        if apart:
            assert length <= math.sqrt(len(at)) * reach + 1e-12
            longest = max(longest, length / math.sqrt(max(1, len(at))))
    assert longest == pytest.approx(reach)
    if bands > 1:  # nearer to one another it does not hold
        assert np.linalg.norm(matrix[:, :2].sum(axis=1)) > math.sqrt(2) * reach


@pytest.mark.parametrize("steps", [100, 101])
def test_epsilon_is_that_of_fewer_steps_at_a_higher_rate(steps: int) -> None:
    z, rate, cycle, delta = 1.3, 0.32, 8, 1e-5
    mechanism, own = cyclic(rate, cycle, z), -(-steps // cycle)
    step = PoissonSampledDpEvent(rate, GaussianDpEvent(z))
    theirs = PLDAccountant(value_discretization_interval=1e-3)
    by_hand = theirs.compose(SelfComposedDpEvent(step, own)).get_epsilon(delta)
    assert tight_epsilon(mechanism, steps, delta) == pytest.approx(by_hand, rel=2e-3)
    plain = replace(mechanism, sampling=replace(mechanism.sampling, cycle=1))
    assert tight_epsilon(mechanism, steps, delta) == tight_epsilon(plain, own, delta)
    assert example_epsilon(mechanism, steps, delta) == example_epsilon(plain, own, delta)
    spent = SpentSteps(z, mechanism.sampling, steps)
    assert compose_epsilon([spent], delta) == tight_epsilon(mechanism, steps, delta)
    assert compose_epsilon([spent, spent], delta) == tight_epsilon(plain, 2 * own, delta)


def test_of_several_examples_in_different_subsets_nothing_is_promised() -> None:
    mechanism = cyclic(0.2, 4)
    assert accounting.patient_epsilon(mechanism, 2, 40, 1e-5) == math.inf
    low, high = accounting.patient_interval(mechanism, 2, 40, 1e-5)
    assert (low, high) == (tight_epsilon(mechanism, 40, 1e-5), math.inf)
    assert compose_epsilon([SpentSteps(1.0, mechanism.sampling, 40, examples=2)], 1e-5) == math.inf


@pytest.mark.parametrize(
    ("strategy", "cycle"), [((1.0, 0.5), 1), ((1.0, 0.5, 0.2), 2), ((0.5,), 1), ((), 1)]
)
def test_a_strategy_longer_than_the_cycle_is_refused(
    strategy: tuple[float, ...], cycle: int
) -> None:
    with pytest.raises(ValueError, match="no longer than the sampling's cycle"):
        replace(cyclic(0.1, cycle), strategy=strategy)


def test_a_mechanism_of_correlated_noise_is_described_whole() -> None:
    mechanism = replace(cyclic(0.2, 4, z=2.0), strategy=(1.0, 0.75))
    assert mechanism.z == pytest.approx(2.0 / 1.25)
    assert Mechanism.from_dict(mechanism.as_dict()) == mechanism
    plain = cyclic(0.2, 1)
    assert "strategy" not in plain.as_dict()  # as it was described before there were any
    assert "cycle" not in plain.as_dict()["sampling"]
    assert mechanism.digest() != plain.digest()


def test_each_example_comes_in_the_steps_of_its_subset_at_the_rate() -> None:
    own = subsets([str(number).encode() for number in range(4000)], 5)
    plan = replace(Plan.poisson(4000, 0.05, 40, cycle=5), subset_of=own)
    assert (plan.steps, plan.sampling.sample_rate) == (800, 0.25)
    drawn = np.zeros((5, 4000))
    for step in range(plan.steps):
        drawn[step % 5, plan.draw("key", step)[0]] += 1
    assert (drawn[np.arange(5)[:, None] != own] == 0).all()
    assert drawn.sum() / 4000 == pytest.approx(40, rel=0.01)
    assert np.bincount(own) == pytest.approx(800, rel=0.1)


def splits_of(rows: np.ndarray, owners: np.ndarray) -> Splits:
    """Return the data set that has these of 60 examples, numbered as a data set numbers owners."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 8, 8, dtype=torch.complex64, generator=generator)
    inputs[1], targets = inputs[0], torch.arange(60) % 10
    targets[1] = targets[0]
    names, groups = np.unique(owners[rows], return_inverse=True)
    train = Examples(inputs[rows], targets[rows], torch.from_numpy(groups))
    test = Examples(inputs, targets)
    named = [f"p{name:02}" for name in names]
    return Splits(train, test, (8, 8), 10, "synthetic", f"{len(rows)}", owner_names=named)


@pytest.mark.parametrize("unit", ["example", "patient"])
def test_whoever_is_removed_the_others_keep_their_subsets(unit: str, tmp_path: Path) -> None:
    """By position, one example less moved all behind it: one neighbour changed every sum."""
    config = test_run.configured(tmp_path, *BANDS, f"privacy.unit={unit}")
    owners = np.arange(60) if unit == "example" else np.arange(60) // np.array([1, 2] * 30)

    def subset_of_example(rows: np.ndarray) -> np.ndarray:
        setup = Setup.of(config, splits_of(rows, owners))
        assert setup.plan.subset_of is not None
        if setup.patients is None:
            return setup.plan.subset_of
        places = np.empty(len(rows), dtype=np.int64)
        sizes = np.diff(setup.patients.starts)
        places[setup.patients.examples] = np.repeat(setup.plan.subset_of, sizes)
        return places

    everyone = np.arange(60)
    whole = subset_of_example(everyone)
    assert set(whole) == {0, 1, 2, 3}
    if unit == "example":
        assert whole[0] == whole[1]  # equal examples: whichever of them is removed
    for removed in np.unique(owners)[:50]:
        rest = everyone[owners != removed]
        assert (subset_of_example(rest) == whole[rest]).all(), f"{unit} {removed}"


# ------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("source", [SeededNoise(3), SecureNoise()])
def test_noise_is_white_after_the_strategy(source: SeededNoise | SecureNoise) -> None:
    strategy, steps, many = (1.0, 0.6, 0.3), 9, 40_000
    block = Block("w", (many,), "float32", 1.0, 2.0, "real")
    mechanism = Mechanism((block,), Sampling("poisson", 0.3, 10.0, 100, 3), strategy=strategy)
    correlated, noise = correlate(source, mechanism), torch.zeros(steps, many)
    for step in range(steps):
        correlated.add_white(White(noise[step], block.std, (step, "w")))
    matrix = banded(strategy, steps)
    covariance = np.cov(noise.numpy())
    assert covariance == pytest.approx(4.0 * np.linalg.inv(matrix.T @ matrix), abs=0.25)
    assert np.cov(matrix @ noise.numpy()) == pytest.approx(4.0 * np.eye(steps), abs=0.15)


def test_earlier_noise_is_drawn_again_where_it_can_be() -> None:
    def at(step: int, of: CorrelatedNoise, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        out = torch.zeros(5, dtype=dtype)
        of.add_white(White(out, 1.0, (step, "w"), factor=0.5))
        return out

    strategy = (1.0, 0.5, 0.25)
    unbroken = CorrelatedNoise(SeededNoise(3), strategy)
    whole = [at(step, unbroken) for step in range(6)]
    late = CorrelatedNoise(SeededNoise(3), strategy)
    assert torch.equal(at(4, late), whole[4])
    assert torch.equal(at(2, late), whole[2])
    assert torch.equal(at(5, late, torch.float32), whole[5].float())  # whatever else is added to
    secure = CorrelatedNoise(SecureNoise(), strategy)
    at(1, secure)
    with pytest.raises(UserError, match="step 1: its secure noise was drawn before"):
        at(1, secure)


def test_with_one_band_it_is_dp_sgd(tmp_path: Path) -> None:
    ended = []
    for make in (DPSGD, BandMF):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 3)
        problem = Problem(model, Classification().loss, Sampling("poisson", 0.1, 8.0, 80), steps=50)
        algorithm = make(problem, noise_multiplier=1.1, max_grad_norm=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ledger = Ledger(tmp_path / make.__name__, algorithm.mechanism(), True)
        training = Training(algorithm, model, optimizer, SeededNoise(5), ledger)
        batch = torch.randn(8, 4), torch.randint(0, 3, (8,))
        for step in range(5):
            private_step(training, step, [batch], 8.0)
        ledger.close()
        ended.append((algorithm.mechanism(), model.weight.tolist()))
    assert ended[0] == ended[1]


# --------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("unit", ["example", "patient"])
def test_a_run_that_was_stopped_goes_on_with_the_same_noise(
    unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*BANDS, f"privacy.unit={unit}", "accountant=rdp"]
    whole, resumed = stop_and_go_on(monkeypatch, tmp_path, 13, *words)
    assert resumed.record.document["measured"]["resumed_at_step"] == 14
    privacy = whole.record.document["privacy"]
    assert privacy["steps"] == 20
    assert privacy["sampling"]["cycle"] == 4
    assert privacy["sampling"]["sample_rate"] == pytest.approx(0.4)
    assert privacy["z"] == pytest.approx(1.5)
    step = PoissonSampledDpEvent(0.4, GaussianDpEvent(1.5))
    rdp = RdpAccountant().compose(SelfComposedDpEvent(step, 5)).get_epsilon(1e-4)
    assert privacy["epsilon_claimed"] == pytest.approx(rdp)
    assert privacy["epsilon_tight"] < rdp
    if unit == "example":
        assert privacy["epsilon_patient"] == math.inf


@pytest.mark.parametrize("secure", [True, False])
def test_a_run_whose_noise_cannot_be_drawn_again_does_not_go_on(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*BANDS, f"privacy.secure={secure}"]
    test_run.kill_after(monkeypatch, 13, tmp_path, *words)
    if not secure:
        monkeypatch.setattr(test_run.experiment, "execution_digest", lambda *_: "other code")
    with pytest.raises(UserError, match=r"noise .* again"):
        test_run.carry_out(tmp_path, *words)


def test_a_secure_run_in_one_process_ends(tmp_path: Path) -> None:
    record = test_run.carry_out(tmp_path, *BANDS, "privacy.secure=true").record.document
    assert record["privacy"]["randomness"] == "cryptographic"


def test_calibration_meets_the_target(tmp_path: Path) -> None:
    config = test_run.configured(tmp_path, *BANDS[:2], *BANDS[3:], "privacy.target_epsilon=3")
    setup = Setup.of(config)
    assert setup.epsilon(setup.plan.steps) == pytest.approx(3, rel=1e-3)
    assert len(setup.mechanism.strategy) == 4


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["algorithm.bands=11"], "algorithm.bands.*11.*no more than 10 subsets"),
        (["trainer.sample_rate=0.15", "algorithm.bands=7"], "bands.*7.*no more than 6 subsets"),
        (
            ["trainer=uniform", "trainer.batch_size=70", "trainer.sample_rate=null"],
            "bands=4: needs",
        ),
        (["federated.nodes=2"], "algorithm=band_mf with federated.nodes"),
    ],
)
def test_what_bands_do_not_go_with_is_refused(words: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        Setup.of(test_run.configured(tmp_path, *BANDS, *words))


def test_a_loop_of_ones_own_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    how = {"sample_rate": 0.2, "expected_batch": 8, "epochs": 1, "noise_multiplier": 1.0}
    how |= {"ledger": tmp_path / "ledger.jsonl", "algorithm": "band_mf", "bands": 2}
    with pytest.raises(UserError, match=r"bands=2: .*subsets"):
        make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            [(torch.randn(4), number % 3) for number in range(40)],
            loss=torch.nn.functional.cross_entropy,
            **how,
        )
