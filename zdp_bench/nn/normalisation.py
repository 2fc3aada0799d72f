"""Complex GroupNorm, InstanceNorm and LayerNorm (Riess et al. 2024, section 4).

A group of complex numbers is centred, then whitened: as pairs (Re, Im), multiplied by the inverse
square root of their covariance. For a symmetric 2×2 matrix it has a closed form without SVD.
In complex terms, with h = E|c|²/2 and p = E c² of the centred numbers c, whose covariance has the
eigenvalues h ± |p|/2:

    ŷ = A·c + B·c̄             A = t/(2s),  B = −p/(2st)
                              s² = (h + eps)² − |p|²/4,  t² = 2(h + eps + s)

The affine step γ·ŷ + β folds into the same two coefficients, and the backward pass has their form
again. So each is a few elementwise passes over channels-last memory, and only x and four numbers
for each group are kept between them.
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
# Units of rounding of the eigenvalues' mean, also added: a smaller eigenvalue is rounding itself.
ROUNDING = 4
GROUPS = 16  # the paper's


class ComplexGroupNorm(nn.Module):
    """γ·ŷ + β, ŷ the numbers of each group of channels, centred and whitened within one example.

    Shapes: complex [B, C, *] -> the same, channels-last in memory; * is any number of spatial
    dimensions, or none. `weight` is γ and `bias` is β, complex [C]: γ starts at (1 + i)/√2, which
    turns by 45° and has modulus 1, β at 0. So E|ŷ|² starts at 2.

    This is the paper's listing except for the closed form. Covariances divide by one less than
    there are numbers (torch.cov). `eps` is added to their eigenvalues, and so is 5e-7 of their mean
    in float32 (1e-15 in float64), because rounding would be amplified to full size if a group is on
    a line far from 0. For any group, values and gradients are finite, and Σ|ŷ|² is at most 2n.
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
        if channels % groups:
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
        """γ = (1 + i)/√2, β = 0."""
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
    """Every channel of an example is a group of its own."""

    def __init__(
        self,
        channels: int,
        eps: float = EPS,
        affine: bool = True,
        **where: Any,
    ) -> None:
        super().__init__(channels, channels, eps, affine, **where)


class ComplexLayerNorm(ComplexGroupNorm):
    """All channels and positions of an example are one group; each channel has its γ and β."""

    def __init__(
        self,
        channels: int,
        eps: float = EPS,
        affine: bool = True,
        **where: Any,
    ) -> None:
        super().__init__(1, channels, eps, affine, **where)


