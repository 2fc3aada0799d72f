"""The learning-rate range test (Smith 2017, section 3.3), as in Ziller et al. 2021 (deepee).

The rate grows by the same factor at each step until the loss explodes; a good rate is where the
loss falls fastest. Each step is a release of the recipe's own mechanism on its own training set, so
it costs as much ε as a step of training. The loss is that of PUBLIC validation examples: no ε
covers looking at the training loss.

A run that uses the rate has to count these steps: `privacy.range_test_steps=N` adds them to every
ε of the run. If the noise is calibrated to an ε, it is calibrated for test and run together: the
test takes the noise of a run that counts all planned steps of the test, and all of them are to be
counted, however early it stopped.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from zdp_bench.config.constraints import require_central
from zdp_bench.config.schema import Run
from zdp_bench.data import Part
from zdp_bench.errors import UserError, require
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.ledger import BudgetExceeded, Ledger
from zdp_bench.privacy.noise import run_key
from zdp_bench.training.evaluation import evaluate
from zdp_bench.training.machine import foreign_code, pick_device
from zdp_bench.training.plan import Plan
from zdp_bench.training.public_start import digest_of
from zdp_bench.training.setup import Setup, count_units, load_data
from zdp_bench.training.step import Training, private_step

FEWEST = 3  # steps that a slope needs
WATCHED = 256  # validation examples, at most
EXPLODED = 4.0  # the test ends at this multiple of the best loss so far
SMOOTHING = 0.7  # of the loss, so that single steps do not decide


@dataclass(frozen=True)
class RangeTest:
    """The outcome of a range test, and its cost.

    Attributes:
        rates, losses: one for each step; the loss after it, over public validation examples.
        suggested: the rate at which the loss fell fastest; None if it never fell.
        steps: releases of the test.
        to_count: what a later run has to set as `privacy.range_test_steps`.
        epsilon: tight ε of the test alone.
        epsilon_with_run: tight ε of the test and the recipe's whole run after it.
        budget: `privacy.max_epsilon`, if it ended the test.
    """

    rates: list[float]
    losses: list[float]
    suggested: float | None
    steps: int
    to_count: int
    epsilon: float
    epsilon_with_run: float
    delta: float
    budget: float | None = None


def range_test(
    config: Run, lowest: float = 1e-5, highest: float = 1.0, steps: int = 50
) -> RangeTest:
    """Try rates from `lowest` to `highest` in so many private steps.

    Formal guarantees:
        - the model changes only through releases of the recipe's mechanism, each in a ledger; its
          noise is independent of any run's, so that the two cannot be subtracted;
        - the losses are those of validation examples, which count as public;
        - no step is taken whose tight ε would exceed `privacy.max_epsilon`.

    Raises:
        UserError: the range is empty, the data set has no validation examples, an earlier test had
            other noise, or the budget does not pay for three steps.
    """
    require_central(config, "find-lr")
    require(
        0 < lowest < highest < math.inf,
        "--lowest",
        lowest,
        f"must be positive and below --highest={highest:g}",
    )
    require(steps >= FEWEST, "--steps", steps, f"must be at least {FEWEST}")
    if config.threads:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    data = load_data(config)
    if data.validation is None:
        raise UserError(
            f"a range test watches public validation records, and dataset={config.dataset.name} "
            "has none; the loss of training records is private."
        )
    watched = Part(data.validation, torch.arange(min(WATCHED, len(data.validation))))
    plan = Plan.of(config, count_units(config, data))
    calibrated = bool(config.privacy.target_epsilon)
    if calibrated and plan.range_test_steps:
        raise UserError(
            f"privacy.range_test_steps={plan.range_test_steps} with privacy.target_epsilon: each "
            "range test would change the noise that the tests before it had. Make one test, or "
            "give algorithm.noise_multiplier in place of the target."
        )
    plan = replace(plan, range_test_steps=steps) if calibrated else plan
    setup = Setup.of(config, data, device, plan)
    setup.check_model()
    guard = setup.guard()
    config, mechanism, optimizer = setup.config, setup.mechanism, setup.optimizer
    limit = _affordable(setup, steps)
    # No run draws the same noise.
    own = f"{digest_of(config, data.digest)}:range test:{lowest!r}:{highest!r}:{steps}"
    key = run_key(own, mechanism, foreign_code(config.plugins))
    noise = setup.noise(key)
    rates, losses = [], []
    with tempfile.TemporaryDirectory() as folder, setup.arithmetic():
        ledger = Ledger(Path(folder) / "ledger.jsonl", mechanism, noise.repeatable)
        training = Training(setup.algorithm, setup.model, optimizer, noise, ledger, limit)
        for step in range(steps):
            rate = lowest * (highest / lowest) ** (step / (steps - 1))
            for group in optimizer.param_groups:
                group["lr"] = rate
            batch, divisor = setup.draw(key, step)
            try:
                private_step(training, step, batch, divisor)
            except BudgetExceeded:
                break
            rates.append(rate)
            losses.append(evaluate(setup.model, setup.task, watched, device)["loss"])
            if not math.isfinite(losses[-1]) or losses[-1] > EXPLODED * min(losses):
                break
        made = ledger.releases
        ledger.close()
    if guard:
        guard.require_unchanged()
    delta = config.privacy.delta
    to_count = plan.range_test_steps if calibrated else plan.range_test_steps + made
    return RangeTest(
        rates=rates,
        losses=losses,
        suggested=find_steepest(rates, losses),
        steps=made,
        to_count=to_count,
        epsilon=tight_epsilon(mechanism, made, delta),
        epsilon_with_run=tight_epsilon(mechanism, to_count + plan.steps, delta),
        delta=delta,
        budget=config.privacy.max_epsilon if made == limit and made < steps else None,
    )


def _affordable(setup: Setup, steps: int) -> int | None:
    """Return how many of the steps the budget pays for; None without a budget.

    Raises:
        UserError: it pays for fewer than `FEWEST`.
    """
    limit, budget = setup.affordable(steps), setup.config.privacy.max_epsilon
    if limit is not None:
        reason = (
            f"the budget pays for {limit} steps of this range test, and {FEWEST} are needed; "
            "raise it, or add noise"
        )
        require(limit >= FEWEST, "privacy.max_epsilon", f"{budget:g}", reason)
    return limit


def find_steepest(rates: list[float], losses: list[float]) -> float | None:
    """Return the rate where the smoothed loss falls fastest in log rate; None if it never does."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < 3:
        return None
    smooth, mean = [], finite[0]
    for loss in finite:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smooth.append(mean)
    slope = np.gradient(np.array(smooth), np.log(rates[: len(finite)]))
    best = int(slope.argmin())
    return rates[best] if slope[best] < 0 else None
