"""Handle what ends a run from outside: SIGTERM, Ctrl-C, a full disk, the end of its parent process.

After a signal, the current step is finished, the run is saved, and the process exits with a special
code (`EXIT_CODES`). The same command continues from that step. A second Ctrl-C ends the process at
once, and the last checkpoint remains.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

from zdp_bench.errors import UserError, explain_missing, is_out_of_memory

# Exit codes of a process that received a signal and has saved its state. 75 is EX_TEMPFAIL, "try
# again later". The usual 143 would also stand for processes that have not saved their state.
EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
CONTINUING = "the same command, without any force=true, continues"  # with it, a run begins anew

# Reasons for a failed write that a user can remove.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
UNWRITABLE = {*_FULL, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


class Stopped(BaseException):
    """A signal stopped the process. It is no `Exception`, so that a sweep stops too."""

    def __init__(self, by: int, has_saved: bool = True) -> None:
        super().__init__(by, has_saved)
        self.by = by
        self.has_saved = has_saved

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(signal.Signals(self.by), 128 + self.by)

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.by).name}"


def find_stop(error: BaseException) -> Stopped | None:
    """Return the `Stopped` behind an error, or None. A library may raise its own error after it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Stopped):
        cause = cause.__context__
    return cause


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Record SIGTERM and the first Ctrl-C instead of stopping.

    Yield a function that returns the number of the signal, or 0. Outside the main thread, where
    Python receives no signals, it always returns 0.
    """
    received = 0

    def record(number: int, frame: FrameType | None) -> None:
        nonlocal received
        _end_at_second_interrupt(received, number)
        received = number

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    with _handling(record):
        yield lambda: received


def _end_at_second_interrupt(received: int, number: int) -> None:
    """Raise `KeyboardInterrupt` at a Ctrl-C after the one that was received."""
    if received == number == signal.SIGINT:
        raise KeyboardInterrupt


@contextmanager
def _handling(
    handler: Callable[[int, FrameType | None], None],
) -> Iterator[dict[signal.Signals, signal._HANDLER]]:
    """Call a function on SIGTERM and Ctrl-C in this block, and yield the earlier handlers."""
    old_handlers = {number: signal.signal(number, handler) for number in EXIT_CODES}
    try:
        yield old_handlers
    finally:
        for number, old_handler in old_handlers.items():
            signal.signal(number, old_handler)


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise `Stopped` outside of runs."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    old_handler = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except Exception as error:
        if (stop := find_stop(error)) is None:
            raise
        raise stop from None
    finally:
        signal.signal(signal.SIGTERM, old_handler)


@contextmanager
def stop_workers_first(request: Path) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C raise `Stopped` after a sweep's workers have saved their runs.

    joblib kills the workers if an error ends this block, and also if one of them exits. So they are
    asked to stop, and the error is raised once none has a job. A second Ctrl-C ends the block at
    once. Without workers, both signals act as before. Outside the main thread, where Python
    receives no signals, the block does nothing.

    Args:
        request: file that asks the workers to stop, alone in its folder; see `stop_on_request`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received = 0  # not `request.exists()`: a worker that gets a signal makes the request too

    def stop(number: int, frame: FrameType | None) -> None:
        if not multiprocessing.active_children():
            _handle(number, frame, old_handlers[signal.Signals(number)])
            return
        nonlocal received
        _end_at_second_interrupt(received, number)
        if received:
            return
        received = number
        request.touch()
        while (jobs := _list_jobs(request)) and multiprocessing.active_children():
            time.sleep(0.1)
        # A worker that was still starting could not react. Its end made joblib kill the others.
        raise Stopped(number, has_saved=not jobs)

    with _handling(stop) as old_handlers:
        yield


def _handle(number: int, frame: FrameType | None, handler: signal._HANDLER) -> None:
    """Do what a signal did before another handler was set."""
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _list_jobs(request: Path) -> list[Path]:
    """Return a file for each job that a worker carries out; see `stop_on_request`."""
    return [path for path in request.parent.iterdir() if path != request]


def take_jobs(request: Path) -> set[str]:
    """Return the jobs of workers that were killed, and delete their files."""
    jobs = set()
    for path in _list_jobs(request):
        jobs.add(path.name.partition(".")[0])
        path.unlink()
    return jobs


@contextmanager
def stop_on_request(request: Path, parent: int, job: str) -> Iterator[None]:
    """Let a request raise `Stopped` in the job of this worker, as SIGTERM and Ctrl-C do.

    A signal that arrives between two jobs is ignored: the next job finds the request. Without the
    process that started it, a worker ends.

    Args:
        request: file whose creation asks the worker to stop. A file beside it shows that this
            worker has a job.
        parent: process that started the worker. Its end is a request too.
        job: the job's digest. It begins the name of the file beside `request`, which is empty, so
            that it can also be created on a full disk.
    """
    has_job = True

    def stop(number: int, frame: FrameType | None) -> None:
        if has_job:
            raise Stopped(number)
        if os.getppid() != parent:
            os._exit(EXIT_CODES[signal.SIGTERM])

    for number in EXIT_CODES:
        signal.signal(number, stop)
    _watch(request, parent)
    try:
        with tempfile.NamedTemporaryFile(dir=request.parent, prefix=f"{job}."):
            if request.exists() or os.getppid() != parent:
                raise Stopped(signal.SIGTERM)
            yield
    finally:
        has_job = False


@cache
def _watch(request: Path, parent: int) -> None:
    """Send SIGTERM to this process once `request` exists or `parent` has ended."""

    def watch() -> None:
        while os.getppid() == parent and not request.exists():
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def explain_write_errors(home: Path, advice: str) -> Iterator[None]:
    """Turn a failed write beside or into `home` into a clear error.

    Args:
        home: a run's folder, or a ledger.
        advice: what to do once the folder is writable again, for the error.
    """
    try:
        yield
    except OSError as error:
        path = Path(str(error.filename or home))
        if error.errno not in UNWRITABLE or not path.is_relative_to(home.parent):
            raise  # another error, such as an unreadable example
        raise UserError(
            f"{path}: {error.strerror}. Everything saved is intact: once {home.parent} is "
            f"writable, {advice}."
        ) from None


def explain(error: BaseException) -> UserError | None:
    """Return a clear error for what the system refuses: memory, a path or a package; else None."""
    if is_out_of_memory(error):
        return UserError(
            "out of memory. Reduce trainer.micro_batch, for example to 8, or raise the limit; "
            "everything saved is intact."
        )
    if isinstance(error, OSError) and error.filename and error.strerror:
        from zdp_bench.disk import find_target  # not needed for --help, and slow

        written = Path(str(error.filename))
        path = find_target(written) or written
        if error.errno == errno.ENAMETOOLONG:
            return UserError(
                f"{path}: the name is too long for the file system; choose a shorter one."
            )
        return UserError(
            f"{path}: {error.strerror}. Fix this, or choose another folder "
            "(paths.results, paths.data, --results); everything saved is intact."
        )
    # The output of the command, or a file that a library writes: neither has a name.
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return UserError(
            f"the output or a file in the results folder cannot be written: {error.strerror}. "
            "Everything saved is intact; redirect the output, or choose another folder "
            "(paths.results)."
        )
    return explain_missing(error) if isinstance(error, ImportError) else None


def require_writable(folder: Path) -> None:
    """Check that `folder` can be written to or created, without creating it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(
            f"{folder}: {error.strerror}, so it is not writable. Choose another folder."
        ) from None
