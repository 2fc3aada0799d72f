"""Read signals from numbers: a CSV with one row per sample, or a `.npy` array [channels, samples].

Neither format states a sampling rate, so rates are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import numpy as np

from zdp_bench.foreign_files import expect, read_text, reading

MAX_CSV = 2**28  # bytes
MAX_NUMBERS = 2**28  # in one file
NPY_MAGIC = b"\x93NUMPY"  # the first bytes of a .npy file


def read_array(path: Path, channels: int | None, is_complex: bool | None = None) -> np.ndarray:
    """Return the array [channels, samples] of a `.npy` file, memory-mapped.

    Args:
        path: path of the file. Its array may also be [samples], which is one channel.
        channels: required number of channels. None: any number.
        is_complex: whether samples must be complex. None: they may be real or complex.

    Raises:
        UserError: the file has another array, or none.
    """
    with reading(path):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        shape = f"has an array of shape {list(array.shape)}"
        has_size = array.ndim in (1, 2) and 0 < array.size <= MAX_NUMBERS
        expect(has_size, f"{shape}; {_expected_shape()}")
        expect(array.dtype.kind in "fiuc", f"has values of {array.dtype}; numbers were expected")
        signal: np.ndarray = array[None] if array.ndim == 1 else array
        expect(channels in (None, len(signal)), f"{shape}; {_expected_shape(channels)}")
        names = {True: "complex", False: "real"}
        has_complex = signal.dtype.kind == "c"
        rule = (
            f"has {names[has_complex]} samples, but other files have {names[not has_complex]} ones"
        )
        expect(is_complex in (None, has_complex), rule)
    return signal


def _expected_shape(channels: int | None = None) -> str:
    return f"[{channels or 'channels'}, samples] was expected"


def read_table(path: Path, channels: int | None, leads: Sequence[str] | None = None) -> np.ndarray:
    """Return the columns of a CSV as float32 [channels, samples].

    Args:
        path: path of the CSV, with commas, semicolons or tabs. Its first line may name the columns.
        channels: required number of columns; with `leads`, the number of leads. None: any number.
        leads: names of the columns to read. None: all.

    Raises:
        UserError: a cell is not a finite number, or the file has other columns.
    """
    text = read_text(path, MAX_CSV, "utf-8-sig")
    with reading(path):
        lines = text.splitlines()
        expect(bool(lines), "is empty")
        separator = max(",;\t", key=lines[0].count)
        first = [cell.strip() for cell in lines[0].split(separator)]
        names = [] if all(map(_is_number, first)) else first
        body = StringIO("\n".join(lines[1:] if names else lines))
        expect(bool(body.getvalue().strip()), "has no line of numbers")
        table = np.loadtxt(body, delimiter=separator, dtype=np.float64, ndmin=2)
        for lead in leads or ():
            rule = (
                f"has the columns {', '.join(names) or 'without names'}, and '{lead}' was expected"
            )
            expect(names.count(lead) == 1, rule)
        if leads:
            table = table[:, [names.index(lead) for lead in leads]]
        rule = f"has {table.shape[1]} columns where dataset.channels={channels} were expected"
        expect(channels in (None, table.shape[1]), rule)
        rule = f"has {table.size:,} numbers; at most {MAX_NUMBERS:,} are allowed"
        expect(table.size <= MAX_NUMBERS, rule)
        with np.errstate(over="ignore"):  # an overflow is rejected in the next line
            samples = table.T.astype(np.float32)
        expect(bool(np.isfinite(samples).all()), "has numbers that are not finite in float32")
    return samples


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
