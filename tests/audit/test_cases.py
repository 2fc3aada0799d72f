"""Every built-in case gets the verdict it deserves, and gets it because of what it claims."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest

from zdp_bench.audit import cases
from zdp_bench.audit.cases import CASES, Case
from zdp_bench.audit.release import RELEASE_DELTA, attack_release
from zdp_bench.audit.releases import release_fourier, release_under_measured
from zdp_bench.privacy.accounting import gdp_epsilon

# trials; the others get 20,000
QUICK = {
    "opacus": 14_000,
    "opacus_secure": 2_000,
    "opacus_ghost": 2_000,
}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_built_in_case_gets_the_verdict_it_deserves(case: Case) -> None:
    if case.needs:
        pytest.importorskip(case.needs)
    finding = case.audit(seed=0, confidence=0.99, trials=QUICK.get(case.name, 20_000))
    assert finding.verdict == case.expected, finding
    if case.rate == 1:
        assert finding.epsilon_claimed == pytest.approx(gdp_epsilon(1 / case.z, RELEASE_DELTA))
    elif case.steps == 1:  # at a δ above the rate
        assert finding.epsilon_claimed == 0.0


@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.needs and c.trials > 2_000], ids=lambda case: case.name
)
def test_the_verdict_is_the_same_for_another_seed(case: Case) -> None:
    assert case.audit(1, 0.99, trials=20_000).verdict == case.expected


def test_the_same_seed_gives_the_same_finding() -> None:
    case = next(case for case in CASES if case.name == "circular_2021")
    assert case.audit(5, 0.99, 2000) == case.audit(5, 0.99, 2000)
    assert case.audit(5, 0.99, 2000) != case.audit(6, 0.99, 2000)


def test_real_noise_in_the_fourier_domain_loses_every_time_whatever_sigma_is() -> None:
    """Wang et al.

    2024, Algorithm 2, at σ = 1000: the odd part of the gradient is released without noise.
    """
    _, evidence = attack_release(release_fourier(0, noise="real", std=1000.0), 1000, 0.01, 0.99)
    assert evidence == "the attack wins 1,500 of 1,500"


def test_the_sound_cases_would_be_caught_at_a_smaller_claim() -> None:
    """What passes, passes because its claim is right, not because the attack is blind."""
    for name, z in (
        ("per_component", 1.6),
        ("circular", 1.2),
        ("gredp", 1.6),
        ("gredp_complex_at_z", 1.2),
    ):
        case = next(case for case in CASES if case.name == name)
        assert dataclasses.replace(case, z=z).audit(0, 0.99, 20_000).verdict == "flagged"


def test_the_clipper_that_measures_too_little_does_so_by_much() -> None:
    release = release_under_measured(0)
    moved = release(True, 4000).mean(dim=0) - release(False, 4000).mean(dim=0)
    # an ordinary example; the bound is 1, the standard error about 0.1
    assert float(moved.norm()) > 1.3


def test_a_case_is_skipped_where_its_package_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cases, "find_spec", lambda name: None)
    finding = next(case for case in CASES if case.needs).audit(0, 0.99)
    assert (finding.verdict, finding.as_expected) == ("skipped", True)
    assert finding.evidence == "opacus is not installed"


def test_the_names_of_the_cases_are_different() -> None:
    assert not [
        pair for pair in combinations([case.name for case in CASES], 2) if pair[0] == pair[1]
    ]
