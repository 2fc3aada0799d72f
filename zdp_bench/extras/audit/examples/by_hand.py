"""One step of DP-SGD on a small network, written by hand: correct, and with two common faults."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Example = tuple[Tensor, int]
Gradients = dict[str, Tensor]

SIGMA = 1.0
CLIP = 1.0
EXAMPLES: list[Example] = [(torch.zeros(6), i % 3) for i in range(7)]
CLAIMED = {"noise_multiplier": SIGMA, "sample_rate": 1.0, "steps": 1}


def right(examples: list[Example], seed: int) -> Gradients:
    """Clip each example's gradient, add noise to the sum, and divide once."""
    model = _start()
    clipped = _clip_each(_gradients(model, *_stack(examples)))
    noisy = _add_noise(_sum(clipped), SIGMA * CLIP, seed)
    return _update(model, noisy, divisor=len(EXAMPLES))


def loss_mean(examples: list[Example], seed: int) -> Gradients:
    """Clip the gradient of the batch's mean loss as if it were that of one example.

    The noise is scaled for a mean, but one example can change the clipped gradient by up to 2C.
    """
    model = _start()
    x, y = _stack(examples)
    weights = dict(model.named_parameters())
    mean = torch.autograd.grad(F.cross_entropy(model(x), y), list(weights.values()))
    batch_of_one = {name: g.unsqueeze(0) for name, g in zip(weights, mean, strict=True)}
    clipped = _sum(_clip_each(batch_of_one))
    noisy = _add_noise(clipped, SIGMA * CLIP / len(EXAMPLES), seed)
    return _update(model, noisy, divisor=1)


def noise_per_micro_batch(examples: list[Example], seed: int) -> Gradients:
    """Add noise with a quarter of σ to each of four micro-batches.

    Variances add up, not standard deviations, so the total noise has half of σ.
    """
    model = _start()
    clipped = _clip_each(_gradients(model, *_stack(examples)))
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for part in range(4):
        micro_batch = {name: g[part::4] for name, g in clipped.items()}
        noisy = _add_noise(_sum(micro_batch), SIGMA * CLIP / 4, 4 * seed + part)
        for name, value in noisy.items():
            total[name] = total[name] + value
    return _update(model, total, divisor=len(EXAMPLES))


def _start() -> nn.Module:
    torch.manual_seed(0)  # the same initial weights in every run
    return nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.Tanh(),
        nn.Linear(8, 3, bias=False),
    )


def _stack(examples: list[Example]) -> tuple[Tensor, Tensor]:
    inputs = torch.stack([x for x, _ in examples])
    targets = torch.tensor([y for _, y in examples])
    return inputs, targets


def _gradients(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
) -> Gradients:
    """Return the gradients of each example, [n, *shape] for each parameter."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(
        weights: Gradients,
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        outputs = functional_call(model, weights, (x.unsqueeze(0),))
        return F.cross_entropy(outputs[0], y)

    return vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)


def _clip_each(gradients: Gradients) -> Gradients:
    flat = torch.cat([g.flatten(1) for g in gradients.values()], dim=1)
    factors = (CLIP / flat.norm(dim=1)).clamp(max=1.0)
    return {name: torch.einsum("i,i...->i...", factors, g) for name, g in gradients.items()}


def _sum(gradients: Gradients) -> Gradients:
    return {name: g.sum(dim=0) for name, g in gradients.items()}


def _add_noise(
    gradients: Gradients,
    std: float,
    seed: int,
) -> Gradients:
    generator = torch.Generator().manual_seed(seed)
    noisy = {}
    for name, g in gradients.items():
        noise = torch.randn(g.shape, generator=generator)
        noisy[name] = g + std * noise
    return noisy


def _update(
    model: nn.Module,
    gradients: Gradients,
    divisor: int,
) -> Gradients:
    weights = model.named_parameters()
    return {name: p.detach() - gradients[name] / divisor for name, p in weights}
