"""Features of a small network that learned contrastively from pictures of a random process.

No photographs were used (Baradad et al. 2021, "Learning to see by looking at noise"; for private
training Tang et al. 2023, DP-RandP). `datasets/random_process.py` generates the pictures and trains
the network. Its weights are in the file beside this one.
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
GRIDS = (4, 2)  # cells along a side in which the last two stages are averaged
SIZES = [2 * WIDTH * GRIDS[0] ** 2, 4 * WIDTH * GRIDS[1] ** 2]  # number of features of each stage


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
    """The network, a ResNet of three stages whose last two are returned.

    Shapes: [B, 3, H, W] in [0, 1] -> maps [B, 2 width, H/2, W/2] and [B, 4 width, H/4, W/4].
    """

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
    """Return the features of both stages, averaged over pictures and their mirror images.

    Shapes: [B, 3, H, W] -> [B, 2048] and [B, 1024].
    """
    stages = zip(encoder(x), encoder(x.flip(-1)), GRIDS, strict=True)
    features = []
    for stage, mirrored, grid in stages:
        mean = (stage + mirrored) / 2
        features.append(F.adaptive_avg_pool2d(mean, grid).flatten(1))
    return features


@register("representation", "random_process")
class RandomProcess(nn.Module):
    """Features learned from pictures of a random process.

    Shapes: pictures float [B, (C,) H, W] with pixels in [0, 1] and sides of at least 16 pixels ->
    features [B, 3072].

    The mean of the features over pictures of the process, which are public, is subtracted. They are
    divided by the square root of their standard deviation over these pictures. The features of each
    stage are then scaled to the same norm.

    Args:
        input_shape: shape of an example.
    """

    version = 1
    takes_unit_pixels = True
    mean: Tensor
    deviation: Tensor

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        require_pictures("random_process", input_shape, min_side=16)
        content = WEIGHTS.read_bytes()
        weights = load(content)
        self.encoder = Encoder()
        for name in ("mean", "deviation"):
            self.register_buffer(name, weights.pop(name).float())
        # Not strict, because the file lacks BatchNorm's numbers of batches.
        self.encoder.load_state_dict(weights, strict=False)
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
