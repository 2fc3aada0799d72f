"""Features that a small network learned contrastively on pictures of a random process.

No photograph is part of them (Baradad et al. 2021, "Learning to see by looking at noise"; for
private training Tang et al. 2023, DP-RandP). `datasets/random_process.py` makes the pictures and
trains the network, whose weights lie beside this file.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor, nn

from zdp_bench.extras.transforms.normalisation import as_real_pictures, require_pictures
from zdp_bench.registry import register

WEIGHTS = Path(__file__).with_suffix(".safetensors")
WIDTH = 64
GRIDS = (4, 2)  # places along a side, of the last two stages
SIZES = [2 * WIDTH * GRIDS[0] ** 2, 4 * WIDTH * GRIDS[1] ** 2]  # features of each


class Block(nn.Module):
    """A residual block of two convolutions (He et al. 2016)."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.short = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.short(x))


class Encoder(nn.Module):
    """Shapes: [B, 3, H, W] in [0, 1] -> maps [B, 2 width, H/2, W/2] and [B, 4 width, H/4, W/4]."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.first = Block(width, width, 1)
        self.second = Block(width, 2 * width, 2)
        self.third = nn.Sequential(
            Block(2 * width, 4 * width, 2),
            Block(4 * width, 4 * width, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(self.stem((x - 0.5) * 4))
        second = self.second(first)
        return second, self.third(second)


def pooled(encoder: Encoder, x: Tensor) -> list[Tensor]:
    """Return each stage over its grid, the mean of pictures and mirrors: [B, 2048], [B, 1024]."""
    stages = zip(encoder(x), encoder(x.flip(-1)), GRIDS, strict=True)
    features = []
    for stage, mirrored, grid in stages:
        mean = (stage + mirrored) / 2
        features.append(F.adaptive_avg_pool2d(mean, grid).flatten(1))
    return features


@register("representation", "random_process")
class RandomProcess(nn.Module):
    """Features learned on pictures of a random process, of pictures whose pixels lie in [0, 1].

    Shapes: pictures float [B, (C,) H, W], of at least 16 pixels a side, -> features [B, 3072].

    Features are centred by their mean over pictures of the process, which are public, and divided
    by the root of their deviation; then those of each stage get the same norm.
    """

    version = 1
    takes_unit_pixels = True
    mean: Tensor
    deviation: Tensor

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        require_pictures("random_process", input_shape, least=16)
        content = WEIGHTS.read_bytes()
        weights = load(content)
        self.encoder = Encoder()
        for name in ("mean", "deviation"):
            self.register_buffer(name, weights.pop(name).float())
        self.encoder.load_state_dict(weights, strict=False)  # but for counts of batches
        self.facts = {
            "network": "ResNet of 2.4 million weights",
            "weights": WEIGHTS.name,
            "trained_on": "pictures of a random process",
            "licence": "MIT",
            "sha256": hashlib.sha256(content).hexdigest(),
        }

    def forward(self, x: Tensor) -> Tensor:
        x = as_real_pictures(x, "random_process").expand(-1, 3, -1, -1)
        x = x.contiguous(memory_format=torch.channels_last)
        features = torch.cat(pooled(self.encoder, x), dim=1)
        features = (features - self.mean) / self.deviation.sqrt()
        second, third = features.split(SIZES, dim=1)
        stages = [F.normalize(second, dim=1), F.normalize(third, dim=1)]
        return torch.cat(stages, dim=1) * math.sqrt(sum(SIZES) / len(SIZES))
