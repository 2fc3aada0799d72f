"""Laws of privacy losses: tight, above the true curve, and never below what a real batch leaks."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as peer
from dp_accounting.pld.common import self_convolve
from dp_accounting.pld.pld_pmf import DensePLDPmf
from scipy.optimize import brentq
from scipy.stats import binom, hypergeom, norm

from zdp_bench.privacy import loss_distribution as module
from zdp_bench.privacy.accounting import (
    gdp_epsilon,
    patients_share,
    pld,
    pld_uniform,
    pld_uniform_at_least,
    rdp,
)
from zdp_bench.privacy.loss_distribution import Law, Mixture, epsilon, one_example, several_examples
from zdp_bench.privacy.mechanism import Sampling

EPSILONS = np.concatenate([np.linspace(-4, 4, 41), [-0.01, -1e-3, 1e-3, 0.01, 0.1234]])


def law_delta(law: Law, at: float) -> float:
    losses = (law.first + np.arange(len(law.mass))) * law.width
    above = losses > at
    return law.infinite + float(np.sum(law.mass[above] * -np.expm1(at - losses[above])))


def remove_delta(z: float, q: float, at: float) -> float:
    """H_{e^at}((1−q)N(0, z²) + qN(1, z²) ‖ N(0, z²)): one threshold, two normal tails."""
    alpha = math.exp(at)
    if alpha <= 1 - q:
        return 1 - alpha
    x = 0.5 + z * z * math.log((alpha - 1 + q) / q)
    base = norm.sf(x / z)
    return float((1 - q) * base + q * norm.sf((x - 1) / z) - alpha * base)


def add_delta(z: float, q: float, at: float) -> float:
    """The reverse direction by H_α(P‖Q) = 1 − α + α·H_{1/α}(Q‖P)."""
    return 1 - math.exp(at) + math.exp(at) * remove_delta(z, q, -at)


def uniform_delta(z: float, q: float, at: float) -> float:
    """Zhu, Dong & Wang 2021, Proposition 30: one direction on each side of α = 1."""
    return remove_delta(z, q, at) if at >= 0 else add_delta(z, q, at)


CASES = [(1.1, 0.01), (0.5, 0.3), (3.0, 0.001), (0.05, 0.02), (50.0, 0.9), (1.0, 3e-5)]
CASES += [(0.8, 0.999)]


@pytest.mark.parametrize("steps", [1, 10_000])  # the two grids
@pytest.mark.parametrize(("z", "q"), CASES)
def test_every_law_lies_on_or_closely_above_its_curve(z: float, q: float, steps: int) -> None:
    remove, add = module.poisson_laws(z, one_example(q), steps, 1e-5)
    (uniform,) = module.uniform_laws(z, one_example(q), steps, 1e-5)
    for law, curve in ((remove, remove_delta), (add, add_delta), (uniform, uniform_delta)):
        assert math.fsum(law.mass) + law.infinite == pytest.approx(1, abs=1e-12)
        assert law.mass.min() >= 0
        for at in EPSILONS:
            true, ours = curve(z, q, at), law_delta(law, at)
            assert ours >= true - 1e-12
            # the curve's chord over one cell of the grid
            assert ours <= curve(z, q, at - law.width) + 1e-9
            assert ours <= true + 0.02 * q + 1e-9 or law.width > 0.01


@pytest.mark.parametrize(("z", "steps"), [(1.0, 1), (2.0, 50), (10.0, 1000)])
def test_a_batch_of_nearly_everyone_is_nearly_the_plain_gaussian(z: float, steps: int) -> None:
    closed = gdp_epsilon(math.sqrt(steps) / z, 1e-5)
    nearly = 1 - 1e-9
    assert pld_uniform(z, nearly, steps, 1e-5) == pytest.approx(closed, rel=2e-3)
    assert pld(z, nearly, steps, 1e-5) == pytest.approx(closed, rel=2e-3)


def real_batch_delta(
    first: list[float], other: list[float], size: int, z: float, at: float, steps: int
) -> float:
    """The exact δ of one or two noisy sums of a random batch, by integration on a grid."""
    x = np.linspace(-size - 9 * z, size + 9 * z, 1200)
    masses = []
    for data in (first, other):
        sums = np.array([sum(batch) for batch in itertools.combinations(data, size)])
        mass = norm.pdf(x[:, None], sums, z).mean(axis=1) * (x[1] - x[0])
        masses.append(np.multiply.outer(mass, mass) if steps == 2 else mass)
    return float(np.maximum(0.0, masses[0] - math.exp(at) * masses[1]).sum())


@pytest.mark.parametrize(("at", "steps"), [(0.0, 1), (0.2, 1), (0.2, 2), (1.0, 1)])
@pytest.mark.parametrize(("replaced", "size"), [(1, 1), (1, 2), (2, 2)])
def test_real_batches_never_leak_more_than_the_uniform_law(
    replaced: int, size: int, at: float, steps: int
) -> None:
    """Data sets of 5 numbers in [−1, 1], `replaced` of them changed from 1 to −1; σ = 2, z = 1."""
    chances = [
        math.comb(replaced, j) * math.comb(5 - replaced, size - j) / math.comb(5, size)
        for j in range(replaced + 1)
    ]
    (law,) = module.uniform_laws(1.0, several_examples(np.log(chances)), 1, 1e-5)
    if steps == 2:
        mass, infinite = np.convolve(law.mass, law.mass), 1 - (1 - law.infinite) ** 2
        law = Law(law.width, 2 * law.first, mass, infinite)
    for rest in ([0.0] * 4, [1.0] * 4, [-1.0] * 4, [1.0, 1.0, -1.0, -1.0], [0.3, -0.9, 0.5, 1.0]):
        rest = rest[: 5 - replaced]
        for a, b in ((1.0, -1.0), (-1.0, 1.0), (1.0, 0.0)):
            first, other = ([*rest, *[value] * replaced] for value in (a, b))
            delta = real_batch_delta(first, other, size, 2.0, at, steps)
            # the bound is attained; the grid of integration is not finer
            assert delta <= law_delta(law, at) + 1e-5


@pytest.mark.parametrize(("z", "q", "steps"), [(1.1, 0.01, 1000), (1.0, 0.1, 1), (10.0, 0.9, 100)])
def test_the_poisson_law_agrees_with_dp_accounting(z: float, q: float, steps: int) -> None:
    theirs = peer.from_gaussian_mechanism(z, sampling_prob=q, value_discretization_interval=3e-4)
    theirs = theirs.self_compose(steps) if steps > 1 else theirs
    assert pld(z, q, steps, 1e-5) == pytest.approx(theirs.get_epsilon_for_delta(1e-5), rel=5e-4)


def test_several_examples_agree_with_dp_accountings_mixture() -> None:
    z, q, k, steps = 1.3, 0.05, 3, 40
    chances = binom.pmf(np.arange(k + 1), k, q)
    theirs = peer.from_mixture_gaussian_mechanism(
        z, [*range(k + 1)], [*chances], value_discretization_interval=1e-2
    )
    ours = epsilon(
        module.poisson_laws(z, several_examples(np.log(chances)), steps, 1e-5), steps, 1e-5
    )
    assert ours == pytest.approx(theirs.self_compose(steps).get_epsilon_for_delta(1e-5), rel=2e-3)


@pytest.mark.parametrize("z", [0.05, 0.5, 1e6])
@pytest.mark.parametrize("q", [1e-6, 0.999])
@pytest.mark.parametrize("steps", [1, pytest.param(100_000, marks=pytest.mark.slow)])
def test_extremes_do_not_fail(z: float, q: float, steps: int) -> None:
    unsampled = gdp_epsilon(math.sqrt(steps) / z, 1e-5)
    for bound in (pld, pld_uniform):
        assert 0 <= bound(z, q, steps, 1e-5) <= unsampled * 1.02 + 1e-6  # sampling does not hurt


def test_a_delta_below_the_rounding_of_the_fft_falls_back_to_moments() -> None:
    for delta in (1e-13, 1e-15):
        value = pld(5.0, 0.1, 100_000, delta)
        assert value <= rdp(5.0, 0.1, 100_000, delta) * 1.01
        assert value > pld(5.0, 0.1, 100_000, 100 * delta)
    assert pld(1.1, 0.01, 1000, 1e-18) > pld(1.1, 0.01, 1000, 1e-12) > pld(1.1, 0.01, 1000, 1e-9)


@pytest.mark.parametrize(
    ("z", "q", "steps", "delta"), [(10, 4e-6, 10**6, 1e-10), (100, 1e-5, 10**5, 1e-11)]
)
def test_steps_that_leak_hardly_anything_have_an_epsilon(
    z: float, q: float, steps: int, delta: float
) -> None:
    """Their log-moments are smaller than its rounding, which made ε 0."""
    lowest = pld_uniform_at_least(z, q, steps, delta)
    assert 0 < lowest <= pld_uniform(z, q, steps, delta) < 20 * lowest
    in_the_limit = gdp_epsilon(q * math.sqrt(steps * math.expm1(z**-2)), delta)
    assert in_the_limit <= pld(z, q, steps, delta) < 20 * in_the_limit


def test_what_rounding_may_hide_is_charged_to_delta() -> None:
    """Near the FFT's floor the answer must lie above what the composed law says at δ itself."""
    steps = 100_000
    (law,) = module.uniform_laws(1.1, one_example(0.01), steps, 1e-11)
    _, composed = self_convolve(law.mass, steps, 1e-16)
    delta = 5 * len(composed) * abs(min(composed))
    offset, mass = self_convolve(law.mass, steps, min(1e-15, 1e-4 * delta))
    infinite = min(1e-15, 1e-4 * delta) + steps * law.infinite
    as_it_stands = DensePLDPmf(
        law.width, law.first * steps + offset, np.array(mass), infinite, True
    ).get_epsilon_for_delta(delta)
    assert epsilon((law,), steps, delta) > as_it_stands + 1e-3


