"""Attacks that bound ε from below: what an adversary learns from one release, or from a whole run.

An accountant bounds ε from above if the code does what the proof assumes. An attack needs no such
assumption: if it tells two neighbours apart better than (ε, δ) allows, the claim is false, and the
audit flags it with the stated confidence. An attack that fails proves nothing; 'passes' means 'not
caught'.

    one release   The adversary sees many releases of each of two neighbouring sums, and tests along
                  the direction with the least noise, by distances, and by exactly equal numbers;
                  see `release.py`. Clopper-Pearson bounds on its hits and false alarms give the
                  bound on ε. It does not know what is wrong with the mechanism.
    one run       A fair coin puts each of m canaries in the training set or not; the adversary
                  guesses for those it is surest of and abstains for the rest (Steinke, Nasr &
                  Jagielski 2023, "Privacy auditing with one (1) training run"). Gradient canaries
                  are worst-case contributions of exactly the bound, seen by an adversary who knows
                  every other example and reads every release; input canaries are examples with
                  another example's target, judged by their loss.

    many runs     `step` runs a function of somebody else's on two neighbours, many times each, and
                  tests which is which as for one release.

Every registered algorithm can be audited: the attacks need its mechanism, and run its private
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zdp_bench.audit.recipe import (
    Subject,
    attack_recipe_release,
    attack_with_gradients,
    attack_with_inputs,
)
from zdp_bench.audit.release import Finding
from zdp_bench.config.schema import Run
from zdp_bench.errors import require

__all__ = ["Finding", "audit", "step"]


def __getattr__(name: str) -> Any:
    if name == "step":
        from zdp_bench.extras.script_audit.foreign import step

        return step
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def audit(
    config: Run, confidence: float = 0.99, canaries: int = 1000, steps: int = 1000
) -> Iterator[Finding]:
    """Yield what attacks on a recipe find; the same for the same seed.

    Args:
        canaries: of the attacks on a whole run; fewer if the model or the data is too small for so
            many.
        steps: the run is cut to so many steps, and the attack is compared with their ε.

    Raises:
        UserError: a value is wrong, or the recipe cannot be audited.
    """
    require(0.5 <= confidence < 1, "--confidence", confidence, "must lie in [0.5, 1)")
    require(canaries >= 10, "--canaries", canaries, "must be at least 10")
    require(steps >= 1, "--steps", steps, "must be at least 1")
    yield from attack_recipe_release(Subject.prepare(config), confidence)
    yield attack_with_gradients(Subject.prepare(config), confidence, canaries, steps)
    yield attack_with_inputs(Subject.prepare(config), confidence, canaries, steps)
