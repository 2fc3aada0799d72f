"""Cache arrays that are slow to compute from files in the user's cache folder, memory-mapped.

Memory-mapped arrays are paged in when they are read and dropped when memory is short. A data set of
any size can therefore be trained on, and a second run starts at once. Each file ends in a checksum
of everything before it, which is verified whenever the file is mapped. If the disk is full, or the
cache folder not safe, arrays stay in memory instead.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from zdp_bench.caches import cache_folder, list_own_files
from zdp_bench.disk import is_left_behind, name_partial
from zdp_bench.errors import UserError

CHUNK = 1 << 20  # bytes
MAX_SILENT = 10**8  # bytes; a larger array is announced before it is written
CHECKSUM = hashlib.sha256().digest_size  # bytes at the end of a file
MAX_HEADER = 4096  # bytes before an array's numbers
# Without this flag, Linux refuses a private map that is larger than memory. Python names the flag
# since 3.13.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

log = logging.getLogger(__name__)


def load_or_make(
    kind: str,
    digest: str,
    shape: tuple[int, ...],
    dtype: type,
    blocks: Iterable[np.ndarray],
    is_current: Callable[[np.ndarray], bool] = lambda array: True,
) -> np.ndarray:
    """Map an array from the cache folder, and compute it first if it is missing or damaged.

    Args:
        kind: what the array contains, which names its folder in the cache.
        digest: digest of everything that determines the array: the files, and how they become
            numbers.
        shape: shape of the array.
        dtype: type of its elements.
        blocks: its rows, some at a time; used only if the array must be computed.
        is_current: returns False if the array in the cache is of earlier code, of which `digest`
            does not know, so that it is computed again.

    Raises:
        UserError: A folder is in the place of the array's file.
    """
    folder = cache_folder(kind)
    if folder is None:
        return _fill(np.empty(shape, dtype=dtype), blocks)
    path = folder / f"{digest[:32]}.npy"
    if path.is_dir():
        raise UserError(f"{path}: is a folder, but should be a file of this cache; delete it.")
    if path.is_file():
        array = _map(path, shape, dtype)
        if array is not None and is_current(array):
            return array
        log.warning("%s is damaged or from an older version, and is made again", path)
    partial = name_partial(path)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size > MAX_SILENT:
        log.warning(
            "%s will take %.1f GB; `zdp-bench data cache --delete` frees the space",
            path,
            size / 1e9,
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _delete_left_behind(path.parent)
        mapped = _reserve(partial, shape, dtype)
    except OSError as error:  # with a full or read-only disk, the run goes on in memory
        with suppress(OSError):  # there may be no folder, but a file in its place
            partial.unlink()
        log.warning(
            "%s: %s, so this run keeps %s in memory; set XDG_CACHE_HOME to another folder",
            path.parent,
            error.strerror,
            kind,
        )
        return _fill(np.empty(shape, dtype=dtype), blocks)
    try:
        _fill(mapped, blocks)
        mapped.flush()
        is_stored = _finish(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()
    return _open(path) if is_stored else mapped


def _finish(partial: Path, path: Path) -> bool:
    """Add the checksum to a partial file, and rename it to `path`.

    Returns:
        False if the partial file is missing: another process, whose clock is a day ahead, deleted
        it.
    """
    try:
        with partial.open("rb+") as file:
            file.write(_hash(file))
        os.replace(partial, path)
    except FileNotFoundError:
        return False
    return True


def _reserve(
    path: Path,
    shape: tuple[int, ...],
    dtype: type,
) -> np.memmap:
    """Map a new array in a file whose blocks are all allocated on the disk.

    With a sparse file and a full disk, writing to the map would kill the process (SIGBUS).
    """
    mapped = np.lib.format.open_memmap(
        path,
        mode="w+",
        dtype=dtype,
        shape=shape,
    )
    size = path.stat().st_size + CHECKSUM
    if hasattr(os, "posix_fallocate"):  # macOS has none
        with path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    return mapped


def _hash(file: BinaryIO) -> bytes:
    """Return the SHA-256 of everything before the checksum; the file position is then there."""
    left = os.fstat(file.fileno()).st_size - CHECKSUM
    digest = hashlib.sha256()
    while left > 0:
        part = file.read(min(CHUNK, left))
        if not part:
            break
        digest.update(part)
        left -= len(part)
    return digest.digest()


def _delete_left_behind(folder: Path) -> None:
    hidden = [path for path in list_own_files(folder) if path.name.startswith(".")]
    for path in hidden:
        if is_left_behind(path):
            path.unlink(missing_ok=True)


def _fill(array: np.ndarray, blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Copy the blocks into the array, which they must fill."""
    start = 0
    for block in blocks:
        array[start : start + len(block)] = block
        start += len(block)
    if start != len(array):
        raise ValueError(f"blocks have {start} rows, but the array has {len(array)}")
    return array


def _map(
    path: Path,
    shape: tuple[int, ...],
    dtype: type,
) -> np.ndarray | None:
    rest = path.stat().st_size - math.prod(shape) * np.dtype(dtype).itemsize - CHECKSUM
    if not 0 < rest < MAX_HEADER:  # before gigabytes are read
        return None
    try:
        with path.open("rb") as file:
            if _hash(file) != file.read():
                return None
        array = _open(path)
    except (ValueError, EOFError, OSError) as error:
        if getattr(error, "errno", 0) == errno.ENOMEM:  # the file is not damaged
            raise
        return None
    return array if array.shape == shape and array.dtype == dtype else None


def _open(path: Path) -> np.ndarray:
    """Map an array copy-on-write: only pages that are written to take memory of their own."""
    plain = np.load(path, mmap_mode="r", allow_pickle=False)
    with path.open("rb") as file:
        pages = mmap.mmap(
            file.fileno(),
            0,
            flags=mmap.MAP_PRIVATE | NO_RESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    return np.ndarray(plain.shape, plain.dtype, pages, plain.offset)