@pytest.mark.parametrize("mass", [[0.9, 0.1], [0.5, 0.0, 0.25, 0.25], [1e-9, 0.3, 0.7 - 1e-9]])
@pytest.mark.parametrize("steps", [2, 7, 30])
def test_few_cells_are_composed_up_to_what_is_charged_for_rounding(
    mass: list[float], steps: int
) -> None:
    """Against fractions. The smallest cell is no rounding, and so is not charged for each cell."""
    exact = [Fraction(1)]
    for _ in range(steps):
        sums = [Fraction(0)] * (len(exact) + len(mass) - 1)
        for i, cell in enumerate(exact):
            for j, other in enumerate(mass):
                sums[i + j] += cell * Fraction(other)
        exact = sums
    composed = module._compose(Law(1.0, -1, np.array(mass), 0.0), steps, 1e-5)
    assert composed.first == -steps
    assert len(composed.mass) == len(exact)
    errors = [abs(Fraction(float(x)) - y) for x, y in zip(composed.mass, exact, strict=True)]
    assert sum(errors) <= composed.rounding == len(exact) * 2**-52
    assert composed.truncated == 0


@pytest.mark.parametrize(
    ("cells", "steps", "is_short"), [(2, 4095, True), (2, 4096, False), (1366, 3, True)]
)
def test_an_fft_composes_4096_cells_or_more(cells: int, steps: int, is_short: bool) -> None:
    law = Law(0.01, 0, np.full(cells, 1 / cells), 0.0)
    assert (module._compose(law, steps, 1e-5).truncated == 0) == is_short
    as_it_is = module._compose(law, 1, 1e-5)
    assert as_it_is.mass is law.mass
    assert as_it_is.truncated == as_it_is.rounding == 0
    shorter, longer = np.full(128, 1 / 128), np.full(1000, 1e-3)
    for pair in ((shorter, longer), (longer, shorter)):
        assert module._convolve(*pair)[1] == 128 * 2**-52
    convolved, rounding = module._convolve(np.full(129, 1 / 129), longer)
    assert rounding == len(convolved) * abs(convolved.min())


