"""Per-sample correlations of a layer's input with its output gradient, in the Fourier domain and never formed.

A convolution's weight gradient and a circulant layer's are both Σ_t g[o, t]·x[i, t + lag]: conj(ĝ)·x̂, an outer product of
channels at each frequency. By Parseval its norm needs no product,

    ‖g ⋆ x‖² = 1/N Σ_k (Σ_o |ĝ[o, k]|²)(Σ_i |x̂[i, k]|²),

and a weighted sum over records is one matrix product a frequency. Signals are real, so half of the frequencies tell all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# Spectra of inputs and output gradients made at once; between norm and sum they are let go.
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
        for x_hat, g_hat in self._spectra():
            power = _power(x_hat).sum(dim=1) * _power(g_hat).sum(dim=1)  # [b, *half]
            parts.append((power * twice).flatten(1).sum(dim=1, dtype=torch.float64))
        return torch.cat(parts) / prod(self.sizes)

    def rows(self, start: int, stop: int) -> Tensor:
        """Half spectra of some records, formed: [stop − start, O, I, *half], not normalised."""
        part = Correlation(self.x[start:stop], self.g[start:stop], self.sizes)
        return torch.cat([g_hat.conj().unsqueeze(2) * x_hat.unsqueeze(1) for x_hat, g_hat in part._spectra()])

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σᵢ cᵢ·(gᵢ ⋆ xᵢ) as a half spectrum, [O, I, *half], not normalised."""
        total: Tensor | None = None
        start = 0
        for x_hat, g_hat in self._spectra():
            weights = factors[start : start + len(x_hat)].to(self.x.dtype)
            start += len(x_hat)
            weighted = g_hat.flatten(2).conj() * weights.view(-1, 1, 1)
            product = torch.bmm(weighted.permute(2, 1, 0), x_hat.flatten(2).permute(2, 0, 1))  # [K, O, I]
            total = product if total is None else total.add_(product)
        assert total is not None
        return total.permute(1, 2, 0).unflatten(2, half(self.sizes))

    def _spectra(self) -> Iterator[tuple[Tensor, Tensor]]:
        """x̂ [b, I, *half] and ĝ [b, O, *half], some records at a time."""
        a_record = (self.x.shape[1] + self.g.shape[1]) * prod(half(self.sizes)) * 2 * self.x.element_size()
        some = max(1, SPECTRA_BYTES // a_record)
        dims = tuple(range(2, 2 + len(self.sizes)))
        for x, g in zip(self.x.split(some), self.g.split(some), strict=True):
            yield torch.fft.rfftn(x, s=self.sizes, dim=dims), torch.fft.rfftn(g, s=self.sizes, dim=dims)


def _power(z: Tensor) -> Tensor:
    return torch.view_as_real(z).square().sum(dim=-1)


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


def signal(half_spectrum: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The real signal [..., *sizes] of a half spectrum that is not normalised."""
    return torch.fft.irfftn(half_spectrum, s=sizes, dim=tuple(range(-len(sizes), 0)))


def unitary_spectrum(half_spectrum: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The whole unitary spectrum [..., *sizes] of a real signal, from its half that is not normalised: F(−k) = conj F(k)."""
    dims = tuple(range(-len(sizes), -1))
    kept = half_spectrum[..., 1 : (sizes[-1] + 1) // 2].flip(-1)  # frequencies −(N−1)/2 … −1 of the last dimension
    for dim in dims:
        kept = kept.flip(dim).roll(1, dim)
    return torch.cat([half_spectrum, kept.conj()], dim=-1) / prod(sizes) ** 0.5
