"""The ledger's file: what it holds, what a kill leaves, what it refuses."""

from __future__ import annotations

import hashlib
import json
import pickle
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.ledgers import in_a_fork
from tests.privacy.ledger_runs import MECHANISM, OTHER_MECHANISM, reopen, run_process, write
from zdp_bench.errors import UserError
from zdp_bench.privacy import ledger as module
from zdp_bench.privacy import ledger_lines, tally
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.ledger_files import (
    find_ledgers,
    has_steps,
    is_ledger,
    set_aside,
    set_aside_others,
)
from zdp_bench.privacy.ledger_lines import Entry, Head, LedgerError, Start, Step
from zdp_bench.privacy.mechanism import Mechanism

# ------------------------------------------------------------------------------------ what it holds


def test_every_step_is_one_line_and_survives_a_reopening(path: Path) -> None:
    position = write(path, 0, 1, 2, 3).position
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("step") for line in lines] == [None, 0, 1, 2, 3]
    assert (lines[0]["ledger"], lines[0]["mechanism"]) == (ledger_lines.FORMAT, MECHANISM.digest())
    again = reopen(path)
    assert (again.releases, again.position) == (4, position)
    assert position.digest == lines[-1]["sha256"]


@pytest.mark.parametrize("kind", ["file", "copy"])
def test_a_fork_of_the_process_writes_and_counts_nothing(path: Path, kind: str) -> None:
    """Not even a step that is there, whose noise it would draw for other sums."""
    write(path, 0, 1)
    ledger = Ledger(path, MECHANISM, True)
    held = ledger if kind == "file" else pickle.loads(pickle.dumps(ledger.copy()))
    before = path.read_bytes()

    def act() -> str:
        messages = []
        for write_line in (held.append, held.revoke_starts if kind == "file" else held.append):
            for step in (1, 2):
                try:
                    write_line(step)
                    messages.append("written")
                except UserError:
                    messages.append("refused")
        return " ".join(messages)

    assert in_a_fork(act) == "refused refused refused refused"
    assert path.read_bytes() == before
    held.append(2)
    assert held.releases == 3
    ledger.close()


def test_a_ledger_is_the_same_from_version_to_version(path: Path) -> None:
    """If this changes, older ledgers cannot be read: raise `FORMAT`."""
    assert write(path, 0, 1).position.digest == (
        "1d2e5eb07b9258ab0bfae67595bf6c77e9f8338b1b0f03283be11ee1d798df00"
    )
    assert ledger_lines.FORMAT == 7
    shortest = ledger_lines.make_line(ledger_lines.BEGINNING, Step(0))
    assert len(shortest) == ledger_lines.MIN_STEP_LINE


# ------------------------------------------------------------------------ ledgers of other versions


@pytest.mark.parametrize("version", [ledger_lines.FORMAT - 1, ledger_lines.FORMAT + 1])
def test_a_ledger_of_another_version_is_never_counted(path: Path, version: int) -> None:
    """Its lines may stand for more steps than this version reads in them."""
    write(path, 0, 1, 2)
    path.write_text(
        path.read_text().replace(f'"ledger": {ledger_lines.FORMAT}', f'"ledger": {version}')
    )
    head = path.with_name("head.jsonl")
    head.write_text(path.read_text().splitlines()[0])
    assert is_ledger(head)
    with pytest.raises(LedgerError, match="line 1: was written by another version"):
        reopen(path)
    with pytest.raises(UserError, match="another version"):
        tally.count_releases([path])
    set_aside(path)
    with pytest.raises(UserError, match="another version"):
        reopen(path)


# ------------------------------------------------------------------------------- ledgers set aside


@dataclass
class Other:
    """A ledger that no single ε covers together with one of `MECHANISM`, and why."""

    named: str
    mechanism: Mechanism = MECHANISM
    repeatable: bool = True
    identity: str = "node 1"
    facts: dict[str, str] = field(default_factory=lambda: {"epsilon_of": "example"})

    def open(self, path: Path) -> Ledger:
        return Ledger(
            path, self.mechanism, self.repeatable, identity=self.identity, facts=self.facts
        )