def normal_losses(spread: float) -> Law:
    """Losses around spread²/2 on 81 points."""
    points = np.arange(-40, 41)
    weights = norm.pdf(points * 0.05, spread**2 / 2, spread)
    return Law(0.05, -40, weights / weights.sum(), 1e-20)


NO_LOSS = Law(1.0, 0, np.array([1.0]), 0.0)  # its moments are nothing but rounding


@pytest.mark.parametrize(
    ("parts", "delta", "expected"),
    [
        ([(normal_losses(0.3), 3)], 1e-15, 4.2074369016),  # the best order is 16.5
        ([(normal_losses(0.5), 400)], 1e-15, 131.47453953),  # 1.8
        ([(normal_losses(0.3), 3), (normal_losses(0.5), 20)], 1e-15, 20.919203289),
        ([(NO_LOSS, 10**16)], 1e-15, 0.012434092012),
    ],
)
def test_an_epsilon_by_moments_is_the_same_from_version_to_version(
    parts: list[tuple[Law, int]], delta: float, expected: float
) -> None:
    assert module._epsilon_by_moments(parts, delta) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("share", "by_moments"), [(0.4, False), (0.5, False), (0.51, True)])
def test_moments_bound_epsilon_where_rounding_may_hide_more_than_half_of_delta(
    monkeypatch: pytest.MonkeyPatch, share: float, by_moments: bool
) -> None:
    monkeypatch.setattr(module, "_fft_rounding", lambda _: share * 1e-3)
    monkeypatch.setattr(module, "_epsilon_by_moments", lambda *_: -1.0)
    epsilon = module._epsilon([(normal_losses(0.3), 100)], 1e-3)
    assert (epsilon == -1.0) == by_moments


