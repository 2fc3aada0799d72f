"""Every way to draw a run's steps a second time with other noise: all that was drawn counts, in the
record, in `budget` and in a total budget."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.accounting import by_dp_accounting
from tests.training.test_budget import begin
from tests.training.test_run import carry_out, kill_after, weights_of
from zdp_bench.errors import UserError
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.ledger_lines import chain, make_line, read_ledger
from zdp_bench.report.budget import sheet
from zdp_bench.training import run
from zdp_bench.training.deletion import delete
from zdp_bench.training.run import Outcome
from zdp_bench.training.spending import find_spendings

STEPS, RATE = 20, 0.1
WORDS = ["algorithm.noise_multiplier=1.3", "seed=3"]
SECURE = "privacy.secure=true"


def epsilon_of(steps: int, privacy: dict[str, Any]) -> float:
    """The ε of so many steps of a run with this privacy section."""
    return by_dp_accounting((privacy["z"], RATE, steps), delta=privacy["delta"])


def home_of(results: Path) -> Path:
    (lock,) = results.glob("runs/*/*.lock")
    return lock.with_suffix("")


def forget_record(home: Path) -> None:
    (home / "record.json").unlink()
    (home / "checkpoint.pt").unlink()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def forget_and_rename(name: str) -> Callable[[Path], None]:
    def act(home: Path) -> None:
        forget_record(home)
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "ledger.jsonl").rename(home / name)

    return act


def cut_last_line(home: Path) -> None:
    forget_record(home)
    path = home / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-9])


def nothing(home: Path) -> None:
    pass


# what happens to the folder of a finished run; the words that draw its steps again; how many steps
# there are then, at least and at most
WAYS: dict[str, tuple[Callable[[Path], None], list[str], int, int]] = {
    "forced": (nothing, ["force=true"], 40, 40),
    "forced with a damaged checkpoint": (
        lambda home: damage(home / "checkpoint.pt"),
        ["force=true"],
        40,
        40,
    ),
    "forced with a damaged ledger": (
        lambda home: damage(home / "ledger.jsonl"),
        ["force=true"],
        40,
        45,
    ),
    "forced without a record": (
        lambda home: (home / "record.json").unlink(),
        ["force=true"],
        40,
        40,
    ),
    "forced with a renamed ledger": (forget_and_rename("before.jsonl"), ["force=true"], 40, 40),
    "record and checkpoint deleted": (forget_record, [], 40, 40),
    "and the last line cut": (cut_last_line, [], 40, 41),
    "and the ledger renamed": (forget_and_rename("before.jsonl"), [], 40, 40),
    "and the ledger renamed to another kind of file": (forget_and_rename("before.txt"), [], 40, 40),
    "and the ledger set aside by hand": (forget_and_rename("ledger.jsonl.7"), [], 40, 40),
    "and the ledger moved into a subfolder": (forget_and_rename("old/ledger.jsonl"), [], 40, 40),
    "and the ledger moved deeper": (forget_and_rename("nodes/00/a.txt"), [], 40, 40),
    "forced with a moved ledger": (forget_and_rename("old/ledger.jsonl"), ["force=true"], 40, 40),
}
# what differs between the first process and the second
CHANGES: dict[str, list[str]] = {
    "other code, libraries or machine": [],
    "other micro-batch": ["trainer.micro_batch=50"],
    "other threads": ["threads=2"],
}


def check(results: Path, steps: int, most: int = 0) -> None:
    """Compare record, budget and total budget with the ε of so many steps."""
    (path,) = results.glob("runs/*/*/record.json")
    privacy = json.loads(path.read_text())["privacy"]
    counted = privacy["steps"]
    assert steps <= counted <= max(steps, most)
    expected = epsilon_of(counted, privacy)
    assert privacy["epsilon_tight"] == pytest.approx(expected, rel=3e-3)
    assert privacy["ledger"]["entries"] == counted
    spendings, unknown = find_spendings(results)
    assert not unknown
    assert [spending.spent.steps for spending in spendings] == [counted]
    (line,) = sheet(spendings, None, [], results).numbers
    assert line["epsilon"] == pytest.approx(expected, rel=3e-3)
    # another run within a total budget that one generation less would leave room for
    both = epsilon_of(counted + STEPS, privacy)
    next_run = {"z": privacy["z"], "steps": STEPS}
    with pytest.raises(UserError, match=r"privacy\.total_budget"):
        begin(results, *WORDS, f"privacy.total_budget={0.99 * both}", **next_run)
    begin(results, *WORDS, f"privacy.total_budget={1.01 * both}", **next_run)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_second_generation_counts_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    act, words, steps, most = WAYS[way]
    first = weights_of(carry_out(tmp_path, *WORDS))
    act(home_of(tmp_path))
    monkeypatch.setattr(run, "execution_digest", lambda *_: "another machine")
    second = weights_of(carry_out(tmp_path, *WORDS, *words))
    assert any((first[name] != second[name]).any() for name in first)  # other noise
    monkeypatch.undo()
    check(tmp_path, steps, most)


@pytest.mark.parametrize("way", ["forced", "forced with a damaged checkpoint", "forced without"])
def test_the_same_generation_forced_counts_once(tmp_path: Path, way: str) -> None:
    act, words, *_ = next(case for name, case in WAYS.items() if name.startswith(way))
    first = carry_out(tmp_path, *WORDS).record.document
    act(home_of(tmp_path))
    assert carry_out(tmp_path, *WORDS, *words).record.document["privacy"] == first["privacy"]
    check(tmp_path, STEPS)


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_differs_between_two_processes_counts_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_threads: Callable[[int], None], change: str
) -> None:
    set_threads(1)
    carry_out(tmp_path, *WORDS)
    if not CHANGES[change]:
        monkeypatch.setattr(run, "execution_digest", lambda *_: "another machine")
    carry_out(tmp_path, *WORDS, *CHANGES[change], "force=true")
    monkeypatch.undo()
    check(tmp_path, 2 * STEPS)


def test_three_generations_and_the_first_once_more_count_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out(tmp_path, *WORDS)
    for machine in ("second", "third", "second"):
        with monkeypatch.context() as patch:
            patch.setattr(run, "execution_digest", lambda *_, machine=machine: machine)
            carry_out(tmp_path, *WORDS, "force=true")
    carry_out(tmp_path, *WORDS, "force=true")
    check(tmp_path, 3 * STEPS)


def test_secure_steps_count_each_time(tmp_path: Path) -> None:
    for _ in range(2):
        carry_out(tmp_path, *WORDS, SECURE, "force=true")
    home = home_of(tmp_path)
    (home / "copy.jsonl").write_bytes((home / "ledger.jsonl").read_bytes())  # which is no third
    check(tmp_path, 2 * STEPS)


@pytest.mark.parametrize("forced", [True, False])
def test_a_run_that_was_killed_counts_what_it_drew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    kill_after(monkeypatch, 13, tmp_path, *WORDS)  # its checkpoint stands at 10
    monkeypatch.setattr(run, "execution_digest", lambda *_: "another machine")
    carry_out(tmp_path, *WORDS, *(["force=true"] if forced else []))
    monkeypatch.undo()
    check(tmp_path, 14 + (20 if forced else 10))


def test_a_folder_that_was_renamed_counts_under_its_new_name(tmp_path: Path) -> None:
    """As the message of a damaged ledger advises."""
    privacy = carry_out(tmp_path, *WORDS).record.document["privacy"]
    home = home_of(tmp_path)
    forget_record(home)
    damage(home / "ledger.jsonl")
    with pytest.raises(UserError, match="zdp-bench budget"):
        carry_out(tmp_path, *WORDS)
    home.rename(home.with_name("before"))
    carry_out(tmp_path, *WORDS)
    (line,) = sheet(find_spendings(tmp_path)[0], None, [], tmp_path).numbers
    expected = epsilon_of(2 * STEPS, privacy)
    assert (line["runs"], line["epsilon"]) == (2, pytest.approx(expected, rel=3e-3))


def rename_and_kill(results: Path) -> None:
    home = home_of(results)
    forget_record(home)
    home.rename(results / "runs" / "elsewhere")


ELSEWHERE: dict[str, Callable[[Path], object]] = {
    "renamed": lambda results: home_of(results).rename(results / "runs" / "elsewhere"),
    "renamed before its end": rename_and_kill,
    "moved out of runs": lambda results: home_of(results).rename(results / "backup"),
    "deleted": lambda results: delete(home_of(results)),
}


@pytest.mark.parametrize("same_machine", [True, False])
@pytest.mark.parametrize("way", ELSEWHERE)
def test_the_noise_of_a_ledger_elsewhere_is_drawn_again_for_the_same_bits_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, same_machine: bool
) -> None:
    """Rounded otherwise, the difference of two sums with the same noise would be released."""
    first = weights_of(carry_out(tmp_path, *WORDS))
    ELSEWHERE[way](tmp_path)
    if not same_machine:
        monkeypatch.setattr(run, "execution_digest", lambda *_: "another machine")
    second = weights_of(carry_out(tmp_path, *WORDS))
    differs = any((first[name] != second[name]).any() for name in first)
    assert differs == (not same_machine)


def test_a_start_covers_the_machine_of_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, join = [], run.join_digests
    for other_rank in ("one machine", "another machine", ""):
        with monkeypatch.context() as patch:
            patch.setattr(run, "join_digests", lambda own, other=other_rank: join([*own, other]))
            patch.setattr(Ledger, "choose_generation", lambda _, *start: starts.append(start[0]))
            carry_out(tmp_path, *WORDS, "force=true")
    assert len({*starts}) == 3
    assert starts[2] == "", "a rank without reproducible bits"


@pytest.mark.parametrize("name", ["ledger.jsonl.1", "old/ledger.jsonl", "nodes/00/a.txt"])
def test_a_record_of_before_that_lacks_a_generation_is_counted_by_its_ledgers(
    finished: Outcome, tmp_path: Path, name: str
) -> None:
    """Version 0.1 counted a seeded ledger that was set aside as the same run."""
    home = finished.path.parent
    path, digest, content = home / "ledger.jsonl", "0" * 64, b""
    for line in read_ledger(path):
        entry: Any = line.entry
        if hasattr(entry, "generation"):
            entry = type(entry)(**vars(entry) | {"generation": "a" * 32})
        content += make_line(digest, entry)
        digest = digest if hasattr(entry, "state_digest") else chain(digest, entry)
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    (home / name).write_bytes(content)
    (spending,), _ = find_spendings(tmp_path)
    assert spending.spent.steps == 2 * STEPS


def test_a_run_whose_earlier_generation_has_spent_its_budget_does_not_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrained model, and its record, replaced the trained one."""
    budget = "privacy.max_epsilon=1.2"
    first = carry_out(tmp_path, *WORDS, budget)
    assert 0 < first.record.privacy.steps < STEPS
    files = {path: path.read_bytes() for path in first.path.parent.iterdir()}
    monkeypatch.setattr(run, "execution_digest", lambda *_: "another machine")
    with pytest.raises(UserError, match=r"^privacy\.max_epsilon=1\.2: the steps in the ledger"):
        carry_out(tmp_path, *WORDS, budget, "force=true")
    assert carry_out(tmp_path, *WORDS, budget).record.document == first.record.document
    kept = ("record.json", "checkpoint.pt", "ledger.jsonl")
    assert all(path.read_bytes() == files[path] for path in files if path.name in kept)
