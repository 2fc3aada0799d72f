"""The workload that the sides of a comparison share: a model and a batch of random examples.

For the library's tables, there are small networks of PyTorch's own layers, as users have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.gradients import Batch
from zdp_bench.nn.memory_format import channels_last
from zdp_bench.privacy.noise import real_view
from zdp_bench.registry import lookup

BOUND = 1.0  # clipping norm
RATE = 1e-3  # learning rate


@dataclass(frozen=True)
class Step:
    """One side of a comparison, ready to run.

    Attributes:
        run: takes the step to be timed.
        answer: returns the result without noise, in which the sides must agree.
    """

    run: Callable[[], object]
    answer: Callable[[], Tensor]


@dataclass(frozen=True)
class Workload:
    """One model on one batch of random examples.

    Attributes:
        model: name of the model, one of `NETWORKS` or a registered one.
        input_shape: shape of an example.
        outputs: number of outputs.
        batch: batch size.
        loss: 'squares' (squared error of the outputs), 'classes' (cross-entropy), or 'map' (mean
            square of a map).
        options: options of the model.
    """

    model: str
    input_shape: tuple[int, ...]
    outputs: int
    batch: int
    loss: Literal["squares", "classes", "map"]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complex(self) -> bool:
        return self.model.startswith("complex")

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        make: Callable[..., nn.Module] = NETWORKS.get(self.model) or lookup("model", self.model)
        model = make(tuple(self.input_shape), self.outputs, **self.options)
        return model.to(device())

    def examples(self, last: bool) -> Batch:
        """Return inputs and targets; with `last`, images are in channels-last memory format."""
        torch.manual_seed(1)
        dtype = torch.complex64 if self.is_complex else torch.float32
        inputs = torch.randn(
            self.batch,
            *self.input_shape,
            dtype=dtype,
            device=device(),
        )
        if last and inputs.dim() == 4:
            inputs = channels_last(inputs)
        if self.loss == "classes":
            return inputs, torch.randint(0, self.outputs, (self.batch,), device=device())
        return inputs, torch.randn(self.batch, self.outputs, device=device())

    @property
    def loss_of(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss as a user writes it: (outputs, targets) -> one loss per example, [B]."""
        if self.loss == "classes":
            return partial(F.cross_entropy, reduction="none")
        return mean_square if self.loss == "map" else square_error

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return PyTorch's SGD, so that all sides have the same optimizer."""
        return torch.optim.SGD(parameters, lr=RATE)


def mean_square(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.square().flatten(1).mean(dim=1)


def square_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).sum(dim=1)


def device() -> torch.device:
    """Return the GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """Return all tensors as one real vector, in the alphabetical order of their names.

    The order is fixed, because Opacus's LSTM has its parameters in another order than PyTorch's.
    """
    return torch.cat([as_real(tensors[name]) for name in sorted(tensors)])


def as_real(value: Tensor) -> Tensor:
    """Return a tensor as a real vector, with two entries for each complex one."""
    return real_view(value.resolve_conj()).flatten()


class Criterion(nn.Module):
    """The loss in the form that Opacus's ghost mode takes: [B] for any `reduction`."""

    reduction = "mean"

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.workload.loss_of(outputs, targets)


# Networks, built from the shape of an example, the number of outputs and a width.


def norm_cnn(
    input_shape: tuple[int, ...],
    outputs: int,
    width: int,
) -> nn.Module:
    """Return a network of three convolutions with GroupNorm and pooling, and a linear head."""
    layers: list[nn.Module] = []
    channels, height, breadth = input_shape
    for size in (width // 2, width, width):
        convolution = nn.Conv2d(channels, size, 3, padding=1)
        layers += [convolution, nn.GroupNorm(8, size), nn.ReLU(), nn.AvgPool2d(2)]
        channels = size
    head = nn.Linear(width * (height // 8) * (breadth // 8), outputs)
    return nn.Sequential(*layers, nn.Flatten(), head)


class LSTM(nn.Module):
    """An LSTM over sequences [B, T, D], with a linear head on the last state."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        width: int,
    ) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_shape[1], width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        return self.head(states[:, -1])


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: attention with four heads, then two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        heads = []
        for layer in (self.query, self.key, self.value):
            split = layer(normed).unflatten(2, (4, -1))
            heads.append(split.transpose(1, 2))
        attended = F.scaled_dot_product_attention(*heads)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.wide(self.second(x)))
        return x + self.narrow(hidden)


class Transformer(nn.Module):
    """Two transformer blocks over sequences [B, T, D], with a linear head on the mean over time."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        width: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Linear(input_shape[1], width)
        self.blocks = nn.Sequential(TransformerBlock(width), TransformerBlock(width))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states = self.blocks(self.embedding(x))
        return self.head(states.mean(dim=1))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "norm_cnn": norm_cnn,
    "lstm": LSTM,
    "transformer": Transformer,
}