@pytest.mark.parametrize("delta", [1e-5, 1e-13])
def test_what_composing_cuts_off_is_little_beside_delta(delta: float) -> None:
    """It counts as disclosure, so ε grows by it."""
    (law,) = module.uniform_laws(1.1, one_example(0.01), 100, delta)
    composed = module._compose(law, 100, delta)
    assert 0 < composed.truncated <= 1e-4 * delta


# ------------------------------------------------------------------------------------- lower bounds


def test_the_attack_agrees_with_dp_accountings_bounds_on_the_same_pair() -> None:
    """Theirs from below rounds every loss down, which costs more than our charge for rounding."""
    z, q, steps = 2.0, 0.1, 300
    below, above = (
        peer.from_gaussian_mechanism(
            z, sampling_prob=q, pessimistic_estimate=up, use_connect_dots=up
        )
        .self_compose(steps)
        .get_epsilon_for_delta(1e-5)
        for up in (False, True)
    )
    ours = module.epsilon_at_least(module.attack_law(z, one_example(q), steps, 1e-5), steps, 1e-5)
    assert below <= ours <= above
    assert ours > 0.998 * above


@pytest.mark.parametrize(("z", "q"), [case for case in CASES if case[1] > 1e-4])
def test_the_attack_on_one_step_reaches_delta(z: float, q: float) -> None:
    for delta in (1e-7, 1e-5, 1e-3):
        at = module.epsilon_at_least(module.attack_law(z, one_example(q), 1, delta), 1, delta)
        assert at == 0 or remove_delta(z, q, at) >= delta
        assert remove_delta(z, q, 1.01 * at + 1e-6) <= delta


def test_rounding_is_charged_to_a_lower_bound_however_coarse_the_grid() -> None:
    """Steps without sampling, which have a closed form."""
    for steps, cell in itertools.product((1, 8, 64), (0.01, 0.1, 0.5)):
        law = grid_of_a_gaussian(8.0, cell)
        exact = gdp_epsilon(math.sqrt(steps) / 8, 1e-4)
        assert epsilon((law,), steps, 1e-4) >= exact * (1 - 1e-9)
        least = exact - (4.5 * math.sqrt(steps) + 2) * cell
        assert least < module.epsilon_at_least(law, steps, 1e-4) <= exact


