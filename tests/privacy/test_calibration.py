"""σ for a target ε: right, on the private side, remembered, and never taken from a file that does
not answer the question.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from zdp_bench.privacy.accountants import Claim, claimed_epsilon
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.calibration import calibrate, calibrate_mechanism, solve
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.registry import names

CLAIM = Claim(0.0, 0.01, 500, 1e-5, 6400, 5)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "zdp-bench" / "calibration"


@pytest.mark.parametrize("name", names("accountant"))
def test_calibration_inverts_every_accountant(name: str) -> None:
    sigma = calibrate(1.7, name, CLAIM)
    reached = claimed_epsilon(name, dataclasses.replace(CLAIM, noise_multiplier=sigma))
    assert 1.7 * 0.998 < reached <= 1.7
    assert claimed_epsilon(name, dataclasses.replace(CLAIM, noise_multiplier=sigma * 0.999)) > 1.7


def test_the_gaussian_mechanism_is_calibrated_exactly() -> None:
    from dp_accounting import get_sigma_gaussian

    whole = Claim(0.0, 1.0, 1, 1e-5, 100, 1)
    assert calibrate(1.0, "pld", whole) == pytest.approx(get_sigma_gaussian(1.0, 1e-5), rel=2e-4)


def test_a_repeat_is_remembered(own_cache: Path) -> None:
    calls = []

    def slow(sigma: float) -> float:
        calls.append(sigma)
        return 1 / sigma

    first = solve(0.5, slow, {"of": "slow"})
    asked = len(calls)
    assert solve(0.5, slow, {"of": "slow"}) == first
    assert len(calls) == asked  # read from the disk: nothing was computed
    assert len(list(own_cache.iterdir())) == 1  # whole files only, nothing half-written
    solve(0.5, slow, {"of": "another"})
    solve(0.6, slow, {"of": "slow"})
    assert len(calls) > asked
    assert len(list(own_cache.iterdir())) == 3


def test_no_question_is_answered_with_the_noise_of_another() -> None:
    """One cache for steps that differ in one thing each: every ε is what was asked."""
    first = (Sampling("poisson", 0.01, 10, 1000), 500, 1e-5)
    others = [
        (Sampling("uniform", 0.01, 10, 1000), *first[1:]),
        (Sampling("poisson", 0.02, 20, 1000), *first[1:]),
        (first[0], 600, 1e-5),
        (*first[:2], 1e-6),
    ]
    for sampling, steps, delta in (first, *others):
        sigma = calibrate_mechanism(1.7, Mechanism.of_z(1.0, sampling), steps, delta)
        reached = tight_epsilon(Mechanism.of_z(sigma, sampling), steps, delta)
        assert 1.7 * 0.998 < reached <= 1.7, (sampling, steps, delta)
    for changed in ({}, {"delta": 1e-6}, {"steps": 600}, {"sample_rate": 0.02}):
        claim = dataclasses.replace(CLAIM, **changed)
        sigma = calibrate(1.7, "pld", claim)
        reached = claimed_epsilon("pld", dataclasses.replace(claim, noise_multiplier=sigma))
        assert 1.7 * 0.998 < reached <= 1.7, changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: json.dumps(json.loads(text) | {"sigma": -1}),
        lambda text: json.dumps(json.loads(text) | {"sigma": "NaN"}),
        lambda text: json.dumps(json.loads(text) | {"asked": "something else", "sigma": 1e-9}),
    ],
    ids=["empty", "cut", "list", "negative", "nan", "other question"],
)
def test_a_damaged_cache_is_ignored_and_mended(damage, own_cache: Path) -> None:
    right = solve(0.5, lambda sigma: 1 / sigma, {})
    (file,) = own_cache.iterdir()
    whole = file.read_text()
    file.write_text(damage(whole))
    assert solve(0.5, lambda sigma: 1 / sigma, {}) == right
    assert file.read_text() == whole


def test_a_cache_that_cannot_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert solve(0.5, lambda sigma: 1 / sigma, {}) == pytest.approx(2.0, rel=2e-4)


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
        solve(target, lambda sigma: 1 / sigma, {})


def test_no_privacy_at_all_needs_no_noise() -> None:
    for name in names("accountant"):
        assert calibrate(float("inf"), name, CLAIM) == 0.0
