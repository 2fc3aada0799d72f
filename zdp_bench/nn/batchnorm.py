"""Replacement of BatchNorm, which lets one example see another, by norms that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zdp_bench.errors import UserError

Replacement = Literal["group", "instance", "frozen"]


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
        asked: Callable[[str], nn.Module] | None = getattr(module, "per_sample_norm", None)
        if asked is None and not isinstance(module, _BatchNorm):
            continue
        new = asked(how) if asked is not None else _per_sample_norm(cast(_BatchNorm, module), how)
        new.train(module.training)
        new.in_place_of = type(module).__name__  # type: ignore[assignment]  # for `surgery`
        if not name:
            raise UserError("model.replace_batchnorm: the model is nothing but a BatchNorm.")
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, new)
        replaced = True
    if not replaced:
        raise UserError(
            f"model.replace_batchnorm={how}: the model has no BatchNorm. Leave the key out."
        )
    return model


def _per_sample_norm(norm: _BatchNorm, how: Replacement) -> nn.Module:
    if how == "frozen":
        return FrozenBatchNorm(norm)
    channels, affine = norm.num_features, norm.affine
    kinds = {
        nn.BatchNorm1d: nn.InstanceNorm1d,
        nn.BatchNorm2d: nn.InstanceNorm2d,
        nn.BatchNorm3d: nn.InstanceNorm3d,
    }
    kind = next((kinds[base] for base in kinds if isinstance(norm, base)), None)
    new: nn.Module
    if how == "instance" and kind is not None:
        new = kind(channels, norm.eps, affine=affine, track_running_stats=False, **_like(norm))
    else:
        most = channels if how == "instance" else min(32, max(1, channels // 4))
        new = nn.GroupNorm(
            max(n for n in range(1, most + 1) if channels % n == 0),
            channels,
            norm.eps,
            affine,
            **_like(norm),
        )
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
        self.register_buffer(
            "mean", torch.zeros(norm.num_features, **_like(norm)) if mean is None else mean.clone()
        )
        self.register_buffer(
            "variance",
            torch.ones(norm.num_features, **_like(norm)) if variance is None else variance.clone(),
        )
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.mean, self.variance, self.weight, self.bias, training=False, eps=self.eps
        )


def _like(norm: _BatchNorm) -> dict[str, Any]:
    """Device and dtype of a norm's parameters, if it has any."""
    return {"device": norm.weight.device, "dtype": norm.weight.dtype} if norm.affine else {}


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
