"""State outside of a model: what the code of a model or a loss can change in memory.

Clipping bounds an example's effect through its own gradient. It bounds nothing if the example also
leaves something for later examples, such as a global maximum or statistics by hospital. Modules are
copied for each example (`program.copies`). Everything that a copy shares with the original is put
back after each example. This is found from the model and the loss:

- code: functions, methods and classes, the variables of their closures, their default values and
  attributes, and the global variables and modules that they name;
- objects: containers, attributes of objects, tensors, arrays and tables. A `functools.lru_cache`
  with new entries is emptied. Writing to tensors and arrays that are large, numerous or of an
  unusual kind is refused.

Functions and classes of the standard library and of installed packages are not followed. Advancing
an iterator is refused. The state of random generators, files and other processes is not restored,
nor that of most objects of installed packages. A model or loss is rejected if its result for an
example changes once others have been processed, even if its state can be restored, because it would
not train as intended (`reference.differentiate_in_loop`, `losses.PerExample`).
"""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import sys
import sysconfig
import types
import warnings
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from operator import is_, length_hint
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError

# Modules of libraries whose objects hold what a user stores in them. Others, such as loggers and
# trainers, may be in use by other threads.
_MODULES_OF_HOLDERS = (
    *("_thread", "argparse", "builtins", "collections", "functools", "itertools", "queue", "types"),
    *("weakref", "_weakrefset", "numpy", "scipy", "pandas", "torch._library.custom_ops"),
    *("torch.distributions", "torch.nn", "torch.optim", "torch.utils.data"),
    *("sklearn", "transformers", "timm", "monai", "peft", "einops", "torchvision", "torchaudio"),
    *("cachetools", "networkx", "omegaconf"),
)
_ATOMS = {
    *(type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device),
    *(types.CodeType, types.FrameType, types.TracebackType),
}
# Larger tensors and arrays are not copied, nor are more than this number of them: writing to the
# others is refused.
_MAX_NUMBERS = 2**24
_MAX_COPIES = 1000
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex128, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_GRADIENT: Any = Tensor.grad
_HOOKS: Any = Tensor._backward_hooks
_MISSING = object()

Restore = Callable[[], bool]  # returns True if there was something to restore


@dataclass(frozen=True)
class _Content:
    """What an object holds.

    Attributes:
        parts: the objects that it refers to.
        restore: restores what the object itself holds; None if that cannot change.
        finish: is called at the end.
    """

    parts: Iterable[Any]
    restore: Restore | None = None
    finish: Callable[[], None] | None = None


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
    contents: list[_Content] = []
    is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def restore() -> bool:
        return _restore_all(contents)

    try:
        if not is_captured:
            _find_contents([*roots, os.environ], {id(weight) for weight in weights}, contents)
        yield restore
    finally:
        for content in contents:
            if content.finish is not None:
                content.finish()
        restore()


def _restore_all(contents: list[_Content]) -> bool:
    """Restore each content, and return True if anything had changed.

    Raises:
        Exception: the first error, once everything else has been restored.
    """
    errors = []
    has_changed = False
    for content in contents:
        if content.restore is not None:
            try:
                has_changed |= content.restore()
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]
    return has_changed


def _find_contents(roots: Iterable[Any], weights: set[int], contents: list[_Content]) -> None:
    """Append the content of each object that can be reached from the roots and can change."""
    seen: dict[int, Any] = {}  # holds the objects, so that no new one gets the same id
    num_copies = 0
    pending = list(roots)
    while pending:
        value = pending.pop()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        seen[id(value)] = value
        if id(value) in weights:
            pending.extend(_parts_of_tensor(value))
            continue
        kind = type(value)  # an object may give a false `__class__`
        num_copies += issubclass(kind, (Tensor, np.ndarray))
        find = _content_of if num_copies <= _MAX_COPIES else _content_without_copy_of
        content = find.dispatch(kind)(value)
        pending.extend(content.parts)
        if content.restore is not None:
            contents.append(content)


@lru_cache(maxsize=4096)
def _is_library(module_name: Any) -> bool:
    """Return True if a module belongs to Python or an installed package, not to a user's code."""
    package = str(module_name).partition(".")[0]
    if package in ("torch", "zdp_bench"):
        return True
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:  # part of the interpreter, or a script
        return package in sys.stdlib_module_names
    folders = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    return any(Path(file).is_relative_to(folder) for folder in folders)


# ------------------------------------------------------------------------------ objects and classes


