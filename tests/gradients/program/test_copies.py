"""A copy of a model shares with it only what cannot be copied."""

from __future__ import annotations

import copy
import datetime
import functools
import logging
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from zdp_bench.errors import UserError
from zdp_bench.gradients import clipped_sum
from zdp_bench.gradients.program import copies, copy_apart


class Statistics:
    """Numbers behind a lock, which cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.largest = [0.0]
        self.itself = self


def test_what_lies_beside_a_lock_is_copied() -> None:
    model = nn.Linear(2, 2)
    model.statistics = Statistics()  # type: ignore[assignment]
    twin = copy_apart(model)
    assert twin.statistics is not model.statistics
    assert twin.statistics.lock is model.statistics.lock
    twin.statistics.largest.append(1.0)  # type: ignore[union-attr]
    assert model.statistics.largest == [0.0]


class CopiesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(2, 2)

    def __deepcopy__(self, memo: object) -> CopiesItself:
        twin = CopiesItself()
        twin.load_state_dict(self.state_dict())
        return twin


def test_a_copy_shares_parameters_even_if_the_model_copies_itself() -> None:
    model = CopiesItself()
    twin = copy_apart(model, tuple(model.parameters()))
    assert twin is not model
    for own, original in zip(twin.parameters(), model.parameters(), strict=True):
        assert own is original
    assert twin.layer._flat_weights[0] is model.layer.weight_ih_l0  # type: ignore[union-attr]


def test_attributes_of_parameters_are_copied() -> None:
    model = nn.Linear(2, 2)
    model.weight.infshape = [2.0]  # type: ignore[attr-defined]
    own = copy_apart(model).weight
    assert own is not model.weight
    assert own.infshape == [2.0]  # type: ignore[attr-defined]
    assert own.infshape is not model.weight.infshape  # type: ignore[attr-defined]
    shared = copy_apart(model, tuple(model.parameters()))
    assert shared.weight is model.weight
    assert torch.equal(own, model.weight)


class Attached(nn.Module):
    """A module that leaves its trainer out of its state, as Lightning's do."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer = Trainer()
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"trainer": None}


class Trainer:
    copies = 0

    def __deepcopy__(self, memo: object) -> Trainer:
        Trainer.copies += 1
        return self


def test_what_a_module_leaves_out_of_its_state_is_not_copied() -> None:
    """The copy of a trainer prints exceptions that Python ignores."""
    model = Attached()
    twin = copy_apart(model)
    assert twin.trainer is None
    assert twin.lock is model.lock
    assert not Trainer.copies


class Hooked(nn.Module):
    """A model whose hooks note outputs in a list of the model, in six ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.notes: list[str] = []
        self.parts = {"notes": self.notes}
        notes, calls = self.notes, 0

        def note(*_: object, kind: str = "function") -> None:
            self.notes.append(kind)

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1
            notes.append(str(calls))

        @functools.wraps(note)
        def decorated(*arguments: object) -> None:
            note(*arguments, kind="decorated")

        def by_default(*_: object, model: Hooked = self) -> None:
            model.notes.append("default")

        self.calls = lambda: calls
        partial = functools.partial(note, kind="partial")
        nested = self.parts["notes"]

        def in_a_part(*_: object) -> None:
            nested.append("part")

        for hook in (note, count, decorated, by_default, partial, in_a_part):
            self.layer.register_forward_hook(hook)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs


def test_a_hook_of_a_copy_writes_to_the_copy() -> None:
    """It wrote to the original, so that the copy's forward function did not find its notes."""
    model = Hooked()
    twin: Any = copy_apart(model, tuple(model.parameters()))
    twin(torch.zeros(1, 2))
    assert twin.notes == ["function", "1", "decorated", "default", "partial", "part"]
    assert model.notes == []
    assert (model.calls(), twin.calls()) == (1, 1)  # a variable that is no part of the model
    model(torch.zeros(1, 2))
    assert model.notes == ["function", "2", "decorated", "default", "partial", "part"]


class ComparesItsActivation(nn.Module):
    """Looks at which functions it holds, one of which refers to it."""

    def __init__(self) -> None:
        super().__init__()
        functions = {F.relu: 1.0}
        activation = F.relu

        def scale(inputs: Tensor, factor: float = 2.0) -> Tensor:
            return activation(inputs) * functions[activation] * factor

        def read_itself() -> ComparesItsActivation:
            return self

        self.activation, self.scale, self.read_itself = activation, scale, read_itself
        self.functions = functions

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale(inputs) if self.activation is F.relu else 100 * inputs


