"""The parts a run is made of, each built from its configuration: plan, model, algorithm, optimiser, schedule, batches."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from typing import Any

import numpy as np
import torch
from torch import nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config.plugins import optimizer_class, scheduler_class
from zdp_bench.config.schema import Plugin, Run
from zdp_bench.data import N_UNIFORMS, Augment, DatasetInfo, Source, Splits
from zdp_bench.errors import UserError, first_line, require
from zdp_bench.gradients import Batch
from zdp_bench.gradients.clipping import trainable
from zdp_bench.nn.batchnorm import replace_batchnorm
from zdp_bench.privacy import sampling
from zdp_bench.privacy.accounting import Claim, tight_epsilon
from zdp_bench.privacy.calibration import calibrate, calibrate_mechanism
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.noise import SecureRandom, stream
from zdp_bench.registry import lookup
from zdp_bench.tasks import Task
from zdp_bench.training import model_checks
from zdp_bench.training.devices import ahead, pinned
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.evaluation import evaluate
from zdp_bench.training.micro_batches import MicroBatches, Size, largest

MICRO_BATCH = 2048


@dataclass(frozen=True)
class Plan:
    """How many steps a run takes, and which records each of them sees.

    Attributes:
        before: steps that a learning-rate range test has made on the same records, with the same mechanism.
    """

    sampling: Sampling
    epochs: int
    steps: int
    before: int = 0

    @staticmethod
    def of(config: Run, size: int) -> Plan:
        """The plan for `size` training records."""
        trainer, before = config.trainer, config.privacy.range_test_steps or 0
        if trainer.sampling == "poisson":
            expected = trainer.batch_size or 1
            require(
                expected <= size,
                "trainer.batch_size",
                expected,
                f"the training set has only {size:,} records",
            )
            rate = trainer.sample_rate or expected / size
            steps = max(1, round(trainer.epochs / rate))
            return Plan(Sampling("poisson", rate, rate * size, size), trainer.epochs, steps, before)
        batch = trainer.batch_size or max(1, round((trainer.sample_rate or 0) * size))
        require(
            batch <= size,
            "trainer.batch_size",
            batch,
            f"the training set has only {size:,} records",
        )
        scheme: Any = trainer.sampling
        per_epoch = -(-size // batch) if scheme == "shuffled" else size // batch
        return Plan(
            Sampling(scheme, batch / size, batch, size),
            trainer.epochs,
            trainer.epochs * per_epoch,
            before,
        )

    def draw(self, key: int | str, step: int, secure: bool = False) -> tuple[np.ndarray, float]:
        """The records of a step, and the divisor of its sum: a function of (key, step) alone, or of nothing when `secure`.

        Args:
            key: the run's (`noise.run_key`), as for its noise.
        """
        size, batch = self.sampling.records, int(self.sampling.expected_batch_size)
        if self.sampling.scheme == "shuffled":
            per_epoch = self.steps // self.epochs
            rng = np.random.default_rng(stream(key, "shuffle", step // per_epoch))
            indices = sampling.shuffled(size, batch, step % per_epoch, rng)
            return indices, len(indices)
        random: sampling.Random = (
            SecureRandom() if secure else np.random.default_rng(stream(key, "sample", step))
        )
        if self.sampling.scheme == "poisson":
            return sampling.poisson(
                size, self.sampling.sample_rate, random
            ), self.sampling.expected_batch_size
        return sampling.uniform(size, batch, random), self.sampling.expected_batch_size

    def epoch_of(self, step: int) -> int:
        """The number (from 1) of the epoch that the `step`-th step belongs to."""
        near = max(1, round(step * self.epochs / self.steps))
        return near if step <= round(near * self.steps / self.epochs) else near + 1

    def epoch_ending_at(self, step: int) -> int | None:
        """The number (from 1) of the epoch that ends with the `step`-th step, or None inside an epoch."""
        epoch = round(step * self.epochs / self.steps)
        return epoch if epoch > 0 and round(epoch * self.steps / self.epochs) == step else None


def build_model(config: Run, data: Splits | DatasetInfo) -> nn.Module:
    """The model, initialised from the seed's own stream, whatever was drawn before.

    Raises:
        UserError: it cannot be built for this data: another shape, or more memory than there is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(config.seed, "model").generate_state(1, np.uint64)[0]))
        try:
            model: nn.Module = lookup("model", config.model.name)(
                data.input_shape, data.outputs, **config.model.options
            )
        except UNFIT as error:
            raise _unfit(config, data, error) from error
    return replace_batchnorm(model, config.replace_batchnorm) if config.replace_batchnorm else model


