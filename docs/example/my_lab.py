"""A dataset and an algorithm of our own, found by the entry point in pyproject.toml."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zdp_bench.algorithms import Algorithm, Problem, parameter_block
from zdp_bench.data import Dataset, Examples, Splits
from zdp_bench.gradients import Batch, reference
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.registry import register


@register("dataset", "rings")
@dataclass(frozen=True, kw_only=True)
class Rings(Dataset):
    """Complex points on two circles. Its fields are its options."""

    noise: float = 0.1
    seed: int = 1

    def load(self, root: Path) -> Splits:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(count: int) -> Examples:
            labels = torch.arange(count) % 2
            angle = 6.2832 * torch.rand(count, generator=generator)
            radius = 1.0 + labels + self.noise * torch.randn(count, generator=generator)
            return Examples(torch.polar(radius, angle).unsqueeze(1), labels)  # [n, 1] complex64

        digest = hashlib.sha256(f"rings v1:{self.noise}:{self.seed}".encode()).hexdigest()
        train, test = draw(1000), draw(200)
        return Splits(
            train, test, input_shape=(1,), outputs=2, provenance="synthetic", digest=digest
        )


@register("algorithm", "sign_sgd")
class SignSGD(Algorithm):
    """Each example votes with the phase of its gradient: |u_k| = C/√n in all n coordinates."""

    def __init__(self, problem: Problem, *, noise_multiplier: float, max_grad_norm: float) -> None:
        super().__init__(problem, noise_multiplier=noise_multiplier)
        self.bound = max_grad_norm

    def mechanism(self) -> Mechanism:
        """What a step releases: all the accountant ever sees."""
        std = self.noise_multiplier * self.bound
        parameters = trainable(self.problem.model)
        blocks = (
            parameter_block(n, p, self.bound, std, "circular" if p.is_complex() else "real")
            for n, p in parameters.items()
        )
        return Mechanism(tuple(blocks), self.problem.sampling)

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        """The uᵢ, [B, *shape]: ‖uᵢ‖ ≤ C over all parameters together."""
        gradients = reference.per_sample_gradients(self.problem.model, self.problem.loss, batch)
        entries = sum(p.numel() for p in trainable(self.problem.model).values())
        phases = {name: torch.sgn(torch.nan_to_num(g)) for name, g in gradients.items()}
        return {name: phase * (0.999 * self.bound / entries**0.5) for name, phase in phases.items()}

    def accumulate(self, total: dict[str, Tensor], batch: Batch) -> None:
        """total += Σᵢ uᵢ."""
        if len(batch[0]):
            for name, each in self.contributions(batch).items():
                total[name] += each.sum(dim=0)