@singledispatch
def _content_of(value: Any) -> _Content:
    """Return what an object holds: here, an object of any class, which holds its attributes."""
    parts: list[Any] = []
    owner = type(value)
    if _is_table(value):
        return _content_of_table(value)
    if not _is_library(owner.__module__):
        parts.append(owner)
        parts.extend(_slots_of(value))
    elif isinstance(value, torch.jit.ScriptModule):  # its tensors are no Python attributes
        parts.extend([*value.parameters(), *value.buffers()])
    elif isinstance(value, nn.Module):
        pass
    elif owner.__module__.startswith(_MODULES_OF_HOLDERS):
        parts.extend(gc.get_referents(value))  # such as the function and arguments of a partial
    else:
        return _Content(())
    return _Content([*parts, *_attributes_of(value)])


def _attributes_of(value: Any) -> list[Any]:
    """Return the dictionary of an object's attributes in a list, or an empty list."""
    attributes = getattr(value, "__dict__", None)
    return [attributes] if isinstance(attributes, dict) else []


@dataclass(frozen=True, eq=False)
class _Slot:
    """An attribute that is not in the object's dictionary, such as one in `__slots__`."""

    value: Any
    descriptor: types.MemberDescriptorType | types.GetSetDescriptorType

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
        # Types written in C or Cython have such descriptors too, of which some are read-only.
        if "__slots__" in vars(owner) and not _is_library(owner.__module__):
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
        same = {name for name, value in current.items() if attributes.get(name) is value}
        changed = attributes.keys() - same
        for name in new:
            delattr(owner, name)
        for name in changed:
            setattr(owner, name, attributes[name])
        return bool(new or changed)

    return _Content([*vars(owner).values(), *owner.__bases__, type(owner)], restore)


def _class_attributes(owner: type) -> dict[str, Any]:
    """Return the attributes of a class except those that Python itself may set."""
    return {
        name: value
        for name, value in vars(owner).items()
        if callable(value) or not name.startswith("__")
    }


@_content_of.register
def _(module: types.ModuleType) -> _Content:
    return _Content(() if _is_library(module.__name__) else [vars(module)])


@_content_of.register
def _(reference: weakref.ref) -> _Content:
    return _Content([reference()])


@_content_of.register(weakref.ProxyType)
@_content_of.register(weakref.CallableProxyType)
def _(proxy: Any) -> _Content:
    try:
        return _Content([proxy.__init__.__self__])
    except ReferenceError:  # the object no longer exists
        return _Content(())


@_content_of.register
def _(variable: ContextVar) -> _Content:
    content = variable.get(_MISSING)
    if content is _MISSING:  # its default value takes the place of none
        content = Context().run(_read_default, variable)

    def restore() -> bool:
        if variable.get(content) is content:
            return False
        if content is _MISSING:
            raise UserError(
                f"the context variable '{variable.name}' is set by the model or the loss, so an "
                "example may affect others, which clipping cannot bound: do not set it, or give "
                "it a default value."
            )
        variable.set(content)
        return True

    return _Content([content], restore)


def _read_default(variable: ContextVar) -> Any:
    """Return the value of a variable in an empty context."""
    try:
        return variable.get()
    except LookupError:
        return _MISSING


@_content_of.register
def _(environment: os._Environ) -> _Content:
    variables = dict(environment)

    def restore() -> bool:
        current = dict(environment)
        if current == variables:
            return False
        for name in current.keys() - variables.keys():
            del environment[name]
        environment.update(variables)
        return True

    return _Content((), restore)


@_content_of.register(io.StringIO)
@_content_of.register(io.BytesIO)
def _(file: Any) -> _Content:
    if file.closed:
        return _Content(())
    *state, _ = file.__getstate__()  # the last are its attributes

    def restore() -> bool:
        if file.__getstate__()[:-1] == (*state,):
            return False
        file.__setstate__((*state, None))
        return True

    return _Content([*_class_and_attributes_of(file)], restore)


@_content_of.register
def _(iterator: Iterator) -> _Content:
    """Return what an iterator holds. It cannot be set back, so that advancing it is refused."""
    frame = None
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        parts = [] if frame is None else [*frame.f_locals.values()]
    elif type(iterator).__module__ in ("builtins", "itertools"):
        parts = gc.get_referents(iterator)
    else:
        return _content_of.dispatch(object)(iterator)
    position = _position_of(iterator)
    values = list(parts)

    def require_unchanged() -> bool:
        is_same_frame = frame is None or _are_same([*frame.f_locals.values()], values)
        if _position_of(iterator) == position and is_same_frame:
            return False
        raise UserError(
            f"a {type(iterator).__name__} outside of the model was advanced by the model or the "
            "loss, so an example may affect others, which clipping cannot bound: compute the value "
            "for each example anew."
        )

    return _Content(parts, require_unchanged)


