"""Small networks of torch's own layers, as users bring them; the bench's table `library` has them.

Each is made from the shape of an example, the number of outputs and a width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class NormCNN(nn.Module):
    """Three convolutions with GroupNorm, halved maps and a linear head: [B, C, H, W]."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int, width: int) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        channels, sizes = input_shape[0], (width // 2, width, width)
        for size in sizes:
            stages += [
                nn.Conv2d(channels, size, 3, padding=1),
                nn.GroupNorm(8, size),
                nn.ReLU(),
                nn.AvgPool2d(2),
            ]
            channels = size
        self.stages = nn.Sequential(*stages, nn.Flatten())
        self.head = nn.Linear(width * (input_shape[1] // 8) * (input_shape[2] // 8), outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x))


class LSTM(nn.Module):
    """An LSTM over vectors [B, T, D]; its last output decides."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_shape[1], width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Block(nn.Module):
    """Attention of four heads and two linear layers, each behind a LayerNorm and beside a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        heads = [
            layer(normed).unflatten(2, (4, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Transformer(nn.Module):
    """Two blocks over vectors [B, T, D]; the mean over time decides."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(input_shape[1], width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)).mean(dim=1))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "norm_cnn": NormCNN,
    "lstm": LSTM,
    "transformer": Transformer,
}
