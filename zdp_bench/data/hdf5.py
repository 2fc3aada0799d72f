"""Read text attributes and arrays of HDF5 files; arrays must be stored completely in the file."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from zdp_bench.foreign_files import Unfit, expect, require_text

# Bytes. HDF5 decompresses a whole chunk to read one slice, and a huge chunk of equal values takes
# only a few kilobytes of the file.
MAX_CHUNK = 2**28
# Of a global heap, where HDF5 stores texts: the signature and the version at its beginning, and its
# size; and of each object in it, its number (0 for the free space), its references and its size.
HEAP = b"GCOL\x01\0\0\0"
HEAP_HEADER = struct.Struct("<8sQ")
OBJECT_HEADER = struct.Struct("<HHIQ")


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """Open an HDF5 file to read its attributes too. Use inside `reading`.

    Raises:
        Unfit: on reading, a heap of texts is damaged.
    """
    import h5py

    with _CheckedFile(path) as file, h5py.File(file, "r") as content:
        yield content


class _CheckedFile(io.FileIO):
    """A file that checks each global heap before HDF5 parses it.

    In one with an object of size 0, HDF5 looks for the next object forever, and no signal ends it.
    """

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        if bytes(buffer[: len(HEAP)]) == HEAP:
            _require_sizes(bytes(buffer))
        return count


def _require_sizes(heap: bytes) -> None:
    """Reject a global heap, or the beginning of one, in which an object is empty or too large."""
    _, size = HEAP_HEADER.unpack_from(heap)
    place = HEAP_HEADER.size
    while place + OBJECT_HEADER.size <= min(size, len(heap)):
        number, _, _, length = OBJECT_HEADER.unpack_from(heap, place)
        padded = math.ceil(length / 8) * 8
        step = length if number == 0 else OBJECT_HEADER.size + padded
        expect(0 < step <= size - place, "has a damaged heap of texts; write it again")
        place += step


def read_attribute(file: Any, name: str) -> str | None:
    """Return a text attribute of an open HDF5 file; None if it is missing.

    Different writers store the same text as a string of fixed or variable length, as bytes, or as
    an array with one element, and pad fixed lengths with NULs or spaces. All of them give the same
    result. An integer gives its digits. Use inside `reading`.

    Raises:
        Unfit: The attribute is not a single text, is empty, or contains control characters.
    """
    value = file.attrs.get(name)
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, int | np.integer):
        value = str(value)
    if isinstance(value, str):  # h5py decodes invalid UTF-8 to surrogates; decode it again below
        value = value.encode("utf-8", "surrogateescape")
    expect(isinstance(value, bytes), f"has an attribute '{name}' that is not one text")
    try:
        text = value.decode("utf-8").rstrip("\0").strip()
    except UnicodeDecodeError:
        raise Unfit(f"has an attribute '{name}' that is not UTF-8") from None
    expect(bool(text), f"has an attribute '{name}' that is empty; write it, or leave it out")
    return require_text(text, f"attribute '{name}'")


def open_array(file: Any, name: str) -> Any:
    """Return a data set of an open HDF5 file; reject one that is not stored in it completely.

    HDF5 can refer to any other file of the machine, which the file's digest would not cover. For
    elements that were declared but never written, it returns zeros or whatever is on the disk. Use
    inside `reading`.

    Raises:
        Unfit: The data set is missing, stored elsewhere or incomplete, or has huge chunks.
    """
    import h5py

    link = file.get(name, getlink=True)
    expect(link is not None, f"has no data set '{name}', as files of train and val do")
    array: Any = file[name] if isinstance(link, h5py.HardLink) else None
    is_own = isinstance(array, h5py.Dataset) and not array.is_virtual and not array.external
    where = "a link, a group, virtual or stored externally; write its bytes into the file itself"
    expect(is_own, f"has a '{name}' that is {where}")
    size = math.prod(array.chunks or ()) * array.dtype.itemsize
    rule = "which each slice would unpack; write it slice by slice (chunks=(1, rows, columns))"
    expect(size <= MAX_CHUNK, f"stores '{name}' in chunks of {size:,} bytes, {rule}")
    _require_stored(array, name)
    if array.id.get_create_plist().get_nfilters():
        _decompress(array)
    return array


def _decompress(array: Any) -> None:
    """Read a compressed array once, so that damage is found before training.

    An error in a training step would reveal which example the step drew.
    """
    for chunk in array.iter_chunks():
        array[chunk]


def _require_stored(array: Any, name: str) -> None:
    """Reject an array for which the file declares more elements than it stores."""
    announces = f"announces {array.shape} numbers of '{name}', but stores"
    advice = "write all of them, or announce fewer"
    if array.chunks is None:  # contiguous or compact
        announced = math.prod(array.shape) * array.dtype.itemsize
        stored = array.id.get_storage_size()
        expect(stored >= announced, f"{announces} {stored:,} of {announced:,} bytes; {advice}")
        return
    sides = zip(array.shape, array.chunks, strict=True)
    chunks = math.prod(math.ceil(side / chunk) for side, chunk in sides)
    stored = array.id.get_num_chunks()
    expect(stored >= chunks, f"{announces} {stored:,} of {chunks:,} chunks; {advice}")
