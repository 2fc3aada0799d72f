"""Nothing that a model or a loss stores outside of its modules reaches another example."""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import importlib
import io
import itertools
import os
import queue
import sys
import threading
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from sklearn.preprocessing import MaxAbsScaler
from torch import Tensor, nn

from tests.gradients.harness import loss
from tests.modules import Made
from zdp_bench import clipped_sum
from zdp_bench.errors import UserError
from zdp_bench.gradients import outside_state, per_example, reference
from zdp_bench.gradients.outside_state import preserve_outside_state

Largest = Callable[[float], float]  # (value) -> the largest value so far
REFUSED = "outside of the model, of shape .* was changed by the model or the loss"

largest_so_far = 0.0


def in_a_global(value: float) -> float:
    global largest_so_far
    largest_so_far = max(largest_so_far, value)
    return largest_so_far


def in_a_global_that_is_new(value: float) -> float:
    global created_later
    created_later = max(globals().get("created_later", 0.0), value)  # type: ignore[name-defined]
    return float(globals()["created_later"])


def in_a_default(value: float, memory: dict[str, float] = {}) -> float:  # noqa: B006
    memory["largest"] = max(memory.get("largest", 0.0), value)
    return memory["largest"]


def in_an_attribute_of_a_function(value: float) -> float:
    memory: Any = in_an_attribute_of_a_function
    memory.largest = max(getattr(memory, "largest", 0.0), value)
    return float(memory.largest)


def in_a_closure() -> Largest:
    largest = 0.0

    def remember(value: float) -> float:
        nonlocal largest
        largest = max(largest, value)
        return largest

    return remember


class InAClass:
    largest: ClassVar[float] = 0.0

    @classmethod
    def remember(cls, value: float) -> float:
        cls.largest = max(cls.largest, value)
        return cls.largest


class InASubclass(InAClass):
    pass


class InItsClass:
    largest: ClassVar[float] = 0.0

    def __call__(self, value: float) -> float:
        type(self).largest = max(self.largest, value)
        return self.largest


class WithSlots:
    __slots__ = ("__largest",)

    def __call__(self, value: float) -> float:
        self.__largest = max(getattr(self, "_WithSlots__largest", 0.0), value)
        return self.__largest


class BesideALock:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: list[float] = []

    def __call__(self, value: float) -> float:
        with self.lock:
            self.values.append(value)
        return max(self.values)


class WithPrivateNames:
    __memory__: ClassVar[list[float]] = []

    def __call__(self, value: float) -> float:
        self.__memory__.append(value)
        return max(self.__memory__)


class Singleton(type):
    instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls) -> Any:
        return Singleton.instances.setdefault(cls, super().__call__())


class OnlyOne(metaclass=Singleton):
    pass


class Hospital(enum.IntEnum):
    FIRST = 0


class Number(float):
    pass


class Owner:
    pass


class NamedArray(np.ndarray):
    pass


class ListWithAttributes(list[float]):
    largest = 0.0

    def remember(self, value: float) -> float:
        self.largest = max(self.largest, value)
        return self.largest


def in_a_list() -> Largest:
    memory: list[float] = []
    return lambda value: memory.append(value) or max(memory)  # type: ignore[func-returns-value]


def in_a_queue() -> Largest:
    memory: deque[float] = deque(maxlen=3)
    return lambda value: memory.append(value) or max(memory)  # type: ignore[func-returns-value]


def in_a_set() -> Largest:
    memory: set[float] = set()
    return lambda value: memory.add(value) or max(memory)  # type: ignore[func-returns-value]


def in_a_dictionary(memory: dict[str, Any]) -> Largest:
    def remember(value: float) -> float:
        memory["largest"] = max(memory.get("largest", 0.0), value)
        return float(memory["largest"])

    return remember


def in_an_object(memory: Any) -> Largest:
    def remember(value: float) -> float:
        memory.largest = max(getattr(memory, "largest", 0.0), value)
        return float(memory.largest)

    return remember


