"""A program follows its model: what was recorded is what the model does now."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from queue import SimpleQueue
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.drivers import python
from tests.modules import Made
from zdp_bench.gradients import clipped_sum
from zdp_bench.gradients.program import Alone, make, renew, state_of
from zdp_bench.gradients.program.signature import Reference

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def model_of(function: Callable[..., Tensor]) -> Any:
    return Made(function, weight=nn.Parameter(torch.ones(1)))


def numbers(model: Any) -> Iterator[float]:
    for model.scale in (1.0, 5.0):
        yield model.scale


def lists(model: Any) -> Iterator[float]:
    model.scale = [0.0]
    for model.scale[0] in (1.0, 5.0):
        yield model.scale[0]


def dictionaries(model: Any) -> Iterator[float]:
    model.options = SimpleNamespace(scales={})
    for model.options.scales["b"] in (1.0, 5.0):
        yield model.options.scales["b"]


@dataclass
class Options:
    scale: float = 1.0


class Slots:
    __slots__ = ("options",)


class PrivateSlot:
    __slots__ = ("__scale",)

    @property
    def scale(self) -> float:
        return self.__scale  # type: ignore[no-any-return, attr-defined]

    @scale.setter
    def scale(self, scale: float) -> None:
        self.__scale = scale


def objects(model: Any, kind: type = Options) -> Iterator[float]:
    """A schedule of a model's own options took effect only at its next recording."""
    model.options = kind()
    for model.options.scale in (1.0, 5.0):
        yield model.options.scale


def slots(model: Any) -> Iterator[float]:
    model.options = Slots()
    model.options.options = Options()
    for model.options.options.scale in (1.0, 5.0):
        yield model.options.options.scale


def sets(model: Any) -> Iterator[float]:
    model.options = set()
    for scale in (1.0, 5.0):
        model.options.clear()
        model.options.add(scale)
        yield scale


def queues(model: Any) -> Iterator[float]:
    model.options = deque(maxlen=1)
    for scale in (1.0, 5.0):
        model.options.append(scale)
        yield scale


def arrays(model: Any) -> Iterator[float]:
    model.options = np.zeros(1)
    for scale in (1.0, 5.0):
        model.options[0] = scale
        yield scale


def functions(model: Any) -> Iterator[float]:
    for factor in (1.0, 5.0, 1.0):
        model.scale = lambda x, by=factor: x * by
        yield factor


def tensors(model: Any) -> Iterator[float]:
    model.scale = torch.ones(())
    yield 1.0
    model.scale.fill_(5.0)
    yield 5.0
    model.scale = torch.tensor(3.0)
    yield 3.0


def forwards(model: Any) -> Iterator[float]:
    """Each function is made where an earlier one was freed."""
    for factor in range(2, 12):
        scale = lambda net, x, by=factor: x * by  # noqa: E731
        model.forward = MethodType(scale, model)
        del scale
        yield factor
        del model.forward


def hooks(model: Any) -> Iterator[float]:
    for factor in (2.0, 3.0, 4.0):
        hook = model.register_forward_hook(lambda module, args, out, by=factor: out * by)
        yield factor
        hook.remove()
        del hook


CHANGES: dict[str, tuple[Callable[..., Tensor], Callable[[Any], Iterator[float]]]] = {
    "a number that becomes a constant": (lambda net, x: x * torch.tensor(net.scale), numbers),
    "a number in a list": (lambda net, x: x * net.scale[0], lists),
    "a number in a dictionary": (lambda net, x: x * net.options.scales["b"], dictionaries),
    "a dataclass": (lambda net, x: x * net.options.scale, objects),
    "a slot": (lambda net, x: x * net.options.options.scale, slots),
    "a private slot": (lambda net, x: x * net.options.scale, partial(objects, kind=PrivateSlot)),
    "a set": (lambda net, x: x * max(net.options), sets),
    "a deque": (lambda net, x: x * net.options[0], queues),
    "an array": (lambda net, x: x * float(net.options[0]), arrays),
    "a function": (lambda net, x: net.scale(x), functions),
    "a tensor that is no buffer": (lambda net, x: x * net.scale, tensors),
    "another forward function": (lambda net, x: x * 1, forwards),
    "another hook": (lambda net, x: x * 1, hooks),
}


def test_a_sparse_attribute_has_its_examples_run_alone() -> None:
    """The recording ended in a NotImplementedError of torch."""
    adjacency = torch.eye(4).to_sparse()
    model = model_of(lambda net, x: x @ adjacency.to_dense() * net.weight)
    assert state_of(model, X).alone == "the model contains a tensor of layout torch.sparse_coo"


class Linked:
    """An object that several layers hold, and that leads back to itself."""

    def __init__(self) -> None:
        self.itself = self
        self.others = [self] * 60
        self.unknown = math.nan
        self.table = np.array([math.nan, 1j])


