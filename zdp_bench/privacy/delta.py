"""Which δ an ε may be stated at, and which is asked about."""

from __future__ import annotations

import logging
from functools import cache

from zdp_bench.errors import require

MOST_DELTA = 0.1  # from here on an ε says nothing: at 0.5 it is 0 for much of what protects nobody

log = logging.getLogger(__name__)


def require_delta(key: str, delta: float) -> None:
    """Refuse a δ outside (0, 0.1).

    Raises:
        UserError: names the key.
    """
    rule = (
        f"must lie above 0 and below {MOST_DELTA:g}: it is the probability that the promise of ε "
        "fails; take one well below 1 / the number of examples"
    )
    require(0 < delta < MOST_DELTA, key, delta, rule)


def question(delta: float, units: int) -> str:
    """Return a sentence on a δ that is above one over the number of units; '' for any other."""
    if delta * units <= 1:
        return ""
    return (
        f"δ = {delta:g} is above 1/{units:,}, one over the number of who is protected: to give "
        f"one of them away whole would keep such a promise. Take δ below {1 / units:.1g}."
    )


@cache
def warn_of(delta: float, units: int) -> None:
    """Log what `question` asks, once a process."""
    if asked := question(delta, units):
        log.warning(asked)
