"""The built-in cases of an audit: mechanisms whose claim is known to be right or wrong.

An audit must let the right ones pass and catch the wrong ones. Ours are the registered algorithms
on a tiny network, broken in one place if at all; Opacus is run as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from zdp_bench.audit.finding import Finding
from zdp_bench.audit.release import RELEASE_DELTA, Release, attack_release
from zdp_bench.audit.releases import (
    SIGMA,
    drop_imaginary_part,
    release_at_times,
    release_cancelling,
    release_fourier,
    release_opacus,
    release_sampled,
    release_two_runs,
    release_under_measured,
    release_zeta,
    together,
)
from zdp_bench.privacy.accounting import gdp_epsilon, tight_epsilon
from zdp_bench.privacy.mechanism import Mechanism, Sampling

TRIALS = 40_000  # of each neighbour
SHARP = 0.05  # the noise multiplier with which all that shows is whether an example was drawn


@dataclass(frozen=True)
class Case:
    """A mechanism whose claim is known to be right or wrong.

    Attributes:
        make: seed -> its release.
        z: the noise multiplier it claims for one step.
        rate, steps: of the Poisson batches it claims.
        delta: the δ at which its attack shows most.
        needs: a package that must be installed, else the case is skipped.
        trials: at most so many of each neighbour.
    """

    name: str
    claim: str
    expected: Literal["passes", "flagged"]
    make: Callable[[int], Release]
    z: float = SIGMA
    rate: float = 1.0
    steps: int = 1
    delta: float = RELEASE_DELTA
    needs: str = ""
    trials: int = TRIALS

    def audit(self, seed: int, confidence: float, trials: int = TRIALS) -> Finding:
        """Attack the mechanism, unless what it needs is not installed."""
        claimed = gdp_epsilon(1 / self.z, self.delta)
        if self.rate < 1:
            drawn = Sampling("poisson", self.rate, 4 * self.rate, 4)
            claimed = tight_epsilon(Mechanism.of_z(self.z, drawn), self.steps, self.delta)
        about = (self.name, self.claim, claimed)
        if self.needs and find_spec(self.needs) is None:
            said = f"{self.needs} is not installed"
            return Finding(*about, 0.0, self.delta, confidence, "skipped", "skipped", said)
        bound, evidence = attack_release(
            self.make(seed), min(trials, self.trials), self.delta, confidence
        )
        return Finding.of(*about, bound, self.delta, confidence, self.expected, evidence)


def _sound(name: str, claim: str, make: Callable[..., Release], **more: Any) -> Case:
    return Case(name, claim, "passes", make, **more)


def _broken(name: str, claim: str, make: Callable[..., Release], **more: Any) -> Case:
    return Case(name, claim, "flagged", make, **more)


circular = partial(release_zeta, noise="circular")
gredp_complex = partial(release_fourier, noise="complex")
spectral = partial(release_fourier, algorithm="spectral_dp")
spectral_2023 = partial(spectral, noise="as_published", back=False)
HALF = SIGMA / math.sqrt(2)

CASES: tuple[Case, ...] = (
    _sound("per_component", "ζ-DP-SGD, σ on each part: z = σ", release_zeta),
    _sound("circular", "circular noise, at what it gives: z = σ/√2", circular, z=HALF),
    _broken("circular_2021", "circular noise of Ziller et al. 2021: z = σ", circular),
    _broken(
        "no_imaginary_noise",
        "noise that forgets the imaginary part: z = σ",
        partial(release_zeta, spoil=drop_imaginary_part),
    ),
    _broken("under_measured_norm", "clipping by |Σ g²| for Σ|g|²: z = σ", release_under_measured),
    _sound("gredp", "GReDP, sound noise: z = σ", release_fourier),
    _sound(
        "gredp_complex_at_z",
        "GReDP, complex noise, at what it gives: z = σ/√2",
        gredp_complex,
        z=HALF,
    ),
    _broken("gredp_complex", "GReDP, complex noise (its Theorem 1): z = σ", gredp_complex),
    _broken(
        "gredp_real",
        "GReDP, real noise (its Algorithm 2): z = σ",
        partial(release_fourier, noise="as_published"),
    ),
    _sound("spectral_dp", "Spectral-DP, sound noise: z = σ", spectral),
    _broken("spectral_dp_2023", "Spectral-DP as published: z = σ", spectral_2023),
    *(
        _broken(name, f"Opacus, complex layer, {how}: z = σ", make, needs="opacus")
        for name, how, make in (
            ("opacus", "hooks", release_opacus),
            ("opacus_secure", "secure mode", partial(release_opacus, secure_mode=True)),
            ("opacus_ghost", "ghost clipping", partial(release_opacus, ghost=True)),
        )
    ),
    *(
        (_sound if keyed else _broken)(
            f"two_runs_{change}" if keyed else f"shared_noise_{change}",
            f"two runs that differ in {what}, noise of {'a key each' if keyed else 'one seed'}: "
            f"z = {z:.3g} together",
            partial(release_two_runs, change=change, keyed=keyed),
            z=z,
            trials=2_000,  # each takes two keys and two draws
        )
        for change, what, z in (
            ("sigma", "σ", together(SIGMA, 1.25)),
            ("rate", "the rate", together(SIGMA, SIGMA)),
            ("record", "one record", SIGMA),
        )
        for keyed in (True, False)
    ),
    *(
        (_sound if rate == 1 else _broken)(
            name,
            f"Poisson batches drawn at {rate:g} times the rate of 0.1 that is claimed",
            partial(release_sampled, rate=0.1 * rate, std=SHARP),
            z=SHARP,
            rate=0.1,
            delta=0.11,  # below it, next to nothing can be told
        )
        for name, rate in (("sampling", 1.0), ("over_sampling", 1.3))
    ),
    *(
        (_sound if fresh else _broken)(
            name,
            f"four steps at rate 0.5, {'fresh noise in each' if fresh else 'one noise'}: z = σ",
            partial(release_sampled, rate=0.5, std=SIGMA, steps=4, fresh=fresh),
            rate=0.5,
            steps=4,
            delta=0.2,
            trials=200,
        )
        for name, fresh in (("fresh_noise", True), ("repeated_noise", False))
    ),
    *(
        (_sound if fault == "none" else _broken)(
            name,
            f"a step that returns {what}: z = σ",
            partial(release_at_times, fault=fault),
            trials=200,
        )
        for name, what, fault in (
            ("cut_by_noisy_norm", "0 where its noisy sum is long", "none"),
            ("skipped", "0 where its clean sum is long", "skipped"),
            ("constant", "a constant where the example is there", "constant"),
        )
    ),
    _sound("cancelling", "clipping of a record whose terms cancel: z = σ", release_cancelling),
    _broken(
        "cancelling_unguarded",
        "the same, clipped by its exact norm and summed in float32: z = σ",
        partial(release_cancelling, guarded=False),
    ),
)
