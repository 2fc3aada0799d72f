"""A printed ε never says less than was spent, and a lower bound never more than was proved."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zdp_bench.privacy.digits import write_epsilon
from zdp_bench.report.number_format import interval

PACKAGE = Path(__file__).parents[2] / "zdp_bench"
WRITTEN = [(1.3039, "1.31"), (1.3, "1.3"), (0.8, "0.8"), (9.996, "10"), (100.01, "101")]
WRITTEN += [(3.0000000001, "3"), (999.2, "1,000"), (1234.1, "1,235"), (0.00012345, "0.000124")]
WRITTEN += [(0.0, "0")]


@pytest.mark.parametrize(("value", "written"), WRITTEN)
def test_three_digits_rounded_up(value: float, written: str) -> None:
    assert write_epsilon(value) == written


@given(st.floats(1e-9, 1e12))
def test_no_epsilon_is_written_below_what_it_is(value: float) -> None:
    high, low = (
        float(write_epsilon(value, at_least).replace(",", "")) for at_least in (False, True)
    )
    assert low <= value * (1 + 1e-8)
    assert value * (1 - 1e-8) <= high <= max(value * 1.0101, value + 1)
    assert low >= min(value / 1.0101, value - 1)


def test_what_is_no_number() -> None:
    words = [write_epsilon(value) for value in (None, math.nan, math.inf)]
    assert words == ["", "", "∞"]
    assert interval(1.3031, 1.3039) == "1.31"
    assert interval(1.2931, 1.3039) == "1.29 to 1.31"
    assert interval(1.3, math.inf) == "1.3 to ∞"


def test_the_page_writes_the_same() -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("no node here")
    script = (PACKAGE / "extras/page/templates/charts.js").read_text(encoding="utf-8")
    (function,) = re.findall(r"^function roundUp.*?^}", script, re.M | re.S)
    (written,) = re.findall(r"epsilon: (\(value\) =>.*?),\n  metric", script, re.S)
    values = ", ".join(str(value) for value, _ in WRITTEN)
    code = f"{function}\nconsole.log([{values}].map({written}).join(' '))"
    done = subprocess.run([node, "-e", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [written for _, written in WRITTEN]


def test_nobody_else_formats_one() -> None:
    wrong = re.compile(r"ε[^\"{}]*\{\w*(epsilon|spent|total|cost|before|after)\w*:")
    for path in PACKAGE.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not wrong.search(line) or "Claim(" in line or "faceoff" in path.name, line
