"""`make_private`: everything a private training needs, from a model, an optimiser and a dataset.

Below it stands what it refuses before anything is built or read.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zdp_bench.algorithms import Algorithm, Problem, algorithm_type
from zdp_bench.config.constraints import require_takes_shares
from zdp_bench.config.plugins import check_plugin, own_keys
from zdp_bench.disk import hold_lock, make_folder
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.gradients import Batch, Loss, PerExample, per_example, reference
from zdp_bench.gradients.losses import kept_draws, set_seed
from zdp_bench.gradients.parts import pack, takes_parts
from zdp_bench.library.examples import Items, Unit, find_owners, owners_digest
from zdp_bench.library.keys import kind_of, make_keys
from zdp_bench.library.model_check import (
    check,
    require_gradients,
    require_module,
    says_python,
)
from zdp_bench.library.optimizers import (
    Regulariser,
    Several,
    require_held,
)
from zdp_bench.library.private import Private, writable
from zdp_bench.privacy.calibration import calibrate_mechanism
from zdp_bench.privacy.ledger import Tally
from zdp_bench.privacy.mechanism import MOST, Sampling
from zdp_bench.privacy.statement import require_delta, warn_of
from zdp_bench.training import checkpoint
from zdp_bench.training.batches import MICRO_BATCH, Size, seed_layers
from zdp_bench.training.build import require_step
from zdp_bench.training.distributed import Ranks, join
from zdp_bench.training.machine import check_precision, code_digest, execution_digest
from zdp_bench.training.plan import Plan
from zdp_bench.training.run_folder import open_ledger

log = logging.getLogger(__name__)
FOLDER = Path("ledgers")  # of those that no argument names
# Nobody may follow them and have an ε that leaves out steps that the weights went through.
OTHER_LEDGER = (
    "use another file. Weights that went through the steps of this one have the ε of both: "
    "state private.epsilon_with(...)"
)
ADVICE = (
    "To go on for more epochs, keep noise_multiplier (a target_epsilon sets other noise), bound, "
    "rate and unit. Without its state, delete it and pass count_earlier=True: the steps in the "
    f"ledger count in every ε. For other noise, {OTHER_LEDGER}."
)
LEAST_PUBLIC = 100  # of fewer units, one more or less moves batch_size / n by over 1 %


@says_python()
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
    arguments = dict(locals())
    require_gradients("make_private")
    noise = {"noise_multiplier": noise_multiplier, "target_epsilon": target_epsilon}
    check_arguments(arguments)
    seed = None if seed is None else int(seed)  # of numpy's too
    optimizer = check_optimizer(model, optimizer)
    if not callable(loss):
        raise UserError(
            f"loss={loss!r}: give a function of (outputs, targets), one loss per example, such as "
            'torch.nn.CrossEntropyLoss(reduction="none").'
        )
    check_options(algorithm, options, inspect.signature(make_private).parameters)
    device = next(model.parameters()).device
    ranks = join(device.type)
    examples = Items(dataset)
    owners = find_owners(unit, len(examples), max_examples)
    units = len(examples) if owners is None else owners.count
    plan = plan_of(batch_size, sample_rate, expected_batch or 0.0, epochs, units)
    if sample_rate is None:  # else n is private
        warn_of(delta, units)
    of_owners = whose = owners_digest(owners)
    most = owners.largest if owners is not None else 1
    if owners is not None and sample_rate is not None:
        need = "with sample_rate and unit, it says what an owner brings at most; no data may say it"
        require(max_examples is not None, "max_examples", max_examples, need)
        assert max_examples is not None
        most, whose = max_examples, "owners"  # a digest of them would say how many there are
    like, of_one = examples.like(), per_example(loss)
    problem = Problem(model, of_one, plan.sampling, seed or 0, like[0])
    asked = {"name": algorithm, "max_grad_norm": max_grad_norm} | options
    private = _build_algorithm(problem, plan, asked, noise_multiplier, target_epsilon, delta)
    if owners is not None:
        require_takes_shares("unit", algorithm)
    check_precision(precision, model, private)
    mechanism = private.mechanism().digest()
    # without the number of epochs, so that a training goes on for more
    run = hashlib.sha256(f"{mechanism}:{plan.sampling}:{whose}".encode()).hexdigest()
    older_run = hashlib.sha256(f"{mechanism}:{plan}:{whose}".encode()).hexdigest()  # of 0.1
    if ledger is None:
        ledger = FOLDER / f"{type(model).__name__}-{run[:8]}.jsonl"
        older_ledger = FOLDER / f"{type(model).__name__}-{older_run[:8]}.jsonl"
        if older_ledger.exists():
            ledger = older_ledger
        log.warning("every step is recorded in %s; set ledger= to use another file", ledger)
    if ranks.size > 1:
        # so that randomly changed examples have one digest
        seed_layers(ranks.broadcast(os.urandom(16).hex()), 0, 0)
        drawn = batch_size, sample_rate, expected_batch, epochs, max_examples
        given = drawn, asked, noise, delta, precision, secure, count_earlier
        facts = {
            "set of arguments": given,
            "data set": examples.digest(),
            "list of owners": of_owners,
            "code": code_digest(()),
            "model": re.sub(" at 0x[0-9a-f]+", "", repr(model)),
            "optimizer": optimizer,
            "mechanism": mechanism,
            "plan": plan,
        }
        ranks.require_same(facts)
        # rank 0 draws the noise, which covers rank 0's sum alone: one safeguard short with a seed
        alone = f"is for one process, and {ranks.size} train together; leave it out"
        require(seed is None, "seed", seed, alone)
    ranks.copy_from_first([*model.parameters(), *model.buffers()])
    size = Size(micro_batch or MICRO_BATCH).examples
    own = None if probe is None else (pack(probe[0]), pack(probe[1]))
    checked = check(model, private, of_one, like, owners is not None, own)
    made = (
        f"{execution_digest((), device, size, ranks.size, True)}:{precision}:"
        f"{sorted(asked.items())}:{of_owners}:{max_examples}"
    )
    keys = make_keys(seed, secure, plan, private, model, optimizer, examples, checked.batch, made)
    keys = ranks.broadcast(keys)
    ledger = Path(ledger).absolute()  # the loop may change its folder
    runs = run, older_run
    opened, saved, resources = _open(ledger, runs, private, whose, kind_of(keys.source()), ranks)
    return Private(
        model=model,
        optimizer=optimizer,
        algorithm=private,
        named=algorithm,
        examples=examples,
        plan=plan,
        delta=delta,
        target_epsilon=target_epsilon,
        precision=precision,
        keys=keys,
        fixed_state=checked.fixed_state,
        checked_loss=lambda: checked_loss(model, of_one, checked.batch),
        regulariser=regulariser,
        run=run,
        ledger=opened,
        ledger_file=ledger,
        count_earlier=count_earlier,
        owners=owners,
        units=units,
        most_owned=most,
        whose=whose,
        ranks=ranks,
        saved=saved,
        size=Size(size),
        resources=resources,
    )


def checked_loss(model: nn.Module, loss: PerExample, batch: Batch) -> float:
    """Return the mean loss on the examples of a check, with the same draws at every call."""
    with torch.no_grad(), takes_parts(model), kept_draws():
        set_seed(0)
        return float(loss(reference.outputs_of(model, batch[0]), batch[1]).mean())


def _build_algorithm(
    problem: Problem,
    plan: Plan,
    asked: dict[str, Any],
    noise_multiplier: float | None,
    target_epsilon: float | None,
    delta: float,
) -> Algorithm:
    """Return the algorithm with its noise, as given or calibrated; reject one that adds none."""
    if (noise_multiplier is None) == (target_epsilon is None):
        raise UserError("give noise_multiplier or target_epsilon, and not both.")
    make = algorithm_type(asked["name"])
    takes = inspect.signature(make).parameters
    if "noise_multiplier" not in takes:
        raise UserError(f"algorithm={asked['name']} is not private: train without make_private.")
    if "max_grad_norm" not in takes:
        raise UserError(
            f"algorithm={asked['name']} clips no gradients, so a loop cannot take its steps: use "
            "`zdp-bench run`."
        )

    def build(noise: float) -> Algorithm:
        built = make(
            problem, **check_plugin("algorithm", asked | {"noise_multiplier": noise}).options
        )
        try:
            built.mechanism()
        except ValueError as error:
            raise UserError(f"{error}.") from None
        return built

    if noise_multiplier is not None:
        return build(noise_multiplier)
    assert target_epsilon is not None
    try:
        found = calibrate_mechanism(target_epsilon, build(1.0).mechanism(), plan.steps, delta)
    except ValueError as error:
        raise UserError(f"target_epsilon={target_epsilon:g}: {error}.") from None
    return build(found)


def _open(
    path: Path,
    runs: tuple[str, str],
    algorithm: Algorithm,
    whose: str,
    randomness: str,
    ranks: Ranks,
) -> tuple[Tally, checkpoint.Checkpoint | None, ExitStack]:
    """Open or continue the ledger, one training at a time; rank 0 does so for all."""
    saved = None
    with ExitStack() as held, writable("ledger", path):
        make_folder(path.parent)
        if ranks.is_first:
            busy = f"{path}: another run uses this ledger; close() it, or choose another file."
            held.enter_context(hold_lock(path.with_suffix(".lock"), busy, wait=False))
            saved = checkpoint.load(path.with_suffix(".pt"), *runs, advice=ADVICE)
        saved = ranks.broadcast(saved)
        opened = open_ledger(
            path,
            algorithm.mechanism(),
            repeatable=False,
            at_least=saved.ledger if saved else None,
            start=None,
            ranks=ranks,
            whose=whose,
            facts={"randomness": randomness},
            advice=OTHER_LEDGER,
        )
        held.callback(opened.close)
        resources = held.pop_all()
    if opened.releases:
        log.info("%s: %d earlier steps count in every ε", path, opened.releases)
    return opened, saved, resources


# ------------------------------------------------------------------------ what is refused at once


def check_arguments(given: Mapping[str, Any]) -> None:
    """Reject contradictory arguments, and a model that cannot be trained."""
    model, seed, ledger = given["model"], given["seed"], given["ledger"]
    require_module(model)
    named = ledger is None or Path(ledger).suffix == ".jsonl"
    require(named, "ledger", ledger, "give a file name that ends in .jsonl")
    epochs = f"must be a number from 1 to {MOST:,}"
    require(1 <= given["epochs"] <= MOST, "epochs", given["epochs"], epochs)
    ranges = {"batch_size": (1, MOST), "max_examples": (1, MOST), "micro_batch": (1, MOST)}
    for key, (least, most) in {**ranges, "seed": (0, 2**64 - 1)}.items():
        if (value := given[key]) is not None:
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            rule = f"must be a whole number from {least} to {most:,}"
            require(whole and least <= value <= most, key, value, rule)
    if (given["batch_size"] is None) == (given["sample_rate"] is None):
        raise UserError("give batch_size or sample_rate, and not both.")
    if (given["sample_rate"] is None) != (given["expected_batch"] is None):
        raise UserError(
            "sample_rate and expected_batch go together: the noisy sum is divided by the latter."
        )
    if given["expected_batch"] is not None:
        size, rule = given["expected_batch"], f"must be above 0 and at most {MOST:,}"
        require(0 < size <= MOST, "expected_batch", size, rule)
    require_delta("delta", given["delta"])
    require(
        seed is None or not given["secure"],
        "seed",
        seed,
        "secure=True uses the operating system's randomness; remove the seed",
    )
    if isinstance(model, DistributedDataParallel):
        raise UserError(
            "model: give the module itself, not DistributedDataParallel's wrapper, which would add "
            "up gradients without noise: make_private adds up what the processes clipped."
        )
    for name, parameter in model.named_parameters():
        if parameter.is_conj() or parameter.is_neg():
            raise UserError(
                f"parameter '{name}' is a view that is conjugated when it is read, which no "
                "optimizer can step: make it of a tensor of its own, "
                "nn.Parameter(z.conj().resolve_conj())."
            )
    if not model.training:
        raise UserError("the model is in eval mode: call model.train() before make_private.")


def plan_of(
    batch_size: int | None,
    sample_rate: float | None,
    expected_batch: float,
    epochs: int,
    units: int,
) -> Plan:
    """Return the plan of a training: with `sample_rate` from what was given alone, not from n."""
    if sample_rate is not None:
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


def check_options(algorithm: str, options: Iterable[str], arguments: Iterable[str]) -> None:
    """Reject names that are neither arguments of `make_private` nor options of the algorithm."""
    own = own_keys("algorithm", algorithm)
    for name in options:
        if name not in own:
            raise unknown("make_private: argument", name, {*own, *arguments} - {"options"})


WRAPPERS = {"lightning", "pytorch_lightning", "accelerate"}  # around an optimizer of the caller's


def check_optimizer(model: nn.Module, given: Any) -> Any:
    """Return the optimiser, or several as one; reject those that miss a trained parameter."""
    several = isinstance(given, list | tuple)
    bare = []
    for one in given if several else [given]:
        if not isinstance(one, torch.optim.Optimizer):
            raise UserError(
                f"optimizer: {type(one).__name__} is none of torch.optim's, made from the model's "
                "parameters; a schedule is yours to step, after private.step."
            )
        wraps = type(one).__module__.partition(".")[0] in WRAPPERS
        bare.append(getattr(one, "optimizer", one) if wraps else one)
        try:
            require_step(bare[-1])
        except ValueError as error:
            raise UserError(f"optimizer: {error}") from None
    optimizer = Several(tuple(bare)) if several else bare[0]
    require_held(dict(model.named_parameters()), optimizer)
    return optimizer
