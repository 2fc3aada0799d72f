"""A bound that adapts: what the count may move by, what it costs, and where the bound goes."""

from __future__ import annotations

import math
from pathlib import Path

import dp_accounting
import pytest
import torch
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from tests.algorithms.test_properties import examples, make, summed
from tests.training.test_interrupts import stop_and_go_on
from zdp_bench.algorithms import adaptive_bound
from zdp_bench.algorithms.adaptive_bound import COUNT, COUNT_FRACTION, COUNT_SCALE
from zdp_bench.algorithms.dp_sgd import DPSGD
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.privacy.accounting import rdp_epsilon, tight_epsilon
from zdp_bench.privacy.mechanism import Mechanism, Sampling

CASE = ("dp_sgd", {"clip_quantile": 0.5}, "real")


def algorithm_with(**options: object) -> DPSGD:
    made = make((CASE[0], CASE[1] | options, CASE[2]))[0]
    assert isinstance(made, DPSGD)
    return made


def noises_of(mechanism: Mechanism) -> tuple[float, float]:
    """Noise on the gradients over the bound they are clipped at, and on the count of shares."""
    *gradients, count = mechanism.blocks
    assert count.name == COUNT
    (std,) = {block.std for block in gradients}
    return std, count.std / COUNT_SCALE


@pytest.mark.parametrize("sigma", [0.3, 1.3, 9.0])
def test_gradients_and_count_together_are_the_noise_multiplier(sigma: float) -> None:
    """Theorem 1 of Andrew et al. 2021, and ε by dp-accounting of the two releases apart."""
    mechanism = algorithm_with(noise_multiplier=sigma).mechanism()
    of_gradients, of_count = noises_of(mechanism)
    assert mechanism.z == pytest.approx(sigma, rel=1e-12)
    assert sigma**-2 == pytest.approx(of_gradients**-2 + (2 * of_count) ** -2, rel=1e-12)
    assert sigma**2 / (2 * of_count) ** 2 == pytest.approx(COUNT_FRACTION, rel=1e-12)
    gaussians = [dp_accounting.GaussianDpEvent(z) for z in (of_gradients, 2 * of_count)]
    both = dp_accounting.ComposedDpEvent(gaussians)
    sampled = dp_accounting.PoissonSampledDpEvent(mechanism.sampling.sample_rate, both)
    by_rdp = RdpAccountant().compose(dp_accounting.SelfComposedDpEvent(sampled, 20))
    assert rdp_epsilon(mechanism, 20, 1e-5) == pytest.approx(by_rdp.get_epsilon(1e-5), rel=1e-6)
    every = Mechanism(mechanism.blocks, Sampling("poisson", 1.0, 80.0, 80))
    whole = PLDAccountant(value_discretization_interval=1e-3)
    exact = whole.compose(dp_accounting.SelfComposedDpEvent(both, 3)).get_epsilon(1e-5)
    assert tight_epsilon(every, 3, 1e-5) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("shares", [None, (3, 1, 2)])
def test_a_share_more_or_less_moves_the_count_by_half_and_all_by_the_joint_bound(
    per_layer: bool, shares: tuple[int, ...] | None
) -> None:
    algorithm = algorithm_with(per_layer=per_layer)
    (bound,) = {block.bound for block in algorithm.mechanism().blocks}
    moves = set()
    for at, scale in ((1e-3, 1.0), (0.7, 0.3), (1e3, 1.0), (0.7, math.inf)):  # the last is broken
        algorithm.carried["bound"] = at
        inputs, targets = examples(6, "real", scale)
        first, others = (1, None) if shares is None else (shares[0], shares[1:])
        whole = summed(algorithm, (inputs, targets), shares=shares)
        least = summed(algorithm, (inputs[first:], targets[first:]), shares=others)
        moved = {name: whole[name] - least[name] for name in whole}
        count = float(moved[COUNT]) / COUNT_SCALE
        assert abs(count) <= 0.5 + 1e-12
        assert sum(float(m.square().sum()) for m in moved.values()) <= bound**2 * (1 + 1e-9)
        moves.add(round(count, 6))
    assert {0.5, -0.5, 0.0} <= moves


def test_the_bound_moves_geometrically_and_by_the_release_alone() -> None:
    algorithm = algorithm_with(clip_quantile=0.3)
    release = {name: zero + 0.01 for name, zero in summed(algorithm).items()}
    release[COUNT] = torch.tensor([COUNT_SCALE * 1.5], dtype=torch.float64)  # b̃ = 1/2 + 1.5/8
    mean = next(iter(algorithm.postprocess(release, 8.0).values()))
    torch.testing.assert_close(mean, torch.full_like(mean, 0.01 * 0.7 / 8))
    moved = 0.7 * math.exp(-0.2 * (0.5 + 1.5 / 8 - 0.3))
    assert algorithm.carried["bound"] == pytest.approx(moved, rel=1e-12)
    for far, factor in ((-1e9, 2.0), (1e9, 0.5)):
        before = algorithm.carried["bound"]
        algorithm.postprocess({COUNT: torch.tensor([far], dtype=torch.float64)}, 8.0)
        assert algorithm.carried["bound"] == pytest.approx(factor * before)


def test_the_bound_stays_in_its_range_and_a_norm_at_the_bound_is_unclipped() -> None:
    assert adaptive_bound.adapt_bound(1e12, 0.0, 0.9) == 1e12
    assert adaptive_bound.adapt_bound(1e-12, 1.0, 0.1) == 1e-12
    norms = torch.tensor([0.5, 1.0, 1.5, math.inf], dtype=torch.float64)
    counts = adaptive_bound.count_unclipped(norms, 1.0)
    assert counts.tolist() == [[0.5], [0.5], [-0.5], [0.0]]
    by_layer = torch.tensor([[0.5, 0.5], [0.5, 0.6], [math.nan, 0.5]], dtype=torch.float64)
    counts = adaptive_bound.count_unclipped(by_layer, 0.5 * math.sqrt(2) + 1e-9)
    assert counts.tolist() == [[0.5], [0.0], [0.0]]


def test_the_bound_comes_to_the_quantile_of_the_norms() -> None:
    norms = torch.linspace(1, 9, 801)
    bound = 1e-3
    for _ in range(300):
        unclipped = 0.5 + float(adaptive_bound.count_unclipped(norms, bound).mean())
        bound = adaptive_bound.adapt_bound(bound, unclipped, 0.25)
    assert bound == pytest.approx(3.0, rel=0.02)


def test_a_run_that_was_stopped_goes_on_with_its_bound_and_the_record_says_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = stop_and_go_on(monkeypatch, tmp_path, 7, "algorithm.clip_quantile=0.4")
    privacy = whole.record.document["privacy"]
    clipping = privacy["clipping"]
    assert clipping["quantile"] == 0.4
    assert clipping["last_bound"] != 1.0
    without, tight = clipping["epsilon_without_count"], privacy["epsilon_tight"]
    assert 0.97 * tight < without < tight
    assert privacy["z"] == pytest.approx(privacy["noise_multiplier"], rel=1e-12)


def test_what_has_no_count_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match="none is left unclipped"):
        algorithm_with(gamma=0.1)
    for words, message in (
        (["algorithm.clip_quantile=1"], r"must be less than 1"),
        (["algorithm.clip_quantile=0.5", "federated.nodes=2"], "its own bound"),
    ):
        with pytest.raises(UserError, match=message):
            configured(["recipe=quickstart", *words])
