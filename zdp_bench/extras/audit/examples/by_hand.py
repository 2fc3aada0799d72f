"""One step of DP-SGD on a small network, written by hand: right, and with two common faults."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Example = tuple[Tensor, int]
Gradients = dict[str, Tensor]

SIGMA, CLIP = 1.0, 1.0
EXAMPLES: list[Example] = [(torch.zeros(6), i % 3) for i in range(7)]
CLAIMED = {"noise_multiplier": SIGMA, "sample_rate": 1.0, "steps": 1}


def right(examples: list[Example], seed: int) -> Gradients:
    """Clip each example's gradient, add noise to the sum, divide once."""
    model, x, y = _start(examples)
    total = _sum(_clip_each(_gradients(model, x, y)))
    return _update(model, _add_noise(total, SIGMA * CLIP, seed), divisor=len(EXAMPLES))


def loss_mean(examples: list[Example], seed: int) -> Gradients:
    """The batch's mean loss is clipped as if it were one example's, with the noise of a mean."""
    model, x, y = _start(examples)
    weights = dict(model.named_parameters())
    F.cross_entropy(model(x), y).backward()
    mean = {name: p.grad for name, p in weights.items() if p.grad is not None}
    clipped = _sum(_clip_each({name: g.unsqueeze(0) for name, g in mean.items()}))
    return _update(model, _add_noise(clipped, SIGMA * CLIP / len(EXAMPLES), seed), divisor=1)


def noise_per_micro_batch(examples: list[Example], seed: int) -> Gradients:
    """Each of four micro-batches gets a quarter of σ, but variances add up, not deviations."""
    model, x, y = _start(examples)
    clipped = _clip_each(_gradients(model, x, y))
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for part in range(4):
        here = _sum({name: g[part::4] for name, g in clipped.items()})
        noisy = _add_noise(here, SIGMA * CLIP / 4, 4 * seed + part)
        total = {name: total[name] + noisy[name] for name in total}
    return _update(model, total, divisor=len(EXAMPLES))


def _start(examples: list[Example]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)  # the same first weights in every run
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    return model, torch.stack([x for x, _ in examples]), torch.tensor([y for _, y in examples])


def _gradients(model: nn.Module, x: Tensor, y: Tensor) -> Gradients:
    """Return every example's gradient: [n, ...] each."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Gradients, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x.unsqueeze(0),))[0], y)

    return vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)


def _clip_each(gradients: Gradients) -> Gradients:
    norms = torch.cat([g.flatten(1) for g in gradients.values()], dim=1).norm(dim=1)
    factors = (CLIP / norms).clamp(max=1.0)
    return {name: g * factors.view(-1, *[1] * (g.dim() - 1)) for name, g in gradients.items()}


def _sum(gradients: Gradients) -> Gradients:
    return {name: g.sum(dim=0) for name, g in gradients.items()}


def _add_noise(gradients: Gradients, std: float, seed: int) -> Gradients:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: g + std * torch.randn(g.shape, generator=generator) for name, g in gradients.items()
    }


def _update(model: nn.Module, gradients: Gradients, divisor: int) -> Gradients:
    return {name: p.detach() - gradients[name] / divisor for name, p in model.named_parameters()}
