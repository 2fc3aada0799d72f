"""The learning-rate range test (Smith 2017, section 3.3), by which Ziller et al. 2021 (deepee) set theirs, and its cost in ε.

The rate grows from step to step, each by the same factor, until the loss explodes; a good rate is where the loss falls fastest.
Every step is a release of the recipe's own mechanism on the recipe's own training records, so it costs as much as a step of
training. The loss is that of PUBLIC validation records: the training loss is private, and no ε would cover looking at it.

A run that uses the rate has to count the steps too: `privacy.range_test_steps=N` adds them to every ε of the run. Where the noise
is calibrated to an ε, test and run are calibrated together: the test takes the noise of a run that counts all its planned steps,
and that is the number to count, however early it stopped.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from zdp_bench.config.constraints import require_central
from zdp_bench.config.digests import run_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import Examples
from zdp_bench.errors import UserError, require
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.ledger import BudgetExceeded, Ledger
from zdp_bench.privacy.noise import run_key
from zdp_bench.training.devices import pick_device
from zdp_bench.training.environment import foreign_code
from zdp_bench.training.evaluation import evaluate
from zdp_bench.training.plan import Plan
from zdp_bench.training.setup import Setup, load_data
from zdp_bench.training.step import Training, private_step

FEWEST = 3  # steps that have a slope
WATCHED = 256  # validation records, at most
EXPLODED = 4.0  # times the best loss so far: nothing is to be learnt beyond
SMOOTHING = 0.7  # of the loss, so that single steps do not decide


@dataclass(frozen=True)
class RangeTest:
    """What a range test saw and what it cost.

    Attributes:
        rates, losses: one a step; the loss after the step, over public validation records.
        suggested: the rate at which the loss fell fastest; None where it never fell.
        steps: releases that were made.
        to_count: what a run after it has to name in `privacy.range_test_steps`.
        budget: `privacy.max_epsilon`, where it ended the test.
        epsilon: tight ε of the test alone; epsilon_with_run: of the test and the recipe's whole run after it.
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
        - the model changes only through releases of the recipe's mechanism, each in a ledger; its noise is drawn apart from
          that of any run, so that the two cannot be subtracted;
        - the losses are those of validation records, which count as public.

        - no step is taken whose tight ε would pass `privacy.max_epsilon`.

    Raises:
        UserError: the range is none, the data set has no validation records, an earlier test had other noise, or the budget does
            not pay for three steps.
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
            f"a range test watches public validation records, and dataset={config.dataset.name} has none; the loss of training "
            "records is private."
        )
    watched = _first(data.validation, WATCHED)
    plan = Plan.of(config, len(data.train))
    calibrated = bool(config.privacy.target_epsilon)
    if calibrated and plan.range_test_steps:
        raise UserError(
            f"privacy.range_test_steps={plan.range_test_steps} with privacy.target_epsilon: each range test would change the noise that "
            "the tests before it had. Make one test, or give algorithm.noise_multiplier in place of the target."
        )
    plan = replace(plan, range_test_steps=steps) if calibrated else plan
    setup = Setup.of(config, data, device, plan)
    setup.check_model()
    config, model, algorithm = setup.config, setup.model, setup.algorithm
    mechanism, optimizer = setup.mechanism, setup.optimizer
    limit = _affordable(setup, steps)
    own = f"{run_digest(config, data.digest)}:range test:{lowest!r}:{highest!r}:{steps}"  # no run draws the same noise
    key = run_key(own, mechanism, foreign_code(config.plugins))
    noise = setup.noise(key)
    rates, losses = [], []
    with tempfile.TemporaryDirectory() as folder, setup.arithmetic():
        ledger = Ledger(Path(folder) / "ledger.jsonl", mechanism, noise.repeatable)
        training = Training(algorithm, model, optimizer, noise, ledger, limit)
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
            losses.append(evaluate(model, setup.task, watched, device)["loss"])
            if not math.isfinite(losses[-1]) or losses[-1] > EXPLODED * min(losses):
                break
        made = ledger.releases
        ledger.close()
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
    """The rate at which the smoothed loss falls fastest in log rate; None where it never falls."""
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


def _first(records: Examples, most: int) -> Examples:
    """The first records of a set, as a set."""
    rows = slice(0, most)
    groups = records.groups[rows] if records.groups is not None else None
    return Examples(records.inputs[rows], records.targets[rows], groups, records.pixels)
