"""`make_private`: everything a private training needs, from a model, an optimizer and a dataset."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
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
from zdp_bench.gradients.losses import preserve_random_state
from zdp_bench.gradients.parts import pack
from zdp_bench.library.arguments import (
    check_optimizer,
    require_dataset,
    require_kinds,
    require_loss,
    require_options,
    require_randomness,
    require_sampling,
    require_trainable,
    with_python_numbers,
)
from zdp_bench.library.examples import Items
from zdp_bench.library.journal import (
    default_ledger,
    digest_of_training,
    open_journal,
    require_ledger_name,
)
from zdp_bench.library.keys import make_keys, randomness_kind
from zdp_bench.library.model_check import check, require_gradients
from zdp_bench.library.optimizers import Regulariser
from zdp_bench.library.private import Private, Terms
from zdp_bench.library.units import Unit, Units, find_units
from zdp_bench.privacy.calibration import calibrate_mechanism
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.statement import require_delta, warn_of
from zdp_bench.training.batches import MICRO_BATCH, Size, seed_layers
from zdp_bench.training.distributed import Ranks, join
from zdp_bench.training.machine import check_precision, code_digest, execution_digest
from zdp_bench.training.plan import Plan

MIN_PUBLIC_UNITS = 100  # with fewer, adding or removing one changes the sampling rate by over 1 %


@for_python()  # errors name settings as arguments
@with_python_numbers
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
    """Return a private training of your model, with the step, checks and ledger of `zdp-bench run`.

    The model is checked on random inputs. It is not changed: there are no wrappers or hooks, and
    its class stays the same.

    Args:
        model: Model, in training mode and on the device of the training. Parameters that do not
            require a gradient stay frozen, and are public.
        optimizer: Optimizer of torch.optim that uses only the gradients in `.grad`, or a list of
            optimizers that share the model's parameters. Call a scheduler's `step` yourself.
        dataset: Map-style dataset whose items are (input, target). Inputs in a tuple or a
            dictionary are passed to the model as its arguments, in order or by name.
        loss: Function of (outputs, targets) that returns one loss per example, [B], never their
            mean. It is evaluated separately for each example, so examples cannot mix.
        epochs: Total number of epochs, each 1 / sample rate steps. To extend a finished training,
            pass a larger number and call `resume`; the noise multiplier must stay the same.
        batch_size: Expected batch size. Each step draws each of the n examples with probability
            `batch_size` / n, and divides the noisy sum by `batch_size`. n is then public, and must
            be at least 100. With `unit`, n counts owners.
        target_epsilon, noise_multiplier: Give one of the two. With `target_epsilon`, the noise is
            calibrated so that the tight ε of all steps is at most this value, and no step that
            would exceed it is taken.
        delta: δ of (ε, δ)-differential privacy; usually at most 1 / n. Default: 1e-5.
        max_grad_norm: Bound C that each example's gradient is clipped to. Default: 1.0.
        ledger: File that lists every step before its noise is drawn. `save` writes a file beside it
            with the suffix .pt, from which `resume` continues. Default: a file in the folder
            `ledgers`, named after the model's class and the training's sampling and noise.
        count_earlier: Count the steps that the ledger already holds in every ε, although it is not
            known whether this model took them. They are not part of `epochs`. Default: False.
        regulariser: A function of the model that returns a real number, such as a penalty on the
            weights or a loss of public examples. Its gradient is added to each step's after the
            noise, except in the first `start_steps`, which set the weights. It costs no ε, so it
            must not depend on any training example.
        probe: Examples (inputs, targets), [B, ...], that are public or made up. Needed if model or
            loss cannot run on random inputs; the checks then use these examples.
        unit: Owner of each example, such as its patient: a column of strings or numbers, [n], or a
            function of an example's index. Each step then draws owners, the mean gradient of an
            owner's examples is clipped, and ε protects an owner. Default: ε protects an example.
        max_examples: Largest number of an owner's examples in a step. If an owner has more, each
            step chooses among them at random. Default: no limit.
        sample_rate, expected_batch: Probability that a step draws an example, and divisor of the
            noisy sum. Use them instead of `batch_size` if n is private, and choose both without
            looking at the data.
        algorithm: Name of a private algorithm; `zeta_dp_sgd` for complex parameters. Default:
            `dp_sgd`.
        micro_batch: Number of examples processed at once, at most 1,024; halved if memory runs out.
            It affects memory and speed only. Default: 1,024.
        precision: "bf16" runs the forward pass in bfloat16; sums stay in float32. Default: float32.
        seed: Seed that makes a training repeatable on the same machine, for experiments. All
            examples are hashed once, and all weights at each step, which is slow for large models
            (`library.keys`). Default: keys come from the operating system.
        secure: Whether noise and batches come from a cryptographic generator, for weights that are
            released to an adversary. Default: False.
        options: Options of the algorithm, as in the configuration: `per_layer=True`,
            `noise="circular"`.

    Formal guarantees: those of `Private`, for neighbouring data sets sampled at the same rate.
        - With `sample_rate`, they may differ in n: sampling rate, divisor, mechanism, number of
          steps, report and exported folder follow from the arguments, never from n. Only the time
          and memory of a step depend on n. With `unit`, `max_examples` is required, because the
          number of an owner's examples is also private.
        - With `batch_size`, n is public: ε compares data sets sampled at the same rate
          `batch_size` / n, so n itself is not protected.

    Raises:
        UserError: An argument, the model, the loss or the ledger cannot be used. The message says
            what to do.
        Busy: Another training, in this process or another, uses the ledger.
    """
    require_kinds(locals() | options)
    require_trainable(model)
    device = next(model.parameters()).device
    require_gradients("make_private", device)
    require_ledger_name(ledger)
    require_randomness(seed, secure)
    require_sampling(batch_size, sample_rate, expected_batch)
    require_delta("delta", delta)
    optimizer = check_optimizer(model, optimizer)
    require_loss(loss)
    require_dataset(dataset)
    require_options(algorithm, options, inspect.signature(make_private).parameters)

    examples = Items(dataset)
    number_is_private = sample_rate is not None
    units = find_units(unit, len(examples), max_examples, number_is_private)
    plan = make_plan(batch_size, sample_rate, expected_batch, epochs, units.count)
    if not number_is_private:
        warn_of(delta, units.count)

    empty_batch = examples.empty_batch()
    examples.require_independent()
    example_loss = per_example(loss)
    empty_inputs, _ = empty_batch
    problem = Problem(model, example_loss, plan.sampling, seed or 0, empty_inputs)
    settings = {"name": algorithm, "max_grad_norm": max_grad_norm} | options
    noise = Noise(noise_multiplier, target_epsilon, delta)
    private_algorithm = _build_algorithm(problem, plan, settings, noise)
    if units.owners is not None:
        require_takes_shares("unit", algorithm, is_own_loop=True)
    check_precision(precision, model, private_algorithm)
    mechanism = private_algorithm.mechanism()

    ranks = join(device.type)
    training_digest = digest_of_training(mechanism, plan.sampling, units.stated)
    if ledger is None:
        ledger = default_ledger(model, training_digest, mechanism, units.stated)
    path = Path(ledger).absolute()  # the training loop may change the working directory
    if ranks.size > 1:
        # Seeded noise is keyed by the sum it is added to (`HedgedNoise`), and rank 0, which draws
        # it, has only its own part of the sum.
        rule = f"works in one process only, and here {ranks.size} train together: remove it"
        require(seed is None, "seed", seed, rule)
        sampling = batch_size, sample_rate, expected_batch, epochs, max_examples
        arguments = sampling, settings, noise, precision, secure, count_earlier
        _require_same_on_ranks(ranks, arguments, examples, units, model, optimizer, mechanism, plan)
    ranks.copy_from_first([*model.parameters(), *model.buffers()])

    public_batch = None if probe is None else (pack(probe[0]), pack(probe[1]))
    has_owners = units.owners is not None
    checked = check(model, private_algorithm, example_loss, empty_batch, has_owners, public_batch)
    size = Size(micro_batch or MICRO_BATCH)
    # No digest covers the caller's code; `make_keys` covers what model and loss compute.
    execution = execution_digest(
        (), device, micro_batch=size.examples, ranks=ranks.size, deterministic=True
    )
    options_text = f"{sorted(settings.items())}"
    key_inputs = f"{execution}:{precision}:{options_text}:{units.digest}:{max_examples}"
    keys = make_keys(
        seed,
        secure,
        plan,
        private_algorithm,
        model,
        optimizer,
        examples,
        checked.batch,
        key_inputs,
    )
    keys = ranks.broadcast(keys)
    randomness = randomness_kind(keys.source())
    journal = open_journal(path, mechanism, plan.sampling, units.stated, randomness, ranks)
    with ExitStack() as on_error:
        on_error.callback(journal.resources.close)
        private = Private(
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
            journal=journal,
            ranks=ranks,
            size=size,
        )
        on_error.pop_all()
    return private


@dataclass(frozen=True)
class Noise:
    """The requested noise. Either `multiplier` or `target_epsilon` is None.

    Attributes:
        multiplier: Noise multiplier σ.
        target_epsilon: Largest tight ε of all steps together, which determines σ.
        delta: δ at which ε is computed.
    """

    multiplier: float | None
    target_epsilon: float | None
    delta: float


def _build_algorithm(
    problem: Problem, plan: Plan, settings: dict[str, Any], noise: Noise
) -> Algorithm:
    """Return the algorithm with the requested noise.

    Args:
        problem: What the algorithm trains.
        plan: Number of steps and sampling of the training, for the calibration of the noise.
        settings: Name and options of the algorithm, without its noise.
        noise: The requested noise.

    Raises:
        UserError: The algorithm adds no noise or does not clip gradients, an option is invalid, or
            no noise multiplier reaches the target ε.
    """
    target = noise.target_epsilon
    if (noise.multiplier is None) == (target is None):
        raise UserError("give noise_multiplier or target_epsilon, and not both.")
    name = settings["name"]
    make = algorithm_type(name)
    parameter_names = inspect.signature(make).parameters
    if "noise_multiplier" not in parameter_names:
        raise UserError(f"{setting('algorithm', name)} is not private: train without make_private.")
    if "max_grad_norm" not in parameter_names:
        raise UserError(
            f"{setting('algorithm', name)} does not clip gradients, so it cannot run in your own "
            "loop: use `zdp-bench run`."
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
    unit_noise_mechanism = build(1.0).mechanism()
    try:
        multiplier = calibrate_mechanism(target, unit_noise_mechanism, plan.steps, noise.delta)
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
    """Reject ranks whose arguments, data, code or model differ, because they train one model."""
    # With the same seed, a dataset with random augmentation has the same digest on all ranks.
    seed = ranks.broadcast(os.urandom(16).hex())
    with preserve_random_state():
        seed_layers(seed, 0, 0)
        examples_digest = examples.digest()
    facts = {
        "set of arguments": arguments,
        "data set": examples_digest,
        "list of owners": units.digest,
        "code": code_digest(()),
        "model": re.sub(" at 0x[0-9a-f]+", "", repr(model)),  # without addresses in memory
        "optimizer": optimizer,
        "mechanism": mechanism.digest(),
        "plan": plan,
    }
    ranks.require_same(facts)


def make_plan(
    batch_size: int | None,
    sample_rate: float | None,
    expected_batch: float | None,
    epochs: int,
    units: int,
) -> Plan:
    """Return the plan of a training. With `sample_rate`, it does not depend on `units`.

    Args:
        batch_size: Expected batch size, or None.
        sample_rate: Probability that a step draws an example or owner, or None.
        expected_batch: Divisor of the noisy sum; required with `sample_rate`.
        epochs: Number of epochs.
        units: Number of examples or, if they are drawn, of owners.

    Raises:
        UserError: There are fewer units than `MIN_PUBLIC_UNITS` or `batch_size`.
    """
    if sample_rate is not None:
        assert expected_batch is not None
        sampling = Sampling(
            "poisson",
            sample_rate=float(sample_rate),
            expected_batch_size=float(expected_batch),
            records=0,  # private
        )
        return Plan(sampling, epochs, max(1, round(epochs / sample_rate)))
    assert batch_size is not None
    too_few = (
        f"with n = {units:,}, adding or removing one changes the sampling rate batch_size / n, "
        "which ε treats as public: give sample_rate and expected_batch instead, and do not derive "
        "them from the data"
    )
    require(units >= MIN_PUBLIC_UNITS, "batch_size", batch_size, too_few)
    too_large = f"the dataset has only {units:,} to draw from"
    require(batch_size <= units, "batch_size", batch_size, too_large)
    return Plan.poisson(units, batch_size / units, epochs)