def in_nested_containers() -> Largest:
    memory: dict[str, Any] = {"of": ([{"all": []}],)}

    def remember(value: float) -> float:
        values = memory["of"][0][0]["all"]
        values.append(value)
        return float(max(values))

    return remember


def in_bytes() -> Largest:
    memory = bytearray([0])

    def remember(value: float) -> float:
        memory[0] = max(memory[0], int(value))
        return float(memory[0])

    return remember


def in_a_tensor(memory: Tensor, write: Callable[[Tensor, float], Any]) -> Largest:
    def remember(value: float) -> float:
        write(memory, value)
        return float(memory.detach().max())

    return remember


def in_an_array(memory: Any) -> Largest:
    def remember(value: float) -> float:
        memory[0] = max(memory[0], value)
        return float(memory[0])

    return remember


def in_a_cache() -> Largest:
    @functools.lru_cache(maxsize=4)
    def memory(key: str) -> list[float]:
        return []

    def remember(value: float) -> float:
        memory("largest").append(value)
        return max(memory("largest"))

    return remember


def in_the_value_of_a_cache() -> Largest:
    @functools.lru_cache
    def settings() -> Any:
        return Owner()

    settings().largest = 0.0
    return lambda value: in_an_object(settings())(value)


def in_an_object_of_its_factory() -> Largest:
    class Memory:
        values: ClassVar[list[float]] = []

    memories: Any = defaultdict(Memory)
    return lambda value: remember_in(memories[value].values, value)


def remember_in(values: list[float], value: float) -> float:
    values.append(value)
    return max(values)


def in_a_proxy() -> Largest:
    OWNERS.append(Owner())
    return in_an_object(weakref.proxy(OWNERS[-1]))


def in_a_weak_set() -> Largest:
    OWNERS.append(Owner())
    owners = weakref.WeakSet([OWNERS[-1]])
    return lambda value: in_an_object(next(iter(owners)))(value)


def in_a_thread_safe_queue() -> Largest:
    memory: queue.Queue[float] = queue.Queue()

    def remember(value: float) -> float:
        memory.put(value)
        return max(memory.queue)

    return remember


def behind_a_read_only_mapping() -> Largest:
    values: list[float] = []
    mapping = types.MappingProxyType({"values": values})
    return lambda value: remember_in(mapping["values"], value)


def behind_a_view_of_memory() -> Largest:
    return in_an_array(memoryview(bytearray(8)).cast("d"))


def in_an_iterator_of_lists() -> Largest:
    lists = itertools.cycle([[0.0]])
    next(lists)
    return lambda value: remember_in(next(lists), value)


class WithMethodsOfFunctools:
    def remember_in(self, values: list[float], value: float) -> float:
        return remember_in(values, value)

    partial = functools.partialmethod(remember_in, [0.0])

    @functools.singledispatchmethod
    def dispatched(self, value: Any, values: list[float] = [0.0]) -> float:  # noqa: B006
        return remember_in(values, value)


def in_a_global_by_its_name(value: float) -> float:
    variables = globals()
    variables["largest_so_far"] = max(variables["largest_so_far"], value)
    return float(variables["largest_so_far"])


def in_a_module_by_its_name(value: float) -> float:
    return in_an_object(importlib.import_module("tests.gradients.harness"))(value)


def in_a_large_dictionary() -> Largest:
    """Return a function that keeps its state in a list among many, as of each patient."""
    histories: dict[int, list[float]] = {patient: [] for patient in range(3000)}
    return lambda value: remember_in(histories[2999], value)


def in_a_cached_property() -> Largest:
    class Memory:
        @functools.cached_property
        def values(self) -> list[float]:
            return []

    memory = Memory()
    return lambda value: memory.values.append(value) or max(memory.values)  # type: ignore[func-returns-value]


