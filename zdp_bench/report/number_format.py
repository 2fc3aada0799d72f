"""How numbers are printed everywhere: one format a quantity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev


def epsilon(value: float | None) -> str:
    """ε to three digits, whole above 1000; ∞ where nothing protects; empty where there is none."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def name_one(unit: str) -> str:
    """'a patient', 'an image': one of what owns training records."""
    return f"{'an' if unit[0] in 'aeiou' else 'a'} {unit}"


def interval(low: float | None, high: float | None) -> str:
    """'30.3 to 33.2', what ε lies between; one number where both print alike, or where no lower bound is known."""
    ends = [epsilon(low), epsilon(high)]
    return ends[1] if ends[0] in ("", ends[1]) else " to ".join(ends)


def percent(value: float, digits: int = 2) -> str:
    """A fraction as a percentage: 0.9901 -> '99.01 %'."""
    return f"{100 * value:.{digits}f} %"


def mean_and_deviation(values: Sequence[float], unit: str) -> str:
    """'98.01 ± 0.12 % (n = 3)', '0.9601 ± 0.0042 (n = 3)': the mean and the sample standard deviation over seeds.

    'undefined' where a value is no number: a ROC curve needs records of both classes.
    """
    if any(math.isnan(value) for value in values):
        return f"undefined (n = {len(values)})"
    scale, suffix, digits = (
        (100.0, " %", 2) if unit == "%" else (1.0, f" {unit}".rstrip(), 2 if unit else 4)
    )
    scaled = [scale * value for value in values]
    spread = f" ± {stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{mean(scaled):.{digits}f}{spread}{suffix} (n = {len(scaled)})"
