"""Functions that format numbers. Each quantity is formatted in the same way everywhere."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import mean, stdev

from zdp_bench.privacy.statement import round_down, round_up, show_epsilon


def name_one(unit: str) -> str:
    """Return a unit with its article: 'a patient' or 'an image'."""
    article = "an" if unit.startswith(tuple("aeiou")) else "a"
    return f"{article} {unit}"


def duration(seconds: float) -> str:
    """Format a duration: 'under 1 s', '45 s', '12 min' or '3.4 h'."""
    if seconds < 1:
        return "under 1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.1f} h"


def interval(low: float | None, high: float | None) -> str:
    """Format a lower and an upper bound on ε: '30.3 to 33.2'.

    Only the upper bound is shown if both are printed alike, or if there is no lower bound.
    """
    if show_epsilon(low) in ("", show_epsilon(high)):
        return show_epsilon(high)
    return f"{show_epsilon(low, at_least=True)} to {show_epsilon(high)}"


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation, or NaN if there is none.

    There is none of fewer than two values, or if one of them is not finite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return stdev(values)


def mean_and_deviation(
    values: Sequence[float],
    unit: str = "",
    digits: int | None = None,
    scale: float = 1.0,
    with_count: bool = True,
) -> str:
    """Format mean and sample standard deviation: '98.01 ± 0.12 % (n = 3)', '0.9601 (n = 1)'.

    The result is '∞' if all values are, such as the PSNR of perfect images. It is 'undefined' if
    only some are, or if a value is NaN, such as a ROC-AUC without examples of both classes.

    Args:
        values: the values.
        unit: unit of the values, such as "%". Default: none.
        digits: number of decimals. Default: 2 with a unit, otherwise 4.
        scale: factor by which values are multiplied. Default: 1.
        with_count: whether to append the number of values. Default: True.
    """
    count = f" (n = {len(values)})" if with_count else ""
    digits = digits or (2 if unit else 4)
    if all(map(math.isfinite, values)):
        shown = f"{scale * mean(values):.{digits}f}"
        if len(values) > 1:
            shown += f" ± {scale * deviation(values):.{digits}f}"
    elif math.isinf(values[0]) and len({*values}) == 1:
        shown = f"{values[0]}".replace("inf", "∞")
    else:
        return f"undefined{count}"
    if unit:
        shown += f" {unit}"
    return shown + count


def rounded(
    numbers: Mapping[str, object],
    up: Collection[str] = (),
    down: Collection[str] = (),
) -> dict[str, object]:
    """Return a mapping with its floats rounded to six significant digits.

    Args:
        numbers: the mapping.
        up: keys of upper bounds, and of noise that keeps one. Default: none.
        down: keys of lower bounds. Default: none.
    """
    result = dict(numbers)
    for key, value in numbers.items():
        if not isinstance(value, float):
            continue
        if key in up:
            result[key] = round_up(value, 6)
        elif key in down:
            result[key] = round_down(value, 6)
        else:
            result[key] = float(f"{value:.6g}")
    return result
