"""Changes to a built model: BatchNorm replaced, filters standardised, complex inputs mapped.

BatchNorm lets one example see another; the norms that take its place do not.

Standardised filters have mean 0 and norm 1 (Qiao et al. 2019, in the scale of De et al. 2022), real
and complex. The parameter v stays as it is; the layer computes with
w = (v − mean)/√(‖v − mean‖² + ε), filter by filter. No example is read for it, so the examples stay
apart.

Complex inputs become magnitudes, or two channels, for networks with real weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zdp_bench.errors import UserError
from zdp_bench.nn.convolution import ComplexConv1d, ComplexConv2d, ComplexConv3d
from zdp_bench.nn.normalisation import largest_divisor

Replacement = Literal["group", "instance", "frozen"]
ComplexAs = Literal["magnitude", "channels"]

EPSILON = 1e-6
_BASES: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    ComplexConv1d,
    ComplexConv2d,
    ComplexConv3d,
)


def replace_batchnorm(model: nn.Module, how: Replacement) -> nn.Module:
    """Replace every BatchNorm of a model by a per-sample norm, in place, and keep its weights.

    group: GroupNorm with the most groups, 32 at most, that divide the channels, of at least 4
        channels if possible.
    instance: InstanceNorm without running statistics.
    frozen: `FrozenBatchNorm` with the running statistics; on a new model, mean 0 and variance 1.

    A layer with a method `per_sample_norm(how)` returns its own replacement, as complex norms do.

    Raises:
        UserError: the model has no such layer.
    """
    replaced = False
    for name, module in list(model.named_modules()):
        own_norm: Callable[[str], nn.Module] | None = getattr(module, "per_sample_norm", None)
        if own_norm is not None:
            new = own_norm(how)
        elif isinstance(module, _BatchNorm):
            new = _per_sample_norm(module, how)
        else:
            continue
        new.train(module.training)
        new.in_place_of = type(module).__name__  # type: ignore[assignment]  # for `surgery`
        if not name:
            raise UserError("model.replace_batchnorm: the model is a single BatchNorm.")
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, new)
        replaced = True
    if not replaced:
        raise UserError(
            f"model.replace_batchnorm={how}: the model has no BatchNorm. Remove the key."
        )
    return model


def _per_sample_norm(norm: _BatchNorm, how: Replacement) -> nn.Module:
    if how == "frozen":
        return FrozenBatchNorm(norm)
    channels, affine = norm.num_features, norm.affine
    options = _like(norm) | {"eps": norm.eps, "affine": affine}
    new: nn.Module
    if how == "instance" and isinstance(norm, nn.BatchNorm1d):
        new = nn.InstanceNorm1d(channels, **options)
    elif how == "instance" and isinstance(norm, nn.BatchNorm2d):
        new = nn.InstanceNorm2d(channels, **options)
    elif how == "instance" and isinstance(norm, nn.BatchNorm3d):
        new = nn.InstanceNorm3d(channels, **options)
    else:
        groups = channels
        if how == "group":
            most = min(32, max(1, channels // 4))
            groups = largest_divisor(channels, most)
        new = nn.GroupNorm(groups, channels, **options)
    if affine:
        new.weight, new.bias = norm.weight, norm.bias
    return new


class FrozenBatchNorm(nn.Module):
    """(x − mean)/√(variance + eps)·weight + bias, of which only weight and bias are trained."""

    mean: Tensor
    variance: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        mean, variance = norm.running_mean, norm.running_var
        if mean is None or variance is None:
            mean = torch.zeros(norm.num_features, **_like(norm))
            variance = torch.ones(norm.num_features, **_like(norm))
        self.register_buffer("mean", mean.clone())
        self.register_buffer("variance", variance.clone())
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x,
            self.mean,
            self.variance,
            self.weight,
            self.bias,
            training=False,
            eps=self.eps,
        )


def _like(norm: _BatchNorm) -> dict[str, Any]:
    """Device and dtype of a norm's parameters, if it has any."""
    if not norm.affine:
        return {}
    return {"device": norm.weight.device, "dtype": norm.weight.dtype}


def surgery(model: nn.Module) -> list[dict[str, str]]:
    """List what `replace_batchnorm` did to a model, for the record."""
    return [
        {
            "layer": name,
            "was": str(module.in_place_of),
            "is": type(module).__name__,
            "why": "batch statistics mix samples",
        }
        for name, module in model.named_modules()
        if hasattr(module, "in_place_of")
    ]


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
    if centred.is_complex():
        squares = torch.view_as_real(centred).square().sum(-1)
    else:
        squares = centred**2
    return centred, (squares.sum(dims, keepdim=True) + EPSILON).sqrt()


class _Standardised(nn.Module):
    """Mixed into a convolution, in front of its own type."""

    _conv_forward: Any
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, standardise(self.weight), self.bias)


def _make_standardised(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Standardised{base.__name__}", (_Standardised, base), {})


STANDARDISED = {base: _make_standardised(base) for base in _BASES}


def standardise_weights(model: nn.Module) -> nn.Module:
    """Standardise the weights of every convolution, in place; parameters keep names and values.

    Transposed convolutions and filters of a single number stay as they are.

    Raises:
        UserError: the model has no such convolution.
    """
    convolutions = []
    for module in model.modules():
        if type(module) in STANDARDISED:
            weight: Tensor = module.weight  # type: ignore[assignment]
            if weight[0].numel() > 1:
                convolutions.append(module)
    if not convolutions:
        raise UserError(
            "model.weight_standardisation=true: the model has no convolution to standardise. "
            "Remove the key."
        )
    for module in convolutions:
        module.__class__ = STANDARDISED[type(module)]
    return model


class RealInput(nn.Module):
    """Turns complex inputs into |z|, or into real and imaginary parts as channels.

    Shapes: [B, ...] -> [B, ...], or as `real_shape` says.
    """

    def __init__(self, complex_as: ComplexAs) -> None:
        super().__init__()
        self.complex_as = complex_as

    def forward(self, z: Tensor) -> Tensor:
        if not z.is_complex():
            raise TypeError(f"model.complex_as={self.complex_as}: they are real already")
        if self.complex_as == "magnitude":
            return z.abs()
        parts = torch.stack([z.real, z.imag], dim=1)  # [B, 2, ...]
        return parts.flatten(1, 2) if z.dim() > 3 else parts


def real_shape(
    shape: tuple[int, ...],
    complex_as: ComplexAs,
) -> tuple[int, ...]:
    """Return what the shape of an example becomes: [C, H, W] -> [2C, H, W], [H, W] -> [2, H, W]."""
    if complex_as == "magnitude":
        return shape
    if len(shape) <= 2:
        return (2, *shape)
    channels, *sizes = shape
    return (2 * channels, *sizes)
