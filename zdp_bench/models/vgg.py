"""VGG-11 (Simonyan & Zisserman 2015, configuration A), without norms or with GroupNorm: batch norm mixes records."""

from __future__ import annotations

from torch import Tensor, nn

from zdp_bench.registry import register

WIDTHS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)  # 0: 2×2 max-pooling


class VGG(nn.Module):
    """[B, C, H, W] -> [B, outputs]; H, W at least 32. The map is pooled to 7×7 whatever the input's size."""

    def __init__(self, images: int, outputs: int, groups: int, hidden: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = images
        for width in WIDTHS:
            if not width:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, width, 3, padding=1), *([nn.GroupNorm(groups, width)] if groups else []), nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        wide = channels * 49
        self.classifier = nn.Sequential(
            nn.Linear(wide, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


@register("model", "vgg11")
def vgg11(input_shape: tuple[int, ...], outputs: int, *, groups: int = 0, hidden: int = 4096) -> VGG:
    """VGG-11. groups: of each GroupNorm; 0 leaves the norms out. hidden: width of the two fully connected layers."""
    return VGG(input_shape[0], outputs, groups, hidden)