@pytest.mark.parametrize("is_aside", [True, False])
@pytest.mark.parametrize(
    "other",
    [
        Other("another mechanism", mechanism=OTHER_MECHANISM),
        Other("another kind of noise", repeatable=False),
        Other("another node or other owners", identity="node 2"),
        Other("another unit of ε or source of randomness", facts={"epsilon_of": "patient"}),
        Other("another mechanism and another kind of noise", OTHER_MECHANISM, repeatable=False),
    ],
    ids=lambda other: other.named,
)
def test_another_runs_ledger_is_refused_by_what_differs(
    path: Path, other: Other, is_aside: bool
) -> None:
    other.open(path).close()
    if is_aside:
        set_aside(path)
        message = rf"ledger\.jsonl\.1: .* belongs to {other.named} than this run's, so no single ε"
    else:
        message = rf"ledger\.jsonl, line 1: belongs to {other.named} than this run's$"
    with pytest.raises(LedgerError, match=message):
        Other("this run's").open(path)


@pytest.mark.parametrize("is_aside", [True, False])
def test_a_ledger_without_facts_is_of_an_older_version_and_counts(
    path: Path, is_aside: bool
) -> None:
    ledger = Other("an older version's", facts={}).open(path)
    ledger.append(0)
    ledger.close()
    if is_aside:
        set_aside(path)
    ledger = Other("this run's").open(path)
    assert ledger.releases == 1
    ledger.close()


def test_secure_steps_are_never_the_same_as_those_of_another_file(path: Path) -> None:
    """Not even as those of a seeded one, whose steps have the same numbers."""
    paths = []
    for number, repeatable in enumerate([False, True, False, True]):
        paths.append(path.with_name(f"{number}.jsonl"))
        write(paths[-1], *range(10), repeatable=repeatable)
    assert tally.count_releases(paths) == 30
    assert tally.count_releases(reversed(paths)) == 30


# --------------------------------------------------------------------------- nonces and generations


def test_the_chain_of_a_secure_ledger_follows_from_its_steps_alone(path: Path) -> None:
    """Seeded steps of your own loop take their keys from it."""
    first, other = (write(path.with_name(name), 0, 1, repeatable=False) for name in ("a", "b"))
    assert first.position == other.position
    assert first.path.read_bytes() != other.path.read_bytes()


def test_what_tells_ledgers_and_noise_apart_has_128_bits(path: Path) -> None:
    """So that no two that are drawn at random are ever the same."""
    write(path, 0, repeatable=False)
    write(path, 1, 2, repeatable=False)  # which marks it as continued, once
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["made" in line for line in lines] == [False, False, True, False, False]
    random_texts = [lines[0]["nonce"], lines[2]["made"]]
    named, unnamed = path.with_name("named"), path.with_name("unnamed")
    run_process(named, "code", 0, "new", 1)
    random_texts.append(begin(named, "other code", 0, "new"))
    ledger = Ledger(unnamed, MECHANISM, True)
    ledger.choose_generation("third code", 0, "new", lambda: [named])
    ledger.close()
    random_texts.append(begin(unnamed, "fourth code", 0, "new"))
    random_texts.append(ledger.generation)
    assert [len(bytes.fromhex(text)) for text in random_texts] == [16] * 5
    assert len({*random_texts}) == 5


# --------------------------------------------------------------------------------- starts, revoked


def write_revoked(path: Path) -> Ledger:
    """Write a ledger whose generation cannot be repeated from its start, and is then continued."""
    ledger = Ledger(path, MECHANISM, True)
    ledger.choose_generation("code", 0, "new")
    for step in range(3):
        ledger.append(step)
    ledger.revoke_starts(2)
    ledger.record_start("smaller", 3, "saved")
    ledger.append(3)
    ledger.close()
    return ledger


def begin(path: Path, *start: Any) -> str:
    """Return the generation that a process with this start is in."""
    ledger = Ledger(path, MECHANISM, True)
    ledger.choose_generation(*start)
    ledger.close()
    return ledger.generation


def test_a_revoked_start_is_not_repeated_and_a_later_one_is(path: Path) -> None:
    position = write_revoked(path).position
    assert reopen(path, at_least=position).position == position
    assert begin(path, "smaller", 3, "saved") == ""
    first = begin(path, "code", 0, "new")
    assert first != ""
    assert begin(path, "code", 0, "new") == first  # which is recorded in turn


