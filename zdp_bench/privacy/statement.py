"""How an ε is stated: with its δ, and rounded up to three digits."""

from __future__ import annotations

import logging
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cache

from zdp_bench.errors import require

MOST_DELTA = 0.1  # from here on an ε says nothing: at 0.5 it is 0 for much of what protects nobody

log = logging.getLogger(__name__)


def require_delta(key: str, delta: float) -> None:
    """Reject a δ outside (0, 0.1)."""
    rule = (
        f"must lie above 0 and below {MOST_DELTA:g}: it is the probability that the guarantee "
        "fails; choose one well below 1 / the number of examples"
    )
    require(0 < delta < MOST_DELTA, key, delta, rule)


def question(delta: float, units: int) -> str:
    """Return a sentence on a δ that is above one over the number of units; '' for any other."""
    if delta * units <= 1:
        return ""
    return (
        f"δ = {delta:g} is above 1/{units:,}, one over the number of protected owners: it "
        f"would allow publishing one person's data. Choose δ below {1 / units:.1g}."
    )


@cache
def warn_of(delta: float, units: int) -> None:
    """Log the text of `question` once per process."""
    warning = question(delta, units)
    if warning:
        log.warning(warning)


def show_epsilon(value: float | None, at_least: bool = False) -> str:
    """Format ε to three digits, rounded up: 1.3039 -> '1.31'; whole above 1000.

    ∞ where nothing protects, empty where none is. Beyond nine digits is rounding of the machine's.
    """
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞"
    exact = Decimal(f"{value:.9g}")
    rounding = ROUND_FLOOR if at_least else ROUND_CEILING
    if exact < 1000:
        third_digit = Decimal(1).scaleb(exact.adjusted() - 2)
        exact = exact.quantize(third_digit, rounding)
    if exact < 1000:
        return f"{float(exact):.3g}"
    return f"{exact.to_integral_value(rounding):,f}"
