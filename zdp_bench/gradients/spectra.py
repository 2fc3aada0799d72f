"""Unitary spectra of gradients, for algorithms that clip and add noise in the Fourier domain.

    kernel domain   the unitary FFT of the gradient itself, over a convolution's kernel or a
                    circulant block. The norm does not change, so clipping the spectrum is the same
                    as clipping the gradient (GReDP, Theorem 1: F(V) of the gradient V).
    padded domain   the spectrum of the WHOLE correlation of output gradient and input, with the
                    linear length input + output − 1. The gradient is a few of its lags
                    (Spectral-DP, and GReDP's eq. 15 taken literally). The other lags are clipped
                    and get noise too, and are cropped in the end. Norms are about input / kernel
                    times as large.

Biases and the weights of norms and dense layers have no spectrum and are not transformed. The
weight and bias of a layer are clipped together at C/√L.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError, setting
from zdp_bench.gradients import Engine, clipped_sum, reference
from zdp_bench.gradients.clipping import (
    Batch,
    Loss,
    groups,
    split_batch,
    trainable,
    zero_rows,
)
from zdp_bench.gradients.layer_gradient import LayerGradient
from zdp_bench.gradients.parts import map_leaves, takes_parts
from zdp_bench.gradients.program.autograd import find_sources
from zdp_bench.gradients.rules import Rule
from zdp_bench.gradients.rules.circulant import Correlation, correlate
from zdp_bench.gradients.rules.convolution import pad_input, per_dimension
from zdp_bench.lazy import LazyModule
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.nn.modes import evaluation_mode
from zdp_bench.nn.unchanged import computes_as

fft = LazyModule("scipy.fft")


@dataclass(frozen=True)
class Spectrum:
    """The domain of one weight's gradient: unitary FFTs over the last `len(sizes)` dimensions.

    Attributes:
        channels: sizes of the dimensions that are not transformed.
        sizes: sizes of the transformed dimensions.
        lags: for each transformed dimension, the entries of the signal that are the gradient.
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
        first = len(self.channels)
        return tuple(range(first, len(self.shape)))

    @property
    def _last_dims(self) -> tuple[int, ...]:
        return tuple(range(-len(self.sizes), 0))

    def forward(self, signal: Tensor) -> Tensor:
        """Return the complex spectrum of a signal; both have shape [..., *shape]."""
        if signal.numel() == 0:  # torch's FFT takes no empty batch
            return signal.to(signal.dtype.to_complex())
        return torch.fft.fftn(signal, dim=self._last_dims, norm="ortho")

    def gradient(self, spectrum: Tensor) -> Tensor:
        """Return the weight's gradient from a spectrum: inverse FFT, real part, crop."""
        signal = torch.fft.ifftn(spectrum, dim=self._last_dims, norm="ortho")
        return signal.real[(..., *self.lags)]


