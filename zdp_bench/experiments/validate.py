"""Say what a recipe would do without training it: model, clipping, sampling, every ε, cost.

No input is read. Shapes come from the data set's info (names, headers, labels, or the release's
counts), ε from the mechanism, time from steps on random numbers. Mistakes show in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zdp_bench.config.schema import Run
from zdp_bench.data import DatasetInfo
from zdp_bench.experiments.cost import Cost, predict
from zdp_bench.gradients.clipping import trainable
from zdp_bench.gradients.rules import rule_of
from zdp_bench.nn.batchnorm import surgery
from zdp_bench.privacy.accounting import patient_epsilon, rdp_epsilon
from zdp_bench.report.papers import check_claims
from zdp_bench.training.build import build_scheduler, count_real
from zdp_bench.training.devices import check_precision, pick_device
from zdp_bench.training.plan import Plan, evenly
from zdp_bench.training.public_start import find_start
from zdp_bench.training.setup import Setup, count_units, describe_data


@dataclass(frozen=True)
class Layer:
    """A layer with trainable parameters, and how an example's gradient of it is bounded."""

    name: str
    kind: str
    parameters: int
    rule: str


@dataclass(frozen=True)
class Report:
    """What is known of a recipe before it runs."""

    recipe: str
    data: dict[str, Any]
    model: dict[str, Any]
    layers: list[Layer]
    surgery: list[dict[str, str]]
    sampling: dict[str, Any]
    privacy: dict[str, Any]
    cost: Cost | None


def validate(config: Run, trial: bool = True, as_run: bool = False) -> Report:
    """Set a run up without its data, and report on it.

    Args:
        trial: True to time steps on random numbers for the cost.
        as_run: True to refuse also what a run refuses just before its first step: a model that
            mixes examples, public weights that are not there.

    Raises:
        UserError: the recipe would not run.
    """
    check_claims(config.claims.table, config.claims.row)
    data = describe_data(config)
    nodes = config.federated.nodes or 1
    units = count_units(config, data)
    plan = evenly(config, units) if config.federated.nodes else Plan.of(config, units)
    setup = Setup.of(config, data, torch.device("cpu"), plan)
    config, model = setup.config, setup.model
    if as_run and (start := find_start(config)):
        start.load_into(model)
    build_scheduler(config, setup.optimizer, data, plan.steps)
    check_precision(config.precision, model, setup.algorithm)
    pick_device(config.device)
    if as_run:
        setup.check_model()
    parameters = count_real(trainable(model).values())
    return Report(
        recipe=config.recipe,
        data={
            "name": config.dataset.name,
            "found": data.found,
            "train": data.train,
            "test": data.test,
            "input": f"{str(data.dtype).removeprefix('torch.')} {list(data.input_shape)}",
            "records_per_patient": data.examples_per_patient,
            "owners": data.owners,
            "classes": data.classes,
        },
        model={
            "name": config.model.name,
            "parameters_real": parameters,
            "outputs": setup.data.outputs,
        },
        layers=list_layers(setup),
        surgery=surgery(model),
        sampling=({"nodes": nodes} if config.federated.nodes else {})
        | {
            **vars(plan.sampling),
            "epochs": plan.epochs,
            "steps": plan.steps,
            "adjacency": plan.sampling.adjacency,
        },
        privacy=predict_privacy(setup, data),
        cost=predict(setup, data, nodes * plan.steps) if trial else None,
    )


def list_layers(setup: Setup) -> list[Layer]:
    """Return every layer with trainable parameters of its own."""
    config, mechanism = setup.config, setup.mechanism
    private = mechanism.z > 0 or config.algorithm.name != "sgd"
    engine = config.algorithm.options.get("gradients")
    bound = (
        f"C = {mechanism.blocks[0].bound:g} over all layers"
        if mechanism.joint
        else "a bound of its own"
    )
    found = []
    for name, module in setup.model.named_modules():
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
            name_of_rule = entered.__name__.removeprefix("torch_").replace("_", " ")
            rule = f"book-keeping, {name_of_rule}; {bound}"
        else:
            rule = f"torch.func for this layer alone; {bound}"
        found.append(Layer(name or "(the model)", type(module).__name__, count_real(own), rule))
    return found


def predict_privacy(setup: Setup, data: DatasetInfo) -> dict[str, Any]:
    """Return every ε of the whole run, of an example and of a patient; a budget may end it."""
    config, plan, mechanism = setup.config, setup.plan, setup.mechanism
    delta, steps = config.privacy.delta, plan.range_test_steps + plan.steps
    by_patient = config.privacy.by_patient
    together = 1 if by_patient else min(data.examples_per_patient, data.train)
    return {
        "noise_multiplier": setup.algorithm.noise_multiplier,
        "z": mechanism.z,
        "delta": delta,
        "epsilon_claimed": setup.claimed_epsilon(plan.steps),
        "claimed_by": config.accountant,
        "epsilon_tight": setup.epsilon(plan.steps),
        "epsilon_rdp": rdp_epsilon(mechanism, steps, delta),
        "epsilon_patient": patient_epsilon(mechanism, together, steps, delta),
        "unit": data.unit,
        "epsilon_of": data.unit if by_patient else "record",
        "max_epsilon": config.privacy.max_epsilon,
    }
