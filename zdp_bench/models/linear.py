"""Heads for a representation: one linear layer, or one at each place of a map.

With `hidden`, `real_mlp` and `complex_mlp` are the heads of two layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.nn.initialisation import Initialisation, initialise
from zdp_bench.registry import register

Degree = Annotated[int, Interval(ge=0, le=12)]


class Linear(nn.Module):
    """Shapes: [B, *input_shape] -> [B, outputs]; complex weights return |z|."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        init: Initialisation | None,
    ) -> None:
        super().__init__()
        self.dtype = torch.float32 if init is None else torch.complex64
        self.linear = nn.Linear(inputs, outputs, dtype=self.dtype)
        if init:
            initialise(self.linear, init)
        else:
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.flatten(1).to(self.dtype))
        return y.abs() if y.is_complex() else y


@register("model", "real_linear")
def real_linear(input_shape: tuple[int, ...], outputs: int) -> Linear:
    """One linear layer, which starts at 0."""
    return Linear(math.prod(input_shape), outputs, None)


@register("model", "complex_linear")
def complex_linear(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    init: Initialisation = "uniform_parts",
) -> Linear:
    """One linear layer with complex weights; its logits are magnitudes."""
    return Linear(math.prod(input_shape), outputs, init)


@register("model", "real_linear_map")
class LinearMap(nn.Module):
    """A linear layer at each place of a map, which starts at 0: a logistic regression a voxel.

    Its weights are polynomials of the place. Shapes: [B, C, *places] -> [B, outputs, *places]. With
    P the Legendre polynomials of the place:
    Σ_c Σ_p w[c, p] P_p(place) x_c(place) + Σ_p b[p] P_p(place), up to a degree each.
    """

    scales: Tensor
    shifts: Tensor

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        degree: Degree = 0,
        bias_degree: Degree = 0,
    ) -> None:
        super().__init__()
        if len(input_shape) < 2:
            raise UserError(
                "model=real_linear_map: takes maps [channels, places ...], and these examples are "
                f"{list(input_shape)}."
            )
        channels, *places = input_shape
        self.outputs = outputs
        self.register_buffer("scales", legendre(places, degree))
        self.register_buffer("shifts", legendre(places, bias_degree))
        self.linear = nn.Linear(channels, outputs * self.scales.shape[1], bias=False)
        self.shift = nn.Linear(self.shifts.shape[1], outputs, bias=False)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.shift.weight)

    def forward(self, x: Tensor) -> Tensor:
        places = x.shape[2:]
        parts = self.linear(x.flatten(2).mT)  # [B, places, outputs · polynomials]
        parts = parts.unflatten(2, (self.outputs, -1))
        scaled = parts * self.scales.unsqueeze(1).to(x)
        shift = self.shift(self.shifts.to(x).expand(len(x), -1, -1))
        logits = scaled.sum(dim=3) + shift  # [B, places, outputs]
        return logits.mT.unflatten(2, places)


def legendre(places: Sequence[int], degree: int) -> Tensor:
    """Return the products of Legendre polynomials at all places, [places, polynomials].

    Each has mean square 1 over a long side, and at most this degree in all.
    """
    sides = [_polynomials(side, degree) for side in places]
    products = []
    for exponents in product(range(degree + 1), repeat=len(places)):
        if sum(exponents) <= degree:
            values = torch.ones(1, dtype=torch.float64)
            for polynomials, exponent in zip(sides, exponents, strict=True):
                values = (values.unsqueeze(1) * polynomials[exponent]).flatten()
            products.append(values.float())
    return torch.stack(products, dim=1)


def _polynomials(side: int, degree: int) -> list[Tensor]:
    """Return the Legendre polynomials up to a degree, or 1, along a side, [side] each."""
    x = torch.linspace(-1, 1, side, dtype=torch.float64)
    rows = [torch.ones_like(x), x]
    for k in range(1, degree):
        following = (2 * k + 1) * x * rows[k] - k * rows[k - 1]
        rows.append(following / (k + 1))
    return [math.sqrt(2 * k + 1) * row for k, row in enumerate(rows)]
