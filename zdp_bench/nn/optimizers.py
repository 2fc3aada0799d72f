"""Adam, AdamW, NAdam and RMSprop that normalise a complex number by its modulus (`optimizer.complex_second_moment=magnitude`).

torch's own take a complex parameter for two real ones: each part of its gradient is divided by the root mean square of that part,
which turns the gradient's phase. Here both parts are divided by one number, the root of the running mean of |g|². A real
parameter moves as torch moves it, so what torch has no complex meaning for stays torch's: these classes are its formulas, and
nothing of its options but what the formulas name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class _ByMagnitude(torch.optim.Optimizer, ABC):
    """The loop over parameters; `move` is the formula."""

    def __init__(self, params: Iterable[Tensor], **options: Any) -> None:
        for key in ("lr", "eps", "weight_decay"):
            if not options[key] >= 0:
                raise ValueError(f"{key}={options[key]}: must be 0 or more")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; the loss of `closure`, where there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, self.state[parameter], group)
        return loss

    @abstractmethod
    def move(
        self, parameter: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Change the parameter, and the state that its last step left (empty at the first)."""


class Adam(_ByMagnitude):
    """θ ← θ − lr·m̂/(√v̂ + eps), m and v the running means of g and |g|² (Kingma & Ba 2015, Algorithm 1)."""

    decoupled = False

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        _require_means(*betas)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def move(
        self, parameter: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        (first, second), lr = group["betas"], group["lr"]
        g = _decay(parameter, g, group, self.decoupled)
        step = state["step"] = state.get("step", 0) + 1
        m = _mean(state, "mean", g, first)
        v = _mean(state, "mean_square", squared_modulus(g), second)
        parameter.sub_(
            lr / (1 - first**step) * m / ((v / (1 - second**step)).sqrt_().add_(group["eps"]))
        )


class AdamW(Adam):
    """Adam whose weight decay is no part of the gradient (Loshchilov & Hutter 2019)."""

    decoupled = True

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class NAdam(_ByMagnitude):
    """Adam with Nesterov's momentum (Dozat 2016), in torch's schedule of μ."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
    ) -> None:
        _require_means(*betas)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            momentum_decay=momentum_decay,
        )

    def move(
        self, parameter: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        (first, second), lr = group["betas"], group["lr"]
        g = _decay(parameter, g, group)
        step = state["step"] = state.get("step", 0) + 1
        mu, mu_next = (
            first * (1 - 0.5 * 0.96 ** (t * group["momentum_decay"])) for t in (step, step + 1)
        )
        product = state["mu_product"] = state.get("mu_product", 1.0) * mu
        m = _mean(state, "mean", g, first)
        v = _mean(state, "mean_square", squared_modulus(g), second)
        root = (v / (1 - second**step)).sqrt_().add_(group["eps"])
        parameter.sub_(
            (lr * (1 - mu) / (1 - product) * g + lr * mu_next / (1 - product * mu_next) * m) / root
        )


class RMSprop(_ByMagnitude):
    """θ ← θ − lr·g/(√v + eps), v the running mean of |g|² (Hinton 2012); with momentum, of the quotient, as in torch."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
    ) -> None:
        _require_means(alpha, momentum)
        super().__init__(
            params, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum
        )

    def move(
        self, parameter: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        g = _decay(parameter, g, group)
        v = _mean(state, "mean_square", squared_modulus(g), group["alpha"])
        quotient = g / v.sqrt().add_(group["eps"])
        if group["momentum"]:
            quotient = state["velocity"] = group["momentum"] * state.get("velocity", 0.0) + quotient
        parameter.sub_(group["lr"] * quotient)


BY_MAGNITUDE = {"adam": Adam, "adamw": AdamW, "nadam": NAdam, "rmsprop": RMSprop}


def squared_modulus(g: Tensor) -> Tensor:
    """|g|², real."""
    return (
        torch.view_as_real(g.resolve_conj()).square().sum(dim=-1) if g.is_complex() else g.square()
    )


def _mean(state: dict[str, Any], name: str, value: Tensor, keep: float) -> Tensor:
    """The running mean under `name`, from 0: keep·mean + (1 − keep)·value."""
    state[name] = keep * state.get(name, 0.0) + (1 - keep) * value
    mean: Tensor = state[name]
    return mean


def _decay(parameter: Tensor, g: Tensor, group: dict[str, Any], decoupled: bool = False) -> Tensor:
    """The gradient with the weight decay in it; decoupled, the parameter has decayed instead."""
    if decoupled:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        return g
    return g + group["weight_decay"] * parameter if group["weight_decay"] else g


def _require_means(*factors: float) -> None:
    for factor in factors:
        if not 0 <= factor < 1:
            raise ValueError(f"{factor}: must lie in [0, 1)")
