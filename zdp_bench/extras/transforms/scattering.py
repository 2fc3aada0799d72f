"""The scattering transform: Morlet wavelets, moduli and averages, in one or two dimensions.

Bruna & Mallat 2013 (two dimensions), Andén & Mallat 2014 (one); filters, padding and order of
channels as in kymatio (Andreux et al. 2020), without subsampling between the layers, so that every
coefficient is the definition's:

    S0 = x ⋆ φ,  S1[λ] = |x ⋆ ψ_λ| ⋆ φ,  S2[λ, μ] = ||x ⋆ ψ_λ| ⋆ ψ_μ| ⋆ φ,  each every 2^J samples.

φ is a Gaussian of deviation 0.8 · 2^(J−1). The wavelets are divided by one number, so that
|φ̂|² + ½ Σ (|ψ̂_λ(ω)|² + |ψ̂_λ(−ω)|²) ≤ 1 at every ω: the transform is then a contraction.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn

from zdp_bench.errors import UserError, require
from zdp_bench.extras.transforms.normalisation import Normalise, normalise_each
from zdp_bench.registry import register

Output = Literal["modulus", "complex"]


def gaussian_1d(size: int, sigma: float, centre: float = 0.0) -> Tensor:
    """Return a periodic Gaussian of sum 1 around `centre`, [size] float64."""
    at = torch.arange(size, dtype=torch.float64) - centre
    shifts = torch.arange(-2, 3, dtype=torch.float64).unsqueeze(1) * size
    found = torch.exp(-((at + shifts) ** 2) / (2 * sigma**2)).sum(dim=0)
    return found / found.sum()


def morlet_2d(
    height: int, width: int, sigma: float, theta: float, xi: float, slant: float
) -> Tensor:
    """Return a Morlet wavelet in space, periodic and of mean 0: complex128 [height, width].

    Args:
        sigma: deviation along the wave, in pixels; across it, sigma / slant.
        theta: the wave's direction.
        xi: its frequency in radians a pixel.
    """
    cos, sin = math.cos(theta), math.sin(theta)
    envelope = torch.zeros(height, width, dtype=torch.float64)
    wave = torch.zeros(height, width, dtype=torch.complex128)
    for down in range(-2, 3):
        for across in range(-2, 3):
            rows = (torch.arange(height, dtype=torch.float64) + down * height).unsqueeze(1)
            columns = (torch.arange(width, dtype=torch.float64) + across * width).unsqueeze(0)
            along, beside = rows * cos + columns * sin, columns * cos - rows * sin
            one = torch.exp(-(along**2 + (slant * beside) ** 2) / (2 * sigma**2))
            envelope += one
            wave += one * torch.exp(1j * xi * along)
    wave -= wave.sum() / envelope.sum() * envelope
    return wave * slant / (2 * math.pi * sigma**2)


def bank_2d(height: int, width: int, J: int, L: int) -> tuple[Tensor, list[int]]:
    """Return the wavelets' Fourier transforms, float64 [J·L, height, width], and each one's j."""
    filters, scales = [], []
    for j in range(J):
        for turn in range(L):
            theta = (int(L - L / 2 - 1) - turn) * math.pi / L
            sigma, xi = 0.8 * 2**j, 3 / 4 * math.pi / 2**j
            # The filter is Hermitian in space, so its transform is real.
            filters.append(torch.fft.fft2(morlet_2d(height, width, sigma, theta, xi, 4 / L)).real)
            scales.append(j)
    return torch.stack(filters), scales


def bank_1d(size: int, J: int, Q: int) -> tuple[Tensor, list[int]]:
    """Return Q wavelets an octave over J octaves, made in Fourier: [J·Q, size], and each one's j.

    Neighbours meet where each is at √½ of its height (Andén & Mallat 2014).
    """
    at = torch.fft.fftfreq(size, dtype=torch.float64)
    narrow = (1 - 2 ** (-1 / Q)) / (1 + 2 ** (-1 / Q)) / math.sqrt(math.log(2))
    highest = max(1 / (1 + 2 ** (3 / Q)), 0.35)
    filters, scales = [], []
    for k in range(J * Q):
        xi = highest * 2 ** (-k / Q)
        sigma = narrow * xi

        def bump(centre: float, sigma: float = sigma) -> Tensor:
            shifted = [at - centre + shift for shift in range(-2, 3)]
            return torch.stack([torch.exp(-(s**2) / (2 * sigma**2)) for s in shifted]).sum(dim=0)

        filters.append(bump(xi) - bump(xi)[0] / bump(0.0)[0] * bump(0.0))
        scales.append(k // Q)
    return torch.stack(filters), scales


def littlewood_paley(low: Tensor, bank: Tensor) -> Tensor:
    """Return |φ̂|² + ½ Σ (|ψ̂(ω)|² + |ψ̂(−ω)|²) at every frequency."""
    power, dims = bank.square().sum(dim=0), tuple(range(low.dim()))
    mirrored = power.flip(dims).roll((1,) * low.dim(), dims)
    return low.square() + (power + mirrored) / 2


def contract(low: Tensor, bank: Tensor) -> Tensor:
    """Return the wavelets divided by the least number for which Littlewood-Paley is at most 1."""
    waves = littlewood_paley(torch.zeros_like(low), bank)
    left = (1 - low.square()).clamp(min=1e-9)
    return bank / (waves / left).max().sqrt().clamp(min=1e-9)


def modulus_of(z: Tensor) -> Tensor:
    """Return |z|; on a CPU by numpy, which is ten times as fast at it as torch."""
    return torch.from_numpy(np.abs(z.numpy())) if z.device.type == "cpu" else z.abs()


@register("representation", "scattering")
class Scattering(nn.Module):
    """The scattering transform of pictures, or of signals with `dims=1`.

    Shapes: [B, (C,) *sides] -> [B, C · K, *coarse]: K coefficients at every 2^J-th place. Complex
    examples come as two channels, real and imaginary part.

    Args:
        dims: 2 for pictures [(C,) H, W], 1 for signals [(C,) samples].
        J: the coarsest scale is 2^J samples, and so is the grid of what comes out.
        L: directions of a picture's wavelets; of a signal's, wavelets an octave.
        order: 0, 1 or 2: how many wavelets follow one another at most.
        output: modulus, or complex: orders 0 and 1 before the modulus, for complex heads.
        normalise: of one example by its own numbers: group (of channels), layer (all), or none.
        mirror: average the coefficients of a picture and its mirror image. They are taken at the
            centres of 2^J × 2^J squares, where those of the mirror image are a permutation.
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
                f"representation=scattering: takes examples of {dims} dimensions, with channels or "
                f"without, and these are {list(input_shape)}; set representation.dims."
            )
        if dims == 1 and len(input_shape) == 2 and input_shape[0] >= input_shape[1]:
            raise UserError(
                f"representation.dims=1: examples are {list(input_shape)}, and a signal has fewer "
                "channels than samples: rows of a picture are no channels. Set "
                "representation.dims=2."
            )
        sides = input_shape[-dims:]
        rule = f"2^J must be below the {min(sides)} samples of a side"
        require(min(sides) > 2**J, "representation.J", J, rule)
        mirrors = dims == 2 and output == "modulus" and sides[-1] % 2**J == 0
        rule = f"needs dims=2, output=modulus and a width divisible by {2**J}"
        require(mirrors or not mirror, "representation.mirror", mirror, rule)
        self.dims, self.order, self.output = dims, order, output
        self.normalise, self.groups = normalise, groups
        padded = tuple(side + 2 * 2**J for side in sides)
        low = 0.8 * 2 ** (J - 1)
        lows = [torch.fft.fft(gaussian_1d(size, low)).real for size in padded]
        phi = lows[0]
        if self.dims == 2:
            phi = phi.unsqueeze(1) * lows[1]
            first, scales = bank_2d(padded[0], padded[1], J, L)
            second, scales_2 = first, scales
        else:
            first, scales = bank_1d(padded[0], J, L)
            second, scales_2 = bank_1d(padded[0], J, 1)
        self.register_buffer("first", contract(phi, first).float())
        self.register_buffer("second", contract(phi, second).float())
        self.register_buffer("phi", phi.float())
        # Of each first wavelet, the second ones that are wider.
        self.wider = [[m for m, j in enumerate(scales_2) if j > of] for of in scales]
        self.mirrored = self._mirrored_channels(L) if mirror else None
        centre = (2**J - 1) / 2 if mirror else 0.0
        for axis, (side, size) in enumerate(zip(sides, padded, strict=True)):
            places = torch.arange(2**J, 2**J + side, 2**J)
            average = gaussian_1d(size, low, -centre)
            rows = average[(places.unsqueeze(1) - torch.arange(size)) % size]
            self.register_buffer(f"average_{axis}", rows.float())
            self.register_buffer(f"places_{axis}", places)
            reflected = torch.arange(-(2**J), side + 2**J).abs()
            reflected = side - 1 - (side - 1 - reflected).abs()
            self.register_buffer(f"reflected_{axis}", reflected)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_complex():
            x = torch.view_as_real(x).movedim(-1, -1 - self.dims)
        sides = x.shape[x.dim() - self.dims :]
        # continued by 2^J samples on every side, mirrored at the first and last: [B, C, *padded]
        x = self._select(x.reshape(len(x), -1, *sides).float(), "reflected")
        axes = tuple(range(-self.dims, 0))
        spectrum = torch.fft.fftn(x, dim=axes)
        orders: tuple[list[Tensor], ...] = ([self._average(x).unsqueeze(2)], [], [])
        for index, wider in enumerate(self.wider if self.order else ()):
            band = torch.fft.ifftn(spectrum * self.first[index], dim=axes)  # [B, C, *padded]
            if self.output == "complex":
                orders[1].append(self._select(band, "places").unsqueeze(2))
                continue
            modulus = modulus_of(band)
            orders[1].append(self._average(modulus).unsqueeze(2))
            if self.order == 2 and wider:
                inner = torch.fft.fftn(modulus, dim=axes).unsqueeze(2) * self.second[wider]
                orders[2].append(self._average(modulus_of(torch.fft.ifftn(inner, dim=axes))))
        found = [part for order in orders for part in order]
        if self.output == "complex":
            found[0] = found[0].to(torch.complex64)
        whole = torch.cat(found, dim=2)
        if self.mirrored is not None:
            whole = (whole + whole[:, :, self.mirrored].flip(-1)) / 2
        return normalise_each(whole.flatten(1, 2), self.normalise, self.groups)

    def _mirrored_channels(self, L: int) -> list[int]:
        """Return, of each coefficient, the one that the mirror image has in its place."""
        middle = int(L - L / 2 - 1)  # the turn whose θ is 0

        def mirror(wavelet: int) -> int:
            j, turn = divmod(wavelet, L)
            return j * L + (2 * middle - turn) % L

        paths: list[tuple[int, ...]] = [()]
        if self.order >= 1:
            paths += [(first,) for first in range(len(self.wider))]
        if self.order == 2:
            paths += [(first, m) for first, wider in enumerate(self.wider) for m in wider]
        return [paths.index(tuple(map(mirror, path))) for path in paths]

    def _average(self, x: Tensor) -> Tensor:
        """Return x ⋆ φ at every 2^J-th place."""
        x = x @ getattr(self, f"average_{self.dims - 1}").T
        return self.average_0 @ x if self.dims == 2 else x

    def _select(self, x: Tensor, places: str) -> Tensor:
        """Return x along each axis at the indices in the buffers `places`_{axis}."""
        for axis in range(self.dims):
            x = x.index_select(axis - self.dims, getattr(self, f"{places}_{axis}"))
        return x
