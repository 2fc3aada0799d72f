"""Heads for a representation: one linear layer, or one at each position of a map.

For heads with more layers, use `real_mlp` or `complex_mlp`.
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
    """One linear layer, [B, *input_shape] -> [B, outputs]; complex weights return |z|.

    Args:
        init: initialisation of complex weights. None: real weights, which start at 0.
    """

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
    """One linear layer with real weights, which start at 0."""
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
    """A linear layer at each position of a map, such as a logistic regression per voxel.

    Its weights and bias are polynomials of the position s:
    y(s) = Σ_c Σ_p w[c, p] P_p(s) x_c(s) + Σ_p b[p] P_p(s), where P_p are products of Legendre
    polynomials. All coefficients start at 0.

    Shapes: [B, C, *positions] -> [B, outputs, *positions].

    Args:
        degree, bias_degree: maximum degree of the polynomials of the weights and of the bias.
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
                "model=real_linear_map: takes maps [channels, positions ...], but these examples "
                f"are {list(input_shape)}."
            )
        channels, *sides = input_shape
        self.outputs = outputs
        self.register_buffer("scales", legendre(sides, degree))
        self.register_buffer("shifts", legendre(sides, bias_degree))
        self.linear = nn.Linear(channels, outputs * self.scales.shape[1], bias=False)
        self.shift = nn.Linear(self.shifts.shape[1], outputs, bias=False)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.shift.weight)

    def forward(self, x: Tensor) -> Tensor:
        sides = x.shape[2:]
        parts = self.linear(x.flatten(2).mT)  # [B, positions, outputs · polynomials]
        parts = parts.unflatten(2, (self.outputs, -1))
        scaled = parts * self.scales.unsqueeze(1).to(x)
        shift = self.shift(self.shifts.to(x).expand(len(x), -1, -1))
        logits = scaled.sum(dim=3) + shift  # [B, positions, outputs]
        return logits.mT.unflatten(2, sides)


def legendre(sides: Sequence[int], degree: int) -> Tensor:
    """Return products of Legendre polynomials at all positions, [positions, polynomials].

    There is one product for each combination of degrees, one per side, whose sum is at most
    `degree`. Products have mean square 1, up to the discretisation of the sides.
    """
    polynomials_of_sides = [_polynomials(side, degree) for side in sides]
    products = []
    for exponents in product(range(degree + 1), repeat=len(sides)):
        if sum(exponents) <= degree:
            values = torch.ones(1, dtype=torch.float64)
            for polynomials, exponent in zip(polynomials_of_sides, exponents, strict=True):
                values = (values.unsqueeze(1) * polynomials[exponent]).flatten()
            products.append(values.float())
    return torch.stack(products, dim=1)


def _polynomials(side: int, degree: int) -> list[Tensor]:
    """Return the Legendre polynomials of degree 0 to max(degree, 1) along a side, [side] each."""
    x = torch.linspace(-1, 1, side, dtype=torch.float64)
    rows = [torch.ones_like(x), x]
    for k in range(1, degree):
        following = (2 * k + 1) * x * rows[k] - k * rows[k - 1]
        rows.append(following / (k + 1))
    return [math.sqrt(2 * k + 1) * row for k, row in enumerate(rows)]
