"""DP-SGD for real networks (Abadi et al. 2016, Algorithm 1): clip at C, add N(0, σ²C²)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem, mean, parameter_block
from zdp_bench.algorithms.adaptive_bound import (
    COUNT_SHARE,
    JOINT_BOUND,
    adapt_bound,
    count_block,
    count_unclipped,
    epsilon_without_count,
)
from zdp_bench.algorithms.class_means import SCALE, ClassSums, weights_along
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, Engine, Shares, add_up, clipped_sum, reference
from zdp_bench.gradients.clipping import SAFETY, groups, trainable
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.registry import register


@register("algorithm", "dp_sgd")
class DPSGD(Algorithm):
    """DP-SGD on real parameters, clipped as a whole at C, or (`per_layer`) each of the L layers at
    C/√L; with `gamma`, automatically (Bu et al. 2022); with `clip_quantile`, at a bound that
    follows the gradients' norms (`adaptive_bound`). The first `start_steps` release class means at
    C instead (`class_means`), with the same noise: the weights start from their sum, and ε counts
    them as any other step.

    Formal guarantees: an example's share is at most `max_grad_norm`, or, in units of the bound
    that holds then, `JOINT_BOUND`; z = noise_multiplier under Poisson sampling.

    Raises:
        UserError: the model has complex parameters; `zeta_dp_sgd` says what their noise is, this
            algorithm does not.
    """

    sums_gradients = True
    takes_shares = True
    sums_in_float32 = True  # even if the forward pass runs in bfloat16
    takes_complex = False
    complex_scale = 1.0  # of the gradients of complex parameters
    complex_divisor = 1.0  # of σC, for the noise on each of their parts

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        clip_quantile: float | None = None,
        start_steps: int | None = None,
        per_layer: bool = False,
        gamma: float | None = None,
        gradients: Engine = "auto",
    ) -> None:
        super().__init__(problem, noise_multiplier=noise_multiplier)
        self.max_grad_norm = max_grad_norm
        self.clip_quantile = clip_quantile
        self.per_layer = per_layer
        self.gamma = gamma
        self.gradients: Engine = gradients
        self.start_steps = start_steps or 0
        if clip_quantile is not None:
            if gamma is not None or start_steps is not None:
                other = "gamma" if gamma is not None else "start_steps"
                raise UserError(
                    f"algorithm.clip_quantile with algorithm.{other}: every share then has a norm "
                    "of its own, so none is left unclipped to count. Give one of them."
                )
            self.carried = {"bound": max_grad_norm}
        if start_steps is not None:
            self.sums = ClassSums(problem, "algorithm.start_steps")
            self.carried = {"started": 0, "length": 0.0}
        for name, parameter in trainable(problem.model).items():
            if parameter.is_complex() and not self.takes_complex:
                raise UserError(
                    f"algorithm=dp_sgd is for real networks, and parameter '{name}' is complex: "
                    "use algorithm=zeta_dp_sgd"
                )

    @property
    def bound(self) -> float:
        """The bound that shares are clipped at now."""
        return self.carried.get("bound", self.max_grad_norm)

    @property
    def sets_weights(self) -> bool:
        return self.carried.get("started", self.start_steps) < self.start_steps

    def mechanism(self) -> Mechanism:
        adapts = self.clip_quantile is not None
        bound = JOINT_BOUND if adapts else self.max_grad_norm  # in units of C, if it adapts
        std = self.noise_multiplier * bound

        def block(name: str, parameter: nn.Parameter) -> Block:
            if parameter.is_complex():
                part = std / self.complex_divisor
                return parameter_block(name, parameter, bound, part, "circular")
            return parameter_block(name, parameter, bound, std, "real")

        blocks = [block(*named) for named in trainable(self.problem.model).items()]
        if adapts:
            blocks.append(count_block(min(one.std for one in blocks)))
        return Mechanism(tuple(blocks), self.problem.sampling)

    def accumulate(
        self, total: dict[str, Tensor], batch: Batch, shares: Shares | None = None
    ) -> None:
        if self.sets_weights:
            if len(batch[0]):
                of_classes = self.sums.total(batch, shares) * (self.bound * SAFETY)
                total[self.sums.weight] += of_classes.to(total[self.sums.weight])
            return
        adapts = self.clip_quantile is not None
        found = clipped_sum(
            self.problem.model,
            self.problem.loss,
            batch,
            self.bound,
            per_layer=self.per_layer,
            gamma=self.gamma,
            complex_scale=self.complex_scale,
            engine=self.gradients,
            shares=shares,
            into=None if adapts else total,
        )
        if adapts:
            sums = {name: value / self.bound for name, value in found.sums.items()}
            add_up(total, sums | count_unclipped(found.norms, self.bound, each=False))

    def contributions(self, batch: Batch, shares: Shares | None = None) -> dict[str, Tensor]:
        if self.sets_weights:
            each = self.sums.of(batch, shares) * (self.bound * SAFETY)
            trained = trainable(self.problem.model)
            none = {name: p.new_zeros(len(each), *p.shape) for name, p in trained.items()}
            return none | {self.sums.weight: each.to(none[self.sums.weight])}
        gradients = reference.share_gradients(
            self.problem.model, self.problem.loss, batch, shares, complex_scale=self.complex_scale
        )
        together = groups(self.problem.model, self.bound, self.per_layer)
        clipped, norms = reference.clip(gradients, together, self.gamma)
        if self.clip_quantile is None:
            return clipped
        rows = {name: value / self.bound for name, value in clipped.items()}
        return rows | count_unclipped(norms, self.bound, each=True)

    @property
    def averages(self) -> bool:
        return type(self).postprocess is DPSGD.postprocess and not (
            self.sets_weights or self.clip_quantile
        )

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        """Return the mean, in its own units if the bound adapts; move that for the next step.

        While the run starts, return weights along the sum of all class means so far.
        """
        if self.sets_weights:
            return self._start(noisy)
        if self.clip_quantile is None:
            return mean(noisy, expected_batch_size)
        bound = self.bound
        self.carried["bound"] = adapt_bound(bound, noisy, self.clip_quantile, expected_batch_size)
        return mean(noisy, expected_batch_size / bound)

    def _start(self, noisy: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = self.sums.weight
        before = trainable(self.problem.model)[weight].detach().double()
        summed = noisy[weight].double() + before * (self.carried["length"] / SCALE)
        self.carried = {"started": self.carried["started"] + 1, "length": float(summed.norm())}
        return weights_along(self.problem.model, weight, {weight: summed}, SCALE)

    def report(self, releases: int, delta: float) -> dict[str, Any]:
        if self.start_steps:
            alone = tight_epsilon(self.mechanism(), min(releases, self.start_steps), delta)
            return {"start": {"steps": self.start_steps, "epsilon_alone": alone}}
        if self.clip_quantile is None:
            return {}
        return {
            "clipping": {
                "quantile": self.clip_quantile,
                "last_bound": self.bound,
                "count_share": COUNT_SHARE,
                "epsilon_without_count": epsilon_without_count(self.mechanism(), releases, delta),
            }
        }
