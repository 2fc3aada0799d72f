"""The index of records: as the files are, whoever changed them; reading does without it."""

import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_records import record, save
from zdp_bench import records
from zdp_bench.records import index
from zdp_bench.records import record as record_module


@pytest.fixture
def results(tmp_path: Path) -> Path:
    epochs = [{"epoch": 1, "step": 7, "epsilon_tight": 0.4, "accuracy": 0.3}]
    save(tmp_path, *(record(name, seed, epochs=epochs) for name in "ab" for seed in range(3)))
    return tmp_path


def read_anew(results: Path, opened: list[Path] | None = None) -> list[records.Record]:
    """Read as another process does; list the record files that it opened."""
    index._READ.clear()
    read = record_module.read_document
    with pytest.MonkeyPatch.context() as patch:

        def read_document(path: Path, *more: str) -> records.Document | None:
            if opened is not None:
                opened.append(path)
            return read(path, *more)

        patch.setattr(index, "read_document", read_document)
        return records.read_all(results)


def path_of(results: Path, recipe: str, seed: int) -> Path:
    return records.folder(results, recipe, record(recipe, seed)["run"]) / "record.json"


def remove(results: Path) -> None:
    path_of(results, "a", 0).unlink()


def change(results: Path) -> None:
    save(results, record("a", 0, 0.75))


def change_in_place(results: Path) -> None:
    path = path_of(results, "a", 0)
    path.write_text(path.read_text().replace('"value": 0.5', '"value": 0.7'))
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 1))


def change_and_keep_the_time(results: Path) -> None:
    """As `cp -p` and `rsync` do, and as a clock that is set back may."""
    path = path_of(results, "a", 0)
    before = path.stat()
    path.write_text(path.read_text().replace('"value": 0.5', '"value": 0.7'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_days_from_now(days: int) -> Callable[[Path], None]:
    def act(results: Path) -> None:
        change(results)
        moment = time.time() + days * 86_400
        os.utime(path_of(results, "a", 0), (moment, moment))

    return act


def add(results: Path) -> None:
    save(results, record("c", 9))


def add_long_ago(results: Path) -> None:
    """Long before the index was written."""
    add(results)
    os.utime(path_of(results, "c", 9), (1, 1))


def damage(results: Path) -> None:
    path_of(results, "a", 0).write_text("{}")


@pytest.mark.parametrize(
    ("act", "reads"),
    [
        (remove, 0),
        (change, 1),
        (change_in_place, 1),
        (change_and_keep_the_time, 1),
        (change_days_from_now(-1), 1),
        (change_days_from_now(1), 1),
        (add, 1),
        (add_long_ago, 1),
        (damage, 1),
    ],
)
def test_a_file_is_read_again_if_it_changed_and_no_other(
    results: Path, act: Callable[[Path], None], reads: int
) -> None:
    read_anew(results)
    act(results)
    opened: list[Path] = []
    documents = read_anew(results, opened)
    assert len(opened) == reads
    (results / index.NAME).unlink()
    assert documents == read_anew(results)
    opened.clear()
    assert documents == read_anew(results, opened)
    assert len(opened) == (act is damage)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"version": "another", "records": {}}', b"\x80"])
def test_an_index_that_is_none_of_this_version_is_made_anew(results: Path, content: bytes) -> None:
    documents = read_anew(results)
    whole = (results / index.NAME).read_bytes()
    (results / index.NAME).write_bytes(content)
    assert read_anew(results) == documents
    assert (results / index.NAME).read_bytes() == whole


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"5",
        b"{",
        b"[" * 100_000,
        *(b'{"runs/a": %s}' % entry for entry in (b"5", b"[1, 2]")),
    ],
)
def test_an_index_with_another_body_is_made_anew(results: Path, body: bytes) -> None:
    """It was a traceback in every command, though its first line was right."""
    documents = read_anew(results)
    whole = (results / index.NAME).read_bytes()
    head = index._head(index._version(), body)
    (results / index.NAME).write_bytes(head + b"\n" + body)
    assert read_anew(results) == documents
    assert (results / index.NAME).read_bytes() == whole


def test_what_the_index_leaves_out_is_read_from_the_file(results: Path) -> None:
    read_anew(results)
    opened: list[Path] = []
    first = read_anew(results, opened)[0]
    assert not opened
    assert "epochs" not in first.values
    assert [epoch.metrics["accuracy"] for epoch in first.epochs] == [0.3]
    assert first.has_each_epoch
    assert first.document["epochs"][0]["step"] == 7


def test_a_folder_that_cannot_be_written_is_read(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(index, "write_bytes", refuse)
    assert len(read_anew(results)) == 6
    assert not (results / index.NAME).exists()


def test_fields_that_are_not_known_stay_in_the_document(results: Path) -> None:
    save(results, record("d", 1, later={"than": "this"}))
    last_record = read_anew(results)[-1]
    assert last_record.get("later.than") == "this"
    assert last_record.document["later"] == {"than": "this"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('{"version": []}'),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: (path.touch(), os.truncate(path, 1 << 40)),
        os.mkfifo,
    ],
    ids=["deep", "other", "endless", "huge", "fifo"],
)
@pytest.mark.timeout(60)
def test_a_damaged_index_is_not_read(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """It was read whole: one that was a FIFO hung every command, an endless one took all memory."""
    save(tmp_path, record("a"))
    damage(tmp_path / index.NAME)
    tracemalloc.start()
    assert [run.recipe for run in records.read_all(tmp_path)] == ["a"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 26


def test_of_a_damaged_index_the_records_are_read(results: Path) -> None:
    before = read_anew(results)
    path = results / index.NAME
    body = bytearray(path.read_bytes())
    for place in range(0, len(body), 97):
        path.write_bytes(body[:place] + bytes([body[place] ^ 2]) + body[place + 1 :])
        assert read_anew(results) == before
