"""A linear classifier from one release of class means, without a learning rate or other tuning.

    S = Σ_owners u/‖u‖,   u = Σ_own yᵢ xᵢᵀ/‖xᵢ‖,   W = scale · (S + noise)/‖S + noise‖

Here xᵢ are the features of an owner's example, and yᵢ is its class: ±1 for one logit, else the
class's column of the identity minus 1/classes. An owner's share has norm 1, so ε follows exactly
from σ (Balle & Wang 2018). The release is the first step of DP-SGD from weights of 0, with all
examples and all noise in this step. It is better than DP-SGD for few owners and a small ε, where
the many steps of DP-SGD are mostly noise. Otherwise it is a good start for DP-SGD
(`algorithm.start_steps`).

The real and imaginary parts of complex features are separate features
(`model.complex_as=channels`), so the score is Re⟨w, x⟩. The bias is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.algorithms.clipped_gradients import Clipping, FixedBound
from zdp_bench.errors import UserError, setting, setting_name
from zdp_bench.gradients import Batch, Shares
from zdp_bench.gradients.clipping import SAFETY, trainable, zero_rows
from zdp_bench.gradients.program import is_ours
from zdp_bench.gradients.reference import run_apart
from zdp_bench.gradients.shares import cut
from zdp_bench.nn.memory_format import MapLinear
from zdp_bench.nn.unchanged import computes_as
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.registry import register

BOUND = 1 + 1e-9  # largest norm of a share, including the rounding of norms in float64
TINY = 1e-150  # its square is still a normal number
SCALE = 3.0  # norm of the weights, for features of mean square 1


def _find_real_layer(model: nn.Module) -> nn.Linear | None:
    """Return the model's linear layer, or None unless its weight and bias are all that is trained.

    It must be real and compute what nn.Linear does. Its bias may be frozen.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(layers) != 1:
        return None
    (layer,) = layers
    if not computes_as(layer, (nn.Linear, MapLinear)) or layer.weight.is_complex():
        return None
    has_all = set(trainable(model).values()) <= {layer.weight, layer.bias}
    return layer if has_all and layer.weight.requires_grad else None


def _compute_layer_inputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return what the model's linear layer receives for these inputs."""
    layer = _find_real_layer(model)
    assert layer is not None
    received: list[Tensor] = []

    def save_arguments(_: nn.Module, args: tuple[Tensor]) -> None:
        received.extend(args)

    handle = layer.register_forward_pre_hook(save_arguments)
    try:
        model(inputs)
    finally:
        handle.remove()
    features, *_ = received
    return features


def _normalize(rows: Tensor) -> Tensor:
    """Return each row divided by its norm, [B, ...]; zeros for a row that is zero or not finite."""
    flat = rows.flatten(1)
    largest = flat.abs().amax(dim=1, keepdim=True)
    # The squares of tiny numbers would underflow. A power of two changes no other bit.
    flat = torch.where(largest < TINY, flat * 2.0**900, flat)
    norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    is_valid = norms.isfinite() & (norms > 0)
    return torch.where(is_valid, flat / norms, 0.0).view_as(rows)


