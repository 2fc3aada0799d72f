"""Arrays that take long to make from files: made once, kept under the user's cache folder, mapped into memory afterwards.

A mapped array needs no memory of its own size: what is read of it is paged in, and dropped again when memory is short. So a set
of any size streams through training, and a second run starts at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)


def kept(
    kind: str, digest: str, shape: tuple[int, ...], dtype: type, fill: Callable[[np.ndarray], None]
) -> np.ndarray:
    """The array of this digest, mapped from the cache folder; made with `fill` where it is not there, or damaged.

    Args:
        kind: the folder in the cache: what the array holds.
        digest: of everything the array follows from: the files and how they are turned into numbers.
        fill: writes every entry of the empty array it is given.
    """
    path = (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        / "zdp-bench"
        / kind
        / f"{digest[:32]}.npy"
    )
    if path.is_file():
        if (found := _mapped(path, shape, dtype)) is not None:
            return found
        log.warning("%s is damaged and made anew", path)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.npy")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mapped = np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
    except OSError as error:  # a full or read-only disk costs memory and time, not the run
        log.warning("%s could not be written (%s)", path, error.strerror)
        whole: np.ndarray = np.empty(shape, dtype=dtype)
        fill(whole)
        return whole
    try:
        fill(mapped)
        mapped.flush()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return np.load(path, mmap_mode="c")  # copy on write: what is done to it in memory stays there


def _mapped(path: Path, shape: tuple[int, ...], dtype: type) -> np.ndarray | None:
    try:
        found = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError):
        return None
    return found if found.shape == shape and found.dtype == dtype else None
