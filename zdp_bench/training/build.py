"""Build the parts of a run from its configuration: model, algorithm, optimizer, schedule."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem, algorithm_type
from zdp_bench.config.plugins import find_builder
from zdp_bench.config.schema import Plugin, Run
from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.errors import UserError, first_line, is_out_of_memory
from zdp_bench.gradients import Batch
from zdp_bench.gradients.clipping import trainable
from zdp_bench.nn.initialisation import scale_to_unit_variance
from zdp_bench.nn.surgery import (
    RealInput,
    real_shape,
    replace_batchnorm,
    standardise_weights,
    surgery,
)
from zdp_bench.privacy.accountants import Claim
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.calibration import calibrate, calibrate_mechanism
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import stream
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.registry import SCHEDULERS, lookup
from zdp_bench.tasks import Task
from zdp_bench.training.memory_layout import is_dense, separate_numbers
from zdp_bench.training.plan import Plan
from zdp_bench.training.validation import DEFAULT, KEY

# Errors that torch and Python raise if model, loss and data do not fit one another.
UNFIT = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    AssertionError,
)


def build_model(config: Run, data: Splits | DatasetInfo) -> nn.Module:
    """Return the model, initialised from a random stream of the configured seed.

    Args:
        config: the run's configuration.
        data: the data set, or its counts and shapes.

    Raises:
        UserError: the model cannot be built for this data set.
    """
    with torch.random.fork_rng(devices=[]):
        (seed,) = stream(config.seed, "model").generate_state(1, np.uint64)
        torch.manual_seed(int(seed))
        try:
            shape, mapped = data.input_shape, config.complex_as
            model: nn.Module = lookup("model", config.model.name)(
                real_shape(shape, mapped) if mapped else shape, data.outputs, **config.model.options
            )
            if mapped:
                model = nn.Sequential(RealInput(mapped), model)
            if config.replace_batchnorm:
                model = replace_batchnorm(model, config.replace_batchnorm)
                if not surgery(model):
                    raise UserError(
                        f"model.replace_batchnorm={config.replace_batchnorm}: the model has no "
                        "BatchNorm, so there is nothing to replace. Remove the key."
                    )
            if config.weight_standardisation:
                model = standardise_weights(model)
            if config.start:
                model = scale_to_unit_variance(model, _white_noise(data))
        except UNFIT as error:
            raise _unfit(config, data, error) from error
    separate_numbers(model)
    return model


def _white_noise(data: Splits | DatasetInfo) -> Tensor:
    """Draw inputs of the data set's shape and dtype with E|z|² = 1, about a million numbers."""
    if isinstance(data, DatasetInfo):
        dtype = data.dtype
    else:
        dtype = data.test.batch(torch.arange(1))[0].dtype
    count = min(1024, max(8, 2**20 // math.prod(data.input_shape)))
    return torch.randn(count, *data.input_shape, dtype=dtype)


def fit_outputs(
    config: Run,
    task: Task,
    data: Splits | DatasetInfo,
) -> Splits | DatasetInfo:
    """Return the data with the task's number of outputs, such as one logit for two classes.

    Args:
        config: the run's configuration.
        task: the task, which may state its number of outputs.
        data: the data set, or its counts and shapes.

    Raises:
        UserError: the task needs two classes, and the data set has more.
    """
    outputs = getattr(task, "outputs", data.outputs)
    if outputs == 1 and data.outputs > 2:
        raise UserError(
            f"task={config.task.name}: needs two classes, but dataset={config.dataset.name} has "
            f"{data.outputs}; use task=classification."
        )
    return data if outputs == data.outputs else replace(data, outputs=outputs)


def check_fit(
    config: Run,
    model: nn.Module,
    task: Task,
    data: Splits | DatasetInfo,
) -> None:
    """Run model and loss on one test example, which is public, or on zeros of its shape.

    Args:
        config: the run's configuration, for errors.
        model: the model. It is left in training mode.
        task: the task, which gives the loss.
        data: the data set, or its counts and shapes.

    Raises:
        UserError: model, loss and data do not fit one another.
    """
    targets_note = ""
    warned_always = torch.is_warn_always_enabled()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", "Casting complex values to real")
            torch.set_warn_always(True)  # by default, only a process's first cast warns
            inputs, targets = (
                zeros_like(data, 1)
                if isinstance(data, DatasetInfo)
                else data.test.batch(torch.arange(1))
            )
            if required := getattr(task, "targets", ""):
                shape = list(targets.shape[1:])
                targets_note = f", targets of shape {shape} where the task takes {required}"
            losses = task.loss(model.eval()(inputs), targets)
            if not isinstance(losses, Tensor):
                raise TypeError(f"the loss is a {type(losses).__name__}, and not a tensor")
    except (UserWarning, *UNFIT) as error:
        if "complex" in str(error) and not any(p.is_complex() for p in model.parameters()):
            raise UserError(
                f"model={config.model.name}: has real weights, but the examples of "
                f"dataset={config.dataset.name} are complex; their imaginary part would be "
                "dropped. Add model.complex_as=magnitude, or model.complex_as=channels for real "
                "and imaginary part as two channels, or use a complex model."
            ) from None
        raise _unfit(config, data, error, targets_note) from error
    finally:
        torch.set_warn_always(warned_always)
        model.train()
    # Before training, because metrics would only fail after it.
    min_side = getattr(task, "min_side", 0)
    if min_side and min(targets.shape[-2:]) < min_side:
        height, width = targets.shape[-2:]
        raise UserError(
            f"task={config.task.name}: needs images of at least {min_side} × {min_side} pixels, "
            f"but those of dataset={config.dataset.name} have {height} × {width}."
        )
    if losses.shape != (1,) or losses.is_complex():
        fault = f"the loss of one example is {losses.dtype} of shape {list(losses.shape)}"
        raise _unfit(config, data, ValueError(fault))


def zeros_like(data: DatasetInfo, examples: int) -> Batch:
    """Return zeros with the shapes and dtypes of the data set's inputs and targets."""
    return (
        torch.zeros(examples, *data.input_shape, dtype=data.dtype),
        torch.zeros(examples, *data.target_shape, dtype=data.target_dtype),
    )


def _unfit(
    config: Run,
    data: Splits | DatasetInfo,
    error: Exception,
    targets_note: str = "",
) -> UserError:
    """Return the error for model, task and data that do not fit one another."""
    message = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
    if isinstance(error, KeyError):  # whose message is only the key
        message = f"there is no {message}"
    if is_out_of_memory(error):
        return UserError(
            f"model={config.model.name}: needs more memory than is available ({message}); make it "
            "smaller, or raise the limit."
        )
    return UserError(
        f"model={config.model.name} and task={config.task.name} do not fit "
        f"dataset={config.dataset.name} (examples of shape {list(data.input_shape)}, "
        f"{data.outputs} outputs{targets_note}): {message}."
    )


def build_algorithm(
    config: Run,
    problem: Problem,
    plan: Plan,
) -> tuple[Run, Algorithm]:
    """Return the configuration with the calibrated noise multiplier, and the algorithm.

    z is proportional to the noise multiplier, so one search for a tight ε serves all algorithms
    that share a plan.

    Args:
        config: the run's configuration.
        problem: model, loss and sampling.
        plan: plan of the steps.

    Raises:
        UserError: no noise multiplier reaches the target ε, or the budget allows no step.
    """
    make = algorithm_type(config.algorithm.name)
    options, privacy = config.algorithm.options, config.privacy
    try:
        if privacy.target_epsilon:
            unit = make(problem, **(options | {"noise_multiplier": 1.0})).mechanism()
            sigma = calibrate_mechanism(privacy.target_epsilon, unit, plan.steps, privacy.delta)
            config = _with_noise(config, sigma)
        elif privacy.claimed_epsilon:
            claim = claim_of(config, plan, 1.0, plan.steps)
            sigma = calibrate(privacy.claimed_epsilon, config.accountant, claim)
            config = _with_noise(config, sigma)
    except ValueError as error:
        key = "privacy.target_epsilon" if privacy.target_epsilon else "privacy.claimed_epsilon"
        value = privacy.target_epsilon or privacy.claimed_epsilon
        raise UserError(
            f"{key}={value:g} with algorithm={config.algorithm.name}: {error}."
        ) from None
    algorithm = make(problem, **config.algorithm.options)
    if privacy.max_epsilon:
        _check_budget(config, algorithm.mechanism())
    return config, algorithm


def claim_of(
    config: Run,
    plan: Plan,
    noise_multiplier: float,
    steps: int,
) -> Claim:
    """Return the inputs of the configured accountant.

    Args:
        config: the run's configuration.
        plan: plan of the steps.
        noise_multiplier: noise multiplier σ.
        steps: number of steps that are taken.
    """
    return Claim(
        noise_multiplier,
        plan.sampling.sample_rate,
        plan.sampling.steps_of_one(steps),
        config.privacy.delta,
        plan.sampling.records,
        plan.epochs,
    )


def _with_noise(config: Run, noise_multiplier: float) -> Run:
    """Return the configuration with a calibrated noise multiplier."""
    option = {"noise_multiplier": noise_multiplier}
    return replace(
        config,
        algorithm=Plugin(config.algorithm.name, config.algorithm.options | option),
        resolved=config.resolved | {"algorithm": config.resolved["algorithm"] | option},
    )


def _check_budget(config: Run, mechanism: Mechanism) -> None:
    """Reject a budget that does not allow the first step."""
    budget = config.privacy.max_epsilon or 0.0
    if mechanism.z == 0:
        algorithm = f"algorithm={config.algorithm.name}"
        if noise := config.algorithm.options.get("noise"):
            algorithm = f"{algorithm} and algorithm.noise={noise}"
        raise UserError(
            f"privacy.max_epsilon={budget:g} with {algorithm}: some direction gets no noise, so ε "
            "is ∞ at the first step. Choose other noise, or remove the budget."
        )
    min_steps = config.federated.local_steps if config.federated.nodes else 1  # a whole round
    cost = tight_epsilon(mechanism, min_steps, config.privacy.delta)
    if cost > budget:
        unit = "one step" if min_steps == 1 else f"one round of federated.local_steps={min_steps}"
        raise UserError(
            f"privacy.max_epsilon={budget:g}: {unit} costs a tight ε of {show_epsilon(cost)}, so "
            "the run would take no step. Raise the budget, add noise, or remove the budget."
        )


def build_optimizer(config: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Return the configured optimizer over the trainable parameters.

    Raises:
        UserError: its options are invalid, or it cannot take a private step.
    """
    parameters, options = list(trainable(model).values()), dict(config.optimizer.options)
    is_complex = any(parameter.is_complex() for parameter in parameters)
    if options.get("fused") and is_complex:
        raise UserError(
            "optimizer.fused=true: torch has no fused optimizer for complex parameters; remove it."
        )
    suits_fused = all(parameter.is_cpu and is_dense(parameter) for parameter in parameters)
    chosen = options.keys() & {"fused", "foreach", "differentiable"}
    if config.optimizer.name in ("adam", "adamw") and suits_fused and not (is_complex or chosen):
        options["fused"] = True  # on a CPU, four times as fast as torch's default
    make = find_builder("optimizer", config.optimizer.name)
    leave_compiler()
    try:
        optimizer = make(parameters, **options)
        require_step(optimizer)
        return optimizer
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"optimizer={config.optimizer.name}: {first_line(error)}") from None


def leave_compiler() -> None:
    """Let torch build optimizers without importing its compiler, which takes two seconds.

    `add_param_group` imports the compiler at its first call, to exclude itself from compilation.
    No program here is compiled.
    """
    plain = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    plain.__dynamo_disable = plain


# Optimizers that step from gradients alone, unless an option does not suit the parameters.
_STEPPING = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RMSprop,
}
_UNCERTAIN = ("foreach", "capturable", "differentiable")


def _is_known_to_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer needs no trial step, which would import torch's compiler."""
    groups = optimizer.param_groups
    if type(optimizer) not in _STEPPING:
        return False
    if any(group.get(option) for group in groups for option in _UNCERTAIN):
        return False
    fused = chain.from_iterable(group["params"] for group in groups if group.get("fused"))
    return all(parameter.is_cpu and parameter.dtype == torch.float32 for parameter in fused)


def require_step(optimizer: torch.optim.Optimizer) -> None:
    """Reject an optimizer that cannot step from gradients alone, by a trial step of a copy.

    An optimizer that calls the loss again (LBFGS) would make a release with each call.

    Raises:
        ValueError: the step fails. Or the optimizer is fused and a parameter has gaps in its
            memory, which the optimizer would overwrite.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and not all(map(is_dense, group["params"])):
            raise ValueError(
                "fused=True ignores the strides of a parameter that is a view of a larger tensor: "
                "copy it, nn.Parameter(view.clone()), or remove fused."
            )
    if _is_known_to_step(optimizer):
        return
    # Not `deepcopy(optimizer)`, which loses the attributes of a wrapper such as Lookahead.
    twin = object.__new__(type(optimizer))
    try:
        attributes = {k: value for k, value in vars(optimizer).items() if not k.endswith("hooks")}
        vars(twin).update(copy.deepcopy(attributes))
    except Exception:  # it cannot be copied; the first private step will show whether it works
        return
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    try:
        type(twin).step(twin)  # not `twin.step`, which a schedule may bind to the original
    except Exception as error:
        raise ValueError(
            f"{type(optimizer).__name__} cannot take a private step, from gradients alone: "
            f"{first_line(error)} Use another optimizer."
        ) from None


def build_scheduler(
    config: Run,
    optimizer: torch.optim.Optimizer,
    data: Splits | DatasetInfo,
    steps: int,
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return the configured learning rate schedule, or None.

    Args:
        config: the run's configuration.
        optimizer: the optimizer whose learning rate it sets.
        data: the data set, which must have validation examples for `reduce_on_plateau`.
        steps: number of steps of the run.

    Raises:
        UserError: an option is invalid, or there are no validation examples.
    """
    if config.scheduler is None:
        return None
    if config.scheduler.name == "reduce_on_plateau" and not data.validation:
        raise UserError(
            "scheduler=reduce_on_plateau needs validation examples, but "
            f"dataset={config.dataset.name} has none: set {KEY}={DEFAULT:g}, or use another "
            "scheduler."
        )
    try:
        make = find_builder("scheduler", config.scheduler.name)
        # torch's schedules count epochs. Others get the number of steps.
        length = [] if config.scheduler.name in SCHEDULERS else [steps]
        schedule: torch.optim.lr_scheduler.LRScheduler = make(
            optimizer, *length, **config.scheduler.options
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"scheduler={config.scheduler.name}: {error}.") from None
    return schedule


def count_real(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of real numbers in parameters, with two for each complex entry."""
    return sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
