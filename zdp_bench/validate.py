"""What a recipe would do, without training: model, clipping, sampling, z, every ε, time, memory, and whether its data is there.

No record is read. The data set's shapes come from its outline (names, headers, or the release's counts), the ε from the
mechanism, the time from one step on random numbers. What is wrong with a recipe is found here in seconds and not after an hour.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench import checks
from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config import Run
from zdp_bench.data import Outline
from zdp_bench.errors import UserError
from zdp_bench.experiment import MICRO_BATCH, Plan, build_algorithm, build_model, build_optimizer
from zdp_bench.federated.partition import evenly
from zdp_bench.gradients.clipping import trainable
from zdp_bench.gradients.rules import rule_of
from zdp_bench.privacy.accounting import ACCOUNTANTS, Claim, patient_epsilon, rdp_epsilon, tight_epsilon
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.registry import lookup, names

SECONDS = 3.0  # no trial step is begun that would pass this
FORWARDS = 3  # forward passes that one record's step is worth before any step was timed: its own, and a backward pass of two
NOISE_SECONDS = 6e-9  # for one number of noise on a CPU core
MOMENTS = {"adam": 2, "adamw": 2, "nadam": 2, "rmsprop": 1, "adagrad": 1, "sgd": 0}


@dataclass(frozen=True)
class Layer:
    """A layer with parameters that train: how one record's gradient of it is bounded."""

    name: str
    kind: str
    parameters: int
    rule: str


@dataclass(frozen=True)
class Cost:
    """What a run would cost here, extrapolated from one step on random numbers, or from a forward pass where one is too long.

    Attributes:
        seconds: of all steps; noise included, evaluation not.
        bytes: weights, gradients, moments, and the activations of one micro-batch.
        measured_on: device and threads of the trial, and whether it was a forward pass alone.
    """

    seconds: float
    bytes: int
    measured_on: str


@dataclass(frozen=True)
class Report:
    """All that can be said of a recipe before it runs."""

    recipe: str
    data: dict[str, Any]
    model: dict[str, Any]
    layers: list[Layer]
    surgery: list[dict[str, str]]
    sampling: dict[str, Any]
    privacy: dict[str, Any]
    cost: Cost | None


def validate(config: Run, trial: bool = True) -> Report:
    """Work out a run that is not made.

    Args:
        trial: whether to time a step on random numbers for the cost.

    Raises:
        UserError: the recipe would not run, or the data set has no outline.
    """
    data = outline_of(config)
    model = build_model(config, data)
    nodes = config.federated.nodes or 1
    plan = evenly(config, data.train) if config.federated.nodes else Plan.of(config, data.train)
    task = lookup("task", config.task.name)(**config.task.options)
    problem = Problem(model, task.loss, plan.sampling, config.seed, torch.empty(0, *data.input_shape, dtype=data.dtype))
    config, algorithm = build_algorithm(config, problem, plan)
    build_optimizer(config, model)
    mechanism = algorithm.mechanism()
    parameters = sum(p.numel() * (2 if p.is_complex() else 1) for p in trainable(model).values())
    return Report(
        recipe=config.recipe,
        data={
            "name": config.dataset.name,
            "found": data.found,
            "train": data.train,
            "test": data.test,
            "input": f"{str(data.dtype).removeprefix('torch.')} {list(data.input_shape)}",
            "records_per_patient": data.records_per_patient,
        },
        model={"name": config.model.name, "parameters_real": parameters, "outputs": data.outputs},
        layers=layers_of(model, config, mechanism),
        surgery=checks.surgery(model),
        sampling=({"nodes": nodes} if config.federated.nodes else {})
        | {**vars(plan.sampling), "epochs": plan.epochs, "steps": plan.steps, "adjacency": plan.sampling.adjacency},
        privacy=privacy_of(config, mechanism, plan, data),
        cost=cost_of(config, model, algorithm, replace(plan, steps=nodes * plan.steps), data, parameters) if trial else None,
    )


def outline_of(config: Run) -> Outline:
    """What the data set says of itself before it is read.

    Raises:
        UserError: it says nothing; the sentence tells a developer what to add.
    """
    name = config.dataset.name
    if name not in names("outline"):
        raise UserError(f'dataset={name} cannot be described without reading it: it has no @register("outline", "{name}").')
    outline: Outline = lookup("outline", name)(config.data_root, **config.dataset.options)
    return outline


