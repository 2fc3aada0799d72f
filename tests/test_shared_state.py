"""The guard of what tests share sees a change wherever a module's names lead."""

import os
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from tests.shared_state import differences, process_settings, shared_values


def closure_over(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: layer.double()


LAYER, TENSOR, ARRAY = nn.Linear(2, 2), torch.zeros(2), np.zeros(2)
PLACES = {
    "a layer": (LAYER, lambda: LAYER.double()),
    "a layer's mode": (LAYER, lambda: LAYER.eval()),
    "a closure": (closure_over(LAYER), lambda: LAYER.weight.data.add_(1)),
    "a table": ({"a": [TENSOR]}, lambda: TENSOR.add_(1)),
    "a test's parameter": (
        pytest.mark.parametrize("layer", [LAYER])(lambda layer: None),
        lambda: LAYER.weight.data.zero_(),
    ),
    "an array": ((ARRAY,), lambda: ARRAY.fill(3)),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_change_of_what_is_shared_is_seen(place: str) -> None:
    value, change = PLACES[place]
    state, numbers, array = LAYER.state_dict(), TENSOR.clone(), ARRAY.copy()
    state = {name: tensor.clone() for name, tensor in state.items()}
    module = ModuleType("holder")
    module.held = value  # type: ignore[attr-defined]
    before = shared_values(module)
    assert before
    assert not differences(before, shared_values(module))
    try:
        change()
        assert differences(before, shared_values(module))
    finally:
        LAYER.float().train().load_state_dict(state)
        TENSOR.copy_(numbers)
        ARRAY[:] = array


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("deterministic mode", lambda: torch.set_deterministic_debug_mode("warn")),
        ("environment variable ZDP_TEST", lambda: os.environ.update(ZDP_TEST="1")),
        ("working directory", lambda: os.chdir("/")),
        ("grad mode", lambda: torch.set_grad_enabled(False)),
    ],
)
def test_a_setting_that_is_left_changed_is_seen(
    name: str, change: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZDP_TEST", "0")
    monkeypatch.chdir(os.getcwd())
    before = process_settings()
    try:
        change()
        assert differences(before, process_settings()) == [name]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_deterministic_debug_mode("default")
        torch.set_grad_enabled(True)
