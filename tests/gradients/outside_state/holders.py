"""Functions that remember the largest value so far, each in another kind of object."""

from __future__ import annotations

import argparse
import enum
import functools
import importlib
import io
import itertools
import os
import queue
import threading
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
import pandas as pd
import torch
from sklearn.preprocessing import MaxAbsScaler
from torch import Tensor, nn

Largest = Callable[[float], float]  # (value) -> the largest value so far

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


class InAnIterator:
    largest = 0.0

    def __iter__(self) -> InAnIterator:
        return self

    def __next__(self) -> float:
        return self.largest


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


def in_a_global_by_its_name_in_code(value: float) -> float:
    exec("global largest_so_far; largest_so_far = max(largest_so_far, value)")
    return float(eval("max(largest_so_far, value)"))


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


def in_a_list_by_one_method() -> Largest:
    append: Any = [0.0].append
    return lambda value: append(value) or max(append.__self__)


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


def in_a_list_in_an_array() -> Largest:
    lists = np.empty(1, dtype=object)
    lists[0] = [0.0]
    return lambda value: remember_in(lists[0], value)


def in_a_cell_of_a_series() -> Largest:
    series: Any = pd.Series([[0.0]])
    return lambda value: remember_in(series[0], value)


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


def in_a_context_variable_without_a_default() -> Largest:
    variable: ContextVar[float] = ContextVar("largest")

    def remember(value: float) -> float:
        variable.set(max(variable.get(0.0), value))
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
    "an iterator of a class of its own": lambda: in_an_object(InAnIterator()),
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
    "a list in an array": in_a_list_in_an_array,
    "an attribute of an array": lambda: in_an_object(np.zeros(1).view(NamedArray)),
    "an array of Python's": lambda: in_an_array(array("d", [0.0])),
    "a vectorized function": in_a_vectorized_function,
    "a table": in_a_table,
    "a cell of a table": in_a_cell_of_a_table,
    "a series": lambda: in_an_array(pd.Series([0.0])),
    "a cell of a series": in_a_cell_of_a_series,
    "an attribute of a table": in_an_attribute_of_a_table,
    "a script module": in_a_script_module,
    "a context variable": in_a_context_variable,
    "a context variable without a value": in_a_context_variable_without_a_value,
    "a context variable without a default": in_a_context_variable_without_a_default,
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
    "one method of a list": in_a_list_by_one_method,
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
    "a global by its name in code": lambda: in_a_global_by_its_name_in_code,
    "a module by its name": lambda: in_a_module_by_its_name,
    "a large dictionary": in_a_large_dictionary,
    "a module": in_a_module,
}
