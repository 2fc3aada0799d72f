"""ResNet-18 with ImageNet weights, of which the last convolutions and a new head are trained
(GReDP, Table VI).

BatchNorm keeps its ImageNet statistics and weights as constants, so examples do not influence each
other. The weights are public: ε does not cover what they were trained on.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.errors import UserError, require
from zdp_bench.models.shape import image_shape
from zdp_bench.registry import register

IMAGENET = "imagenet"
UNTRAINED = "untrained"  # random weights, to try a recipe without a download


class Transfer(nn.Module):
    """Shapes: [B, 3, H, W] -> [B, outputs]; images are enlarged by a whole factor first."""

    def __init__(self, network: nn.Module, enlarge: int) -> None:
        super().__init__()
        self.network, self.enlarge = network, enlarge

    def forward(self, x: Tensor) -> Tensor:
        if self.enlarge > 1:
            x = F.interpolate(x, scale_factor=self.enlarge, mode="bilinear", align_corners=False)
        return self.network(x)


@register("model", "resnet18_transfer")
def resnet18_transfer(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    convolutions: int = 1,
    weights: str = IMAGENET,
    enlarge: int = 1,
) -> Transfer:
    """ResNet-18 for transfer learning.

    Args:
        convolutions: how many of the last two are trained.
        weights: imagenet (by torchvision's downloader), the path of a file, or untrained.

    Raises:
        UserError: the weights cannot be loaded.
    """
    from torchvision.models import resnet18  # here, because it takes a second to load
    from torchvision.ops import FrozenBatchNorm2d

    require(1 <= convolutions <= 2, "model.convolutions", convolutions, "must be 1 or 2")
    require(
        image_shape("resnet18_transfer", input_shape)[0] == 3,
        "model",
        "resnet18_transfer",
        "needs images of three colours",
    )
    network = resnet18(norm_layer=FrozenBatchNorm2d)
    try:
        network.load_state_dict(network.state_dict() if weights == UNTRAINED else _weights(weights))
    except RuntimeError as error:
        raise UserError(
            f"model.weights={weights}: not the weights of a ResNet-18 "
            f"({str(error).splitlines()[0]})"
        ) from None
    network.requires_grad_(False)
    last = network.layer4[-1]
    for layer in (last.conv2, last.conv1)[:convolutions]:
        layer.requires_grad_(True)
    network.fc = nn.Linear(network.fc.in_features, outputs)
    return Transfer(network, enlarge)


def missing_weights(source: str) -> str:
    """Return in words which weights would have to be fetched first; empty if none would."""
    from torchvision.models import ResNet18_Weights

    if source == UNTRAINED:
        return ""
    name = Path(ResNet18_Weights.IMAGENET1K_V1.url).name
    kept = Path(torch.hub.get_dir()) / "checkpoints" / name
    path = kept if source == IMAGENET else Path(source).expanduser()
    return "" if path.is_file() else f"ImageNet's weights of ResNet-18 are not there ({path.name})"


def _weights(source: str) -> dict[str, Tensor]:
    from torchvision.models import ResNet18_Weights

    if source == IMAGENET:
        try:
            return dict(
                ResNet18_Weights.IMAGENET1K_V1.get_state_dict(progress=False, check_hash=True)
            )
        except OSError as error:
            raise UserError(
                f"model.weights=imagenet: torchvision could not download them ({error}). Set "
                "model.weights=FILE to a copy of "
                "resnet18-f37072fd.pth."
            ) from None
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(
            f"model.weights={source}: no such file. Set it to imagenet, untrained, or a copy of "
            "resnet18-f37072fd.pth."
        )
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise UserError(
            f"model.weights={source}: cannot be read as weights ({type(error).__name__})."
        ) from None