def test_functions_that_do_not_refer_to_the_model_stay_what_they_are() -> None:
    """Each was replaced, so that `self.activation is F.relu` was false in a copy."""
    model = ComparesItsActivation()
    twin: Any = copy_apart(model)
    assert twin.activation is F.relu
    assert twin.functions == {F.relu: 1.0}
    assert torch.equal(twin(torch.ones(1)), model(torch.ones(1)))
    assert twin.read_itself() is twin
    assert twin.read_itself.__annotations__ == {"return": "ComparesItsActivation"}


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated at once")
def test_a_function_with_an_annotation_that_is_not_defined_is_copied() -> None:
    source = """
def make(model):
    def call(inputs: Undefined) -> Undefined:
        return model.linear(inputs)
    return call
"""
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__, "exec", dont_inherit=True), namespace)
    model: Any = nn.Module()
    model.linear = nn.Linear(1, 1)
    model.call = namespace["make"](model)
    twin: Any = copy_apart(model)
    assert twin.call.__closure__[0].cell_contents is twin
    with pytest.raises(NameError, match="Undefined"):
        _ = twin.call.__annotations__


@pytest.mark.parametrize("has_lock", [False, True])
def test_a_parametrized_model_is_copied(has_lock: bool) -> None:
    model: Any = parametrizations.weight_norm(nn.Linear(2, 2))
    if has_lock:
        model.lock = threading.Lock()
    twin: Any = copy_apart(model)
    assert torch.equal(twin.weight, model.weight)


def test_python_modules_are_shared_and_their_names_are_not_followed() -> None:
    """A search of all that NumPy imports took hours."""
    model = nn.Linear(2, 2)
    model.libraries = [torch, np]  # type: ignore[assignment]
    model.statistics = Statistics()  # type: ignore[assignment]
    twin = copy_apart(model)
    assert twin.libraries is not model.libraries
    assert twin.libraries == [torch, np]


def test_a_model_that_refuses_to_be_copied_is_refused() -> None:
    class Unique(nn.Linear):
        def __deepcopy__(self, memo: object) -> Unique:
            raise TypeError("it exists once")

    with pytest.raises(UserError, match=r"the model cannot be copied, .*: it exists once\."):
        copy_apart(Unique(2, 2))


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Named(NamedTuple):
    held: Any


def recursive(read: Callable[[], Any]) -> Callable[[], Any]:
    def read_after(calls: int = 2) -> Any:
        return read_after(calls - 1) if calls else read()

    return read_after


def recursive_by_default(read: Callable[[], Any]) -> Callable[[], Any]:
    def read_after(calls: int = 2, others: Any = ()) -> Any:
        (other,) = others
        return other(calls - 1, others) if calls else read()

    read_after.__defaults__ = (2, (read_after,))
    return read_after


HOLDERS: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda read: read, lambda held: held),
    (lambda read: [read], lambda held: held[0]),
    (lambda read: {"all": ((read,),)}, lambda held: held["all"][0][0]),
    (lambda read: {read}, lambda held: next(iter(held))),
    (lambda read: frozenset([(read,)]), lambda held: next(iter(held))[0]),
    (lambda read: [Named(read)], lambda held: held[0].held),
    (Slotted, lambda held: held.held),
    (lambda read: functools.partial(lambda inner: inner(), read), lambda held: held),
    (lambda read: functools.partial(lambda *, inner: inner(), inner=read), lambda held: held),
    (lambda read: types.MethodType(lambda _: read(), ()), lambda held: held),
    (lambda read: types.MethodType(lambda inner: inner(), read), lambda held: held),
    (functools.lru_cache, lambda held: held),
    (lambda read: functools.cache(lambda: read()), lambda held: held),
    (recursive, lambda held: held),
    (recursive_by_default, lambda held: held),
]


@pytest.mark.parametrize("is_builtin", [False, True])
@pytest.mark.parametrize(("hold", "take"), HOLDERS)
def test_a_function_of_a_copy_reads_what_the_copys_hooks_write(
    hold: Callable[[Any], Any], take: Callable[[Any], Any], is_builtin: bool
) -> None:
    """Only functions that were attributes did; others read the original's dictionary.

    So did a function that is an attribute and is also called by another one.
    """
    memory: dict[str, Tensor] = {}
    model: Any = nn.Linear(2, 2)
    model.memory = memory
    model.register_forward_hook(lambda _, inputs, output: memory.update(output=output))
    held = hold(memory.copy if is_builtin else lambda: dict(memory))
    model.held = held
    model.read = lambda: take(held)()
    twin: Any = copy_apart(model)
    output = twin(torch.ones(1, 2))
    assert take(twin.held)()["output"] is output
    assert take(model.held)() == {}
    assert twin.read()["output"] is output
    assert model.read() == {}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs


def patch_by_function(model: Any) -> None:
    forward = model.forward
    model.forward = lambda inputs: 2 * forward(inputs)


def patch_by_decorator(model: Any) -> None:
    forward = model.forward

    @functools.wraps(forward)
    def doubled(*arguments: Any) -> Tensor:
        return 2 * forward(*arguments)

    model.forward = doubled


def patch_by_method(model: Any) -> None:
    forward = model.forward
    model.forward = types.MethodType(lambda _, inputs: 2 * forward(inputs), model)


PATCHES = [patch_by_function, patch_by_decorator, patch_by_method]


@pytest.mark.parametrize("patch", PATCHES)
def test_the_copy_of_a_model_with_another_forward_function_runs_its_own_layers(
    patch: Callable[[Any], None],
) -> None:
    """The copy ran the original's layers, so that checks examined and changed these."""
    model: Any = nn.Sequential(nn.Linear(2, 2), Counting())
    patch(model)
    twin: Any = copy_apart(model)
    output = twin(torch.ones(1, 2))
    assert (model[1].calls, twin[1].calls) == (0, 1)
    (gradient,) = torch.autograd.grad(output.sum(), twin[0].bias)
    assert gradient.tolist() == [2.0, 2.0]


def test_the_attributes_of_a_methods_function_stay_those_of_the_original() -> None:
    """They were replaced by what refers to the copy."""
    model: Any = nn.Linear(2, 2)

    def scale(own: Any) -> Tensor:
        return 2 * own.weight

    scale.model = lambda: model  # type: ignore[attr-defined]
    model.scale = types.MethodType(scale, model)
    twin: Any = copy_apart(model)
    assert torch.equal(twin.scale(), model.scale())
    assert model.scale.model() is model


def test_the_cache_of_a_method_is_one_of_the_copys_method_and_starts_empty() -> None:
    """It read the original's weights, and its results could be those of other weights."""
    model: Any = nn.Linear(2, 2)
    model.norm = functools.lru_cache(maxsize=4)(lambda power: model.weight.norm(power))
    model.size = functools.lru_cache(lambda: 2)
    model.norm(2)
    twin: Any = copy_apart(model)
    with torch.no_grad():
        twin.weight.zero_()
    assert (twin.norm(2), twin.norm.cache_parameters()["maxsize"]) == (0, 4)
    assert model.norm(2) != 0
    assert twin.size is model.size


@pytest.mark.parametrize("wrap", [functools.partial, functools.cache])
def test_a_partial_or_a_cache_keeps_its_attributes_in_a_copy(wrap: Callable[[Any], Any]) -> None:
    model: Any = nn.Linear(2, 2)
    model.act = wrap(lambda: model.weight)
    model.act.label = "weight"
    twin: Any = copy_apart(model)
    assert twin.act() is twin.weight
    assert twin.act.label == "weight"


def test_a_cached_function_that_calls_itself_has_one_cache_in_a_copy() -> None:
    model: Any = nn.Linear(2, 2)

    @functools.cache
    def power(exponent: int) -> Tensor:
        return power(exponent - 1) @ model.weight if exponent else torch.eye(2)

    model.power = power
    twin: Any = copy_apart(model)
    twin.power(3)
    assert twin.power.cache_info().currsize == 4


def test_the_function_of_a_cache_is_not_taken_from_a_decorator() -> None:
    model: Any = nn.Linear(2, 2)

    def read() -> Any:
        return model.bias

    model.read = functools.wraps(read)(functools.lru_cache(lambda: model.weight))
    model.hidden = functools.lru_cache(read)
    del model.hidden.__wrapped__  # the model could not be copied
    twin: Any = copy_apart(model)
    assert torch.equal(twin.read(), model.weight)
    assert twin.hidden is model.hidden


class OfOneInstance:
    """A class whose instance `copy.deepcopy` would write to, taking it for a new one."""

    instance: OfOneInstance | None = None
    layer: nn.Module

    def __new__(cls) -> OfOneInstance:
        if cls.instance is None:
            cls.instance = super().__new__(cls)
            cls.instance.layer = nn.Linear(2, 2)
        return cls.instance


class ModuleOfOneInstance(nn.Linear):
    instance: ModuleOfOneInstance | None = None

    def __new__(cls) -> ModuleOfOneInstance:
        if cls.instance is None:
            cls.instance = super().__new__(cls)
        return cls.instance

    def __init__(self) -> None:
        super().__init__(2, 2)


