"""HDF5: a text is one text however it is stored, and what is announced has to be stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.data.helpers import assert_refused
from tests.data.test_fastmri import SMALL, arrays, write, write_set
from zdp_bench.data.fastmri import FOLDERS, FastMri
from zdp_bench.data.hdf5 import (
    HEAP,
    HEAP_HEADER,
    OBJECT_HEADER,
    open_array,
    open_file,
    read_attribute,
)
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import reading

# Every way in which writers store the text pat1.
FORMS: dict[str, Any] = {
    "variable length": "pat1",
    "variable length, ASCII": np.array("pat1", h5py.string_dtype("ascii")),
    "fixed length": np.bytes_("pat1"),
    "fixed length, UTF-8": np.array(b"pat1", h5py.string_dtype("utf-8", 4)),
    "filled with NULs": np.array(b"pat1", "S16"),
    "filled with spaces": np.bytes_("pat1    "),
    "variable length, with spaces": " pat1 ",
    "an array of one": np.array([b"pat1"]),
    "an array of one of variable length": np.array(["pat1"], h5py.string_dtype()),
    "a table of one": np.array([[b"pat1"]], "S9"),
}
NO_TEXT: dict[str, tuple[Any, str]] = {
    "two": (np.array([b"a", b"b"]), "not one text"),
    "none": (h5py.Empty("S1"), "not one text"),
    "a fraction": (1.5, "not one text"),
    "opaque": (np.void(b"pat1"), "not one text"),
    "empty": ("", "is empty"),
    "only spaces": (np.bytes_("   "), "is empty"),
    "NUL inside": (np.bytes_(b"pa\0t1"), "control character"),
    "escape inside": ("pa\x1bt1", "control character"),
    "not UTF-8": (np.bytes_(b"\xff\xfe"), "not UTF-8"),
    "not UTF-8, of variable length": (np.array(b"\xff\xfe", h5py.string_dtype()), "not UTF-8"),
}


def write_attribute(path: Path, value: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.attrs["patient_id"] = value
    return path


def read_patient(path: Path) -> str | None:
    with reading(path), open_file(path) as file:
        return read_attribute(file, "patient_id")


@pytest.mark.parametrize("form", FORMS)
def test_a_patient_is_one_however_the_name_is_stored(form: str, tmp_path: Path) -> None:
    write_set(tmp_path)
    for number, value in enumerate((FORMS[form], "pat1")):
        path = tmp_path / "fastMRI" / FOLDERS[0] / f"file100000{number}.h5"
        with h5py.File(path, "a") as file:
            file.attrs["patient_id"] = value
    train = FastMri(**SMALL).load(tmp_path).train
    assert len(train.groups.unique()) == 2


def test_a_number_is_its_digits_and_a_missing_name_none(tmp_path: Path) -> None:
    assert read_patient(write_attribute(tmp_path / "a.h5", np.int32(70))) == "70"
    with h5py.File(tmp_path / "b.h5", "w"):
        pass
    assert read_patient(tmp_path / "b.h5") is None


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_refused(name: str, tmp_path: Path) -> None:
    value, says = NO_TEXT[name]
    path = write_attribute(tmp_path / "a.h5", value)
    assert_refused(lambda: read_patient(path), "a.h5", says)


# ------------------------------------------------------------------------------------- layouts

CONTENT = arrays(0)
SHAPE = CONTENT["kspace"].shape
Store = Callable[[Any, str, np.ndarray, int], None]  # so many slices of an array are written


def store(**options: Any) -> Store:
    def write_array(file: Any, name: str, values: np.ndarray, written: int) -> None:
        array = file.create_dataset(name, values.shape, values.dtype, **options)
        if written:
            array[:written] = values[:written]

    return write_array


def store_low_level(layout: int, allocation: int | None = None) -> Store:
    def write_array(file: Any, name: str, values: np.ndarray, written: int) -> None:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(layout)
        if allocation is not None:
            properties.set_alloc_time(allocation)
        space = h5py.h5s.create_simple(values.shape)
        kind = h5py.h5t.py_create(values.dtype)
        h5py.h5d.create(file.id, name.encode(), kind, space, properties)
        if written:
            file[name][:written] = values[:written]

    return write_array


LAYOUTS: dict[str, Store] = {
    "contiguous": store(),
    "contiguous, allocated late": store_low_level(h5py.h5d.CONTIGUOUS, h5py.h5d.ALLOC_TIME_LATE),
    "contiguous, allocated early": store_low_level(h5py.h5d.CONTIGUOUS, h5py.h5d.ALLOC_TIME_EARLY),
    "compact": store_low_level(h5py.h5d.COMPACT),
    "a chunk a slice": store(chunks=(1, 8, 8)),
    "chunks that do not divide a side": store(chunks=(2, 7, 5)),
    "compressed": store(chunks=(1, 8, 8), compression="gzip"),
    "that may grow": store(chunks=(1, 8, 8), maxshape=(None, None, None)),
}
CHUNKED = [name for name in LAYOUTS if "contiguous" not in name and name != "compact"]
UNSTORED = [
    ("contiguous", 0),
    ("contiguous, allocated late", 0),
    *((layout, written) for layout in CHUNKED for written in (0, 3)),
]


def write_layout(path: Path, layout: str, written: int) -> None:
    write(path, 0, kspace=None, reconstruction_esc=None)
    with h5py.File(path, "a") as file:
        for name, values in CONTENT.items():
            LAYOUTS[layout](file, name, values, written)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_when_it_is_stored(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    write_layout(path, layout, SHAPE[0])
    with reading(path), h5py.File(path, "r") as file:
        np.testing.assert_array_equal(open_array(file, "kspace")[:], CONTENT["kspace"])


@pytest.mark.parametrize(("layout", "written"), UNSTORED)
def test_what_is_announced_and_not_stored_is_refused(
    layout: str, written: int, tmp_path: Path
) -> None:
    write_set(tmp_path)
    write_layout(tmp_path / "fastMRI" / FOLDERS[0] / "file1000000.h5", layout, written)
    load = FastMri(**SMALL).load
    assert_refused(lambda: load(tmp_path), "file1000000.h5", r"announces .*, but stores \d+ of")


def test_a_packed_chunk_that_is_damaged_is_refused_before_it_is_drawn(tmp_path: Path) -> None:
    """Read at the step that draws it, it would tell of that."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        numbers = np.arange(900.0).reshape(9, 10, 10)
        packed = file.create_dataset("kspace", data=numbers, chunks=(1, 10, 10), compression=1)
        place = packed.id.get_chunk_info(7).byte_offset

    def read() -> None:
        with reading(path), h5py.File(path, "r") as file:
            open_array(file, "kspace")

    read()
    raw = bytearray(path.read_bytes())
    raw[place : place + 8] = bytes(8)
    path.write_bytes(raw)
    assert_refused(read, "a.h5", "truncated, damaged")


@pytest.mark.parametrize("length", [0, 2**64 - 16])
def test_a_heap_in_which_hdf5_would_search_forever_is_refused(length: int, tmp_path: Path) -> None:
    """The damage comes from deleting one byte of the texts before."""
    path = write_attribute(tmp_path / "a.h5", "pat1")
    content = bytearray(path.read_bytes())
    heap = content.index(HEAP)
    first = heap + HEAP_HEADER.size
    number = 1 if length else 0
    OBJECT_HEADER.pack_into(content, first, number, 0, 0, length)
    path.write_bytes(content)
    with pytest.raises(UserError, match="heap"):
        read_patient(path)