@pytest.mark.parametrize("steps", [1, 10_000])
def test_what_a_lower_bound_gives_up_for_rounding_is_hoeffdings(steps: int) -> None:
    surely = Law(0.01, 5, np.array([1.0, 0.0, 0.0]), 0.0)  # a loss of 0.05
    lost = 0.01 * min(steps, steps * 0.01 / 8 + math.sqrt(steps * math.log(1e8) / 2))
    expected = 0.05 * steps + math.log1p(-1e-5 - 1e-8) - lost
    assert module.epsilon_at_least(surely, steps, 1e-5) == pytest.approx(expected, rel=1e-9)


def grid_of_a_gaussian(z: float, width: float) -> Law:
    """The law that connects the dots of N(1, z²) against N(0, z²), by dp-accounting."""
    theirs = peer.from_gaussian_mechanism(z, value_discretization_interval=width)
    pmf = theirs._pmf_remove.to_dense_pmf()
    return Law(width, pmf._lower_loss, np.asarray(pmf._probs), pmf._infinity_mass)


@pytest.mark.parametrize(("replaced", "size", "z", "steps"), [(1, 3, 1.0, 3), (3, 4, 2.0, 2)])
def test_the_attack_succeeds_on_real_batches(
    replaced: int, size: int, z: float, steps: int
) -> None:
    """Batches of ten numbers, −½ but for those replaced, +½, are told apart by the likelihood."""
    delta, draws, rng = 0.01, 400_000, np.random.default_rng(5)
    chances = hypergeom.pmf(np.arange(min(replaced, size) + 1), 10, replaced, size)
    law = module.attack_law(z, several_examples(np.log(chances)), steps, delta)
    low = module.epsilon_at_least(law, steps, delta)
    data = np.full(10, -0.5)
    data[:replaced] = 0.5
    loss = np.zeros(draws)
    for _ in range(steps):
        batch = np.argpartition(rng.random((draws, 10)), size, axis=1)[:, :size]
        x = data[batch].sum(axis=1) + z * rng.standard_normal(draws)
        means = -size / 2 + np.arange(len(chances))
        loss += np.log(norm.pdf(x[:, None], means, z) @ chances) - norm.logpdf(x, -size / 2, z)

    def reached(at: float) -> float:
        return float(np.maximum(0.0, -np.expm1(np.minimum(0.0, at - loss))).mean())

    error = 4 * math.sqrt(delta / draws)
    assert low > 0.3
    assert reached(low) >= delta - error
    assert reached(1.03 * low) <= delta + error


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("z", [0.3, 1.0, 30.0])
def test_each_loss_is_found_where_it_is_taken(count: int, z: float) -> None:
    """Over all of the line whose mass is kept, and in the cell in which it ends."""
    weights = binom.logpmf(np.arange(count + 1), count, 0.05)
    ends = np.array([-module.TAIL * z, count + (module.TAIL + 0.9) * z])
    losses = np.linspace(*module._loss(ends, z, weights), 500)[1:]
    loss = module._loss(module._where(losses, z, weights), z, weights)
    np.testing.assert_allclose(loss, losses, rtol=1e-9, atol=1e-12)


def test_a_loss_at_its_infimum_or_below_is_taken_nowhere() -> None:
    """Whatever rounding leaves of e^ε − w₀, which is 0 there."""
    for rate in np.linspace(0.01, 0.99, 99):
        weights = np.array(one_example(rate).log_weights)
        losses = np.array([weights[0] - 1, weights[0]])
        assert module._where(losses, 1.0, weights).tolist() == [-math.inf, -math.inf]


def test_rounding_leaves_no_negative_mass() -> None:
    law = Law(1.0, -1, np.array([0.5, 0.0, 0.5 + 2**-52]), 0.0)
    assert module._whole(law, 0.0, rest=1).mass.tolist() == law.mass.tolist()


def test_mass_that_is_not_finite_makes_epsilon_infinite() -> None:
    law = Law(1.0, 0, np.array([math.inf, 0.5]), 0.0)
    assert epsilon((module._whole(law, 0.0),), 1, 1e-5) == math.inf