def normalise(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """γ·ŷ + β for complex x [B, C, *]; without weight and bias, ŷ. See `ComplexGroupNorm`."""
    channels_end = channels_last(x).movedim(1, -1)  # [B, *, C], a view
    examples, channels, *sizes = x.shape
    positions = channels_end.reshape(examples, prod(sizes), channels)
    normalised, *_ = _Normalise.apply(positions, weight, bias, groups, eps)
    return normalised.view(channels_end.shape).movedim(-1, 1)


def per_sample_norm(
    how: str | None,
    channels: int,
    dtype: torch.dtype,
) -> list[nn.Module]:
    """Return the norm that `model.normalisation` names, real or complex by dtype, as a list.

    group: 16 groups, or the most below that which divide the channels. instance: one each channel.
    None: the list is empty.

    Raises:
        UserError: no such norm.
    """
    if how is None:
        return []
    if how not in ("group", "instance"):
        raise unknown("model.normalisation", how, ["group", "instance", "null"])
    groups = channels if how == "instance" else largest_divisor(channels, GROUPS)
    norm = ComplexGroupNorm if dtype.is_complex else nn.GroupNorm
    return [norm(groups, channels, dtype=dtype)]


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


# -------------------------------------- inside: x, c, g [B, T, C]; one number for each group [B, G]


class _Normalise(torch.autograd.Function):
    """x -> γ·ŷ + β, and the mean, h and p of its groups, which backward reads again."""

    generate_vmap_rule = True  # so that torch.func's vmap(grad), the reference, goes through it

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
        to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        of_x = of_weight = of_bias = None
        sum_g = _over_positions(g)
        if to_bias:
            of_bias = sum_g.sum(dim=0)
        if not to_x and not to_weight:
            return None, None, of_bias, None, None
        root = _inverse_root(h, p, ctx.eps)
        along = _to_channels(root.along, x)
        across = _to_channels(root.across, x)
        c = x - _to_channels(mean, x)
        c_conj = _conj(c)
        sum_gc = _over_positions(g * c)
        sum_gc_conj = _over_positions(g * c_conj)
        if to_weight:  # Σ g·conj(ŷ)
            from_along = along[:, 0] * sum_gc_conj
            from_across = across[:, 0].conj() * sum_gc
            of_weight = (from_along + from_across).sum(dim=0)
        if to_x:
            groups = h.shape[1]
            back = x.new_ones(()) if weight is None else weight.conj()
            sums = [back * sum_ for sum_ in (sum_g, sum_gc, sum_gc_conj)]
            of_groups = torch.stack([_over_channels(sum_, groups) for sum_ in sums])
            numbers = g.shape[1] * g.shape[2] // groups
            gradient = _through_moments(h, p, root, ctx.eps, of_groups, numbers)
            constant, of_h, of_p = [_to_channels(part, x) for part in gradient]
            of_x = torch.addcmul(constant, c, of_h)
            of_x = torch.addcmul(of_x, c_conj, of_p)
            of_x = torch.addcmul(of_x, g, along * back)
            of_x = torch.addcmul(of_x, _conj(g), across * back.conj())
        return of_x, of_weight, of_bias, None, None


class _Root(NamedTuple):
    """ŷ = along·c + across·c̄, with k = 1/(2st) and s for the derivatives; [B, G] in float64."""

    along: Tensor
    across: Tensor
    k: Tensor
    s: Tensor


def _inverse_root(
    h: Tensor,
    p: Tensor,
    eps: float,
) -> _Root:
    """The inverse square root of a covariance, eps added to its eigenvalues."""
    # (h + eps)² − |p|²/4, with |p|/2 ≤ h whatever rounding made of them
    p_square = p.real.square() + p.imag.square()
    determinant = (h.square() - p_square / 4).clamp(min=0)
    s = (determinant + eps * (2 * h + eps)).sqrt()
    t = (2 * (h + eps + s)).sqrt()
    k = 1 / (2 * s * t)
    return _Root(t.square() * k, -p * k, k, s)


def _moments(
    x: Tensor,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (c = x − mean, each group's mean, h = E|c|²/2, p = E c²), the last two in float64.

    E divides as torch.cov does.
    """
    numbers = x.shape[1] * x.shape[2] // groups
    mean = _over_channels(_over_positions(x), groups) / max(1, numbers)
    c = x - _to_channels(mean, x)
    parts = torch.view_as_real(c)
    fewer = max(1, numbers - 1)
    squares = parts.square().sum(dim=1).double()
    products = (parts[..., 0] * parts[..., 1]).sum(dim=1).double()
    product = _over_channels(products, groups) / fewer
    mean_squares = _over_channels(squares, groups) / fewer
    re, im = mean_squares.unbind(2)  # of [B, G, (re, im)]
    rounding = ROUNDING * torch.finfo(x.dtype).eps
    h = (0.5 + 0.5 * rounding) * (re + im)
    return c, mean, h, torch.complex(re - im, 2 * product)


def _through_moments(
    h: Tensor,
    p: Tensor,
    root: _Root,
    eps: float,
    sums: Tensor,
    numbers: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient through a group's mean, h and p: constant + of_h·c + of_p·c̄.

    Args:
        sums: Σ γ̄g, Σ γ̄g·c and Σ γ̄g·c̄ over a group, [3, B, G].
        numbers: in a group.
    """
    sum_g, sum_gc, sum_gc_conj = sums.to(p.dtype)
    along, across, k, s = root
    # dL = α·dA + Re(conj(σ)·dB), with α = Re Σ γ̄g·c̄ and σ = Σ γ̄g·c. As A = t²k and B = −pk,
    # dL = u·dh + w·ds − k·Re(conj(σ)·dp), and ds = ((h + eps)·dh − Re(p̄·dp)/4)/s
    alpha, sigma = sum_gc_conj.real, sum_gc
    by_k = along * alpha - k * (sigma.conj() * p).real  # k·dL/dk
    u = 2 * k * alpha - by_k / (2 * (h + eps + s))
    w = u - by_k / s
    share = 1 / max(1, numbers - 1)
    of_h = share * (u + w * (h + eps) / s)  # dh = E Re(c̄·dc)
    of_p = share * (-2 * k * sigma - w * p / (2 * s))  # dp = 2·E c·dc
    constant = -(along * sum_g + across * sum_g.conj()) / max(1, numbers)
    return constant, of_h, of_p


def _conj(z: Tensor) -> Tensor:
    """z̄ as numbers in memory; `conj_physical` has no batching rule."""
    return z.conj().resolve_conj()


def _over_positions(z: Tensor) -> Tensor:
    """[B, T, C] -> [B, C], summed as reals: complex sums are slow."""
    reals = torch.view_as_real(z.resolve_conj())
    return torch.view_as_complex(reals.sum(dim=1))


def _over_channels(each: Tensor, groups: int) -> Tensor:
    """[B, C, ...] -> [B, G, ...], summed over the channels of each group."""
    return each.unflatten(1, (groups, -1)).sum(dim=2)


def _to_channels(of_group: Tensor, x: Tensor) -> Tensor:
    """Give each channel its group's number: [B, G] -> [B, 1, C], in the precision of x."""
    channels_of_group = x.shape[2] // of_group.shape[1]
    each = of_group.to(x.dtype).unsqueeze(2).expand(-1, -1, channels_of_group)
    return each.flatten(1).unsqueeze(1)