def _position_of(iterator: Iterator) -> Any:
    """Return a value that differs once an iterator of Python's has advanced, if one is known."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else frame.f_lasti  # None at its end
    if type(iterator).__module__ == "builtins":
        return length_hint(iterator, -1)
    if isinstance(iterator, itertools.count | itertools.repeat):
        return repr(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 copies none of these
        try:
            return pickle.dumps(iterator)
        except Exception:
            return None


# --------------------------------------------------------------------------------------------- code


@_content_of.register
def _(function: types.FunctionType) -> _Content:
    parts = [
        *(function.__closure__ or ()),
        *(function.__defaults__ or ()),
        function.__kwdefaults__,
        function.__dict__,
    ]
    namespace = function.__globals__
    if not _is_library(namespace.get("__name__")):
        names = _names_in(function.__code__)
        parts.append(_Variables(namespace, names))
        for name in names:  # a module may be imported in the function
            parts.append(sys.modules.get(name))
            parts.append(sys.modules.get(f"{namespace.get('__package__')}.{name}"))
    return _Content(parts)


@lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of global variables and attributes in a function and in those within it.

    Strings are included, because the code may look a variable or module up by its name.
    """
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return frozenset(names)


@dataclass(frozen=True)
class _Variables:
    """The global variables that a function names."""

    namespace: dict[str, Any]
    names: frozenset[str]


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


@_content_of.register(type(lru_cache(len)))
def _(function: Any) -> _Content:
    misses = function.cache_info().misses

    def clear() -> bool:
        nonlocal misses
        if function.cache_info().misses != misses:
            function.cache_clear()
            misses = function.cache_info().misses
        return False  # a smaller cache affects no result

    return _Content([*gc.get_referents(function), function.__dict__], clear)


# ------------------------------------------------------------------------------ containers, tensors


@_content_of.register(tuple)
@_content_of.register(frozenset)
def _(values: Any) -> _Content:
    return _Content([*values, *_class_and_attributes_of(values)])


@_content_of.register
def _(values: list) -> _Content:
    items = list.copy(values)

    def restore() -> bool:
        if _are_same(list.copy(values), items):
            return False
        list.__setitem__(values, slice(None), items)
        return True

    return _Content([*items, *_class_and_attributes_of(values)], restore)


@_content_of.register
def _(values: deque) -> _Content:
    items = list(deque.copy(values))

    def restore() -> bool:
        if _are_same(list(deque.copy(values)), items):
            return False
        deque.clear(values)
        deque.extend(values, items)
        return True

    return _Content([*items, *_class_and_attributes_of(values)], restore)


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

    return _Content([*items, *_class_and_attributes_of(values)], restore)


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

    parts = [*keys, *contents, *_class_and_attributes_of(values)]
    if isinstance(values, defaultdict):
        parts.append(values.default_factory)
    return _Content(parts, restore)


@_content_of.register(bytearray)
@_content_of.register(array)
def _(values: Any) -> _Content:
    numbers = values[:]

    def restore() -> bool:
        if values == numbers:
            return False
        values[:] = numbers
        return True

    return _Content((), restore)


def _class_and_attributes_of(container: Any) -> list[Any]:
    """Return the class of a container and its attributes if they are a user's own."""
    owner = type(container)
    if owner.__module__ in ("builtins", "collections"):
        return []
    return [owner, *_attributes_of(container)]