def test_a_state_that_is_noted_at_a_revoked_step_stays_revoked(path: Path) -> None:
    """A run may save where it stopped, before the step that it could not repeat."""
    ledger = Ledger(path, MECHANISM, True)
    ledger.choose_generation("code", 0, "new")
    ledger.append(0)
    ledger.revoke_starts(0)
    ledger.record_start("smaller", 0, "new")
    ledger.close()
    assert begin(path, "smaller", 0, "new") != ""


def test_a_revocation_cannot_be_dropped_moved_or_changed(path: Path) -> None:
    """Without it, a step would count as a repeat whose noise hides another sum."""
    write_revoked(path)
    lines = path.read_bytes().splitlines(keepends=True)
    (number,) = [number for number, line in enumerate(lines) if b"revokes" in line]
    line, others = lines[number], [*lines[:number], *lines[number + 1 :]]
    edits = [others]
    edits += [[*others[:place], line, *others[place:]] for place in range(1, number)]
    edits += [[*lines[:number], line.replace(b'"step": 2', b'"step": 1'), *lines[number + 1 :]]]
    for edited in edits:
        path.write_bytes(b"".join(edited))
        with pytest.raises(LedgerError, match="the chain of digests breaks here"):
            reopen(path)


def write_revoked_by_older_version(path: Path) -> None:
    """Write the same as versions before 0.1: the revocation is a start without a state."""
    write_revoked(path)
    bodies = [json.loads(line) for line in path.read_bytes().splitlines()]
    digest, lines = ledger_lines.BEGINNING, list[bytes]()
    for body in bodies:
        body.pop("sha256")
        if "revokes" in body:
            body = {"generation": body["revokes"], "made": "", "state": "", "step": body["step"]}
        text = json.dumps(body, sort_keys=True)
        after = hashlib.sha256((digest + text).encode()).hexdigest()
        if "state" not in body:
            digest = after
        lines.append(json.dumps(body | {"sha256": after}, sort_keys=True).encode() + b"\n")
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("is_set_aside", [True, False])
def test_a_ledger_in_which_an_older_version_revoked_a_start_is_refused(
    path: Path, is_set_aside: bool
) -> None:
    """Its revoked start was continued: steps counted once, under one noise for two sums."""
    write_revoked_by_older_version(path)
    assert has_steps(path)
    assert is_ledger(path)
    if is_set_aside:
        set_aside(path)
    with pytest.raises((LedgerError, UserError), match=r"line 6: was written by another version"):
        reopen(path)
    with pytest.raises(UserError, match="was written by another version"):
        tally.count_releases(find_ledgers(path.parent))


@pytest.mark.parametrize("revoked_first", [True, False])
def test_the_order_of_ledgers_that_were_set_aside_brings_no_revoked_start_back(
    path: Path, revoked_first: bool
) -> None:
    names = ("ledger.jsonl.1", "ledger.jsonl.2")
    revoked, other = (path.with_name(name) for name in (names if revoked_first else names[::-1]))
    run_process(path, "code", 0, "new", 2)  # it knows of no other ledger
    path.rename(other)
    write_revoked(revoked)
    assert begin(path, "code", 0, "new") != ""


@pytest.mark.parametrize("names", [("ledger.jsonl.1", "ledger.jsonl.2"), ("b.jsonl", "a.jsonl")])
def test_the_order_of_ledgers_that_were_set_aside_hides_no_start_that_is_not_revoked(
    path: Path, names: tuple[str, str]
) -> None:
    """Two generations follow one start, and only the first is revoked."""
    ledger = Ledger(path, MECHANISM, True)
    ledger.choose_generation("code", 0, "new")
    ledger.append(0)
    ledger.revoke_starts(0)
    ledger.close()
    set_aside(path)
    generation = begin(path, "code", 0, "new")
    path.rename(path.with_name(names[1]))
    path.with_name("ledger.jsonl.1").rename(path.with_name(names[0]))
    set_aside_others(path)
    assert begin(path, "code", 0, "new") == generation != ""


@pytest.mark.parametrize("step", [0, 2])
def test_no_step_is_taken_while_its_file_is_not_as_it_was_left(path: Path, step: int) -> None:
    ledger = Ledger(path, MECHANISM, True)
    for done in (0, 1):
        ledger.append(done)
    with path.open("ab") as file:
        file.write(b"\n")
    for act in (lambda: ledger.append(step), ledger.close):
        with pytest.raises(UserError, match="written to by something else"):
            act()