# What torch and Python raise where sizes do not fit one another.
UNFIT = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    ArithmeticError,
    MemoryError,
    AssertionError,
)


def _unfit(config: Run, data: Splits | DatasetInfo, error: Exception) -> UserError:
    words = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
    return UserError(
        f"model={config.model.name} and task={config.task.name} do not fit dataset={config.dataset.name} (records of shape "
        f"{list(data.input_shape)}, {data.outputs} outputs): {words}."
    )


def check_fit(config: Run, model: nn.Module, task: Task, data: Splits | DatasetInfo) -> None:
    """Try the model and the loss on one test record, which is public, or on zeros of an outline's shapes: what does not fit is
    told before anything is trained.

    Raises:
        UserError: the model does not take the records, or the loss not its outputs.
    """
    try:
        with torch.no_grad():
            if isinstance(data, DatasetInfo):
                inputs = torch.zeros(1, *data.input_shape, dtype=data.dtype)
                targets = torch.zeros(1, *data.target_shape, dtype=data.target_dtype)
            else:
                inputs, targets = data.test.batch(torch.arange(1))
            losses = task.loss(model.eval()(inputs), targets)
    except UNFIT as error:
        raise _unfit(config, data, error) from error
    finally:
        model.train()
    if losses.shape != (1,) or losses.is_complex():
        raise _unfit(
            config,
            data,
            ValueError(f"the loss of one record is {losses.dtype} of shape {list(losses.shape)}"),
        )


def build_algorithm(config: Run, problem: Problem, plan: Plan) -> tuple[Run, Algorithm]:
    """The algorithm, and the configuration with the noise multiplier it has: as configured, or calibrated to an ε.

    z is proportional to the noise multiplier, so that one tight ε is found once for all algorithms that share a plan.

    Raises:
        UserError: no noise multiplier reaches the ε, or a budget is set that does not pay for the first step.
    """
    make, options, privacy = (
        lookup("algorithm", config.algorithm.name),
        dict(config.algorithm.options),
        config.privacy,
    )
    try:
        if privacy.target_epsilon:
            unit = make(problem, **(options | {"noise_multiplier": 1.0})).mechanism()
            if unit.z == 0:
                raise ValueError(
                    "some direction gets no noise, so its ε is ∞ at every noise multiplier"
                )
            options["noise_multiplier"] = calibrate_mechanism(
                privacy.target_epsilon, unit, plan.before + plan.steps, privacy.delta
            )
        elif privacy.claimed_epsilon:
            claim = Claim(
                1.0,
                plan.sampling.sample_rate,
                plan.steps,
                privacy.delta,
                plan.sampling.records,
                plan.epochs,
            )
            options["noise_multiplier"] = calibrate(
                privacy.claimed_epsilon, config.accountant, claim
            )
    except ValueError as error:
        asked = "target" if privacy.target_epsilon else "claimed"
        value = privacy.target_epsilon or privacy.claimed_epsilon
        raise UserError(
            f"privacy.{asked}_epsilon={value:g} with algorithm={config.algorithm.name}: {error}."
        ) from None
    if options != config.algorithm.options:
        shown = config.resolved["algorithm"] | {"noise_multiplier": options["noise_multiplier"]}
        resolved = config.resolved | {"algorithm": shown}
        config = replace(
            config, algorithm=Plugin(config.algorithm.name, options), resolved=resolved
        )
    algorithm: Algorithm = make(problem, **options)
    if privacy.max_epsilon:
        _check_budget(config, algorithm.mechanism(), plan.before)
    return config, algorithm


