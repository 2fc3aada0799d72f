"""A recipe's own mechanism and run: what is sound passes, what is broken in any way is caught."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zdp_bench.algorithms.zeta_dp_sgd import ZetaDPSGD
from zdp_bench.config import compose, parse
from zdp_bench.errors import UserError
from zdp_bench.extras.audit import recipe
from zdp_bench.extras.audit.recipe import (
    Coordinates,
    Subject,
    attack_recipe_release,
    attack_with_gradients,
    canary_supports,
)
from zdp_bench.gradients import clipping, reference
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.training import step as engine
from zdp_bench.training.plan import Plan
from zdp_bench.training.setup import Setup

TINY = ["recipe=quickstart", "model.hidden=[6]", "trainer.epochs=2", "trainer.sample_rate=0.1"]
TINY += ["threads=1"]
UNIFORM = ["trainer.sampling=uniform", "trainer.sample_rate=null", "trainer.batch_size=144"]


def subject(*overrides: str) -> Subject:
    return Subject.prepare(parse(compose([*TINY, *overrides])))


def weakened(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor]) -> None:
    """Spoil the noise at its source, for the engine and for the attack on one release alike."""
    real = engine.add_noise

    def add_noise(
        total: dict[str, Tensor], mechanism: Mechanism, source: Any, step: int, times: float = 1.0
    ) -> dict[str, Tensor]:
        before = {name: value.clone() for name, value in total.items()}
        noisy = real(total, mechanism, source, step)
        return {name: (before[name] + spoil(noisy[name] - before[name])) * times for name in noisy}

    monkeypatch.setattr(engine, "add_noise", add_noise)
    monkeypatch.setattr(recipe, "add_noise", add_noise)


def forget_imaginary(noise: Tensor) -> Tensor:
    return torch.complex(noise.real, torch.zeros_like(noise.imag)) if noise.is_complex() else noise


def forget_one_bias(noise: Tensor) -> Tensor:
    return torch.zeros_like(noise) if noise.shape == (10,) else noise


EVERY_KIND = (
    Block("real", (3, 2), "float64", 1.0, 1.0, "real"),
    Block("circular", (4,), "complex128", 1.0, 1.0, "circular"),
    Block("correlated", (2, 2), "complex128", 1.0, 1.0, "correlated", rho=0.5),
    Block("hermitian", (2, 3, 4), "complex128", 1.0, 1.0, "hermitian", fft_dims=(1, 2)),
    Block("half", (5,), "complex128", 1.0, 1.0, "real_on_complex"),
    Block("scalar", (), "float64", 1.0, 1.0, "real"),
)
POISSON = Sampling("poisson", 0.25, 25.0, 100)


def zeros(mechanism: Mechanism) -> dict[str, Tensor]:
    return {b.name: torch.zeros(b.shape, dtype=getattr(torch, b.dtype)) for b in mechanism.blocks}


def test_coordinates_are_an_isometry_of_every_kind_of_block() -> None:
    mechanism = Mechanism(EVERY_KIND, POISSON)
    coordinates = Coordinates(mechanism)
    assert coordinates.size == 6 + 8 + 8 + 24 + 10 + 1 == len(coordinates.kinds())
    vector = torch.randn(coordinates.size, dtype=torch.float64)
    blocks = zeros(mechanism)
    coordinates.add_vector(vector, blocks)
    torch.testing.assert_close(coordinates.to_vector(blocks), vector, rtol=1e-12, atol=1e-12)
    length = math.sqrt(sum(float(value.abs().square().sum()) for value in blocks.values()))
    assert length == pytest.approx(float(vector.norm()))
    signal = torch.fft.ifftn(blocks["hermitian"], dim=(1, 2), norm="ortho")
    assert float(signal.imag.abs().max()) < 1e-12


@pytest.mark.parametrize("joint", [True, False])
def test_canaries_have_exactly_the_bound_and_are_orthogonal(joint: bool) -> None:
    bounds = (2.0, 2.0) if joint else (2.0, 3.0)
    blocks = (
        Block("a", (40,), "float64", bounds[0], 1.0, "real"),
        Block("b", (30,), "complex128", bounds[1], 1.0, "circular"),
        *(() if joint else (Block("small", (3,), "float64", 9.0, 1.0, "real"),)),
    )
    mechanism = Mechanism(blocks, POISSON, joint=joint)
    coordinates = Coordinates(mechanism)
    indices, values = canary_supports(mechanism, coordinates, 10, 4, np.random.default_rng(0))
    dense = np.zeros((10, coordinates.size))
    for row, index, value in zip(dense, indices, values, strict=True):
        row[index] = value
    assert np.allclose(dense @ dense.T, np.diag(np.diag(dense @ dense.T)))
    for row in dense:
        total = zeros(mechanism)
        coordinates.add_vector(torch.from_numpy(row), total)
        norms = [float(total[block.name].abs().square().sum()) ** 0.5 for block in blocks]
        if joint:
            assert math.hypot(*norms) == pytest.approx(2.0)
        else:
            assert norms == pytest.approx([2.0, 3.0, 0.0])  # no room for ten in the smallest


PATIENTS = ["privacy.unit=patient"]
UNIFORM_PATIENTS = [*UNIFORM[:2], "trainer.batch_size=72"]
BANDS = ["algorithm=band_mf", "algorithm.bands=4", "model=real_mlp", "model.complex_as=magnitude"]
BANDS += ["algorithm.noise_multiplier=1.5"]


SECURE = pytest.param(["privacy.secure=true"], marks=pytest.mark.slow)


@pytest.mark.parametrize("overrides", [[], UNIFORM, SECURE, [*PATIENTS, *UNIFORM_PATIENTS], BANDS])
def test_a_sound_recipe_passes(overrides: list[str]) -> None:
    # secure noise is drawn anew in every run of this test, which must not fail by chance
    secure = "privacy.secure=true" in overrides
    confidence, of = 1 - 1e-8 if secure else 0.99, subject(*overrides)
    findings = attack_recipe_release(of, confidence, 300)
    findings.append(attack_with_gradients(of, confidence, 400, 1000))
    assert [finding.verdict for finding in findings] == ["passes"] * 3, findings
    assert findings[-1].epsilon_claimed > 0


@pytest.mark.parametrize(
    ("spoil", "runs_too"), [(forget_imaginary, True), (forget_one_bias, False)]
)
def test_a_recipe_with_broken_noise_is_caught(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor], runs_too: bool
) -> None:
    weakened(monkeypatch, spoil)
    of = subject()
    assert attack_recipe_release(of, 0.99, 300)[0].verdict == "flagged"
    if runs_too:
        finding = attack_with_gradients(of, 0.99, 400, 1000)
        assert finding.verdict == "flagged", finding
        assert int(finding.evidence.split()[0]) > 85  # of 100; some canaries are in and never drawn


def test_a_recipe_whose_noise_is_the_same_in_every_step_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = engine.add_noise

    def at_step_0(total: Any, mechanism: Any, source: Any, step: int, times: float = 1.0) -> Any:
        return real(total, mechanism, source, 0, times)

    monkeypatch.setattr(engine, "add_noise", at_step_0)
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
    """Norms measured 2.4 times too small: the check before training and the attack find it."""

    def half(norms: Tensor, bound: float, gamma: float) -> Tensor:
        return clipping.clip_factors(norms / 2.4, bound, gamma)

    monkeypatch.setattr(reference, "clip_factors", half)
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
    worst, hostile = attack_recipe_release(subject(*PATIENTS), 0.99, 1200)
    assert worst.verdict == "passes"
    assert hostile.verdict == "flagged", hostile
    assert "hostile patients" in hostile.case


def test_a_record_that_makes_the_sum_nan_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, as 0·∞ in clipping by hand, is no number, but it shows that the record is there."""
    real = ZetaDPSGD.accumulate

    def overflow(self: ZetaDPSGD, total: Any, batch: Any, shares: Any = None) -> None:
        real(self, total, batch, shares)
        if batch[0].abs().max() > 1e18:
            next(iter(total.values())).fill_(math.nan)

    of = subject()
    monkeypatch.setattr(ZetaDPSGD, "accumulate", overflow)
    worst, hostile = attack_recipe_release(of, 0.99, 300)
    assert worst.verdict == "passes"
    assert hostile.verdict == "flagged", hostile


