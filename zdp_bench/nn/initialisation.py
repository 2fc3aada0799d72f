"""Initialisation of weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError

Initialisation = Literal["uniform_parts", "rayleigh_he", "rayleigh_glorot"]


@torch.no_grad()
def initialise(layer: nn.Linear, how: Initialisation) -> nn.Linear:
    """Draw a linear layer's weight again, in place.

    uniform_parts: PyTorch's own: each part of weight and bias uniform on ±1/√fan_in; for complex
        weights E|w|² = 2/(3·fan_in).
    rayleigh_he, rayleigh_glorot: |w| Rayleigh, phase uniform, E|w|² = 2/fan_in or
        2/(fan_in + fan_out) (Trabelsi et al. 2018, section 3.6), bias 0. Real weights are normal
        with the same variance (He et al. 2015).
    """
    if how == "uniform_parts":
        layer.reset_parameters()
        return layer
    fan_out, fan_in = layer.weight.shape
    variance = 2 / fan_in if how == "rayleigh_he" else 2 / (fan_in + fan_out)
    # A circular complex normal of E|w|² = variance has a Rayleigh modulus and a uniform phase.
    if layer.weight.is_complex():
        torch.view_as_real(layer.weight).normal_(std=math.sqrt(variance / 2))
    else:
        layer.weight.normal_(std=math.sqrt(variance))
    layer.bias.zero_()
    return layer


@torch.no_grad()
def scale_to_unit_variance(model: nn.Module, noise: Tensor) -> nn.Module:
    """Scale every layer, in place, until its outputs on white noise have E|z|² = 1; biases are 0.

    Layers are scaled in the order in which the model uses them, so that each sees what the scaled
    ones before it make of the noise (Mishkin & Matas 2016, algorithm 1, without the orthogonal
    start). A layer is a module with a trained `weight` of two or more dimensions: no norm and no
    activation. Weights that start at 0 stay 0, and a layer used twice is scaled for its first use.

    No example is read, so it costs no ε.

    Args:
        noise: [B, *input shape], E|z|² = 1.

    Raises:
        UserError: the model has no such layer, or uses the weight of one without calling it.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(weight := getattr(layer, "weight", None), nn.Parameter)
        and weight.dim() > 1
        and weight.requires_grad
    }
    unseen = set(layers)

    def scale(
        name: str,
        layer: nn.Module,
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> Tensor:
        first = name in unseen
        unseen.discard(name)
        power = output.abs().square().mean()
        if not first or not power > 0:
            return output
        layer.weight.mul_(power.rsqrt())  # type: ignore[operator]
        return layer.forward(*inputs)

    handles = []
    for name, layer in layers.items():
        if isinstance(bias := getattr(layer, "bias", None), nn.Parameter):
            bias.zero_()
        handles.append(layer.register_forward_hook(partial(scale, name)))
    training = model.training
    try:
        model.eval()(noise)  # a BatchNorm must not learn from noise
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    if not layers or unseen:
        why = f"layer '{min(unseen)}' is not called" if unseen else "the model has no such layer"
        raise UserError(f"model.start=unit_variance scales layers with weights: {why}.")
    return model
