"""ResNet-20 for 32×32 images, and ResNet-18 with ImageNet weights for transfer learning.

ResNet-20 (He et al. 2016, section 4.2) has GroupNorm here, because BatchNorm mixes examples.
GReDP's Table III has the same layers (7, 6 and 6 convolutions, then 64 units), but with 2×2 average
pooling instead of strides, and states neither widths nor a normalisation. The widths here are those
of He et al.

In ResNet-18, the last convolutions and a new head are trained (GReDP, Table VI). BatchNorm keeps
its ImageNet statistics and weights as constants, so examples do not influence each other. The
weights are public: ε does not cover the images that they were trained on.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from zdp_bench.disk import expand_home
from zdp_bench.errors import UserError, first_line, require
from zdp_bench.foreign_files import Unfit, parse_weights, read_setting
from zdp_bench.models import WeightsFile, Width, image_shape
from zdp_bench.registry import register

WIDTHS = (16, 32, 64)
BLOCKS = 3
IMAGENET = "imagenet"
MAX_WEIGHTS = 1 << 27  # bytes of a file; the published one has 47 million
UNTRAINED = "untrained"  # random weights, to try a recipe without a download


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with GroupNorm, and a skip connection.

    If the map shrinks, the skip connection is subsampled and padded with zero channels.

    Shapes: [B, in_channels, H, W] -> [B, out_channels, ⌈H/stride⌉, ⌈W/stride⌉].

    Args:
        in_channels, out_channels: number of channels of the input and of the output.
        stride: stride of the first convolution.
        groups: number of groups of each GroupNorm.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        groups: int,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.stride = stride
        self.new_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        subsampled = x[:, :, :: self.stride, :: self.stride]
        skip = F.pad(subsampled, (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(y + skip)


@register("model", "resnet20")
class ResNet20(nn.Module):
    """ResNet-20 with GroupNorm.

    Shapes: [B, C, H, W], or [B, H, W] with one channel, -> [B, outputs].

    Args:
        groups: number of groups of each GroupNorm; must divide 16.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        groups: Width = 8,
    ) -> None:
        super().__init__()
        divides = not any(width % groups for width in WIDTHS)
        require(divides, "model.groups", groups, "must divide the 16, 32 and 64 channels")
        rule = "examples must be images, [channels, height, width]"
        require(len(input_shape) in (2, 3), "model=resnet20", list(input_shape), rule)
        self.stem = nn.Sequential(
            nn.Conv2d((1, *input_shape)[-3], WIDTHS[0], 3, padding=1, bias=False),
            nn.GroupNorm(groups, WIDTHS[0]),
            nn.ReLU(),
        )
        widths = [width for width in WIDTHS for _ in range(BLOCKS)]
        blocks = []
        for in_channels, out_channels in pairwise([WIDTHS[0], *widths]):
            stride = 1 if in_channels == out_channels else 2
            blocks.append(ResidualBlock(in_channels, out_channels, stride, groups))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTHS[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) if x.dim() == 3 else x
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


@register("model", "resnet18_transfer")
class Transfer(nn.Module):
    """ResNet-18 for transfer learning.

    Shapes: [B, 3, H, W] -> [B, outputs].

    Args:
        convolutions: number of convolutions to train, counted from the last.
        weights: "imagenet" (downloaded by torchvision), the path of a file, or "untrained".
        enlarge: integer factor by which images are enlarged first.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        convolutions: Annotated[int, Interval(ge=1, le=2)] = 1,
        weights: Annotated[str, WeightsFile((IMAGENET, UNTRAINED), MAX_WEIGHTS)] = IMAGENET,
        enlarge: Width = 1,
    ) -> None:
        from torchvision.models import resnet18  # imported here, because it takes a second
        from torchvision.ops import FrozenBatchNorm2d

        super().__init__()
        colours = image_shape("resnet18_transfer", input_shape)[0]
        require(colours == 3, "model", "resnet18_transfer", "needs images of three colours")
        self.network = resnet18(norm_layer=FrozenBatchNorm2d)
        self.enlarge = enlarge
        try:
            if weights != UNTRAINED:
                self.network.load_state_dict(_weights(weights))
        except RuntimeError as error:
            why = first_line(error)[:-1]
            raise UserError(
                f"model.weights={weights}: not the weights of a ResNet-18 ({why})."
            ) from None
        self.network.requires_grad_(False)
        last = self.network.layer4[-1]
        for layer in (last.conv2, last.conv1)[:convolutions]:
            layer.requires_grad_(True)
        self.network.fc = nn.Linear(self.network.fc.in_features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.enlarge > 1:
            x = F.interpolate(x, scale_factor=self.enlarge, mode="bilinear", align_corners=False)
        return self.network(x)


def missing_weights(source: str) -> str:
    """Return a phrase that names the weights that are missing; empty if none are."""
    if source == UNTRAINED:
        return ""
    path = _path_of(source)
    return "" if path.is_file() else f"the ImageNet weights of ResNet-18 are missing ({path.name})"


def _path_of(source: str) -> Path:
    """Return the path of the weights, which torchvision may still have to download."""
    from torchvision.models import ResNet18_Weights

    name = Path(ResNet18_Weights.IMAGENET1K_V1.url).name
    downloaded = Path(torch.hub.get_dir()) / "checkpoints" / name
    return downloaded if source == IMAGENET else expand_home(source)


def _weights(source: str) -> dict[str, Tensor]:
    from torchvision.models import ResNet18_Weights

    path = _path_of(source)
    if source == IMAGENET and not path.is_file():
        try:
            ResNet18_Weights.IMAGENET1K_V1.get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:  # a RuntimeError if the hash differs
            raise UserError(
                f"model.weights=imagenet: torchvision could not download them ({error}). Set "
                "model.weights=FILE to a copy of resnet18-f37072fd.pth."
            ) from None
    advice = "Set it to imagenet, untrained, or a copy of resnet18-f37072fd.pth."
    content = read_setting(f"model.weights={source}", path, MAX_WEIGHTS, advice)
    try:
        return parse_weights(content)
    except Unfit as error:
        raise UserError(f"model.weights={source}: {error}.") from None
    except Exception as error:
        raise UserError(
            f"model.weights={source}: cannot be read as weights ({type(error).__name__})."
        ) from None
