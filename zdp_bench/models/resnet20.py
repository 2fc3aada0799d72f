"""ResNet-20 for 32×32 images (He et al. 2016, section 4.2) with GroupNorm instead of BatchNorm,
which mixes examples.

GReDP's Table III is this network layer by layer (7, 6 and 6 convolutions, then 64 units), but with
2×2 average pooling instead of He's strides, and without widths or a normalisation; the widths here
are He's.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.registry import register

WIDTHS = (16, 32, 64)
BLOCKS = 3


class Block(nn.Module):
    """Two 3×3 convolutions and a skip connection.

    If the map shrinks, the skip is subsampled and padded with zero channels.
    """

    def __init__(self, wide: int, narrow: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide, narrow, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, narrow)
        self.stride, self.more = stride, narrow - wide

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(y + short)


class ResNet20(nn.Module):
    """Shapes: [B, C, H, W], or [B, H, W] with one channel, -> [B, outputs]."""

    def __init__(self, images: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(images, WIDTHS[0], 3, padding=1, bias=False),
            nn.GroupNorm(groups, WIDTHS[0]),
            nn.ReLU(),
        )
        blocks: list[nn.Module] = []
        wide = WIDTHS[0]
        for width in WIDTHS:
            for index in range(BLOCKS):
                blocks.append(Block(wide, width, 2 if index == 0 and width != wide else 1, groups))
                wide = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(wide, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) if x.dim() == 3 else x
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


@register("model", "resnet20")
def resnet20(input_shape: tuple[int, ...], outputs: int, *, groups: int = 8) -> ResNet20:
    """ResNet-20. groups: of each GroupNorm."""
    require(
        groups > 0 and not any(w % groups for w in WIDTHS),
        "model.groups",
        groups,
        "must divide the 16, 32 and 64 channels",
    )
    require(
        len(input_shape) in (2, 3),
        "model=resnet20",
        list(input_shape),
        "records must be images, [channels, height, width]",
    )
    return ResNet20((1, *input_shape)[-3], outputs, groups)