def test_correlated_noise_that_is_too_little_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of correlated noise: only an attack that undoes the correlation sees it."""
    weakened(monkeypatch, lambda noise: noise / 4)
    more = ["trainer.epochs=8", "algorithm.noise_multiplier=6.0"]
    finding = attack_with_gradients(subject(*BANDS, *more), 0.99, 400, 1000)
    assert finding.verdict == "flagged", finding


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


def test_steps_limit_the_run_and_the_claim_and_a_seed_repeats_both() -> None:
    short, again, whole = (
        attack_with_gradients(subject(), 0.99, 100, steps) for steps in (5, 5, 1000)
    )
    assert short == again
    assert short.epsilon_claimed < whole.epsilon_claimed
    assert short.claim == "tight ε of the first 5 of 20 steps"
    assert whole.claim == "tight ε of 20 steps"


def test_a_run_with_bands_is_attacked_for_a_cycle_at_least() -> None:
    finding = attack_with_gradients(subject(*BANDS), 0.99, 100, 3)
    assert finding.claim.startswith("tight ε of the first 4 of")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["federated.nodes=2"], r"uses one training set: add federated\.nodes=null"),
        (["trainer.augmentations=3"], "augmentations"),
        (["algorithm.noise_multiplier=0"], "its ε is ∞"),
        (["algorithm=sgd"], "its ε is ∞"),
    ],
)
def test_what_an_audit_cannot_attack_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        subject(*words)
