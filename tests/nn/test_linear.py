"""Linear layers: circulant ones are dense matrices; on maps of any memory order, none is copied.

And which memory order a network's maps have, which every pass of a run uses.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zdp_bench.gradients import clipped_sum
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.nn.memory_format import MapLinear, arrange, suits_channels_last
from zdp_bench.registry import lookup


@pytest.mark.parametrize(
    ("inputs", "outputs", "block"),
    [(16, 8, 8), (12, 6, 3), (10, 7, 4), (5, 3, 8), (6, 6, 1), (9, 10, 5)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_by_fft_is_the_dense_matrix(
    inputs: int, outputs: int, block: int, bias: bool
) -> None:
    layer = CirculantLinear(inputs, outputs, block, bias).double()
    x = torch.randn(2, 3, inputs, dtype=torch.float64)
    expected = x @ layer.dense().T + (layer.bias if layer.bias is not None else 0.0)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-13)


def test_a_row_is_the_one_above_it_shifted_right() -> None:
    layer = CirculantLinear(4, 4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(4.0).view(1, 1, 4))
    rows = [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]  # GReDP, eq. 18
    torch.testing.assert_close(layer.dense(), torch.tensor(rows, dtype=torch.float32))


def test_a_block_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        CirculantLinear(4, 4, 0)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.to(memory_format=torch.channels_last),
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    lambda x: x[..., ::2],
    lambda x: x[:, :1],
    lambda x: x[:, :, :1].expand(-1, -1, 4, -1),
    lambda x: x.flatten(2),
    lambda x: x.flatten(1),
    lambda x: x.conj(),
    lambda x: x[:0],
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_a_linear_layer_behind_flatten(
    layout: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = layout(torch.randn(3, 4, 5, 6, dtype=dtype))
    numbers = x[0].numel() if len(x) else 120
    ours, theirs = MapLinear(numbers, 2, dtype=dtype), nn.Linear(numbers, 2, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    results = []
    for layer, read in ((ours, lambda x: x), (theirs, lambda x: x.flatten(1))):
        given = x.detach().requires_grad_()
        y = layer(read(given))
        gradients = torch.autograd.grad((y * y.conj()).real.sum(), [given, *layer.parameters()])
        results.append((y, *gradients))
    for mine, torchs in zip(*results, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-12)


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
        model = lookup("model", name)((3, 32, 32), 10, **options)
    assert suits_channels_last(model) is last


class Watching(TorchDispatchMode):
    """Notes whether the maps of three channels that are convolved are channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default and args[0].shape[1] == 3:
            self.orders.append(args[0].is_contiguous(memory_format=torch.channels_last))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("came", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("norms", "last"), [([], True), ([nn.GroupNorm(2, 4)], False)])
def test_private_pass_has_the_order_of_the_model_whatever_comes(
    came: torch.memory_format, norms: list[nn.Module], last: bool
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *norms, nn.Conv2d(4, 2, 3), nn.Flatten())
    x = torch.randn(5, 3, 8, 8).contiguous(memory_format=came)
    with Watching() as watched:
        batch = (x, torch.zeros(5))
        clipped_sum(model, lambda y, _: y.square().sum(dim=1), batch, 1.0, engine="fast")
    assert watched.orders[-1] is last


def test_what_is_no_map_stays_as_it_is() -> None:
    x = torch.randn(2, 3)
    assert arrange(nn.Linear(3, 1), x) is x


def test_an_empty_batch_of_a_circulant_layer_is_that_of_a_linear_one() -> None:
    for shape in ((0, 10), (2, 0, 10)):
        layer, x = CirculantLinear(10, 7, 4), torch.zeros(shape)
        y = layer(x)
        assert y.shape == (*shape[:-1], 7)
        gradients = torch.autograd.grad(y.sum(), [*layer.parameters()])
        assert not any(gradient.any() for gradient in gradients)
    assert CirculantLinear(0, 7, 4).weight.shape == (2, 0, 4)
