"""The rule of block-circulant layers, and per-sample correlations in the Fourier domain.

The weight gradient of a convolution or of a circulant layer is the correlation
Σ_t g[o, t]·x[i, t + lag]. Its spectrum conj(ĝ)·x̂ is an outer product of channels at each frequency.
By Parseval's theorem, the norm

    ‖g ⋆ x‖² = 1/N Σ_k (Σ_o |ĝ[o, k]|²)(Σ_i |x̂[i, k]|²)

does not require this product, and a weighted sum over examples is one matrix product per frequency.
Signals are real, so half of the frequencies are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from math import prod

import torch
from torch import Tensor, nn

from zdp_bench.gradients.clipping import flush_subnormals
from zdp_bench.gradients.layer_gradient import (
    GPU_SCALE,
    LayerGradient,
    Summands,
    bound_summands,
    contract,
    device_scale,
)
from zdp_bench.gradients.rules import NoRule, rule
from zdp_bench.nn.circulant import CirculantLinear, in_blocks


@rule(CirculantLinear)
def circulant(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of a circulant layer.

    For inputs [B, n], norms follow from Parseval's theorem. For inputs [B, *, n], the correlations
    of all positions are formed and added up.
    """
    assert isinstance(layer, CirculantLinear)
    if x.is_complex():
        raise NoRule("a real circulant layer on complex numbers")
    if x.dim() == 2:
        weight = correlate(layer, x, g).gradient()
        return {"weight": weight, "bias": LayerGradient.from_gradients(g)}
    x = x.flatten(1, -2)  # [B, T, in]
    g = g.flatten(1, -2)  # [B, T, out]
    positions = x.shape[1]

    def per_sample(start: int, stop: int) -> Tensor:
        x_rows = x[start:stop].flatten(0, 1)  # [b·T, in]
        g_rows = g[start:stop].flatten(0, 1)  # [b·T, out]
        correlation = correlate(layer, x_rows, g_rows)
        gradients_of_rows = correlation.per_sample(0, len(x_rows))
        return gradients_of_rows.unflatten(0, (-1, positions)).sum(dim=1)

    weight = LayerGradient(
        per_sample,
        lambda factors: contract(per_sample(0, len(x)), factors),
        summands=lambda: bound_summands(g, x, positions, layer.block),
    )
    return {"weight": weight, "bias": LayerGradient.from_gradients(g.sum(dim=1))}


def correlate(
    layer: CirculantLinear,
    x: Tensor,
    g: Tensor,
) -> Correlation:
    """Return the correlation of x and g by blocks.

    Lag m of block (p, q) is the gradient of w[p, q, m].
    """
    block = layer.block
    return Correlation(in_blocks(x, block), in_blocks(g, block), (block,))


# ------------------------------------------------------------- correlations in the Fourier domain

# Memory for the spectra of a layer. If they fit, they are kept from the norms to the sum; otherwise
# they are computed twice, a few examples at a time.
SPECTRA_BYTES = 64 * 2**20
# Largest number of points of a transform that is computed as a matrix product. Measured: a product
# takes half the time of the FFT at 24 and 60 points, and the same time at 128.
MAX_MATRIX_POINTS = 64
# Number of channels whose squares are added up one after the other. The rounding errors of so few
# terms are covered by `clipping.SAFETY`.
CHANNELS_AT_ONCE = 128


