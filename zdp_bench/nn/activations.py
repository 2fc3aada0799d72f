"""Activations of complex and real networks, by name.

Shapes: z [B, C, *] -> the same shape. Values and gradients of complex activations are finite at 0
and for |z| from 1e-37 to 1e19, also on the axes. Beyond, squares leave the range of float32. A
trained bias has one entry, or one per feature (dimension 1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.errors import UserError, require
from zdp_bench.registry import lookup, names, register


def activation(
    name: str,
    features: int,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Build the activation registered as `name`.

    Args:
        name: registered name.
        features: number of features, for an activation with one bias per feature.
        dtype: type of the network's weights. If given, an activation of this package must be of the
            same kind, real or complex.

    Raises:
        UserError: No activation has this name, or it is of the other kind.
    """
    builder = lookup("activation", name)
    if dtype is not None and _for_real(builder) is dtype.is_complex:
        kind, other = ("complex", "real") if dtype.is_complex else ("real", "complex")
        fitting = [
            known
            for known in names("activation")
            if _for_real(lookup("activation", known)) is not dtype.is_complex
        ]
        raise UserError(
            f"activation '{name}' is for {other} numbers, but this network's are {kind}. "
            f"Use one of {', '.join(fitting)}."
        )
    return builder(features) if getattr(builder, "per_feature", False) else builder()


def _for_real(builder: object) -> bool | None:
    """Return True if an activation is for real numbers only; None if it is another package's."""
    if getattr(builder, "__module__", "") != __name__:
        return None
    return isinstance(builder, type) and issubclass(
        builder, nn.ReLU | nn.Sigmoid | nn.Tanh | nn.Mish
    )


def on_parts(function: object, z: Tensor) -> Tensor:
    """Apply a real function to the real and the imaginary part, keeping the memory order."""
    if z.dim() > 2 and not z.is_contiguous():
        return on_parts(function, z.movedim(1, -1).contiguous()).movedim(-1, 1)
    parts = torch.view_as_real(z.resolve_conj())
    return torch.view_as_complex(function(parts))  # type: ignore[operator]


