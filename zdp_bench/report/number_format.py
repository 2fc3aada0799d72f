"""Formats numbers: one way for each quantity, everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from zdp_bench.privacy.statement import show_epsilon


def name_one(unit: str) -> str:
    """'patient' -> 'a patient', 'image' -> 'an image'."""
    return f"{'an' if unit.startswith(tuple('aeiou')) else 'a'} {unit}"


def duration(seconds: float) -> str:
    """'under 1 s', '45 s', '12 min', '3.4 h'."""
    if seconds < 1:
        return "under 1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def interval(low: float | None, high: float | None) -> str:
    """Format two bounds on ε: '30.3 to 33.2'; the upper one if they print alike or low is None."""
    if show_epsilon(low) in ("", show_epsilon(high)):
        return show_epsilon(high)
    return f"{show_epsilon(low, at_least=True)} to {show_epsilon(high)}"


def mean_and_deviation(
    values: Sequence[float],
    unit: str = "",
    digits: int | None = None,
    scale: float = 1.0,
    with_count: bool = True,
) -> str:
    """Format mean and sample standard deviation: '98.01 ± 0.12 % (n = 3)', '0.9601 (n = 1)'.

    'undefined' if a value is NaN: a ROC curve needs examples of both classes.
    """
    count = f" (n = {len(values)})" if with_count else ""
    if any(math.isnan(value) for value in values):
        return f"undefined{count}"
    digits = digits or (2 if unit else 4)
    shown = f"{scale * mean(values):.{digits}f}"
    if len(values) > 1:
        shown += f" ± {scale * stdev(values):.{digits}f}"
    if unit:
        shown += f" {unit}"
    return shown + count


def rounded(numbers: Mapping[str, object]) -> dict[str, object]:
    """Round the floats of a mapping to six digits."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in numbers.items()}
