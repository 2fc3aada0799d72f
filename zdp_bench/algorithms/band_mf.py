"""DP-SGD with noise that later steps partly cancel (Choquette-Choo et al. 2023, "(Amplified)
Banded Matrix Factorization: A unified approach to private training", arXiv 2306.08153).

Weights are sums of gradients, so they suffer from sums of noise, and less if the noise of different
steps cancels. Steps that draw the same example must be at least `bands` steps apart. The examples
are therefore split into `bands` subsets, from which the steps draw in turn (`Sampling.cycle`), at a
sampling rate that is `bands` times as high, so that the batch size does not change. With fewer
bands, sampling amplifies privacy more; with more bands, more noise cancels. The best number grows
like ε √steps / epochs. It is 1, which is DP-SGD, for small ε or many epochs (McKenna 2025, arXiv
2405.15913).
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

    Formal guarantees: z = noise_multiplier. Adding or removing an example (or owner) changes at
    most ⌈T/bands⌉ of T consecutive steps, each with probability `Sampling.sample_rate`. T steps are
    exactly as private as ⌈T/bands⌉ steps of DP-SGD at that rate. There are two requirements. The
    subset of an example must follow from its own content only, and that of an owner from its name
    (`privacy.sampling.subsets`). Equal examples are then in the same subset, and adding or removing
    one moves no other. And no step may be repeated with different noise: a run whose noise cannot
    be drawn again cannot continue after a stop.

    Args:
        bands: number of steps over which noise is correlated. Default: 1, which is DP-SGD. Other
            arguments are those of `DPSGD`.

    Raises:
        UserError: the model has complex parameters, or the sampling may draw an example again
            within `bands` > 1 steps, as your own training loop and a federation do.
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
        uncorrelated = super().mechanism()
        column_norm = math.hypot(*self.strategy)  # ‖c‖, the sensitivity of C times the gradients
        blocks = tuple(replace(block, std=block.std * column_norm) for block in uncorrelated.blocks)
        return replace(uncorrelated, blocks=blocks, strategy=self.strategy)


@lru_cache(maxsize=64)
def best_strategy(steps: int, bands: int) -> tuple[float, ...]:
    """Return the coefficients c of the strategy matrix C that minimise `squared_error`.

    The first of the `bands` coefficients is 1. The search is restricted to coefficients that do not
    increase, for which C⁻¹ is bounded. The result is rounded to four digits, so that the noise does
    not depend on the last bits of a machine's arithmetic.
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
    start = (2 * k - 1) / (2 * k)  # series of 1/√(1 − x), the best c for as many steps as bands
    bounds = [(1e-6, 1.0)] * (bands - 1)
    ratios = optimize.minimize(objective, start, jac=True, bounds=bounds, method="L-BFGS-B").x
    rounded = [round(float(coefficient), 4) for coefficient in np.cumprod(ratios)]
    return (1.0, *rounded)


def squared_error(strategy: np.ndarray, steps: int) -> tuple[float, np.ndarray]:
    """Return the mean squared error of the prefix sums of the gradients, and its gradient in c.

    The error in units of σ² is ‖c‖² Σₖ (1 − k/T) wₖ², where w = (1, 1, …) C⁻¹ (the paper's eq. 2).
    """
    sums = signal.lfilter([1.0], strategy, np.ones(steps))
    weights = (1 - np.arange(steps) / steps) * sums
    error = float(weights @ sums)
    length = float(strategy @ strategy)
    filtered_sums = signal.lfilter([1.0], strategy, sums)  # dw/dcⱼ is −filtered_sums, j steps later
    slope = np.zeros(len(strategy))
    for j in range(len(strategy)):
        slope[j] = -2 * weights[j:] @ filtered_sums[: max(0, steps - j)]
    return error * length, slope * length + 2 * error * strategy