def modulus_and_inverse(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return |z| and 1/|z|, which is limited to 10¹⁵ so that nothing overflows at 0."""
    modulus = z.abs()
    return modulus, 1 / modulus.clamp(min=1e-15)


def along_features(bias: Tensor, z: Tensor) -> Tensor:
    """Reshape a bias [1] or [C] to broadcast with z [B, C, *]."""
    return bias.view(-1, *[1] * (z.dim() - 2))


@register("activation", "relu")
class ReLU(nn.ReLU):
    """ReLU, for real networks."""


@register("activation", "sigmoid")
class Sigmoid(nn.Sigmoid):
    """The logistic function, for real networks. Its slope is at most ¼."""


@register("activation", "tanh")
class Tanh(nn.Tanh):
    """The hyperbolic tangent, for real networks."""


@register("activation", "mish")
class Mish(nn.Mish):
    """x·tanh(log(1 + eˣ)) (Misra 2019), for real networks."""


@register("activation", "crelu")
class CReLU(nn.Module):
    """ReLU(Re z) + i·ReLU(Im z) (Trabelsi et al. 2018, section 3.4)."""

    def forward(self, z: Tensor) -> Tensor:
        return on_parts(torch.relu, z)


@register("activation", "separable_sigmoid")
class SeparableSigmoid(nn.Module):
    """σ(Re z) + i·σ(Im z), where σ is the logistic function (Nitta 1997, eq. 3)."""

    def forward(self, z: Tensor) -> Tensor:
        return on_parts(torch.sigmoid, z)


@register("activation", "zrelu")
class ZReLU(nn.Module):
    """z in the open first quadrant, 0 elsewhere (Guberman 2016, section 4.2.1)."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.where((z.real > 0) & (z.imag > 0), z, torch.zeros_like(z))


@register("activation", "siglog")
class SigLog(nn.Module):
    """z / (1 + |z|), preserving the phase (Georgiou & Koutsougeras 1992, eq. 12, c = r = 1)."""

    def forward(self, z: Tensor) -> Tensor:
        return z / (1 + z.abs())


@register("activation", "igaussian")
class IGaussian(nn.Module):
    """(1 − exp(−|z|²/2σ²))·z/|z|, preserving the phase (Virtue, Yu & Lustig 2017, eq. 7).

    Args:
        sigma: σ. Ziller et al. 2021 do not state it; the same group's later code uses 0.4.
    """

    def __init__(self, sigma: float = 1.0) -> None:
        super().__init__()
        require(sigma > 0, "sigma", sigma, "must be positive")
        self.sigma = sigma

    def forward(self, z: Tensor) -> Tensor:
        modulus, inverse = modulus_and_inverse(z)
        scaled = (modulus / self.sigma).clamp(max=1e3)
        return -torch.expm1(-0.5 * scaled.square()) * inverse * z


@register("activation", "cardioid")
class Cardioid(nn.Module):
    """½(1 + cos arg z)·z: 0 on the negative real axis (Virtue, Yu & Lustig 2017, eq. 5)."""

    def forward(self, z: Tensor) -> Tensor:
        _, inverse = modulus_and_inverse(z)
        return (0.5 + 0.5 * z.real * inverse) * z


class TrainedCardioid(nn.Module):
    """½(1 + cos(arg z + b))·z, the cardioid rotated by −b, with a trained phase b.

    Args:
        biases: number of phases, 1 or one per feature. They start at 0.
    """

    def __init__(self, biases: int = 1) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(biases))

    def forward(self, z: Tensor) -> Tensor:
        _, inverse = modulus_and_inverse(z)
        bias = along_features(self.bias, z)
        cosine = (z.real * bias.cos() - z.imag * bias.sin()) * inverse  # cos(arg z + b)
        return (0.5 + 0.5 * cosine) * z


@register("activation", "cardioid_trained")
class SingleTrainedCardioid(TrainedCardioid):
    """A trained cardioid with one bias for all features."""

    def __init__(self) -> None:
        super().__init__(1)


@register("activation", "cardioid_per_feature")
class PerFeatureTrainedCardioid(TrainedCardioid):
    """A trained cardioid with one bias for each feature."""

    per_feature = True


def shrink(z: Tensor, bias: Tensor) -> Tensor:
    """Return ReLU(|z| + b)·z/|z|, and 0 at z = 0."""
    modulus, inverse = modulus_and_inverse(z)
    return torch.relu(modulus + bias) * inverse * z


@register("activation", "modrelu")
class ModReLU(nn.Module):
    """ReLU(|z| + b)·z/|z| with a fixed b (Arjovsky, Shah & Bengio 2016, eq. 8).

    Ziller et al. 2021 do not state b; here it is −0.1.
    """

    bias = -0.1

    def forward(self, z: Tensor) -> Tensor:
        return shrink(z, z.real.new_tensor(self.bias))


@register("activation", "modrelu_per_feature")
class PerFeatureModReLU(nn.Module):
    """modReLU with a trained b per feature, which starts at −0.1."""

    per_feature = True

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((features,), ModReLU.bias))

    def forward(self, z: Tensor) -> Tensor:
        return shrink(z, along_features(self.bias, z))


@register("activation", "conjmish")
class ConjMish(nn.Module):
    """(1 + i)·Mish(Re z) − (1 − i)·Mish(Im z) (Riess et al. 2024, eq. 6).

    Mish(x) = x·tanh(log(1 + eˣ)), as Misra (2019) defines it. The 2024 paper prints an additional
    division by x inside tanh, which his formula does not have.
    """

    def forward(self, z: Tensor) -> Tensor:
        def mixed(parts: Tensor) -> Tensor:  # [..., 2]
            real, imaginary = F.mish(parts).unbind(-1)
            return torch.stack([real - imaginary, real + imaginary], dim=-1)

        return on_parts(mixed, z)