def test_both_tails_of_a_normal_law_keep_their_digits() -> None:
    """Also beyond 38, where its distribution function is 1 to the last digit."""
    starts = np.linspace(-60.0, 60.0, 241)
    mass = module._log_mass(starts, starts + 0.5)
    np.testing.assert_allclose(mass, module._log_mass(-starts - 0.5, -starts), rtol=1e-13)
    far = starts[starts >= 3]
    below = np.log1p(-np.exp(norm.logsf(far + 0.5) - norm.logsf(far)))
    np.testing.assert_allclose(mass[starts >= 3], norm.logsf(far) + below, rtol=1e-12)


def test_a_shared_grid_has_a_fixed_number_of_cells_per_spread() -> None:
    """Of steps that draw everyone: losses with mean 1/(2z²) and variance 1/z²."""
    everyone = one_example(1 - 1e-9)
    squares = [1 / z**2 + 1 / (4 * z**4) for z in (2.0, 4.0)]
    width = module.shared_width([(2.0, everyone, 5), (4.0, everyone, 15)], 1e-5)
    spread = math.sqrt((5 * squares[0] + 15 * squares[1]) / 20)
    assert width == pytest.approx(spread / module.MIXED, rel=1e-3)
    many = 10**6  # whose losses the cells hold, however wide they have to be
    width = module.shared_width([(2.0, everyone, many)], 1e-5)
    assert width * module.CELLS >= 20 * math.sqrt(many * squares[0])


def test_a_grid_is_as_wide_as_its_cells_its_tails_and_its_rounding_need() -> None:
    rare = one_example(1e-7)  # of great losses, which are far above the mean spread
    extent = module._extent(0.1, rare, 1, 1e-5)
    width, _ = module._grid(0.1, rare, 1, 1e-5)
    assert width == pytest.approx(2 * extent.highest / 2**19, rel=1e-12)  # in both directions
    assert module._grid(1e7, one_example(0.5), 1, 1e-5)[0] == 1e-9
    lower_bound = module.attack_law(0.1, rare, 1, 1e-5)
    assert lower_bound.width == pytest.approx(2 * extent.highest / 2**21, rel=1e-12)
    # no δ is so small that more than ten standard deviations are kept
    assert module._extent(2.0, rare, 1, 1e-30).top == pytest.approx(1 + 10 * 2.0, rel=1e-12)


def test_an_infinite_loss_is_charged_to_delta_and_lowers_no_divergence() -> None:
    """The finite losses alone have a moment below 1."""
    lossless = Law(1.0, 0, np.array([0.9]), 0.1)
    expected = module._epsilon_by_moments([(NO_LOSS, 1)], 1e-15)
    epsilon = module._epsilon_by_moments([(lossless, 1)], 0.1 + 1e-15)
    assert epsilon == pytest.approx(expected, rel=1e-3)


def replaced_delta(drawn: Mixture, z: float, at: float) -> float:
    """The exact δ ≥ 0 of `uniform_laws`: the mean of two normal laws' over the j that are drawn."""
    _, *log_drawn = drawn.log_weights
    shifted = math.log1p(math.expm1(at) / drawn.drawn)  # log α'
    deltas = []
    for j, log_weight in enumerate(log_drawn, start=1):
        x = j / 2 + z * z * shifted / j
        one = norm.sf((x - j) / z) - math.exp(shifted + norm.logsf(x / z))
        deltas.append(math.exp(log_weight) * one)
    return math.fsum(deltas) + drawn.excess


# Examples, batch, a patient's examples, z and steps: the grids had 4.4, 18, 50 and 10⁸ cells.
HARD = {
    "few": (39_409, 4, 9, 1.695, 40),
    "more": (442_827, 10, 18, 2.287, 15),
    "loud": (1_890_584, 4, 9, 0.74, 3),
    "rare": (10**9, 10, 3, 1.0, 1000),
    "common": (1000, 100, 30, 2.0, 100),
}


