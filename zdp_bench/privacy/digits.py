"""How an ε is written: to three digits that never say less than was spent."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal


def write_epsilon(value: float | None, at_least: bool = False) -> str:
    """Format ε to three digits, rounded up: 1.3039 -> '1.31'; whole above 1000.

    ∞ where nothing protects, empty where none is. Beyond nine digits is rounding of the machine's.

    Args:
        at_least: it is a lower bound, rounded down.
    """
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞"
    exact, way = Decimal(f"{value:.9g}"), ROUND_FLOOR if at_least else ROUND_CEILING
    if exact < 1000:
        exact = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), way)
    return f"{float(exact):.3g}" if exact < 1000 else f"{exact.to_integral_value(way):,f}"
