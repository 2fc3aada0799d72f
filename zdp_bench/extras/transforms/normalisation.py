"""What transforms share: checks of their examples, and normalisation of one example by its own
numbers, never by those of a training set.
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
    """Give each example of x [B, C, ...], or each group of its channels, mean 0 and E|z|² = 1."""
    if normalise == "none":
        return x
    if normalise == "layer":
        groups = 1
    channels = x.shape[1]
    divisors = [number for number in range(1, channels + 1) if channels % number == 0]
    rule = (
        f"must divide the {channels} channels of the representation: set one of "
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
            f"representation={name}: takes real numbers, and these examples are complex; "
            "representation=scattering takes both."
        )


def as_real_pictures(x: Tensor, name: str) -> Tensor:
    """Return pictures [B, (C,) H, W] as [B, C, H, W]; reject complex ones."""
    require_real(x, name)
    return x.reshape(len(x), -1, *x.shape[-2:])


def require_pictures(
    name: str,
    input_shape: tuple[int, ...],
    least: int = 1,
) -> int:
    """Return how many channels pictures [(C,) H, W] have.

    Args:
        name: of the representation.
        least: pixels along a side.

    Raises:
        UserError: examples of this shape are no grey or RGB pictures, or are too small.
    """
    channels = input_shape[0] if len(input_shape) == 3 else 1
    are_pictures = len(input_shape) in (2, 3) and channels in (1, 3)
    if not are_pictures or min(input_shape[-2:]) < least:
        size = f" of {least} pixels a side or more" if least > 1 else ""
        raise UserError(
            f"representation={name}: takes pictures [height, width] or [1 or 3, height, width]"
            f"{size}, and these examples are {list(input_shape)}."
        )
    return channels