# ------------------------------------------------------------------------- on disk before the noise


def test_every_edit_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "edited"
    write(path, 0, 1, 2, 3)
    lines = path.read_text().splitlines(keepends=True)
    edits = [
        (3, [*lines[:2], *lines[3:]]),  # dropped: the chain breaks where the next one stands
        (2, [lines[0], lines[2], lines[1], *lines[3:]]),  # reordered
        (4, [*lines[:3], lines[2], *lines[3:]]),  # doubled
        (5, [*lines[:4], json.dumps(json.loads(lines[4]) | {"step": 7}) + "\n"]),  # changed
        (1, ["not json\n", *lines[1:]]),
        (1, lines[1:]),  # the head dropped
    ]
    # without its digest, and what is no line at all
    edits += [(3, [*lines[:2], f"{text}\n", *lines[3:]]) for text in ('{"step": 1}', 7, "[]", "")]
    for number, text in edits:
        path.write_text("".join(text))
        with pytest.raises(LedgerError, match=rf"edited, line {number}: "):
            reopen(path)
    path.write_bytes(lines[0].encode() + b"\xff\xfe\n")
    with pytest.raises(LedgerError, match="edited, line 2: not a ledger line"):
        reopen(path)


def test_lines_with_a_right_chain_but_no_step_are_refused(path: Path) -> None:
    digest = write(path, 0, 1).position.digest
    lines = path.read_bytes()
    bodies: list[Any] = [{"step": "1"}, {"step": True}, {"steps": 1}, {"step": 1, "free": 1}, {}]
    bodies += [{"taken": 1}, {"step": 1, "of": 2}, {"step": None}, {"made": "", "step": 1}, [], 3]
    head = json.loads(lines.splitlines()[0])
    del head["sha256"]
    bodies += [head, head | {"facts": {"unit": 1}}]
    for body in bodies:
        text = json.dumps(body, sort_keys=True)
        claimed = hashlib.sha256((digest + text).encode()).hexdigest()
        line = body | {"sha256": claimed} if isinstance(body, dict) else body
        path.write_bytes(lines + json.dumps(line, sort_keys=True).encode() + b"\n")
        with pytest.raises(LedgerError, match=r"line 4: not a (step|ledger line)"):
            reopen(path)


@pytest.mark.parametrize("zeros", [1, 50, 5000])
def test_a_ledger_that_ends_in_zeros_is_refused(path: Path, zeros: int) -> None:
    """A kill writes none, and how many steps they replace is not known."""
    write(path, 0, 1)
    for content in (path.read_bytes(), path.read_bytes()[:-30], b""):
        path.write_bytes(content + bytes(zeros))
        with pytest.raises(LedgerError, match="not a ledger line"):
            reopen(path)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_ledger_that_ends_before_the_checkpoint_is_refused(path: Path, kept: int) -> None:
    position = write(path, *range(5)).position
    lines = path.read_bytes().splitlines(keepends=True)
    message = (
        rf"line {2 + kept}: the file ends here.*{kept} releases.*after 5: the file was truncated"
    )
    for fragment in (b"", b'{"st'):  # nor does a fragment stand for the missing steps
        path.write_bytes(b"".join(lines[: 1 + kept]) + fragment)
        with pytest.raises(LedgerError, match=message):
            reopen(path, at_least=position)


def test_an_emptied_or_missing_ledger_is_refused_beside_a_checkpoint(path: Path) -> None:
    position = write(path, 0, 1).position
    path.write_bytes(b"")
    with pytest.raises(LedgerError, match="line 1: the file ends here"):
        reopen(path, at_least=position)
    path.unlink()
    with pytest.raises(LedgerError, match="is missing"):
        reopen(path, at_least=position)


def test_another_runs_ledger_is_refused_beside_a_checkpoint(path: Path) -> None:
    # of the same mechanism, but with other steps: only the checkpoint can tell
    write(path.with_name("other"), 0, 0, 1, repeatable=False)
    position = write(path.with_name("mine"), 0, 1, 2, repeatable=False).position
    with pytest.raises(LedgerError, match=r"checkpoint .* release 3"):
        reopen(path.with_name("other"), False, position)


