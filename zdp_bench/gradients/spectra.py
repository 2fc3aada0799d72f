"""Gradients as unitary spectra, for algorithms that clip and noise them in the Fourier domain.

    kernel domain   the unitary FFT of the gradient itself, over a convolution's kernel or a
                    circulant block. Its norm is the gradient's, so clipping there is clipping here
                    (GReDP, Theorem 1: F(V) of the gradient V).
    padded domain   the spectrum of the WHOLE correlation of output gradient and input, at the
                    linear length input + output − 1, of which the gradient is a few lags
                    (Spectral-DP, and GReDP's eq. 15 at its word). The other lags are clipped and
                    noised with it and then cropped away: norms are larger, about input / kernel
                    times.

Bias, norm and dense weights have no spectrum and stay as they are. The weight and bias of a layer
are clipped together at C/√L.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients import Engine, clipped_sum, reference
from zdp_bench.gradients.clipping import Batch, Loss, groups, trainable
from zdp_bench.gradients.layer_gradient import LayerGradient
from zdp_bench.gradients.rules import Rule
from zdp_bench.gradients.rules.circulant import Correlation, correlate
from zdp_bench.gradients.rules.convolution import pad_input
from zdp_bench.lazy import LazyModule
from zdp_bench.nn.circulant import CirculantLinear

fft = LazyModule("scipy.fft")


@dataclass(frozen=True)
class Spectrum:
    """The domain of one weight's gradient: unitary FFTs over the last `len(sizes)` dimensions."""

    channels: tuple[int, ...]  # sizes of the dimensions that are not transformed
    sizes: tuple[int, ...]
    lags: tuple[slice, ...]  # of each dimension, the signal's entries that are the weight's

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.channels, *self.sizes)

    @property
    def dims(self) -> tuple[int, ...]:
        """The transformed dimensions, counted from the first."""
        return tuple(range(len(self.channels), len(self.shape)))

    def forward(self, signal: Tensor) -> Tensor:
        """Transform [..., *shape] -> the same shape, complex."""
        return torch.fft.fftn(signal, dim=tuple(range(-len(self.sizes), 0)), norm="ortho")

    def gradient(self, spectrum: Tensor) -> Tensor:
        """Return the weight's gradient of [..., *shape]: inverse FFT, real part, crop."""
        signal = torch.fft.ifftn(spectrum, dim=tuple(range(-len(self.sizes), 0)), norm="ortho")
        return signal.real[(..., *self.lags)]


