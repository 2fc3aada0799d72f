"""Complex GroupNorm, InstanceNorm and LayerNorm (Riess et al. 2024, section 4).

The complex numbers of a group are centred and then whitened: as pairs (Re, Im), they are multiplied
by the inverse square root of their covariance. For a symmetric 2×2 matrix, it has a closed form
without an SVD. For centred numbers c with h = E|c|²/2 and p = E c², whose covariance has the
eigenvalues h ± |p|/2, the whitened numbers are

    ŷ = A·c + B·c̄             A = t/(2s),  B = −p/(2st)
                              s² = (h + eps)² − |p|²/4,  t² = 2(h + eps + s)

The code calls A `along` and B `across`. The affine step γ·ŷ + β only changes these two
coefficients, and the backward pass has the same form. Both passes therefore take a few elementwise
operations on channels-last memory, and only x and four numbers per group are kept for the backward
pass.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zdp_bench.errors import unknown
from zdp_bench.nn.memory_format import channels_last

EPS = 1e-5  # added to both eigenvalues of a group's covariance, as in the paper's listing
# Number of units of rounding of the mean eigenvalue that are also added, because a smaller
# eigenvalue consists of rounding errors only.
ROUNDING = 4
MAX_GROUPS = 16  # as in the paper


class ComplexGroupNorm(nn.Module):
    """Complex group normalisation: γ·ŷ + β, where ŷ is centred and whitened within each group.

    A group consists of some channels of one example, at all positions. This is the paper's listing
    except for the closed form. Covariances are divided by one less than the number of entries, as
    in `torch.cov`. Besides `eps`, 5e-7 of the mean eigenvalue is added to both eigenvalues in
    float32 (1e-15 in float64), because rounding errors would be amplified to full size if the
    entries of a group are on a line far from 0. For any group of n entries whose Σ|x|² is at most
    1e38 in float32, values and gradients are finite, and Σ|ŷ|² is at most 2n.

    Shapes: complex [B, C, *] -> the same shape, channels-last in memory, where * is any number of
    spatial dimensions, or none.

    Args:
        groups: number of groups, which must divide the number of channels.
        channels: number of channels C.
        eps: added to both eigenvalues of the covariance. Default: 1e-5.
        affine: whether γ and β are trained. If False, the result is ŷ. Default: True.
        dtype: complex data type of γ and β. Default: complex64.
        device: device of γ and β.

    Attributes:
        weight: γ, complex [C]. It starts at (1 + i)/√2, which rotates by 45° and has modulus 1, so
            that E|γ·ŷ|² starts at 2.
        bias: β, complex [C]. It starts at 0.
    """

    def __init__(
        self,
        groups: int,
        channels: int,
        eps: float = EPS,
        affine: bool = True,
        *,
        dtype: torch.dtype = torch.complex64,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not dtype.is_complex:
            raise ValueError(
                f"{type(self).__name__} is complex, not {dtype}: "
                "use torch.nn's layer for real numbers"
            )
        if groups < 1 or channels % groups:
            raise ValueError(f"{channels} channels do not divide into {groups} groups")
        if not eps > 0:
            raise ValueError(
                f"eps={eps}: must be positive, or groups on a line have no inverse square root"
            )
        self.groups, self.channels, self.eps = groups, channels, eps
        self.weight = self.bias = None
        if affine:
            self.weight = nn.Parameter(torch.empty(channels, dtype=dtype, device=device))
            self.bias = nn.Parameter(torch.empty(channels, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set γ to (1 + i)/√2 and β to 0."""
        if self.weight is not None and self.bias is not None:
            with torch.no_grad():
                half = math.sqrt(0.5)
                self.weight.fill_(complex(half, half))
                self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, self.groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.groups}, {self.channels}, eps={self.eps}, affine={self.weight is not None}"


