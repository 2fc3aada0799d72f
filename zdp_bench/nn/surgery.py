"""Changes to a model after it is built, which the keys of every model select.

`replace_batchnorm` replaces BatchNorm, whose statistics mix examples, by norms that keep examples
apart.

`standardise_weights` standardises the filters of convolutions to mean 0 and norm 1 (Qiao et al.
2019, with the scale of De et al. 2022). The parameter v does not change. For each filter, the layer
computes with w = (v − mean)/√(‖v − mean‖² + ε). This depends on no example, so examples stay apart.

`RealInput` converts complex inputs to magnitudes or to channels, for networks with real weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zdp_bench.errors import UserError, unknown
from zdp_bench.nn.convolution import ComplexConv1d, ComplexConv2d, ComplexConv3d
from zdp_bench.nn.normalisation import largest_divisor
from zdp_bench.nn.unchanged import computes_as, is_unchanged

Replacement = Literal["group", "instance", "frozen"]
ComplexAs = Literal["magnitude", "channels"]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

EPSILON = 1e-6


def replace_batchnorm(model: nn.Module, how: Replacement) -> nn.Module:
    """Replace each BatchNorm of a model by a norm that keeps examples apart, in place.

    The weight and bias of a BatchNorm are kept. A layer that has a method `per_sample_norm(how)` is
    replaced as a whole by the layer that this method returns.

    Args:
        model: the model.
        how: "group" for GroupNorm with the largest number of groups that divides the channels, is
            at most 32, and leaves at least 4 channels per group if possible. "instance" for
            InstanceNorm without running statistics. "frozen" for `FrozenBatchNorm`.

    Returns:
        The model, which does not change if it has no BatchNorm.

    Raises:
        UserError: there is no such replacement, a BatchNorm may compute something else than
            torch's, or the model is a single BatchNorm, which cannot be replaced in place.
    """
    if how not in get_args(Replacement):
        raise unknown("how", str(how), get_args(Replacement))
    norms: dict[nn.Module, nn.Module] = {}
    layers: dict[str, nn.Module] = {}  # to replace, by name; a layer can have several names
    for name, module in model.named_modules(remove_duplicate=False):
        make_norm: Callable[[str], nn.Module] | None = getattr(module, "per_sample_norm", None)
        if make_norm is None and not isinstance(module, _BatchNorm):
            continue
        if any(name.startswith(f"{outer}.") for outer in layers):
            continue  # it is replaced with the layer around it
        if not name:
            raise UserError(
                f"the model is a single {type(module).__name__}, which cannot be replaced in "
                "place: put it into an nn.Sequential."
            )
        layers[name] = module
        if module not in norms:
            is_known = computes_as(module, BATCH_NORMS) or _has_activation(module)
            if make_norm is None and not is_known:
                raise UserError(
                    f"layer '{name}' ({type(module).__name__}) may compute more than torch's "
                    "BatchNorm, because it has hooks or methods of its own: remove them, replace "
                    "it yourself, or give it a method per_sample_norm(how) that returns what "
                    "replaces it."
                )
            norm = make_norm(how) if make_norm is not None else _per_sample_norm(module, how)
            norm.train(module.training)
            norm.in_place_of = type(module).__name__  # type: ignore[assignment]  # for `surgery`
            norms[module] = norm
    for name, module in layers.items():
        parent_name, _, child_name = name.rpartition(".")
        setattr(model.get_submodule(parent_name), child_name, norms[module])
    return model


def _has_activation(module: nn.Module) -> bool:
    """Return True for timm's unchanged BatchNorm with a dropout and an activation."""
    kind = type(module)
    is_timms = (kind.__module__, kind.__name__) == ("timm.layers.norm_act", "BatchNormAct2d")
    return is_timms and is_unchanged(module)


def _per_sample_norm(batch_norm: _BatchNorm, how: Replacement) -> nn.Module:
    """Return the replacement of a BatchNorm, with its weight, bias and activation."""
    norm = _norm_alone(batch_norm, how)
    if _has_activation(batch_norm):
        followers: list[Any] = [batch_norm.drop, batch_norm.act]
        return nn.Sequential(norm, *followers)
    return norm


