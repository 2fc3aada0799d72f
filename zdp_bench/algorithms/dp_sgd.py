"""DP-SGD for real networks (Abadi et al. 2016, Algorithm 1): clip at C, add N(0, σ²C²)."""

from __future__ import annotations

from torch import Tensor

from zdp_bench.algorithms import Problem, mean, parameter_block
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, Engine, Shares, clipped_sum, reference
from zdp_bench.gradients.clipping import groups, trainable
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.registry import register


@register("algorithm", "dp_sgd")
class DPSGD:
    """DP-SGD on real parameters, clipped as a whole at C, or (`per_layer`) each of the L layers at
    C/√L; with `gamma`, automatically (Bu et al. 2022).

    Formal guarantees: an example's share is at most `max_grad_norm`; z = noise_multiplier under
    Poisson sampling.

    Raises:
        UserError: the model has complex parameters; `zeta_dp_sgd` says what their noise is, this
            algorithm does not.
    """

    private = True
    plain_gradients = True
    takes_shares = True
    sums_in_float32 = True  # even if the forward pass runs in bfloat16

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        per_layer: bool = False,
        gamma: float | None = None,
        gradients: Engine = "auto",
    ) -> None:
        self.problem = problem
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.per_layer = per_layer
        self.gamma = gamma
        self.gradients: Engine = gradients
        for name, parameter in trainable(problem.model).items():
            if parameter.is_complex():
                raise UserError(
                    f"algorithm=dp_sgd is for real networks, and parameter '{name}' is complex: "
                    "use algorithm=zeta_dp_sgd"
                )

    def mechanism(self) -> Mechanism:
        std = self.noise_multiplier * self.max_grad_norm
        parameters = trainable(self.problem.model)
        return Mechanism(
            tuple(
                parameter_block(n, p, self.max_grad_norm, std, "real")
                for n, p in parameters.items()
            ),
            self.problem.sampling,
        )

    def accumulate(
        self, total: dict[str, Tensor], batch: Batch, shares: Shares | None = None
    ) -> None:
        clipped_sum(
            self.problem.model,
            self.problem.loss,
            batch,
            self.max_grad_norm,
            per_layer=self.per_layer,
            gamma=self.gamma,
            engine=self.gradients,
            shares=shares,
            into=total,
        )

    def contributions(self, batch: Batch, shares: Shares | None = None) -> dict[str, Tensor]:
        gradients = reference.share_gradients(self.problem.model, self.problem.loss, batch, shares)
        together = groups(self.problem.model, self.max_grad_norm, self.per_layer)
        return reference.clip(gradients, together, self.gamma)[0]

    postprocess = staticmethod(mean)
