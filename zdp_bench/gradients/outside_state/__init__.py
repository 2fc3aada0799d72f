"""State outside of a model: what the code of a model or a loss can change in memory.

Clipping bounds an example's effect through its own gradient. It bounds nothing if the example also
leaves something for later examples, such as a global maximum or statistics by hospital. Modules are
copied for each example (`program.copies`). Everything that a copy shares with the original is put
back after each example. This is found from the model and the loss:

- code: functions, methods and classes, the variables of their closures, their default values and
  attributes, and the global variables and modules that they name;
- objects: containers, attributes of objects, tensors, arrays and tables. A `functools.lru_cache`
  with other entries is emptied. Writing to tensors and arrays that are large, numerous or of an
  unusual kind is refused.

Functions and classes of the standard library and of installed packages are not followed. Advancing
an iterator is refused. The state of random generators, files and other processes is not restored,
nor that of most objects of installed packages. A model or loss is rejected if its result for an
example changes once others have been processed, even if its state can be restored, because it would
not train as intended (`reference.differentiate_in_loop`, `losses.PerExample`).
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Importing these registers their rules.
from zdp_bench.gradients.outside_state import code, containers, objects  # noqa: F401
from zdp_bench.gradients.outside_state.content import Content, Restore, content_of
from zdp_bench.gradients.outside_state.context import own_context
from zdp_bench.gradients.outside_state.numbers import (
    are_equal,
    content_without_copy_of,
    parts_of_tensor,
)

__all__ = ["Restore", "are_equal", "preserve_outside_state"]

MAX_COPIES = 1000  # of more tensors and arrays, none is copied: writing to them is refused
_ATOMS = {
    *(type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device),
    *(types.CodeType, types.FrameType, types.TracebackType),
}


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
    contents: list[Content] = []
    is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    with own_context() as renew_context:

        def restore() -> bool:
            has_changed = _restore_all(contents)
            renew_context()
            return has_changed

        try:
            if roots and not is_captured:  # without code, nothing changes the environment either
                _find_contents([*roots, os.environ], {id(weight) for weight in weights}, contents)
            yield restore
        finally:
            for content in contents:
                if content.finish is not None:
                    content.finish()
            _restore_all(contents)


def _restore_all(contents: list[Content]) -> bool:
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
        first_error, *_ = errors
        raise first_error
    return has_changed


def _find_contents(roots: Iterable[Any], weights: set[int], contents: list[Content]) -> None:
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
            pending.extend(parts_of_tensor(value))
            continue
        kind = type(value)  # an object may give a false `__class__`
        num_copies += issubclass(kind, (Tensor, np.ndarray))
        find = content_of if num_copies <= MAX_COPIES else content_without_copy_of
        content = find.dispatch(kind)(value)
        pending.extend(content.parts)
        if content.restore is not None:
            contents.append(content)