@pytest.mark.parametrize(
    ("in_file", "of_run", "is_accepted"),
    [
        ({}, {"unit": "owner"}, True),  # of a version that stated none
        ({"unit": "owner"}, {"unit": "owner"}, True),
        ({"unit": "owner"}, {"unit": "example"}, False),
        ({"unit": "owner"}, {}, False),
    ],
)
def test_a_ledger_of_other_facts_is_refused(
    path: Path, in_file: dict[str, str], of_run: dict[str, str], is_accepted: bool
) -> None:
    Ledger(path, MECHANISM, True, facts=in_file).close()
    if is_accepted:
        ledger = Ledger(path, MECHANISM, True, facts=of_run)
        assert ledger.facts == in_file
        ledger.close()
    else:
        with pytest.raises(LedgerError, match="line 1: belongs to another unit of ε"):
            Ledger(path, MECHANISM, True, facts=of_run)


def of_another_generation(path: Path, steps: int) -> None:
    """Write a ledger whose steps are other releases than those of a first ledger."""
    run_process(path, "code", 0, "new", 5)
    set_aside(path)
    run_process(path, "other code", 0, "new", steps)


def test_a_checkpoint_is_found_below_a_ledger_that_was_set_aside_since(path: Path) -> None:
    position = write(path, 0, 1, 2).position
    other = path.with_name("other")
    of_another_generation(other, 4)
    other.rename(path.with_name("ledger.jsonl.1"))
    assert reopen(path, at_least=position).releases == 3 + 4


def test_steps_after_a_checkpoint_do_not_stand_for_those_before_it(path: Path) -> None:
    of_another_generation(path, 3)
    position = reopen(path).position
    assert position.releases == 5 + 3
    path.with_name("ledger.jsonl.1").unlink()
    assert write(path, *range(5)).releases == position.releases
    with pytest.raises(LedgerError, match="which this file does not hold"):
        reopen(path, at_least=position)


def test_a_new_ledgers_name_is_on_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    monkeypatch.setattr(module.disk, "fsync_folder", folders.append)
    write(path)
    assert path.parent in folders


# -------------------------------------------------------------------------------------- a long run


def peak_of_opening(path: Path) -> int:
    """The most bytes that opening the ledger takes at a time."""
    tracemalloc.start()
    try:
        reopen(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_ledger_takes_no_more_memory_than_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    monkeypatch.setattr(module.os, "fsync", lambda descriptor: None)  # no wait for the disk
    write(short, *range(10))
    write(long, *range(4_000))
    assert peak_of_opening(long) < peak_of_opening(short) + 16_000
    assert reopen(long).releases_before(3_000) == 3_000


GENERATIONS = [f"{number:064x}" for number in range(12_000)]
ORDERS: dict[str, Callable[[int], list[Entry]]] = {
    "in order": lambda n: [Step(n)],
    "far apart": lambda n: [Step(n * 10**5)],
    "backwards": lambda n: [Step(10**9 - n)],
    "the same": lambda n: [Step(0)],
    "other weights": lambda n: [Step(n % 50, GENERATIONS[n])],
    "generations": lambda n: [Step(n * 7919 % 10**9, "", GENERATIONS[n])],
    "starts": lambda n: [
        Start(GENERATIONS[0], n, GENERATIONS[1], GENERATIONS[n]),
        Step(n * 7919 % 10**9, "", GENERATIONS[n]),
    ],
}


@pytest.mark.parametrize("order", ORDERS)
def test_any_ledger_of_a_megabyte_is_read_in_seconds(tmp_path: Path, order: str) -> None:
    """Valid lines of 33 KB once took 16 s."""
    path, lines = tmp_path / "ledger.jsonl", list[bytes]()
    digest, number, size = ledger_lines.BEGINNING, 0, 0
    entries: list[Entry] = [Head(MECHANISM.digest(), True)]
    while size < 1_000_000:
        for entry in entries:
            lines.append(ledger_lines.make_line(digest, entry))
            size += len(lines[-1])
            if not isinstance(entry, Start):
                digest = ledger_lines.chain(digest, entry)
        entries = ORDERS[order](number)
        number += 1
    path.write_bytes(b"".join(lines))
    begin = time.process_time()
    releases = reopen(path).releases
    assert tally.count_releases([path]) == releases
    assert time.process_time() - begin < 5
