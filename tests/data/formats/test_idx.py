"""Every way an idx file can be broken ends in a sentence that names the file."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import idx_bytes
from zdp_bench.data.formats.idx import read_idx
from zdp_bench.errors import UserError

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def test_reads_plain_and_gzipped(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(idx_bytes(IMAGES))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx_bytes(IMAGES)))
    np.testing.assert_array_equal(read_idx(tmp_path / "a", 3), IMAGES)
    np.testing.assert_array_equal(read_idx(tmp_path / "a.gz", 3), IMAGES)


BROKEN = {
    "truncated gzip": (gzip.compress(idx_bytes(IMAGES))[:-12], "a.gz", "damaged or cut short"),
    "not gzip": (b"<html>not found</html>", "a.gz", "is not a gzip file"),
    "empty gzip": (gzip.compress(b""), "a.gz", "magic number"),
    "empty file": (b"", "a", "magic number"),
    "labels for images": (idx_bytes(IMAGES[0, 0]), "a", "magic number 0x00000801 where 0x00000803"),
    "float type code": (b"\0\0\x0d\x03" + idx_bytes(IMAGES)[4:], "a", "magic number"),
    "cut in the header": (idx_bytes(IMAGES)[:10], "a", "ends inside its header"),
    "cut in the data": (idx_bytes(IMAGES)[:-5], "a", r"announces 24 bytes .* but 19 are there"),
    "too long": (idx_bytes(IMAGES) + b"x", "a", r"announces 24 bytes .* but more are there"),
    "huge declared size": (b"\0\0\x08\x03" + b"\xff" * 12, "a", "announces"),
    "bomb": (
        gzip.compress(b"\0\0\x08\x03\0\0\0\1\0\0\0\1\0\0\0\1" + bytes(10**6)),
        "a.gz",
        "announces 1 bytes .* but more are there",
    ),
    "bomb that says so": (
        gzip.compress(b"\0\0\x08\x03\0\1\0\0\0\0\x40\0\0\0\0\2" + bytes(10**6)),
        "a.gz",
        "at most 1,073,741,824 are read",
    ),
    "random bytes in gzip": (gzip.compress(bytes(range(200))), "a.gz", "magic number"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(tmp_path: Path, case: str) -> None:
    content, name, message = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_idx(tmp_path / name, 3)
    assert name in str(caught.value)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        read_idx(tmp_path, 3)
