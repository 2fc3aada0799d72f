"""A linear layer on maps is `flatten(1)` and `nn.Linear` in any memory order, without copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zdp_bench.nn.memory_format import MapLinear, in_memory_order, in_own_order

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
    torch.manual_seed(0)
    x = layout(torch.randn(3, 4, 5, 6, dtype=dtype))
    numbers = x[0].numel() if len(x) else 120
    ours, theirs = MapLinear(numbers, 2, dtype=dtype), nn.Linear(numbers, 2, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    results = []
    for layer, read in ((ours, lambda x: x), (theirs, lambda x: x.flatten(1))):
        given = x.detach().requires_grad_()
        y = layer(read(given))
        found = torch.autograd.grad((y * y.conj()).real.sum(), [given, *layer.parameters()])
        results.append((y, *found))
    for mine, torchs in zip(*results, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_in_memory_order_find_back(layout: Callable[[Tensor], Tensor]) -> None:
    x = layout(torch.randn(3, 4, 5, 6, dtype=torch.complex64))
    assert torch.equal(in_own_order(in_memory_order(x), x), x.flatten(1))


def test_maps_without_gaps_are_not_copied() -> None:
    for layout in LAYOUTS[:3]:
        x = layout(torch.randn(3, 4, 5, 6))
        assert in_memory_order(x).data_ptr() == x.data_ptr()
        assert in_memory_order(x).is_contiguous()