def _are_same(first: list[Any], second: list[Any]) -> bool:
    """Return True if two lists hold the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))


@_content_of.register
def _(values: np.ndarray) -> _Content:
    if values.size > _MAX_NUMBERS or not values.flags.writeable:
        return _make_read_only(values)
    numbers = values.copy()

    def restore() -> bool:
        is_resized = values.shape != numbers.shape
        if is_resized:
            values.resize(numbers.shape, refcheck=False)
        is_written = values.tobytes() != numbers.tobytes()  # of objects, these are their addresses
        if is_written:
            values[...] = numbers
        return is_resized or is_written

    return _Content(_parts_of_array(values), restore)


def _parts_of_array(values: np.ndarray) -> list[Any]:
    parts = [values.base, *_class_and_attributes_of(values)]
    if values.dtype == object:
        parts.extend(values.flatten())
    return parts


@_content_of.register
def _(tensor: Tensor) -> _Content:
    if tensor.numel() > _MAX_NUMBERS or not _can_be_copied(tensor):
        return _refuse_changes_of(tensor)
    memory = tensor.detach()  # `tensor.data = other` leaves it
    numbers = memory.clone()

    def restore() -> bool:
        is_moved = tensor.dtype != memory.dtype or not tensor.is_set_to(memory)
        if is_moved:
            tensor.data = memory
        is_written = not _are_equal(memory, numbers)
        if is_written:
            _write(memory, numbers)
        return is_moved or is_written

    return _Content(_parts_of_tensor(tensor), restore)


def _parts_of_tensor(tensor: Tensor) -> list[Any]:
    parts: list[Any] = [tensor.__dict__, _Slot(tensor, _HOOKS)]
    if tensor.is_leaf and not _is_wrapped(tensor):
        parts.append(_Slot(tensor, _GRADIENT))
    return parts


def _write(memory: Tensor, numbers: Tensor) -> None:
    """Write to a tensor so that a backward pass that needs the overwritten numbers fails."""
    if memory.is_inference():  # is in no backward pass, and may not be written otherwise
        memory.data.copy_(numbers)
        return
    with torch.no_grad():
        memory.copy_(numbers)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors of the same shape hold the same numbers; NaN equals NaN."""
    if torch.equal(first, second):
        return True
    if not (first.is_floating_point() or first.is_complex()):
        return False
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def _is_wrapped(tensor: Tensor) -> bool:
    """Return True for a tensor of torch.func, which may not outlive its transform."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _can_be_copied(tensor: Tensor) -> bool:
    """Return True for an ordinary tensor with one memory address for each number."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.is_quantized:
        return False
    if _is_wrapped(tensor) or tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
        return False
    if tensor.is_nested:
        return False
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return all(stride > 0 or size == 1 for stride, size in sizes)


@singledispatch
def _content_without_copy_of(value: Any) -> _Content:
    """Return what an object holds, without a copy of its numbers."""
    return _content_of.dispatch(type(value))(value)


@_content_without_copy_of.register
def _make_read_only(values: np.ndarray) -> _Content:
    """Let NumPy raise an error if an array is written."""
    parts = _parts_of_array(values)
    if not values.flags.writeable:
        return _Content(parts)
    values.flags.writeable = False

    def finish() -> None:
        if isinstance(values.base, np.ndarray):  # else, NumPy refuses to make a view writable
            values.base.flags.writeable = True
        values.flags.writeable = True

    return _Content(parts, lambda: False, finish)


@_content_without_copy_of.register
def _refuse_changes_of(tensor: Tensor) -> _Content:
    """Raise an error on restoring if a tensor has been written in place.

    A version tells this at once, except for writes through `data`, through NumPy or in inference
    mode. For those, the numbers are summed at the start and at the end.
    """
    if _is_wrapped(tensor):
        return _Content(())
    version = _version_of(tensor)
    checksum = _checksum_of(tensor)
    is_at_end = False

    def finish() -> None:
        nonlocal is_at_end
        is_at_end = True

    def require_unchanged() -> bool:
        is_same = _version_of(tensor) == version
        if is_same and not (is_at_end and _checksum_of(tensor) != checksum):
            return False
        raise UserError(
            f"a tensor outside of the model, of shape {list(tensor.shape)} and {tensor.dtype}, was "
            "changed by the model or the loss, so an example may affect others, which clipping "
            "cannot bound: do not write to it."
        )

    return _Content((), require_unchanged, finish)


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _checksum_of(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits, read as integers; 0 for an unusual kind of tensor."""
    if not _can_be_copied(tensor):
        return 0
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = numbers.detach().view(_INTEGERS[numbers.element_size()])
    return int(integers.sum(dtype=torch.int64))


def _is_table(value: Any) -> bool:
    """Return True for a pandas Series or DataFrame."""
    return type(value).__module__.startswith("pandas") and hasattr(value, "_mgr")


def _content_of_table(table: Any) -> _Content:
    saved = table.copy(deep=True)

    def restore() -> bool:
        if table.equals(saved):
            return False
        table._update_inplace(saved.copy(deep=True))
        return True

    columns = [table] if table.ndim == 1 else [table.iloc[:, at] for at in range(table.shape[1])]
    cells = [column.tolist() for column in columns if column.dtype == object]
    return _Content([*cells, table.attrs], restore)
