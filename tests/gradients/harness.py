"""Every layer and activation as one `Case`; models are in `zoo.py`.

A new one is one entry here; `test_harness.py` sends it through every check. A case builds a module
in float32 or float64 (complex64 or complex128); the harness gives it random examples and a loss
that depends on every output, real and imaginary part apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.modules import Made
from zdp_bench.nn.activations import Cardioid, CReLU, activation
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.nn.convolution import (
    ComplexConv1d,
    ComplexConv2d,
    ComplexConv3d,
    ComplexConvTranspose2d,
)
from zdp_bench.nn.memory_format import MapLinear
from zdp_bench.nn.normalisation import ComplexGroupNorm, ComplexInstanceNorm, ComplexLayerNorm
from zdp_bench.nn.pooling import AdaptiveMagnitudeMaxPool2d, ComplexAvgPool2d, MagnitudeMaxPool2d
from zdp_bench.nn.surgery import InstanceNorm1d
from zdp_bench.nn.surgery import standardise_weights as standardise
from zdp_bench.registry import names

Seq = nn.Sequential
Kind = Literal["real", "complex", "index"]


@dataclass(frozen=True)
class Case:
    """One module to put through the harness; `shape` is that of one example."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    kind: Kind = "real"

    def module(self, dtype: torch.dtype) -> nn.Module:
        """The module, always with the same weights, in real `dtype` or its complex companion."""
        torch.manual_seed(sum(map(ord, self.name)))
        module = self.build()
        for parameter in module.parameters():
            if parameter.dim() == 1:  # norms start at 1 and 0, where mistakes hide
                parameter.data += 0.1 * torch.randn_like(parameter)
        return in_precision(module, dtype)

    def batch(self, examples: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Random examples and real targets."""
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randn(examples, generator=generator, dtype=torch.float64).to(dtype)
        if self.kind == "index":
            return torch.randint(0, 7, (examples, *self.shape), generator=generator), targets
        wide = torch.complex128 if self.kind == "complex" else torch.float64
        inputs = torch.randn(examples, *self.shape, generator=generator, dtype=wide)
        return inputs.to(dtype.to_complex() if self.kind == "complex" else dtype), targets


def in_precision(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module in `dtype` or its complex companion; `.to` would make complex weights real."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype.to_complex() if parameter.is_complex() else dtype)
    for part in module.modules():
        if isinstance(vars(part).get("dtype"), torch.dtype):
            part.dtype = dtype.to_complex() if part.dtype.is_complex else dtype  # type: ignore[assignment]
    return module


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """[B]: every output with a weight of its own, and neither part of a complex one alone."""
    flat = outputs.flatten(1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype, device=flat.device)
    off = flat - targets.unsqueeze(1).to(flat.dtype)
    return (off**2 * weights + torch.sin(flat)).mean(dim=1)


class OwnScale(nn.Module):
    """A layer no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale)


class Sequences(nn.Module):
    """A recurrent layer over [B, 5, *], of packed sequences whose lengths follow the numbers."""

    def __init__(self, layer: nn.RNNBase, packed: bool = False) -> None:
        super().__init__()
        self.layer, self.packed = layer, packed

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            lengths = 2 + 2 * (x[:, 0, 0] > 0).long().cpu()
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            output, state = self.layer(packed)
            output, _ = pad_packed_sequence(output, batch_first=True, total_length=5)
        elif self.layer.batch_first:
            output, state = self.layer(x)
        else:
            output, state = self.layer(x.transpose(0, 1))
            output = output.transpose(0, 1)
        last = state[1] if isinstance(state, tuple) else state
        return output.sum(dim=1) + last.sum(dim=(0, 2)).unsqueeze(1)


