"""What is put into a model after its check ends the training, wherever it is put."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tests.library.conftest import Make
from tests.library.small import network, train
from zdp_bench.errors import UserError


def mix(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output - 10 * output.mean(0) if isinstance(module, nn.Linear) else output


def put_another_layer(model: nn.Sequential) -> None:
    model[0] = nn.Linear(model[0].in_features, model[0].out_features)


def put_another_bias(model: nn.Sequential) -> None:
    model[0].bias = nn.Parameter(torch.zeros_like(model[0].bias))


@pytest.mark.parametrize("change", [put_another_layer, put_another_bias, lambda m: m.double()])
def test_a_parameter_that_is_replaced(make: Make, change: Callable[[nn.Module], object]) -> None:
    model = network()
    private = make(model)
    batches = private.batches()
    private.step(next(batches))
    change(model)
    with pytest.raises(UserError, match="replaced after make_private"):
        private.step(next(batches))


def test_a_hook_on_all_modules(make: Make) -> None:
    private = make(network())
    batches = private.batches()
    private.step(next(batches))
    hook = register_module_forward_hook(mix)
    try:
        with pytest.raises(UserError, match="_global_forward_hooks"):
            train(private)
    finally:
        hook.remove()


def test_the_generator_does_not_tell_how_many_examples_were_drawn(make: Make) -> None:
    private = make(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    before = torch.get_rng_state()
    private.step(next(private.batches()))
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_that_are_none(make: Make) -> None:
    for wrong in ({"seed": -1}, {"unit": ["a"] * 60, "max_records": 1.5}):
        with pytest.raises(UserError, match=r"must be"):
            make(**wrong)
