"""How complex weights start."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

Initialisation = Literal["uniform_parts", "rayleigh_he", "rayleigh_glorot"]


@torch.no_grad()
def initialise(layer: nn.Linear, how: Initialisation) -> nn.Linear:
    """Draw a linear layer's weight anew, in place.

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