def _norm_alone(batch_norm: _BatchNorm, how: Replacement) -> nn.Module:
    if how == "frozen":
        return FrozenBatchNorm(batch_norm)
    channels, affine = batch_norm.num_features, batch_norm.affine
    options = _device_and_dtype(batch_norm) | {"eps": batch_norm.eps, "affine": affine}
    norm: nn.Module
    if how == "instance" and isinstance(batch_norm, nn.BatchNorm1d):
        norm = InstanceNorm1d(channels, **options)
    elif how == "instance" and isinstance(batch_norm, nn.BatchNorm2d):
        norm = nn.InstanceNorm2d(channels, **options)
    elif how == "instance" and isinstance(batch_norm, nn.BatchNorm3d):
        norm = nn.InstanceNorm3d(channels, **options)
    else:
        groups = channels  # the same as InstanceNorm, for any number of dimensions
        if how == "group":
            max_groups = min(32, max(1, channels // 4))
            groups = largest_divisor(channels, max_groups)
        norm = nn.GroupNorm(groups, channels, **options)
    if affine:
        norm.weight, norm.bias = batch_norm.weight, batch_norm.bias
    return norm


class InstanceNorm1d(nn.InstanceNorm1d):
    """An instance norm of batches [B, C, L]; torch's reads features [B, C] as one example."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 3:
            raise UserError(
                f"an instance norm on features of shape {list(input.shape)} would normalise single "
                "numbers, which gives 0: replace its BatchNorm by group instead."
            )


class FrozenBatchNorm(nn.Module):
    """A BatchNorm with fixed statistics: (x − mean)/√(variance + eps)·weight + bias.

    Only weight and bias are trained.

    Args:
        norm: the BatchNorm whose running statistics, weight and bias are used. If it has no running
            statistics, the mean is 0 and the variance 1.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        mean, variance = norm.running_mean, norm.running_var
        if mean is None or variance is None:
            mean = torch.zeros(norm.num_features, **_device_and_dtype(norm))
            variance = torch.ones(norm.num_features, **_device_and_dtype(norm))
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


def _device_and_dtype(norm: _BatchNorm) -> dict[str, Any]:
    """Return the device and dtype of a norm's parameters; empty if it has none."""
    if not norm.affine:
        return {}
    return {"device": norm.weight.device, "dtype": norm.weight.dtype}


def surgery(model: nn.Module) -> list[dict[str, str]]:
    """Return the layers that `replace_batchnorm` replaced, for the record."""
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
    """Return a weight [O, C, *k] whose filters are standardised to mean 0 and norm 1."""
    centred, norms = _centred(weight)
    return centred / norms


def pull_back(weight: Tensor) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return the function that pulls gradients back from the standardised weight to the weight.

    The function is linear and the same for all examples: P(G/s − c·Re⟨c, G⟩/s³) for a gradient G
    and a centred filter c of norm s, where P subtracts the mean.

    Args:
        weight: the weight, [O, C, *k].

    Returns:
        The function, for gradients [*, O, C, *k], and the largest factor by which it can lengthen a
        gradient.
    """
    centred, norms = _centred(weight)
    dims = tuple(range(1 - weight.dim(), 0))
    unit = centred / norms

    def pull_gradients_back(gradients: Tensor) -> Tensor:
        along_filter = (unit.conj() * gradients).real.sum(dims, keepdim=True)
        across_filter = (gradients - unit * along_filter) / norms
        return across_filter - across_filter.mean(dims, keepdim=True)

    return pull_gradients_back, 1 / float(norms.min())


def _centred(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the filters with mean 0, [O, C, *k], and √(‖filter‖² + ε) of each, [O, 1, …]."""
    dims = tuple(range(1 - weight.dim(), 0))
    centred = weight - weight.mean(dims, keepdim=True)
    if centred.is_complex():
        squares = torch.view_as_real(centred).square().sum(-1)
    else:
        squares = centred**2
    return centred, (squares.sum(dims, keepdim=True) + EPSILON).sqrt()


class _Standardised(nn.Module):
    """A mixin that precedes the class of a convolution among the bases of a class."""

    _conv_forward: Any
    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, standardise(self.weight), self.bias)


# Class statements, so that pickle can find the classes by their names.
class StandardisedConv1d(_Standardised, nn.Conv1d):
    """`nn.Conv1d` with standardised weights."""


class StandardisedConv2d(_Standardised, nn.Conv2d):
    """`nn.Conv2d` with standardised weights."""


class StandardisedConv3d(_Standardised, nn.Conv3d):
    """`nn.Conv3d` with standardised weights."""


class StandardisedComplexConv1d(_Standardised, ComplexConv1d):
    """`ComplexConv1d` with standardised weights."""


class StandardisedComplexConv2d(_Standardised, ComplexConv2d):
    """`ComplexConv2d` with standardised weights."""


class StandardisedComplexConv3d(_Standardised, ComplexConv3d):
    """`ComplexConv3d` with standardised weights."""


STANDARDISED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: StandardisedConv1d,
    nn.Conv2d: StandardisedConv2d,
    nn.Conv3d: StandardisedConv3d,
    ComplexConv1d: StandardisedComplexConv1d,
    ComplexConv2d: StandardisedComplexConv2d,
    ComplexConv3d: StandardisedComplexConv3d,
}


def standardise_weights(model: nn.Module) -> nn.Module:
    """Make each convolution of a model compute with standardised weights, in place.

    Parameters keep their names and values. Transposed convolutions, and filters of a single number,
    do not change.

    Returns:
        The model.

    Raises:
        UserError: the model has no convolution to standardise.
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
    """Converts complex inputs to |z|, or to real and imaginary parts as channels.

    Shapes: complex [B, ...] -> real [B, ...]; see `real_shape`.

    Args:
        complex_as: "magnitude" or "channels".
    """

    def __init__(self, complex_as: ComplexAs) -> None:
        super().__init__()
        self.complex_as = complex_as

    def forward(self, z: Tensor) -> Tensor:
        if not z.is_complex():
            raise TypeError(f"model.complex_as={self.complex_as}: the inputs are real already")
        if self.complex_as == "magnitude":
            return z.abs()
        parts = torch.stack([z.real, z.imag], dim=1)  # [B, 2, ...]
        return parts.flatten(1, 2) if z.dim() > 3 else parts


def real_shape(
    shape: tuple[int, ...],
    complex_as: ComplexAs,
) -> tuple[int, ...]:
    """Return the shape of an example after `RealInput`.

    With "channels", [C, H, W] becomes [2C, H, W], and [H, W] becomes [2, H, W].
    """
    if complex_as == "magnitude":
        return shape
    if len(shape) <= 2:
        return (2, *shape)
    channels, *sizes = shape
    return (2 * channels, *sizes)
