"""Values that torch would take and cannot use are refused by key, before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from zdp_bench.config import configured
from zdp_bench.config.plugins import OPTIMIZERS, SCHEDULERS, find_builder, own_keys
from zdp_bench.config.ranges import RANGES, most_threads
from zdp_bench.errors import UserError

ADAM, EXPONENTIAL = "optimizer=adam", "scheduler=exponential_lr"
WRONG = [
    (ADAM, "optimizer.betas=[0.9]", "must be two numbers in [0, 1), such as [0.9,0.999]"),
    (ADAM, "optimizer.betas=[0.9,0.99,0.9]", "must be two numbers"),
    (ADAM, "optimizer.betas=[0.9,1]", "must be two numbers"),
    (ADAM, "+optimizer.capturable=true", "is not known"),
    (ADAM, "+optimizer.differentiable=true", "is not known"),
    (ADAM, "+optimizer.amsgrad=3", "must be true or false"),
    (ADAM, "optimizer.lr=inf", "must be a number, 0 or more, and finite"),
    (ADAM, "optimizer.lr=null", "optimizer.lr=null: must be a number"),
    (ADAM, "optimizer.lr=abc", "must be a number, 0 or more"),
    ("optimizer=sgd", "optimizer.momentum=-1", "must be a number in [0, 1]"),
    ("optimizer=sgd", "optimizer.lr=nan", "must be a number"),
    ("optimizer=rmsprop", "optimizer.alpha=-1", "must be a number in [0, 1)"),
    *[
        ("scheduler=step_lr", f"scheduler.step_size={size}", "must be a whole number, 1 or more")
        for size in (0, "abc", -1, 1.5)
    ],
    *[
        ("scheduler=step_lr", f"scheduler.gamma={gamma}", "must be a number above 0")
        for gamma in (-5, 0, "inf")
    ],
    *[
        ("scheduler=cosine_annealing_lr", f"scheduler.T_max={end}", "must be a whole number")
        for end in (0, -1, 2.5)
    ],
    *[
        (EXPONENTIAL, f"scheduler.gamma={gamma}", "must be a number above 0")
        for gamma in ("abc", "null", 0)
    ],
    ("scheduler=multi_step_lr", "scheduler.milestones=[a]", "must be a list of epochs"),
    ("scheduler=multi_step_lr", "scheduler.milestones=3", "must be a list of epochs"),
    (EXPONENTIAL, "+scheduler.last_epoch=3", "is not known"),
    ("scheduler=reduce_on_plateau", "+scheduler.mode=most", "must be min or max"),
]


@pytest.mark.parametrize(
    ("choice", "wrong", "message"), WRONG, ids=[wrong for _, wrong, _ in WRONG]
)
def test_a_value_torch_cannot_use_is_refused_by_key(choice: str, wrong: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        configured(["recipe=quickstart", choice, wrong])
    assert message in str(caught.value)
    assert wrong.lstrip("+").partition("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_that_yaml_reads_as_text_is_told() -> None:
    with pytest.raises(
        UserError, match=r"optimizer\.lr=1e-3: is text to YAML, which wants a point in it: 0\.001"
    ):
        configured(["recipe=quickstart", "optimizer.lr='1e-3'"])


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


def test_as_many_threads_as_help_are_allowed() -> None:
    assert configured(["recipe=quickstart", f"threads={most_threads()}"]).threads == most_threads()
