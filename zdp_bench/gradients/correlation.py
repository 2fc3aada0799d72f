"""Per-sample correlations of a layer's input with its output gradient, in the Fourier domain and never formed.

A convolution's weight gradient and a circulant layer's are both Σ_t g[o, t]·x[i, t + lag]: conj(ĝ)·x̂, an outer product of
channels at each frequency. By Parseval its norm needs no product,

    ‖g ⋆ x‖² = 1/N Σ_k (Σ_o |ĝ[o, k]|²)(Σ_i |x̂[i, k]|²),

and a weighted sum over records is one matrix product a frequency. Signals are real, so half of the frequencies tell all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

# Spectra of inputs and output gradients of one layer are kept between norm and sum where they take so much; else made again.
SPECTRA_BYTES = 64 * 2**20


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
        twice = multiplicity(self.sizes[-1], self.x.device)
        parts = []
        for x_hat, g_hat in self._spectra:
            power = _power(x_hat) * _power(g_hat)  # [b, *half]
            parts.append((power * twice).flatten(1).sum(dim=1, dtype=torch.float64))
        return torch.cat(parts) / prod(self.sizes)

    def rows(self, start: int, stop: int) -> Tensor:
        """g ⋆ x of some records, formed: [stop − start, O, I, *sizes]."""
        part = Correlation(self.x[start:stop], self.g[start:stop], self.sizes)
        return torch.cat([self._signal(g_hat.conj().unsqueeze(2) * x_hat.unsqueeze(1)) for x_hat, g_hat in part._spectra])

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σᵢ cᵢ·(gᵢ ⋆ xᵢ), [O, I, *sizes]."""
        total: Tensor | None = None
        start = 0
        for x_hat, g_hat in self._spectra:
            weights = factors[start : start + len(x_hat)].to(self.x.dtype)
            start += len(x_hat)
            weighted = (x_hat.flatten(2) * weights.view(-1, 1, 1)).conj()  # the fewer channels, as a rule
            product = torch.einsum("bok,bik->oik", g_hat.flatten(2), weighted)
            total = product if total is None else total.add_(product)
        assert total is not None
        return self._signal(total.conj().unflatten(2, half(self.sizes)))

    def _signal(self, half_spectrum: Tensor) -> Tensor:
        return torch.fft.irfftn(half_spectrum, s=self.sizes, dim=tuple(range(-len(self.sizes), 0)))

    @cached_property
    def _spectra(self) -> Iterable[tuple[Tensor, Tensor]]:
        """x̂ [b, I, *half] and ĝ [b, O, *half], not normalised, a few records at a time."""
        made = _Spectra(self)
        return made if made.records_at_once < len(self.x) else list(made)


@dataclass(frozen=True)
class _Spectra:
    """The spectra of a correlation, made anew each time one goes through them."""

    of: Correlation

    @property
    def records_at_once(self) -> int:
        x, g, sizes = self.of.x, self.of.g, self.of.sizes
        return max(1, SPECTRA_BYTES // ((x.shape[1] + g.shape[1]) * prod(half(sizes)) * 2 * x.element_size()))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        sizes, dims = self.of.sizes, tuple(range(2, 2 + len(self.of.sizes)))
        for x, g in zip(self.of.x.split(self.records_at_once), self.of.g.split(self.records_at_once), strict=True):
            yield torch.fft.rfftn(x, s=sizes, dim=dims), torch.fft.rfftn(g, s=sizes, dim=dims)


def _power(z: Tensor) -> Tensor:
    """Σ over channels of |z|²: [b, C, *] -> [b, *]."""
    return torch.view_as_real(z).square().sum(dim=1).sum(dim=-1)  # channels first: they are the longer stride


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
