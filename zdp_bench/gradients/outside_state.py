"""State outside of a model: what the code of a model or a loss can change in memory.

Clipping bounds an example's effect through its own gradient. It bounds nothing if the example also
leaves something for later examples, such as a global maximum or statistics by hospital. Modules are
copied for each example (`program.copies`). Everything that a copy shares with the original is put
back after each example. This is found from the model and the loss:

- code: functions, methods and classes, the variables of their closures, their default values and
  attributes, the attributes of their modules, and the global variables that they name;
- objects: containers, attributes of objects, tensors and NumPy arrays. `functools.lru_cache` is
  emptied.

Code and objects of the standard library, torch, NumPy and other well-known packages are not
followed, except for containers and layers. The state of iterators, of random generators and of
files cannot be put back. A model or loss is rejected if its result for an example changes once
others have been processed, even if its state can be put back, because it would not train as
intended (`reference.differentiate_in_loop`, `losses.PerExample`).
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError

# Packages whose functions and classes keep nothing of the examples that they are called with.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "sklearn", "PIL"),
    *("transformers", "timm", "monai", "peft", "accelerate", "einops", "huggingface_hub"),
    *("lightning", "lightning_fabric", "pytorch_lightning", "zdp_bench"),
}
# Modules of the standard library whose objects hold what a user stores in them.
_STORAGE_MODULES = {"collections", "types", "weakref", "queue", "_thread"}
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, *weakref.ProxyTypes),
)
# Larger tensors are not copied. A change is refused, and a change through `.data` goes unnoticed.
_MAX_NUMBERS = 2**24
_MISSING = object()

Restore = Callable[[], bool]  # returns True if there was something to restore


@dataclass(frozen=True)
class _Content:
    """What an object holds.

    Attributes:
        parts: the objects that it refers to.
        restore: restores what the object itself holds; None if that cannot change.
    """

    parts: Iterable[Any]
    restore: Restore | None = None


@contextmanager
def preserve_outside_state(
    *roots: Any,
    weights: Iterable[Tensor] = (),
) -> Iterator[Restore]:
    """Restore on exit everything in memory that the code of these objects can change.

    Nothing is restored while a CUDA graph is captured: its replays run no Python code.

    Args:
        roots: models, losses or other functions.
        weights: tensors whose numbers are not restored.

    Yields:
        A function that restores it within the context. It returns True if anything had changed.
    """
    restorers: list[Restore] = []
    is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if not is_captured:
        restorers = _find_restorers(roots, {id(weight) for weight in weights})

    def restore() -> bool:
        changes = [restore_object() for restore_object in restorers]
        return any(changes)

    try:
        yield restore
    finally:
        restore()


def _find_restorers(roots: Iterable[Any], weights: set[int]) -> list[Restore]:
    """Return a function that restores its content, for each object that can be changed."""
    restorers: list[Restore] = []
    seen: dict[int, Any] = {}  # holds the objects, so that no new one gets the same id
    pending = list(roots)
    while pending:
        value = pending.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value
        content = _content_of(value)
        pending.extend(content.parts)
        if content.restore is not None and id(value) not in weights:
            restorers.append(content.restore)
    return restorers


def _is_library(module_name: Any) -> bool:
    """Return True if a module belongs to a package whose code is not followed."""
    return str(module_name).partition(".")[0] in _LIBRARIES


# ------------------------------------------------------------------------------ objects and classes


@singledispatch
def _content_of(value: Any) -> _Content:
    """Return what an object holds: here, an object of any class, which holds its attributes."""
    parts: list[Any] = []
    owner = type(value)
    if not _is_library(owner.__module__):
        parts.append(owner)
        parts.extend(_slots_of(value))
    elif not (isinstance(value, nn.Module) or owner.__module__ in _STORAGE_MODULES):
        return _Content(())
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        parts.append(attributes)
    return _Content(parts)


@dataclass(frozen=True)
class _Slot:
    """One attribute of an object whose class has `__slots__`."""

    value: Any
    descriptor: types.MemberDescriptorType

    def read(self) -> Any:
        try:
            return self.descriptor.__get__(self.value)
        except AttributeError:  # not assigned yet
            return _MISSING

    def write(self, content: Any) -> None:
        if content is _MISSING:
            self.descriptor.__delete__(self.value)
        else:
            self.descriptor.__set__(self.value, content)


def _slots_of(value: Any) -> list[_Slot]:
    slots = []
    for owner in type(value).__mro__:
        if not _is_library(owner.__module__):
            for descriptor in vars(owner).values():
                if isinstance(descriptor, types.MemberDescriptorType):
                    slots.append(_Slot(value, descriptor))
    return slots


@_content_of.register
def _(slot: _Slot) -> _Content:
    content = slot.read()

    def restore() -> bool:
        if slot.read() is content:
            return False
        slot.write(content)
        return True

    return _Content([content], restore)


@_content_of.register
def _(owner: type) -> _Content:
    if _is_library(owner.__module__):
        return _Content(())
    attributes = _class_attributes(owner)

    def restore() -> bool:
        current = _class_attributes(owner)
        new = current.keys() - attributes.keys()
        changed = [
            name for name in attributes if current.get(name, _MISSING) is not attributes[name]
        ]
        for name in new:
            delattr(owner, name)
        for name in changed:
            setattr(owner, name, attributes[name])
        return bool(new or changed)

    return _Content([*attributes.values(), *owner.__bases__], restore)


def _class_attributes(owner: type) -> dict[str, Any]:
    """Return the attributes of a class except those that Python itself maintains."""
    return {
        name: value
        for name, value in vars(owner).items()
        if callable(value) or not name.startswith("__")
    }


# --------------------------------------------------------------------------------------------- code


@_content_of.register
def _(function: types.FunctionType) -> _Content:
    parts = [
        *(function.__closure__ or ()),
        *(function.__defaults__ or ()),
        function.__kwdefaults__,
        function.__dict__,
    ]
    if not _is_library(function.__globals__.get("__name__")):
        names = _names_in(function.__code__)
        parts.extend(_find_variables(function.__globals__, names))
    return _Content(parts)


@lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of global variables and attributes in a function and in those within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return frozenset(names)


@dataclass(frozen=True)
class _Variables:
    """The variables of a module that a function names."""

    namespace: dict[str, Any]
    names: frozenset[str]


def _find_variables(namespace: dict[str, Any], names: frozenset[str]) -> list[_Variables]:
    """Return the variables with these names in a namespace and in the modules that it names."""
    found = {id(namespace): _Variables(namespace, names)}
    pending = [namespace]
    while pending:
        current = pending.pop()
        for name in names & current.keys():
            module = current[name]
            is_module = isinstance(module, types.ModuleType)
            if is_module and not _is_library(module.__name__) and id(vars(module)) not in found:
                found[id(vars(module))] = _Variables(vars(module), names)
                pending.append(vars(module))
    return list(found.values())


@_content_of.register
def _(variables: _Variables) -> _Content:
    namespace = variables.namespace
    values = {name: namespace.get(name, _MISSING) for name in variables.names}

    def restore() -> bool:
        changed = [name for name in values if namespace.get(name, _MISSING) is not values[name]]
        for name in changed:
            if values[name] is _MISSING:
                del namespace[name]
            else:
                namespace[name] = values[name]
        return bool(changed)

    return _Content(values.values(), restore)


@_content_of.register
def _(cell: types.CellType) -> _Content:
    value = _read_cell(cell)

    def restore() -> bool:
        if _read_cell(cell) is value:
            return False
        if value is _MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = value
        return True

    return _Content([value], restore)


def _read_cell(cell: types.CellType) -> Any:
    """Return the value of a variable in a closure."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


