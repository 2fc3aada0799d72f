"""Gradients as unitary spectra, for the algorithms that bound and noise them there: which parameters have one, and the way back.

    kernel domain   the unitary FFT of the gradient itself, over a convolution's kernel or a circulant block. Its norm is the
                    gradient's, so clipping there is clipping here (GReDP, Theorem 1: F(V) of the gradient V).
    padded domain   the spectrum of the WHOLE correlation of output gradient and input, at the linear length input + output − 1,
                    of which the gradient is a few lags (Spectral-DP, and GReDP's eq. 15 at its word). The other lags are clipped
                    and noised with it and then cropped away: norms come out larger, about input / kernel times.

Bias, norm and dense weights have no spectrum and stay as they are; a layer's weight and bias are clipped jointly at C/√L.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from scipy.fft import next_fast_len
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients import Engine, clipped_sum, reference
from zdp_bench.gradients.clipping import Batch, Loss, groups, trainable
from zdp_bench.gradients.correlation import Correlation
from zdp_bench.gradients.rules import Rule, Share, kept
from zdp_bench.gradients.rules.circulant import correlation as circulant_correlation
from zdp_bench.nn.circulant import CirculantLinear


@dataclass(frozen=True)
class Spectrum:
    """One weight's gradient in the Fourier domain: unitary over the last `len(sizes)` dimensions.

    Attributes:
        channels: the dimensions that are not transformed.
        sizes: lengths of the transforms.
        lags: which entries of the signal are the weight's, by dimension.
    """

    channels: tuple[int, ...]
    sizes: tuple[int, ...]
    lags: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.channels, *self.sizes)

    @property
    def dims(self) -> tuple[int, ...]:
        """The transformed dimensions, counted from the first."""
        return tuple(range(len(self.channels), len(self.shape)))

    def forward(self, signal: Tensor) -> Tensor:
        """The unitary FFT, over the last dimensions of [..., *shape]."""
        return torch.fft.fftn(signal, dim=tuple(range(-len(self.sizes), 0)), norm="ortho")

    def gradient(self, spectrum: Tensor) -> Tensor:
        """Inverse FFT, real part, crop: the weight's gradient, of [..., *shape]."""
        return torch.fft.ifftn(spectrum, dim=tuple(range(-len(self.sizes), 0)), norm="ortho").real[
            (..., *self.lags)
        ]


@dataclass(frozen=True)
class FourierDomain:
    """A model's gradients as spectra where there are any.

    Attributes:
        spectra: parameter name -> where its gradient lives.
        rules: layers whose spectrum is not that of their gradient; empty in the kernel domain.
    """

    model: nn.Module
    loss: Loss
    spectra: dict[str, Spectrum]
    rules: Mapping[nn.Module, Rule] = field(default_factory=lambda: MappingProxyType({}))

    def clipped_sum(self, batch: Batch, bound: float, engine: Engine = "auto") -> dict[str, Tensor]:
        """Σᵢ of the shares, each layer's clipped at bound/√L: spectra by name, and real sums for the rest.

        No record's spectrum is formed: norms are Parseval's, and the sum is one weighted contraction.
        """
        if len(batch[0]) == 0:
            return {}
        sums = clipped_sum(
            self.model, self.loss, batch, bound, per_layer=True, engine=engine, rules=self.rules
        ).sums
        if self.rules:
            return sums
        return {
            name: self.spectra[name].forward(value) if name in self.spectra else value
            for name, value in sums.items()
        }

    def contributions(self, batch: Batch, bound: float) -> dict[str, Tensor]:
        """The shares themselves, [B, ...], every spectrum formed and measured: for tests and audits only."""
        together = groups(self.model, bound, per_layer=True)
        if not self.rules:
            clipped, _ = reference.clip(
                reference.per_sample_gradients(self.model, self.loss, batch), together
            )
            return {
                name: self.spectra[name].forward(v) if name in self.spectra else v
                for name, v in clipped.items()
            }
        shapes = {
            name: self.spectra[name].shape if name in self.spectra else p.shape
            for name, p in trainable(self.model).items()
        }
        rows: dict[str, list[Tensor]] = {name: [] for name in shapes}
        for i in range(len(batch[0])):
            one = batch[0][i : i + 1], batch[1][i : i + 1]
            found = clipped_sum(
                self.model, self.loss, one, float("inf"), per_layer=True, rules=self.rules
            ).sums
            for name, shape in shapes.items():
                rows[name].append(
                    found[name] if name in found else torch.zeros(shape, device=batch[0].device)
                )
        stacked = {
            name: torch.stack(of) if of else torch.zeros((0, *shapes[name]))
            for name, of in rows.items()
        }
        return reference.clip(stacked, together)[0]

    def gradients(self, noisy: dict[str, Tensor]) -> dict[str, Tensor]:
        """From released spectra to gradients, by parameter name."""
        return {
            name: self.spectra[name].gradient(value) if name in self.spectra else value
            for name, value in noisy.items()
        }


