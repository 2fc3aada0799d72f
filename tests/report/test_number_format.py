"""How numbers are printed."""

from __future__ import annotations

import math

import pytest

from zdp_bench.report.number_format import interval


@pytest.mark.parametrize(
    ("low", "high", "printed"),
    [
        (30.384, 33.217, "30.4 to 33.2"),
        (1.2341, 1.2349, "1.23"),  # alike in the digits that are shown
        (1.5, 1.5, "1.5"),
        (None, 1.5, "1.5"),  # a record of before there was a lower bound
        (1274.0, 5000.4, "1,274 to 5,000"),
        (2.0, math.inf, "2 to ∞"),
        (math.inf, math.inf, "∞"),
        (None, None, ""),
    ],
)
def test_an_interval_is_shown_where_its_ends_differ(
    low: float | None, high: float | None, printed: str
) -> None:
    assert interval(low, high) == printed
