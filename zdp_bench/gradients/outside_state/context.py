"""Context variables: code in a block sets those of a copy of the thread's context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context

# Python can run a function in a context, but only C can enter one for a block.
_enter = ctypes.pythonapi.PyContext_Enter
_leave = ctypes.pythonapi.PyContext_Exit


@contextmanager
def own_context() -> Iterator[Callable[[], None]]:
    """Run the block in a copy of the thread's context, so that it sets no variable outside of it.

    Yields:
        A function that begins another copy. No context that is entered in the block may be current.
    """
    context = _enter_copy()

    def renew() -> None:
        nonlocal context
        _leave(context)
        context = _enter_copy()

    try:
        yield renew
    finally:
        _leave(context)


def _enter_copy() -> ctypes.py_object[Context]:
    """Make a copy of the thread's context the current one, and return it."""
    copied = ctypes.py_object(copy_context())
    _enter(copied)
    return copied
