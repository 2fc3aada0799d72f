"""Folders that a stranger made: `verify`, `load` and `predict` answer each, or refuse it.

A few whenever the tests are run; with `--slow`, as many as `--damaged` says, drawn from `--seed`.
"""

import json
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import zdp_bench
from tests.damage import edit_json, name_error, replace_file, seeds_of, spoil_bytes, within
from tests.extras.sharing.conftest import edit_source, source_of
from tests.library.conftest import Make
from tests.library.small import network, train
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.folder import write_sums
from zdp_bench.extras.sharing.loading import predict_file
from zdp_bench.extras.sharing.verification import verify

SECONDS = 20  # for one folder; on a busy machine a sound one takes two
MORE = 300_000  # kB; torch and what a sound folder needs take 700,000


def edit_source_of(folder: Path, draw: random.Random) -> None:
    """Change, drop or add some values of the record, or report."""
    edit_json(source_of(folder), draw)


def replace_any(folder: Path, draw: random.Random) -> None:
    """Put something else in the place of a file."""
    replace_file(draw.choice(sorted(folder.iterdir())), draw)


def spoil_any(folder: Path, draw: random.Random) -> None:
    """Flip, cut or double bytes of a file."""
    spoil_bytes(draw.choice(sorted(folder.iterdir())), draw)


def edit_head(folder: Path, draw: random.Random) -> None:
    """Write another head of the weights, with other shapes, types and lengths."""
    path = folder / "model.safetensors"
    body = path.read_bytes()
    (head_length,) = struct.unpack("<Q", body[:8])
    head = json.loads(body[8 : 8 + head_length])
    name = draw.choice(sorted(head))
    if draw.random() < 0.3:
        head["x"] = head.pop(name)
    elif "shape" in head[name]:
        shape = [2**40, 2**40, 0] if draw.random() < 0.3 else [1, *head[name]["shape"]]
        head[name] |= draw.choice(
            [{"shape": shape}, {"dtype": "F64"}, {"data_offsets": [0, 2**50]}]
        )
    names = ["", name, "none", "[]", json.dumps([name]), '["none"]', "[1]"]
    head["__metadata__"] = {"complex128_as_pairs": draw.choice(names)}
    text = json.dumps(head).encode()
    length = draw.choice([len(text), len(text), 2**40, 0])
    path.write_bytes(struct.pack("<Q", length) + text + body[8 + head_length :])


def edit_text(folder: Path, draw: random.Random) -> None:
    """Write another card, list of digests, or recipe."""
    path = folder / draw.choice(["README.md", "SHA256SUMS", "ledger.jsonl"])
    texts = ["0" * 64 + "  ../../x\n", "x" * 10**7, '{"sha256": []}\n', "[]\n", "1\n" * 1000]
    texts += ["".join(f"{0:064}  {'./' * n}model.safetensors\n" for n in range(300))]
    path.write_text(draw.choice(texts))


DAMAGES = [*[edit_source_of] * 5, replace_any, spoil_any, edit_head, edit_text]


def answer(folder: Path, spoilt: Path) -> None:
    """Ask a folder all that can be asked of one; only `UserError` may come."""
    np.save(spoilt / "in.npy", np.zeros((2, 8, 8), np.complex64))
    asked: list[Callable[[], object]] = [
        lambda: [f"{check.what}: {check.found}" for check in verify(folder)],
        lambda: zdp_bench.load(folder),
        lambda: zdp_bench.load(folder, model=network()),
        lambda: predict_file(folder, spoilt / "in.npy", spoilt / "out.npy"),
        lambda: predict_file(folder, spoilt / "in.png", spoilt / "out.npy"),
    ]
    for ask in asked:
        with suppress(UserError):
            ask()


def attack(sound: list[Path], place: Path, seeds: range) -> list[str]:
    """Return what a folder of each seed did that it must not."""
    failed: list[str] = []
    for seed in seeds:
        draw = random.Random(seed)
        folder = Path(shutil.copytree(draw.choice(sound), place / f"{seed}" / "model"))
        damage = draw.choice(DAMAGES)
        damage(folder, draw)
        if draw.random() < 0.7 and damage is not replace_any:
            write_sums(folder)
        try:
            with within(SECONDS):
                answer(folder, folder.parent)
        except BaseException as error:
            failed.append(f"{seed} {damage.__name__}: {name_error(error)}")
        shutil.rmtree(folder.parent)
    return failed


@pytest.fixture
def sound(exported: Path, of_loop: Path, make: Make, tmp_path: Path) -> list[Path]:
    """A run's export, and those of loops of one's own."""
    private = make(network(), unit=lambda index: index // 2, max_examples=2)
    train(private, most=2)
    private.export(tmp_path / "owners")
    return [exported, exported, of_loop, tmp_path / "owners"]


@pytest.mark.filterwarnings("ignore")
def test_a_fifo_a_long_name_and_a_delta_above_one_are_refused(loop: Path) -> None:
    with (loop / "SHA256SUMS").open("a") as sums:
        sums.write(f"{0:064}  {'9' * 5000}\n")
    assert "is missing" in [check.found for check in verify(loop)]
    edit_source(loop, lambda report: report["privacy"].update(delta=1e308))
    with pytest.raises(UserError, match=r"report\.json: lacks privacy\.delta"):
        verify(loop)
    (loop / "model.safetensors").unlink()
    os.mkfifo(loop / "model.safetensors")
    with pytest.raises(UserError, match=r"is not an exported model"):
        zdp_bench.load(loop, model=network())


@pytest.mark.parametrize("change", [{"x": None}, {"sample_rate": 0.0}, {"sample_rate": "all"}])
def test_a_sampling_that_is_none_is_one_sentence(loop: Path, change: dict[str, object]) -> None:
    edit_source(loop, lambda report: report["privacy"]["sampling"].update(change))
    with suppress(UserError):  # a key more changes nothing
        zdp_bench.load(loop, model=network())


def test_a_key_of_reports_says_nothing_in_a_record(folder: Path) -> None:
    edit_source(folder, lambda record: record["privacy"].update(start=7))
    zdp_bench.load(folder)


@pytest.mark.parametrize("count", [0, 10**9])
@pytest.mark.parametrize("read", [verify, zdp_bench.load])
def test_a_patient_has_no_more_examples_than_there_are(
    folder: Path, read: Callable[[Path], object], count: int
) -> None:
    edit_source(folder, lambda record: record["privacy"].update(examples_per_patient=count))
    with pytest.raises(UserError, match=r"privacy\.examples_per_patient"):
        read(folder)


@pytest.mark.parametrize("text", ["null", "[]", "3"])
def test_a_source_that_is_no_object_is_one_sentence(exported: Path, text: str) -> None:
    path = source_of(exported)
    before = path.read_text()
    path.write_text(text)
    try:
        with pytest.raises(UserError, match="is damaged"):
            zdp_bench.load(exported)
    finally:
        path.write_text(before)


def test_a_report_that_no_card_can_be_made_of_is_wrong(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "model"))
    edit_source(folder, lambda record: record["environment"].pop("commit"))
    findings = {check.what: check.found for check in verify(folder)}
    assert "cannot be made from the report" in findings["texts of recipe and card"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "many", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_a_hostile_folder_is_answered_or_refused_in_little_memory(
    sound: list[Path], many: bool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failed = attack(sound, tmp_path, seeds_of(pytestconfig, many, few=10))
    assert not failed, "\n".join(failed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MORE
