"""Per-sample correlations of a layer's input with its output gradient, in the Fourier domain and never formed.

A convolution's weight gradient and a circulant layer's are both Σ_t g[o, t]·x[i, t + lag]: conj(ĝ)·x̂, an outer product of
channels at each frequency. By Parseval its norm needs no product,

    ‖g ⋆ x‖² = 1/N Σ_k (Σ_o |ĝ[o, k]|²)(Σ_i |x̂[i, k]|²),

and a weighted sum over records is one matrix product a frequency. Signals are real, so half of the frequencies tell all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import torch
from torch import Tensor

from zdp_bench.gradients.clipping import flushed

# Spectra of inputs and output gradients of one layer are kept between norm and sum where they take so much; else made again.
SPECTRA_BYTES = 64 * 2**20
# A transform of at most so many points is a matrix product: seen, half the time of the FFT at 24 and 60 points, equal at 128.
SHORT = 64


@dataclass(frozen=True)
class Correlation:
    """g ⋆ x for every record.

    Attributes:
        x: [B, I, *s], real.
        g: [B, O, *t], real.
        sizes: lengths N of the transforms. Circular correlation at these lengths; s + t − 1 or more makes it the linear one.
    """

    x: Tensor
    g: Tensor
    sizes: tuple[int, ...]

    def squared_norms(self) -> Tensor:
        """‖gᵢ ⋆ xᵢ‖² over all channels and lags, [B] in float64."""
        twice = multiplicity(self.sizes[-1], self.x.device).unsqueeze(-1)
        parts = []
        for x_hat, g_hat in self._spectra:
            power = _power(x_hat) * _power(g_hat)  # [*half, b]
            parts.append((power * twice).flatten(0, -2).sum(dim=0, dtype=torch.float64))
        return torch.cat(parts) / prod(self.sizes)

    def rows(self, start: int, stop: int) -> Tensor:
        """g ⋆ x of some records, formed: [stop − start, O, I, *sizes]."""
        part = Correlation(self.x[start:stop], self.g[start:stop], self.sizes)
        products = (
            g_hat.conj().unsqueeze(-2) * x_hat.unsqueeze(-3) for x_hat, g_hat in part._spectra
        )  # [*half, O, I, b]
        return torch.cat(
            [self._signal(product.movedim((-1, -3, -2), (0, 1, 2))) for product in products]
        )

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σᵢ cᵢ·(gᵢ ⋆ xᵢ), [O, I, *sizes]."""
        total: Tensor | None = None
        start = 0
        for x_hat, g_hat in self._spectra:
            stop = start + x_hat.shape[-1]
            weighted = flushed(
                x_hat * factors[start:stop].to(self.x.dtype)
            ).conj()  # the fewer channels, as a rule
            start = stop
            product = g_hat @ weighted.mT  # [*half, O, I]
            total = product if total is None else total.add_(product)
        assert total is not None
        return self._signal(total.conj().movedim((-2, -1), (0, 1)))

    def _signal(self, half_spectrum: Tensor) -> Tensor:
        return torch.fft.irfftn(half_spectrum, s=self.sizes, dim=tuple(range(-len(self.sizes), 0)))

    @cached_property
    def _spectra(self) -> Iterable[tuple[Tensor, Tensor]]:
        """x̂ [*half, I, b] and ĝ [*half, O, b], not normalised, a few records at a time."""
        made = _Spectra(self)
        return made if made.records_at_once < len(self.x) else list(made)


@dataclass(frozen=True)
class _Spectra:
    """The spectra of a correlation, made anew each time one goes through them.

    Frequencies first and records last: transforms, powers and products then all run along the records (seen: the product over
    records six times as fast as with records first, and no transform slower).
    """

    of: Correlation

    @property
    def records_at_once(self) -> int:
        x, g, sizes = self.of.x, self.of.g, self.of.sizes
        return max(
            1,
            SPECTRA_BYTES // ((x.shape[1] + g.shape[1]) * prod(half(sizes)) * 2 * x.element_size()),
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, g in zip(
            self.of.x.split(self.records_at_once),
            self.of.g.split(self.records_at_once),
            strict=True,
        ):
            yield _half_spectrum(x, self.of.sizes), _half_spectrum(g, self.of.sizes)


def _half_spectrum(signal: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """[b, C, *s] -> [*half, C, b], zero-padded to `sizes`; one dimension after the other, so no row of zeros is transformed."""
    spectrum = signal.permute(*range(2, signal.dim()), 1, 0).contiguous()
    last = len(sizes) - 1
    for dim in reversed(range(len(sizes))):
        if sizes[dim] <= SHORT:
            spectrum = _by_matrix(
                spectrum.to(signal.dtype.to_complex()), dim, sizes[dim], real=dim == last
            )
        else:
            transform = torch.fft.rfft if dim == last else torch.fft.fft
            spectrum = transform(
                spectrum, n=sizes[dim], dim=dim
            ).contiguous()  # torch leaves the frequencies side by side
    return spectrum


def _by_matrix(signal: Tensor, dim: int, size: int, real: bool) -> Tensor:
    """A discrete Fourier transform of `dim`, zero-padded to `size`, as a product; half of the frequencies where it is `real`."""
    before, given, after = signal.shape[:dim], signal.shape[dim], signal.shape[dim + 1 :]
    matrix = _fourier(size, given, real, signal.dtype, signal.device)  # [k, s]
    return (matrix @ signal.view(prod(before), given, prod(after))).view(
        *before, len(matrix), *after
    )


@cache
def _fourier(size: int, given: int, real: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """exp(−2πi·k·t / size) of every frequency k and the first `given` times t."""
    frequencies = torch.arange(size // 2 + 1 if real else size)
    turns = (
        torch.outer(frequencies, torch.arange(given)) % size
    ).double()  # whole numbers: no large angle is rounded
    return torch.polar(torch.ones_like(turns), turns * (-2 * math.pi / size)).to(device, dtype)


def _power(z: Tensor) -> Tensor:
    """Σ over channels of |z|²: [*, C, b] -> [*, b]."""
    squares = (
        torch.view_as_real(z).flatten(-2).square().sum(dim=-2)
    )  # channels first: they are the longer stride
    return squares.unflatten(-1, (-1, 2)).sum(dim=-1)


def half(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The frequencies that a real signal's spectrum needs: the last dimension up to the Nyquist frequency."""
    return (*sizes[:-1], sizes[-1] // 2 + 1)


def multiplicity(size: int, device: torch.device) -> Tensor:
    """How often each frequency of a half spectrum's last dimension stands in the whole one: 1 for what mirrors itself."""
    twice = torch.full((size // 2 + 1,), 2.0, device=device)
    twice[0] = 1.0
    if size % 2 == 0:
        twice[-1] = 1.0
    return twice