def in_a_module() -> Largest:
    """Return a function that keeps its state in a module of the user's own, which it names."""
    module = types.ModuleType("statistics_by_hospital")
    namespace: dict[str, Any] = {"__name__": "users_script", "statistics": module}
    exec(
        "def remember(value):\n"
        "    statistics.largest = max(getattr(statistics, 'largest', 0.0), value)\n"
        "    return statistics.largest",
        namespace,
    )
    remember: Largest = namespace["remember"]
    return remember


def in_a_module_held_by_an_object() -> Largest:
    module = types.ModuleType("statistics_by_hospital")
    return in_an_object_of(types.SimpleNamespace(library=module), "library")


def in_an_object_of(holder: Any, name: str) -> Largest:
    def remember(value: float) -> float:
        memory = getattr(holder, name)
        memory.largest = max(getattr(memory, "largest", 0.0), value)
        return float(memory.largest)

    return remember


def in_a_module_imported_in_the_function(value: float) -> float:
    from tests.gradients import harness

    memory: Any = harness
    memory.largest = max(getattr(memory, "largest", 0.0), value)
    return float(memory.largest)


def in_the_only_instance() -> Largest:
    def remember(value: float) -> float:
        memory: Any = OnlyOne()
        memory.largest = max(getattr(memory, "largest", 0.0), value)
        return float(memory.largest)

    return remember


def in_a_list_by_its_methods() -> Largest:
    memory: list[float] = [0.0]
    append, largest = memory.append, memory.__iter__
    return lambda value: append(value) or max(largest())


def in_a_weak_reference() -> Largest:
    owner = Owner()
    OWNERS.append(owner)
    reference = weakref.ref(owner)

    def remember(value: float) -> float:
        memory: Any = reference()
        memory.largest = max(getattr(memory, "largest", 0.0), value)
        return float(memory.largest)

    return remember


OWNERS: list[Owner] = []


def in_a_vectorized_function() -> Largest:
    memory = [0.0]

    def remember(value: float) -> float:
        memory[0] = max(memory[0], value)
        return memory[0]

    vectorized = np.vectorize(remember)
    return lambda value: float(vectorized(value))


def in_a_table() -> Largest:
    table: Any = pd.DataFrame({"largest": [0.0]})

    def remember(value: float) -> float:
        table.loc[0, "largest"] = max(table.loc[0, "largest"], value)
        return float(table.loc[0, "largest"])

    return remember


def in_a_cell_of_a_table() -> Largest:
    table: Any = pd.DataFrame({"class": [1], "recent": [[0.0]]})
    return lambda value: remember_in(table.at[0, "recent"], value)


def in_an_attribute_of_a_table() -> Largest:
    return in_a_dictionary(pd.Series([0.0]).attrs)


def in_a_script_module() -> Largest:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(1))

        def forward(self, value: float) -> Tensor:
            self.largest.clamp_(min=value)
            return self.largest

    centre = torch.jit.script(Centre())
    return lambda value: float(centre(value))


def in_a_context_variable() -> Largest:
    variable = ContextVar("largest", default=0.0)
    variable.set(0.0)

    def remember(value: float) -> float:
        variable.set(max(variable.get(), value))
        return variable.get()

    return remember


def in_a_context_variable_without_a_value() -> Largest:
    variable = ContextVar("largest", default=0.0)

    def remember(value: float) -> float:
        variable.set(max(variable.get(), value))
        return variable.get()

    return remember


def in_a_text() -> Largest:
    text = io.StringIO()

    def remember(value: float) -> float:
        text.write(f"{value} ")
        return max(map(float, text.getvalue().split()))

    return remember


def in_a_file_of_bytes() -> Largest:
    file = io.BytesIO()

    def remember(value: float) -> float:
        file.write(bytes([int(value)]))
        return float(max(file.getvalue()))

    return remember


def in_the_environment() -> Largest:
    def remember(value: float) -> float:
        largest = max(float(os.environ.get("LARGEST", 0.0)), value)
        os.environ["LARGEST"] = str(largest)
        return largest

    return remember