def layers_of(model: nn.Module, config: Run, mechanism: Mechanism) -> list[Layer]:
    """Every layer with parameters of its own that train."""
    private, engine = mechanism.z > 0 or config.algorithm.name != "sgd", config.algorithm.options.get("gradients")
    bound = f"C = {mechanism.blocks[0].bound:g} over all layers" if mechanism.joint else "a bound of its own"
    found = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if not own:
            continue
        if not private:
            rule = "not clipped"
        elif engine is None:
            rule = f"{config.algorithm.name}'s own; {bound}"
        elif engine == "reference":
            rule = f"torch.func, the whole model at once; {bound}"
        elif (entered := rule_of(module)) is not None:
            rule = f"book-keeping, {entered.__name__.removeprefix('torch_').replace('_', ' ')}; {bound}"
        else:
            rule = f"torch.func for this layer alone; {bound}"
        size = sum(p.numel() * (2 if p.is_complex() else 1) for p in own)
        found.append(Layer(name or "(the model)", type(module).__name__, size, rule))
    return found


def privacy_of(config: Run, mechanism: Mechanism, plan: Plan, data: Outline) -> dict[str, Any]:
    """Every ε the run will have when it ends, of a record and of a patient; a budget may end it earlier."""
    delta, steps = config.privacy.delta, plan.before + plan.steps
    sigma = float(config.algorithm.options.get("noise_multiplier", 0.0))
    claim = Claim(sigma, plan.sampling.sample_rate, steps, delta, plan.sampling.records, plan.epochs)
    return {
        "noise_multiplier": sigma,
        "z": mechanism.z,
        "delta": delta,
        "epsilon_claimed": ACCOUNTANTS[config.accountant](claim),
        "claimed_by": config.accountant,
        "epsilon_tight": tight_epsilon(mechanism, steps, delta),
        "epsilon_rdp": rdp_epsilon(mechanism, steps, delta),
        "epsilon_patient": patient_epsilon(mechanism, min(data.records_per_patient, data.train), steps, delta),
        "max_epsilon": config.privacy.max_epsilon,
    }


def cost_of(config: Run, model: nn.Module, algorithm: Algorithm, plan: Plan, data: Outline, parameters: int) -> Cost:
    """Time and memory from a forward pass and steps on random records: one at first, then more, for a few seconds in all."""
    if config.threads:
        torch.set_num_threads(config.threads)
    expected = max(1, round(plan.sampling.expected_batch_size))
    fixed = config.trainer.micro_batch
    at_once = min(fixed if isinstance(fixed, int) else MICRO_BATCH, expected)
    activations, spent = _forward(model, data)
    per_record, trial = FORWARDS * spent, ", from a forward pass alone"
    for size in _growing(at_once):
        if spent + per_record * size > SECONDS:
            break
        began = time.perf_counter()
        total = {
            block.name: torch.zeros(block.shape, dtype=getattr(torch, block.dtype)) for block in algorithm.mechanism().blocks
        }
        algorithm.accumulate(total, _random_batch(data, size))
        took = time.perf_counter() - began
        spent, per_record, trial = spent + took, took / size, ""
    noise = NOISE_SECONDS * parameters if algorithm.mechanism().z else 0.0
    held = 4 * parameters * (3 + MOMENTS.get(config.optimizer.name, 2)) + 2 * activations * at_once
    threads = f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    return Cost(plan.steps * (per_record * expected + noise), held, threads + trial)


def _growing(largest: int) -> Iterator[int]:
    """Batch sizes to try: one twice, for the first time builds what later ones reuse, then four times as many each."""
    yield 1
    size = 1
    while size < largest:
        yield size
        size *= 4
    yield largest


def _random_batch(data: Outline, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, *data.input_shape, dtype=data.dtype, generator=generator)
    if data.target_dtype.is_floating_point:
        return inputs, torch.rand(size, *data.target_shape, dtype=data.target_dtype, generator=generator)
    below = data.outputs if data.target_dtype == torch.int64 and data.outputs > 1 else 2
    return inputs, torch.randint(0, below, (size, *data.target_shape), generator=generator).to(data.target_dtype)


def _forward(model: nn.Module, data: Outline) -> tuple[int, float]:
    """(bytes that the layers' outputs take, seconds) of one record's forward pass."""
    total = 0

    def count(module: nn.Module, entering: object, left: object) -> None:
        nonlocal total
        if isinstance(left, Tensor) and not any(True for _ in module.children()):
            total += left.numel() * left.element_size()

    handles = [module.register_forward_hook(count) for module in model.modules()]
    inputs, _ = _random_batch(data, 1)
    began = time.perf_counter()
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return total, time.perf_counter() - began
