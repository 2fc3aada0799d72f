"""A recipe's own mechanism and run: what is sound passes, what is broken in any way is caught."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.audit.subjects import UNIFORM, forget_imaginary, forget_one_bias, subject, weakened
from zdp_bench.algorithms.zeta_dp_sgd import ZetaDPSGD
from zdp_bench.audit.canaries import attack_with_gradients, attack_with_inputs
from zdp_bench.audit.finding import Finding
from zdp_bench.audit.recipe import attack_recipe_release
from zdp_bench.errors import UserError
from zdp_bench.gradients import clipping, reference
from zdp_bench.training import step as engine
from zdp_bench.training.plan import Plan
from zdp_bench.training.setup import Setup

PATIENTS = ["privacy.unit=patient"]
UNIFORM_PATIENTS = [*UNIFORM[:2], "trainer.batch_size=72"]


def run_findings(*overrides: str, confidence: float = 0.99) -> list[Finding]:
    return [
        *attack_recipe_release(subject(*overrides), confidence, 600),
        attack_with_gradients(subject(*overrides), confidence, 400, 1000),
        attack_with_inputs(subject(*overrides), confidence, 400, 1000),
    ]


@pytest.mark.parametrize(
    "overrides", [[], UNIFORM, ["privacy.secure=true"], PATIENTS, [*PATIENTS, *UNIFORM_PATIENTS]]
)
def test_a_sound_recipe_passes(overrides: list[str]) -> None:
    # drawn anew in every run of this test, which must not fail by chance
    secure = "privacy.secure=true" in overrides
    findings = run_findings(*overrides, confidence=1 - 1e-8 if secure else 0.99)
    assert all(finding.as_expected for finding in findings), findings
    assert [f.verdict for f in findings if f.expected == "passes"] == ["passes"] * 4
    assert findings[-1].epsilon_claimed == findings[-2].epsilon_claimed > 0


def test_a_recipe_that_claims_more_than_its_mechanism_gives_is_told_so() -> None:
    findings = attack_recipe_release(
        subject("algorithm.noise=circular", "algorithm.noise_multiplier=0.8"), 0.95, 6000
    )
    assert [finding.verdict for finding in findings] == ["passes", "passes", "flagged"]
    assert findings[2].expected == "either"
    assert "noise multiplier: z = 0.8" in findings[2].claim


@pytest.mark.parametrize(
    ("spoil", "runs_too"),
    [
        (torch.zeros_like, True),
        (forget_imaginary, True),
        (forget_one_bias, False),
        (lambda n: n / 2, False),
    ],
)
def test_a_recipe_with_broken_noise_is_caught(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor], runs_too: bool
) -> None:
    weakened(monkeypatch, spoil)
    assert attack_recipe_release(subject(), 0.99, 2400)[0].verdict == "flagged"
    if runs_too:
        finding = attack_with_gradients(subject(), 0.99, 400, 1000)
        assert finding.verdict == "flagged", finding
        assert int(finding.evidence.split()[0]) > 85  # of 100; some canaries are in and never drawn


def test_a_recipe_whose_noise_is_the_same_in_every_step_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = engine.add_noise
    monkeypatch.setattr(
        engine,
        "add_noise",
        lambda total, mechanism, source, step, times=1.0: real(total, mechanism, source, 0, times),
    )
    finding = attack_with_gradients(subject(), 0.95, 400, 1000)
    assert finding.verdict == "flagged", finding


def test_a_recipe_whose_sampling_takes_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example in every step, where a tenth is claimed."""
    monkeypatch.setattr(
        Plan, "draw", lambda self, key, step, secure=False: (np.arange(1426), 142.6)
    )
    finding = attack_with_gradients(subject("trainer.epochs=4"), 0.99, 400, 1000)
    assert finding.verdict == "flagged", finding


def test_a_recipe_whose_clipping_lets_too_much_through_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms measured 2.4 times too small: the check before training refuses it, and the attack by
    examples finds it too.
    """
    monkeypatch.setattr(
        reference,
        "clip_factors",
        lambda norms, bound, gamma: clipping.clip_factors(norms / 2.4, bound, gamma),
    )
    with pytest.raises(UserError, match="exceeds its bound"):
        subject("algorithm.gradients=reference")
    monkeypatch.setattr(Setup, "check_model", lambda *_: [])
    worst, hostile = attack_recipe_release(subject("algorithm.gradients=reference"), 0.99, 1200)
    # noise and mechanism agree; it is the contributions that are too large
    assert worst.verdict == "passes"
    assert hostile.verdict == "flagged"


def test_clipping_of_records_that_is_sold_as_clipping_of_patients_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each record is clipped by itself, and a patient's are added up."""
    real = ZetaDPSGD.accumulate
    monkeypatch.setattr(
        ZetaDPSGD, "accumulate", lambda self, total, batch, shares=None: real(self, total, batch)
    )
    with pytest.raises(UserError, match="does not fit the way"):
        subject(*PATIENTS)
    monkeypatch.setattr(Setup, "check_model", lambda *_: [])
    worst, hostile = attack_recipe_release(subject(*PATIENTS), 0.99, 2400)
    assert worst.verdict == "passes"
    assert hostile.verdict == "flagged", hostile
    assert "hostile patients" in hostile.case
    assert attack_recipe_release(subject(), 0.99, 1200)[1].verdict == "passes"  # of one record


def test_what_has_no_epsilon_is_not_audited() -> None:
    with pytest.raises(UserError, match="its ε is ∞"):
        subject("algorithm.noise_multiplier=0")
    with pytest.raises(UserError, match="its ε is ∞"):
        subject("algorithm=sgd")
