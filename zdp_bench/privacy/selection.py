"""The ε of publishing the best of several private runs, and nothing else of them.

Papernot & Steinke 2022, 'Hyperparameter Tuning with Rényi Differential Privacy': if the number of
runs is drawn at random, the best costs far less than all of them together. Theorem 2 (truncated
negative binomial) and Theorem 6 (Poisson) are dp-accounting's `RepeatAndSelectDpEvent`.

What the theorems ask for:
    - every run draws its hyper-parameters, batches and noise anew, from one distribution;
    - every run is at least as private as the mechanism given here;
    - the score of a run follows from what it released and from public examples;
    - the number of runs is drawn once, before the first, and told to nobody; nor are the others.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq

from zdp_bench.privacy.accounting import HOPELESS, quiet
from zdp_bench.privacy.mechanism import Sampling

Law = Literal["poisson", "geometric", "logarithmic"]
# The paper's η; Theorem 6 is the limit η → ∞.
SHAPES: dict[str, float] = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
WITHOUT_REPLACEMENT = tuple(range(2, 65))  # the orders that Wang et al. 2019 have a bound for


@lru_cache(maxsize=256)
def selected_epsilon(
    z: float, sampling: Sampling, steps: int, law: Law, mean: float, delta: float
) -> float:
    """Return the ε of the best of a random number of runs, when it alone is published.

    Args:
        z: the effective noise multiplier of every run, at least.
        steps: of every run, at most.
        law: of the number of runs.
        mean: its mean, 1 or more.

    Formal guarantees: (ε, δ)-DP of the best run's output, its hyper-parameters among it, under the
    conditions of this module; in the runs' own adjacency.
    """
    if z < HOPELESS or sampling.scheme == "shuffled" or delta <= 0:
        return math.inf
    step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(z)
    accountant = RdpAccountant()
    if sampling.scheme == "poisson" and sampling.sample_rate < 1:
        step = dp_accounting.PoissonSampledDpEvent(sampling.sample_rate, step)
    elif sampling.scheme == "uniform" and sampling.sample_rate < 1:
        size = round(sampling.expected_batch_size)
        step = dp_accounting.SampledWithoutReplacementDpEvent(sampling.records, size, step)
        accountant = RdpAccountant(WITHOUT_REPLACEMENT, NeighboringRelation.REPLACE_ONE)
    run = dp_accounting.SelfComposedDpEvent(step, steps)
    with quiet(), np.errstate(all="ignore"):
        accountant.compose(RepeatAndSelectDpEvent(run, mean, SHAPES[law]))
    return float(accountant.get_epsilon(delta))


def draw_number(law: Law, mean: float, random: np.random.Generator | None = None) -> int:
    """Draw how many runs to make; of a Poisson law it may be 0.

    Args:
        random: by default seeded by the operating system, so that nobody can compute the number.
    """
    random = random or np.random.default_rng()
    if law == "poisson":
        return int(random.poisson(mean))
    if law == "geometric":
        return int(random.geometric(1 / mean))
    if mean == 1:
        return 1
    # The paper's Definition 1 at η = 0, whose mean is (1/γ − 1)/log(1/γ).
    gamma = brentq(lambda g: (1 / g - 1) / math.log(1 / g) - mean, 1e-12, 1 - 1e-12)
    return int(random.logseries(1 - gamma))
