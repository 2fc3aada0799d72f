"""σ for a target ε: right, and on the private side."""

from __future__ import annotations

import dataclasses
import math
from unittest.mock import Mock

import pytest
from dp_accounting import get_sigma_gaussian

from zdp_bench import registry
from zdp_bench.privacy import calibration
from zdp_bench.privacy.accountants import Claim, claimed_epsilon
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.calibration import calibrate, calibrate_beside, calibrate_mechanism, solve
from zdp_bench.privacy.composition import SpentSteps, compose_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.registry import names
from zdp_bench.report import cells

CLAIM = Claim(0.0, 0.01, 500, 1e-5, 6400, 5)


def inverse(sigma: float) -> float:
    return 1 / sigma


# several papers share one
DISTINCT = {registry.lookup("accountant", name): name for name in names("accountant")}


@pytest.mark.parametrize("name", DISTINCT.values())
def test_calibration_inverts_every_accountant(name: str) -> None:
    sigma = calibrate(1.7, name, CLAIM)
    reached = claimed_epsilon(name, dataclasses.replace(CLAIM, noise_multiplier=sigma))
    assert 1.7 * 0.998 < reached <= 1.7
    assert claimed_epsilon(name, dataclasses.replace(CLAIM, noise_multiplier=sigma * 0.999)) > 1.7


def test_the_gaussian_mechanism_is_calibrated_exactly() -> None:
    whole = Claim(0.0, 1.0, 1, 1e-5, 100, 1)
    assert calibrate(1.0, "pld", whole) == pytest.approx(get_sigma_gaussian(1.0, 1e-5), rel=2e-4)


@pytest.mark.parametrize("sigma", [1.01 / 64, 0.99 * 16384])
def test_the_range_of_noise_reaches_from_one_64th_to_16384(sigma: float) -> None:
    assert solve(1 / sigma, inverse) == pytest.approx(sigma, rel=1e-3)
    beyond = sigma / 1.1 if sigma < 1 else sigma * 1.1
    with pytest.raises(ValueError, match=r"ε = "):
        solve(1 / beyond, inverse)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (0.0, "must be positive"),
        (-1.0, "must be positive"),
        (float("nan"), "must be positive"),
        (1e-9, "no noise multiplier"),
        (1e9, "nothing to calibrate"),
    ],
)
def test_targets_out_of_reach_are_refused(target: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        solve(target, inverse)


@pytest.mark.parametrize("target", [1e-13, 1e-3])
def test_a_target_beside_an_epsilon_of_0_is_reached(target: float) -> None:
    sigma = solve(target, lambda sigma: max(0.0, 1 / sigma - 1))
    assert sigma == pytest.approx(1 / (1 + target), rel=1e-4)


@pytest.mark.parametrize("earlier_steps", [0, 100])
def test_a_mechanisms_noise_reaches_the_target_and_no_more(earlier_steps: int) -> None:
    """Alone, and in two runs after another one on the same examples."""
    sampling = Sampling("poisson", 0.02, 20.0, 1000)
    unit = Mechanism((Block("all", (2,), "float32", 2.0, 1.0, "real"),), sampling)
    earlier = [SpentSteps(2.0, sampling, earlier_steps)]

    def epsilon_of(multiplier: float) -> float:
        if earlier_steps == 0:
            return tight_epsilon(Mechanism.of_z(multiplier * unit.z, sampling), 300, 1e-5)
        own = SpentSteps(multiplier * unit.z, sampling, 300)
        return compose_epsilon([*earlier, own, own], 1e-5)

    if earlier_steps == 0:
        multiplier = calibrate_mechanism(1.5, unit, 300, 1e-5)
    else:
        multiplier = calibrate_beside(1.5, earlier, SpentSteps(unit.z, sampling, 300), 2, 1e-5)
    assert epsilon_of(multiplier) <= 1.5 < epsilon_of(0.999 * multiplier)


def test_no_privacy_at_all_needs_no_noise() -> None:
    for name in names("accountant"):
        assert calibrate(float("inf"), name, CLAIM) == 0.0


def test_what_another_package_claims_is_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its code nothing is known that could tell whether a remembered σ still holds."""
    scale = 1.0
    theirs = {"theirs": lambda claim: scale / claim.noise_multiplier}
    monkeypatch.setitem(registry._builders, "accountant", registry._builders["accountant"] | theirs)
    sampling = Sampling("poisson", 0.02, 20.0, 1000)
    privacy = Mock(noise_multiplier=2.0, sampling=sampling, delta=1e-5, claimed_by="theirs")
    assert cells._claimed(privacy, 10, 1) == 0.5  # after an epoch, for a table
    first, scale = calibrate(0.5, "theirs", CLAIM), 2.0
    assert calibrate(0.5, "theirs", CLAIM) == pytest.approx(2 * first, rel=1e-3)
    assert cells._claimed(privacy, 10, 1) == 1.0


@pytest.mark.parametrize(("target", "sigma"), [(1 / 3, 3.0), (0.05, 20.0), (7.0, 1 / 7)])
def test_a_calibrated_sigma_is_the_same_from_version_to_version(
    target: float, sigma: float
) -> None:
    assert sigma <= solve(target, inverse) <= sigma * (1 + 1e-4)
    # the same where ε falls at once, which leaves a search nothing but to halve
    assert sigma <= solve(1.0, lambda z: 2.0 if z < sigma else 0.5) <= sigma * (1 + 1e-4)


@pytest.mark.parametrize("target", [0.5, 1e12, 1.5e12, 1e300])
def test_a_target_of_any_size_is_reached(target: float) -> None:
    """Those above 10¹² were an error: infinite ε were taken for 10¹²."""
    sigma = solve(target, lambda sigma: math.inf if sigma < 3 else 6 * target / sigma)
    assert 6 <= sigma <= 6 * (1 + 1e-4)


def test_a_sigma_that_reaches_the_target_exactly_is_not_rounded() -> None:
    assert solve(1.0, inverse) == 1.0


def test_rounding_makes_no_noise_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "call_cached", lambda *_: 2.0)
    sampling = Sampling("poisson", 0.02, 20.0, 1000)
    unit = Mechanism.of_z(1.7, sampling)
    alone = calibrate_mechanism(1.5, unit, 300, 1e-5)
    beside = calibrate_beside(1.5, [], SpentSteps(1.7, sampling, 300), 1, 1e-5)
    for multiplier in (alone, beside):
        assert 1 < multiplier / (2.0 / 1.7) < 1 + 1e-11


def test_a_direction_without_noise_is_refused_alone_and_beside_other_runs() -> None:
    """No noise multiplier would be large enough: the search for one would never end."""
    sampling = Sampling("poisson", 0.02, 20.0, 1000)
    half = Mechanism((Block("all", (2,), "complex64", 2.0, 1.0, "real_on_complex"),), sampling)
    with pytest.raises(ValueError, match="some direction gets no noise"):
        calibrate_mechanism(1.5, half, 300, 1e-5)
    with pytest.raises(ValueError, match="some direction gets no noise"):
        calibrate_beside(1.5, [], SpentSteps(half.z, sampling, 300), 1, 1e-5)


@pytest.mark.parametrize("power", [0.5, 1.0, 1.7])
def test_what_is_found_never_exceeds_the_target(power: float) -> None:
    """Roots are found up to rounding, on either side."""
    targets = [0.2 * 1.2**number for number in range(17)]
    excess = [solve(target, lambda sigma: sigma**-power) ** -power - target for target in targets]
    assert max(excess) <= 0
    assert min(excess) < 0
