"""Normalisation of one example by its own numbers: never by those of a training set."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zdp_bench.errors import UserError, require

Normalise = Literal["none", "layer", "group"]
EPS = 1e-5


def normalise_each(x: Tensor, normalise: Normalise, groups: int) -> Tensor:
    """Give each example of x [B, C, ...], or each group of its channels, mean 0 and E|z|² = 1."""
    if normalise == "none":
        return x
    groups = groups if normalise == "group" else 1
    channels = x.shape[1]
    divides = groups > 0 and channels % groups == 0
    divisors = ", ".join(str(n) for n in range(1, channels + 1) if channels % n == 0)
    rule = f"must divide the {channels} channels of the representation: set one of {divisors}"
    require(divides, "representation.groups", groups, rule)
    parts = x.reshape(len(x), groups, -1)
    centred = parts - parts.mean(dim=2, keepdim=True)
    power = centred.abs().square().mean(dim=2, keepdim=True)
    return (centred * torch.rsqrt(power + EPS)).reshape(x.shape)


def require_real(x: Tensor, name: str) -> None:
    """Reject complex examples."""
    if x.is_complex():
        raise UserError(
            f"representation={name}: takes real numbers, and these examples are complex; "
            "representation=scattering takes both."
        )
