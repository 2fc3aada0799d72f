"""Ranges of numbers, and of the options of torch's optimisers and schedulers.

torch checks few of its values, or only at the first step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zdp_bench.errors import UserError, require
from zdp_bench.privacy.mechanism import LEAST_NOISE, MOST, MOST_NOISE

NOISE_RULE = f"must be 0, or lie in {LEAST_NOISE:g} to {MOST_NOISE:g}"
LEAST_NORM, MOST_NORM = 1e-12, 1e12  # beyond, norms in single precision lose all digits


def most_threads() -> int:
    """Return the most CPU threads a process may ask for: more than help, fewer than do harm."""
    return max(256, 4 * (os.cpu_count() or 1))


def require_threads(key: str, threads: int | None) -> None:
    """Refuse a number of threads outside 1 to `most_threads()`.

    Raises:
        UserError: names the key.
    """
    most = most_threads()
    require(threads is None or threads > 0, key, threads, "must be at least 1")
    rule = f"must be at most {most} on this machine"
    require(threads is None or threads <= most, key, threads, rule)


def require_count(key: str, count: int | None, least: int = 1) -> None:
    """Refuse a count outside `least` (0 or 1) to `MOST`.

    Raises:
        UserError: names the key.
    """
    rule = "must be at least 1" if least else "must be 0 or more"
    require(count is None or count >= least, key, count, rule)
    require(count is None or count <= MOST, key, count, f"must be at most {MOST:,}")


def check_privacy_options(options: dict[str, Any]) -> None:
    """Refuse noise and bounds that single precision, or the accountants, cannot hold.

    Raises:
        UserError: names the key.
    """
    noise = options.get("noise_multiplier")
    if isinstance(noise, float):
        holds = noise == 0 or LEAST_NOISE <= noise <= MOST_NOISE
        require(holds, "algorithm.noise_multiplier", noise, NOISE_RULE)
    rule = f"must lie in {LEAST_NORM:g} to {MOST_NORM:g}"
    for key in ("max_grad_norm", "gamma"):
        norm = options.get(key)
        within = not isinstance(norm, float) or LEAST_NORM <= norm <= MOST_NORM
        require(within, f"algorithm.{key}", norm, rule)


@dataclass(frozen=True)
class Range:
    """The values that an option may have, and the words for them."""

    holds: Callable[[Any], bool]
    rule: str


def _number(words: str, holds: Callable[[float], bool]) -> Range:
    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30

    return Range(lambda value: is_number(value) and holds(value), f"must be a number{words}")


def _whole(least: int) -> Range:
    rule = f"must be a whole number, {least} or more"
    # By type, for True is an int.
    return Range(lambda value: type(value) is int and least <= value < 2**31, rule)


def _one_of(*allowed: Any) -> Range:
    words = ["null" if value is None else str(value).lower() for value in allowed]
    rule = f"must be {', '.join(words[:-1])} or {words[-1]}"
    return Range(lambda value: any(type(value) is type(a) and value == a for a in allowed), rule)


def _list_of(each: Range, rule: str, length: int | None = None) -> Range:
    def holds(value: Any) -> bool:
        if not isinstance(value, list) or not value or length not in (None, len(value)):
            return False
        return all(map(each.holds, value))

    return Range(holds, rule)


NOT_NEGATIVE = _number(", 0 or more, and finite", lambda value: value >= 0)
UP_TO_ONE = _number(" in [0, 1]", lambda value: 0 <= value <= 1)
BELOW_ONE = _number(" in [0, 1)", lambda value: 0 <= value < 1)
BETAS = "must be two numbers in [0, 1), such as [0.9,0.999]"
EPOCHS = "must be a list of epochs, whole numbers from 1, such as [10,20]"
RANGES: dict[str, Range] = {
    **dict.fromkeys(("lr", "weight_decay", "eps", "lr_decay", "momentum_decay"), NOT_NEGATIVE),
    **dict.fromkeys(("initial_accumulator_value", "eta_min", "min_lr", "threshold"), NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "dampening", "end_factor", "final"), UP_TO_ONE),
    **dict.fromkeys(("nesterov", "centered", "amsgrad", "maximize"), _one_of(True, False)),
    "decoupled_weight_decay": _one_of(True, False),
    **dict.fromkeys(("foreach", "fused"), _one_of(True, False, None)),
    **dict.fromkeys(("alpha", "warmup"), BELOW_ONE),
    "betas": _list_of(BELOW_ONE, BETAS, length=2),
    "gamma": _number(" above 0, and finite", lambda value: value > 0),
    "start_factor": _number(" in (0, 1]", lambda value: 0 < value <= 1),
    "factor": _number(" in (0, 1)", lambda value: 0 < value < 1),
    **dict.fromkeys(("step_size", "T_max", "total_iters"), _whole(1)),
    **dict.fromkeys(("patience", "cooldown"), _whole(0)),
    "milestones": _list_of(_whole(1), EPOCHS),
    "mode": _one_of("min", "max"),
    "threshold_mode": _one_of("rel", "abs"),
}


def check_ranges(kind: str, options: dict[str, Any]) -> None:
    """Refuse a value that torch's optimiser or scheduler could not use.

    Raises:
        UserError: names the first such key and its rule.
    """
    for key, value in options.items():
        if key not in RANGES or RANGES[key].holds(value):
            continue
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", value):
            raise UserError(
                f"{kind}.{key}={value}: is text to YAML, which wants a point in it: "
                f"{float(value)!r}."
            )
        require(False, f"{kind}.{key}", value, RANGES[key].rule)