@dataclass(frozen=True)
class FourierDomain:
    """A model's gradients, as spectra where they have one."""

    model: nn.Module
    loss: Loss
    spectra: dict[str, Spectrum]  # by the parameter's name
    # for layers whose spectrum is not that of their gradient; empty in the kernel domain
    rules: Mapping[nn.Module, Rule] = field(default_factory=lambda: MappingProxyType({}))

    def clipped_sum(self, batch: Batch, bound: float, engine: Engine = "auto") -> dict[str, Tensor]:
        """Return Σᵢ clip(gᵢ), each layer clipped at bound/√L, as spectra where there are any.

        No example's spectrum is formed: norms follow by Parseval, the sum is one contraction.
        """
        if len(batch[0]) == 0:
            return {}
        sums = clipped_sum(
            self.model, self.loss, batch, bound, per_layer=True, engine=engine, rules=self.rules
        ).sums
        return sums if self.rules else self._transform(sums)

    def _transform(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self.spectra[name].forward(value) if name in self.spectra else value
            for name, value in gradients.items()
        }

    def contributions(self, batch: Batch, bound: float) -> dict[str, Tensor]:
        """Return clip(gᵢ), [B, ...], every spectrum formed and measured: for tests and audits."""
        together = groups(self.model, bound, per_layer=True)
        if not self.rules:
            gradients = reference.per_sample_gradients(self.model, self.loss, batch)
            return self._transform(reference.clip(gradients, together)[0])
        device = batch[0].device
        zeros = {
            name: torch.zeros(self.spectra[name].shape, dtype=torch.complex64, device=device)
            if name in self.spectra
            else torch.zeros(parameter.shape, device=device)
            for name, parameter in trainable(self.model).items()
        }
        each: list[dict[str, Tensor]] = []
        for one in zip(batch[0].split(1), batch[1].split(1), strict=True):
            unclipped = clipped_sum(
                self.model, self.loss, one, float("inf"), per_layer=True, rules=self.rules
            )
            each.append(zeros | unclipped.sums)
        stacked = {
            name: torch.stack([sums[name] for sums in each])
            if each
            else zero.new_zeros(0, *zero.shape)
            for name, zero in zeros.items()
        }
        return reference.clip(stacked, together)[0]

    def gradients(self, noisy: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of released spectra, by parameter name."""
        return {
            name: self.spectra[name].gradient(value) if name in self.spectra else value
            for name, value in noisy.items()
        }


Convolution = nn.modules.conv._ConvNd


def kernel_domain(model: nn.Module, loss: Loss) -> FourierDomain:
    """Return spectra over the kernels of convolutions and the blocks of circulant layers."""
    return FourierDomain(
        model, loss, {name: _kernel(weight, layer) for name, weight, layer in _layers(model)}
    )


def padded_domain(model: nn.Module, loss: Loss, like: Tensor | None) -> FourierDomain:
    """Return spectra at the linear length.

    It depends on the input of each convolution: the model runs once, on one example of zeros.
    """
    if like is None:
        raise ValueError("a padded spectrum's size depends on the inputs' shape: say Problem.like")
    layers = _layers(model)
    sizes = _input_sizes(model, like, [of for _, _, of in layers if isinstance(of, Convolution)])
    spectra: dict[str, Spectrum] = {}
    rules: dict[nn.Module, Rule] = {}
    for name, weight, layer in layers:
        if isinstance(layer, Convolution):
            if layer.transposed or layer.groups != 1:
                raise UserError(
                    f"layer '{name.rpartition('.')[0]}' is a grouped or transposed convolution, "
                    "whose gradient has no padded spectrum here: "
                    "use algorithm=gredp or algorithm=dp_sgd."
                )
            spectra[name] = _linear(weight, layer, sizes[layer])
            rules[layer] = _convolution_rule(spectra[name])
        else:
            spectra[name] = _kernel(weight, layer)
            rules[layer] = _circulant_rule
    return FourierDomain(model, loss, spectra, rules)


def _layers(model: nn.Module) -> list[tuple[str, nn.Parameter, nn.Module]]:
    """Return (name, weight, layer) of every convolution and circulant layer that trains."""
    moving = trainable(model)
    for name, parameter in moving.items():
        if parameter.is_complex():
            raise UserError(
                f"spectra are those of real gradients, and parameter '{name}' is complex: "
                "use algorithm=zeta_dp_sgd."
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
    """Return the spectrum at M = Hp + Ho − 1: padded input, and output spread by its stride."""
    kernel, dilation, stride = weight.shape[2:], layer.dilation, layer.stride
    spread = [
        ((h - d * (k - 1) - 1) // s) * s + 1
        for h, d, k, s in zip(given, dilation, kernel, stride, strict=True)
    ]
    sizes = tuple(h + o - 1 for h, o in zip(given, spread, strict=True))
    lags = tuple(slice(0, d * (k - 1) + 1, d) for d, k in zip(dilation, kernel, strict=True))
    return Spectrum(tuple(weight.shape[:2]), sizes, lags)


def _input_sizes(
    model: nn.Module, like: Tensor, layers: list[Convolution]
) -> dict[nn.Module, tuple[int, ...]]:
    """Return the size of each convolution's padded input."""
    found: dict[nn.Module, tuple[int, ...]] = {}

    def note(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, Convolution)
        size = tuple(pad_input(layer, arguments[0][:1]).shape[2:])
        if found.setdefault(layer, size) != size:
            raise UserError(
                "a convolution that is given maps of different sizes has no padded spectrum: "
                "use algorithm=dp_sgd."
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
    return found


def _convolution_rule(spectrum: Spectrum) -> Rule:
    def rule(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
        assert isinstance(layer, Convolution)
        x, spread = pad_input(layer, x), _spread(g, layer.stride)
        both = zip(x.shape[2:], spread.shape[2:], strict=True)
        if tuple(of_x + of_g - 1 for of_x, of_g in both) != spectrum.sizes:
            raise UserError(
                f"an example's map of {list(x.shape[2:])} is not of the size that "
                "this run was set up for."
            )
        fast = tuple(fft.next_fast_len(size, real=True) for size in spectrum.sizes)
        weight = _transformed(Correlation(x, spread, fast), spectrum, tuple(spread.shape[2:]))
        return {"weight": weight, "bias": LayerGradient.of(g.flatten(2).sum(dim=2))}

    return rule


def _spread(g: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return g [B, O, *] with zeros at the positions that the stride leaves out."""
    if all(step == 1 for step in stride):
        return g
    sizes = [(size - 1) * step + 1 for size, step in zip(g.shape[2:], stride, strict=True)]
    spread = g.new_zeros((*g.shape[:2], *sizes))
    at: list[Any] = [..., *(slice(None, None, step) for step in stride)]
    spread[tuple(at)] = g
    return spread


def _circulant_rule(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    assert isinstance(layer, CirculantLinear)
    if x.dim() != 2:
        raise UserError(
            "a circulant layer over several positions has no spectral share here: "
            "use algorithm=dp_sgd."
        )
    weight = _transformed(correlate(layer, x, g), _kernel(layer.weight, layer))
    return {"weight": weight, "bias": LayerGradient.of(g)}


def _transformed(
    of: Correlation,
    spectrum: Spectrum,
    outputs: tuple[int, ...] = (),  # of the spread output, if `of` is longer, which is faster
) -> LayerGradient:
    """Return the unitary spectra of a correlation, at the spectrum's own length."""

    def transform(signal: Tensor) -> Tensor:
        lengths = zip(spectrum.sizes, outputs, strict=False)
        for dim, (size, output) in enumerate(lengths, -len(outputs)):
            if signal.shape[dim] != size:
                # Between the lags 0 … Hp − 1 and −(Ho − 1) … −1 all entries are zero.
                ahead, behind = size - output + 1, output - 1
                last = signal.narrow(dim, signal.shape[dim] - behind, behind)
                signal = torch.cat([signal.narrow(dim, 0, ahead), last], dim=dim)
        return spectrum.forward(signal)

    return LayerGradient(
        lambda start, stop: transform(of.per_sample(start, stop)),
        lambda factors: transform(of.weighted_sum(factors)),
        squared_norms=of.squared_norms,
        summands=of.summands,
    )
