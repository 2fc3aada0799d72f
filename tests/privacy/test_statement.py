"""A δ that promises little is asked about, and one that promises nothing is refused."""

from __future__ import annotations

import logging
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_cli import leave
from zdp_bench import cli, make_private
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.privacy.statement import question, round_down, round_up, show_epsilon, warn_of
from zdp_bench.report.number_format import interval
from zdp_bench.training.setup import Setup

EPSILON = "--sigma 1 --sample-rate 0.1 --steps 10 --examples 100"


def private(delta: float, ledger: Path) -> None:
    """Open a private training of 100 examples."""
    model = torch.nn.Linear(4, 2)
    examples = [(torch.randn(4), number % 2) for number in range(100)]
    how = {"epochs": 1, "batch_size": 10, "max_grad_norm": 1.0, "noise_multiplier": 1.0}
    make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        examples,
        loss=torch.nn.CrossEntropyLoss(reduction="none"),
        delta=delta,
        ledger=ledger,
        **how,
    ).close()


@pytest.mark.parametrize("delta", [0.0, 0.1])
def test_no_epsilon_is_stated_at_a_delta_from_a_tenth_on(
    delta: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "must lie above 0 and below 0.1"
    for words in (
        ["run", "recipe=quickstart", f"privacy.delta={delta}"],
        ["validate", "recipe=quickstart", f"privacy.delta={delta}"],
        ["epsilon", *shlex.split(EPSILON), f"--delta={delta}"],
        ["budget", f"--results={tmp_path}", f"--delta={delta}"],
    ):
        assert says in leave(words, capsys)
    with pytest.raises(UserError, match=says):
        private(delta, tmp_path / "ledger.jsonl")


def test_a_delta_above_one_over_n_is_asked_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        private(0.01, tmp_path / "right.jsonl")
        Setup.of(configured(["recipe=quickstart"]))
        Setup.of(configured(["recipe=quickstart", "algorithm=sgd", "privacy.delta=0.01"]))
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        private(0.03, tmp_path / "wrong.jsonl")
        Setup.of(configured(["recipe=quickstart", "privacy.delta=0.01"]))
    assert caplog.messages == [question(0.03, 100), question(0.01, 1426)]
    assert "one over the number of protected examples or owners" in caplog.messages[0]
    for delta, asked in ((0.009, ""), (0.02, "above 1/100")):
        with pytest.raises(SystemExit):
            cli.main(["epsilon", *shlex.split(EPSILON), f"--delta={delta}"])
        shown = capsys.readouterr().out
        assert asked in shown
        assert ("δ = " in shown) == bool(asked)


@pytest.mark.parametrize("units", [1426, 1500, 60_000])
def test_the_advice_for_a_large_delta_is_no_delta_that_is_too_large(units: int) -> None:
    """One over 60,000 was rounded up to 2e-05, at which the same warning came again."""
    numbers = re.findall(r"\d[\d.,/e-]*", question(0.01, units))
    assert numbers == ["0.01", f"1/{units:,},"]


PACKAGE = Path(__file__).parents[2] / "zdp_bench"
WRITTEN = [(1.3039, "1.31"), (1.3, "1.3"), (0.8, "0.8"), (9.996, "10"), (100.01, "101")]
WRITTEN += [(3.0000000001, "3"), (999.2, "1,000"), (1234.1, "1,235"), (0.00012345, "0.000124")]
WRITTEN += [(0.0, "0")]


@pytest.mark.parametrize(("value", "written"), WRITTEN)
def test_three_digits_rounded_up(value: float, written: str) -> None:
    assert show_epsilon(value) == written


@settings(max_examples=30)
@given(st.floats(1e-9, 1e12))
def test_no_epsilon_is_written_below_what_it_is(value: float) -> None:
    high, low = (float(show_epsilon(value, least).replace(",", "")) for least in (False, True))
    assert low <= value * (1 + 1e-8)
    assert value * (1 - 1e-8) <= high <= max(value * 1.0101, value + 1)
    assert low >= min(value / 1.0101, value - 1)


def test_what_is_no_number() -> None:
    words = [show_epsilon(value) for value in (None, math.nan, math.inf)]
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
            assert not wrong.search(line) or "Claim(" in line, line


@pytest.mark.parametrize("digits", [3, 5, 6])
def test_noise_is_rounded_up_and_a_lower_bound_down_by_less_than_a_digit(digits: int) -> None:
    for value in (0.5904978, 1e-7 / 3, 12345.6789, 9.999999999, 1 + 2**-52, 2e19 / 3):
        low, high = round_down(value, digits), round_up(value, digits)
        assert low <= value <= high
        assert high - low <= 10.0 ** (1 - digits) * high
        assert [float(f"{bound:.{digits}g}") for bound in (low, high)] == [low, high]
        assert round_up(high, digits) == round_down(high, digits) == high
    assert round_up(0.59041, 4) == 0.5905
    for whole in (0.0, 1.1, math.inf):
        assert round_up(whole, digits) == round_down(whole, digits) == whole
