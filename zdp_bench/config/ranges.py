"""Which values are no mistake: of numbers in general, and of torch's own optimisers and schedulers.

torch checks few of its values, or at the first step; and what no float or no memory holds is told before it is tried.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zdp_bench.errors import UserError, require
from zdp_bench.privacy.accounting import LEAST_NOISE, MOST, MOST_NOISE


@dataclass(frozen=True)
class Range:
    """What a value must be: the test, and the words for it."""

    holds: Callable[[Any], bool]
    rule: str


NOISE_RULE = f"must be 0, or lie in {LEAST_NOISE:g} to {MOST_NOISE:g}"
LEAST_NORM, MOST_NORM = (
    1e-12,
    1e12,
)  # a bound, beyond which norms of single precision have no digits left
MOST_PREFETCHED = 1024


def most_threads() -> int:
    """The most CPU threads a process may ask for: more than help, and fewer than stop a machine."""
    return max(256, 4 * (os.cpu_count() or 1))


def require_threads(key: str, threads: int | None) -> None:
    """Refuse a number of threads that cannot be meant.

    Raises:
        UserError: it is not between 1 and `most_threads()`.
    """
    require(threads is None or threads > 0, key, threads, "must be at least 1")
    require(
        threads is None or threads <= most_threads(),
        key,
        threads,
        f"must be at most {most_threads()} on this machine",
    )


def require_count(key: str, count: int | None, least: int = 1) -> None:
    """Refuse a number of things that is too small, or larger than anything there is.

    Raises:
        UserError: it is not between `least` and `MOST`.
    """
    require(
        count is None or count >= least,
        key,
        count,
        "must be at least 1" if least else "must be 0 or more",
    )
    require(count is None or count <= MOST, key, count, f"must be at most {MOST:,}")


def check_privacy_options(options: dict[str, Any]) -> None:
    """Refuse noise and bounds that no float of single precision, or no accountant, could hold, of whatever algorithm.

    Raises:
        UserError: names the key.
    """
    noise, bound = options.get("noise_multiplier"), options.get("max_grad_norm")
    if isinstance(noise, float):
        require(
            noise == 0 or LEAST_NOISE <= noise <= MOST_NOISE,
            "algorithm.noise_multiplier",
            noise,
            NOISE_RULE,
        )
    if isinstance(bound, float):
        rule = f"must lie in {LEAST_NORM:g} to {MOST_NORM:g}"
        require(LEAST_NORM <= bound <= MOST_NORM, "algorithm.max_grad_norm", bound, rule)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30


def _whole(least: int) -> Range:
    rule = f"must be a whole number, {least} or more"
    return Range(
        lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31
        ),
        rule,
    )


def _one_of(*allowed: Any) -> Range:
    shown = ["null" if value is None else str(value).lower() for value in allowed]
    return Range(
        lambda value: any(
            value is one or (isinstance(one, str) and value == one) for one in allowed
        ),
        _among(shown),
    )


def _among(shown: list[str]) -> str:
    return f"must be {', '.join(shown[:-1])} or {shown[-1]}"


def _list_of(each: Range, rule: str, length: int | None = None) -> Range:
    def holds(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) > 0
            and length in (None, len(value))
            and all(map(each.holds, value))
        )

    return Range(holds, rule)


POSITIVE = Range(lambda value: _number(value) and value > 0, "must be a number above 0, and finite")
NOT_NEGATIVE = Range(
    lambda value: _number(value) and value >= 0, "must be a number, 0 or more, and finite"
)
SHARE = Range(lambda value: _number(value) and 0 <= value <= 1, "must be a number in [0, 1]")
BELOW_ONE = Range(lambda value: _number(value) and 0 <= value < 1, "must be a number in [0, 1)")
YES_OR_NO = _one_of(True, False)
OR_NULL = _one_of(True, False, None)

RANGES: dict[str, dict[str, Range]] = {
    "optimizer": {
        "lr": NOT_NEGATIVE,
        "momentum": SHARE,
        "dampening": SHARE,
        "weight_decay": NOT_NEGATIVE,
        "nesterov": YES_OR_NO,
        "betas": _list_of(BELOW_ONE, "must be two numbers in [0, 1), such as [0.9,0.999]", 2),
        "eps": NOT_NEGATIVE,
        "alpha": BELOW_ONE,
        "centered": YES_OR_NO,
        "amsgrad": YES_OR_NO,
        "momentum_decay": NOT_NEGATIVE,
        "decoupled_weight_decay": YES_OR_NO,
        "lr_decay": NOT_NEGATIVE,
        "initial_accumulator_value": NOT_NEGATIVE,
        "maximize": YES_OR_NO,
        "foreach": OR_NULL,
        "fused": OR_NULL,
    },
    "scheduler": {
        "step_size": _whole(1),
        "milestones": _list_of(
            _whole(1), "must be a list of epochs, whole numbers from 1, such as [10,20]"
        ),
        "gamma": POSITIVE,
        "T_max": _whole(1),
        "eta_min": NOT_NEGATIVE,
        "start_factor": Range(
            lambda value: _number(value) and 0 < value <= 1, "must be a number in (0, 1]"
        ),
        "end_factor": SHARE,
        "total_iters": _whole(1),
        "mode": _one_of("min", "max"),
        "factor": Range(
            lambda value: _number(value) and 0 < value < 1, "must be a number in (0, 1)"
        ),
        "patience": _whole(0),
        "threshold": NOT_NEGATIVE,
        "threshold_mode": _one_of("rel", "abs"),
        "cooldown": _whole(0),
        "min_lr": NOT_NEGATIVE,
        "eps": NOT_NEGATIVE,
    },
}
# Of torch's parameters, those that are no choice here: a step is not captured, not differentiated, and not begun in the middle.
NOT_OURS = {"params", "optimizer", "capturable", "differentiable", "last_epoch", "verbose"}


def check_ranges(kind: str, options: dict[str, Any]) -> None:
    """Refuse a value that torch could not use.

    Raises:
        UserError: names the first such key, and what it must be.
    """
    for key, value in options.items():
        wanted = RANGES[kind].get(key)
        if wanted is None or wanted.holds(value):
            continue
        if (
            isinstance(value, str)
            and "e" in value.lower()
            and "." not in value
            and _parsed(value) is not None
        ):
            raise UserError(
                f"{kind}.{key}={value}: is text to YAML, which wants a point in it: {_parsed(value)!r}."
            )
        require(False, f"{kind}.{key}", value, wanted.rule)


def _parsed(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
