"""Nothing that a model or a loss stores outside of its modules reaches another example."""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.gradients.harness import loss
from tests.modules import Made
from zdp_bench import clipped_sum
from zdp_bench.errors import UserError
from zdp_bench.gradients import outside_state, reference
from zdp_bench.gradients.outside_state import preserve_outside_state

Largest = Callable[[float], float]  # (value) -> the largest value so far

largest_so_far = 0.0


def in_a_global(value: float) -> float:
    global largest_so_far
    largest_so_far = max(largest_so_far, value)
    return largest_so_far


def in_a_global_that_is_new(value: float) -> float:
    global created_later
    created_later = max(globals().get("created_later", 0.0), value)
    return float(created_later)


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
    "an array of objects": lambda: in_an_array([0.0]),
    "a cache": in_a_cache,
    "a cached property": in_a_cached_property,
    "a module": in_a_module,
}
every_holder = pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS.keys())


@every_holder
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
    assert remember(0.0) == (0 if make is in_a_cache else 1)  # what was there before stays


@pytest.fixture(autouse=True)
def _forget() -> Any:
    with preserve_outside_state(*(make() for make in HOLDERS.values())):
        yield


@every_holder
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


def test_a_large_tensor_that_is_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_state, "_MAX_NUMBERS", 2)
    remember = in_a_tensor(torch.zeros(3), clamp)
    message = r"3 numbers outside of the model, of shape \[3\]"
    with pytest.raises(UserError, match=message), preserve_outside_state(remember):
        remember(1.0)


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


def test_functions_of_libraries_are_not_followed() -> None:
    with preserve_outside_state(torch.nn.functional.cross_entropy, np.mean) as restore:
        assert not restore()