Convolution = nn.modules.conv._ConvNd


def kernel_domain(model: nn.Module, loss: Loss) -> FourierDomain:
    """Spectra over the kernels of convolutions and the blocks of circulant layers.

    Raises:
        UserError: a parameter is complex.
    """
    return FourierDomain(
        model, loss, {name: _kernel(weight, layer) for name, weight, layer in _layers(model)}
    )


def padded_domain(model: nn.Module, loss: Loss, like: Tensor | None) -> FourierDomain:
    """Spectra at the linear length, which depends on what each convolution is given: the model runs once, on one record of zeros.

    Args:
        like: inputs [n, ...] of the shape and dtype to come; no value is read.

    Raises:
        UserError: a parameter is complex, or a convolution is grouped, transposed, or given maps of different sizes.
    """
    if like is None:
        raise ValueError("a padded spectrum's size depends on the inputs' shape: say Problem.like")
    layers = _layers(model)
    given = _given(model, like, [layer for _, _, layer in layers if isinstance(layer, Convolution)])
    spectra: dict[str, Spectrum] = {}
    rules: dict[nn.Module, Rule] = {}
    for name, weight, layer in layers:
        if isinstance(layer, Convolution):
            if layer.transposed or layer.groups != 1:
                raise UserError(
                    f"layer '{name.rpartition('.')[0]}' is a grouped or transposed convolution, whose gradient has no padded "
                    "spectrum here: use algorithm=gredp or algorithm=dp_sgd."
                )
            spectra[name] = _linear(weight, layer, given[layer])
            rules[layer] = _convolution_rule(spectra[name])
        else:
            spectra[name] = _kernel(weight, layer)
            rules[layer] = _circulant_rule
    return FourierDomain(model, loss, spectra, rules)


def _layers(model: nn.Module) -> list[tuple[str, nn.Parameter, nn.Module]]:
    """(name, weight, layer) of every convolution and circulant layer that trains."""
    moving = trainable(model)
    for name, parameter in moving.items():
        if parameter.is_complex():
            raise UserError(
                f"spectra are those of real gradients, and parameter '{name}' is complex: use algorithm=zeta_dp_sgd."
            )
    owned = {f"{at}.weight" if at else "weight": module for at, module in model.named_modules()}
    return [
        (name, weight, owned[name])
        for name, weight in moving.items()
        if isinstance(owned.get(name), Convolution | CirculantLinear)
    ]


def _kernel(weight: nn.Parameter, layer: nn.Module) -> Spectrum:
    return Spectrum(
        tuple(weight.shape[:2]), tuple(weight.shape[2:]), (slice(None),) * (weight.dim() - 2)
    )