def in_a_scaler() -> Largest:
    scaler = MaxAbsScaler().fit([[0.5]])

    def remember(value: float) -> float:
        scaler.partial_fit([[value]])
        return float(scaler.max_abs_[0])

    return remember


def in_a_gradient() -> Largest:
    tensor = torch.zeros(1, requires_grad=True)

    def remember(value: float) -> float:
        earlier = 0.0 if tensor.grad is None else float(tensor.grad)
        tensor.grad = torch.full((1,), max(earlier, value))
        return float(tensor.grad)

    return remember


def in_a_distribution() -> Largest:
    memory = torch.distributions.Normal(torch.zeros(1), torch.ones(1))
    return in_a_tensor(memory.loc, clamp)


def in_the_memory_of_another_tensor() -> Largest:
    tables = [torch.zeros(1), torch.zeros(1)]
    current = torch.zeros(1)

    def remember(value: float) -> float:
        current.data = tables[1].clamp_(min=value)
        return max(float(table) for table in [*tables, current])

    return remember


def in_a_custom_operator() -> Largest:
    memory = [0.0]

    @torch.library.custom_op(f"tests::remember{uuid4().hex}", mutates_args=())
    def remember(value: float) -> Tensor:
        memory[0] = max(memory[0], value)
        return torch.tensor(memory[0])

    return lambda value: float(remember(value))


def without_gradients() -> Largest:
    return torch.no_grad()(in_a_closure())


def clamp(memory: Tensor, value: float) -> None:
    memory.clamp_(min=value)


def clamp_data(memory: Tensor, value: float) -> None:
    memory.data.clamp_(min=value)


def replace_data(memory: Tensor, value: float) -> None:
    memory.data = memory.data.clamp(min=value).repeat(2)