class ComplexInstanceNorm(ComplexGroupNorm):
    """Complex instance normalisation: each channel of an example is a group.

    Args:
        channels, eps, affine, dtype, device: see `ComplexGroupNorm`.
    """

    def __init__(
        self,
        channels: int,
        eps: float = EPS,
        affine: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(channels, channels, eps, affine, **options)


class ComplexLayerNorm(ComplexGroupNorm):
    """Complex layer normalisation: all channels of an example are one group.

    Each channel has its own γ and β.

    Args:
        channels, eps, affine, dtype, device: see `ComplexGroupNorm`.
    """

    def __init__(
        self,
        channels: int,
        eps: float = EPS,
        affine: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(1, channels, eps, affine, **options)


def normalise(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """Return γ·ŷ + β for complex x [B, C, *] as `ComplexGroupNorm` does; ŷ without γ and β."""
    channels_end = channels_last(x).movedim(1, -1)  # [B, *, C], a view
    examples, channels, *sizes = x.shape
    positions = channels_end.reshape(examples, prod(sizes), channels)
    normalised, *_ = _Normalise.apply(positions, weight, bias, groups, eps)
    return normalised.view(channels_end.shape).movedim(-1, 1)


def per_sample_norm(
    kind: str | None,
    channels: int,
    dtype: torch.dtype,
) -> list[nn.Module]:
    """Return the norm layer that `model.normalisation` names, in a list.

    Args:
        kind: "group" for 16 groups, or the largest smaller number that divides the channels.
            "instance" for one group per channel. None for no norm: the list is empty.
        channels: number of channels.
        dtype: data type of the network's weights. The norm is complex if it is complex.

    Raises:
        UserError: there is no norm with this name.
    """
    if kind is None:
        return []
    if kind not in ("group", "instance"):
        raise unknown("model.normalisation", kind, ["group", "instance", "null"])
    groups = channels if kind == "instance" else largest_divisor(channels, MAX_GROUPS)
    norm = ComplexGroupNorm if dtype.is_complex else nn.GroupNorm
    return [norm(groups, channels, dtype=dtype)]


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is not above a limit."""
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)


# ------------------------------------------------------------------------------------- internals

# Shapes: x, c and g are [B, T, C] with T positions. Statistics have one number per group, [B, G].


class _Normalise(torch.autograd.Function):
    """Return γ·ŷ + β, and the mean, h and p of the groups, which are kept for the backward pass."""

    generate_vmap_rule = True  # for `torch.func`'s vmap(grad), which computes the reference

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        c, mean, h, p = _moments(x, groups)
        root = _inverse_root(h, p, eps)
        along = _to_channels(root.along, x)
        across = _to_channels(root.across, x)
        if weight is not None:
            along, across = along * weight, across * weight
        constant = x.new_zeros(()) if bias is None else bias
        y = torch.addcmul(constant, c, along)
        return torch.addcmul(y, _conj(c), across), mean, h, p

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Any, ...],
        output: tuple[Tensor, ...],
    ) -> None:
        x, weight, _, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    def backward(
        ctx: Any,
        g: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, h, p = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        x_gradient = weight_gradient = bias_gradient = None
        sum_g = _sum_positions(g)
        if needs_bias:
            bias_gradient = sum_g.sum(dim=0)
        if not needs_x and not needs_weight:
            return None, None, bias_gradient, None, None
        root = _inverse_root(h, p, ctx.eps)
        along = _to_channels(root.along, x)
        across = _to_channels(root.across, x)
        c = x - _to_channels(mean, x)
        c_conj = _conj(c)
        sum_gc = _sum_positions(g * c)
        sum_gc_conj = _sum_positions(g * c_conj)
        if needs_weight:  # Σ g·conj(ŷ)
            along_part = along[:, 0] * sum_gc_conj
            across_part = across[:, 0].conj() * sum_gc
            weight_gradient = (along_part + across_part).sum(dim=0)
        if needs_x:
            groups = h.shape[1]
            weight_conj = x.new_ones(()) if weight is None else weight.conj()
            sums = [weight_conj * sum_ for sum_ in (sum_g, sum_gc, sum_gc_conj)]
            sums_of_groups = torch.stack([_sum_channels(sum_, groups) for sum_ in sums])
            entries = g.shape[1] * g.shape[2] // groups
            coefficients = _through_moments(h, p, root, ctx.eps, sums_of_groups, entries)
            constant, of_c, of_c_conj = [_to_channels(part, x) for part in coefficients]
            x_gradient = torch.addcmul(constant, c, of_c)
            x_gradient = torch.addcmul(x_gradient, c_conj, of_c_conj)
            x_gradient = torch.addcmul(x_gradient, g, along * weight_conj)
            x_gradient = torch.addcmul(x_gradient, _conj(g), across * weight_conj.conj())
        return x_gradient, weight_gradient, bias_gradient, None, None


class _Root(NamedTuple):
    """The inverse square root of a covariance, [B, G] in float64.

    It maps c to ŷ = along·c + across·c̄. The derivatives also use s and k = 1/(2st).
    """

    along: Tensor
    across: Tensor
    k: Tensor
    s: Tensor


def _inverse_root(
    h: Tensor,
    p: Tensor,
    eps: float,
) -> _Root:
    """Return the inverse square root of a covariance, with eps added to its eigenvalues."""
    p_square = p.real.square() + p.imag.square()
    # |p|/2 is at most h, but rounding may make the difference of their squares negative.
    determinant = (h.square() - p_square / 4).clamp(min=0)
    s = (determinant + eps * (2 * h + eps)).sqrt()  # s² = (h + eps)² − |p|²/4
    t = (2 * (h + eps + s)).sqrt()
    k = 1 / (2 * s * t)
    return _Root(t.square() * k, -p * k, k, s)


def _moments(
    x: Tensor,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return c = x − mean, each group's mean, h = E|c|²/2 and p = E c².

    h and p are in float64. E divides by one less than the number of entries, as `torch.cov` does.
    """
    entries = x.shape[1] * x.shape[2] // groups
    mean = _sum_channels(_sum_positions(x), groups) / max(1, entries)
    c = x - _to_channels(mean, x)
    parts = torch.view_as_real(c)
    divisor = max(1, entries - 1)
    squares = parts.square().sum(dim=1).double()
    products = (parts[..., 0] * parts[..., 1]).sum(dim=1).double()
    covariance = _sum_channels(products, groups) / divisor
    variances = _sum_channels(squares, groups) / divisor  # [B, G, 2]
    re, im = variances.unbind(2)
    rounding = ROUNDING * torch.finfo(x.dtype).eps
    h = (0.5 + 0.5 * rounding) * (re + im)
    return c, mean, h, torch.complex(re - im, 2 * covariance)


def _through_moments(
    h: Tensor,
    p: Tensor,
    root: _Root,
    eps: float,
    sums: Tensor,
    entries: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x through the mean, h and p of its group.

    Args:
        h, p, root, eps: see `_inverse_root`.
        sums: Σ γ̄g, Σ γ̄g·c and Σ γ̄g·c̄ over each group, [3, B, G].
        entries: number of entries of a group.

    Returns:
        The coefficients of the gradient constant + of_c·c + of_c_conj·c̄, [B, G] each.
    """
    sum_g, sum_gc, sum_gc_conj = sums.to(p.dtype)
    along, across, k, s = root
    # With α = Re Σ γ̄g·c̄ and σ = Σ γ̄g·c, the loss changes by dL = α·dA + Re(conj(σ)·dB). Because
    # A = t²k and B = −pk, this is dL = u·dh + w·ds − k·Re(conj(σ)·dp), where
    # ds = ((h + eps)·dh − Re(p̄·dp)/4)/s.
    alpha, sigma = sum_gc_conj.real, sum_gc
    k_derivative = along * alpha - k * (sigma.conj() * p).real  # k·dL/dk
    u = 2 * k * alpha - k_derivative / (2 * (h + eps + s))
    w = u - k_derivative / s
    scale = 1 / max(1, entries - 1)
    of_c = scale * (u + w * (h + eps) / s)  # because dh = E Re(c̄·dc)
    of_c_conj = scale * (-2 * k * sigma - w * p / (2 * s))  # because dp = 2·E c·dc
    constant = -(along * sum_g + across * sum_g.conj()) / max(1, entries)
    return constant, of_c, of_c_conj


def _conj(z: Tensor) -> Tensor:
    """Return z̄ in memory of its own. `conj_physical` would do so, but has no batching rule."""
    return z.conj().resolve_conj()


def _sum_positions(z: Tensor) -> Tensor:
    """Sum over positions, [B, T, C] -> [B, C], as real numbers, because complex sums are slow."""
    reals = torch.view_as_real(z.resolve_conj())
    return torch.view_as_complex(reals.sum(dim=1))


def _sum_channels(values: Tensor, groups: int) -> Tensor:
    """Sum over the channels of each group, [B, C, ...] -> [B, G, ...]."""
    return values.unflatten(1, (groups, -1)).sum(dim=2)


def _to_channels(statistic: Tensor, x: Tensor) -> Tensor:
    """Repeat a group's statistic for its channels, [B, G] -> [B, 1, C], in the precision of x."""
    channels_per_group = x.shape[2] // statistic.shape[1]
    repeated = statistic.to(x.dtype).unsqueeze(2).expand(-1, -1, channels_per_group)
    return repeated.flatten(1).unsqueeze(1)
