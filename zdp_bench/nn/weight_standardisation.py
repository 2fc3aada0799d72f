"""Convolutions whose filters have mean 0 and norm 1, real and complex.

After Qiao et al. 2019, in the scale of De et al. 2022.
The parameter v stays as it is; the layer computes with w = (v − mean)/√(‖v − mean‖² + ε), filter by
filter. No example is read for it, so the examples stay apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.nn.convolution import ComplexConv1d, ComplexConv2d, ComplexConv3d

EPSILON = 1e-6
_BASES: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    ComplexConv1d,
    ComplexConv2d,
    ComplexConv3d,
)


def standardise(weight: Tensor) -> Tensor:
    """Return the weight [O, C, *k] with filters of mean 0 and norm 1."""
    centred, norms = _centred(weight)
    return centred / norms


def pull_back(weight: Tensor) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return what turns the standardised weight's gradients [*, O, C, *k] into those of `weight`.

    It is linear, and the same for every example: P(G/s − c·Re⟨c, G⟩/s³) for the centred filter c of
    norm s, where P takes the mean off. Also returns by how much it lengthens a gradient at most.
    """
    centred, norms = _centred(weight)
    dims = tuple(range(1 - weight.dim(), 0))
    unit = centred / norms

    def back(gradients: Tensor) -> Tensor:
        along = (unit.conj() * gradients).real.sum(dims, keepdim=True)
        moved = (gradients - unit * along) / norms
        return moved - moved.mean(dims, keepdim=True)

    return back, 1 / float(norms.min())


def _centred(weight: Tensor) -> tuple[Tensor, Tensor]:
    dims = tuple(range(1 - weight.dim(), 0))
    centred = weight - weight.mean(dims, keepdim=True)
    parts = torch.view_as_real(centred).square().sum(-1) if centred.is_complex() else centred**2
    return centred, (parts.sum(dims, keepdim=True) + EPSILON).sqrt()


class _Standardised(nn.Module):
    """Mixed into a convolution, in front of its own type."""

    _conv_forward: Any
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, standardise(self.weight), self.bias)


STANDARDISED: dict[type[nn.Module], type[nn.Module]] = {
    base: type(f"Standardised{base.__name__}", (_Standardised, base), {}) for base in _BASES
}


def standardise_weights(model: nn.Module) -> nn.Module:
    """Standardise the weights of every convolution, in place; parameters keep names and values.

    Transposed convolutions and filters of a single number stay as they are.

    Raises:
        UserError: the model has no such convolution.
    """
    found = [
        module
        for module in model.modules()
        if type(module) in STANDARDISED and module.weight[0].numel() > 1  # type: ignore[index]
    ]
    if not found:
        raise UserError(
            "model.weight_standardisation=true: the model has no convolution to standardise. "
            "Leave the key out."
        )
    for module in found:
        module.__class__ = STANDARDISED[type(module)]
    return model