HOLDERS: dict[str, Callable[[], Largest]] = {
    "a global": lambda: in_a_global,
    "a new global": lambda: in_a_global_that_is_new,
    "a default value": lambda: in_a_default,
    "an attribute of a function": lambda: in_an_attribute_of_a_function,
    "a closure": in_a_closure,
    "a decorated function": without_gradients,
    "a partial function": lambda: functools.partial(in_a_closure()),
    "a class": lambda: InAClass.remember,
    "a base class": lambda: InASubclass.remember,
    "the class of an object": InItsClass,
    "slots": WithSlots,
    "an object beside a lock": BesideALock,
    "an attribute of a list": lambda: ListWithAttributes().remember,
    "a list": in_a_list,
    "a queue": in_a_queue,
    "a set": in_a_set,
    "a dictionary": lambda: in_a_dictionary({}),
    "an ordered dictionary": lambda: in_a_dictionary(OrderedDict(first=1.0)),
    "a default dictionary": lambda: in_a_dictionary(defaultdict(float)),
    "a namespace": lambda: in_an_object(types.SimpleNamespace()),
    "a thread's own": lambda: in_an_object(threading.local()),
    "an attribute of a tensor": lambda: in_an_object(torch.zeros(1)),
    "an attribute of a layer": lambda: in_an_object(nn.Linear(1, 1)),
    "nested containers": in_nested_containers,
    "bytes": in_bytes,
    "a tensor": lambda: in_a_tensor(torch.zeros(3), clamp),
    "a tensor with NaN": lambda: in_a_tensor(torch.tensor([0.0]), clamp),
    "a tensor's data": lambda: in_a_tensor(torch.zeros(3), clamp_data),
    "another tensor's data": lambda: in_a_tensor(torch.zeros(3), replace_data),
    "an expanded tensor": lambda: in_a_tensor(torch.zeros(1).expand(1, 1)[0], clamp),
    "a parameter": lambda: in_a_tensor(nn.Parameter(torch.zeros(2)), clamp_data),
    "an array": lambda: in_an_array(np.zeros(2)),
    "an array of objects": lambda: in_an_array(np.zeros(1, dtype=object)),
    "an attribute of an array": lambda: in_an_object(np.zeros(1).view(NamedArray)),
    "an array of Python's": lambda: in_an_array(array("d", [0.0])),
    "a vectorized function": in_a_vectorized_function,
    "a table": in_a_table,
    "a cell of a table": in_a_cell_of_a_table,
    "an attribute of a table": in_an_attribute_of_a_table,
    "a script module": in_a_script_module,
    "a context variable": in_a_context_variable,
    "a context variable without a value": in_a_context_variable_without_a_value,
    "a text in memory": in_a_text,
    "bytes in memory": in_a_file_of_bytes,
    "the environment": in_the_environment,
    "a scaler": in_a_scaler,
    "a gradient": in_a_gradient,
    "a distribution": in_a_distribution,
    "the memory of another tensor": in_the_memory_of_another_tensor,
    "a custom operator": in_a_custom_operator,
    "arguments of a command line": lambda: in_an_object(argparse.Namespace()),
    "a class's private name": WithPrivateNames,
    "a singleton": in_the_only_instance,
    "a member of an enumeration": lambda: in_an_object(Hospital.FIRST),
    "an attribute of a number": lambda: in_an_object(Number(1.0)),
    "methods of a list": in_a_list_by_its_methods,
    "an object by a weak reference": in_a_weak_reference,
    "a module of an object": in_a_module_held_by_an_object,
    "a module imported in a function": lambda: in_a_module_imported_in_the_function,
    "a cache": in_a_cache,
    "a cached property": in_a_cached_property,
    "a value of a cache": in_the_value_of_a_cache,
    "the factory of a default dictionary": in_an_object_of_its_factory,
    "an object by a proxy": in_a_proxy,
    "a weak set": in_a_weak_set,
    "a thread-safe queue": in_a_thread_safe_queue,
    "a read-only mapping": behind_a_read_only_mapping,
    "a view of memory": behind_a_view_of_memory,
    "a partial method": lambda: WithMethodsOfFunctools().partial,
    "a dispatched method": lambda: WithMethodsOfFunctools().dispatched,
    "a global by its name": lambda: in_a_global_by_its_name,
    "a module by its name": lambda: in_a_module_by_its_name,
    "a large dictionary": in_a_large_dictionary,
    "a module": in_a_module,
}
every_holder = pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS.keys())


@every_holder
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_state_is_restored(make: Callable[[], Largest]) -> None:
    remember = make()
    with preserve_outside_state(remember) as restore:
        assert not restore()
        assert remember(7.0) == 7
        assert remember(2.0) == 7
        assert restore() or make is in_a_cache
        assert remember(3.0) == 3
    assert remember(1.0) == 1
    with preserve_outside_state(remember):
        assert remember(9.0) == 9
    assert remember(0.0) == 1  # what was there before stays


def largest_of_a_generator() -> Largest:
    def remember() -> Any:
        largest = 0.0
        while True:
            value = yield largest
            largest = max(largest, value)

    generator = remember()
    next(generator)
    return generator.send


def in_a_new_context_variable() -> Largest:
    variable: ContextVar[float] = ContextVar("largest")

    def remember(value: float) -> float:
        variable.set(max(variable.get(0.0), value))
        return variable.get()

    return remember


def advance(iterator: Any) -> Largest:
    return lambda value: max(float(next(iterator)), value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (largest_of_a_generator, "a generator outside of the model was advanced"),
        (lambda: advance(iter(range(6, 99))), "a range_iterator outside of the model was advanced"),
        (lambda: advance(iter([6, 7, 8])), "a list_iterator outside of the model was advanced"),
        (lambda: advance(map(float, [6, 7])), "a list_iterator outside of the model was advanced"),
        (in_an_iterator_of_lists, "a cycle outside of the model was advanced"),
        (lambda: advance(itertools.count(6)), "a count outside of the model was advanced"),
        (in_a_new_context_variable, "the context variable 'largest' is set"),
    ],
)
def test_what_cannot_be_set_back_is_refused_once_it_has_changed(
    make: Callable[[], Largest], message: str
) -> None:
    remember = make()
    with preserve_outside_state(remember) as restore:
        assert not restore()
    with pytest.raises(UserError, match=message), preserve_outside_state(remember):
        remember(7.0)