@pytest.mark.parametrize("name", HARD)
def test_several_replaced_examples_take_bounded_cells_and_leak_no_more_than_the_grid_says(
    name: str,
) -> None:
    """A j that is hardly ever drawn has the largest losses, which stretched the grid."""
    records, batch, count, z, steps = HARD[name]
    drawn = patients_share(Sampling("uniform", batch / records, batch, records), count)
    (law,) = module.uniform_laws(z, drawn, steps, 1e-5)
    assert len(law.mass) <= module.CELLS + 8
    assert law.infinite <= module.CUT * 1e-5 / steps + drawn.excess
    assert law.mass.sum() + law.infinite == pytest.approx(1, abs=1e-12)
    highest = law.losses[-1]
    for at in (0.0, 1e-9, 1e-6, 1e-3, 0.1, 1.0, highest / 10, highest / 2):
        exact = replaced_delta(drawn, z, at)
        assert exact <= law_delta(law, at) + 1e-15
    for at in (0.0, highest / 1000, highest / 100):
        assert law_delta(law, at) <= 1.05 * replaced_delta(drawn, z, at) + 2 * law.infinite


def test_steps_of_kinds_with_several_replaced_examples_share_a_grid_of_bounded_cells() -> None:
    records, batch, count, z, _ = HARD["loud"]
    drawn = patients_share(Sampling("uniform", batch / records, batch, records), count)
    width = module.shared_width([(z, drawn, 2), (2 * z, drawn, 1)], 1e-5, is_uniform=True)
    for noise in (z, 2 * z):
        (law,) = module.uniform_laws(noise, drawn, 3, 1e-5, width)
        assert len(law.mass) <= module.CELLS + 8


def test_an_epsilon_that_is_not_a_number_is_infinite() -> None:
    """A budget that compares with NaN allows everything."""
    for mass, infinite in ([math.nan, 1.0], 0.0), ([0.5, math.nan], 0.0), ([1.0], math.nan):
        unknown = Law(1.0, 0, np.array(mass), infinite)
        for steps in (1, 3):
            assert epsilon((NO_LOSS, unknown), steps, 1e-5) == math.inf
            if not math.isnan(infinite):
                assert module.epsilon_at_least(unknown, steps, 1e-5) == 0.0


def test_a_mixture_keeps_the_chance_of_one_however_small() -> None:
    assert several_examples(np.array([0.0, -100.0])).log_weights == (0.0, -100.0)
    cut = several_examples(np.array([0.0, -10.0, -100.0, -101.0]))
    assert cut.log_weights == (0.0, -10.0)
    assert cut.excess == pytest.approx(math.exp(-100) + math.exp(-101))


def exact_delta(chances: np.ndarray, z: float, at: float) -> float:
    """The δ of one Poisson step with these probabilities of j drawn, the worse direction's."""
    j = np.arange(len(chances))

    def loss(x: float) -> float:
        return float(np.log(chances @ np.exp((j * x - j * j / 2) / z**2)))

    deltas = []
    for level in (at, -at):
        least = math.log(chances[0]) if chances[0] > 0 else -math.inf
        t = brentq(lambda x, level=level: loss(x) - level, -100, 100) if level > least else -100.0
        deltas.append((float(chances @ norm.sf((t - j) / z)), float(norm.sf(t / z))))
    (removed, without), (by_added, added) = deltas
    below, below_with = 1 - added, 1 - by_added
    return max(removed - math.exp(at) * without, below - math.exp(at) * below_with)