def test_an_object_that_did_not_change_is_recorded_once() -> None:
    shared = Linked()
    layers = []
    for _ in range(20):
        layer: Any = nn.Linear(4, 4)
        layer.options = shared
        layers.append(layer)
    model = nn.Sequential(*layers)
    first = state_of(model, X)
    assert state_of(model, X) is first
    shared.unknown = 1.0
    assert state_of(model, X) is not first


@pytest.mark.parametrize("name", CHANGES)
def test_a_program_follows_its_model(name: str) -> None:
    function, change = CHANGES[name]
    model = model_of(function)
    for factor in change(model):
        program = state_of(model, X).program
        assert program is not None
        torch.testing.assert_close(program.run(model, X), X * factor)


# ---------------------------------------------------------------- changes of a model's structure


def replace_tied_weight(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))


def tie_weights(model: Any) -> None:
    model[2].weight = model[0].weight


def append_again(model: Any) -> None:
    model.append(model[0])


def swap_names(model: Any) -> None:
    model[0], model[2] = model[2], model[0]


def change_class(model: Any) -> None:
    model[1].__class__ = nn.Sigmoid


def insert_layer(model: Any) -> None:
    model.insert(1, nn.ReLU())


def tied() -> Any:
    model = untied()
    model[2].weight = model[0].weight
    return model


def untied() -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)
    return nn.Sequential(*layers).double()


STRUCTURES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "a tied weight gets its own": (tied, replace_tied_weight),
    "weights are tied": (untied, tie_weights),
    "a layer is registered again": (untied, append_again),
    "two layers swap their names": (untied, swap_names),
    "another class": (untied, change_class),
    "another layer": (untied, insert_layer),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_gradients_follow_the_structure_of_a_model(name: str) -> None:
    build, change = STRUCTURES[name]
    model = build()
    x, targets = X.double(), torch.zeros(5)

    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.square().sum(1)

    clipped_sum(model, loss, (x, targets), 1e9)
    change(model)
    sums = clipped_sum(model, loss, (x, targets), 1e9).sums
    weights = dict(model.named_parameters())
    losses = [loss(model(row), targets[:1]).sum() for row in x.split(1)]
    rows = [torch.autograd.grad(row_loss, [*weights.values()]) for row_loss in losses]
    for index, weight in enumerate(weights):
        expected = torch.stack([gradients[index] for gradients in rows]).sum(dim=0)
        torch.testing.assert_close(sums[weight], expected)


def test_a_reference_equals_none_to_a_later_object_at_the_same_address() -> None:
    class Slotted:
        __slots__ = ()

    for build in (lambda: Made(len), lambda: lambda: 0, Slotted):
        for _ in range(20):
            referred: Any = build()
            reference, address = Reference(referred), id(referred)
            assert reference == Reference(referred)
            del referred
            later = build()
            assert reference != Reference(later)
            if id(later) == address:
                break


def packed(net: Any, x: Tensor, lengths: Any) -> Tensor:
    of = pack_padded_sequence(x.unsqueeze(2), lengths, batch_first=True, enforce_sorted=False)
    return x + of.data.mean()