class Twice(nn.Module):
    """One layer called three times, with an activation in place between."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


def _tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return Seq(first, nn.Tanh(), second)


def _three_names(layer: nn.Module) -> nn.Module:
    model = Seq(layer, nn.Tanh(), layer)
    model.add_module("again", model[0])
    return model


def _partly_frozen() -> nn.Module:
    model = Seq(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return model


class UNetShape(nn.Module):
    """A skip connection round a pooling and a transposed convolution, complex or real."""

    def __init__(
        self,
        conv: Callable[..., nn.Module],
        transposed: Callable[..., nn.Module],
        activation: nn.Module,
    ) -> None:
        super().__init__()
        self.down, self.deep = conv(2, 4, 3, padding=1), conv(4, 4, 3, stride=2)
        self.up, self.last, self.activation = transposed(4, 4, 2, 2), conv(8, 1, 1), activation

    def forward(self, x: Tensor) -> Tensor:
        kept = self.activation(self.down(x))
        low = self.activation(self.deep(kept))
        return self.last(torch.cat([self.up(low), kept[..., :-1, :-1]], dim=1))


def _c(layer: type[nn.Module], *arguments: object, **options: object) -> nn.Module:
    return layer(*arguments, dtype=torch.complex64, **options)


CONVOLUTIONS: tuple[dict[str, object], ...] = (
    {},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": 2, "groups": 2, "bias": False},
)
PADDINGS: tuple[dict[str, object], ...] = (
    {"padding": "same", "dilation": (1, 2)},
    {"padding": (2, 1), "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "reflect"},
)
SHAPES = {1: (4, 9), 2: (4, 7, 8), 3: (4, 5, 6, 5)}


def _complex(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Case:
    return Case(name, build, shape, "complex")


def _words(options: dict[str, object]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items())


def _convolutions() -> list[Case]:
    made = []
    torchs = {
        1: (nn.Conv1d, nn.ConvTranspose1d),
        2: (nn.Conv2d, nn.ConvTranspose2d),
        3: (nn.Conv3d, nn.ConvTranspose3d),
    }
    ours = {ComplexConv1d: 1, ComplexConv2d: 2, ComplexConv3d: 3, ComplexConvTranspose2d: 2}
    for options in CONVOLUTIONS:
        words = _words(options)
        for dimensions, pair in torchs.items():
            for layer in pair:
                build = partial(layer, 4, 6, 3, **options)
                made.append(Case(f"{layer.__name__}({words})", build, SHAPES[dimensions]))
                if dimensions < 3:
                    name = f"native complex {layer.__name__}({words})"
                    made.append(_complex(name, partial(_c, build), SHAPES[dimensions]))
        for layer, dimensions in ours.items():
            build = lambda la=layer, o=options: Seq(la(4, 6, 3, **o), Cardioid(), la(6, 2, 2))  # noqa: E731
            made.append(_complex(f"{layer.__name__}({words})", build, SHAPES[dimensions]))
    many = {"stride": 2, "padding": 1, "dilation": 2}  # channels: their gradients come from patches
    for layer, dimensions in ours.items():
        channels = (2, 9) if layer is ComplexConvTranspose2d else (9, 2)
        shape = (channels[0], *(2 * size + 1 for size in SHAPES[dimensions][1:]))
        build = lambda la=layer, c=channels: Seq(Cardioid(), la(*c, 3, **many))  # noqa: E731
        made.append(_complex(f"{layer.__name__} of many channels", build, shape))
    return made


LAYERS: list[Case] = [
    Case("Linear", lambda: Seq(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), (4,)),
    Case("Linear without bias", lambda: nn.Linear(4, 3, bias=False), (4,)),
    Case("Linear over positions", lambda: Seq(nn.Linear(4, 5), nn.Linear(5, 3)), (20, 4)),
    Case("Linear by ghost norm", lambda: nn.Linear(96, 80), (2, 96)),
    _complex(
        "complex Linear", lambda: Seq(_c(nn.Linear, 4, 5), Cardioid(), _c(nn.Linear, 5, 3)), (4,)
    ),
    _complex("complex Linear over positions", lambda: _c(nn.Linear, 4, 5), (20, 4)),
    _complex("complex Linear by ghost norm", lambda: _c(nn.Linear, 96, 80), (2, 96)),
    Case(
        "standardised Conv2d",
        lambda: standardise(
            Seq(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 2))
        ),
        (2, 6, 5),
    ),
    *(
        _complex(
            f"standardised complex torch Conv2d with {keywords}",
            lambda keywords=keywords: standardise(_c(nn.Conv2d, 2, 3, 3, **keywords)),
            (2, 6, 5),
        )
        for keywords in ({"padding": 1, "padding_mode": "circular"}, {"padding": "same"})
    ),
    Case("standardised Conv1d", lambda: standardise(nn.Conv1d(3, 4, 3, groups=1)), (3, 7)),
    _complex(
        "standardised ComplexConv2d",
        lambda: standardise(
            Seq(ComplexConv2d(2, 4, 3), ComplexGroupNorm(2, 4), ComplexConv2d(4, 3, 2))
        ),
        (2, 6, 5),
    ),
    Case("MapLinear", lambda: Seq(nn.Conv2d(2, 3, 2), nn.Tanh(), MapLinear(36, 3)), (2, 4, 5)),
    _complex(
        "complex MapLinear on channels-last maps",
        lambda: Seq(ComplexConv2d(2, 3, 2), Cardioid(), _c(MapLinear, 36, 3)),
        (2, 4, 5),
    ),
    *_convolutions(),
    Case("CirculantLinear of any width", lambda: CirculantLinear(10, 7, 5, bias=False), (10,)),
    Case("CirculantLinear over positions", lambda: CirculantLinear(5, 4, 3), (2, 3, 5)),
    *(
        Case(f"Conv2d({_words(how)})", partial(nn.Conv2d, 4, 3, (3, 5), **how), SHAPES[2])
        for how in PADDINGS
    ),
    _complex(
        "complex Conv2d of one pixel in groups",
        lambda: Seq(ComplexConv2d(4, 4, 3), ComplexConv2d(4, 4, 1, groups=2)),
        (4, 9, 8),
    ),
    _complex(
        "complex Conv2d of maps one pixel wide",
        lambda: Seq(
            ComplexConv2d(15, 15, 1), ComplexConv2d(15, 6, (2, 1), padding=(0, 1), groups=3)
        ),
        (15, 9, 1),
    ),
    _complex(
        "complex Conv2d of few channels",
        lambda: Seq(ComplexConv2d(1, 16, 3, padding=1), Cardioid(), ComplexConv2d(16, 8, 2)),
        (1, 6, 15),
    ),
    _complex(
        "complex Conv2d of few channels, strided",
        lambda: Seq(Cardioid(), ComplexConv2d(3, 32, (5, 3), stride=2, padding=2, dilation=(1, 2))),
        (3, 9, 25),
    ),
    _complex(
        "complex Conv2d of many channels",
        lambda: Seq(
            ComplexConv2d(16, 32, 3, padding=1),
            Cardioid(),
            ComplexConv2d(32, 16, 3, padding=(0, 2)),
        ),
        (16, 9, 8),
    ),
    _complex("Conv1d of one number", lambda: ComplexConv1d(2, 14, 2, padding=1, groups=2), (2, 1)),
    Case(
        "Conv2d of many channels",
        lambda: nn.Conv2d(18, 2, (3, 2), stride=2, padding=1, dilation=2),
        (18, 11, 9),
    ),
    Case("Conv2d by ghost norm", lambda: nn.Conv2d(64, 64, 3), (64, 3, 4)),
    Case("Conv2d of large examples", lambda: nn.Conv2d(16, 64, 3, padding=1), (16, 44, 44)),
    Case(
        "ConvTranspose2d with output padding",
        lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1),
        (4, 5, 6),
    ),
    _complex("ComplexConvTranspose2d k = s", lambda: ComplexConvTranspose2d(4, 3, 2, 2), (4, 5, 6)),
    _complex(
        "MagnitudeMaxPool2d",
        lambda: Seq(ComplexConv2d(2, 4, 2), MagnitudeMaxPool2d(2), ComplexConv2d(4, 1, 1)),
        (2, 7, 8),
    ),
    _complex(
        "AdaptiveMagnitudeMaxPool2d",
        lambda: Seq(ComplexConv2d(2, 4, 2), AdaptiveMagnitudeMaxPool2d(2)),
        (2, 6, 8),
    ),
    _complex(
        "ComplexAvgPool2d", lambda: Seq(ComplexConv2d(2, 4, 2), ComplexAvgPool2d(2)), (2, 6, 8)
    ),
    Case(
        "Embedding",
        lambda: Seq(nn.Embedding(7, 5, padding_idx=2), nn.Flatten(), nn.Linear(30, 3)),
        (6,),
        "index",
    ),
    Case(
        "Embedding, called twice",
        lambda: Made(
            lambda net, x: net.last((net.words(x) * net.words(x.flip(1))).flatten(1)),
            words=nn.Embedding(7, 5),
            last=nn.Linear(30, 3),
        ),
        (6,),
        "index",
    ),
    Case(
        "GroupNorm", lambda: Seq(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(True)), (4, 6, 7)
    ),
    _complex(
        "ComplexGroupNorm",
        lambda: Seq(
            ComplexConv2d(4, 6, 3), ComplexGroupNorm(2, 6), Cardioid(), ComplexConv2d(6, 2, 3)
        ),
        (4, 6, 7),
    ),
    _complex(
        "ComplexGroupNorm of rows", lambda: Seq(ComplexGroupNorm(2, 6), _c(nn.Linear, 6, 2)), (6,)
    ),
    _complex("ComplexGroupNorm of volumes", lambda: ComplexGroupNorm(2, 4), (4, 3, 4, 2)),
    _complex(
        "ComplexInstanceNorm", lambda: Seq(ComplexConv1d(4, 6, 3), ComplexInstanceNorm(6)), (4, 9)
    ),
    _complex(
        "ComplexLayerNorm", lambda: Seq(ComplexConv2d(4, 6, 3), ComplexLayerNorm(6)), (4, 6, 7)
    ),
    Case("InstanceNorm1d", lambda: nn.InstanceNorm1d(4, affine=True), (4, 9)),
    Case("our InstanceNorm1d", lambda: InstanceNorm1d(4, affine=True), (4, 9)),
    Case("InstanceNorm3d", lambda: nn.InstanceNorm3d(4, affine=True), (4, 3, 4, 5)),
    Case("LayerNorm over two dimensions", lambda: nn.LayerNorm((5, 4)), (3, 5, 4)),
    Case("RMSNorm", lambda: Seq(nn.Linear(4, 6), nn.RMSNorm(6)), (5, 4)),
    Case("PReLU", lambda: Seq(nn.Conv1d(4, 6, 3), nn.PReLU(6), nn.PReLU()), (4, 9)),
    Case("LSTM", lambda: Sequences(nn.LSTM(3, 4, batch_first=True)), (5, 3)),
    Case("GRU, twice both ways", lambda: Sequences(nn.GRU(3, 4, 2, bidirectional=True)), (5, 3)),
    Case("RNN", lambda: Sequences(nn.RNN(3, 4, nonlinearity="relu", bias=False)), (5, 3)),
    Case("packed LSTM", lambda: Sequences(nn.LSTM(3, 4, batch_first=True), True), (5, 3)),
    Case("a layer without a rule", lambda: Seq(OwnScale(), nn.Linear(3, 3), OwnScale()), (3,)),
    Case("a layer called three times", lambda: Twice(nn.Linear(4, 4)), (4,)),
    _complex("called three times", lambda: Twice(ComplexConv2d(3, 3, 3, padding=1)), (3, 5, 6)),
    Case("a shared weight", _tied, (4,)),
    Case("a layer under three names", lambda: _three_names(nn.Linear(4, 4)), (4,)),
    Case("partly frozen", _partly_frozen, (4,)),
    Case(
        "real U-Net shape", lambda: UNetShape(nn.Conv2d, nn.ConvTranspose2d, nn.Tanh()), (2, 7, 9)
    ),
    _complex(
        "complex U-Net shape",
        lambda: UNetShape(ComplexConv2d, ComplexConvTranspose2d, CReLU()),
        (2, 7, 9),
    ),
    Case("InstanceNorm2d", lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 5)),
    Case("standardised Conv3d", lambda: standardise(nn.Conv3d(2, 3, 2)), (2, 3, 4, 3)),
    _complex("standardised ComplexConv1d", lambda: standardise(ComplexConv1d(2, 3, 3)), (2, 7)),
    _complex(
        "standardised ComplexConv3d", lambda: standardise(ComplexConv3d(2, 3, 2)), (2, 3, 4, 3)
    ),
]


def _activation(name: str) -> Case:
    # Real activations are nn's own subclasses; any other is complex.
    is_real = isinstance(activation(name, 5), nn.ReLU | nn.Mish | nn.Sigmoid | nn.Tanh)
    linear = partial(nn.Linear, dtype=torch.float32 if is_real else torch.complex64)
    build = lambda: Seq(linear(4, 5), activation(name, 5), linear(5, 3))  # noqa: E731
    return Case(f"activation {name}", build, (4,), "real" if is_real else "complex")


CASES: list[Case] = [*LAYERS, *(_activation(name) for name in names("activation"))]
