"""Initialise the weights of linear layers, or scale those of a network to unit variance."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.nn.modes import evaluation_mode

Initialisation = Literal["uniform_parts", "rayleigh_he", "rayleigh_glorot"]


@torch.no_grad()
def initialise(layer: nn.Linear, how: Initialisation) -> nn.Linear:
    """Draw the weight and bias of a linear layer, in place.

    Args:
        layer: the layer, real or complex.
        how: distribution of the weight. "uniform_parts", PyTorch's default, draws each part of
            weight and bias uniformly from ±1/√fan_in, so complex weights have E|w|² = 2/(3·fan_in).
            "rayleigh_he" and "rayleigh_glorot" draw |w| from a Rayleigh distribution with a uniform
            phase, where E|w|² = 2/fan_in or 2/(fan_in + fan_out) (Trabelsi et al. 2018, section
            3.6), and set the bias to 0; real weights are normal with the same variance (He et al.
            2015).

    Returns:
        The layer.
    """
    if how == "uniform_parts":
        layer.reset_parameters()
        return layer
    fan_out, fan_in = layer.weight.shape
    variance = 2 / fan_in if how == "rayleigh_he" else 2 / (fan_in + fan_out)
    # A circular complex normal variable has a Rayleigh modulus and a uniform phase.
    if layer.weight.is_complex():
        torch.view_as_real(layer.weight).normal_(std=math.sqrt(variance / 2))
    else:
        layer.weight.normal_(std=math.sqrt(variance))
    layer.bias.zero_()
    return layer


@torch.no_grad()
def scale_to_unit_variance(model: nn.Module, noise: Tensor) -> nn.Module:
    """Scale every layer, in place, so that its outputs on white noise have E|z|² = 1.

    Layers are scaled in the order in which the model calls them, so that each gets the output of
    the layers that are already scaled (Mishkin & Matas 2016, algorithm 1, without the orthogonal
    initialisation). A layer is a module with a trained `weight` of two or more dimensions, which
    excludes normalisations and activations. Biases become 0, and weights that are 0 stay 0. If a
    weight is used twice, by one layer or several, it is scaled for its first use.

    No example is read, so this costs no ε.

    Args:
        model: the model.
        noise: white noise [B, *input shape] with E|z|² = 1.

    Returns:
        The model.

    Raises:
        UserError: The model has no such layer, or uses the weight of one without calling it.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(weight := getattr(layer, "weight", None), nn.Parameter)
        and weight.dim() > 1
        and weight.requires_grad
    }
    not_scaled = set(layers)
    scaled: set[Tensor] = set()  # layers may share a weight

    def scale(
        name: str,
        layer: nn.Module,
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> Tensor:
        not_scaled.discard(name)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        is_first_use = weight not in scaled
        scaled.add(weight)
        power = output.abs().square().mean()
        if not is_first_use or not power > 0:
            return output
        weight.mul_(power.rsqrt())
        return layer.forward(*inputs)

    handles = []
    for name, layer in layers.items():
        if isinstance(bias := getattr(layer, "bias", None), nn.Parameter):
            bias.zero_()
        handles.append(layer.register_forward_hook(partial(scale, name)))
    try:
        with evaluation_mode(model):  # so that BatchNorm does not learn from noise
            model(noise)
    finally:
        for handle in handles:
            handle.remove()
    if not layers:
        raise UserError(
            "model.start=unit_variance scales layers with weights: the model has no such layer."
        )
    if not_scaled:
        raise UserError(
            "model.start=unit_variance scales layers with weights: layer "
            f"'{min(not_scaled)}' is not called."
        )
    return model
