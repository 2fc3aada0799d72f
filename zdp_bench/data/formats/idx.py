"""The idx format of MNIST and its relatives, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from math import prod
from pathlib import Path

import numpy as np

from zdp_bench.errors import UserError

UNSIGNED_BYTE = 0x08
LARGEST = 2**30  # bytes of entries; MNIST has 47 million, and EMNIST's largest part 638 million


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Read an idx file of unsigned bytes with `dims` dimensions (1 for labels, 3 for images).

    The format: two zero bytes, the type code, the number of dimensions; each dimension as a
    big-endian uint32; the entries. No more is unpacked than the header announces.

    Raises:
        UserError: not an idx file, another type or number of dimensions, truncated, too long, or a
            broken gzip stream.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder where an idx file was expected.")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            shape = _parse_shape(file.read(4 + 4 * dims), path, dims)
            if prod(shape) > LARGEST:
                raise UserError(
                    f"{path}: its header announces {prod(shape):,} bytes of data for shape "
                    f"{shape}; at most {LARGEST:,} are read."
                )
            raw = file.read(prod(shape) + 1)  # to the end, where gzip compares its checksum
    except (EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: the gzip stream is damaged or cut short ({error}). Delete the file and fetch "
            "it again."
        ) from None
    except gzip.BadGzipFile:
        raise UserError(f"{path}: is not a gzip file. Delete it and fetch it again.") from None
    if len(raw) != prod(shape):
        there = f"{len(raw):,}" if len(raw) < prod(shape) else "more"
        raise UserError(
            f"{path}: its header announces {prod(shape):,} bytes of data for shape {shape}, but "
            f"{there} are there."
        )
    return np.frombuffer(raw, np.uint8).reshape(shape)


def read_shape(path: Path, dims: int) -> tuple[int, ...]:
    """Read the shape in an idx file's header, without the entries.

    Raises:
        UserError: it is no idx file of so many dimensions.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _parse_shape(file.read(4 + 4 * dims), path, dims)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: cannot be read ({type(error).__name__}). Delete it and fetch it again."
        ) from None


def _parse_shape(raw: bytes, path: Path, dims: int) -> tuple[int, ...]:
    """Parse the header at the beginning of `raw`."""
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != UNSIGNED_BYTE or raw[3] != dims:
        magic = int.from_bytes(raw[:4], "big")
        raise UserError(
            f"{path}: starts with magic number {magic:#010x} where {0x800 + dims:#010x} was "
            "expected; it is not that idx file."
        )
    if len(raw) < 4 + 4 * dims:
        raise UserError(f"{path}: ends inside its header.")
    return tuple(int.from_bytes(raw[4 + 4 * d : 8 + 4 * d], "big") for d in range(dims))
