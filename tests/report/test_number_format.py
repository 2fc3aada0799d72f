"""How numbers are printed."""

import math

import pytest

from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.report.number_format import interval, mean_and_deviation


@pytest.mark.parametrize(
    ("low", "high", "printed"),
    [
        (30.384, 33.217, "30.3 to 33.3"),
        (1.2341, 1.2349, "1.24"),  # alike in the digits shown
        (None, 1.5, "1.5"),  # a record of before there was a lower bound
        (1274.0, 5000.4, "1,274 to 5,001"),
        (None, None, ""),
    ],
)
def test_an_interval_is_shown_where_its_ends_differ(
    low: float | None, high: float | None, printed: str
) -> None:
    assert interval(low, high) == printed


def test_epsilon_has_three_digits() -> None:
    values = (math.inf, 3.3967, 0.05, None, math.nan)
    assert [show_epsilon(value) for value in values] == ["∞", "3.4", "0.05", "", ""]


@pytest.mark.parametrize(
    ("values", "unit", "printed"),
    [
        ([50.0], "%", "50.00 % (n = 1)"),
        ([0.5, math.nan], "%", "undefined (n = 2)"),
        ([math.inf], "dB", "∞ dB (n = 1)"),
        ([-math.inf, -math.inf], "", "-∞ (n = 2)"),
        ([math.inf, 30.0], "dB", "undefined (n = 2)"),
        ([math.inf, -math.inf], "dB", "undefined (n = 2)"),
        ([0.042], "", "0.0420 (n = 1)"),
        ([1.0, 3.0], "dB", "2.00 ± 1.41 dB (n = 2)"),
    ],
)
def test_mean_and_deviation_have_the_digits_of_their_unit(
    values: list[float], unit: str, printed: str
) -> None:
    assert mean_and_deviation(values, unit) == printed
