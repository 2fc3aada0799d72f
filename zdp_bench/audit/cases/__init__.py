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
from typing import Literal

from zdp_bench.audit.cases import sampling, two_runs
from zdp_bench.audit.cases.algorithms import (
    SIGMA,
    drop_imaginary_part,
    release_fourier,
    release_under_measured,
    release_zeta,
)
from zdp_bench.audit.cases.cancelling import release_cancelling
from zdp_bench.audit.cases.opacus import release_opacus
from zdp_bench.audit.cases.sampling import release_sampled
from zdp_bench.audit.cases.two_runs import release_two_runs, together
from zdp_bench.audit.finding import Finding
from zdp_bench.audit.release import RELEASE_DELTA, Release, attack_release
from zdp_bench.privacy.accounting import gdp_epsilon, tight_epsilon
from zdp_bench.privacy.mechanism import Mechanism

TRIALS = 40_000  # of each neighbour


@dataclass(frozen=True)
class Case:
    """A mechanism whose claim is known to be right or wrong.

    Attributes:
        z: the noise multiplier it claims for one release.
        make: seed -> its release.
        needs: a package that must be installed, else the case is skipped.
        delta: the δ at which its attack shows most.
        mechanism: what it claims, if that is more than one Gaussian release with `z`.
        trials: at most so many of each neighbour.
    """

    name: str
    claim: str
    z: float
    expected: Literal["passes", "flagged"]
    make: Callable[[int], Release]
    needs: str = ""
    delta: float = RELEASE_DELTA
    mechanism: Mechanism | None = None
    trials: int = TRIALS

    def audit(self, seed: int, confidence: float, trials: int = TRIALS) -> Finding:
        """Attack the mechanism, unless what it needs is not installed."""
        if self.mechanism:
            claimed = tight_epsilon(self.mechanism, 1, self.delta)
        else:
            claimed = gdp_epsilon(1 / self.z, self.delta)
        about = (self.name, self.claim, claimed)
        if self.needs and find_spec(self.needs) is None:
            said = f"{self.needs} is not installed"
            return Finding(*about, 0.0, self.delta, confidence, "skipped", "skipped", said)
        bound, evidence = attack_release(
            self.make(seed), min(trials, self.trials), self.delta, confidence
        )
        return Finding.of(*about, bound, self.delta, confidence, self.expected, evidence)


CASES: tuple[Case, ...] = (
    Case("per_component", "ζ-DP-SGD, σ on each part: z = σ", SIGMA, "passes", release_zeta),
    Case(
        "circular",
        "circular noise, at what it gives: z = σ/√2",
        SIGMA / math.sqrt(2),
        "passes",
        lambda s: release_zeta(s, "circular"),
    ),
    Case(
        "circular_2021",
        "circular noise of Ziller et al. 2021: z = σ",
        SIGMA,
        "flagged",
        lambda s: release_zeta(s, "circular"),
    ),
    Case(
        "no_imaginary_noise",
        "noise that forgets the imaginary part: z = σ",
        SIGMA,
        "flagged",
        lambda s: release_zeta(s, spoil=drop_imaginary_part),
    ),
    Case(
        "under_measured_norm",
        "clipping by |Σ g²| for Σ|g|²: z = σ",
        SIGMA,
        "flagged",
        release_under_measured,
    ),
    Case("gredp", "GReDP, sound noise: z = σ", SIGMA, "passes", release_fourier),
    Case(
        "gredp_complex_at_z",
        "GReDP, complex noise, at what it gives: z = σ/√2",
        SIGMA / math.sqrt(2),
        "passes",
        lambda s: release_fourier(s, noise="complex"),
    ),
    Case(
        "gredp_complex",
        "GReDP, complex noise (its Theorem 1): z = σ",
        SIGMA,
        "flagged",
        lambda s: release_fourier(s, noise="complex"),
    ),
    Case(
        "gredp_real",
        "GReDP, real noise (its Algorithm 2): z = σ",
        SIGMA,
        "flagged",
        lambda s: release_fourier(s, noise="as_published"),
    ),
    Case(
        "spectral_dp",
        "Spectral-DP, sound noise: z = σ",
        SIGMA,
        "passes",
        lambda s: release_fourier(s, "spectral_dp"),
    ),
    Case(
        "spectral_dp_2023",
        "Spectral-DP as published: z = σ",
        SIGMA,
        "flagged",
        lambda s: release_fourier(s, "spectral_dp", "as_published", back=False),
    ),
    Case(
        "opacus", "Opacus, complex layer, hooks: z = σ", SIGMA, "flagged", release_opacus, "opacus"
    ),
    Case(
        "opacus_secure",
        "Opacus, complex layer, secure mode: z = σ",
        SIGMA,
        "flagged",
        lambda s: release_opacus(s, secure_mode=True),
        "opacus",
    ),
    Case(
        "opacus_ghost",
        "Opacus, complex layer, ghost clipping: z = σ",
        SIGMA,
        "flagged",
        lambda s: release_opacus(s, ghost=True),
        "opacus",
    ),
    *(
        Case(
            f"two_runs_{change}" if keyed else f"shared_noise_{change}",
            f"two runs that differ in {what}, noise of {'a key each' if keyed else 'one seed'}: "
            f"z = {z:.3g} together",
            z,
            "passes" if keyed else "flagged",
            partial(release_two_runs, change=change, keyed=keyed),
            trials=two_runs.TRIALS,
        )
        for change, what, z in (
            ("sigma", "σ", together(SIGMA, 1.25)),
            ("rate", "the rate", together(SIGMA, SIGMA)),
            ("record", "one record", SIGMA),
        )
        for keyed in (True, False)
    ),
    *(
        Case(
            name,
            f"Poisson batches drawn at {rate:g} times the rate of 0.1 that is claimed",
            sampling.SHARP,
            "passes" if rate == 1 else "flagged",
            partial(release_sampled, too_many=rate),
            delta=sampling.DELTA,
            mechanism=sampling.subsampled_mechanism(),
        )
        for name, rate in (("sampling", 1.0), ("over_sampling", 1.3))
    ),
    Case(
        "cancelling",
        "clipping of a record whose terms cancel: z = σ",
        SIGMA,
        "passes",
        release_cancelling,
    ),
    Case(
        "cancelling_unguarded",
        "the same, clipped by its exact norm and summed in float32: z = σ",
        SIGMA,
        "flagged",
        partial(release_cancelling, guarded=False),
    ),
)
