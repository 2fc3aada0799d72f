"""`make_private`: everything a private training needs, from a model, an optimizer and a dataset."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zdp_bench.algorithms import Algorithm, Problem, algorithm_type
from zdp_bench.config.constraints import require_takes_shares
from zdp_bench.config.plugins import check_plugin
from zdp_bench.errors import UserError, for_python, require, setting
from zdp_bench.gradients import Loss, per_example
from zdp_bench.gradients.parts import pack
from zdp_bench.library.arguments import (
    check_optimizer,
    require_epochs,
    require_loss,
    require_options,
    require_randomness,
    require_sampling,
    require_trainable,
    require_whole,
)
from zdp_bench.library.examples import Items
from zdp_bench.library.journal import TrainingName, open_journal, require_ledger_name
from zdp_bench.library.keys import kind_of, make_keys
from zdp_bench.library.model_check import check, require_gradients
from zdp_bench.library.optimizers import Regulariser
from zdp_bench.library.private import Private, Terms
from zdp_bench.library.units import Unit, Units, find_units
from zdp_bench.privacy.calibration import calibrate_mechanism
from zdp_bench.privacy.mechanism import MOST, Mechanism, Sampling
from zdp_bench.privacy.statement import require_delta, warn_of
from zdp_bench.training.batches import MICRO_BATCH, Size, seed_layers
from zdp_bench.training.distributed import Ranks, join
from zdp_bench.training.machine import check_precision, code_digest, execution_digest
from zdp_bench.training.plan import Plan

LEAST_PUBLIC = 100  # of fewer units, one more or less moves batch_size / n by over 1 %


@for_python()
def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    batch_size: int | None = None,
    target_epsilon: float | None = None,
    delta: float = 1e-5,
    max_grad_norm: float = 1.0,
    noise_multiplier: float | None = None,
    ledger: str | Path | None = None,
    count_earlier: bool = False,
    regulariser: Regulariser | None = None,
    probe: tuple[Any, Any] | None = None,
    unit: Unit | None = None,
    max_examples: int | None = None,
    sample_rate: float | None = None,
    expected_batch: float | None = None,
    algorithm: str = "dp_sgd",
    micro_batch: int | None = None,
    precision: str | None = None,
    seed: int | None = None,
    secure: bool = False,
    **options: Any,
) -> Private:
    """Return a private training run of your model, with the step, checks and ledger of a run.

    The model is checked on random inputs and left as it is: no wrapper, no hook, no other class.

    Args:
        model: on the device of the training, in training mode. Parameters that do not require a
            gradient stay frozen, and are public.
        optimizer: any of torch's that steps from gradients alone, or a list of several that share
            the model's parameters. A schedule is yours to step.
        dataset: map-style, with items (input, target). Inputs in a tuple or a dictionary are the
            model's arguments, in order or by name.
        loss: (outputs, targets) -> one loss per example, [B]; never a mean. It is given one example
            at a time: nothing of another can reach it.
        epochs: 1 / rate steps each, in all: with more of them, `resume` goes on with a training
            that has ended, and the same noise.
        batch_size: each step draws each of the n examples with probability `batch_size` / n, and
            the noisy sum is divided by `batch_size`. n is then public, and must be 100 or more.
            With `unit`, of owners.
        target_epsilon, noise_multiplier: one of the two. The noise is calibrated so that all steps
            have at most the tight ε asked for, and no step beyond it is taken.
        delta: of (ε, δ); at most 1 / n is usual.
        max_grad_norm: the bound C that each example's gradient is clipped to.
        ledger: the file that lists every step before its noise is drawn. `save` writes beside it,
            with the suffix .pt; `resume` goes on from there. None: one in the folder `ledgers`,
            named after the model's class and the training's plan and noise.
        count_earlier: train a model that has not taken the steps that the ledger holds already;
            they count in every ε.
        regulariser: model -> a real number, whose gradient is added to each step's, after the
            noise: a penalty on the weights, a loss of public or generated examples. It costs no ε,
            so no training example may reach it.
        probe: examples (inputs, targets) [B, ...] that are public or made up. The checks run on
            them, where random numbers are none that model and loss can take.
        unit: whose ε it is. None: an example's. Else the owner of each example, say its patient: a
            column of strings or numbers, [n], or a function of an example's index. Each step draws
            owners, and the mean gradient of an owner's examples is clipped.
        max_examples: at most so many examples of a drawn owner, drawn anew at each step.
        sample_rate, expected_batch: instead of `batch_size`, where n is private: the probability,
            and what the noisy sum is divided by. Choose both without a look at the data.
        algorithm: a private algorithm's name; `zeta_dp_sgd` for complex parameters.
        micro_batch: how many examples are processed at once (1,024 at most); halved when memory
            runs out. It changes memory and speed only.
        precision: "bf16" runs the forward pass in bfloat16; sums stay in float32.
        seed: repeats a training run on the same machine; for experiments. Every example is read
            once to make the key of the noise, and all weights at every step (`library.keys`).
            Without it, the operating system gives the key.
        secure: cryptographic noise and batches, for weights that are released to an adversary.
        options: of the algorithm, as in the configuration: `per_layer=True`, `noise="circular"`.

    Formal guarantees: those of `Private`, for neighbours that are drawn at the same rate.
        - With `sample_rate`, they may differ in n: rate, divisor, mechanism, count of steps, report
          and exported folder follow from the arguments, and none of them from n. (The steps' time
          and memory do.) With `unit`, `max_examples` is needed: owners' sizes are private too.
        - With `batch_size`, n is public: ε holds for data sets at the rate `batch_size` / n of this
          one, which says n.

    Raises:
        UserError: an argument, the model, the loss or the ledger cannot be used; says what to do.
        Busy: another training run, in this process or another, holds the ledger.
    """
    require_gradients("make_private")
    require_trainable(model)
    require_ledger_name(ledger)
    require_epochs(epochs)
    require_whole("batch_size", batch_size, 1, MOST)
    require_whole("max_examples", max_examples, 1, MOST)
    require_whole("micro_batch", micro_batch, 1, MOST)
    require_randomness(seed, secure)
    require_sampling(batch_size, sample_rate, expected_batch)
    require_delta("delta", delta)
    optimizer = check_optimizer(model, optimizer)
    require_loss(loss)
    require_options(algorithm, options, inspect.signature(make_private).parameters)

    seed = None if seed is None else int(seed)  # of numpy's too

    examples = Items(dataset)
    number_is_private = sample_rate is not None
    units = find_units(unit, len(examples), max_examples, number_is_private)
    plan = plan_of(batch_size, sample_rate, expected_batch, epochs, units.count)
    if not number_is_private:
        warn_of(delta, units.count)

    empty_batch = examples.like()
    example_loss = per_example(loss)
    problem = Problem(model, example_loss, plan.sampling, seed or 0, empty_batch[0])
    settings = {"name": algorithm, "max_grad_norm": max_grad_norm} | options
    noise = Noise(noise_multiplier, target_epsilon, delta)
    private_algorithm = _build_algorithm(problem, plan, settings, noise)
    if units.owners is not None:
        require_takes_shares("unit", algorithm)
    check_precision(precision, model, private_algorithm)
    mechanism = private_algorithm.mechanism()

    device = next(model.parameters()).device
    ranks = join(device.type)
    name = TrainingName.of(mechanism, plan, units.stated)
    path = name.ledger_of(model) if ledger is None else Path(ledger)
    path = path.absolute()  # the loop may change its folder
    if ranks.size > 1:
        # Rank 0 draws the noise, which covers rank 0's sum alone: one safeguard short with a seed.
        rule = f"is for one process, and {ranks.size} train together; leave it out"
        require(seed is None, "seed", seed, rule)
        sampling = batch_size, sample_rate, expected_batch, epochs, max_examples
        asked = sampling, settings, noise, precision, secure, count_earlier
        _require_same_on_ranks(ranks, asked, examples, units, model, optimizer, mechanism, plan)
    ranks.copy_from_first([*model.parameters(), *model.buffers()])

    public_batch = None if probe is None else (pack(probe[0]), pack(probe[1]))
    has_owners = units.owners is not None
    checked = check(model, private_algorithm, example_loss, empty_batch, has_owners, public_batch)
    size = Size(micro_batch or MICRO_BATCH)
    execution = execution_digest((), device, size.examples, ranks.size, True)
    given = f"{execution}:{precision}:{sorted(settings.items())}:{units.digest}:{max_examples}"
    keys = make_keys(
        seed,
        secure,
        plan,
        private_algorithm,
        model,
        optimizer,
        examples,
        checked.batch,
        given,
    )
    keys = ranks.broadcast(keys)
    randomness = kind_of(keys.source())
    return Private(
        model=model,
        optimizer=optimizer,
        loss=example_loss,
        algorithm=private_algorithm,
        terms=Terms(algorithm, delta, target_epsilon, precision, regulariser, count_earlier),
        examples=examples,
        units=units,
        plan=plan,
        keys=keys,
        checked=checked,
        journal=open_journal(path, name, mechanism, units.stated, randomness, ranks),
        ranks=ranks,
        size=size,
    )


@dataclass(frozen=True)
class Noise:
    """The noise that was asked for: as a multiplier, or by the ε of all steps."""

    multiplier: float | None
    target_epsilon: float | None
    delta: float


def _build_algorithm(
    problem: Problem, plan: Plan, settings: dict[str, Any], noise: Noise
) -> Algorithm:
    """Return the algorithm with its noise, as given or calibrated; reject one that adds none."""
    target = noise.target_epsilon
    if (noise.multiplier is None) == (target is None):
        raise UserError("give noise_multiplier or target_epsilon, and not both.")
    name = settings["name"]
    make = algorithm_type(name)
    keys = inspect.signature(make).parameters
    if "noise_multiplier" not in keys:
        raise UserError(f"{setting('algorithm', name)} is not private: train without make_private.")
    if "max_grad_norm" not in keys:
        raise UserError(
            f"{setting('algorithm', name)} clips no gradients, so a loop cannot take its steps: "
            "use `zdp-bench run`."
        )

    def build(multiplier: float) -> Algorithm:
        options = check_plugin("algorithm", settings | {"noise_multiplier": multiplier}).options
        algorithm = make(problem, **options)
        try:
            algorithm.mechanism()
        except ValueError as error:
            raise UserError(f"{error}.") from None
        return algorithm

    if noise.multiplier is not None:
        return build(noise.multiplier)
    assert target is not None
    of_one = build(1.0).mechanism()
    try:
        multiplier = calibrate_mechanism(target, of_one, plan.steps, noise.delta)
    except ValueError as error:
        raise UserError(f"target_epsilon={target:g}: {error}.") from None
    return build(multiplier)


def _require_same_on_ranks(
    ranks: Ranks,
    arguments: tuple[Any, ...],
    examples: Items,
    units: Units,
    model: nn.Module,
    optimizer: Any,
    mechanism: Mechanism,
    plan: Plan,
) -> None:
    """Reject processes that were given different things to train together."""
    # so that randomly changed examples have one digest
    seed_layers(ranks.broadcast(os.urandom(16).hex()), 0, 0)
    facts = {
        "set of arguments": arguments,
        "data set": examples.digest(),
        "list of owners": units.digest,
        "code": code_digest(()),
        "model": re.sub(" at 0x[0-9a-f]+", "", repr(model)),
        "optimizer": optimizer,
        "mechanism": mechanism.digest(),
        "plan": plan,
    }
    ranks.require_same(facts)


def plan_of(
    batch_size: int | None,
    sample_rate: float | None,
    expected_batch: float | None,
    epochs: int,
    units: int,
) -> Plan:
    """Return the plan of a training: with `sample_rate` from what was given alone, not from n."""
    if sample_rate is not None:
        assert expected_batch is not None
        sampling = Sampling("poisson", float(sample_rate), float(expected_batch), 0)
        return Plan(sampling, epochs, max(1, round(epochs / sample_rate)))
    assert batch_size is not None
    few = (
        f"its rate is batch_size / n, and with only n = {units:,} to draw from one more or less "
        "changes that rate, which ε takes for public: give sample_rate and expected_batch instead, "
        "neither taken from the data"
    )
    require(units >= LEAST_PUBLIC, "batch_size", batch_size, few)
    too_large = f"the dataset has only {units:,} to draw from"
    require(batch_size <= units, "batch_size", batch_size, too_large)
    return Plan.poisson(units, batch_size / units, epochs)