class ClassSums:
    """Class sums of each share's features, for a model whose only trainable layer is linear.

    Args:
        problem: model and sampling.
        key: the setting that asks for class means, for errors.

    Raises:
        UserError: the model has other trainable parameters than those of one real linear layer.
    """

    def __init__(self, problem: Problem, key: str) -> None:
        self.problem, self.key = problem, key
        layer = _find_real_layer(problem.model)
        if layer is None:
            raise UserError(
                f"{key} sets the weights of one real linear layer, which must be trained, and "
                "nothing else: it needs a linear model, such as real_linear, whose layer computes "
                "what nn.Linear does, without hooks, weight norm or pruning."
            )
        self.layer = layer
        trained = trainable(problem.model)
        names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
        self.weight = names[layer.weight]

    def by_share(
        self,
        batch: Batch,
        shares: Shares | None = None,
    ) -> Tensor:
        """Return each share's u/‖u‖ in float64, [shares, outputs, inputs]."""
        features, classes = self._features_and_classes(batch)
        slices = cut(shares or (1,) * len(features))
        sums = features.new_zeros(len(slices), *self.layer.weight.shape)
        for index, examples in enumerate(slices):
            sums[index] = classes[examples].T @ features[examples]
        return _normalize(sums)

    def total(
        self,
        batch: Batch,
        shares: Shares | None = None,
    ) -> Tensor:
        """Return the sum of u/‖u‖ over all shares, [outputs, inputs]."""
        if shares is not None:
            return self.by_share(batch, shares).sum(dim=0)
        features, classes = self._features_and_classes(batch)
        return nn.functional.normalize(classes, dim=1, eps=1e-30).T @ features

    def weights_along(
        self,
        direction: Tensor,
        scale: float,
    ) -> dict[str, Tensor]:
        """Return all trainable parameters by name: the weight has norm `scale`, and others are 0.

        Args:
            direction: direction of the weight, [outputs, inputs].
            scale: norm of the weight.
        """
        weights = {}
        for name, parameter in trainable(self.problem.model).items():
            weights[name] = torch.zeros_like(parameter)
        length = direction.norm().clamp(min=1e-30)
        weights[self.weight] += (scale / length) * direction
        return weights

    def _features_and_classes(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return x/‖x‖ [B, inputs], 0 if an example is not finite, and y [B, outputs]."""
        inputs, targets = batch
        model = self.problem.model
        with torch.no_grad():
            if is_ours(model) or len(inputs) == 0:
                features = _compute_layer_inputs(model, inputs)
            else:  # such a model runs too rarely to be recorded
                features = run_apart(model, inputs, _compute_layer_inputs)
        directions = _normalize(features.flatten(1).double())
        if directions.shape[1] != self.layer.in_features:
            raise UserError(
                f"{self.key} takes one row of features for each example, and this model calls its "
                "linear layer on several: remove the key."
            )
        return directions, self._classes(targets)

    def _classes(self, targets: Tensor) -> Tensor:
        """Return y [B, outputs]; 0 if a target is not a class, such as the -100 that is ignored.

        The targets of one output are probabilities, clamped to [0, 1], and NaN counts as 0.

        A refusal would come after the step is in the ledger, and would reveal the example.
        """
        outputs = self.layer.out_features
        if targets.dim() != 1 or (outputs > 1 and targets.is_floating_point()):
            raise UserError(
                f"{self.key} takes a class for each example, as classification or "
                "binary_classification has, and no other target."
            )
        if outputs == 1:
            probabilities = targets.double().clamp(0, 1).nan_to_num()
            return (2 * probabilities - 1).unsqueeze(1)
        classes = targets.long()
        is_class = (classes >= 0) & (classes < outputs)
        one_hot = nn.functional.one_hot(torch.where(is_class, classes, 0), outputs).double()
        return torch.where(is_class.unsqueeze(1), one_hot - 1 / outputs, 0.0)


@register("algorithm", "class_means")
class ClassMeans(Algorithm):
    """One Gaussian release of class means as the classifier, for `real_linear`.

    Formal guarantees: the norm of a share is at most 1; z = noise_multiplier if all examples are
    drawn.

    Args:
        problem: model and sampling.
        noise_multiplier: σ.
        scale: norm of the weights. Default: 3.

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
        inputs, _ = batch
        if len(inputs):
            total[self.sums.weight] += self.sums.total(batch, shares)

    def contributions(
        self,
        batch: Batch,
        shares: Shares | None = None,
    ) -> dict[str, Tensor]:
        return {self.sums.weight: self.sums.by_share(batch, shares)}

    def postprocess(
        self,
        noisy: dict[str, Tensor],
        expected_batch_size: float,
    ) -> dict[str, Tensor]:
        return self.sums.weights_along(noisy[self.sums.weight].double(), self.scale)


class ClassMeansFirst(FixedBound):
    """The release of DP-SGD whose first steps release class means, scaled to C, with equal noise.

    After each of these steps, the weights are set to the direction of the sum of all class means so
    far. ε counts these steps like any other.
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
        # Number of releases of class means so far, and the norm of their sum.
        self.carried.update(started=0, length=0.0)

    @property
    def sets_weights(self) -> bool:  # type: ignore[override]
        return self.carried["started"] < self.start_steps

    @property
    def _scale(self) -> float:
        """The factor that takes a share from norm 1 to norm C."""
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
        inputs, _ = batch
        if not self.sets_weights:
            super().accumulate(total, batch, shares)
        elif len(inputs):
            batch_sum = self._scale * self.sums.total(batch, shares)
            weight_total = total[self.sums.weight]
            weight_total += batch_sum.to(weight_total)

    def contributions(
        self,
        batch: Batch,
        shares: Shares | None,
    ) -> dict[str, Tensor]:
        if not self.sets_weights:
            return super().contributions(batch, shares)
        means = self._scale * self.sums.by_share(batch, shares)
        rows = zero_rows(self.sums.problem.model, len(means))
        rows[self.sums.weight].copy_(means)
        return rows

    def postprocess(
        self,
        noisy: dict[str, Tensor],
        expected_batch_size: float,
    ) -> dict[str, Tensor]:
        """Return the mean gradient or, in the first steps, weights along the sum of class means."""
        if not self.sets_weights:
            return super().postprocess(noisy, expected_batch_size)
        weights = self.sums.layer.weight.detach().double()
        earlier_sum = weights * (self.carried["length"] / SCALE)
        total = noisy[self.sums.weight] + earlier_sum  # in float64
        self.carried["started"] += 1
        self.carried["length"] = float(total.norm())
        return self.sums.weights_along(total, SCALE)

    def report(
        self,
        mechanism: Mechanism,
        releases: int,
        delta: float,
    ) -> dict[str, Any]:
        """Return the number of steps that release class means, and their tight ε alone."""
        if not self.start_steps:
            return {}
        epsilon_alone = tight_epsilon(mechanism, min(releases, self.start_steps), delta)
        return {"start": {"steps": self.start_steps, "epsilon_alone": epsilon_alone}}
