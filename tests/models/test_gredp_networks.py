"""The networks of GReDP's Tables II to VI: sizes, what trains, and where ImageNet weights come
from.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from torch import nn
from torchvision.models import ResNet18_Weights, resnet18

from zdp_bench.errors import UserError
from zdp_bench.gradients.clipping import trainable
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.registry import lookup


@cache
def some_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(resnet18().state_dict())


def weights_file(folder: Path) -> str:
    path = folder / "resnet18.pth"
    if not path.exists():
        torch.save(some_weights(), path)
    return str(path)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_lenet5_is_lecuns() -> None:
    assert parameters(lookup("model", "lenet5")((28, 28), 10)) == 156 + 2416 + 30840 + 10164 + 850


@pytest.mark.parametrize(
    ("name", "shape"), [("lenet5", (28, 28)), ("model3", (3, 32, 32)), ("alexnet", (3, 32, 32))]
)
def test_circulant_layers_stand_where_dense_ones_do(name: str, shape: tuple[int, ...]) -> None:
    dense, circulant = (
        lookup("model", name)(shape, 10, linear=linear) for linear in ("dense", "circulant")
    )
    pairs = [
        (a, b)
        for a, b in zip(dense.modules(), circulant.modules(), strict=True)
        if isinstance(b, CirculantLinear | nn.Linear)
    ]
    assert len(pairs) in (2, 3)
    for of_dense, of_circulant in pairs:
        assert isinstance(of_circulant, CirculantLinear)
        assert tuple(of_circulant.dense().shape) == tuple(of_dense.weight.shape)
    assert pairs[-1][1].block == 10
    x = torch.randn(2, *shape)
    assert dense(x).shape == circulant(x).shape == (2, 10)


def test_resnet20_has_hes_size() -> None:
    assert parameters(lookup("model", "resnet20")((3, 32, 32), 10)) == 269_722


def test_images_too_small_for_the_network_are_refused() -> None:
    with pytest.raises(UserError, match="8×8: images are too small for that depth"):
        lookup("model", "lenet5")((8, 8), 10)


@pytest.mark.parametrize("convolutions", [1, 2])
def test_transfer_trains_the_last_convolutions_and_a_new_head(
    tmp_path: Path, convolutions: int
) -> None:
    model = lookup("model", "resnet18_transfer")(
        (3, 32, 32), 10, convolutions=convolutions, weights=weights_file(tmp_path)
    )
    retrained = ["network.layer4.1.conv1.weight", "network.layer4.1.conv2.weight"][
        2 - convolutions :
    ]
    assert list(trainable(model)) == [*retrained, "network.fc.weight", "network.fc.bias"]
    torch.testing.assert_close(model.network.conv1.weight, some_weights()["conv1.weight"])
    x = torch.randn(3, 3, 32, 32)
    # nothing mixes examples, and nothing is kept of them
    one, several = (
        model.train()(x[:1]),
        model(x),
    )
    torch.testing.assert_close(one, several[:1])
    assert torch.equal(model.network.bn1.running_mean, some_weights()["bn1.running_mean"])


def test_untrained_weights_need_no_file() -> None:
    model = lookup("model", "resnet18_transfer")(
        (3, 32, 32), 10, convolutions=1, weights="untrained"
    )
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "network.layer4.1.conv2.weight",
        "network.fc.weight",
        "network.fc.bias",
    }
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_without_weights_there_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise URLError("no network")

    make = lookup("model", "resnet18_transfer")
    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", unreachable)
    with pytest.raises(UserError, match=r"could not download them.*Set model\.weights=FILE"):
        make((3, 32, 32), 10)
    with pytest.raises(UserError, match=r"model\.weights=.*absent\.pth: no such file"):
        make((3, 32, 32), 10, weights=str(tmp_path / "absent.pth"))
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(UserError, match="cannot be read as weights"):
        make((3, 32, 32), 10, weights=str(tmp_path / "text.pth"))
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="not the weights of a ResNet-18"):
        make((3, 32, 32), 10, weights=str(tmp_path / "other.pth"))
