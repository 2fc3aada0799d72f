"""The ledger of a loop of one's own: harmed, full, continued by another, let go."""

import contextlib
import errno
import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ledgers import OnDisk
from tests.library.conftest import Make
from tests.library.small import begin, network, train
from zdp_bench.errors import UserError
from zdp_bench.privacy import ledger


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_ledger_of_two_names_is_refused(make: Make, tmp_path: Path, link: Any) -> None:
    make()
    link(tmp_path / "ledger.jsonl", tmp_path / "other.jsonl")
    with pytest.raises(UserError, match=r"other\.jsonl: .* link"):
        begin(network(), tmp_path / "other.jsonl")


@pytest.mark.parametrize("where", ["save", "export", "close", "step"])
@pytest.mark.parametrize(
    "harm",
    [
        Path.unlink,
        lambda path: path.rename(path.with_name("moved")),
        lambda path: os.truncate(path, 9),
        lambda path: path.write_bytes(path.read_bytes() + b"\n"),
        lambda path: (
            path.rename(path.with_name("of.jsonl"))
            .with_name("ledger.jsonl")
            .symlink_to(path.with_name("of.jsonl"))
        ),
    ],
    ids=["unlinked", "renamed", "cut", "longer", "linked"],
)
def test_a_ledger_that_is_harmed_while_its_training_runs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Any, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    private = make(ledger="ledger.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")  # which is no harm
    train(private, most=2)
    private.save()
    assert (tmp_path / "ledger.pt").is_file()
    harm(tmp_path / "ledger.jsonl")
    acts = {"save": private.save, "close": private.close, "step": lambda: train(private)}
    acts["export"] = lambda: private.export(tmp_path / "model")
    with pytest.raises(UserError, match=r"ledger\.jsonl: was moved"):
        acts[where]()
    assert not (tmp_path / "model").exists()
    with contextlib.suppress(UserError):
        private.close()
    assert private.ledger._file.closed


def move_away(path: Path, make: Make) -> None:
    path.rename(path.with_name("moved.jsonl"))


def continue_it(path: Path, make: Make) -> None:
    later = make(count_earlier=True)
    train(later, most=2)
    later.close()


def continue_another(path: Path, make: Make) -> None:
    move_away(path, make)
    continue_it(path, make)


@pytest.mark.parametrize("harm", [continue_it, continue_another, move_away])
def test_a_closed_training_states_no_epsilon_of_a_ledger_that_goes_on(
    make: Make, tmp_path: Path, harm: Callable[[Path, Make], None]
) -> None:
    closed = make()
    train(closed, most=1)
    epsilon = closed.epsilon
    other = make(ledger=tmp_path / "other.jsonl")
    closed.close()
    assert closed.epsilon == closed.report()["epsilon_tight"] == epsilon
    assert other.epsilon_with(closed) == epsilon
    harm(tmp_path / "ledger.jsonl", make)
    acts: dict[str, Callable[[], object]] = {
        "epsilon": lambda: closed.epsilon,
        "epsilon_with": lambda: other.epsilon_with(closed),
        "report": closed.report,
        "export": lambda: closed.export(tmp_path / "model"),
        "save": closed.save,
    }
    for act in acts.values():
        with pytest.raises(UserError, match=r"another training run continued .* from that"):
            act()


@pytest.mark.parametrize("act", ["save", "step", "close"])
def test_a_full_disk_is_one_sentence_and_loses_no_step(
    make: Make, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ledger, "MIN_SYNC_INTERVAL", 0 if act == "step" else 1e9)
    private = make()
    train(private, most=3)
    batch = next(private.batches())
    acts = {"save": private.save, "close": private.close, "step": lambda: private.step(batch)}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"ledger\.(pt|jsonl): No space left"):
            acts[act]()
    if act != "close":
        private.step(batch)
        private.save()
    counted = private.ledger.releases
    private.close()
    again = make()
    assert again.ledger.releases >= counted
    assert again.resume() == (act != "close")


@pytest.mark.parametrize("act", ["save", "close", "export", "epsilon", "report", "epsilon_with"])
def test_all_steps_are_on_disk_before_what_they_led_to_leaves(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    held = OnDisk(monkeypatch)
    private = make()
    train(private, most=3)
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(AssertionError):
        held.check(path)
    other = make(ledger=tmp_path / "other.jsonl") if act == "epsilon_with" else None
    acts: dict[str, Callable[[], object]] = {
        "save": private.save,
        "close": private.close,
        "export": lambda: private.export(tmp_path / "model"),
        "epsilon": lambda: private.epsilon,
        "report": private.report,
        "epsilon_with": lambda: other and other.epsilon_with(private),
    }
    acts[act]()
    held.check(path)


def test_a_training_that_is_let_go_with_its_folder_says_nothing(tmp_path: Path) -> None:
    private = begin(network(), tmp_path / "own/ledger.jsonl")
    train(private, most=1)
    shutil.rmtree(tmp_path / "own")
    del private
    gc.collect()  # an error there is a warning, which fails here