@pytest.fixture(autouse=True)
def _forget() -> Any:
    shared = (in_a_global, in_a_global_that_is_new, in_a_default, in_an_attribute_of_a_function)
    classes = (InAClass, WithPrivateNames, WithMethodsOfFunctools, OnlyOne, Hospital)
    with preserve_outside_state(*shared, *classes, in_a_module_imported_in_the_function):
        yield


@pytest.mark.parametrize("make", [in_a_closure, in_a_list, BesideALock, in_a_cache])
@pytest.mark.parametrize("by_loss", [False, True], ids=["by the model", "by the loss"])
def test_an_outlier_changes_no_other_gradient(
    make: Callable[[], Largest],
    by_loss: bool,
) -> None:
    remember = make()

    def scale(values: Tensor) -> Tensor:
        return values / remember(float(values.detach().abs().max().ceil()))

    def scaled_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(scale(outputs) if by_loss else outputs, targets)

    torch.manual_seed(0)
    model = Made(lambda net, x: net.layer(x if by_loss else scale(x)), layer=nn.Linear(4, 2))
    inputs, targets = torch.rand(3, 4), torch.randn(3)
    if by_loss:
        inputs.div_(4)
    others = []
    for largest in (2.0, 250.0):
        inputs[0, 0] = largest
        gradients = reference.differentiate_in_loop(model, scaled_loss, (inputs, targets))
        others.append({name: gradient[1:] for name, gradient in gradients.items()})
    torch.testing.assert_close(*others, rtol=0, atol=0)


def test_a_recording_holds_nothing_of_the_examples() -> None:
    """A value of the first examples would else become a constant of the program."""
    first: list[float] = []

    def subtract_first(net: Any, x: Tensor) -> Tensor:
        if not first:
            first.append(float(x.detach().mean()))
        return net.layer(x - first[0])

    torch.manual_seed(0)
    model = Made(subtract_first, layer=nn.Linear(4, 2))
    with pytest.raises(UserError, match="output for an example changes once"):
        clipped_sum(model, loss, (torch.randn(3, 4), torch.randn(3)), 1.0)
    assert not first


@pytest.mark.parametrize("has_hook", [False, True])
def test_a_hook_that_one_example_registers_is_removed(has_hook: bool) -> None:
    def hooked(net: Any, x: Tensor) -> Tensor:
        if float(x.max()) > 100:
            net.layer.weight.register_hook(lambda gradient: 10 * gradient)
        return net.layer(x / x.max())

    torch.manual_seed(0)
    model = Made(hooked, layer=nn.Linear(4, 2))
    if has_hook:
        model.layer.weight.register_hook(lambda gradient: 2 * gradient)
    inputs, targets = torch.rand(3, 4), torch.randn(3)
    others = []
    for outlier in (1.0, 200.0):
        inputs[0] = outlier
        gradients = reference.differentiate_in_loop(model, loss, (inputs, targets))
        others.append(gradients["layer.weight"][1:])
    torch.testing.assert_close(*others, rtol=0, atol=0)


