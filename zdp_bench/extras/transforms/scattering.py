"""The scattering transform of images and signals: Morlet wavelets, moduli and averages.

Bruna & Mallat 2013 (two dimensions) and Andén & Mallat 2014 (one dimension). In two dimensions,
filters, padding and the order of channels are those of kymatio (Andreux et al. 2020). In one, they
are not: all frequencies are spaced geometrically, where kymatio spaces the lowest ones linearly.
Nothing is subsampled between the layers, so that every coefficient is exactly as defined:

    S0 = x ⋆ φ,  S1[λ] = |x ⋆ ψ_λ| ⋆ φ,  S2[λ, μ] = ||x ⋆ ψ_λ| ⋆ ψ_μ| ⋆ φ,

each sampled every 2^J samples. φ is a Gaussian with standard deviation 0.8 · 2^(J−1). All wavelets
are divided by the same number, so that |φ̂|² + ½ Σ (|ψ̂_λ(ω)|² + |ψ̂_λ(−ω)|²) ≤ 1 at every ω. The
transform is then a contraction.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn

from zdp_bench.errors import UserError, require
from zdp_bench.extras.transforms.normalisation import Normalise, normalise_each
from zdp_bench.registry import register

Output = Literal["modulus", "complex"]
MAX_NUMBERS = 2**26  # of an example's channels, each with all wavelets: 512 MiB in complex64


def gaussian_1d(
    size: int,
    sigma: float,
    centre: float = 0.0,
) -> Tensor:
    """Return a periodic Gaussian with sum 1 around `centre`, float64 [size]."""
    x = torch.arange(size, dtype=torch.float64) - centre
    periods = torch.arange(-2, 3, dtype=torch.float64) * size
    distances = x + periods.unsqueeze(1)
    gaussian = torch.exp(-(distances**2) / (2 * sigma**2)).sum(dim=0)
    return gaussian / gaussian.sum()


def morlet_2d(
    height: int,
    width: int,
    sigma: float,
    theta: float,
    xi: float,
    slant: float,
) -> Tensor:
    """Return a periodic Morlet wavelet with mean 0 in space, complex128 [height, width].

    Args:
        height, width: the size in pixels.
        sigma: standard deviation of the envelope along the wave, in pixels.
        theta: direction of the wave in radians.
        xi: frequency in radians per pixel.
        slant: ratio of the standard deviations along and across the wave.
    """
    cos, sin = math.cos(theta), math.sin(theta)
    envelope = torch.zeros(height, width, dtype=torch.float64)
    wave = torch.zeros(height, width, dtype=torch.complex128)
    for down, across in product(range(-2, 3), repeat=2):
        y = torch.arange(height, dtype=torch.float64) + down * height
        x = torch.arange(width, dtype=torch.float64) + across * width
        y, x = y.unsqueeze(1), x.unsqueeze(0)
        along = y * cos + x * sin
        across_wave = x * cos - y * sin
        square = along**2 + (slant * across_wave) ** 2
        gaussian = torch.exp(-square / (2 * sigma**2))
        envelope += gaussian
        wave += gaussian * torch.exp(1j * xi * along)
    wave -= wave.sum() / envelope.sum() * envelope
    return wave * slant / (2 * math.pi * sigma**2)


def bank_2d(
    height: int,
    width: int,
    J: int,
    L: int,
) -> tuple[Tensor, list[int]]:
    """Return the Fourier transforms of J·L wavelets, float64 [J·L, height, width], and their j."""
    filters, scales = [], []
    for j in range(J):
        sigma = 0.8 * 2**j
        xi = 3 / 4 * math.pi / 2**j
        for turn in range(L):
            theta = (_unturned(L) - turn) * math.pi / L
            wavelet = morlet_2d(height, width, sigma, theta, xi, slant=4 / L)
            # The filter is Hermitian in space, so its transform is real.
            filters.append(torch.fft.fft2(wavelet).real)
            scales.append(j)
    return torch.stack(filters), scales


def _unturned(L: int) -> int:
    """Return the index of the direction θ = 0 among L directions."""
    return int(L - L / 2 - 1)


def bank_1d(
    size: int,
    J: int,
    Q: int,
) -> tuple[Tensor, list[int]]:
    """Return the Fourier transforms of Q wavelets per octave, float64 [J·Q, size], and their j.

    The transforms of two neighbours intersect at √½ of their height (Andén & Mallat 2014).
    """
    ratio = 2 ** (-1 / Q)  # of the frequencies of two neighbours
    relative_width = (1 - ratio) / (1 + ratio) / math.sqrt(math.log(2))
    highest = max(1 / (1 + 2 ** (3 / Q)), 0.35)
    filters, scales = [], []
    for k in range(J * Q):
        xi = highest * 2 ** (-k / Q)
        sigma = relative_width * xi
        bump = _periodic_bump(size, xi, sigma)
        bump_at_0 = _periodic_bump(size, 0.0, sigma)
        filters.append(bump - bump[0] / bump_at_0[0] * bump_at_0)
        scales.append(k // Q)
    return torch.stack(filters), scales


def _periodic_bump(
    size: int,
    centre: float,
    sigma: float,
) -> Tensor:
    """Return a periodic Gaussian with height 1 over the frequencies of a signal, float64 [size]."""
    frequencies = torch.fft.fftfreq(size, dtype=torch.float64)
    bumps = []
    for shift in range(-2, 3):
        distance = frequencies - centre + shift
        bumps.append(torch.exp(-(distance**2) / (2 * sigma**2)))
    return torch.stack(bumps).sum(dim=0)


def littlewood_paley(low: Tensor, bank: Tensor) -> Tensor:
    """Return the Littlewood-Paley sum |φ̂|² + ½ Σ (|ψ̂(ω)|² + |ψ̂(−ω)|²) at every frequency."""
    power = bank.square().sum(dim=0)
    axes = tuple(range(low.dim()))
    mirrored = power.flip(axes).roll((1,) * low.dim(), axes)
    return low.square() + (power + mirrored) / 2


def contract(low: Tensor, bank: Tensor) -> Tensor:
    """Return the wavelets divided by the smallest number that makes the transform a contraction."""
    wavelet_power = littlewood_paley(torch.zeros_like(low), bank)
    allowed_power = (1 - low.square()).clamp(min=1e-9)
    excess = (wavelet_power / allowed_power).max()
    return bank / excess.sqrt().clamp(min=1e-9)


def modulus_of(z: Tensor) -> Tensor:
    """Return |z|; on a CPU computed by NumPy, which is ten times as fast as PyTorch."""
    if z.device.type != "cpu":
        return z.abs()
    return torch.from_numpy(np.abs(z.numpy()))


@register("representation", "scattering")
class Scattering(nn.Module):
    """The scattering transform of images, or of signals with `dims=1`.

    Shapes: [B, (C,) *sides] -> [B, C · K, *coarse], with K coefficients at every 2^J-th sample.
    Complex examples are treated as two channels, real and imaginary part.

    Args:
        input_shape: shape of an example.
        dims: number of dimensions: 2 for images [(C,) H, W], 1 for signals [(C,) samples].
        J: log2 of the coarsest scale, and of the spacing of the output, in samples.
        L: number of directions of an image's wavelets, or wavelets per octave of a signal.
        order: largest number of consecutive wavelet transforms, from 0 to 2.
        output: 'modulus', or 'complex' for orders 0 and 1 before the modulus, for complex heads.
        normalise: normalises each example by its own statistics: over each group of channels
            ('group'), over all features ('layer'), or not at all ('none').
        groups: number of groups of channels for `normalise='group'`.
        mirror: if True, averages the coefficients of an image and its mirror image. They are then
            sampled at the centres of 2^J × 2^J squares, so that the mirror image has the same
            coefficients in another order, and need not be transformed.
    """

    version = 1
    first: Tensor
    second: Tensor
    phi: Tensor
    average_0: Tensor

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        dims: Annotated[int, Interval(ge=1, le=2)] = 2,
        J: Annotated[int, Interval(ge=1, le=12)] = 2,
        L: Annotated[int, Interval(ge=1, le=64)] = 8,
        order: Annotated[int, Interval(ge=0, le=2)] = 2,
        output: Output = "modulus",
        normalise: Normalise = "group",
        groups: int = 27,
        mirror: bool = False,
    ) -> None:
        super().__init__()
        if len(input_shape) not in (dims, dims + 1):
            raise UserError(
                f"representation=scattering: takes examples of {dims} dimensions, with or without "
                f"channels, but these are {list(input_shape)}; set representation.dims."
            )
        has_channels = len(input_shape) == dims + 1
        if dims == 1 and has_channels and input_shape[0] >= input_shape[1]:
            raise UserError(
                f"representation.dims=1: examples are {list(input_shape)}, but a signal has fewer "
                "channels than samples. If these are images, set representation.dims=2."
            )
        sides = input_shape[-dims:]
        step = 2**J
        rule = f"2^J must be less than the {min(sides)} samples of a side"
        require(min(sides) > step, "representation.J", J, rule)
        can_mirror = dims == 2 and output == "modulus" and sides[-1] % step == 0
        rule = f"needs dims=2, output=modulus and a width divisible by {step}"
        require(can_mirror or not mirror, "representation.mirror", mirror, rule)
        self.dims, self.order, self.output = dims, order, output
        self.normalise, self.groups = normalise, groups
        deviation = 0.8 * 2 ** (J - 1)
        padded = [side + 2 * step for side in sides]
        channels = input_shape[0] if has_channels else 1
        rule = (
            f"the {J * L:,} wavelets of {padded} samples in {channels:,} channels take more than "
            "512 MiB; lower J or L"
        )
        numbers = channels * J * L * math.prod(padded)
        require(numbers <= MAX_NUMBERS, "representation.L", L, rule)
        phi = self._make_wavelets(padded, deviation, J, L)
        self.register_buffer("phi", phi.float())
        self.mirrored = self._mirrored_channels(L) if mirror else None
        centre = (step - 1) / 2 if mirror else 0.0
        for axis, (side, size) in enumerate(zip(sides, padded, strict=True)):
            # Averaging and subsampling along an axis are one product with a matrix.
            places = torch.arange(step, step + side, step)
            average = gaussian_1d(size, deviation, -centre)
            rows = average[(places.unsqueeze(1) - torch.arange(size)) % size]
            self.register_buffer(f"average_{axis}", rows.float())
            self.register_buffer(f"places_{axis}", places)
            # The indices of reflection padding by 2^J samples.
            reflected = torch.arange(-step, side + step).abs()
            reflected = side - 1 - (side - 1 - reflected).abs()
            self.register_buffer(f"reflected_{axis}", reflected)

    def _make_wavelets(
        self,
        padded: list[int],
        deviation: float,
        J: int,
        L: int,
    ) -> Tensor:
        """Register the wavelets of both orders as buffers, and return φ̂, [*padded]."""
        transforms = [torch.fft.fft(gaussian_1d(size, deviation)).real for size in padded]
        phi = transforms[0]
        if self.dims == 2:
            phi = phi.unsqueeze(1) * transforms[1]
            first, scales = bank_2d(padded[0], padded[1], J, L)
            second, second_scales = first, scales
        else:
            first, scales = bank_1d(padded[0], J, L)
            second, second_scales = bank_1d(padded[0], J, 1)
        self.register_buffer("first", contract(phi, first).float())
        self.register_buffer("second", contract(phi, second).float())
        # For each first wavelet, the indices of the second wavelets that are wider.
        self.wider = [
            [number for number, second_scale in enumerate(second_scales) if second_scale > scale]
            for scale in scales
        ]
        return phi

    def forward(self, x: Tensor) -> Tensor:
        if x.is_complex():
            x = torch.view_as_real(x).movedim(-1, -1 - self.dims)
        sides = x.shape[x.dim() - self.dims :]
        x = x.reshape(len(x), -1, *sides).float()
        # Reflection padding by 2^J samples on every side: [B, C, *padded].
        x = self._select(x, "reflected")
        coefficients = torch.cat(self._compute_orders(x), dim=2)
        if self.mirrored is not None:
            mirrored = coefficients[:, :, self.mirrored].flip(-1)
            coefficients = (coefficients + mirrored) / 2
        return normalise_each(coefficients.flatten(1, 2), self.normalise, self.groups)

    def _compute_orders(self, x: Tensor) -> list[Tensor]:
        """Return the coefficients of x, [B, C, *padded], as a list of [B, C, K, *coarse]."""
        zeroth = self._average(x).unsqueeze(2)
        if self.output == "complex":
            zeroth = zeroth.to(torch.complex64)
        if self.order == 0:
            return [zeroth]
        axes = tuple(range(-self.dims, 0))
        spectrum = torch.fft.fftn(x, dim=axes)
        first_order, second_order = [], []
        for wavelet, wider in zip(self.first, self.wider, strict=True):
            band = torch.fft.ifftn(spectrum * wavelet, dim=axes)  # [B, C, *padded]
            if self.output == "complex":
                first_order.append(self._select(band, "places").unsqueeze(2))
                continue
            modulus = modulus_of(band)
            first_order.append(self._average(modulus).unsqueeze(2))
            if self.order == 2 and wider:
                inner = torch.fft.fftn(modulus, dim=axes).unsqueeze(2)
                inner_bands = torch.fft.ifftn(inner * self.second[wider], dim=axes)
                second_order.append(self._average(modulus_of(inner_bands)))
        return [zeroth, *first_order, *second_order]

    def _mirrored_channels(self, L: int) -> list[int]:
        """Return the index of the coefficient of the mirror image that each coefficient equals."""

        def mirror(wavelet: int) -> int:
            j, turn = divmod(wavelet, L)
            return j * L + (2 * _unturned(L) - turn) % L

        wavelets = range(len(self.wider))
        paths: list[tuple[int, ...]] = [()]
        if self.order >= 1:
            paths += [(first,) for first in wavelets]
        if self.order == 2:
            for first in wavelets:
                paths += [(first, second) for second in self.wider[first]]
        indices = {path: index for index, path in enumerate(paths)}
        return [indices[tuple(map(mirror, path))] for path in paths]

    def _average(self, x: Tensor) -> Tensor:
        """Return x ⋆ φ at every 2^J-th sample."""
        x = x @ getattr(self, f"average_{self.dims - 1}").T
        return self.average_0 @ x if self.dims == 2 else x

    def _select(self, x: Tensor, buffer: str) -> Tensor:
        """Select the indices in the buffer f'{buffer}_{axis}' along each axis of x."""
        for axis in range(self.dims):
            x = x.index_select(axis - self.dims, getattr(self, f"{buffer}_{axis}"))
        return x