@dataclass(frozen=True)
class FourierDomain:
    """A model's gradients, as spectra for the weights that have one.

    Attributes:
        model: the model.
        loss: (outputs, targets) -> losses [B].
        spectra: spectra by the parameter's name.
        rules: rules of layers whose spectrum is not that of the gradient; empty in the kernel
            domain.
    """

    model: nn.Module
    loss: Loss
    spectra: dict[str, Spectrum]
    rules: Mapping[nn.Module, Rule] = field(default_factory=dict)

    def clipped_sum(
        self,
        batch: Batch,
        bound: float,
        engine: Engine = "auto",
    ) -> dict[str, Tensor]:
        """Return Σᵢ clip(gᵢ), with spectra for the weights that have one.

        Each of the L layers is clipped at bound/√L. No example's spectrum is formed, because norms
        follow from Parseval's theorem and the sum is one contraction.
        """
        if len(batch[0]) == 0:
            return {}
        clipped = clipped_sum(
            self.model,
            self.loss,
            batch,
            bound,
            per_layer=True,
            engine=engine,
            rules=self.rules,
        )
        return clipped.sums if self.rules else self._transform(clipped.sums)

    def _transform(
        self,
        gradients: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        transformed = dict(gradients)
        for name, spectrum in self.spectra.items():
            if name in gradients:
                transformed[name] = spectrum.forward(gradients[name])
        return transformed

    def contributions(
        self,
        batch: Batch,
        bound: float,
    ) -> dict[str, Tensor]:
        """Return clip(gᵢ) of each example, [B, ...], from its spectra. For tests and audits."""
        clip_groups = groups(self.model, bound, per_layer=True)
        if not self.rules:
            gradients = reference.per_sample_gradients(self.model, self.loss, batch)
            clipped, _ = reference.clip(gradients, clip_groups)
            return self._transform(clipped)
        spectra = self._zero_rows(len(batch[0]))
        for index, example in enumerate(split_batch(batch)):
            unclipped = clipped_sum(
                self.model,
                self.loss,
                example,
                float("inf"),
                per_layer=True,
                rules=self.rules,
            )
            for name, spectrum in unclipped.sums.items():
                spectra[name][index] = spectrum
        clipped, _ = reference.clip(spectra, clip_groups)
        return clipped

    def _zero_rows(self, count: int) -> dict[str, Tensor]:
        """Return zeros for the spectra and other gradients of `count` shares."""
        rows = zero_rows(self.model, count)
        for name, spectrum in self.spectra.items():
            row = rows[name]
            dtype = row.dtype.to_complex()
            rows[name] = row.new_zeros((count, *spectrum.shape), dtype=dtype)
        return rows

    def gradients(
        self,
        noisy: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return the gradients by parameter name, from released spectra and gradients."""
        gradients = dict(noisy)
        for name, spectrum in self.spectra.items():
            gradients[name] = spectrum.gradient(noisy[name])
        return gradients


Convolution = nn.modules.conv._ConvNd
# Layers with a padded spectrum.
PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d, CirculantLinear)


def kernel_domain(model: nn.Module, loss: Loss) -> FourierDomain:
    """Return the spectra over the kernels of convolutions and the blocks of circulant layers."""
    spectra = {name: _kernel(weight) for name, weight, _ in _layers(model)}
    return FourierDomain(model, loss, spectra)


def padded_domain(
    model: nn.Module,
    loss: Loss,
    like: Tensor | None,
) -> FourierDomain:
    """Return the spectra of the whole correlations, at their linear length.

    The length depends on the input of each convolution, so the model runs once on an example of
    zeros.

    Args:
        model: the model.
        loss: (outputs, targets) -> losses [B].
        like: inputs [n, ...] of the shape and data type that the model will get.

    Raises:
        UserError: the model is complex, or has a convolution that is grouped, transposed, not
            torch's or not called, or whose weight is used elsewhere too.
    """
    if like is None:
        raise ValueError("the size of a padded spectrum depends on the inputs: set Problem.like")
    layers = _layers(model)
    for name, _, layer in layers:
        _require_plain(name, layer)
    sizes = _input_sizes(model, like, layers)
    spectra: dict[str, Spectrum] = {}
    rules: dict[nn.Module, Rule] = {}
    for name, weight, layer in layers:
        if isinstance(layer, Convolution):
            if layer not in sizes:
                raise UserError(
                    f"layer '{name.rpartition('.')[0]}' is a convolution that the model does not "
                    "call on one tensor, so it has no padded spectrum: freeze it, or use "
                    f"{setting('algorithm', 'dp_sgd')}."
                )
            spectra[name] = _linear(weight, layer, sizes[layer])
            rules[layer] = _convolution_rule(spectra[name], sizes[layer])
        else:
            spectra[name] = _kernel(weight)
            rules[layer] = _circulant_rule
    return FourierDomain(model, loss, spectra, rules)


def _layers(model: nn.Module) -> list[tuple[str, nn.Parameter, nn.Module]]:
    """Return (name, weight, layer) for each convolution and circulant layer that is trained."""
    trained = trainable(model)
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise UserError(
                f"spectra are those of real gradients, and parameter '{name}' is complex: "
                f"use {setting('algorithm', 'zeta_dp_sgd')}."
            )
    layers: list[tuple[str, nn.Parameter, nn.Module]] = []
    for name, weight in trained.items():
        module_name, _, own_name = name.rpartition(".")
        layer = model.get_submodule(module_name)
        if own_name == "weight" and isinstance(layer, Convolution | CirculantLinear):
            layers.append((name, weight, layer))
    return layers


def _require_plain(name: str, layer: nn.Module) -> None:
    """Reject a layer whose gradient is not known to be the correlation of a plain one."""
    layer_name, _, _ = name.rpartition(".")
    if isinstance(layer, Convolution) and (layer.transposed or layer.groups != 1):
        raise UserError(
            f"layer '{layer_name}' is a grouped or transposed convolution, whose gradient has no "
            f"padded spectrum here: use {setting('algorithm', 'gredp')} or "
            f"{setting('algorithm', 'dp_sgd')}."
        )
    if not computes_as(layer, PLAIN):
        raise UserError(
            f"layer '{layer_name}' ({type(layer).__name__}) may compute something else than "
            "torch's convolution, because it has hooks or methods of its own, so its gradient has "
            "no padded spectrum here: remove them, freeze the layer, or use "
            f"{setting('algorithm', 'dp_sgd')}."
        )


def _kernel(weight: nn.Parameter) -> Spectrum:
    """Return the spectrum of the gradient itself, which uses all lags."""
    outputs, inputs, *sizes = weight.shape
    all_lags = (slice(None),) * len(sizes)
    return Spectrum((outputs, inputs), tuple(sizes), all_lags)


def _linear(
    weight: nn.Parameter,
    layer: Convolution,
    padded_input: tuple[int, ...],
) -> Spectrum:
    """Return the spectrum with the linear length M = Hp + Ho − 1.

    Hp is the size of the padded input and Ho that of the output, spread out by the stride.
    """
    outputs, inputs, *kernels = weight.shape
    strides, dilations = per_dimension(layer, layer.stride), per_dimension(layer, layer.dilation)
    sizes = []
    lags = []
    for dim, input_size in enumerate(padded_input):
        dilation, stride = dilations[dim], strides[dim]
        extent = dilation * (kernels[dim] - 1) + 1
        spread_output = ((input_size - extent) // stride) * stride + 1
        sizes.append(input_size + spread_output - 1)
        lags.append(slice(0, extent, dilation))
    return Spectrum((outputs, inputs), tuple(sizes), tuple(lags))


def _input_sizes(
    model: nn.Module,
    like: Tensor,
    layers: list[tuple[str, nn.Parameter, nn.Module]],
) -> dict[nn.Module, tuple[int, ...]]:
    """Return the size of each convolution's padded input.

    Raises:
        UserError: the sizes of a convolution's inputs differ, or the weight of a layer is used
            outside the layer's calls.
    """
    sizes: dict[nn.Module, tuple[int, ...]] = {}
    weights = {layer: weight for _, weight, layer in layers}

    def enter_call(
        layer: nn.Module,
        arguments: tuple[Tensor, ...],
    ) -> None:
        weights[layer].requires_grad_(False)  # only uses outside of calls then have a gradient
        if not isinstance(layer, Convolution) or len(arguments) != 1:  # it is called by keyword
            return
        (maps,) = arguments
        _, _, *sizes_of_map = pad_input(layer, maps[:1]).shape
        size = tuple(sizes_of_map)
        if sizes.setdefault(layer, size) != size:
            raise UserError(
                "a convolution that is called on maps of different sizes has no padded spectrum: "
                f"use {setting('algorithm', 'dp_sgd')}."
            )

    def leave_call(layer: nn.Module, *_: object) -> None:
        weights[layer].requires_grad_(True)

    handles = []
    for layer in weights:
        handles.append(layer.register_forward_pre_hook(enter_call))
        handles.append(layer.register_forward_hook(leave_call))
    device = next(model.parameters()).device
    try:
        with (
            torch.enable_grad(),
            torch.random.fork_rng(),
            takes_parts(model),
            evaluation_mode(model),
        ):
            example = map_leaves(
                lambda leaf: leaf.new_zeros(1, *leaf.shape[1:], device=device), like
            )
            output = model(example)
    finally:
        for weight in weights.values():
            weight.requires_grad_(True)
        for handle in handles:
            handle.remove()
    named_weights = {name: weight for name, weight, _ in layers}
    outside = find_sources(output, named_weights) if isinstance(output, Tensor) else set()
    for name, _, layer in layers:
        # Convolutions without a size are rejected because they are not called.
        if name in outside and (layer in sizes or not isinstance(layer, Convolution)):
            raise UserError(
                f"parameter '{name}' is used outside the calls of its layer, where its gradient "
                f"has no padded spectrum: freeze it, or use {setting('algorithm', 'dp_sgd')}."
            )
    return sizes


def _convolution_rule(spectrum: Spectrum, padded_input: tuple[int, ...]) -> Rule:
    """Return the rule of a convolution whose padded input has this size."""

    def rule(
        layer: nn.Module,
        x: Tensor,
        g: Tensor,
    ) -> dict[str, LayerGradient]:
        assert isinstance(layer, Convolution)
        spread = _spread(g, per_dimension(layer, layer.stride))
        outputs = tuple(spread.shape[2:])
        if x.shape[2:] != padded_input:  # else, a program has padded it by another operation
            x = pad_input(layer, x)
        inputs = x.shape[2:]
        sizes = tuple(a + b - 1 for a, b in zip(inputs, outputs, strict=True))
        if inputs != padded_input or sizes != spectrum.sizes:
            raise UserError(
                f"an example's map of {list(inputs)} is not of the size that "
                "this run was set up for."
            )
        fast_sizes = tuple(fft.next_fast_len(size, real=True) for size in spectrum.sizes)
        correlation = Correlation(x, spread, fast_sizes)
        weight = _transformed(correlation, spectrum, outputs)
        bias = LayerGradient.from_gradients(g.flatten(2).sum(dim=2))
        return {"weight": weight, "bias": bias}

    return rule


def _spread(g: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return g [B, O, *] with zeros at the positions that the stride skips."""
    if all(step == 1 for step in stride):
        return g
    examples, channels, *sizes = g.shape
    pairs = zip(sizes, stride, strict=True)
    spread_sizes = [(size - 1) * step + 1 for size, step in pairs]
    spread = g.new_zeros(examples, channels, *spread_sizes)
    positions = [slice(None, None, step) for step in stride]
    spread[(slice(None), slice(None), *positions)] = g
    return spread


def _circulant_rule(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    assert isinstance(layer, CirculantLinear)
    if x.dim() != 2:
        raise UserError(
            "a circulant layer over several positions is not supported in the Fourier domain: "
            f"use {setting('algorithm', 'dp_sgd')}."
        )
    weight = _transformed(correlate(layer, x, g), _kernel(layer.weight))
    return {"weight": weight, "bias": LayerGradient.from_gradients(g)}


def _transformed(
    correlation: Correlation,
    spectrum: Spectrum,
    outputs: tuple[int, ...] = (),
) -> LayerGradient:
    """Return the unitary spectra of a correlation, with the spectrum's length.

    Args:
        correlation: the correlation of input and spread output gradient. It may be longer than the
            spectrum, because some lengths are faster.
        spectrum: the domain.
        outputs: sizes of the spread output gradient; needed if the correlation may be longer.
    """

    def transform(signal: Tensor) -> Tensor:
        for dim, output in enumerate(outputs, -len(outputs)):
            length, size = signal.shape[dim], spectrum.sizes[dim]
            if length != size:
                # All entries between the lags 0 … Hp − 1 and −(Ho − 1) … −1 are zero.
                negative_lags = output - 1
                first = signal.narrow(dim, 0, size - negative_lags)
                last = signal.narrow(dim, length - negative_lags, negative_lags)
                signal = torch.cat([first, last], dim=dim)
        return spectrum.forward(signal)

    return LayerGradient(
        lambda start, stop: transform(correlation.per_sample(start, stop)),
        lambda factors: transform(correlation.weighted_sum(factors)),
        squared_norms=correlation.squared_norms,
        summands=correlation.summands,
    )
