"""Signals as numbers: a CSV with a row per sample, or a `.npy` array [channels, samples].

Neither file states a sampling rate, so none is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import numpy as np

from zdp_bench.foreign_files import expect, read_text, reading

MOST_TEXT = 2**28  # bytes of a CSV
MOST_SAMPLES = 2**28
NPY = b"\x93NUMPY"


def read_array(path: Path, channels: int | None, is_complex: bool | None = None) -> np.ndarray:
    """Return the array [channels, samples] of a `.npy` file, mapped from the disk.

    Args:
        channels: how many it must have. None: any number.
        is_complex: whether its numbers must be complex. None: either.

    Raises:
        UserError: the file holds no such array.
    """
    with reading(path):
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        shape = f"has an array of shape {list(found.shape)}"
        expect(found.ndim in (1, 2) and 0 < found.size <= MOST_SAMPLES, f"{shape}; {_expected()}")
        expect(found.dtype.kind in "fiuc", f"has values of {found.dtype}; numbers were expected")
        signal: np.ndarray = found[None] if found.ndim == 1 else found
        expect(channels in (None, len(signal)), f"{shape}; {_expected(channels)}")
        kinds = {True: "complex", False: "real"}
        of = signal.dtype.kind == "c"
        rule = f"has {kinds[of]} samples, but other files have {kinds[not of]} ones"
        expect(is_complex in (None, of), rule)
    return signal


def _expected(channels: int | None = None) -> str:
    return f"[{channels or 'channels'}, samples] was expected"


def read_table(path: Path, channels: int | None, leads: Sequence[str] | None = None) -> np.ndarray:
    """Return the columns of a CSV as float32 [channels, samples].

    The first line may name the columns. Commas, semicolons or tabs separate them.

    Args:
        channels: how many columns there must be, unless `leads` names them. None: any number.
        leads: names of columns.

    Raises:
        UserError: a cell is no number, or the columns are others.
    """
    text = read_text(path, MOST_TEXT, "utf-8-sig")
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
        expect(table.size <= MOST_SAMPLES, f"has {table.size:,} numbers")
        with np.errstate(over="ignore"):
            samples = table.T.astype(np.float32)
        expect(bool(np.isfinite(samples).all()), "has numbers that are not finite in float32")
    return samples


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
