"""HDF5 files: texts in one form, and arrays whose every byte is stored in the file itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from zdp_bench.foreign_files import Unfit, expect, require_text

CHUNK = 2**28  # bytes; HDF5 unpacks a whole chunk for one slice, and a few kilobytes may hold it


def read_attribute(file: Any, name: str) -> str | None:
    """Return a text attribute of an open HDF5 file; None if it is missing.

    Writers store one text as a string of fixed or of variable length, as bytes, or as an array of
    one, and fill a fixed length with NULs or spaces: all of these are the same text. A whole number
    is the text of its digits. Use within `reading`.

    Raises:
        Unfit: the attribute is no single text, is empty, or has control characters in it.
    """
    value = file.attrs.get(name)
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, int | np.integer):
        value = str(value)
    if isinstance(value, str):  # in which h5py hides bytes that are not UTF-8
        value = value.encode("utf-8", "surrogateescape")
    expect(isinstance(value, bytes), f"has an attribute '{name}' that is not one text")
    try:
        text = value.decode("utf-8").rstrip("\0").strip()
    except UnicodeDecodeError:
        raise Unfit(f"has an attribute '{name}' that is not UTF-8") from None
    expect(bool(text), f"has an attribute '{name}' that is empty; write it, or leave it out")
    return require_text(text, f"attribute '{name}'")


def open_array(file: Any, name: str) -> Any:
    """Return a data set of an open HDF5 file, all of whose bytes are stored in that file.

    HDF5 can point to any file of the machine, which a digest would not follow. And it reads zeros,
    or whatever is on the disk, for what was announced and never written. Use within `reading`.

    Raises:
        Unfit: it is missing, lies elsewhere, or is not stored in full.
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
    expect(size <= CHUNK, f"stores '{name}' in chunks of {size:,} bytes, {rule}")
    _require_stored(array, name)
    if array.id.get_create_plist().get_nfilters():
        _unpack(array)
    return array


def _unpack(array: Any) -> None:
    """Read a packed array once: a chunk that fails at the step that draws it would tell of that."""
    for chunk in array.iter_chunks():
        array[chunk]


def _require_stored(array: Any, name: str) -> None:
    """Refuse an array of which the file announces more than it stores."""
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
