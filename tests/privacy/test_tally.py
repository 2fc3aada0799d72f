"""The count of releases: what is the same release, and what is another."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.ledgers import in_a_fork, steps_in
from tests.privacy.ledger_runs import MECHANISM, reopen, run_process, write
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.ledger_files import list_set_aside, set_aside
from zdp_bench.privacy.ledger_lines import LedgerError
from zdp_bench.privacy.tally import Tally, count_releases


def test_a_copy_of_a_ledger_belongs_to_the_process_that_is_sent_it() -> None:
    sent = pickle.dumps(Tally(True))

    def act() -> str:
        held = pickle.loads(sent)
        held.append(0)
        return str(held.releases)

    assert in_a_fork(act) == "1"


@pytest.mark.parametrize("repeatable", [True, False])
def test_noise_cannot_be_drawn_again_from_the_first_secure_release_on(repeatable: bool) -> None:
    tally = Tally(repeatable)
    assert not tally.has_other_noise
    tally.append(0)
    assert tally.has_other_noise == (not repeatable)


@pytest.mark.parametrize(("repeatable", "releases"), [(True, 5), (False, 8)])
def test_a_step_drawn_again_counts_unless_it_repeats(
    path: Path, repeatable: bool, releases: int
) -> None:
    write(path, 0, 1, 2, 3, 4, repeatable=repeatable)
    ledger = Ledger(path, MECHANISM, repeatable)
    assert ledger.has_other_noise == (not repeatable)
    assert [ledger.has_released(step) for step in (0, 4, 5)] == [repeatable, repeatable, False]
    for step in (2, 3, 4):
        ledger.append(step)
    assert ledger.releases == releases
    ledger.append(5)
    ledger.close()
    assert ledger.releases == reopen(path, repeatable).releases == releases + 1


def test_a_step_from_other_weights_counts_again_and_one_from_the_same_does_not(path: Path) -> None:
    for weights, releases in (("one", 1), ("one", 1), ("other", 2), ("one", 2)):
        ledger = Ledger(path, MECHANISM, repeatable=True)
        for _ in range(2):  # also in one process
            ledger.append(0, weights_digest=weights)
        ledger.close()
        assert ledger.releases == releases


@pytest.mark.parametrize(
    ("made", "state"), [("other code", "new"), ("code", "other weights"), ("", "new")]
)
def test_steps_drawn_again_from_another_start_count_again_under_another_key(
    path: Path, made: str, state: str
) -> None:
    run_process(path, "code", 0, "new", 5)
    second, again = run_process(path, made, 0, state, 3)
    assert (second.releases, again) == (8, 5)
    assert second.generation
    assert second.has_other_noise
    assert second.releases_before(2) == 7  # the five of before are spent, whatever is drawn again
    third, again = run_process(path, made, 0, state, 3)
    if made:  # the second process's steps, once more
        assert (third.generation, third.releases, again) == (second.generation, 8, 0)
    else:  # where nothing repeats, every start is another
        assert third.generation not in ("", second.generation)
        assert (third.releases, again) == (11, 5)
    back, again = run_process(path, "code", 0, "new", 6)  # and the first one's
    assert (back.generation, back.releases, again) == ("", third.releases + 1, 0)


def test_a_start_is_known_only_once_it_was_noted(path: Path) -> None:
    ledger, _ = run_process(path, "code", 0, "new", 4)
    unknown, again = run_process(path, "code", 2, "after two", 3)
    assert (unknown.releases, again) == (5, 2)
    ledger = Ledger(path, MECHANISM, True)
    ledger.choose_generation("code", 0, "new")
    ledger.record_start("code", 2, "after two, really")
    position = ledger.position
    ledger.close()
    known = Ledger(path, MECHANISM, True, position)
    known.choose_generation("code", 2, "after two, really")
    assert known.num_to_count_again == 0
    assert [known.has_released(step) for step in (2, 3, 4)] == [True, True, False]
    known.close()


def test_a_ledger_that_is_set_aside_still_counts_where_noise_is_secure(path: Path) -> None:
    run_process(path, "code", 0, "new", 5, secure=True)
    set_aside(path)
    assert run_process(path, "code", 0, "new", 2, secure=True)[0].releases == 7
    set_aside(path)
    ledger = run_process(path, "code", 0, "new", 1, secure=True)[0]
    assert (ledger.releases, ledger.position.releases, ledger.releases_before(0)) == (8, 8, 8)
    assert reopen(path, False, ledger.position).releases == 8
    path.with_name("ledger.jsonl.1").unlink()
    with pytest.raises(LedgerError, match="line 1"):  # a count that shrank
        Ledger(path, MECHANISM, False)


@pytest.mark.parametrize(
    ("made", "start", "state", "upto", "releases"),
    [
        ("code", 0, "new", 3, 5),  # the same releases
        ("code", 0, "new", 7, 7),
        ("other code", 0, "new", 3, 5 + 3),
        ("other code", 0, "new", 7, 5 + 7),
        ("", 0, "new", 5, 5 + 5),  # where nothing repeats
        ("code", 0, "other weights", 5, 5 + 5),
        ("code", 2, "saved", 5, 5 + 3),
    ],
)
def test_a_ledger_that_is_set_aside_counts_all_that_is_not_the_same_release(
    path: Path, made: str, start: int, state: str, upto: int, releases: int
) -> None:
    run_process(path, "code", 0, "new", 5)
    set_aside(path)
    other, again = run_process(path, made, start, state, upto)
    is_same = releases == max(5, upto)
    assert (other.generation == "", again == 0) == (is_same, is_same)
    assert steps_in(path) == list(range(start, upto))  # its own file is whole all the same
    assert other.releases_before(start) == (0 if is_same else 5)
    assert other.releases_before(upto) == (upto if is_same else releases)
    for held in (other, reopen(path, at_least=other.position), other.copy()):
        assert (held.releases, held.position) == (releases, other.position)
    assert count_releases([path, *list_set_aside(path)]) == releases
    set_aside(path)
    third, _ = run_process(
        path, made or "third code", start, state, upto
    )  # the second's, if it repeats
    assert third.releases == releases + (0 if made else upto - start)
    (path.parent / "ledger.jsonl.1").unlink()
    if not is_same:
        with pytest.raises(LedgerError, match="truncated"):  # a count that shrank
            Ledger(path, MECHANISM, True, third.position)


def test_steps_that_are_left_are_counted_before_they_are_taken(path: Path) -> None:
    run_process(path, "code", 0, "new", 5)
    ledger = Ledger(path, MECHANISM, True)
    ledger.choose_generation("code", 0, "new")
    assert (ledger.releases_after(0, 8), ledger.releases_after(7, 8)) == (8, 6)
    assert (ledger.releases_after(0, 3), ledger.releases_after(8, 7)) == (5, 5)
    # Without a look at each step: a run of so many epochs took all memory before its first step.
    assert ledger.releases_after(2, 2 * 10**10) == 2 * 10**10
    ledger.choose_generation("other code", 0, "new")
    assert ledger.releases_after(0, 8) == 5 + 8
    ledger.close()


def test_what_is_set_aside_is_counted_though_it_is_damaged(path: Path) -> None:
    reopen(path).path.with_name("ledger.jsonl.1").write_text("not json\nnor this\n")
    path.unlink()
    assert reopen(path, repeatable=False).earlier == 2
    path.with_name("ledger.jsonl.1").unlink()
    path.unlink()
    for secure in (True, False):
        run_process(path, "code", 0, "new", 5, secure=secure)
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        damages = [
            whole[:-20] + b"\xff\nnot json\n[]\n",
            whole[:-20] + bytes(20),
            b"".join([*lines[:2], bytes(len(lines[2])), *lines[3:]]),
            bytes(len(whole)),
            b"".join(lines[1:]),
        ]
        for damaged in damages:
            path.with_name("ledger.jsonl.1").write_bytes(damaged)
            path.unlink()
            assert 6 <= run_process(path, "code", 0, "new", 1, secure=secure)[0].releases <= 12
        path.with_name("ledger.jsonl.1").unlink()
        path.unlink()


def test_a_long_ledger_of_many_starts_counts_as_its_steps_one_by_one(path: Path) -> None:
    """Runs of steps are kept, not steps: what is counted is that of a plain list."""
    plain: list[tuple[int, str]] = []
    for made, step, upto in [("a", 0, 9), ("b", 3, 7), ("a", 0, 11), ("c", 5, 6), ("b", 3, 9)]:
        ledger = Ledger(path, MECHANISM, True)
        ledger.choose_generation(made, step, "new")
        assert ledger.num_to_count_again in (0, len({done for done, _ in plain if done >= step}))
        for number in range(step, upto):
            if not ledger.has_released(number):
                plain.append((number, ledger.generation))
            ledger.append(number)
        ledger.close()
        for copy in (ledger, ledger.copy(), reopen(path)):
            copy.generation = ledger.generation
            for before in range(13):
                counted = [done < before or of != ledger.generation for done, of in plain]
                assert copy.releases_before(before) == sum(counted)
            assert [copy.has_released(n) for n in range(13)] == [
                ledger.has_released(n) for n in range(13)
            ]
        assert ledger.releases == len(plain)


@pytest.mark.parametrize("earlier", [0, 1])
def test_noise_of_releases_that_no_step_states_cannot_be_drawn_again(earlier: int) -> None:
    assert Tally(repeatable=True, earlier=earlier).has_other_noise == bool(earlier)
