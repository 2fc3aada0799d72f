"""The attacks on a whole run: the recipe's own sampling and steps, the same for the same seed, not
blind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.audit.subjects import subject, weakened
from zdp_bench.audit import canaries
from zdp_bench.audit.canaries import attack_with_gradients, attack_with_inputs
from zdp_bench.training.batches import micro_batches
from zdp_bench.training.plan import Plan


def test_gradient_canaries_are_drawn_by_the_recipes_own_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[np.ndarray] = []
    real = Plan.draw

    def spy(self: Plan, key: str, step: int, secure: bool = False) -> tuple[np.ndarray, float]:
        drawn = real(self, key, step, secure)
        taken.append(drawn[0])
        return drawn

    monkeypatch.setattr(Plan, "draw", spy)
    attack_with_gradients(subject(), 0.99, 100, 7)
    assert len(taken) == 7
    of = subject()
    assert all((a == of.plan.draw(of.key, step)[0]).all() for step, a in enumerate(taken[:7]))


def test_steps_limit_the_run_and_the_claim() -> None:
    short, whole = (attack_with_gradients(subject(), 0.99, 100, steps) for steps in (5, 1000))
    assert short.epsilon_claimed < whole.epsilon_claimed
    assert short.claim == "tight ε of the first 5 of 20 steps"
    assert whole.claim == "tight ε of 20 steps"


def test_a_run_is_audited_the_same_for_the_same_seed() -> None:
    assert attack_with_gradients(subject(), 0.99, 100, 5) == attack_with_gradients(
        subject(), 0.99, 100, 5
    )
    assert attack_with_inputs(subject(), 0.99, 100, 5) == attack_with_inputs(
        subject(), 0.99, 100, 5
    )


def test_input_canaries_are_seen_where_nothing_protects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide network without noise learns wrong targets by heart; the black box attack must
    see it.
    """
    weakened(monkeypatch, torch.zeros_like)
    more = [
        "model.hidden=[128]",
        "trainer.epochs=60",
        "algorithm.max_grad_norm=10",
        "optimizer.lr=1.0",
    ]
    finding = attack_with_inputs(subject(*more), 0.99, 400, 10_000)
    assert finding.lower_bound > 0.5, finding


def test_a_patient_is_a_canary_with_all_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records come together or not at all, and each carries another patient's target."""
    of = subject("privacy.unit=patient")
    assert of.patients is not None
    owned = {frozenset(of.examples_of(unit).tolist()) for unit in range(of.units)}
    assert sorted(map(len, owned))[-1] == 2
    taken: list[tuple[int, ...]] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        pieces = micro_batches(*args, **kwargs)
        if kwargs.get("patients"):
            drawn, shares = kwargs["patients"].take(args[1], args[4], 0)
            taken.extend(map(tuple, np.split(drawn, np.cumsum(shares)[:-1])))
        return pieces

    monkeypatch.setattr(canaries, "micro_batches", spy)
    finding = attack_with_inputs(of, 0.99, 100, 3)
    assert {frozenset(map(int, share)) for share in taken if len(share)} <= owned
    assert finding.epsilon_claimed > 0
    assert finding.verdict == "passes"