@dataclass(frozen=True)
class Correlation:
    """The circular correlation g ⋆ x of each example.

    Attributes:
        x: real inputs, [B, I, *s].
        g: real output gradients, [B, O, *t].
        sizes: number of points of the transform of each dimension. If a size is at least s + t − 1,
            the circular correlation equals the linear one.
    """

    x: Tensor
    g: Tensor
    sizes: tuple[int, ...]

    def gradient(self) -> LayerGradient:
        """Return the correlations as the per-sample gradients of a parameter."""
        return LayerGradient(
            self.per_sample,
            self.weighted_sum,
            squared_norms=self.squared_norms,
            summands=self.summands,
        )

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ ⋆ xᵢ‖² over all channels and lags, [B] in float64.

        It is not too small by more than float32's rounding, even if squares underflow.
        """
        multiplicity = _multiplicity(self.sizes[-1], self.x.device).unsqueeze(-1)
        squares_of_chunks = []
        for x_hat, g_hat in self._spectra:
            power = _max_power(x_hat) * _max_power(g_hat)  # [*half, b]
            whole_power = (power * multiplicity).flatten(0, -2)
            squares_of_chunks.append(whole_power.sum(dim=0))
        return torch.cat(squares_of_chunks) / prod(self.sizes)

    def summands(self) -> Summands:
        """Return each example's spectrum as a single term.

        `weighted_sum` adds up the same spectra that `squared_norms` measures; only the inverse
        transform of the sum is not measured.
        """
        return Summands(self.squared_norms().sqrt(), 1)

    def per_sample(self, start: int, stop: int) -> Tensor:
        """Return g ⋆ x of examples start … stop − 1, [stop − start, O, I, *sizes]."""
        selected = Correlation(self.x[start:stop], self.g[start:stop], self.sizes)
        signals = []
        for x_hat, g_hat in selected._spectra:
            columns = g_hat.conj().unsqueeze(-2)
            rows = x_hat.unsqueeze(-3)
            spectra = (columns * rows).movedim((-1, -3, -2), (0, 1, 2))  # [b, O, I, *half]
            signals.append(self._signal(spectra))
        return torch.cat(signals)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return Σᵢ cᵢ·(gᵢ ⋆ xᵢ), [O, I, *sizes]."""
        total: Tensor | None = None
        start = 0
        for x_hat, g_hat in self._spectra:
            stop = start + x_hat.shape[-1]
            chunk_factors = factors[start:stop].to(self.x.dtype)
            start = stop
            # The factors are applied to x̂, which usually has fewer channels than ĝ.
            weighted = flush_subnormals(x_hat * chunk_factors)
            product = g_hat @ weighted.conj().mT  # [*half, O, I]
            total = product if total is None else total.add_(product)
        assert total is not None
        spectrum = total.conj().movedim((-2, -1), (0, 1))
        return self._signal(spectrum)

    def _signal(self, half_spectrum: Tensor) -> Tensor:
        """Return the real signal [..., *sizes] of the spectrum [..., *half]."""
        dims = range(-len(self.sizes), 0)
        return torch.fft.irfftn(half_spectrum, s=self.sizes, dim=tuple(dims))

    @cached_property
    def _spectra(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The spectra x̂ [*half, I, b] and ĝ [*half, O, b], without normalisation, in chunks.

        They are kept if all examples fit in one chunk.
        """
        spectra = _Spectra(self)
        if spectra.chunk < len(self.x):
            return spectra
        return list(spectra)


@dataclass(frozen=True)
class _Spectra:
    """The spectra of a correlation in chunks of examples, computed anew by each iteration.

    The examples are in the last dimension, so that transforms, powers and products run along them.
    Measured: products are six times as fast as with the examples first, and no transform is slower.
    """

    correlation: Correlation

    @property
    def chunk(self) -> int:
        """Number of examples whose spectra are in memory at any one time."""
        x, g, sizes = self.correlation.x, self.correlation.g, self.correlation.sizes
        channels = x.shape[1] + g.shape[1]
        # The half spectrum of a real signal ends at Nyquist in its last dimension.
        complex_numbers = channels * prod(sizes[:-1]) * (sizes[-1] // 2 + 1)
        bytes_per_example = 2 * complex_numbers * x.element_size()
        max_bytes = SPECTRA_BYTES * device_scale(x, GPU_SCALE // 4)
        return max(1, max_bytes // bytes_per_example)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        sizes = self.correlation.sizes
        x_chunks = self.correlation.x.split(self.chunk)
        g_chunks = self.correlation.g.split(self.chunk)
        for x, g in zip(x_chunks, g_chunks, strict=True):
            yield _half_spectrum(x, sizes), _half_spectrum(g, sizes)


def _half_spectrum(signal: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the spectrum of signals zero-padded to `sizes`, [b, C, *s] -> [*half, C, b].

    One dimension is transformed at a time. The last comes first, because only it is transformed
    from real numbers, to half of the frequencies.
    """
    channels_and_examples_last = (*range(2, signal.dim()), 1, 0)
    spectrum = signal.permute(channels_and_examples_last).contiguous()
    last = len(sizes) - 1
    for dim, size in reversed(list(enumerate(sizes))):
        if size <= MAX_MATRIX_POINTS:
            complex_signal = spectrum.to(signal.dtype.to_complex())
            spectrum = _transform_by_matrix(complex_signal, dim, size, is_half=dim == last)
        else:
            transform = torch.fft.rfft if dim == last else torch.fft.fft
            spectrum = transform(spectrum, n=size, dim=dim).contiguous()
    return spectrum


def _transform_by_matrix(
    signal: Tensor,
    dim: int,
    size: int,
    is_half: bool,
) -> Tensor:
    """Transform one dimension, zero-padded to `size`, by a matrix product.

    Args:
        signal: complex signal [*, s, *].
        dim: the dimension of size s.
        size: number of points of the transform.
        is_half: return the frequencies 0 … size // 2 only.
    """
    before = signal.shape[:dim]
    length = signal.shape[dim]
    after = signal.shape[dim + 1 :]
    matrix = _fourier_matrix(size, length, is_half, signal.dtype, signal.device)  # [k, s]
    product = matrix @ signal.view(prod(before), length, prod(after))
    return product.view(*before, len(matrix), *after)


@cache
def _fourier_matrix(
    size: int,
    length: int,
    is_half: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return exp(−2πi·k·t / size) for frequencies k and times t < `length`, [k, t]."""
    frequencies = torch.arange(size // 2 + 1 if is_half else size)
    # k·t is reduced modulo `size` as an integer, which is exact; a large angle would be rounded.
    steps = torch.outer(frequencies, torch.arange(length)) % size
    angles = steps.double() * (-2 * math.pi / size)
    matrix = torch.polar(torch.ones_like(angles), angles)
    return matrix.to(device, dtype)


def _max_power(z: Tensor) -> Tensor:
    """Return Σ_c |z_c|² in float64, [*, C, b] -> [*, b], plus what underflow can have lost."""
    max_loss = 2 * z.shape[-2] * torch.finfo(z.dtype).tiny
    return _power(z).double() + max_loss


def _power(z: Tensor) -> Tensor:
    """Return Σ_c |z_c|² over channels c, [*, C, b] -> [*, b]."""
    reals = torch.view_as_real(z).flatten(-2)  # [*, C, 2·b], real and imaginary parts alternating
    powers = []
    for channels in reals.split(CHANNELS_AT_ONCE, dim=-2):
        power = channels.select(-2, 0).square()
        for channel in channels.unbind(-2)[1:]:
            power.addcmul_(channel, channel)  # does not write the square to memory
        powers.append(power)
    power = reduce(torch.add, powers)
    return power[..., ::2] + power[..., 1::2]


@cache
def _multiplicity(size: int, device: torch.device) -> Tensor:
    """Return how often each frequency of the half spectrum is in the whole one: once or twice.

    Cached because it takes several kernels on a GPU.
    """
    counts = torch.full((size // 2 + 1,), 2.0, device=device)
    counts[0] = 1.0
    if size % 2 == 0:  # the Nyquist frequency
        counts[-1] = 1.0
    return counts
