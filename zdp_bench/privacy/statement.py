"""State an ε or noise: check the δ, and round to the safe side."""

from __future__ import annotations

import logging
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cache

from zdp_bench.errors import require

MAX_DELTA = 0.1  # a larger δ is meaningless: at 0.5, ε is 0 even for much that protects nobody
DIGITS = 3  # of an ε that is shown

log = logging.getLogger(__name__)


def require_delta(key: str, delta: float) -> None:
    """Reject a δ outside (0, 0.1)."""
    rule = (
        f"must lie above 0 and below {MAX_DELTA:g}: it is the probability that the guarantee "
        "fails; choose one well below 1 / the number of examples"
    )
    require(0 < delta < MAX_DELTA, key, delta, rule)


def question(delta: float, units: int) -> str:
    """Return a warning if δ is above one over the number of units, else ''."""
    if delta * units <= 1:
        return ""
    return (
        f"δ = {delta:g} is above 1/{units:,}, one over the number of protected examples or "
        "owners: it would allow publishing the data of one. Choose δ well below that."
    )


@cache
def warn_of(delta: float, units: int) -> None:
    """Log the warning of `question`, once per process."""
    warning = question(delta, units)
    if warning:
        log.warning(warning)


def round_up(value: float, digits: int) -> float:
    """Return the least number of so many significant digits that is not below `value`.

    Noise that was calibrated then keeps its target, and an upper bound remains one.
    """
    return _round_to(value, digits, ROUND_CEILING)


def round_down(value: float, digits: int) -> float:
    """Return the largest number of so many significant digits that is not above `value`."""
    return _round_to(value, digits, ROUND_FLOOR)


def _round_to(value: float, digits: int, rounding: str) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    exact = Decimal(repr(float(value)))
    last_digit = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return float(exact.quantize(last_digit, rounding))


def show_epsilon(value: float | None, at_least: bool = False) -> str:
    """Return ε with three digits, rounded up: '1.31' for 1.3039, and whole numbers above 1000.

    Digits after the ninth are ignored, because they are rounding errors.

    Args:
        value: ε. Infinity gives '∞'; None or NaN gives ''.
        at_least: whether ε is a lower bound, which is rounded down.
    """
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞"
    rounded = _round(value, at_least, DIGITS)
    return f"{float(rounded):.3g}" if rounded < 1000 else f"{rounded:,f}"


def round_epsilon(value: float, at_least: bool = False, digits: int = DIGITS) -> float:
    """Return ε as `show_epsilon` rounds it, or with more digits; infinity and NaN stay."""
    return float(_round(value, at_least, digits)) if math.isfinite(value) else value


def _round(value: float, at_least: bool, digits: int) -> Decimal:
    exact = Decimal(f"{value:.9g}")
    rounding = ROUND_FLOOR if at_least else ROUND_CEILING
    limit = 10**digits
    if exact < limit:
        last_digit = Decimal(1).scaleb(exact.adjusted() - digits + 1)
        exact = exact.quantize(last_digit, rounding)
    return exact if exact < limit else exact.to_integral_value(rounding)
