"""What is attacked where a recipe is: its run, set up as `experiment.run` would, and not begun."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config.constraints import require_central
from zdp_bench.config.digests import run_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import NoiseSource, SecureNoise, SeededNoise, run_key, stream
from zdp_bench.registry import lookup
from zdp_bench.tasks import Task
from zdp_bench.training.devices import pick_device
from zdp_bench.training.environment import foreign_code
from zdp_bench.training.setup import (
    Plan,
    build_algorithm,
    build_model,
    build_optimizer,
    check_model,
)


@dataclass(frozen=True)
class Subject:
    """A recipe's run, set up and not begun.

    Attributes:
        key: names the streams of batches and noise, as a run's would, but not those of the run itself: an audit's releases of
            the same data must not be subtracted from it.
    """

    config: Run
    data: Splits
    task: Task
    model: nn.Module
    algorithm: Algorithm
    optimizer: torch.optim.Optimizer
    plan: Plan
    key: str
    noise: NoiseSource
    device: torch.device

    @staticmethod
    def of(config: Run) -> Subject:
        """Everything as `experiment.run` has it.

        Raises:
            UserError: the data is missing, the model is not fit for private training, or nothing private is claimed.
        """
        require_central(config, "audit")
        if config.threads:
            torch.set_num_threads(config.threads)
        device = pick_device(config.device)
        data: Splits = lookup("dataset", config.dataset.name)(
            config.data_root, **config.dataset.options
        )
        task: Task = lookup("task", config.task.name)(**config.task.options)
        model = build_model(config, data).to(device)
        plan = Plan.of(config, len(data.train))
        problem = Problem(
            model, task.loss, plan.sampling, config.seed, data.train.batch(torch.arange(0))[0]
        )
        config, algorithm = build_algorithm(config, problem, plan)
        if algorithm.mechanism().z == 0 or plan.sampling.scheme == "shuffled":
            raise UserError(
                f"recipe={config.recipe}: its ε is ∞, so there is nothing an audit could refute."
            )
        check_model(model, algorithm, task, data, config, plan)
        key = run_key(
            f"{run_digest(config, data.digest)}:audit",
            algorithm.mechanism(),
            foreign_code(config.plugins),
        )
        noise: NoiseSource = SecureNoise() if config.privacy.secure else SeededNoise(key)
        return Subject(
            config,
            data,
            task,
            model,
            algorithm,
            build_optimizer(config, model),
            plan,
            key,
            noise,
            device,
        )

    @property
    def mechanism(self) -> Mechanism:
        return self.algorithm.mechanism()

    def rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(stream(self.config.seed, "audit", purpose))