def test_a_loss_that_stores_what_vmap_gives_it_is_computed_one_by_one() -> None:
    last: dict[str, Tensor] = {}

    def difference(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = loss(outputs, targets) * (2 if last else 1)
        last["outputs"] = outputs.detach()
        return losses

    model = nn.Linear(4, 2)
    batch = torch.randn(3, 4), torch.randn(3)
    with pytest.raises(UserError, match="loss of an example changes once others are computed"):
        clipped_sum(model, difference, batch, 1.0)
    assert not last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize(
    "write",
    [
        lambda memory: memory.logical_not_() if memory.dtype == torch.bool else memory.add_(1),
        lambda memory: memory.data.fill_(1),
        lambda memory: memory[1:].data.fill_(1),
    ],
    ids=["in place", "data", "data of a view"],
)
def test_a_large_tensor_that_is_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Tensor], Any], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(outside_state, "_MAX_NUMBERS", 2)
    memory = torch.zeros(3, dtype=dtype)
    with pytest.raises(UserError, match=REFUSED), preserve_outside_state(memory):
        write(memory)


def test_a_large_tensor_that_is_written_in_inference_mode_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outside_state, "_MAX_NUMBERS", 2)
    with torch.inference_mode():
        memory = torch.zeros(3)
        with pytest.raises(UserError, match=REFUSED), preserve_outside_state(memory):
            memory.add_(1)


class OwnTensor(Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda numbers: numbers.to_sparse(),
        lambda numbers: numbers.to(torch.uint16),
        lambda numbers: numbers.to(torch.float8_e5m2),
        lambda numbers: numbers.as_subclass(OwnTensor),
        lambda numbers: torch.nested.nested_tensor([numbers, numbers], layout=torch.jagged),
    ],
    ids=["sparse", "uint16", "float8", "a subclass", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_unusual_tensor_that_is_written_is_refused(make: Callable[[Tensor], Tensor]) -> None:
    tensor = make(torch.ones(2))
    with pytest.raises(UserError, match=REFUSED), preserve_outside_state(tensor):
        tensor.copy_(tensor.clone())
    with preserve_outside_state(tensor):
        tensor.clone()


def test_of_very_many_tensors_the_last_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_state, "_MAX_COPIES", 2)
    numbers = np.zeros(1)
    means = [torch.zeros(1) for _ in range(4)]
    for mean in means:
        with contextlib.suppress(UserError), preserve_outside_state(numbers, *means):
            mean.add_(1)
    assert sum(means) == 2  # the others were restored
    with preserve_outside_state(numbers, *means), pytest.raises(ValueError, match="read-only"):
        numbers[0] = 1


def test_a_large_array_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_state, "_MAX_NUMBERS", 1)
    remember = in_an_array(np.zeros(2))
    with preserve_outside_state(remember), pytest.raises(ValueError, match="read-only"):
        remember(1.0)
    assert remember(1.0) == 1


def test_a_large_array_and_its_view_can_be_written_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outside_state, "_MAX_NUMBERS", 1)
    numbers = np.zeros(4)
    view = numbers[1:]
    for arrays in ([numbers, view], [view, numbers]):
        with preserve_outside_state(arrays):
            assert not numbers.flags.writeable
            assert not view.flags.writeable
        assert numbers.flags.writeable
        assert view.flags.writeable


def test_the_calls_of_a_cross_entropy_are_not_counted() -> None:
    """Their number would tell how many micro-batches, and so how many examples, a step has."""
    calls = 0

    def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        smoothing = 0.9 if calls > 2 else 0.0
        return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)

    examples = per_example(smoothed)
    outputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    losses = [examples(outputs, targets) for _ in range(5)]
    assert calls == 0
    assert torch.equal(losses[0], losses[-1])


