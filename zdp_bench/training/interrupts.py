"""What ends a run from outside, and how it is told: SIGTERM, ctrl-C, a disk that is full.

A signal lets the step under way come to its end; then the run saves and leaves with an exit code of its own (`EXIT_CODES`), and
the same command goes on at that very step. A second ctrl-C leaves at once: what the last checkpoint holds is kept.
"""

from __future__ import annotations

import errno
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from zdp_bench.errors import UserError

# What a process that was asked to stop exits with, its state saved. 75 is sysexits' EX_TEMPFAIL, 'try again later': a shell gives
# 143 for any process that SIGTERM ended, saved or not, so that one would say nothing.
EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}

# A write failed for what a user can mend; reading gives none of these but the last two.
UNWRITABLE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
}
NO_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}


class Stopped(BaseException):
    """A signal asked the process to stop, and it has saved what it had; no `Exception`, so that a sweep stops too."""

    def __init__(self, by: int) -> None:
        super().__init__(by)
        self.by = by

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(signal.Signals(self.by), 128 + self.by)

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.by).name}; all is saved, and the same command goes on from here"


def find_stop(error: BaseException) -> Stopped | None:
    """The stop that an error came of. A signal in the middle of a library's work may leave that in pieces (of OmegaConf, a list
    with a hole in it), and what the library then raises covers it."""
    under: BaseException | None = error
    while under is not None and not isinstance(under, Stopped):
        under = under.__context__
    return under


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Within, SIGTERM and the first ctrl-C only raise a flag; yields what reads it: the signal's number, or 0.

    Outside the main thread, where Python takes no signals, the flag is never raised.
    """
    asked = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked == number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = number

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {number: signal.signal(number, note) for number in EXIT_CODES}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Within, and outside of any run, SIGTERM raises `Stopped`: there is nothing to save."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except Exception as error:
        if (stop := find_stop(error)) is None:
            raise
        raise stop from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def explain_write_errors(home: Path) -> Iterator[None]:
    """Around all that writes into a run's folder: a write that fails is one sentence, and says what is kept.

    Raises:
        UserError: the disk is full, over its quota or not to be written to.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or home
        if error.errno in NO_FOLDER:
            raise UserError(
                f"{where}: {error.strerror}, so no results can be written there. Set paths.results."
            ) from None
        if error.errno not in UNWRITABLE:
            raise
        raise UserError(
            f"{where}: {error.strerror}. Nothing that was saved is lost: once {home.parent} can be written to, the same command "
            "goes on from the last checkpoint."
        ) from None


def explain_os_error(error: OSError) -> UserError | None:
    """What a person can do about a path that the system refuses; None where the error names no path, and so says nothing."""
    if not error.filename or not error.strerror:
        return None
    return UserError(
        f"{error.filename}: {error.strerror}. Mend that or name another place (paths.results, paths.data, --results); nothing "
        "that was saved is lost."
    )


def require_writable(folder: Path) -> None:
    """Try whether `folder` can be written to or made, and leave nothing behind: before the work, not after it.

    Raises:
        UserError: it cannot.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UserError(
            f"{folder}: {error.strerror}, so nothing can be written there. Name another folder."
        ) from None
