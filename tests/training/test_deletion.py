"""Deleted runs: their files go, and what they have spent stays."""

from pathlib import Path

import pytest

from tests.test_cli import run as run_command
from tests.training.test_run import Silent, carry_out, configured
from zdp_bench import records
from zdp_bench.disk import hold_lock
from zdp_bench.errors import Busy, UserError
from zdp_bench.privacy.composition import Spending
from zdp_bench.report import budget, results
from zdp_bench.training.deletion import delete, find_homes
from zdp_bench.training.interrupts import Stopped
from zdp_bench.training.run import execute
from zdp_bench.training.run_folder import Outcome
from zdp_bench.training.spending import find_spendings


class Interrupting(Silent):
    """Stops a run after seven of its twenty steps."""

    def stepped(self, step: int) -> None:
        if step == 7:
            raise Stopped(15)


def spendings(folder: Path) -> list[Spending]:
    listed_spendings, unknown = find_spendings(folder)
    assert unknown == []
    return listed_spendings


def delete_run(folder: Path, word: str) -> None:
    (home,) = find_homes(folder, [word])
    delete(home)


def epsilon_together(folder: Path) -> object:
    (line,) = budget.sheet(spendings(folder), None, [], folder).numbers
    return line["epsilon"]


@pytest.fixture
def done(tmp_path: Path) -> Outcome:
    return carry_out(tmp_path, "name=first")


@pytest.mark.parametrize("secure", [False, True])
def test_what_a_deleted_run_has_spent_still_counts(tmp_path: Path, secure: bool) -> None:
    words = [f"privacy.secure={secure}"]
    outcome = carry_out(tmp_path, *words)
    before, (spent,) = epsilon_together(tmp_path), spendings(tmp_path)
    delete_run(tmp_path, outcome.path.parent.name)
    (after,) = spendings(tmp_path)
    assert (after.spent, after.sources, after.secure) == (spent.spent, spent.sources, secure)
    assert after.finished
    assert epsilon_together(tmp_path) == before
    assert records.read_all(tmp_path) == []
    left = {path.name for path in after.home.rglob("*")}
    assert left == {"spending.json", "ledger.jsonl.1"}
    again = carry_out(tmp_path, *words)
    assert not again.was_recorded
    assert [spending.spent for spending in spendings(tmp_path)] == [spent.spent] * 2
    assert again.record.document["metrics"].keys() == outcome.record.document["metrics"].keys()


@pytest.mark.parametrize("secure", [False, True])
def test_an_unfinished_run_has_spent_the_steps_it_took(tmp_path: Path, secure: bool) -> None:
    with pytest.raises(Stopped):
        execute(configured(tmp_path, f"privacy.secure={secure}"), Interrupting())
    (planned,) = spendings(tmp_path)
    assert planned.spent.steps >= 20
    delete_run(tmp_path, "quickstart")
    (spent,) = spendings(tmp_path)
    assert (spent.spent.steps, spent.finished) == (7, True)
    shown = results.sheet(tmp_path)
    assert not any("Not finished" in note for note in shown.notes)
    notes = budget.sheet(spendings(tmp_path), None, [], tmp_path).notes
    assert "Deleted runs: 1; what they spent is counted." in notes


def test_a_total_budget_counts_deleted_runs(tmp_path: Path, done: Outcome) -> None:
    delete_run(tmp_path, "first")
    limit = f"privacy.total_budget={done.record.document['privacy']['epsilon_tight'] * 1.01}"
    with pytest.raises(UserError, match=r"1 runs in .* on files of phase_digits"):
        execute(configured(tmp_path, "seed=1", limit), Silent())


def test_a_run_of_a_clone_without_its_ledger_keeps_its_steps(tmp_path: Path, done: Outcome) -> None:
    for path in done.path.parent.iterdir():
        if path.name != "record.json":
            path.unlink()
    delete_run(tmp_path, "first")
    (spent,) = spendings(tmp_path)
    assert spent.spent.steps == done.record.document["privacy"]["steps"]


def test_only_one_run_that_no_process_is_at_is_deleted(tmp_path: Path, done: Outcome) -> None:
    carry_out(tmp_path, "seed=1")
    with pytest.raises(UserError, match=r"quickstart: .*2 runs"):
        find_homes(tmp_path, ["quickstart"])
    with pytest.raises(UserError, match="nothing: does not match any run"):
        find_homes(tmp_path, ["nothing"])
    home = done.path.parent
    with hold_lock(home.with_suffix(".lock")), pytest.raises(Busy):
        delete(home)
    assert records.read(done.path).document == done.record.document


def test_a_run_that_several_words_name_is_deleted_once(tmp_path: Path, done: Outcome) -> None:
    home = done.path.parent
    words = ["first", home.name[:4], done.record.run, f"quickstart/{done.record.run}", "first"]
    assert find_homes(tmp_path, words) == [home]


def test_records_csv_lacks_the_runs_that_were_deleted_before_an_error(
    tmp_path: Path, done: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = carry_out(tmp_path, "seed=1").path.parent
    records.rebuild_csv(tmp_path)
    with hold_lock(busy.with_suffix(".lock")):
        code, _, _ = run_command(capsys, "delete", "first", busy.name, f"--results={tmp_path}")
    assert code == 2
    rows = (tmp_path / "records.csv").read_text().splitlines()[1:]
    assert [row.rpartition(",")[2][:16] for row in rows] == [busy.name]


def test_the_command_says_what_still_counts(
    tmp_path: Path, done: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"--results={tmp_path}"
    code, out, _ = run_command(capsys, "delete", "first", where)
    assert code == 0
    assert "Its 20 steps on phase_digits still count: see `zdp-bench budget`." in out
    code, _, err = run_command(capsys, "delete", "first", where)
    assert (code, "first: does not match any run" in err) == (2, True)
