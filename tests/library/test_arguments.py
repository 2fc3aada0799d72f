"""Arguments of a wrong type are refused with what was given, what is required and what to write."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zdp_bench
from tests.library.conftest import Make
from tests.library.small import data, defaults, loss, network
from zdp_bench import UserError

MODEL = network()
INPUTS, TARGETS = data().tensors
A_MODULE = r"a torch\.nn module is required: create one, such as"
AN_OPTIMIZER = r"an optimizer of torch\.optim is required: create one from .*SGD\(model"
A_DATASET = r"a map-style Dataset whose items are .*TensorDataset\(inputs, targets\)"
A_LOSS = r"a function of \(outputs, targets\) .*CrossEntropyLoss\(reduction=\"none\"\)"


class Table:
    """What a table of pandas is to a loader: columns by name, and an array of all."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __array__(self) -> Any:
        return INPUTS.numpy()


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters())


REFUSED: list[tuple[str, Any, str, str]] = [
    ("model", nn.Linear, "the class Linear", A_MODULE),
    ("model", optimizer(), "a value of type SGD", A_MODULE),
    ("model", MODEL.state_dict(), "a value of type OrderedDict", A_MODULE),
    ("optimizer", MODEL, "a value of type Sequential", AN_OPTIMIZER),
    ("optimizer", torch.optim.SGD, "the class SGD", AN_OPTIMIZER),
    ("optimizer", [*MODEL.parameters()], "a value of type Parameter", AN_OPTIMIZER),
    (
        "optimizer",
        torch.optim.lr_scheduler.StepLR(optimizer(), 1),
        "a value of type StepLR",
        "step the scheduler after private.step",
    ),
    ("dataset", "mnist", "a value of type str", A_DATASET),
    ("dataset", TensorDataset, "the class TensorDataset", A_DATASET),
    ("dataset", (INPUTS, TARGETS), "a value of type tuple", A_DATASET),
    ("dataset", [INPUTS.numpy(), TARGETS.numpy()], "a value of type list", A_DATASET),
    ("dataset", {"inputs": INPUTS, "targets": TARGETS}, "a value of type dict", A_DATASET),
    ("dataset", INPUTS, "a value of type Tensor", A_DATASET),
    ("dataset", INPUTS.numpy(), "a value of type ndarray", A_DATASET),
    ("dataset", Table(), "a value of type Table", A_DATASET),
    ("dataset", DataLoader(data()), "a value of type DataLoader", "the loader's dataset"),
    ("loss", nn.CrossEntropyLoss, "the class CrossEntropyLoss", A_LOSS),
    ("loss", "cross_entropy", "a value of type str", A_LOSS),
]


@pytest.mark.parametrize(("name", "value", "given", "instead"), REFUSED)
def test_a_wrong_type_is_refused_with_what_was_given_and_what_to_write(
    tmp_path: Path, name: str, value: Any, given: str, instead: str
) -> None:
    arguments = {"model": MODEL} | defaults(MODEL) | {"noise_multiplier": 1.2, name: value}
    with pytest.raises(UserError, match=rf"^{name}: {given} was given, but .*{instead}") as refused:
        zdp_bench.make_private(**arguments, ledger=tmp_path / "ledger.jsonl")
    assert len(str(refused.value)) < 250


def test_a_wrapper_that_is_no_whole_optimizer_is_refused(make: Make) -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base, self.param_groups, self.state = base, base.param_groups, base.state

        def step(self, closure: Any = None) -> None:
            self.base.step()

    model = network()
    wrapper = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match=r"^optimizer: Lookahead has no hooks, .*super\(\)"):
        make(model, optimizer=wrapper)


def test_an_empty_list_of_optimizers_is_refused(make: Make) -> None:
    with pytest.raises(UserError, match=r"^optimizer: the list is empty"):
        make(optimizer=[])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": nn.Linear}, "^model: the class Linear was given"),
        ({"loss": nn.CrossEntropyLoss}, "^loss: the class CrossEntropyLoss was given"),
        ({"batch": (INPUTS.numpy(), TARGETS.numpy())}, r"^batch=.*two tensors \(of arrays, torch"),
        ({"batch": data()}, r"^batch=.*must be \(inputs, targets\)"),
        ({"per_layer": 1}, "^per_layer=1: must be True or False"),
    ],
)
def test_single_functions_refuse_the_same(changed: dict[str, Any], sentence: str) -> None:
    arguments: Any = {"model": MODEL, "loss": loss, "batch": data()[:5]} | changed
    with pytest.raises(UserError, match=sentence):
        zdp_bench.check_model(**arguments)
    with pytest.raises(UserError, match=sentence):
        zdp_bench.clipped_sum(**arguments, bound=1.0)


def test_numbers_of_numpy_and_torch_are_taken(make: Make) -> None:
    private = make(
        epochs=np.int64(1),
        secure=np.True_,
        per_layer=np.False_,
        count_earlier=torch.tensor(True),
        target_epsilon=np.float32(2.0),
        max_grad_norm=torch.tensor(0.5),
        delta=np.array(1e-3),
        micro_batch=np.array(8),
    )
    assert private.terms.target_epsilon == 2.0
    assert private.terms.count_earlier is True
    assert private.keys.secure is True


def test_numbers_of_numpy_and_torch_are_taken_by_single_functions() -> None:
    sums = zdp_bench.clipped_sum(MODEL, loss, data()[:5], 0.5, per_layer=False).sums
    for bound in (np.float32(0.5), torch.tensor(0.5)):
        flag: Any = np.False_
        again = zdp_bench.clipped_sum(MODEL, loss, data()[:5], bound, per_layer=flag).sums
        torch.testing.assert_close(again, sums)
    assert zdp_bench.check_model(MODEL, loss, data()[:5], per_layer=np.True_) == []
