"""What a script claims: in one of two forms, with numbers that make sense."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zdp_bench.errors import UserError
from zdp_bench.extras.script_audit.claim import DELTAS, Claim
from zdp_bench.privacy.accounting import gdp_epsilon, pld, pld_uniform


def test_an_epsilon_is_claimed_for_its_delta_alone() -> None:
    claim = Claim.read({"epsilon": 2, "delta": 1e-5})
    assert (claim.text, claim.deltas, claim.epsilon(1e-5)) == ("ε = 2 at δ = 1e-05", (1e-5,), 2.0)


def test_a_mechanism_claims_its_tight_epsilon_for_every_delta() -> None:
    full = Claim.read({"noise_multiplier": 2.0})
    assert full.epsilon(0.01) == pytest.approx(gdp_epsilon(0.5, 0.01))
    said = {"noise_multiplier": 0.8, "sample_rate": 0.1, "steps": 20}
    assert Claim.read(said).epsilon(1e-5) == pld(0.8, 0.1, 20, 1e-5)
    assert Claim.read(said, replaced=True).epsilon(1e-5) == pld_uniform(0.4, 0.1, 20, 1e-5)
    assert Claim.read(said).text == "σ = 0.8, rate 0.1, 20 steps"
    assert full.deltas == DELTAS


@pytest.mark.parametrize(
    ("claimed", "sentence"),
    [
        (2.0, "claimed: give"),
        ({}, "claimed: give"),
        ({"steps": 3}, "claimed: give"),
        ({"epsilon": 1.0}, "claimed: 'epsilon' is not known"),
        ({"noise_multiplyer": 1.0}, "Did you mean 'noise_multiplier'"),
        ({"epsilon": math.inf, "delta": 1e-5}, "claimed epsilon=inf"),
        ({"epsilon": 1.0, "delta": 0}, "claimed delta=0.0"),
        ({"noise_multiplier": 0}, "claimed noise_multiplier=0.0"),
        ({"noise_multiplier": 1, "sample_rate": 2}, "claimed sample_rate=2.0"),
        ({"noise_multiplier": 1, "steps": 0}, "claimed steps=0"),
    ],
)
def test_mistakes_end_in_one_sentence(claimed: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Claim.read(claimed)