def test_a_classs_only_instance_is_shared_and_not_written() -> None:
    """It got the copies of its attributes, so that parameters in it were not the model's."""
    model: Any = nn.Linear(2, 2)
    model.settings = [OfOneInstance()]
    layer = OfOneInstance().layer
    twin: Any = copy_apart(model)
    assert twin.settings is not model.settings
    assert twin.settings[0] is model.settings[0]
    assert model.settings[0].layer is layer


def test_a_module_that_is_its_classs_only_instance_is_refused_and_not_written() -> None:
    model = nn.Sequential(ModuleOfOneInstance())
    weight = model[0].weight
    with pytest.raises(UserError, match="ModuleOfOneInstance gives an existing object instead"):
        copy_apart(model)
    assert model[0].weight is weight


class SlottedWithLogger:
    __slots__ = ("__logger", "seen")

    def __init__(self, logger: Any) -> None:
        self.__logger = logger
        self.seen: list[float] = []

    @property
    def logger(self) -> Any:
        return self.__logger


@dataclass(slots=True)
class Notes:
    logger: Any
    seen: list[float] = field(default_factory=list)


@pytest.mark.parametrize("kind", [SlottedWithLogger, Notes])
@pytest.mark.parametrize("logger", [logging.getLogger(__name__), threading.Lock()])
def test_an_object_with_slots_is_copied_beside_what_it_shares(kind: Any, logger: Any) -> None:
    """Copies shared it, so that each example added to one list and the model was refused."""
    model: Any = nn.Linear(2, 2)
    model.helper, model.seen = kind(logger), {logger: [kind(logger)]}
    twin: Any = copy_apart(model)
    copied, original = [twin.helper, *twin.seen[logger]], [model.helper, *model.seen[logger]]
    for own, other in zip(copied, original, strict=True):
        assert own.logger is other.logger
        assert own.seen is not other.seen


@pytest.mark.parametrize("value", [logging.getLogger(__name__), datetime.UTC, np.dtype("float32")])
def test_a_model_with_a_logger_is_copied_once(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first copy failed, which took a hundred times as long."""
    monkeypatch.setattr(copies, "_share_uncopyable", None)
    model: Any = nn.Linear(2, 2)
    model.value = value
    assert copy_apart(model).value == value


class SharesParts:
    """An object that copies itself with a part that its copies share."""

    def __init__(self, shared: Any) -> None:
        self.shared, self.seen = shared, [0.0]

    def __deepcopy__(self, memo: dict[int, Any]) -> SharesParts:
        memo[id(self.shared)] = self.shared
        twin = SharesParts(copy.deepcopy(self.shared, memo))
        twin.seen = copy.deepcopy(self.seen, memo)
        return twin


@pytest.mark.parametrize("shared", [[1.0], threading.Lock(), Statistics()])
def test_an_object_may_copy_itself_and_share_its_parts(shared: Any) -> None:
    """The part was taken for a class's only instance, so that the whole object was shared."""
    model: Any = nn.Linear(2, 2)
    model.object = SharesParts(shared)
    twin: Any = copy_apart(model)
    assert twin.object.shared is shared
    assert twin.object.seen is not model.object.seen


class Tied(nn.Module):
    """An autoencoder whose decoder is a view of its encoder, made once."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.decoder = self.encoder.weight.t()

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(self.encoder(inputs).tanh(), self.decoder)


def test_a_gradient_passes_through_a_view_of_a_parameter_that_the_model_keeps() -> None:
    """The view was detached, so that the decoder's part of the gradient was lost."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum(dim=1)

    torch.manual_seed(0)
    model, inputs = Tied(), torch.randn(3, 4)
    sums = clipped_sum(model, loss, (inputs, inputs), 1e3).sums
    gradients = torch.autograd.grad(loss(model(inputs), inputs).sum(), [*model.parameters()])
    torch.testing.assert_close([*sums.values()], [*gradients])


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    def scale(inputs: Tensor, offset: float = 0.5) -> Tensor:
        return inputs * factor + offset

    return scale


DOUBLE = scaled_by(2.0)


@pytest.mark.parametrize("function", [DOUBLE, functools.partial(DOUBLE)])
def test_a_closure_over_nothing_of_the_model_is_not_copied(function: Any) -> None:
    model = nn.Linear(2, 2)
    model.act = function
    copied: Any = copy_apart(model).act
    assert getattr(copied, "func", copied) is getattr(function, "func", function)
