"""DP-SGD with noise that later steps partly cancel (Choquette-Choo et al. 2023, "(Amplified)
Banded Matrix Factorization: A unified approach to private training", arXiv 2306.08153).

Weights are sums of gradients, so it is sums of noise that harm, and noise that cancels harms less.
Steps that draw the same example must lie at least `bands` steps apart. So the examples are split
into as many subsets, and the steps draw from one after the other (`Sampling.cycle`), at a rate as
many times higher: the batch stays as large as without. The fewer bands, the more sampling hides;
the more, the more noise cancels. The best number grows as ε √steps / epochs, and is 1, which is
DP-SGD, for small ε or many epochs (McKenna 2025, arXiv 2405.15913).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.dp_sgd import DPSGD
from zdp_bench.errors import UserError, setting
from zdp_bench.gradients import Engine
from zdp_bench.lazy import LazyModule
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.registry import register

optimize = LazyModule("scipy.optimize")
signal = LazyModule("scipy.signal")


@register("algorithm", "band_mf")
class BandMF(DPSGD):
    """DP-SGD on real parameters, with noise that is correlated over `bands` steps.

    Formal guarantees: z = noise_multiplier. One example, or owner, more or less changes ⌈T/bands⌉
    of T steps in a row, each with the probability that `Sampling.sample_rate` says, and T steps are
    exactly as private as so many of DP-SGD at that rate. This needs that its subset follows from
    nothing but its own content, or an owner's from its name (`privacy.sampling.subsets`), and that
    no step is drawn again with other noise: a run whose noise cannot be drawn again cannot continue
    after a stop. Equal examples share a subset, so that one more or less moves none of the others.

    Raises:
        UserError: the model has complex parameters, or the sampling draws an example again within
            `bands` steps, as a loop of one's own does.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        bands: int = 1,
        per_layer: bool = False,
        gamma: float | None = None,
        gradients: Engine = "auto",
    ) -> None:
        super().__init__(
            problem,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            per_layer=per_layer,
            gamma=gamma,
            gradients=gradients,
        )
        if bands > problem.sampling.cycle:
            raise UserError(
                f"{setting('algorithm', 'band_mf')} with bands={bands}: needs Poisson samples from "
                "as many subsets in turn, as a recipe with trainer=poisson draws them."
            )
        self.strategy = best_strategy(problem.steps, bands)

    @staticmethod
    def cycle(options: Mapping[str, Any]) -> int:
        return int(options.get("bands", 1))

    def mechanism(self) -> Mechanism:
        white = super().mechanism()
        reach = math.hypot(*self.strategy)
        blocks = tuple(replace(block, std=block.std * reach) for block in white.blocks)
        return replace(white, blocks=blocks, strategy=self.strategy)


@lru_cache(maxsize=64)
def best_strategy(steps: int, bands: int) -> tuple[float, ...]:
    """Return the c of `bands` numbers, the first 1, with the least `squared_error`.

    It is searched for among those that do not grow, of which C⁻¹ is bounded. Rounded to four
    digits, so that the last bits of a machine's arithmetic do not name other noise.
    """
    if bands == 1:
        return (1.0,)

    def objective(ratios: np.ndarray) -> tuple[float, np.ndarray]:
        strategy = np.cumprod(np.append(1.0, ratios))
        error, slope = squared_error(strategy, max(steps, bands))
        from_last = np.cumsum((slope * strategy)[::-1])
        later = from_last[::-1][1:]
        return math.log(error), later / ratios / error

    k = np.arange(1, bands)
    start = (2 * k - 1) / (2 * k)  # of 1/√(1 − x), the best for as many steps as bands
    bounds = [(1e-6, 1.0)] * (bands - 1)
    ratios = optimize.minimize(objective, start, jac=True, bounds=bounds, method="L-BFGS-B").x
    rounded = [round(float(coefficient), 4) for coefficient in np.cumprod(ratios)]
    return (1.0, *rounded)


def squared_error(strategy: np.ndarray, steps: int) -> tuple[float, np.ndarray]:
    """Return the mean squared error of all sums of the first t gradients, and its slope in c.

    In units of σ: ‖c‖² Σₖ (1 − k/T) wₖ², where w = (1, 1, …) C⁻¹ (the paper's equation 2).
    """
    sums = signal.lfilter([1.0], strategy, np.ones(steps))
    weights = (1 - np.arange(steps) / steps) * sums
    error = float(weights @ sums)
    length = float(strategy @ strategy)
    again = signal.lfilter([1.0], strategy, sums)  # dw/dcⱼ is this, j steps later, with a minus
    slope = np.zeros(len(strategy))
    for j in range(len(strategy)):
        slope[j] = -2 * weights[j:] @ again[: max(0, steps - j)]
    return error * length, slope * length + 2 * error * strategy
