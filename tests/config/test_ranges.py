"""Values that torch would take and cannot use are refused by key, before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from zdp_bench.config import configured
from zdp_bench.config.plugins import OPTIMIZERS, SCHEDULERS, find_builder, own_keys
from zdp_bench.config.ranges import RANGES
from zdp_bench.errors import UserError


@pytest.mark.parametrize(
    ("kind", "name"),
    [("optimizer", n) for n in OPTIMIZERS] + [("scheduler", n) for n in SCHEDULERS],
)
def test_every_key_has_a_range_and_every_default_lies_in_it(kind: str, name: str) -> None:
    import inspect

    parameters = inspect.signature(find_builder(kind, name)).parameters
    for key in own_keys(kind, name):
        default = parameters[key].default
        assert key in RANGES
        if default is not inspect.Parameter.empty and not isinstance(default, torch.Tensor):
            assert RANGES[key].holds(list(default) if isinstance(default, tuple) else default), (
                key,
                default,
            )


@pytest.mark.parametrize(("cores", "most"), [(2, 256), (100, 400), (None, 256)])
def test_as_many_threads_as_help_are_allowed(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, most: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert configured(["recipe=quickstart", f"threads={most}"]).threads == most
    with pytest.raises(UserError, match=f"threads={most + 1}: must be at most {most} on this"):
        configured(["recipe=quickstart", f"threads={most + 1}"])
