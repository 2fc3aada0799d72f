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

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.algorithms.clipped_gradients import Clipping, FixedBound
from zdp_bench.errors import UserError, setting, setting_name
from zdp_bench.gradients import Batch, Shares
from zdp_bench.gradients.clipping import SAFETY, trainable, zero_rows
from zdp_bench.gradients.shares import cut
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.registry import register

BOUND = 1 + 1e-9  # of a share, with the rounding of norms in float64
SCALE = 3.0  # the norm of the weights, for features of mean square 1


def _is_one_real_layer(
    layers: list[nn.Linear],
    trained: Collection[nn.Parameter],
) -> bool:
    """True if there is one layer, and no parameter but its own is trained."""
    if len(layers) != 1 or layers[0].weight.is_complex():
        return False
    return set(trained) <= set(layers[0].parameters())


class ClassSums:
    """Sum each owner's features by class, for a model's only trained linear layer.

    Raises:
        UserError: the model trains anything but one real linear layer.
    """

    def __init__(self, problem: Problem, key: str) -> None:
        self.problem, self.key = problem, key
        modules = problem.model.modules()
        linear = [module for module in modules if isinstance(module, nn.Linear)]
        trained = trainable(problem.model)
        if not _is_one_real_layer(linear, trained.values()):
            raise UserError(
                f"{key} sets the weights of one real linear layer, and this model trains others: "
                "it needs a linear model, such as real_linear."
            )
        (self.layer,) = linear
        names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
        self.weight = names[self.layer.weight]

    def of(
        self,
        batch: Batch,
        shares: Shares | None = None,
    ) -> Tensor:
        """Return each share's u/‖u‖ in float64, [shares, outputs, inputs]."""
        features, classes = self._features_and_classes(batch)
        examples = cut(shares or (1,) * len(features))
        sums = features.new_zeros(len(examples), *self.layer.weight.shape)
        for number, own in enumerate(examples):
            sums[number] = classes[own].T @ features[own]
        norms = torch.linalg.vector_norm(sums, dim=(1, 2), keepdim=True)
        return torch.where(norms > 0, sums / norms, 0.0)

    def total(
        self,
        batch: Batch,
        shares: Shares | None = None,
    ) -> Tensor:
        """Return their sum, [outputs, inputs]; of single examples as one product."""
        if shares is not None:
            return self.of(batch, shares).sum(dim=0)
        features, classes = self._features_and_classes(batch)
        return nn.functional.normalize(classes, dim=1, eps=1e-30).T @ features

    def weights_along(
        self,
        direction: Tensor,
        scale: float,
    ) -> dict[str, Tensor]:
        """Return weights of norm `scale` in a direction [outputs, inputs], and 0 for all others."""
        weights = {}
        for name, parameter in trainable(self.problem.model).items():
            weights[name] = torch.zeros_like(parameter, requires_grad=False)
        length = direction.norm().clamp(min=1e-30)
        weights[self.weight] += (scale / length) * direction
        return weights

    def _features_and_classes(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return x/‖x‖ [B, inputs] and y [B, outputs]; 0 of an example that is not finite."""
        inputs, targets = batch
        arguments: list[Tensor] = []

        def note(_: nn.Module, args: tuple[Tensor]) -> None:
            arguments.extend(args)

        handle = self.layer.register_forward_pre_hook(note)
        try:
            with torch.no_grad():
                self.problem.model(inputs)
        finally:
            handle.remove()
        features = arguments[0].detach().flatten(1).double()
        norms = torch.linalg.vector_norm(features, dim=1, keepdim=True)
        is_whole = norms.isfinite() & (norms > 0)
        directions = torch.where(is_whole, features / norms, 0.0)
        return directions, torch.where(is_whole, self._classes(targets), 0.0)

    def _classes(self, targets: Tensor) -> Tensor:
        """Return y [B, outputs]."""
        outputs = self.layer.out_features
        if targets.dim() != 1 or (outputs > 1 and targets.is_floating_point()):
            raise UserError(
                f"{self.key} takes a class for each example, as classification or "
                "binary_classification has, and no other target."
            )
        if outputs == 1:
            chances = targets.double().clamp(0, 1).nan_to_num()
            return (2 * chances - 1).unsqueeze(1)
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

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
        scale: float = SCALE,
    ) -> None:
        super().__init__(problem, noise_multiplier=noise_multiplier)
        self.scale = scale
        self.sums = ClassSums(problem, setting("algorithm", "class_means"))

    @property
    def sets_weights(self) -> bool:
        return True

    def mechanism(self) -> Mechanism:
        std = self.noise_multiplier * BOUND
        shape = tuple(self.sums.layer.weight.shape)
        block = Block(self.sums.weight, shape, "float64", BOUND, std, "real")
        return Mechanism((block,), self.problem.sampling)

    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Batch,
        shares: Shares | None = None,
    ) -> None:
        if len(batch[0]):
            total[self.sums.weight] += self.sums.total(batch, shares)

    def contributions(
        self,
        batch: Batch,
        shares: Shares | None = None,
    ) -> dict[str, Tensor]:
        return {self.sums.weight: self.sums.of(batch, shares)}

    def postprocess(
        self,
        noisy: dict[str, Tensor],
        expected_batch_size: float,
    ) -> dict[str, Tensor]:
        return self.sums.weights_along(noisy[self.sums.weight].double(), self.scale)


class ClassMeansFirst(FixedBound):
    """DP-SGD whose first steps release class means at C, with the same noise.

    The weights start from the sum of all class means so far, and ε counts these steps as any other.
    """

    def __init__(
        self,
        clipping: Clipping,
        noise_multiplier: float,
        max_grad_norm: float,
        start_steps: int,
    ) -> None:
        super().__init__(clipping, noise_multiplier, max_grad_norm)
        self.start_steps = start_steps
        self.sums = ClassSums(clipping.problem, setting_name("algorithm.start_steps"))
        self.carried.update(started=0, length=0.0)  # the length of the sum so far

    @property
    def sets_weights(self) -> bool:  # type: ignore[override]
        return self.carried["started"] < self.start_steps

    @property
    def _scale(self) -> float:
        """The norm of a share's class means, whose own is 1."""
        return self.max_grad_norm * SAFETY

    @property
    def is_mean(self) -> bool:  # type: ignore[override]
        return not self.sets_weights

    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Batch,
        shares: Shares | None,
    ) -> None:
        if not self.sets_weights:
            super().accumulate(total, batch, shares)
        elif len(batch[0]):
            sums = self._scale * self.sums.total(batch, shares)
            own = total[self.sums.weight]
            own += sums.to(own)

    def contributions(
        self,
        batch: Batch,
        shares: Shares | None,
    ) -> dict[str, Tensor]:
        if not self.sets_weights:
            return super().contributions(batch, shares)
        means = self._scale * self.sums.of(batch, shares)
        rows = zero_rows(self.sums.problem.model, len(means))
        rows[self.sums.weight].copy_(means)
        return rows

    def postprocess(
        self,
        noisy: dict[str, Tensor],
        expected_batch_size: float,
    ) -> dict[str, Tensor]:
        """Return the mean, or at the start weights along the sum of all class means so far."""
        if not self.sets_weights:
            return super().postprocess(noisy, expected_batch_size)
        weights = self.sums.layer.weight.detach().double()
        before = weights * (self.carried["length"] / SCALE)
        total = noisy[self.sums.weight].double() + before
        self.carried["started"] += 1
        self.carried["length"] = float(total.norm())
        return self.sums.weights_along(total, SCALE)

    def report(
        self,
        mechanism: Mechanism,
        releases: int,
        delta: float,
    ) -> dict[str, Any]:
        """Return how many steps release class means, and the tight ε of these alone."""
        if not self.start_steps:
            return {}
        alone = tight_epsilon(mechanism, min(releases, self.start_steps), delta)
        return {"start": {"steps": self.start_steps, "epsilon_alone": alone}}
