"""DP-SGD for real networks (Abadi et al. 2016, Algorithm 1): clip at C, add N(0, σ²C²)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.algorithms.adaptive_bound import AdaptiveBound
from zdp_bench.algorithms.class_means import ClassMeansFirst
from zdp_bench.algorithms.clipped_gradients import Clipping, FixedBound
from zdp_bench.errors import UserError, setting, setting_name
from zdp_bench.gradients import Batch, Engine, Shares
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.registry import register


@register("algorithm", "dp_sgd")
class DPSGD(Algorithm):
    """DP-SGD on real parameters. The release is one of three classes:

        FixedBound        gradients clipped at C (default)
        AdaptiveBound     with `clip_quantile`: the bound follows the gradients' norms
        ClassMeansFirst   with `start_steps`: the first steps release class means instead

    Formal guarantees: the norm of a share is at most `max_grad_norm`; with an adaptive bound, it is
    at most `JOINT_BOUND` in units of the current bound. z = noise_multiplier under Poisson
    sampling.

    Args:
        problem: model, loss and sampling.
        noise_multiplier: σ, in units of C.
        max_grad_norm: clipping norm C; the initial bound if it adapts.
        clip_quantile: fraction of the gradients that an adaptive bound leaves unclipped. Default:
            the bound is fixed.
        start_steps: number of first steps that release class means. Default: none.
        per_layer: clip each of the L layers at C/√L instead of the whole gradient at C.
        gamma: γ of automatic clipping (Bu et al. 2022). Default: plain clipping.
        gradients: engine that computes clipped sums.

    Raises:
        UserError: the model has complex parameters, for whose noise use `zeta_dp_sgd`; or
            `clip_quantile` is combined with `gamma` or `start_steps`.
    """

    sums_gradients = True
    takes_shares = True
    sums_in_float32 = True
    takes_complex = False
    complex_scale = 1.0  # factor on the gradients of complex parameters
    complex_divisor = 1.0  # divides σC for the noise on the real and on the imaginary part

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
        self.clipping = Clipping(
            problem,
            per_layer,
            gamma,
            gradients,
            self.complex_scale,
            self.complex_divisor,
        )
        common = self.clipping, noise_multiplier, max_grad_norm
        self.release = FixedBound(*common)
        if clip_quantile is not None:
            _require_alone(gamma, start_steps)
            self.release = AdaptiveBound(*common, clip_quantile)
        elif start_steps is not None:
            self.release = ClassMeansFirst(*common, start_steps)
        self.carried = self.release.carried
        for name, parameter in trainable(problem.model).items():
            if parameter.is_complex() and not self.takes_complex:
                raise UserError(
                    f"{setting('algorithm', 'dp_sgd')} is for real networks, and parameter "
                    f"'{name}' is complex: use {setting('algorithm', 'zeta_dp_sgd')}."
                )

    @property
    def sets_weights(self) -> bool:
        return self.release.sets_weights

    @property
    def averages(self) -> bool:
        return type(self).postprocess is DPSGD.postprocess and self.release.is_mean

    def mechanism(self) -> Mechanism:
        return Mechanism(tuple(self.release.blocks()), self.problem.sampling)

    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Batch,
        shares: Shares | None = None,
    ) -> None:
        self.release.accumulate(total, batch, shares)

    def contributions(
        self,
        batch: Batch,
        shares: Shares | None = None,
    ) -> dict[str, Tensor]:
        return self.release.contributions(batch, shares)

    def postprocess(
        self,
        noisy: dict[str, Tensor],
        expected_batch_size: float,
    ) -> dict[str, Tensor]:
        return self.release.postprocess(noisy, expected_batch_size)

    def report(
        self,
        releases: int,
        delta: float,
    ) -> dict[str, Any]:
        return self.release.report(self.mechanism(), releases, delta)


def _require_alone(gamma: float | None, start_steps: int | None) -> None:
    """Reject an adaptive bound together with an option that leaves no unclipped shares to count."""
    for other, value in (("gamma", gamma), ("start_steps", start_steps)):
        if value is not None:
            raise UserError(
                f"{setting_name('algorithm.clip_quantile')} with "
                f"{setting_name(f'algorithm.{other}')}: every share is then rescaled, so none "
                "is left unclipped to count. Set only one of them."
            )
