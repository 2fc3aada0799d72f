"""The attack on one release: it comes near a Gaussian's ε, never above it, and finds a direction
without noise.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from zdp_bench.extras.audit.release import (
    Scores,
    attack_release,
    bound_at,
    clopper_pearson,
    guess_p_value,
    run_bound,
    sharpest_test,
)
from zdp_bench.privacy.accounting import gdp_epsilon


@pytest.mark.parametrize("p", [0.001, 0.03, 0.2, 0.5, 0.9])
def test_clopper_pearson_fails_no_more_often_than_it_says(p: float) -> None:
    n, alpha = 60, 0.05
    hits = np.arange(n + 1)
    lower, upper = clopper_pearson(hits, n, alpha)
    probability = binom.pmf(hits, n, p)
    assert probability[lower > p].sum() <= alpha
    assert probability[upper < p].sum() <= alpha


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "printed"),
    [
        (100, 100, 75, 0.0, 0.702),
        (100, 100, 75, 1e-4, 0.699),
        (1000, 100, 75, 1e-4, 0.673),
        (100_000, 1510, 1439, 1e-5, 2.675),
    ],
)
def test_the_run_bound_gives_the_papers_examples(
    canaries: int, guesses: int, right: int, delta: float, printed: float
) -> None:
    """Steinke et al. 2023: section 6, and the examples beside appendix D's code; all at 95 %."""
    assert run_bound(canaries, guesses, right, delta, 0.95) == pytest.approx(printed, abs=1e-3)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 0.01), (2.0, 0.002)])
def test_no_mechanism_that_is_private_beats_the_p_value(epsilon: float, delta: float) -> None:
    """Randomised response that tells a bit plainly with probability δ, and one that tells all of
    them together.
    """
    m, q = 25, math.exp(epsilon) / (1 + math.exp(epsilon))
    for right in range(m + 1):
        bound = guess_p_value(m, m, right, epsilon, delta)
        assert binom.sf(right - 1, m, q) <= bound + 1e-12
        assert binom.sf(right - 1, m, delta + (1 - delta) * q) <= bound + 1e-12
        assert delta + (1 - delta) * binom.sf(right - 1, m, q) <= bound + 1e-12 or delta * m > 1


def gaussian(shift: float, seed: int, dimensions: int = 3) -> Callable[[bool, int], Tensor]:
    rng = np.random.default_rng(seed)

    def release(there: bool, count: int) -> Tensor:
        rows = rng.standard_normal((count, dimensions))
        rows[:, 0] += shift * there
        return torch.from_numpy(rows)

    return release


@pytest.mark.parametrize(("shift", "atoms"), [(0.0, True), (1.0, False)])
def test_the_release_bound_holds_as_often_as_it_says(shift: float, atoms: bool) -> None:
    truth = gdp_epsilon(shift, 0.01) if shift else 0.0

    def made(seed: int) -> Callable[[bool, int], Tensor]:
        release = gaussian(shift, seed)
        # rounded to few values, which come again within a release and between them
        return lambda there, count: (
            release(there, count).round() if atoms else release(there, count)
        )

    bounds = [attack_release(made(seed), 400, 0.01, 0.9)[0] for seed in range(20)]
    assert np.mean([bound > truth for bound in bounds]) <= 0.1


@pytest.mark.parametrize("shift", [0.5, 1.0, 1.5])
def test_the_attack_on_a_gaussian_release_comes_near_its_epsilon(shift: float) -> None:
    bound, evidence = attack_release(gaussian(shift, 0), 100_000, 0.01, 0.99)
    assert 0.75 * gdp_epsilon(shift, 0.01) < bound < gdp_epsilon(shift, 0.01)
    assert "false alarms" in evidence


def test_a_direction_without_noise_is_found_unaided() -> None:
    """Noise everywhere but along one hidden direction, and a shift that lies almost across it."""
    rng = np.random.default_rng(1)
    axes = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    shift = axes[:, 0] + 1e-3 * axes[:, 5]

    def release(there: bool, count: int) -> Tensor:
        noise = rng.standard_normal((count, 6))
        noise[:, 5] = 0.0
        return torch.from_numpy(noise @ axes.T + shift * there)

    bound, evidence = attack_release(release, 2000, 0.01, 0.99)
    assert evidence == "the attack wins 3,000 of 3,000"
    hit = 0.0025 ** (1 / 1500)
    assert bound == pytest.approx(math.log((hit - 0.01) / (1 - hit)))


def test_two_sides_that_never_meet_are_parted_in_the_middle_of_the_gap() -> None:
    scores = Scores(np.linspace(-1, 0, 50), np.linspace(10, 11, 50))
    delta, rule = sharpest_test(scores, {0.5: 0.0})
    assert delta == 0.5
    assert 2 < rule.threshold < 8
    assert bound_at(rule, scores, 0.5, 0.99)[1] == "the attack wins 100 of 100"


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_rare_event_on_either_side_and_of_either_neighbour_is_found(
    sign: int, present: bool
) -> None:
    """A fifth of one neighbour's scores lies where the other has none, against its mean."""
    rng = np.random.default_rng(0)
    plain = rng.random(400) * 2
    rare = np.where(rng.random(400) < 0.2, -1.0, 1 + rng.random(400))
    sides = (plain, rare) if present else (rare, plain)
    _, rule = sharpest_test(Scores(*(sign * side for side in sides)), {0.05: 0.5})
    assert rule.present == present
    assert rule.above == (sign < 0)
    assert -1 <= sign * rule.threshold < 0.01
