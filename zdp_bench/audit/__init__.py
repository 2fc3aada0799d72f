"""Attacks that bound ε from below: what an adversary really gets out of one release, or out of a whole run.

An accountant says what ε cannot exceed if the code does what the proof assumes. An attack needs no such assumption: if it tells
two neighbours apart better than (ε, δ) allows, the claim is false, and the audit flags it with the confidence it states. An
attack that fails proves nothing; 'passes' means 'not caught'.

    one release   The adversary sees a mechanism's release of one of two neighbouring sums, many times over, learns the noise's
                  covariance, and tests along the direction that gets least of it. Clopper-Pearson bounds on its hits and false
                  alarms give the bound on ε. Nobody tells it what is wrong with the mechanism.
    one run       m canaries, each in the training set or out of it by a fair coin; the adversary guesses for those it is surest
                  of and abstains for the rest (Steinke, Nasr & Jagielski 2023, "Privacy auditing with one (1) training run").
                  Gradient canaries are worst-case contributions of exactly the bound, seen by an adversary who knows every other
                  record and reads every release; input canaries are records with another record's target, judged by their loss.

Whatever algorithm is registered can be audited: the attacks need its mechanism, and drive it through the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

from zdp_bench.audit.canaries import attack_with_gradients, attack_with_inputs
from zdp_bench.audit.cases import CASES
from zdp_bench.audit.finding import Finding
from zdp_bench.audit.recipe import attack_recipe_release
from zdp_bench.audit.subject import Subject
from zdp_bench.config.schema import Run
from zdp_bench.errors import require, unknown


def audit(
    config: Run,
    cases: str = "all",
    confidence: float = 0.99,
    canaries: int = 1000,
    steps: int = 1000,
) -> Iterator[Finding]:
    """The attacks on a recipe and on the built-in cases, one finding after the other; the same for the same seed.

    Args:
        cases: all; recipe, for the recipe's own attacks alone; or names of built-in cases, comma-separated.
        canaries: of the attacks on a whole run; fewer where the model or the data has no room for so many.
        steps: at most so many steps of the run are made, and the ε of so many is held against the attack.

    Raises:
        UserError: a value or a name is wrong, or the recipe cannot be audited.
    """
    require(0.5 <= confidence < 1, "--confidence", confidence, "must lie in [0.5, 1)")
    require(canaries >= 10, "--canaries", canaries, "must be at least 10")
    require(steps >= 1, "--steps", steps, "must be at least 1")
    known = {case.name: case for case in CASES}
    chosen = [*known] if cases == "all" else [] if cases == "recipe" else cases.split(",")
    for name in chosen:
        if name not in known:
            raise unknown("case", name, ["all", "recipe", *known])
    if cases in ("all", "recipe"):
        yield from attack_recipe_release(Subject.prepare(config), confidence)
        yield attack_with_gradients(Subject.prepare(config), confidence, canaries, steps)
        yield attack_with_inputs(Subject.prepare(config), confidence, canaries, steps)
    for name in chosen:
        yield known[name].audit(config.seed, confidence)
