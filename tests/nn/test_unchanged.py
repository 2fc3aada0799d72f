"""A layer without a bias computes what its type says; one whose weight is computed does not."""

import pytest
from torch import nn
from torch.nn.utils import weight_norm

from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.nn.unchanged import computes_as

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
