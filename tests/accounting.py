"""The ε of dp-accounting, which ours is compared with."""

from functools import cache

import dp_accounting
from dp_accounting.pld import PLDAccountant


@cache
def by_dp_accounting(*trainings: tuple[float, float, int], delta: float) -> float:
    """Return the ε of Poisson-sampled Gaussian steps, (z, rate, steps) of each training."""
    accountant = PLDAccountant(value_discretization_interval=1e-3)  # the default takes seconds
    for z, rate, steps in trainings:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
        accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))