def _check_budget(config: Run, mechanism: Mechanism, before: int) -> None:
    """A budget that ends a run before its first step would leave the record of a model that nobody trained."""
    budget, kind = config.privacy.max_epsilon or 0.0, config.algorithm.options.get("noise")
    if mechanism.z == 0:
        of = f"algorithm={config.algorithm.name}" + (f" and algorithm.noise={kind}" if kind else "")
        raise UserError(
            f"privacy.max_epsilon={budget:g} with {of}: some direction gets no noise, so ε is ∞ at the first step and there "
            "would be none. Choose other noise, or leave the budget out."
        )
    least = config.federated.local_steps if config.federated.nodes else 1  # of a round, all or none
    cost = tight_epsilon(mechanism, before + least, config.privacy.delta)
    if cost > budget:
        first = "one step" if least == 1 else f"one round of federated.local_steps={least}"
        beside = f" after privacy.range_test_steps={before}" if before else ""
        up = Context(prec=3, rounding=ROUND_CEILING).create_decimal_from_float(
            cost
        )  # what is read here pays for it
        raise UserError(
            f"privacy.max_epsilon={budget:g}: {first}{beside} costs a tight ε of {float(up):g}, so none would be taken. Raise "
            "the budget, add noise, or leave the budget out."
        )


def check_model(
    model: nn.Module, algorithm: Algorithm, task: Task, data: Splits, config: Run, plan: Plan
) -> list[str]:
    """`checks.check`, where the algorithm is private; of the data only shapes and dtypes are used.

    The batches tried are as large as a step's pieces get; a Poisson batch seldom passes six standard deviations.

    Raises:
        UserError: the model must not be trained privately as it is.
    """
    if not getattr(algorithm, "private", True):
        return []
    like, drawn = data.train.batch(torch.arange(0)), plan.sampling.expected_batch_size
    if plan.sampling.scheme == "poisson":
        drawn = min(drawn + 6 * drawn**0.5, plan.sampling.records)
    most, micro_batch = math.ceil(drawn), config.trainer.micro_batch
    if not isinstance(micro_batch, str):
        most = min(most, micro_batch or MICRO_BATCH)
    return model_checks.check(model, algorithm, task.loss, like, data.outputs, most)


def build_optimizer(config: Run, model: nn.Module) -> torch.optim.Optimizer:
    """torch's optimiser over the trainable parameters.

    Raises:
        UserError: it refuses one of its values, or would refuse the model at the first step.
    """
    if config.optimizer.options.get("fused") and any(
        parameter.is_complex() for parameter in trainable(model).values()
    ):
        raise UserError(
            "optimizer.fused=true: torch has no fused optimiser for complex parameters; leave it out."
        )
    builder = optimizer_class(config.optimizer.name)
    options, parameters = config.optimizer.options, list(trainable(model).values())
    try:
        _tried(builder, options, parameters)
        return builder(parameters, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"optimizer={config.optimizer.name}: {first_line(error)}") from None


def _tried(
    builder: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    parameters: list[nn.Parameter],
) -> None:
    """One step on a number of each kind that the model has: some of what torch refuses, it refuses only there."""
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    numbers = [
        torch.zeros(1, dtype=dtype, device=device, requires_grad=True) for dtype, device in kinds
    ]
    for number in numbers:
        number.grad = torch.ones_like(number)
    if numbers:  # torch's own sentence says what none means
        builder(numbers, **options).step()


