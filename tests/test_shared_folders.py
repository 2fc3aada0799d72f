"""Several containers with one folder: every process there has the number 1."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import zdp_bench
from zdp_bench import disk
from zdp_bench.data.cache import load_or_make
from zdp_bench.data.files import write_whole
from zdp_bench.errors import UserError
from zdp_bench.privacy import memory

Write = Callable[[Path, Callable[[], None]], None]  # calls the second while it is half done
ROWS = np.arange(40_000, dtype=np.float32).reshape(10, 4000)


def make_array(folder: Path, meanwhile: Callable[[], None]) -> None:
    def blocks() -> Iterator[np.ndarray]:
        yield ROWS[:6]
        meanwhile()
        yield ROWS[6:]

    array = load_or_make("rows", "d" * 64, ROWS.shape, np.float32, blocks())
    np.testing.assert_array_equal(array, ROWS)


def fill_folder(folder: Path, meanwhile: Callable[[], None]) -> None:
    with write_whole(folder / "derived") as partial:
        (partial / "first").write_text("1")
        meanwhile()
        (partial / "second").write_text("2")
    assert sorted(path.name for path in (folder / "derived").iterdir()) == ["first", "second"]


def test_a_folder_that_cannot_be_put_in_its_place_is_an_error(tmp_path: Path) -> None:
    """It was discarded in silence, and then missing."""
    (tmp_path / "derived").write_text("a file")
    with pytest.raises(UserError, match="derived: cannot be written"):
        fill_folder(tmp_path, lambda: None)
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["derived"]


def interrupt(module: object, name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the next call of a function begin with what another process does."""
    function, pending = getattr(module, name), list[Callable[[], None]]()

    def call(*arguments: object) -> object:
        if pending:
            pending.pop()()
        return function(*arguments)

    monkeypatch.setattr(module, name, call)
    return pending.append


@pytest.fixture(autouse=True)
def _container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getpid", lambda: 1)


@pytest.mark.parametrize("write", [make_array, fill_folder])
def test_two_writers_of_one_thing_do_not_meet(write: Write, tmp_path: Path) -> None:
    write(tmp_path, lambda: write(tmp_path, lambda: None))
    left = [path.name for path in tmp_path.rglob(".*")]
    assert not left


@pytest.mark.parametrize(
    "write",
    [lambda path: disk.write_bytes(path, b"{}"), lambda path: memory._write(path, "{}")],
    ids=["write_bytes", "memory"],
)
def test_two_writers_of_one_file_do_not_meet(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile, path = interrupt(os, "replace", monkeypatch), tmp_path / "a.json"
    meanwhile(lambda: write(path))
    write(path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.json", b"{}")]


def test_a_folder_whose_writer_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        fill_folder(tmp_path, fail)
    assert not list(tmp_path.iterdir())


def test_no_name_of_a_file_holds_a_process_or_a_thread() -> None:
    sources = Path(zdp_bench.__file__).parent.rglob("*.py")
    named = [
        path.name for path in sources if re.search(r"\{os\.getpid|get_ident", path.read_text())
    ]
    assert not named
