"""What the author of a training claims about its privacy: an ε for one δ, or for every δ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zdp_bench.errors import UserError, require, unknown
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling

# A mechanism claims an ε for every δ. Few runs refute most in the middle of that curve.
DELTAS = (1e-5, 0.01, *(twentieth / 20 for twentieth in range(1, 20)))
FORMS = (
    "claimed: give {'epsilon': ..., 'delta': ...}, "
    "or {'noise_multiplier': ..., 'sample_rate': ..., 'steps': ...}."
)


@dataclass(frozen=True)
class Claim:
    """A claim to attack.

    Attributes:
        epsilon: δ -> the ε that is claimed for it.
        deltas: for which δ the claim holds.
    """

    text: str
    epsilon: Callable[[float], float]
    deltas: tuple[float, ...]

    @staticmethod
    def read(claimed: Mapping[str, float], replaced: bool = False) -> Claim:
        """Read the claim as a script states it.

        Args:
            claimed: epsilon and delta; or noise_multiplier (σ, the noise over the bound of one
                example), sample_rate (default 1) and steps (default 1) of DP-SGD.
            replaced: neighbours differ by a replaced example, not by an added one. A mechanism's
                batches are then of a fixed size, drawn without replacement; else Poisson.

        Raises:
            UserError: the claim has other keys, or a number is out of range.
        """
        if not isinstance(claimed, Mapping):
            raise UserError(FORMS)
        if set(claimed) == {"epsilon", "delta"}:
            epsilon, delta = float(claimed["epsilon"]), float(claimed["delta"])
            require(
                0 <= epsilon < math.inf, "claimed epsilon", epsilon, "must be finite, 0 or more"
            )
            require(0 < delta < 1, "claimed delta", delta, "must lie in (0, 1)")
            return Claim(f"ε = {epsilon:.4g} at δ = {delta:g}", lambda _: epsilon, (delta,))
        for key in claimed:
            if key not in (allowed := ("noise_multiplier", "sample_rate", "steps")):
                raise unknown("claimed:", key, [*allowed, "epsilon", "delta"])
        if "noise_multiplier" not in claimed:
            raise UserError(FORMS)
        return _read_mechanism(claimed, replaced)


def _read_mechanism(claimed: Mapping[str, float], replaced: bool) -> Claim:
    sigma, rate = float(claimed["noise_multiplier"]), float(claimed.get("sample_rate", 1.0))
    steps = int(claimed.get("steps", 1))
    require(0 < sigma < math.inf, "claimed noise_multiplier", sigma, "must be positive and finite")
    require(0 < rate <= 1, "claimed sample_rate", rate, "must lie in (0, 1]")
    require(steps >= 1, "claimed steps", steps, "must be at least 1")
    # Only the rate matters here, not how many examples there are.
    sampling = Sampling("uniform" if replaced else "poisson", rate, 1.0, 1)
    mechanism = Mechanism((Block("release", (1,), "float64", 1.0, sigma, "real"),), sampling)
    text = f"σ = {sigma:.4g}, rate {rate:.4g}, {steps:,} step{'s' if steps > 1 else ''}"
    return Claim(text, lambda delta: tight_epsilon(mechanism, steps, delta), DELTAS)
