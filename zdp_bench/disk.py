"""Write files atomically and durably, so that they survive a kill or power failure; lock files.

Also walk through folders, including linked ones.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO
from pathlib import Path

from zdp_bench.errors import Busy, UserError, print_message
from zdp_bench.foreign_files import open_regular

A_DAY = 86_400  # seconds
PATIENCE = 5.0  # seconds of waiting for a lock before a message is printed


def expand_home(path: str | Path) -> Path:
    """Return a path whose leading ~ or ~user is replaced by that home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # there is no such user, or the environment names no home
        raise UserError(
            f"{path}: there is no such home folder; write the path without ~."
        ) from None


def name_partial(path: Path) -> Path:
    """Return a new, hidden path beside `path`, to write to before renaming to `path`.

    The name is random, not a process number: in containers every process may have the number 1,
    and several containers may share a folder.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


def find_target(path: Path) -> Path | None:
    """Return the path for which `name_partial` returned this one; None if it did for none."""
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.partial", path.name)
    return path.with_name(match[1]) if match else None


def list_partial(folder: Path) -> list[Path]:
    """Return the partial files in a folder, which killed processes left if nobody writes there."""
    return [path for path in folder.iterdir() if find_target(path)]


def is_left_behind(partial: Path) -> bool:
    """Return True if nothing was written to a partial file or folder for a day.

    The process that wrote there was then killed.
    """
    newest = max(path.lstat().st_mtime for path in (partial, *partial.rglob("*")))
    return time.time() - newest > A_DAY


def write_bytes(path: Path, content: bytes | BytesIO) -> None:
    """Write a regular file atomically and durably; of two concurrent writers, one wins.

    A file that is replaced keeps its permissions: it may be hidden from other users.
    """
    require_regular(path)
    make_folder(path.parent)
    partial = name_partial(path)
    try:
        with partial.open("wb") as file:
            with suppress(FileNotFoundError):
                shutil.copymode(path, partial)
            if isinstance(content, bytes):
                file.write(content)
            else:
                # `with`, because the traceback of an error would keep the buffer, and Python 3.13
                # complains of a BytesIO that is deleted before its buffer is released.
                with content.getbuffer() as buffer:
                    file.write(buffer)
            file.flush()
            os.fsync(file.fileno())
        rename(partial, path)
    except BaseException as error:  # also Ctrl-C
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(path)  # the error of a full disk names no file
        raise


def write_changed(path: Path, content: bytes) -> None:
    """Write a file with `write_bytes`, unless it has this content already."""
    has_size = path.is_file() and path.stat().st_size == len(content)
    if not has_size or path.read_bytes() != content:
        write_bytes(path, content)


def require_regular(path: Path) -> None:
    """Reject an output path that is a device, pipe, folder or link, which would be replaced."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UserError(
                f"{path}: exists but is not a regular file; choose another one to write."
            )


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, durably."""
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)


def walk(
    folder: Path,
    on_error: Callable[[OSError], None] | None = None,
    first: str = "",
    follow_links: bool = True,
) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and all its subfolders, each with the names of its files.

    A folder that several paths lead to is yielded once, so a link to an enclosing folder ends the
    walk there.

    Args:
        folder: the folder.
        on_error: called with the error if a folder cannot be read; by default, it is skipped.
        first: name of the subfolder to begin with. Then come the other ones by name, links last.
        follow_links: whether to walk through linked folders too.
    """
    visited: set[tuple[int, int]] = set()
    for path, subfolders, names in os.walk(folder, onerror=on_error, followlinks=follow_links):
        try:
            status = os.stat(path)
        except FileNotFoundError:  # another process moved or deleted it
            subfolders.clear()
            continue
        identity = status.st_dev, status.st_ino
        if identity in visited:
            subfolders.clear()
            continue
        visited.add(identity)
        subfolders.sort()
        subfolders.sort(key=lambda name: os.path.islink(os.path.join(path, name)))
        subfolders.sort(key=lambda name: name != first)
        yield Path(path), names


def rename(path: Path, to: Path) -> None:
    """Rename a file to `to`, durably; an existing file there is replaced."""
    os.replace(path, to)
    fsync_folder(to.parent)


def fsync_folder(folder: Path) -> None:
    """Write the entries of a folder (the names of its files) to disk, if its file system can."""
    if os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems may not
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _print_after(seconds: float, message: str) -> Iterator[None]:
    """Print a message if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, print_message, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def hold_lock(path: Path, otherwise: str = "", wait: bool = True) -> Iterator[None]:
    """Hold the lock file at `path` inside the block; it is released too if the process dies.

    Args:
        path: path of the lock file, which is made if it is missing.
        otherwise: message of `Busy`.
        wait: wait for the lock if another process holds it.

    Raises:
        Busy: Another process holds the lock, and `wait` is false.
        UserError: The file system does not support locks.
    """
    import fcntl

    make_folder(path.parent)
    holder = os.getpid()
    with _open_lock(path) as lock:
        try:
            try:
                with _print_after(PATIENCE, f"waiting for the file system to lock {path}"):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise Busy(otherwise) from None
                with _print_after(PATIENCE, f"waiting for the process that holds {path}"):
                    fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be locked ({error.strerror}), and without a lock two processes "
                "could work on one run. Use a folder on a file system with flock (paths.results, "
                "or ledger= in your own loop)."
            ) from None
        try:
            yield
        finally:
            if os.getpid() == holder:  # a forked child that ends must not release the lock
                with suppress(OSError):  # closing the file releases it too
                    fcntl.flock(lock, fcntl.LOCK_UN)


def _open_lock(path: Path) -> BufferedReader:
    """Open a lock file, which everyone may lock who may write to its folder."""
    # O_NOFOLLOW, because another user may have planted a link. O_RDWR, because NFS locks only
    # files that are open for writing.
    try:
        lock = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except PermissionError:
        if not path.exists():
            raise
        return open_regular(path, os.O_NOFOLLOW)  # another user's; elsewhere this is enough
    status = os.fstat(lock.fileno())
    may_write = path.parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    mode = stat.S_IMODE(status.st_mode) | may_write | may_write << 1  # and may read
    if status.st_uid == os.geteuid() and mode != stat.S_IMODE(status.st_mode):
        with suppress(OSError):
            os.fchmod(lock.fileno(), mode)
    return lock
