"""Write files and folders that stay whole after a kill or a power cut; locks."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zdp_bench.errors import Busy, UserError
from zdp_bench.foreign_files import open_regular

PATIENCE = 5.0  # seconds in which a lock is waited for without a word


def name_partial(path: Path) -> Path:
    """Return a new, hidden name beside `path` for what is written before it is renamed to that.

    It is random: in a container every process has the number 1, and several may share a folder.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write the regular file `path` atomically and durably; of two writers, one wins."""
    require_regular(path)
    make_folder(path.parent)
    partial = name_partial(path)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        rename(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        if error.errno and not error.filename:  # a full disk's error names none
            error.filename = str(path)
        raise


def write_changed(path: Path, content: bytes) -> None:
    """Write `content` to `path` as `write_bytes` does, unless that is what the file holds."""
    has_size = path.is_file() and path.stat().st_size == len(content)
    if not has_size or path.read_bytes() != content:
        write_bytes(path, content)


def require_regular(path: Path) -> None:
    """Reject an output path that is a device, a pipe, a folder or a link: it would be replaced."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UserError(
                f"{path}: exists but is not a regular file; choose another one to write."
            )


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each durable in the one that holds it."""
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def rename(path: Path, to: Path) -> None:
    """Rename a file, or replace another by it, durably."""
    os.replace(path, to)
    fsync_folder(to.parent)


def fsync_folder(folder: Path) -> None:
    """Make the entries of `folder` durable."""
    if os.name == "nt":  # which opens no folder, and keeps names safe by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _saying_after(seconds: float, words: str) -> Iterator[None]:
    """Print what is waited for, unless the block ends before."""
    timer = threading.Timer(seconds, lambda: print(f"zdp-bench: {words}", file=sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def hold_lock(path: Path, otherwise: str = "", wait: bool = True) -> Iterator[None]:
    """Hold the lock at `path`, for as long as the process lives at most; a link is not followed.

    Raises:
        Busy: another process holds it, and `wait` is false; says `otherwise`.
        UserError: the file system has no locks.
    """
    import fcntl

    make_folder(path.parent)
    holder = os.getpid()
    # No link: somebody else may have planted it. Writable: NFS locks no other file.
    with open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise Busy(otherwise) from None
                with _saying_after(PATIENCE, f"waiting for the process that holds {path}"):
                    fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be locked ({error.strerror}), and without a lock two processes "
                "could work on one run. Use a folder on a file system with flock (paths.results)."
            ) from None
        try:
            yield
        finally:
            if os.getpid() == holder:  # the end of a forked copy must not let go of it
                fcntl.flock(lock, fcntl.LOCK_UN)
