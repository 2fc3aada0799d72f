"""Checks of examples and normalisation, which the transforms share.

An example is normalised by its own statistics, never by those of a training set, so that a
transform stays a public function of one example.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zdp_bench.errors import UserError, require

Normalise = Literal["none", "layer", "group"]
EPS = 1e-5


def normalise_each(
    x: Tensor,
    normalise: Normalise,
    groups: int,
) -> Tensor:
    """Normalise each example of x, [B, C, ...], to mean 0 and E|z|² = 1.

    Args:
        x: the features.
        normalise: 'layer' normalises over all features of an example, 'group' over each group of
            its channels, 'none' returns x.
        groups: the number of groups of channels for 'group'.

    Raises:
        UserError: the number of groups does not divide the number of channels.
    """
    if normalise == "none":
        return x
    if normalise == "layer":
        groups = 1
    channels = x.shape[1]
    divisors = [number for number in range(1, channels + 1) if channels % number == 0]
    rule = (
        f"must divide the {channels} channels of the representation; set one of "
        f"{', '.join(map(str, divisors))}"
    )
    require(groups in divisors, "representation.groups", groups, rule)
    parts = x.reshape(len(x), groups, -1)
    centred = parts - parts.mean(dim=2, keepdim=True)
    power = centred.abs().square().mean(dim=2, keepdim=True)
    return (centred * torch.rsqrt(power + EPS)).reshape(x.shape)


def require_real(x: Tensor, name: str) -> None:
    """Reject complex examples."""
    if x.is_complex():
        raise UserError(
            f"representation={name}: takes real numbers, but these examples are complex; "
            "representation=scattering takes both."
        )


def as_real_pictures(x: Tensor, name: str) -> Tensor:
    """Return images [B, (C,) H, W] as [B, C, H, W]; reject complex images."""
    require_real(x, name)
    return x.reshape(len(x), -1, *x.shape[-2:])


def require_pictures(
    name: str,
    input_shape: tuple[int, ...],
    min_side: int = 1,
) -> int:
    """Return the number of channels of images [(C,) H, W].

    Args:
        name: the representation, for the error message.
        input_shape: shape of an example.
        min_side: smallest number of pixels of a side.

    Raises:
        UserError: examples of this shape are not grey or RGB images, or are too small.
    """
    channels = input_shape[0] if len(input_shape) == 3 else 1
    are_pictures = len(input_shape) in (2, 3) and channels in (1, 3)
    if not are_pictures or min(input_shape[-2:]) < min_side:
        size = f" with sides of at least {min_side} pixels" if min_side > 1 else ""
        raise UserError(
            f"representation={name}: takes pictures [height, width] or [1 or 3, height, width]"
            f"{size}, but these examples are {list(input_shape)}."
        )
    return channels