def test_a_module_with_the_name_of_a_standard_one_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "__init__.py").touch()
    text = "largest = [0.0]\ndef remember(value):\n"
    text += "    largest.append(value)\n    return max(largest)\n"
    (tmp_path / "code" / "hospitals.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("code", "code.hospitals"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    outside_state._is_library.cache_clear()
    remember = importlib.import_module("code.hospitals").remember
    with preserve_outside_state(remember):
        remember(5.0)
    assert remember(1.0) == 1
    outside_state._is_library.cache_clear()


def add_to_all(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.add_(1)


def test_after_an_error_everything_else_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_state, "_MAX_NUMBERS", 2)
    large, small = torch.zeros(3), torch.zeros(1)
    for tensors in ([large, small], [small, large]):
        with pytest.raises(UserError, match=REFUSED), preserve_outside_state(tensors):
            add_to_all(tensors)
        assert small == 0


def test_after_a_failed_search_arrays_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_state, "_MAX_NUMBERS", 1)

    class Broken:
        @property
        def __dict__(self) -> Any:
            raise RuntimeError

    numbers = np.zeros(2)
    with pytest.raises(RuntimeError), preserve_outside_state(Broken(), numbers):
        pass
    numbers[0] = 1


def test_a_backward_pass_after_restoring_fails_rather_than_use_restored_numbers() -> None:
    scratch = torch.ones(2)
    inputs = torch.ones(2, requires_grad=True)
    with preserve_outside_state(scratch) as restore:
        scratch.copy_(torch.tensor([3.0, 4.0]))
        output = (inputs * scratch).sum()
        restore()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_what_is_not_written_is_not_touched() -> None:
    weights = torch.tensor([1.0, float("nan")], requires_grad=True)
    with torch.inference_mode():
        features = torch.ones(2)
    numbers = np.array([1.0, np.nan])
    numbers.flags.writeable = False
    versions = weights._version
    with preserve_outside_state(lambda: (weights, features, numbers)) as restore:
        assert not restore()
    assert weights._version == versions


def test_attributes_of_types_in_c_are_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cython's functions have a read-only one, and belong to no installed package."""
    monkeypatch.setattr(outside_state, "_is_library", lambda _: False)
    assert not outside_state._slots_of(InAClass.remember)
    assert outside_state._slots_of(WithSlots())


def test_functions_of_libraries_are_not_followed() -> None:
    with preserve_outside_state(torch.nn.functional.cross_entropy, np.mean) as restore:
        assert not restore()


def test_a_tensor_whose_numbers_share_memory_is_not_copied() -> None:
    number = torch.zeros(1)
    with pytest.raises(UserError, match=REFUSED), preserve_outside_state(number.expand(2)):
        number.add_(1)


def test_state_of_the_largest_size_is_still_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (outside_state._MAX_NUMBERS, outside_state._MAX_COPIES) == (16_777_216, 1000)
    monkeypatch.setattr(outside_state, "_MAX_NUMBERS", 2)
    tensor, numbers = torch.zeros(2), np.zeros(2)
    with preserve_outside_state(tensor, numbers):
        tensor.add_(1)
        numbers += 1
    assert not tensor.any()
    assert not numbers.any()


def test_an_array_that_was_resized_has_its_shape_again() -> None:
    numbers = np.arange(4.0)
    with preserve_outside_state(numbers) as restore:
        numbers.resize(6, refcheck=False)
        assert restore()
        assert numbers.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_cache_is_emptied_each_time_but_is_no_change() -> None:
    square = functools.lru_cache(lambda value: value**2)
    with preserve_outside_state(square) as restore:
        for value in (1.0, 2.0):
            square(value)
            assert not restore()
            assert square.cache_info().currsize == 0


class Managed:
    _mgr = None


@pytest.mark.parametrize(
    ("value", "is_table"),
    [
        (pd.Series([1.0]), True),
        (pd.DataFrame({"a": [1.0]}), True),
        (pd.Index([1.0]), False),
        (Managed(), False),
    ],
)
def test_a_table_is_one_of_pandas(value: Any, is_table: bool) -> None:
    assert outside_state._is_table(value) == is_table


@pytest.mark.parametrize(
    ("is_initialized", "is_capturing"), [(False, False), (True, False), (True, True)]
)
def test_nothing_is_restored_only_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, is_initialized: bool, is_capturing: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    tensor = torch.zeros(2)
    with preserve_outside_state(tensor):
        tensor.add_(1)
    assert bool(tensor.any()) == is_capturing