@pytest.mark.parametrize("z", [1.0, 4.0])
def test_a_step_that_draws_most_costs_at_least_what_each_does(z: float) -> None:
    """In closed form, of one step of each law and both directions."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        laws = []
        for _ in range(3):
            chances = rng.dirichlet(np.full(rng.integers(2, 7), 0.5))
            laws.append(np.maximum(chances, 1e-12) / np.maximum(chances, 1e-12).sum())
        most = module.most_drawn([several_examples(np.log(chances)) for chances in laws])
        weights = np.exp(most.log_weights)
        assert weights.sum() == pytest.approx(1, rel=1e-12)
        for chances in laws:
            for start in range(len(chances)):
                assert weights[start:].sum() >= chances[start:].sum() * (1 - 1e-12)
            for at in (0.0, 0.3, 2.0):
                assert exact_delta(chances, z, at) <= exact_delta(weights, z, at) + 1e-12


def test_of_laws_that_draw_most_nothing_is_added_to_a_single() -> None:
    rare = one_example(1e-20)
    assert module.most_drawn([rare]).log_weights == pytest.approx(rare.log_weights, rel=1e-14)
    cut = Mixture((math.log(0.5), math.log(0.5)), 0.25)
    assert module.most_drawn([rare, cut]).excess == 0.25


THREE_DRAWN = several_examples(binom.logpmf(np.arange(4), 3, 0.05))
TWO_REPLACED = several_examples(hypergeom.logpmf(np.arange(3), 100, 2, 10))
# Laws, and of each: width, first, cells, infinite mass, mean of tanh(loss), sum of squared masses.
PINNED = {
    "few": (
        lambda: module.poisson_laws(0.8, one_example(0.02), 64, 1e-5),
        (9.621064509e-5, -210, 50910, 1.554890127e-12, 5.439246695e-4, 3.361017409e-3),
        (9.621064509e-5, -50699, 50910, 0.0, 6.940137940e-4, 3.455269460e-3),
    ),
    "many": (
        lambda: module.poisson_laws(1.1, one_example(0.01), 65, 1e-5),
        (2.833386375e-4, -36, 6198, 1.521164044e-12, 6.097904366e-5, 1.609538541e-2),
        (2.833386375e-4, -6161, 6198, 0.0, 6.406347480e-5, 1.624424182e-2),
    ),
    "several": (
        lambda: module.poisson_laws(1.3, THREE_DRAWN, 40, 1e-6),
        (3.473584451e-4, -443, 22836, 2.485609848e-13, 6.520821669e-3, 1.206160038e-3),
        (3.473584451e-4, -22392, 22836, 0.0, 8.713490932e-3, 1.336701393e-3),
    ),
    "uniform": (
        lambda: module.uniform_laws(2.0, one_example(0.1), 300, 1e-5),
        (1.331255690e-3, -1124, 2249, 3.267166279e-13, 1.818344576e-3, 3.977356050e-2),
    ),
    "several replaced": (
        lambda: module.uniform_laws(1.5, TWO_REPLACED, 20, 1e-5),
        (3.804723872e-4, -19351, 38703, 4.920622253e-12, 1.371090898e-2, 4.944542350e-2),
    ),
    "attack": (
        lambda: (module.attack_law(2.0, one_example(0.1), 300, 1e-5),),
        (5.325022758e-5, -1967, 30062, 3.285864743e-13, 1.304943335e-3, 3.451082488e-4),
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_laws_are_the_same_from_version_to_version(name: str) -> None:
    """Each record states an ε of them: if these change, say so in the changelog."""
    make, *expected = PINNED[name]
    laws = []
    for law in make():
        moments = float(law.mass @ np.tanh(law.losses)), float(np.square(law.mass).sum())
        laws.append((law.width, law.first, len(law.mass), law.infinite, *moments))
    for law_found, law_expected in zip(laws, expected, strict=True):
        assert law_found == pytest.approx(law_expected, rel=3e-9, abs=1e-20)


@pytest.mark.parametrize(
    ("kinds", "width"),
    [
        ([(1.0, one_example(0.05), 100), (2.0, THREE_DRAWN, 7)], 5.521243754919e-4),
        ([(0.3, one_example(0.5), 10**6)], 0.15981623648940),
    ],
)
def test_shared_grids_are_the_same_from_version_to_version(kinds: list, width: float) -> None:
    assert module.shared_width(kinds, 1e-5) == pytest.approx(width, rel=1e-9)


def test_where_no_example_can_lie_there_is_no_mass_in_either_direction() -> None:
    remove, add = module.poisson_laws(0.02, one_example(0.999), 10**6, 1e-5)
    is_empty = remove.mass == 0
    assert is_empty.any()
    assert not add.mass[::-1][is_empty].any()
