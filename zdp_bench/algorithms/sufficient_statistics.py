"""Least squares from noisy sufficient statistics, for a linear head: one release, no iteration.

    A = Σᵢ uᵢ uᵢᵀ + noise,   b = Σᵢ uᵢ yᵢᵀ + noise,   W = (A + λI)⁻¹ b

with uᵢ = xᵢ/‖xᵢ‖, and yᵢ the target's column of the identity less 1/classes (±1 for one logit). The
statistics of a linear regression hide an example behind far less noise in all than hundreds of
gradients do (Wang 2018, "Revisiting differentially private linear regression"), and from features
of a public network they classify (Mehta et al. 2023).

One share is the pair (uᵢuᵢᵀ, uᵢyᵢᵀ), of a norm of at most √(1 + 1): a joint bound, with the same
noise on every number of both: z = noise_multiplier. A is made symmetric afterwards, which leaves on
its entries the noise that its upper triangle alone would need. Its negative eigenvalues, which are
noise, become 0, and λ is `ridge` times the largest eigenvalue that the noise has, σ√(2 · 2d).

The step's gradient is what leads from the weights that are there to W, so an SGD step at rate 1
arrives there. The bias becomes 0. Scores are for ranking, not probabilities; they compare examples
of one norm, as `normalise=layer` and `group` make them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, Shares
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.registry import register

MOMENTS, WITH_TARGETS = "second moments", "moments with targets"
BOUND = math.sqrt(2) * (1 + 1e-9)  # of the pair, with the rounding of norms in float64


@register("algorithm", "sufficient_statistics")
class SufficientStatistics(Algorithm):
    """Private least squares for a model that is one real linear layer, such as `real_linear`.

    Formal guarantees: a share's norm is at most √2; z = noise_multiplier if all examples are drawn.

    Raises:
        UserError: something else than one real linear layer trains.
    """

    takes_shares = True
    releases_once = True

    def __init__(self, problem: Problem, *, noise_multiplier: float, ridge: float = 0.2) -> None:
        super().__init__(problem, noise_multiplier=noise_multiplier)
        self.ridge = ridge
        layers = [m for m in problem.model.modules() if isinstance(m, nn.Linear)]
        own = {id(p) for layer in layers for p in layer.parameters()}
        others = [n for n, p in trainable(problem.model).items() if id(p) not in own]
        if len(layers) != 1 or others or layers[0].weight.is_complex():
            raise UserError(
                "algorithm=sufficient_statistics solves for one real linear layer, and this model "
                "is another: take model=real_linear."
            )
        (self.layer,) = layers

    def mechanism(self) -> Mechanism:
        std = self.noise_multiplier * BOUND
        outputs, inputs = self.layer.weight.shape
        shapes = {MOMENTS: (inputs, inputs), WITH_TARGETS: (inputs, outputs)}
        blocks = [Block(name, of, "float64", BOUND, std, "real") for name, of in shapes.items()]
        return Mechanism(tuple(blocks), self.problem.sampling)

    def accumulate(
        self, total: dict[str, Tensor], batch: Batch, shares: Shares | None = None
    ) -> None:
        if not len(batch[0]):
            return
        features, targets = self._rows(batch)
        weighed = features * _weights(shares, features).unsqueeze(1)
        total[MOMENTS].addmm_(weighed.T, features)
        total[WITH_TARGETS].addmm_(weighed.T, targets)

    def contributions(self, batch: Batch, shares: Shares | None = None) -> dict[str, Tensor]:
        features, targets = self._rows(batch)
        weighed = features * _weights(shares, features).unsqueeze(1)
        many = shares or (1,) * len(features)
        parts = zip(*(rows.split(many) for rows in (weighed, features, targets)), strict=True)
        found = [(w.T @ u, w.T @ y) for w, u, y in parts]
        return {
            name: torch.stack([pair[at] for pair in found])
            for at, name in enumerate((MOMENTS, WITH_TARGETS))
        }

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        moments = noisy[MOMENTS]
        values, vectors = torch.linalg.eigh((moments + moments.T) / 2)
        std = self.noise_multiplier * BOUND
        penalty = self.ridge * std * math.sqrt(2 * len(moments)) + 1e-6 * expected_batch_size
        turned = (vectors.T @ noisy[WITH_TARGETS]) / (values.clamp(min=0) + penalty).unsqueeze(1)
        solved = {id(self.layer.weight): (vectors @ turned).T}
        found = {}
        for name, parameter in trainable(self.problem.model).items():
            goal = solved.get(id(parameter), torch.zeros_like(parameter))
            found[name] = parameter.detach() - goal.to(parameter.dtype)
        return found

    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return u [B, d], of norm 1, and y [B, outputs]; 0 of an example that is not finite."""
        seen: list[Tensor] = []
        handle = self.layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            with torch.no_grad():
                self.problem.model(batch[0])
        finally:
            handle.remove()
        rows = seen[0].detach().flatten(1).double()
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        whole = norms.isfinite() & (norms > 0)
        return torch.where(whole, rows / norms, 0.0), torch.where(whole, self._aims(batch[1]), 0.0)

    def _aims(self, targets: Tensor) -> Tensor:
        """Return y of norm at most 1, [B, outputs]."""
        outputs = self.layer.out_features
        if targets.dim() != 1 or (outputs > 1 and targets.is_floating_point()):
            raise UserError(
                "algorithm=sufficient_statistics: takes a class for each example; take "
                "task=classification or task=binary_classification."
            )
        if outputs == 1:
            return (2 * targets.double().clamp(0, 1).nan_to_num() - 1).unsqueeze(1)
        return nn.functional.one_hot(targets, outputs).double() - 1 / outputs


def _weights(shares: Shares | None, rows: Tensor) -> Tensor:
    """Return 1 of an example that is its own share, 1/n of one of a share of n, [B]."""
    if shares is None:
        return rows.new_ones(len(rows))
    many = torch.tensor(shares, device=rows.device)
    return (1.0 / many.to(rows.dtype)).repeat_interleave(many)
