"""What tensors, arrays and tables hold. Those that cannot be copied may not be written."""

from __future__ import annotations

import io
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients.outside_state.content import (
    Content,
    Slot,
    class_and_attributes_of,
    content_of,
)

# Larger tensors and arrays are not copied: writing to them is refused.
MAX_NUMBERS = 2**24
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex128, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_GRADIENT: Any = Tensor.grad
_HOOKS: Any = Tensor._backward_hooks


@content_of.register
def _(values: np.ndarray) -> Content:
    if values.size > MAX_NUMBERS or not values.flags.writeable:
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

    return Content(_parts_of_array(values), restore)


def _parts_of_array(values: np.ndarray) -> list[Any]:
    parts = [values.base, *class_and_attributes_of(values)]
    if values.dtype == object:
        parts.extend(values.flatten())
    return parts


@content_of.register
def _(tensor: Tensor) -> Content:
    if tensor.numel() > MAX_NUMBERS or not _can_be_copied(tensor):
        return _refuse_changes_of(tensor)
    memory = tensor.detach()  # `tensor.data = other` leaves it
    numbers = memory.clone()

    def restore() -> bool:
        is_moved = tensor.dtype != memory.dtype or not tensor.is_set_to(memory)
        if is_moved:
            tensor.data = memory
        is_written = not torch.equal(_integers_of(memory), _integers_of(numbers))
        if is_written:
            _write(memory, numbers)
        return is_moved or is_written

    return Content(parts_of_tensor(tensor), restore)


def parts_of_tensor(tensor: Tensor) -> list[Any]:
    parts: list[Any] = [tensor.__dict__, Slot(tensor, _HOOKS)]
    if tensor.is_leaf and not _is_wrapped(tensor):
        parts.append(Slot(tensor, _GRADIENT))
    return parts


def _write(memory: Tensor, numbers: Tensor) -> None:
    """Write to a tensor so that a backward pass that needs the overwritten numbers fails."""
    if memory.is_inference():  # is in no backward pass, and may not be written otherwise
        memory.data.copy_(numbers)
        return
    with torch.no_grad():
        memory.copy_(numbers)


def are_equal(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors of any kind hold the same numbers; NaN equals NaN."""
    try:
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        if torch.equal(first, second):
            return True
        if not (first.is_floating_point() or first.is_complex()):
            return False
        return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    except RuntimeError:  # torch does not compare sparse, quantized or nested tensors, or float8
        return _bytes_of(first) == _bytes_of(second)


def _bytes_of(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor.clone(), file)
    return file.getvalue()


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
def content_without_copy_of(value: Any) -> Content:
    """Return what an object holds, without a copy of its numbers."""
    return content_of.dispatch(type(value))(value)


@content_without_copy_of.register
def _make_read_only(values: np.ndarray) -> Content:
    """Let NumPy raise an error if an array is written."""
    parts = _parts_of_array(values)
    if not values.flags.writeable:
        return Content(parts)
    values.flags.writeable = False

    def finish() -> None:
        if isinstance(values.base, np.ndarray):  # else, NumPy refuses to make a view writable
            values.base.flags.writeable = True
        values.flags.writeable = True

    return Content(parts, lambda: False, finish)


@content_without_copy_of.register
def _refuse_changes_of(tensor: Tensor) -> Content:
    """Raise an error on restoring if a tensor has been written in place.

    A version tells this at once, except for writes through `data`, through NumPy or in inference
    mode. For those, the numbers are summed at the start and at the end.
    """
    if _is_wrapped(tensor):
        return Content(())
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

    return Content((), require_unchanged, finish)


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _checksum_of(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits, read as integers; 0 for an unusual kind of tensor."""
    if not _can_be_copied(tensor):
        return 0
    return int(_integers_of(tensor).sum(dtype=torch.int64))


def _integers_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bits, read as integers, which tell -0.0 from 0.0."""
    numbers = tensor.resolve_conj().resolve_neg()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    return numbers.view(_INTEGERS[numbers.element_size()])


def is_table(value: Any) -> bool:
    """Return True for a pandas Series or DataFrame."""
    return type(value).__module__.startswith("pandas") and hasattr(value, "_mgr")


def content_of_table(table: Any) -> Content:
    saved = table.copy(deep=True)

    def restore() -> bool:
        if table.equals(saved):
            return False
        table._update_inplace(saved.copy(deep=True))
        return True

    columns = [table] if table.ndim == 1 else [table.iloc[:, at] for at in range(table.shape[1])]
    cells = [column.tolist() for column in columns if column.dtype == object]
    return Content([*cells, table.attrs], restore)
