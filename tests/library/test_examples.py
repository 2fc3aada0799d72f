"""Batches of a data set."""

from typing import Any

import numpy as np
import pytest
import torch

from zdp_bench.errors import UserError
from zdp_bench.gradients.parts import leaves_of
from zdp_bench.library.examples import Items


class OneBuffer:
    """A data set whose items are all the same tensor or array, filled anew with each."""

    def __init__(self, buffer: Any, item_of: Any) -> None:
        self.buffer, self.item_of = buffer, item_of

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        self.buffer[:] = index
        return self.item_of(self.buffer), index


@pytest.mark.parametrize("buffer", [torch.zeros(3), np.zeros(3, dtype=np.float32)])
@pytest.mark.parametrize(
    "item_of", [lambda x: x, lambda x: (x, 1), lambda x: {"x": x}, lambda x: ([x], x)]
)
def test_items_that_share_memory_stay_apart(buffer: Any, item_of: Any) -> None:
    """All examples were copies of the last, so one example moved the sum by n bounds."""
    inputs, targets = Items(OneBuffer(buffer, item_of)).batch([3, 1, 4])
    assert targets.tolist() == [3, 1, 4]
    assert leaves_of(inputs)[0][:, 0].tolist() == [3, 1, 4]


@pytest.mark.parametrize(
    "items",
    [
        [({"a": 1.0}, 0), ({"b": 1.0}, 0)],
        [({"a": 1.0}, 0), ({"a": 1.0, "b": 1.0}, 0)],
        [((1.0, 2.0), 0), ((1.0,), 0)],
        [({"a": 1.0, "b": 2.0}, 0), ({"b": 1.0, "a": 2.0}, 0)],
    ],
)
def test_items_with_other_keys_are_refused(items: list[Any]) -> None:
    """The keys of the first item that is drawn would decide what the batch holds."""
    for order in ([0, 1], [1, 0]):
        with pytest.raises(UserError, match="some have other keys"):
            Items(items).batch(order)
    with pytest.raises(UserError, match="some have other keys"):
        Items(items).batch([1])  # a batch without the first
