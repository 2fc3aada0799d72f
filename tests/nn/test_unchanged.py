"""A layer without a bias computes what its type says; one whose weight is computed does not."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm

from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.nn.unchanged import computes_as, is_unchanged

PLAIN = (nn.Linear, CirculantLinear)


class Renamed(nn.Linear):
    """Torch's layer by another name."""


@pytest.mark.parametrize(
    "layer", [CirculantLinear(4, 4, 2, bias=False), nn.Linear(4, 4, bias=False), Renamed(4, 4)]
)
def test_what_computes_the_same_is_taken(layer: nn.Module) -> None:
    assert computes_as(layer, PLAIN)


def test_a_computed_weight_and_another_type_are_not() -> None:
    with pytest.warns(FutureWarning):
        assert not computes_as(weight_norm(nn.Linear(4, 4)), PLAIN)
    assert not computes_as(nn.Conv1d(4, 4, 1), PLAIN)


Forward = Callable[[Tensor], Tensor]


def center(forward: Forward) -> Forward:
    """Mix the examples of a batch."""

    @functools.wraps(forward)
    def centered(inputs: Tensor) -> Tensor:
        outputs = forward(inputs)
        return outputs - outputs.mean(0)

    return centered


@pytest.mark.parametrize("decorate", [center, torch.no_grad(), functools.partial(center)])
def test_a_decorated_forward_is_a_users_own(decorate: Callable[[Forward], Forward]) -> None:
    """`functools.wraps` copies the name of our module, which such a forward was judged by."""
    layer = CirculantLinear(4, 4, 2)
    layer.forward = decorate(layer.forward)  # type: ignore[method-assign]
    assert not is_unchanged(layer)
    assert not computes_as(layer, PLAIN)


def test_a_hook_that_is_a_partial_of_a_users_function_is_foreign() -> None:
    layer = CirculantLinear(4, 4, 2)
    layer.register_forward_hook(functools.partial(print, "hook"))
    assert not is_unchanged(layer)