def build_scheduler(
    config: Run, optimizer: torch.optim.Optimizer, data: Splits | DatasetInfo
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """torch's schedule of the learning rate, one step an epoch; None where the recipe has none.

    Raises:
        UserError: it refuses one of its values, or watches a validation set that the data does not have.
    """
    if config.scheduler is None:
        return None
    if config.scheduler.name == "reduce_on_plateau" and not data.validation:
        own = [
            f", or more dataset.{key}"
            for key in config.dataset.options
            if key.startswith("validation_")
        ]
        raise UserError(
            f"scheduler=reduce_on_plateau watches validation records, and dataset={config.dataset.name} has none: use another "
            f"scheduler{own[0] if own else ', or a data set that has some'}."
        )
    try:
        schedule: torch.optim.lr_scheduler.LRScheduler = scheduler_class(config.scheduler.name)(
            optimizer, **config.scheduler.options
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"scheduler={config.scheduler.name}: {error}.") from None
    return schedule


def advance(
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    model: nn.Module,
    task: Task,
    data: Splits,
    device: torch.device,
) -> None:
    """One step of the schedule; `reduce_on_plateau` watches the loss over the validation records, which are public."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        assert data.validation is not None
        scheduler.step(evaluate(model, task, data.validation, device)["loss"])
    else:
        scheduler.step()


def micro_batch_size(
    config: Run, plan: Plan, model: nn.Module, task: Task, data: Splits, device: torch.device
) -> Size:
    """How many records a step processes at once, to begin with: `trainer.micro_batch`, or with `auto` the most that fit."""
    fixed = config.trainer.micro_batch
    if not isinstance(fixed, str):
        return Size(fixed or MICRO_BATCH)
    inputs, targets = data.train.batch(torch.zeros(1, dtype=torch.long))
    like = inputs.to(device), targets.to(device)
    return largest(model, task.loss, like, plan.sampling.expected_batch_size, device)


def micro_batches(
    records_: Source,
    indices: np.ndarray,
    config: Run,
    device: torch.device,
    key: int | str,
    step: int = 0,
    augment: Augment | None = None,
    augment_targets: Augment | None = None,
    size: Size | None = None,
    ranks: Ranks = ALONE,
) -> MicroBatches:
    """This rank's share of the sampled records, in pieces, on the device.

    Args:
        key, step: name the chance by which records are made or `augment` changes their inputs: a resumed step meets the same.
        size: how large the pieces are; by default `trainer.micro_batch`.
    """
    chance = torch.empty(0)
    if augment or augment_targets or records_.is_stochastic:
        own = stream(key, "augment", step).generate_state(2, np.uint64).tobytes()
        chance = ranks.share(torch.from_numpy(sampling.chance_of(indices, N_UNIFORMS, own)))
    indices = ranks.share(indices)
    pin, prefetch = pinned(device), config.execution.prefetch

    def piece(cut: slice) -> Batch:
        own = chance[cut]
        inputs, targets = records_.batch(
            torch.from_numpy(indices[cut]), own if records_.is_stochastic else None
        )
        inputs = augment(inputs, own) if augment else inputs
        targets = augment_targets(targets, own) if augment_targets else targets
        return pin((inputs, targets))

    def placed(pieces: Iterator[Batch]) -> Iterator[Batch]:
        for inputs, targets in ahead(
            pieces, (device.type == "cuda") if prefetch is None else prefetch
        ):
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    fixed = config.trainer.micro_batch
    return MicroBatches(
        len(indices), piece, size or Size(fixed if isinstance(fixed, int) else MICRO_BATCH), placed
    )


def seed_layers(key: int | str, step: int, rank: int, secure: bool = False) -> None:
    """Make what layers draw themselves (dropout) a function of (key, step), like sampling and noise; of nothing when `secure`.

    So a checkpoint needs no state of any generator: torch's, on whatever device, numpy's and Python's own all start anew. What a
    layer draws for a record depends on the records before it, so where the seed is no secret it must be another one.
    """
    own = stream(key, "layers", step, rank)
    number = int.from_bytes(os.urandom(8)) if secure else int(own.generate_state(1, np.uint64)[0])
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