def _linear(weight: nn.Parameter, layer: Convolution, given: tuple[int, ...]) -> Spectrum:
    """At M = Hp + Ho − 1: the map as padded, and the output as its stride spreads it."""
    kernel, dilation, stride = weight.shape[2:], layer.dilation, layer.stride
    spread = [
        ((h - d * (k - 1) - 1) // s) * s + 1
        for h, d, k, s in zip(given, dilation, kernel, stride, strict=True)
    ]
    sizes = tuple(h + o - 1 for h, o in zip(given, spread, strict=True))
    lags = tuple(slice(0, d * (k - 1) + 1, d) for d, k in zip(dilation, kernel, strict=True))
    return Spectrum(tuple(weight.shape[:2]), sizes, lags)


def _given(
    model: nn.Module, like: Tensor, layers: list[Convolution]
) -> dict[nn.Module, tuple[int, ...]]:
    """The size of the padded map that each convolution is given."""
    seen: dict[nn.Module, tuple[int, ...]] = {}

    def note(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, Convolution)
        size = tuple(_padded(layer, arguments[0][:1]).shape[2:])
        if seen.setdefault(layer, size) != size:
            raise UserError(
                "a convolution that is given maps of different sizes has no padded spectrum: use algorithm=dp_sgd."
            )

    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    device = next(model.parameters()).device
    mode = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng():
            model.eval()(torch.zeros((1, *like.shape[1:]), dtype=like.dtype, device=device))
    finally:
        model.train(mode)
        for handle in handles:
            handle.remove()
    return seen


def _padded(layer: Convolution, x: Tensor) -> Tensor:
    """[B, C, *] with the layer's own padding."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def _convolution_rule(spectrum: Spectrum) -> Rule:
    def rule(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
        assert isinstance(layer, Convolution)
        x, spread = _padded(layer, x), g
        if any(step > 1 for step in layer.stride):
            every = tuple(
                (size - 1) * step + 1 for size, step in zip(g.shape[2:], layer.stride, strict=True)
            )
            spread = g.new_zeros((*g.shape[:2], *every))
            at: list[Any] = [..., *(slice(None, None, step) for step in layer.stride)]
            spread[tuple(at)] = g
        if (
            tuple(a + b - 1 for a, b in zip(x.shape[2:], spread.shape[2:], strict=True))
            != spectrum.sizes
        ):
            raise UserError(
                f"a record's map of {list(x.shape[2:])} is not of the size that this run was set up for."
            )
        fast = tuple(next_fast_len(size, real=True) for size in spectrum.sizes)
        weight = _share(Correlation(x, spread, fast), spectrum, tuple(spread.shape[2:]))
        return {"weight": weight, "bias": kept(g.flatten(2).sum(dim=2))}

    return rule


def _circulant_rule(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    assert isinstance(layer, CirculantLinear)
    if x.dim() != 2:
        raise UserError(
            "a circulant layer over several positions has no spectral share here: use algorithm=dp_sgd."
        )
    return {
        "weight": _share(circulant_correlation(layer, x, g), _kernel(layer.weight, layer)),
        "bias": kept(g),
    }


def _share(of: Correlation, spectrum: Spectrum, outputs: tuple[int, ...] = ()) -> Share:
    """The unitary spectra of what `of` correlates, at the spectrum's own length whatever length `of` found faster."""

    def whole(signal: Tensor) -> Tensor:
        for dim, (size, negative) in enumerate(
            zip(spectrum.sizes, outputs, strict=False), -len(outputs)
        ):
            if (
                signal.shape[dim] != size
            ):  # between the lags 0 … Hp − 1 and −(Ho − 1) … −1 there is nothing
                ahead, behind = size - negative + 1, negative - 1
                ends = (
                    signal.narrow(dim, 0, ahead),
                    signal.narrow(dim, signal.shape[dim] - behind, behind),
                )
                signal = torch.cat(ends, dim=dim)
        return spectrum.forward(signal)

    return Share(
        lambda start, stop: whole(of.rows(start, stop)),
        lambda c: whole(of.weighted_sum(c)),
        of.squared_norms,
    )
