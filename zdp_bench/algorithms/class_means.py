"""One release of class means, which is a linear classifier: nothing to tune, and no rate or steps.

    S = Σ_owners u/‖u‖,   u = Σ_own yᵢ xᵢᵀ/‖xᵢ‖,   W = scale · (S + noise)/‖S + noise‖

with xᵢ an example's features and yᵢ its class: ±1 for one logit, else the class's column of the
identity less 1/classes. An owner's share has norm 1, so σ alone sets ε, exactly (Balle & Wang
2018). It is the first step that DP-SGD takes from weights of 0, with all examples and all noise in
it. Few owners and a small ε, where DP-SGD's many steps are noise, leave it ahead; with more, it is
a start for DP-SGD (`algorithm.start_steps`).

Complex features count by their real and imaginary parts (`model.complex_as=channels`): the score is
then Re⟨w, x⟩. The bias is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, Shares
from zdp_bench.gradients.clipping import trainable
from zdp_bench.gradients.shares import cut
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.registry import register

BOUND = 1 + 1e-9  # of a share, with the rounding of norms in float64
SCALE = 3.0  # the norm of the weights, for features of mean square 1


class ClassSums:
    """Sum each owner's features by class, for a model's only trained linear layer.

    Raises:
        UserError: the model trains anything but one real linear layer.
    """

    def __init__(self, problem: Problem, asked: str) -> None:
        self.problem, self.asked = problem, asked
        layers = [m for m in problem.model.modules() if isinstance(m, nn.Linear)]
        own = {id(p) for layer in layers for p in layer.parameters()}
        found = trainable(problem.model)
        if len(layers) != 1 or layers[0].weight.is_complex() or {*map(id, found.values())} - own:
            raise UserError(
                f"{asked} sets the weights of one real linear layer, and this model trains others: "
                "it needs a linear model, such as real_linear."
            )
        (self.layer,) = layers
        self.weight = next(name for name, p in found.items() if p is self.layer.weight)

    def of(self, batch: Batch, shares: Shares | None = None) -> Tensor:
        """Return each share's u/‖u‖ in float64, [shares, outputs, inputs]."""
        rows, aims = self._rows(batch)
        sums = [aims[own].T @ rows[own] for own in cut(shares or (1,) * len(rows))]
        each = torch.stack(sums) if sums else rows.new_zeros(0, *self.layer.weight.shape)
        norms = torch.linalg.vector_norm(each, dim=(1, 2), keepdim=True)
        return torch.where(norms > 0, each / norms, 0.0)

    def total(self, batch: Batch, shares: Shares | None = None) -> Tensor:
        """Return their sum, [outputs, inputs]; of single examples as one product."""
        if shares is not None:
            return self.of(batch, shares).sum(dim=0)
        rows, aims = self._rows(batch)
        return nn.functional.normalize(aims, dim=1, eps=1e-30).T @ rows

    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return x/‖x‖ [B, inputs] and y [B, outputs]; 0 of an example that is not finite."""
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
        outputs = self.layer.out_features
        if targets.dim() != 1 or (outputs > 1 and targets.is_floating_point()):
            raise UserError(
                f"{self.asked} takes a class for each example, as classification or "
                "binary_classification has, and no other target."
            )
        if outputs == 1:
            return (2 * targets.double().clamp(0, 1).nan_to_num() - 1).unsqueeze(1)
        return nn.functional.one_hot(targets, outputs).double() - 1 / outputs


@register("algorithm", "class_means")
class ClassMeans(Algorithm):
    """One Gaussian release of class means as the classifier, for `real_linear`.

    Formal guarantees: a share's norm is at most 1; z = noise_multiplier if all examples are drawn.

    Raises:
        UserError: see `ClassSums`.
    """

    takes_shares = True
    releases_once = True

    def __init__(self, problem: Problem, *, noise_multiplier: float, scale: float = SCALE) -> None:
        super().__init__(problem, noise_multiplier=noise_multiplier)
        self.scale = scale
        self.sums = ClassSums(problem, "algorithm=class_means")

    @property
    def sets_weights(self) -> bool:
        return True

    def mechanism(self) -> Mechanism:
        std, shape = self.noise_multiplier * BOUND, tuple(self.sums.layer.weight.shape)
        block = Block(self.sums.weight, shape, "float64", BOUND, std, "real")
        return Mechanism((block,), self.problem.sampling)

    def accumulate(
        self, total: dict[str, Tensor], batch: Batch, shares: Shares | None = None
    ) -> None:
        if len(batch[0]):
            total[self.sums.weight] += self.sums.total(batch, shares)

    def contributions(self, batch: Batch, shares: Shares | None = None) -> dict[str, Tensor]:
        return {self.sums.weight: self.sums.of(batch, shares)}

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        return weights_along(self.problem.model, self.sums.weight, noisy, self.scale)


def weights_along(
    model: nn.Module, weight: str, noisy: dict[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Return weights of norm `scale` in the direction of a release, and 0 for all others."""
    found = {name: torch.zeros_like(p.detach()) for name, p in trainable(model).items()}
    summed = noisy[weight].double()
    found[weight] += (scale / summed.norm().clamp(min=1e-30)) * summed
    return found
