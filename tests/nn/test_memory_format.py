"""Which memory order a network's maps have, and that every pass of a run uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zdp_bench.gradients import clipped_sum
from zdp_bench.nn.memory_format import arrange, suits_channels_last
from zdp_bench.registry import lookup

IMAGES = (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "options", "last"),
    [
        ("resnet20", {}, False),
        ("model3", {}, True),
        ("alexnet", {}, True),
        ("vgg11", {"hidden": 8}, False),
        ("real_conv_linear", {}, False),
        ("real_cnn", {"channels": [4, 8]}, True),
        ("complex_cnn", {"channels": [4, 8]}, True),
        ("complex_conv_linear", {}, True),
        ("real_mlp", {"hidden": [4]}, False),
    ],
)
def test_order_follows_from_the_layers(name: str, options: dict[str, Any], last: bool) -> None:
    with torch.device("meta"):
        model = lookup("model", name)(IMAGES, 10, **options)
    assert suits_channels_last(model) is last


class Watching(nn.Sequential):
    """Two convolutions, and the memory orders of what it was called with."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), *norms, nn.Conv2d(4, 2, 3), nn.Flatten())
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return super().forward(x)


@pytest.mark.parametrize("came", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("norms", "last"), [([], True), ([nn.GroupNorm(2, 4)], False)])
def test_private_pass_has_the_order_of_the_model_whatever_comes(
    came: torch.memory_format, norms: list[nn.Module], last: bool
) -> None:
    model = Watching(*norms)
    x = torch.randn(5, 3, 8, 8).contiguous(memory_format=came)
    clipped_sum(model, lambda y, _: y.square().sum(dim=1), (x, torch.zeros(5)), 1.0, engine="fast")
    assert model.seen[-1] is last


def test_what_is_no_map_stays_as_it_is() -> None:
    x = torch.randn(2, 3)
    assert arrange(nn.Linear(3, 1), x) is x
