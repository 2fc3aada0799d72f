"""The same loop with zdp-bench."""

from contextlib import closing
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.algorithms import Problem
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SecureNoise, SecureRandom
from zdp_bench.privacy.sampling import poisson
from zdp_bench.registry import lookup
from zdp_bench.training.model_checks import check
from zdp_bench.training.step import Training, private_step


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per example, never a mean."""
    return F.cross_entropy(outputs, targets, reduction="none")


def train(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    batch_size: int,
    epochs: int,
    noise_multiplier: float,
    delta: float,
    ledger_file: Path,
) -> float:
    """Train `model` in place and return its ε."""
    rate = batch_size / len(inputs)
    problem = Problem(model, loss, Sampling("poisson", rate, batch_size, len(inputs)))
    algorithm = lookup("algorithm", "dp_sgd")(
        problem, noise_multiplier=noise_multiplier, max_grad_norm=1.0
    )
    mechanism = algorithm.mechanism()
    check(model, algorithm, loss, (inputs[:0], targets[:0]), outputs=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with closing(Ledger(ledger_file, mechanism, repeatable=False)) as ledger:
        training = Training(algorithm, model, optimizer, SecureNoise(), ledger)
        for step in range(round(epochs / rate)):
            drawn = poisson(len(inputs), rate, SecureRandom())
            private_step(training, step, [(inputs[drawn], targets[drawn])], batch_size)
        return tight_epsilon(mechanism, ledger.releases, delta)