@_content_of.register
def _(method: types.MethodType) -> _Content:
    return _Content([method.__self__, method.__func__])


@_content_of.register(staticmethod)
@_content_of.register(classmethod)
def _(method: Any) -> _Content:
    return _Content([method.__func__])


@_content_of.register
def _(attribute: property) -> _Content:
    return _Content([attribute.fget, attribute.fset, attribute.fdel])


@_content_of.register
def _(attribute: functools.cached_property) -> _Content:
    return _Content([attribute.func])


@_content_of.register
def _(function: functools.partial) -> _Content:
    return _Content([function.func, function.args, function.keywords, function.__dict__])


@_content_of.register(type(lru_cache(len)))
def _(function: Any) -> _Content:
    def clear() -> bool:
        function.cache_clear()
        return False  # an empty cache affects no result

    clear()  # a cached tensor could be changed in place
    return _Content([function.__wrapped__, function.__dict__], clear)


# ------------------------------------------------------------------------------ containers, tensors


@_content_of.register(tuple)
@_content_of.register(frozenset)
def _(values: Any) -> _Content:
    return _Content([*values, *_attributes_of(values)])


@_content_of.register
def _(values: list) -> _Content:
    items = list.copy(values)

    def restore() -> bool:
        if _are_same(list.copy(values), items):
            return False
        list.__setitem__(values, slice(None), items)
        return True

    return _Content([*items, *_attributes_of(values)], restore)


