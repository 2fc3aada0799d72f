"""Adam that knows how much of its second moment is privacy noise (Tang et al. 2023, DP-AdamBC).

Adam divides by the root of v, a mean of squared gradients. Under DP-SGD's noise v is mostly the
noise's own variance Φ = (σC/m)², the same in every coordinate, so that DP-Adam is close to DP-SGD
with momentum at the rate lr/√Φ. Φ is public; their Algorithm 1 subtracts it:

    θ  ←  θ − lr · m̂ / √max(v̂ − Φ, γ′)

v̂ − Φ has a standard deviation of about Φ·√(1 − β₂), so γ′, which they tune, is here
(floor · σC/m)² + eps²: in units of the noise, one floor serves any σ, C and batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, mean
from zdp_bench.errors import UserError, require
from zdp_bench.gradients.clipping import trainable
from zdp_bench.registry import register


@register("optimizer", "adam_bc")
class AdamBC(torch.optim.Optimizer):
    """DP-AdamBC. It has no noise to subtract until `tell_noise` says how much there is.

    Post-processing: it sees released gradients, and costs no ε.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        floor: float = 0.2,
    ) -> None:
        require(0 <= lr < math.inf, "lr", lr, "must be a number from 0")
        require(all(0 <= beta < 1 for beta in betas), "betas", betas, "must lie in [0, 1)")
        require(eps >= 0 and floor >= 0, "eps, floor", (eps, floor), "must be at least 0")
        require(eps + floor > 0, "eps, floor", (eps, floor), "must not both be 0")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "floor": floor})
        self.noise: dict[int, float] = {}  # id of a parameter -> σC/m in each real coordinate

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("noise", {})  # a copy has parameters of its own

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, weights = _reals(parameter.grad), _reals(parameter)
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["first"] = torch.zeros_like(gradient)
                    state["second"] = torch.zeros_like(gradient)
                state["step"] += 1
                state["first"].lerp_(gradient, 1 - beta1)
                state["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                noise = self.noise.get(id(parameter), 0.0)
                least = (group["floor"] * noise) ** 2 + group["eps"] ** 2
                second = state["second"] / (1 - beta2 ** state["step"])
                root = second.sub_(noise**2).clamp_(min=least).sqrt_()
                rate = group["lr"] / (1 - beta1 ** state["step"])
                weights.addcdiv_(state["first"], root, value=-rate)


def _reals(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def tell_noise(
    optimizer: torch.optim.Optimizer, model: nn.Module, algorithm: Algorithm, batch_size: float
) -> None:
    """Tell `AdamBC` the noise on each gradient; of another optimiser, do nothing.

    Args:
        batch_size: the divisor of the noisy sum.

    Raises:
        UserError: the noise is not one number for all steps and coordinates of a parameter.
    """
    if not isinstance(optimizer, AdamBC) or not getattr(algorithm, "private", True):
        return
    stds = {
        block.name: block.std
        for block in algorithm.mechanism().blocks
        if block.noise in ("real", "circular")
    }
    parameters = trainable(model)
    if algorithm.postprocess is not mean or not parameters.keys() <= stds.keys():
        raise UserError(
            "optimizer=adam_bc subtracts one variance of noise from all coordinates of a gradient "
            "in all steps: take dp_sgd, zeta_dp_sgd or dp_dfa, without algorithm.clip_quantile, or "
            "optimizer=adam."
        )
    optimizer.noise = {id(p): stds[name] / batch_size for name, p in parameters.items()}
