"""Report on a recipe without training it: its model, clipping, sampling, privacy and cost.

Shapes come from the data or, if its files are missing, from the published counts. ε is computed
from the mechanism and cached (`privacy.memory`). Time is measured in steps on random examples.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from zdp_bench.config.schema import Run
from zdp_bench.data import DatasetInfo
from zdp_bench.errors import UserError
from zdp_bench.gradients.clipping import trainable
from zdp_bench.gradients.rules import rule_of
from zdp_bench.nn.surgery import surgery
from zdp_bench.privacy.accountants import recall_claimed_epsilon
from zdp_bench.privacy.accounting import (
    example_epsilon,
    patient_epsilon,
    rdp_epsilon,
    tight_epsilon,
)
from zdp_bench.privacy.memory import call_cached
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.registry import find_module
from zdp_bench.report.papers import check_claims
from zdp_bench.training.batches import MICRO_BATCH, PASSES, bytes_per_example
from zdp_bench.training.build import build_scheduler, claim_of, count_real
from zdp_bench.training.machine import check_precision, pick_device
from zdp_bench.training.model_checks.examples import find_source
from zdp_bench.training.plan import Plan
from zdp_bench.training.public_start import find_start
from zdp_bench.training.setup import Setup, count_units, describe_data
from zdp_bench.training.step import sum_shares

TRIAL_SECONDS = 6.0  # time of both trial steps together
NOISE_SECONDS = 1e-9  # time in which a CPU core draws one number of noise
# Number of tensors of each parameter's size that an optimizer keeps.
MOMENTS = {"adam": 2, "adamw": 2, "nadam": 2, "rmsprop": 1, "adagrad": 1, "sgd": 0}


@dataclass(frozen=True)
class Cost:
    """The cost of all steps of a run, without its evaluations.

    Attributes:
        seconds: total time of the steps.
        bytes: peak memory.
        measured_on: the device, and its number of threads.
    """

    seconds: float
    bytes: int
    measured_on: str


@dataclass(frozen=True)
class LayerUse:
    """A layer with trainable parameters.

    Attributes:
        name: name of the layer in the model.
        kind: name of its class.
        parameters: number of its trainable real parameters.
        rule: how its per-example gradients are computed and bounded.
    """

    name: str
    kind: str
    parameters: int
    rule: str


@dataclass(frozen=True)
class Report:
    """What is known about a recipe before it runs.

    Attributes:
        surgery: layers that were replaced; see `nn.surgery.surgery`.
        cost: estimated cost; None without trial steps.
    """

    recipe: str
    data: dict[str, Any]
    model: dict[str, Any]
    layers: list[LayerUse]
    surgery: list[dict[str, str]]
    sampling: dict[str, Any]
    privacy: dict[str, Any]
    cost: Cost | None


def validate(config: Run, trial: bool = True, as_run: bool = False) -> Report:
    """Set up a run without its data, and report on it.

    Args:
        config: configuration of the run.
        trial: whether to take trial steps, which predict the cost. Default: True.
        as_run: whether to also load the initial weights and check the model, as a run does.
            Default: False.
    """
    check_claims(config.claims.table, config.claims.row)
    data = describe_data(config)
    nodes = config.federated.nodes
    make_plan = find_module("runner", "federated").plan if nodes else Plan.of
    plan = make_plan(config, count_units(config, data))
    setup = Setup.of(config, data, torch.device("cpu"), plan)
    config, model = setup.config, setup.model
    if as_run and (start := find_start(config)):
        start.load_into(model)
    build_scheduler(config, setup.optimizer, data, plan.steps)
    check_precision(config.precision, model, setup.algorithm)
    pick_device(config.device)
    if as_run:
        setup.check_model()
    sampling = {
        **plan.sampling.as_dict(),
        "epochs": plan.epochs,
        "steps": plan.steps,
        "adjacency": plan.sampling.adjacency,
    }
    if nodes:
        sampling = {"nodes": nodes, **sampling}
    privacy = predict_privacy(setup, data)
    _check_total_budget(config, privacy)
    cost = None
    if trial:
        cost = predict_cost(setup, data, steps=plan.steps * (nodes or 1))
    return Report(
        recipe=config.recipe,
        data={
            "name": config.dataset.name,
            "found": data.found,
            "train": data.train,
            "test": data.test,
            "validation": data.validation,
            "input": f"{str(data.dtype).removeprefix('torch.')} {list(data.input_shape)}",
            "examples_per_patient": None if data.is_estimate else data.examples_per_patient,
            "owners": data.owners,
            "classes": data.classes,
        },
        model={
            "name": config.model.name,
            "parameters_real": count_real(trainable(model).values()),
            "outputs": setup.data.outputs,
        },
        layers=list_layers(setup),
        surgery=surgery(model),
        sampling=sampling,
        privacy=privacy,
        cost=cost,
    )


def _check_total_budget(config: Run, privacy: dict[str, Any]) -> None:
    """Reject a total budget that this run alone would exceed."""
    total, epsilon = config.privacy.total_budget, privacy["epsilon_tight"]
    if total is not None and min(epsilon, config.privacy.max_epsilon or math.inf) > total:
        raise UserError(
            f"privacy.total_budget={total:g}: this run alone has a tight ε of "
            f"{show_epsilon(epsilon)}. Add noise, take fewer steps, or raise the budget."
        )


def list_layers(setup: Setup) -> list[LayerUse]:
    """Return the layers that have trainable parameters of their own."""
    config, mechanism = setup.config, setup.mechanism
    engine = config.algorithm.options.get("gradients")
    bound = "a bound of its own"
    if mechanism.joint:
        bound = f"C = {mechanism.blocks[0].bound:g} over all layers"
    adaptive_bound = setup.algorithm.carried.get("bound")
    if adaptive_bound:
        bound = f"C over all layers, which adapts from {adaptive_bound:g} on"
    layers = []
    for name, module in setup.model.named_modules():
        parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if not parameters:
            continue
        if not mechanism.is_private:
            rule = "not clipped"
        elif engine is None:
            rule = f"{config.algorithm.name}'s own; {bound}"
        elif engine == "reference":
            rule = f"torch.func, the whole model at once; {bound}"
        elif (layer_rule := rule_of(module)) is not None:
            rule_name = layer_rule.__name__.removeprefix("torch_").replace("_", " ")
            rule = f"book-keeping, {rule_name}; {bound}"
        else:
            rule = f"torch.func for this layer only; {bound}"
        kind = type(module).__name__
        layers.append(LayerUse(name or "(the model)", kind, count_real(parameters), rule))
    return layers


def predict_privacy(setup: Setup, data: DatasetInfo) -> dict[str, Any]:
    """Return the ε of all planned steps, per example and per owner (None: unknown).

    With a budget, the run may end before it has taken all steps.
    """
    config, plan, mechanism = setup.config, setup.plan, setup.mechanism
    delta, steps = config.privacy.delta, plan.steps
    by_owner = config.privacy.by_owner
    # Largest number of records of one patient. A patient is a single record if it is the unit.
    records_per_patient = 1 if by_owner else min(data.examples_per_patient, data.train)
    epsilon_part = epsilon_patient = None
    if by_owner or not data.is_estimate:
        epsilon_patient = call_cached(patient_epsilon, mechanism, records_per_patient, steps, delta)
    if by_owner:
        epsilon_part = call_cached(example_epsilon, mechanism, steps, delta)
    claim = claim_of(config, plan, setup.algorithm.noise_multiplier, steps)
    return {
        "noise_multiplier": setup.algorithm.noise_multiplier,
        "z": mechanism.z,
        "delta": delta,
        "epsilon_claimed": recall_claimed_epsilon(config.accountant, claim),
        "claimed_by": config.accountant,
        "epsilon_tight": call_cached(tight_epsilon, mechanism, steps, delta),
        "epsilon_rdp": call_cached(rdp_epsilon, mechanism, steps, delta),
        "epsilon_patient": epsilon_patient,
        "epsilon_part": epsilon_part,
        "unit": data.unit,
        "epsilon_of": data.unit if by_owner else "example",
        "max_epsilon": config.privacy.max_epsilon,
    }


def predict_cost(setup: Setup, data: DatasetInfo, steps: int) -> Cost:
    """Estimate the cost of steps on the CPU, in a few seconds and without data.

    Steps on random examples are timed. The time to draw noise is estimated from its size, and
    memory from the sizes of weights, gradients, the optimizer's state and one micro-batch.

    Args:
        setup: the run.
        data: description of its data.
        steps: number of steps of all nodes.
    """
    config, model, algorithm = setup.config, setup.model, setup.algorithm
    if config.threads:
        torch.set_num_threads(config.threads)
    parameters = count_real(trainable(model).values())
    examples_per_unit = data.train / count_units(config, data)
    if config.privacy.max_examples:
        examples_per_unit = min(examples_per_unit, config.privacy.max_examples)
    examples_per_unit *= config.trainer.augmentations or 1
    batch_size = max(1, round(setup.plan.sampling.expected_batch_size * examples_per_unit))
    micro_batch = min(MICRO_BATCH, batch_size)
    if isinstance(config.trainer.micro_batch, int):
        micro_batch = min(micro_batch, config.trainer.micro_batch)
    loss, empty_batch, mechanism = setup.task.loss, setup.empty_batch(), algorithm.mechanism()
    source = find_source(model, loss, empty_batch, None)

    def time_step(examples: int) -> float:
        batch = source.draw(examples)
        start = time.perf_counter()
        sum_shares(algorithm, mechanism, [batch], torch.device("cpu"))
        return time.perf_counter() - start

    time_step(1)  # its time is not used, because it builds what later steps reuse
    trial_size = int(TRIAL_SECONDS / 2 / time_step(1))
    trial_size = max(1, min(micro_batch, trial_size))
    time_step(trial_size)  # not used, for the same reason
    seconds = time_step(trial_size) * batch_size / trial_size
    if mechanism.z:
        seconds += NOISE_SECONDS * parameters
    # Weights, gradients and their sum, and the optimizer's state, in float32.
    peak_bytes = 4 * parameters * (3 + MOMENTS.get(config.optimizer.name, 2))
    peak_bytes += PASSES * bytes_per_example(model, loss, empty_batch) * micro_batch
    num_threads = torch.get_num_threads()
    device = f"CPU, {num_threads} thread{'s' if num_threads > 1 else ''}"
    return Cost(steps * seconds, peak_bytes, device)
