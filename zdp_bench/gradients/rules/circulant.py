"""Block-circulant layers, and per-sample correlations by their spectra, of which they are made.

The weight gradients of a convolution and of a circulant layer are Σ_t g[o, t]·x[i, t + lag], whose
spectrum conj(ĝ)·x̂ is an outer product of channels at each frequency. By Parseval the norm,

    ‖g ⋆ x‖² = 1/N Σ_k (Σ_o |ĝ[o, k]|²)(Σ_i |x̂[i, k]|²),

needs no product, and a weighted sum over examples is one matrix product per frequency. Signals are
real, so half of the frequencies are enough.
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
    """[B, n]: norms by Parseval. [B, *, n]: the correlations of all positions are summed."""
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
        own_x = x[start:stop].flatten(0, 1)  # [b·T, in]
        own_g = g[start:stop].flatten(0, 1)
        correlation = correlate(layer, own_x, own_g)
        of_positions = correlation.per_sample(0, len(own_x))
        return of_positions.unflatten(0, (-1, positions)).sum(dim=1)

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
    """Correlate x and g by blocks: lag m of block (p, q) is the gradient of w[p, q, m]."""
    block = layer.block
    return Correlation(in_blocks(x, block), in_blocks(g, block), (block,))


# ------------------------------------------------------------------ correlations by their spectra

# Spectra of at most so many bytes per layer are kept between norm and sum; larger ones are computed
# again, a few examples at a time.
SPECTRA_BYTES = 64 * 2**20
# Transforms of at most so many points are matrix products. Measured: half the time of the FFT at 24
# and 60 points, the same at 128.
SHORT = 64
# Squares of so many channels are added one after the other: their rounding is within `SAFETY`.
CHANNELS = 128


@dataclass(frozen=True)
class Correlation:
    """The circular correlation g ⋆ x of every example."""

    x: Tensor  # [B, I, *s], real
    g: Tensor  # [B, O, *t], real
    sizes: tuple[int, ...]  # of the transforms; from s + t − 1 on it is the linear correlation

    def gradient(self) -> LayerGradient:
        """Return the correlations as the per-sample gradients of a parameter."""
        return LayerGradient(
            self.per_sample,
            self.weighted_sum,
            squared_norms=self.squared_norms,
            summands=self.summands,
        )

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ ⋆ xᵢ‖² over all channels and lags, [B] in float64."""
        twice = multiplicity(self.sizes[-1], self.x.device).unsqueeze(-1)
        parts = []
        for x_hat, g_hat in self._spectra:
            power = _power(x_hat) * _power(g_hat)  # [*half, b]
            whole_power = (power * twice).flatten(0, -2)
            parts.append(whole_power.sum(dim=0, dtype=torch.float64))
        return torch.cat(parts) / prod(self.sizes)

    def summands(self) -> Summands:
        """`weighted_sum` adds the very spectra that are measured, but for the inverse transform."""
        return Summands(self.squared_norms().sqrt(), 1)

    def per_sample(self, start: int, stop: int) -> Tensor:
        """Return g ⋆ x of these examples, [stop − start, O, I, *sizes]."""
        part = Correlation(self.x[start:stop], self.g[start:stop], self.sizes)
        signals = []
        for x_hat, g_hat in part._spectra:
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
            own_factors = factors[start:stop].to(self.x.dtype)
            start = stop
            # x̂ usually has fewer channels than ĝ
            weighted = flush_subnormals(x_hat * own_factors)
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
        """x̂ [*half, I, b] and ĝ [*half, O, b], not normalised, a few examples at a time."""
        spectra = _Spectra(self)
        if spectra.at_once < len(self.x):
            return spectra
        return list(spectra)


@dataclass(frozen=True)
class _Spectra:
    """The spectra of a correlation, computed again at each iteration.

    Examples come last, so that transforms, powers and products run along them. Measured: products
    six times as fast as with examples first, and no transform slower.
    """

    of: Correlation

    @property
    def at_once(self) -> int:
        """How many examples' spectra are held at a time."""
        x, g = self.of.x, self.of.g
        channels = x.shape[1] + g.shape[1]
        numbers = 2 * channels * prod(half(self.of.sizes))  # real ones, of an example
        most = SPECTRA_BYTES * device_scale(x, GPU_SCALE // 4)
        return max(1, most // (numbers * x.element_size()))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x_pieces = self.of.x.split(self.at_once)
        g_pieces = self.of.g.split(self.at_once)
        for x, g in zip(x_pieces, g_pieces, strict=True):
            x_hat = _half_spectrum(x, self.of.sizes)
            g_hat = _half_spectrum(g, self.of.sizes)
            yield x_hat, g_hat


def _half_spectrum(signal: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Transform [b, C, *s] -> [*half, C, b], zero-padded to `sizes`, one dimension at a time."""
    channels_and_examples_last = (*range(2, signal.dim()), 1, 0)
    spectrum = signal.permute(channels_and_examples_last).contiguous()
    last = len(sizes) - 1
    for dim, size in reversed(list(enumerate(sizes))):
        if size <= SHORT:
            numbers = spectrum.to(signal.dtype.to_complex())
            spectrum = _by_matrix(numbers, dim, size, real=dim == last)
        else:
            transform = torch.fft.rfft if dim == last else torch.fft.fft
            spectrum = transform(spectrum, n=size, dim=dim).contiguous()
    return spectrum


def _by_matrix(
    signal: Tensor,
    dim: int,
    size: int,
    real: bool,
) -> Tensor:
    """Transform `dim`, zero-padded to `size`, by a product; half of the frequencies if `real`."""
    before = signal.shape[:dim]
    length = signal.shape[dim]
    after = signal.shape[dim + 1 :]
    matrix = _fourier(size, length, real, signal.dtype, signal.device)  # [k, s]
    product = matrix @ signal.view(prod(before), length, prod(after))
    return product.view(*before, len(matrix), *after)


@cache
def _fourier(
    size: int,
    times: int,
    real: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return exp(−2πi·k·t / size) of all frequencies k and the first `times` times t."""
    frequencies = torch.arange(size // 2 + 1 if real else size)
    # Whole numbers below `size`: no large angle is rounded.
    turns = torch.outer(frequencies, torch.arange(times)) % size
    angles = turns.double() * (-2 * math.pi / size)
    matrix = torch.polar(torch.ones_like(angles), angles)
    return matrix.to(device, dtype)


def _power(z: Tensor) -> Tensor:
    """Return Σ over channels of |z|²: [*, C, b] -> [*, b]."""
    reals = torch.view_as_real(z).flatten(-2)
    parts = []
    for channels in reals.split(CHANNELS, dim=-2):
        power = channels.select(-2, 0).square()
        for channel in channels.unbind(-2)[1:]:
            power.addcmul_(channel, channel)  # no square is written to memory
        parts.append(power)
    power = reduce(torch.add, parts)
    return power[..., ::2] + power[..., 1::2]


def half(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a real signal's spectrum: the last dimension up to Nyquist."""
    return (*sizes[:-1], sizes[-1] // 2 + 1)


@cache
def multiplicity(size: int, device: torch.device) -> Tensor:
    """Return how often each frequency of the half spectrum is in the whole one: once or twice.

    Made once: writing a number into a tensor on a GPU waits for it.
    """
    twice = torch.full((size // 2 + 1,), 2.0, device=device)
    twice[0] = 1.0
    if size % 2 == 0:
        twice[-1] = 1.0
    return twice
