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
    current: list[ctypes.py_object[Context]] = []

    def enter() -> None:
        current.append(ctypes.py_object(copy_context()))
        _enter(current[-1])

    def renew() -> None:
        _leave(current.pop())
        enter()

    enter()
    try:
        yield renew
    finally:
        _leave(current.pop())
