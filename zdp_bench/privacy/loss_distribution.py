"""The privacy loss distribution of one step, tight even if a million steps are composed.

A step is dominated by a pair of distributions on the line, U against V (Zhu, Dong & Wang 2021,
Definition 7): no attack tells neighbours apart better than U from V, and composing steps composes
pairs. The pairs here are mixtures of normal laws around whole shifts, in units of the largest shift
of ONE example, with standard deviation z:

    poisson   U = Σⱼ wⱼ N(j, z²) against V = N(0, z²), and V against U, whichever is worse. j counts
              how many of the added or removed examples were drawn: 0 or 1 for one example, binomial
              for a patient's (Zhu, Dong & Wang 2021, Theorem 11; Ganesh 2024, 'Tight group-level DP
              guarantees for DP-SGD with sampling via mixture of Gaussians mechanisms').
    uniform   a fixed-size batch without replacement, examples REPLACED. Neither direction alone is
              a bound under composition: the proven profile is that of U against V for α ≥ 1 and of
              V against U mirrored for α < 1 (Zhu, Dong & Wang 2021, Proposition 30), a law of
              losses symmetric in the sense P(−ℓ) = e^(−ℓ) P(ℓ), with an atom at 0.
    attack    the law of two data sets that exist, so its ε is a lower bound on `uniform`'s.

Composition, tail truncation and the conversion to ε are dp-accounting's. The grid of ONE step is
ours: dp-accounting takes second differences of δ(ε), whose rounding error (1e-16 / step of the
grid, in every cell) exceeds the law of a step that leaks little and is taken 10⁵ times. Here each
cell's mass is computed by itself, in logarithms, and split over the cell's two ends so that both
U's and V's mass are kept: the same Connect-the-Dots law (Doroshenko et al. 2022, Algorithm 1),
pessimistic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zdp_bench.lazy import LazyModule

dp_accounting = LazyModule("dp_accounting")
signal = LazyModule("scipy.signal")
special = LazyModule("scipy.special")

# Cells per standard deviation of a step's loss: FINE up to FEW steps, COARSE for more.
FINE, COARSE, FEW = 400, 40, 64
MIXED = 120  # the same, of the mean spread, where steps of several kinds share a grid
CELLS = 2**19  # at most, in all
LEAST_WIDTH = 1e-9  # of a cell
MOST_LOSS = 1e15  # of one step; higher losses count as infinite
FINEST, MOST_CELLS = 1000, 2**21  # for a lower bound, which loses all of its rounding
TAIL = 10.0  # standard deviations kept of every normal law; 8e-24 beyond counts as disclosure
MOMENT_ROUNDING = 1e-14  # at most, of the logarithm of a law's moment; 6e-16 were seen
SHORT = 2**12  # cells, at most, of composed steps that are convolved without an FFT
FEW_CELLS = 128  # at most, of a law that is convolved with any other without an FFT
SUM_ROUNDING = 2.0**-52  # at most, of a sum of probabilities, relative, for each of its terms
MOST_WEIGHTS = 2**12  # of a mixture whose law is computed
MOST_LOST = 600.0  # the log of V/U, at most: beyond 745, U would be 0 where V is not
AT_ONCE = 2**22  # numbers that are computed at once
CUT = 1e-5  # the share of δ that the cut upper tails of all steps together may hold


@dataclass(frozen=True)
class Mixture:
    """The law of how many of the differing examples a step draws: `log_weights[j]` is log P(j).

    Attributes:
        excess: the probability of more, counted as disclosure.
    """

    log_weights: tuple[float, ...]
    excess: float = 0.0

    @property
    def drawn(self) -> float:
        """The probability that any is drawn."""
        return -math.expm1(self.log_weights[0])


def one_example(sample_rate: float) -> Mixture:
    """Return the law of one example that is drawn with probability `sample_rate` < 1."""
    log_missed = math.log1p(-sample_rate)
    return Mixture((log_missed, math.log(sample_rate)))


def several_examples(log_weights: np.ndarray) -> Mixture:
    """Return the law of several examples; a tail of less than 1e-30 counts as disclosure."""
    from_largest = np.logaddexp.accumulate(log_weights[::-1])
    at_least = np.exp(from_largest[::-1])  # P(j or more)
    kept = max(2, int(np.searchsorted(-at_least, -1e-30)))
    weights = tuple(float(weight) for weight in log_weights[:kept])
    return Mixture(weights, float(at_least[kept:].max(initial=0.0)))


def most_drawn(laws: Sequence[Mixture]) -> Mixture:
    """Return a law of a step whose ε, after any steps, is at least that of each of some laws.

    It draws j or more examples with the largest probability with which any of the laws does.

    Proof that a step costs at least as much if it draws more in this (the stochastic) order, for
    each α. Poisson: U/V grows with x, so U and V are told apart best by some threshold t, and
    U(x > t) = Σⱼ wⱼ P(N(j, z²) > t) is the mean of an increasing function of j. Uniform: the
    profile is the mean over j of H_α'(N(j, z²), N(0, z²)), which increases with j and is 0 for j =
    0; and α' falls as w₀ does.
    """
    num_weights = max(len(law.log_weights) for law in laws)
    log_at_least = np.full((len(laws), num_weights), -math.inf)
    for number, law in enumerate(laws):
        from_largest = np.logaddexp.accumulate(law.log_weights[::-1])
        log_at_least[number, : len(law.log_weights)] = from_largest[::-1]
    at_least = np.exp(log_at_least.max(axis=0))[1:]  # P(j or more), of j from 1
    weights = at_least - np.append(at_least[1:], 0.0)
    with np.errstate(divide="ignore"):
        log_missed = np.log1p(-min(1.0, at_least[0]))
        log_drawn = np.log(np.maximum(weights, 0.0))
    excess = max(law.excess for law in laws)
    return Mixture((float(log_missed), *map(float, log_drawn)), excess)


@dataclass(frozen=True)
class Law:
    """Privacy losses on a grid: `mass[i]` at loss (first + i)·width, `infinite` at ∞."""

    width: float
    first: int
    mass: np.ndarray
    infinite: float

    @property
    def losses(self) -> np.ndarray:
        """The loss at every cell of `mass`."""
        return (self.first + np.arange(len(self.mass))) * self.width


def poisson_laws(
    z: float,
    drawn: Mixture,
    steps: int,
    delta: float,
    width: float | None = None,
) -> tuple[Law, Law]:
    """Return the laws of ONE Poisson-sampled step, for examples removed and for examples added.

    Args:
        z: noise standard deviation in units of one example's largest shift; finite, positive.
        drawn: how many of the added or removed examples a step draws.
        steps, delta: choose the grid.
        width: that of the grid, to compose the laws with others; see `shared_width`.
    """
    own_width, top = _grid(z, drawn, steps, delta)
    return _poisson_laws(z, drawn, width or own_width, top)


def uniform_laws(
    z: float,
    drawn: Mixture,
    steps: int,
    delta: float,
    width: float | None = None,
) -> tuple[Law]:
    """Return the law of ONE step with a fixed-size batch, for replaced examples.

    Args:
        z: noise standard deviation in units of the largest shift that replacing ONE drawn example
            makes (2C for shares up to C).
        drawn: how many of the replaced examples a step draws.
        width: as for `poisson_laws`.

    Proof for several examples (one example is Proposition 30 of Zhu, Dong & Wang 2021): given j
    drawn, batches of the two data sets can be paired so that the sum moves by j shifts, and a batch
    with j of them can be paired with one that has none so that it moves by j shifts as well.
    Advanced joint convexity (Balle, Barthe & Gaboardi 2018, Theorem 2) gives, for α ≥ 1, the
    profile Σⱼ wⱼ H_α'(N(j, z²), N(0, z²)) with α' = 1 + (α − 1)/(1 − w₀): the mean over j, given
    that any is drawn, of the one-example profile with shift j and sample rate 1 − w₀. The relation
    is symmetric, which gives α < 1.
    """
    own_width, highest = _replaced_grid(z, drawn, steps, delta)
    return _uniform_laws(z, drawn, width or own_width, highest)


def replaced_epsilon(
    z: float,
    sample_rate: float,
    steps: int,
    delta: float,
) -> float:
    """Return the ε of Poisson batches for a share that is replaced by any other, by dp-accounting.

    Args:
        z: noise standard deviation in units of the largest share, C; replacing moves a sum by 2C.

    Proof that the shares 1 and −1 are told apart best, of all a and b with norms up to 1: let α be
    given, q be the rate and c = (1 − q)(α − 1). The hockey-stick divergence is E[(qX − αqY − c)₊]
    with X = e^(u − |a|²/2z²) and Y = e^(v − |b|²/2z²), where (u, v) is normal with variances
    |a|²/z² and |b|²/z² and covariance a·b/z². It is convex in X and in Y, so it grows with either
    variance (X gets an independent factor of mean 1; Jensen). Its derivative in the covariance is
    E[XY ∂²/∂X∂Y] ≤ 0 (Price's theorem), for q and −αq differ in sign. So it is largest where both
    variances are and the covariance is least.
    """
    width, _ = _grid(z / 2, one_example(sample_rate), steps, delta)
    step = dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
        z,
        value_discretization_interval=width,
        sampling_prob=sample_rate,
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
    )
    return float(step.self_compose(steps).get_epsilon_for_delta(delta))


def attack_law(
    z: float,
    drawn: Mixture,
    steps: int,
    delta: float,
) -> Law:
    """Return the law of ONE fixed-size batch for the two most distinguishable data sets.

    It is a lower bound for `uniform_laws`, whose `z` and `drawn` it takes.

    All other examples have the share −v, with ‖v‖ = C. The replaced ones go from v to −v, so that
    each one drawn takes the place of a −v and moves the sum by 2C: (1 − w₀)-mixture against one
    normal law, `poisson`'s U against V. Every other pair that was tried is told apart less, in both
    directions: V against U; the others at 0; the others between 0 and −v. Choosing a new pair at
    every step, from what earlier steps showed, gains less than 1 %.
    """
    width, top = _grid(z, drawn, steps, delta, FINEST, MOST_CELLS)
    removed, _ = _poisson_laws(z, drawn, width, top)
    return removed


def has_law(z: float, drawn: Mixture, is_uniform: bool) -> bool:
    """Return True if doubles hold the laws of a step, and computing them does not take minutes.

    Args:
        z, drawn: as for the laws.
        is_uniform: whether they are `uniform_laws`, whose U is nowhere far below V.
    """
    if len(drawn.log_weights) > MOST_WEIGHTS:
        return False
    (lowest,) = _loss(np.array([-TAIL * z]), z, np.array(drawn.log_weights))
    return is_uniform or bool(lowest > -MOST_LOST)


def epsilon(
    laws: tuple[Law, ...],
    steps: int,
    delta: float,
) -> float:
    """Return an upper bound on the ε of `steps` steps at `delta`, the worst over the laws."""
    return epsilon_together([(laws, steps)], delta)


def epsilon_together(
    parts: Sequence[tuple[tuple[Law, ...], int]],
    delta: float,
) -> float:
    """Return an upper bound on the ε of steps of several kinds, one after the other, at `delta`.

    Args:
        parts: of each kind the laws, in one order (examples removed, examples added), and its
            number of steps.
        delta: at which ε is stated.
    """
    first_laws, _ = parts[0]
    bounds = []
    for direction in range(len(first_laws)):
        own_parts = [(laws[direction], steps) for laws, steps in parts]
        bounds.append(_epsilon(own_parts, delta))
    return max(bounds)


def shared_width(
    kinds: Sequence[tuple[float, Mixture, int]],
    delta: float,
    is_uniform: bool = False,
) -> float:
    """Return the width of a grid on which steps of several kinds (z, drawn, steps) are composed.

    It is small beside the mean spread of a step's loss, as far as the number of cells allows.

    Args:
        kinds: the kinds.
        delta: at which ε is stated.
        is_uniform: whether `uniform_laws` are composed. Default: `poisson_laws`.
    """
    num_steps = sum(steps for _, _, steps in kinds)
    extent_of = _replaced_extent if is_uniform else _extent
    extents = [extent_of(z, drawn, num_steps, delta) for z, drawn, _ in kinds]
    highest = max(extent.highest for extent in extents)
    variance = 0.0
    for extent, (_, _, steps) in zip(extents, kinds, strict=True):
        variance += steps * extent.spread**2
    finest = math.sqrt(variance / num_steps) / MIXED
    return _width(finest, highest, math.sqrt(variance), CELLS)


def epsilon_at_least(
    law: Law,
    steps: int,
    delta: float,
) -> float:
    """Return a lower bound on the ε of `steps` steps for the data sets behind `law`.

    Proof. The grid counts a loss ℓ between two points as either of them, at random, so that the
    mean of e^(−ℓ) is kept. By Hoeffding's lemma this raises a step's mean loss by at most width²/8.
    The steps are independent, so by Hoeffding's inequality all together are raised by more than
    steps·width²/8 + width·√(steps·ln(1/p)/2) with probability at most p. So δ(ε) is at least the
    grid's δ at ε plus that, less p. What is lost in tails and in the FFT's rounding counts as no
    disclosure.
    """
    p = delta / 1000
    raised = steps * law.width / 8
    fluctuation = math.sqrt(steps * math.log(1 / p) / 2)
    deviation = raised + fluctuation
    rounding = law.width * min(steps, deviation)
    composed = _compose(law, steps, delta)
    if math.isnan(float(composed.mass.sum())):
        return 0.0
    # losses below 0 do not matter for an ε of at least 0, and can overflow
    negative = max(0, -composed.first)
    grid = dp_accounting.pld.pld_pmf.DensePLDPmf(
        law.width,
        composed.first + negative,
        composed.mass[negative:],
        0.0,
        pessimistic_estimate=False,
    )
    hidden = composed.truncated + composed.rounding
    epsilon_of_grid = float(grid.get_epsilon_for_delta(delta + p + hidden))
    return max(0.0, epsilon_of_grid - rounding)


class _Composed(NamedTuple):
    """The finite losses of composed steps.

    Attributes:
        mass: the probability of each loss.
        first: the first grid point.
        truncated: what was cut off in the tails, at most.
        rounding: what rounding may hide, at most.
    """

    mass: np.ndarray
    first: int
    truncated: float
    rounding: float


def _compose(
    law: Law,
    steps: int,
    delta: float,
) -> _Composed:
    """Compose steps of one law."""
    if steps == 1:
        return _Composed(law.mass, law.first, 0.0, 0.0)
    if (len(law.mass) - 1) * steps < SHORT:
        mass = _power(law.mass, steps)
        return _Composed(mass, law.first * steps, 0.0, len(mass) * SUM_ROUNDING)
    truncated = min(1e-15, 1e-4 * delta)
    with np.errstate(all="ignore"):  # some of its moments may overflow; it takes the best
        offset, convolved = dp_accounting.pld.common.self_convolve(law.mass, steps, truncated)
    mass = np.asarray(convolved)
    return _Composed(mass, law.first * steps + offset, truncated, _fft_rounding(mass))


def _power(mass: np.ndarray, steps: int) -> np.ndarray:
    """Return the law of so many steps of the law `mass`, without an FFT.

    Its relative rounding grows with its cells: each convolution adds that of a sum of as many terms
    as the shorter factor has cells, and the law has more cells by as many.
    """
    power = np.ones(1)
    square = mass
    while steps:
        if steps % 2:
            power = np.convolve(power, square)
        steps //= 2
        if steps:
            square = np.convolve(square, square)
    return power


def _fft_rounding(mass: np.ndarray) -> float:
    """Return the most that the FFT may have hidden: it adds a floor, of either sign, to a cell.

    Of many cells, those at the ends hold next to nothing else. Few cells may all hold real
    probabilities, so they are convolved directly.
    """
    return len(mass) * abs(float(mass.min()))


def _convolve(mass: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the convolution, and the most that its rounding may hide."""
    fewer = min(len(mass), len(other))
    if fewer <= FEW_CELLS:
        return np.convolve(mass, other), fewer * SUM_ROUNDING
    convolved = signal.fftconvolve(mass, other)
    return convolved, _fft_rounding(convolved)


def _epsilon(
    parts: Sequence[tuple[Law, int]],
    delta: float,
) -> float:
    """Return an upper bound on the ε of so many steps of each law.

    It is ∞ if a probability is NaN: an ε of NaN would be within every budget.
    """
    first_law, first_steps = parts[0]
    mass, first, truncated, rounding = _compose(first_law, first_steps, delta)
    for law, steps in parts[1:]:
        other = _compose(law, steps, delta)
        mass, added = _convolve(mass, other.mass)
        first += other.first
        truncated += other.truncated
        rounding += other.rounding + added
    infinite = truncated - math.expm1(_log_finite(parts))
    if math.isnan(float(mass.sum()) + infinite):
        return math.inf
    if rounding > delta / 2:
        return _epsilon_by_moments(parts, delta)
    composed = dp_accounting.pld.pld_pmf.DensePLDPmf(
        first_law.width, first, mass, infinite, pessimistic_estimate=True
    )
    try:
        return float(composed.get_epsilon_for_delta(delta - rounding))
    except OverflowError:  # of e^ε
        return math.inf


def _log_finite(parts: Sequence[tuple[Law, int]]) -> float:
    """Return the log of the probability that no step has an infinite loss."""
    return sum(steps * math.log1p(-law.infinite) for law, steps in parts)


def _epsilon_by_moments(
    parts: Sequence[tuple[Law, int]],
    delta: float,
) -> float:
    """Return a looser bound, for a δ below the FFT's rounding: the laws' Rényi divergences.

    Near order 1, a step's log-moment may be smaller than its rounding, which would make ε 0. The
    rounding is therefore added.
    """
    left = delta + math.expm1(_log_finite(parts))
    if left <= 0:
        return math.inf
    near_one = 1 + np.geomspace(1e-3, 1, 40)
    large = np.geomspace(2.1, 1e4, 120)
    orders = np.concatenate([near_one, large])
    divergences = np.zeros(len(orders))
    for law, steps in parts:
        rounding = steps * MOMENT_ROUNDING / (orders - 1)
        divergences += [max(0.0, _renyi(law, steps, order)) for order in orders] + rounding
    return float(dp_accounting.rdp.compute_epsilon(orders, divergences, left)[0])


def _renyi(
    law: Law,
    steps: int,
    order: float,
) -> float:
    """Return the Rényi divergence of so many steps, of their finite losses."""
    with np.errstate(divide="ignore"):
        log_mass = np.log(law.mass)
    log_terms = log_mass + (order - 1) * law.losses
    log_moment = float(special.logsumexp(log_terms))
    return steps * log_moment / (order - 1)


@lru_cache(maxsize=16)
def _poisson_laws(
    z: float,
    drawn: Mixture,
    width: float,
    top: float,
) -> tuple[Law, Law]:
    weights = np.array(drawn.log_weights)
    remove, below = _cells(z, weights, width, -math.inf, top)
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        tilted = remove.mass * np.exp(-remove.losses)
    mass = np.where(remove.mass > 0, tilted, 0.0)
    mirrored = mass[::-1]  # V against U, on the mirrored grid
    first = 1 - remove.first - len(mirrored)
    add = Law(width, first, mirrored, below)
    return _whole(remove, drawn.excess), _whole(add, drawn.excess)


@lru_cache(maxsize=16)
def _uniform_laws(
    z: float,
    drawn: Mixture,
    width: float,
    highest: float,
) -> tuple[Law]:
    """Return the law of a step, whose losses above `highest` count as infinite."""
    weights, shares = _split(drawn)
    mass = np.zeros(math.ceil(highest / width) + 2)
    infinite = 0.0
    for j, share in enumerate(shares, start=1):
        if share > 0:
            top = float(_where_one_is_drawn(np.array(highest), z / j, weights))
            law, _ = _cells(z / j, weights, width, 0.0, top)
            mass[: len(law.mass)] += share * law.mass
            infinite += float(share * law.infinite)
    positive = mass[1 : 1 + int(np.flatnonzero(mass).max(initial=0))]
    with np.errstate(under="ignore"):
        losses = np.arange(1, len(positive) + 1) * width
        tilted = positive * np.exp(-losses)
    negative = tilted[::-1]
    symmetric = np.concatenate([negative, [0.0], positive])
    law = Law(width, -len(positive), symmetric, infinite)
    return (_whole(law, drawn.excess, rest=len(negative)),)


def _split(drawn: Mixture) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities that none and that any is drawn, and the shares of each j."""
    log_missed, *log_drawn = drawn.log_weights
    rate = drawn.drawn
    shares = np.exp(np.array(log_drawn)) / rate  # of j, given that any is drawn
    return np.array([log_missed, math.log(rate)]), shares


def _whole(
    law: Law,
    excess: float,
    rest: int | None = None,
) -> Law:
    """Complete the mass to 1: `excess` goes to ∞, the rest to cell `rest` (or the fullest)."""
    mass = law.mass.copy()
    infinite = law.infinite + excess
    cell = int(np.argmax(mass)) if rest is None else rest
    missing = 1.0 - infinite - math.fsum(mass)
    with np.errstate(invalid="ignore"):
        mass[cell] = np.maximum(0.0, mass[cell] + missing)  # NaN, if some mass is not finite
    return Law(law.width, law.first, mass, infinite)


# ------------------------------------------------------------------------------- the grid of a step


class _Extent(NamedTuple):
    """The losses of a step.

    Attributes:
        spread: the root of the mean square.
        highest: the largest below the cut.
        top: the x where the upper tail is cut.
    """

    spread: float
    highest: float
    top: float


def _grid(
    z: float,
    drawn: Mixture,
    steps: int,
    delta: float,
    cells_per_spread: int | None = None,
    cells: int = CELLS,
) -> tuple[float, float]:
    """Return the width of the grid of a step's losses, and the x where the upper tail is cut.

    Its width is small beside the spread of a step's loss, but not so small that composing takes
    seconds. The largest losses are rare and stretch the grid, so the tail is cut where all steps
    together hold a share `CUT` of δ beyond it.
    """
    if cells_per_spread is None:
        cells_per_spread = FINE if steps <= FEW else COARSE
    extent = _extent(z, drawn, steps, delta)
    return _width_for(extent, steps, cells_per_spread, cells), extent.top


def _replaced_grid(
    z: float,
    drawn: Mixture,
    steps: int,
    delta: float,
) -> tuple[float, float]:
    """Return the width of the grid of `uniform_laws`, and the loss where the upper tail is cut."""
    extent = _replaced_extent(z, drawn, steps, delta)
    cells_per_spread = FINE if steps <= FEW else COARSE
    return _width_for(extent, steps, cells_per_spread, CELLS), extent.highest


def _width_for(
    extent: _Extent,
    steps: int,
    cells_per_spread: int,
    cells: int,
) -> float:
    finest = extent.spread / cells_per_spread
    total_spread = extent.spread * math.sqrt(steps)
    return _width(finest, extent.highest, total_spread, cells)


def _width(
    finest: float,
    highest: float,
    total_spread: float,
    cells: int,
) -> float:
    """Return the width of cells that hold the losses of all steps; `finest`, or wider."""
    span = highest + 20 * total_spread
    return max(finest, 2 * highest / cells, span / cells, LEAST_WIDTH)


def _extent(
    z: float,
    drawn: Mixture,
    steps: int,
    delta: float,
) -> _Extent:
    """Return how far the losses of a step reach."""
    weights = np.array(drawn.log_weights)
    x = np.linspace(-TAIL * z, len(weights) - 1 + TAIL * z, 8001)
    density = np.zeros(len(x))
    beyond = np.zeros(len(x))
    with np.errstate(under="ignore"):
        for j, log_weight in enumerate(weights):
            weight = math.exp(log_weight)
            distance = x - j
            density += weight * np.exp(-(distance**2) / (2 * z * z))
            beyond += weight * special.ndtr(-distance / z)
    loss = _loss(x, z, weights)
    mean_square = np.sum(density * loss**2) / np.sum(density)
    spread = math.sqrt(float(mean_square))
    beyond_cut = CUT * delta / steps
    first_beyond = int(np.searchsorted(-beyond, -beyond_cut))
    cut = min(first_beyond, len(x) - 1)
    return _Extent(spread, float(loss[cut]), float(x[cut]))


def _replaced_extent(
    z: float,
    drawn: Mixture,
    steps: int,
    delta: float,
) -> _Extent:
    """Return how far the losses of a step reach if examples are replaced.

    Each j has a law of its own, whose losses grow with j. A j that is hardly ever drawn would
    stretch the grid beyond all bounds, so the tails of all laws are cut at one loss.
    """
    extent = _extent(z, drawn, steps, delta)
    weights, shares = _split(drawn)
    if len(shares) == 1:  # the extent's own law
        return extent
    shift_z = z / np.arange(1, len(shares) + 1)  # of each j, in units of j shifts
    log_missed, log_drawn = weights

    def mass_beyond(loss: float) -> float:
        x = _where_one_is_drawn(np.array(loss), shift_z, weights)
        mass_if_none_drawn = math.exp(log_missed) * special.ndtr(-x / shift_z)
        mass_if_drawn = math.exp(log_drawn) * special.ndtr((1 - x) / shift_z)
        return float(shares @ (mass_if_none_drawn + mass_if_drawn))

    low, high = LEAST_WIDTH, extent.highest
    while mass_beyond(high) > CUT * delta / steps and high < MOST_LOSS:
        low, high = high, 2 * high
    while high > low * (1 + 1e-3):  # invariant: no more than the cut lies beyond `high`
        middle = math.sqrt(low * high)
        if mass_beyond(middle) > CUT * delta / steps:
            low = middle
        else:
            high = middle
    return _Extent(extent.spread, high, extent.top)


def _loss(
    x: np.ndarray,
    z: float,
    log_weights: np.ndarray,
) -> np.ndarray:
    """Return log U(x)/V(x), increasing and convex in x."""
    losses = []
    for part in _parts(x, log_weights):
        losses.append(special.logsumexp(_log_terms(part, z, log_weights), axis=0))
    return np.concatenate(losses)


def _parts(x: np.ndarray, log_weights: np.ndarray) -> list[np.ndarray]:
    """Return x in parts, whose terms for all weights fit into memory."""
    num_parts = math.ceil(len(x) * len(log_weights) / AT_ONCE)
    return np.array_split(x, max(1, num_parts))


def _log_terms(
    x: np.ndarray,
    z: float,
    log_weights: np.ndarray,
) -> np.ndarray:
    """Return the logarithm of wⱼ N(j, z²)/N(0, z²) at x, [j, x]."""
    j = np.arange(len(log_weights))[:, None]
    log_ratios = (j * x - j * j / 2) / z**2
    return log_weights[:, None] + log_ratios


def _where(
    loss: np.ndarray,
    z: float,
    log_weights: np.ndarray,
) -> np.ndarray:
    """Invert `_loss` at increasing values; −∞ below its infimum log w₀."""
    if len(log_weights) == 2:
        return _where_one_is_drawn(loss, z, log_weights)
    table = np.linspace(-4 * TAIL * z, len(log_weights) - 1 + (TAIL + 1) * z, 20001)
    table_loss = _loss(table, z, log_weights)

    parts = _parts(loss, log_weights)
    return np.concatenate([_solve(part, z, log_weights, table, table_loss) for part in parts])


def _solve(
    loss: np.ndarray,
    z: float,
    log_weights: np.ndarray,
    table: np.ndarray,
    table_loss: np.ndarray,
) -> np.ndarray:
    """Invert `_loss`, given a table of it."""
    after = np.searchsorted(table_loss, loss)
    cell = np.clip(after - 1, 0, len(table) - 2)
    x = np.interp(loss, table_loss, table)
    j = np.arange(len(log_weights))[:, None]
    for _ in range(4):  # Newton's method, kept inside the table's cell
        terms = _log_terms(x, z, log_weights)
        value = special.logsumexp(terms, axis=0)
        slope = np.sum(j * np.exp(terms - value), axis=0) / z**2
        with np.errstate(divide="ignore", invalid="ignore"):
            newton = x - (value - loss) / slope
        x = np.where(slope > 0, newton, x)
        x = np.clip(x, table[cell], table[cell + 1])
    return x


def _where_one_is_drawn(
    loss: np.ndarray,
    z: float | np.ndarray,
    log_weights: np.ndarray,
) -> np.ndarray:
    """Invert `_loss` in closed form for one example."""
    log_missed, log_drawn = log_weights
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # e^ε − w₀ as expm1(ε) + w₁ for small ε, and in logarithms where e^ε would overflow
        large = loss + np.log1p(-np.exp(log_missed - loss))
        small = np.log(np.expm1(loss) + math.exp(log_drawn))
        grown = np.where(loss > 1, large, small)
        x = 0.5 + z * z * (grown - log_drawn)
    return np.where(loss > log_missed, x, -np.inf)


def _cells(
    z: float,
    log_weights: np.ndarray,
    width: float,
    least: float,
    top: float,
) -> tuple[Law, float]:
    """Return U's law up to x = `top`, of losses from `least` on, and V's mass below."""
    lowest, highest = _loss(np.array([-TAIL * z, top]), z, log_weights)
    lowest = max(float(lowest), least)
    first = math.floor(lowest / width)
    last = max(first, math.ceil(float(highest) / width))
    losses = np.arange(first, last + 1) * width
    x = _where(losses, z, log_weights)
    log_v = _log_mass(x[:-1] / z, x[1:] / z)
    log_u = log_weights[0] + log_v
    for j, log_weight in enumerate(log_weights[1:], start=1):
        shifted = (x - j) / z
        log_mass = _log_mass(shifted[:-1], shifted[1:])
        log_u = np.logaddexp(log_u, log_weight + log_mass)
    with np.errstate(under="ignore", invalid="ignore"):
        # Within a cell e^(−loss) averages e^(log V − log U). The mass is split over the two ends so
        # that this average is kept.
        log_ratio = np.nan_to_num(losses[:-1] + log_v - log_u, nan=0.0)
        ratio = np.exp(np.clip(log_ratio, -width, 0.0))
        mass = np.exp(log_u)
        up = mass * ((1 - ratio) / -math.expm1(-width))
        stay = np.maximum(mass - up, 0.0)
    infinite = 0.0
    for j, log_weight in enumerate(log_weights):
        infinite += math.exp(log_weight) * special.ndtr((j - x[-1]) / z)
    split = np.append(stay, 0.0) + np.append(0.0, up)
    law = Law(width, first, split, float(infinite))
    return law, float(special.ndtr(x[0] / z))


def _log_mass(
    a: np.ndarray,
    b: np.ndarray,
) -> np.ndarray:
    """Return log P(a < N(0, 1) < b), to full relative accuracy in both tails."""
    right = a + b > 0  # there the mass of (−b, −a), which is the same, is taken
    low = special.log_ndtr(np.where(right, -b, a))
    high = special.log_ndtr(np.where(right, -a, b))
    with np.errstate(divide="ignore", invalid="ignore"):
        log_difference = high + np.log(-np.expm1(low - high))
    return np.where(high > low, log_difference, -np.inf)
