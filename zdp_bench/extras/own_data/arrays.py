"""Read signals from numbers: a CSV with one row per sample, or a `.npy` array [channels, samples].

Neither format states a sampling rate, so rates are not checked.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import numpy as np

from zdp_bench.data.signals import find_channels
from zdp_bench.foreign_files import expect, read_text, reading

MAX_CSV = 2**28  # bytes
MAX_NUMBERS = 2**28  # in one file
NPY_MAGIC = b"\x93NUMPY"  # the first bytes of a .npy file
MISSING = ("", "NA", "N/A", "NULL", "None", "-", "?")  # cells of a value that is missing


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


def read_table(
    path: Path, channels: int | None, leads: Sequence[str] | None = None
) -> tuple[list[str], np.ndarray]:
    """Return the names of the columns of a CSV, [] without names, and their samples.

    Samples are float32 [channels, samples].

    Args:
        path: path of the CSV, with commas, semicolons or tabs. Its first line may name the columns,
            in quotes or without.
        channels: required number of columns; with `leads`, the number of leads. None: any number.
        leads: names of the columns to read. None: all.

    Raises:
        UserError: a cell is not a finite number, the file has other columns, or its first line may
            be names or a sample.
    """
    text = read_text(path, MAX_CSV, "utf-8-sig")
    with reading(path):
        lines = [line for line in text.splitlines() if line.strip()]
        expect(bool(lines), "is empty")
        separator = max(",;\t", key=lines[0].count)
        names = _find_names(lines, separator, bool(leads))
        body = StringIO("\n".join(lines[1:] if names else lines))
        expect(bool(body.getvalue().strip()), "has no line of numbers")
        table = np.loadtxt(
            body, np.float64, comments=None, delimiter=separator, ndmin=2, quotechar='"'
        )
        rule = (
            f"names {', '.join(names)[:60]} in its first line, and has {table.shape[1]} columns; "
            "name each column, also that of row numbers"
        )
        expect(len(names) in (0, table.shape[1]), rule)
        if leads:
            table = table[:, find_channels("columns", names, leads)]
            names = list(leads)
        rule = f"has {table.shape[1]} columns where dataset.channels={channels} were expected"
        expect(channels in (None, table.shape[1]), rule)
        rule = f"has {table.size:,} numbers; at most {MAX_NUMBERS:,} are allowed"
        expect(table.size <= MAX_NUMBERS, rule)
        with np.errstate(over="ignore"):  # an overflow is rejected in the next line
            samples = table.T.astype(np.float32)
        expect(bool(np.isfinite(samples).all()), "has numbers that are not finite in float32")
    return names, samples


def _find_names(lines: Sequence[str], separator: str, must_name: bool) -> list[str]:
    """Return the names of the columns in the first line, or [] if it is a sample.

    A line of numbers and missing values is a sample.

    Args:
        lines: the lines of the file.
        separator: separator of cells.
        must_name: whether the first line must name the columns.

    Raises:
        Unfit: the line has names beside numbers or a column without a name, or numbers the columns,
            from 0 as pandas does or from 1.
    """
    cells = [cell.strip() for cell in next(csv.reader(lines[:1], delimiter=separator))]
    if must_name:
        return cells
    has_numbers = any(map(_is_number, cells))
    has_names = any(cell not in MISSING and not _is_number(cell) for cell in cells)
    start = f"begins with the line {lines[0][:60]}, which"
    rule = f"{start} has words beside numbers; name every column in words, or write numbers only"
    expect(not (has_names and has_numbers), rule)
    expect(not has_names or "" not in cells, f"{start} does not name every column")
    numbers = [str(number) for number in range(len(cells) + 1)]
    from_0, from_1 = numbers[:-1], numbers[1:]
    # A sample of one or two columns may well be 1 or 1,2.
    is_counted = cells == from_0 or (cells == from_1 and len(cells) > 2)
    # A single column of integers may well begin with 0.
    is_integer = len(cells) == 1 and lines[-1].strip().lstrip("-").isdecimal()
    rule = f"{start} may number the columns or be a sample; name every column in words"
    expect(not is_counted or is_integer, rule)
    return cells if has_names else []


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