def longest(net: Any, x: Tensor) -> Tensor:
    lengths = 1 + (x > 0).sum(1).clamp(max=3)
    of = pack_padded_sequence(x.unsqueeze(2), lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(of, batch_first=True)[0].sum(1)


def rounded_for_backward(net: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float):
        return x * net.weight


APART: dict[str, tuple[Callable[..., Tensor], str]] = {
    "another branch for one example": (
        lambda net, x: x * 2 if len(x) == 1 else x * 3,
        "behaves differently for one example than for several",
    ),
    "numbers of Python": (
        lambda net, x: x * 2 if random.random() < 2 else x,
        "draws random numbers with Python or numpy",
    ),
    "numbers of numpy": (
        lambda net, x: x * torch.from_numpy(np.random.rand(4)),
        "draws random numbers with Python or numpy",
    ),
    "lengths of Python": (
        lambda net, x: packed(net, x, [4] * len(x)),
        "lengths from Python numbers: pass a tensor",
    ),
    "the longest of a batch": (longest, "pass total_length=x.shape"),
    "the numbers of a packed sequence": (
        lambda net, x: packed(net, x, 1 + (x > 0).sum(1).clamp(max=3)),
        "mean combines the examples of a batch",
    ),
    "a size that torch fixes": (
        lambda net, x: torch.kron(x, torch.ones(1, 2)),
        "torch records kron for one batch size",
    ),
    "hooks for saved tensors": (
        rounded_for_backward,
        r"hooks for saved tensors change gradients \(test_program\.py, line \d+",
    ),
    "a threshold of sizes": (
        lambda net, x: x * 2 if len(x) < 25 else x,
        "behaves differently for other batch sizes than 2 <= B and B <= 24",
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_a_recording_would_not_follow_runs_alone_and_says_why(name: str) -> None:
    function, reason = APART[name]
    with pytest.raises(Alone, match=reason):
        make(model_of(function), X)


def test_a_model_within_hooks_for_saved_tensors_runs_alone() -> None:
    with save_on_cpu(), pytest.raises(Alone, match="hooks for saved tensors"):
        make(model_of(lambda net, x: x * net.weight), X)


BY_NAME: dict[str, Callable[..., Tensor]] = {
    "chunk": lambda net, x: torch.chunk(input=x, chunks=2, dim=1)[0] * net.weight,
    "take_along_dim": lambda net, x: torch.take_along_dim(input=x, indices=x.argsort(dim=1), dim=1),
    "cdist": lambda net, x: torch.cdist(x1=x[:, None], x2=net.weight.expand(3, 4))[:, 0],
}


@pytest.mark.parametrize("name", BY_NAME)
def test_functions_take_their_arguments_by_name(name: str) -> None:
    assert make(model_of(BY_NAME[name]), X)


STEP_OF_A_FORK = """
import os
import torch
from torch import nn
from zdp_bench.gradients.program import make

model = nn.Linear(3, 2)
make(model, torch.randn(2, 3))
model(torch.randn(2, 3)).sum().backward()
if not (child := os.fork()):
    model(torch.randn(2, 3)).sum().backward()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_that_is_forked_after_a_recording_can_take_steps() -> None:
    python("-c", STEP_OF_A_FORK)


class Tables:
    """A helper of a model, outside of its modules, which creates a table when it is first used."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    def find(self, size: int) -> Tensor:
        if self.table is None:
            self.table = torch.arange(float(size))
        return self.table

    @cached_property
    def four(self) -> Tensor:
        return torch.arange(4.0)


def find_in_buffer(net: Any, x: Tensor) -> Tensor:
    if net.table is None:
        net.register_buffer("table", torch.arange(float(x.shape[-1])), persistent=False)
    return x + net.table


def find_in_dictionary(net: Any, x: Tensor) -> Tensor:
    size = x.shape[-1]
    if size not in net.tables:
        net.tables[size] = torch.arange(float(size))
    return x + net.tables[size]


STORES_A_TABLE: dict[str, Callable[..., Tensor]] = {
    "a buffer": find_in_buffer,
    "a dictionary": find_in_dictionary,
    "a default of a dictionary": lambda net, x: (
        x + net.tables.setdefault("table", torch.arange(4.0))
    ),
    "a list": lambda net, x: net.seen.append(torch.arange(4.0)) or x + net.seen[0],
    "another object": lambda net, x: x + net.helper.find(x.shape[-1]),
    "a cached property": lambda net, x: x + net.helper.four,
}


@pytest.mark.parametrize("name", STORES_A_TABLE)
def test_what_a_model_stores_while_it_is_recorded_is_gone_right_after(name: str) -> None:
    """Its tensors have no values, so that the checks of the program could not run on it."""
    function = STORES_A_TABLE[name]
    model = Made(lambda net, x: net.layer(function(net, x)), layer=nn.Linear(4, 2))
    model.register_buffer("table", None)
    model.tables, model.seen, model.helper = {}, [], Tables()
    program = make(model, X)
    assert model.table is None
    assert not model.tables
    assert not model.seen
    assert vars(model.helper) == {"table": None}
    torch.testing.assert_close(program.run(model, X), model(X))


def test_a_later_recording_runs_on_the_examples_of_the_first() -> None:
    """A forward function might leave something of training examples in the program."""
    seen = SimpleQueue[float]()  # whose content is not restored

    def see(net: Any, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            seen.put(float(x.max()))
        return net.layer(x)

    model = Made(see, layer=nn.Linear(4, 2))
    state_of(model, torch.zeros(2, 4))
    model.temperature = 2.0  # type: ignore[assignment]
    state_of(model, torch.ones(2, 4))
    values = {seen.get() for _ in range(seen.qsize())}
    assert values == {0.0}


def test_steps_and_not_micro_batches_decide_when_a_model_is_recorded_again() -> None:
    """The number of micro-batches depends on the number of examples."""
    scale = [1.0]
    model = Made(lambda net, x: net.layer(x) * scale[0], layer=nn.Linear(4, 2))
    first = state_of(model, torch.zeros(1, 4)).program
    scale[0] = 2.0
    for _ in range(500):
        state_of(model, torch.zeros(1, 4))
    renew(model, 199)
    assert state_of(model, torch.zeros(1, 4)).program is first
    renew(model, 200)
    second = state_of(model, torch.zeros(1, 4)).program
    assert second is not first
    scale[0] = 3.0
    renew(model, 399)
    assert state_of(model, torch.zeros(1, 4)).program is second
    renew(model, 0)  # another training
    assert state_of(model, torch.zeros(1, 4)).program is not second