@_content_of.register
def _(values: deque) -> _Content:
    items = list(deque.copy(values))

    def restore() -> bool:
        if _are_same(list(deque.copy(values)), items):
            return False
        deque.clear(values)
        deque.extend(values, items)
        return True

    return _Content([*items, *_attributes_of(values)], restore)


@_content_of.register
def _(values: set) -> _Content:
    items = set.copy(values)
    ids = set(map(id, items))

    def restore() -> bool:
        if ids == set(map(id, set.copy(values))):
            return False
        set.clear(values)
        set.update(values, items)
        return True

    return _Content([*items, *_attributes_of(values)], restore)


@_content_of.register
def _(values: dict) -> _Content:
    kind: Any = OrderedDict if isinstance(values, OrderedDict) else dict
    items = list(kind.items(values))
    keys = [key for key, _ in items]
    contents = [content for _, content in items]

    def restore() -> bool:
        has_same_keys = _are_same(list(kind.keys(values)), keys)
        if has_same_keys and _are_same(list(kind.values(values)), contents):
            return False
        kind.clear(values)
        for key, content in items:
            kind.__setitem__(values, key, content)
        return True

    return _Content([*keys, *contents, *_attributes_of(values)], restore)


@_content_of.register
def _(values: bytearray) -> _Content:
    numbers = bytes(values)

    def restore() -> bool:
        if values == numbers:
            return False
        values[:] = numbers
        return True

    return _Content((), restore)


def _attributes_of(container: Any) -> list[Any]:
    """Return the class of a container and its attributes if it has any."""
    owner = type(container)
    if owner.__module__ in ("builtins", "collections"):
        return []
    return [owner, getattr(container, "__dict__", None)]


def _are_same(first: list[Any], second: list[Any]) -> bool:
    """Return True if two lists hold the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))


@_content_of.register
def _(values: np.ndarray) -> _Content:
    if values.dtype == object:
        return _Content([*values.flat])
    if not values.flags.writeable or values.size > _MAX_NUMBERS:
        return _Content([values.base])
    numbers = values.copy()

    def restore() -> bool:
        if values.tobytes() == numbers.tobytes():
            return False
        values[...] = numbers
        return True

    return _Content((), restore)


@_content_of.register
def _(tensor: Tensor) -> _Content:
    parts = [tensor.__dict__, tensor._backward_hooks]
    if not _can_be_copied(tensor):
        return _Content([*parts, tensor._base])
    if tensor.numel() > _MAX_NUMBERS:
        return _Content(parts, _refuse_change_of(tensor))
    numbers = tensor.detach().clone()

    def restore() -> bool:
        current = tensor.detach()
        if current.shape != numbers.shape:
            tensor.data = numbers.clone()
            return True
        if _are_equal(current, numbers):
            return False
        tensor.data.copy_(numbers)
        return True

    return _Content(parts, restore)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors of the same shape hold the same numbers; NaN equals NaN."""
    if torch.equal(first, second):
        return True
    if not (first.is_floating_point() or first.is_complex()):
        return False
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def _can_be_copied(tensor: Tensor) -> bool:
    """Return True for an ordinary tensor with one memory address for each number."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.is_quantized:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.layout != torch.strided:
        return False
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return all(stride > 0 or size == 1 for stride, size in sizes)


def _refuse_change_of(tensor: Tensor) -> Restore | None:
    """Return a function that raises an error if a large tensor has been written in place."""
    if tensor.is_inference():  # has no version
        return None
    version = tensor._version

    def require_unchanged() -> bool:
        if tensor._version == version:
            return False
        raise UserError(
            f"a tensor of {tensor.numel():,} numbers outside of the model, of shape "
            f"{list(tensor.shape)}, was changed by the model or the loss, so an example may "
            "affect others, which clipping cannot bound: do not write to it."
        )

    return require_unchanged
