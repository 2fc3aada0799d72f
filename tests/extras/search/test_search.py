"""A search from end to end: its trials are runs, its ε is theirs together, a kill costs nothing."""

import dataclasses
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("optuna")
from optuna.samplers import RandomSampler

from tests.accounting import by_dp_accounting
from tests.drivers import start
from tests.ledgers import steps_in
from tests.tasks.plugin import WORDS, register_task
from tests.test_cli import run as command
from zdp_bench import assets, cli, records
from zdp_bench.config import configured
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.experiments.sweep import run_one
from zdp_bench.extras.search import journal
from zdp_bench.extras.search import search as module
from zdp_bench.extras.search.report import sheet
from zdp_bench.extras.search.search import search
from zdp_bench.extras.search.space import read_search
from zdp_bench.records import Record
from zdp_bench.report import budget
from zdp_bench.tasks.metric import ACCURACY
from zdp_bench.training import evaluation, run
from zdp_bench.training.deletion import delete
from zdp_bench.training.spending import find_spendings, read_spending

WHOLE = ["recipe=quickstart", "trainer.epochs=1", "trainer.sample_rate=0.2", "model.hidden=[4]"]
# The claimed ε is not looked at here, and this accountant is quick.
WHOLE += ["threads=1", "accountant=gdp_clt"]
TINY = [*WHOLE, "dataset.validation_share=0.2"]
RATES = "optimizer.lr=tag(log,interval(0.05,2))"
STEPS = 5
UNIFORM = ["trainer.batch_size=100", "trainer.sample_rate=null"]


def carry_out(results: Path, *words: str, trials: int = 3, **options: Any) -> Record:
    words = (*TINY, f"paths.results={results}", *words)
    return search(read_search(words, trials=trials, **options), "nothing")[0]


def together(spent: list[tuple[float, int]], delta: float) -> float:
    """The ε of runs with batches of a fifth, (z, steps) of each."""
    return by_dp_accounting(*((z, 0.2, steps) for z, steps in spent), delta=delta)


def together_of(runs: list[Record]) -> float:
    spent = [(record.privacy.z, record.privacy.steps) for record in runs]
    return together(spent, runs[0].privacy.delta)


def test_the_best_is_chosen_by_validation_records_and_epsilon_is_of_all_runs_composed(
    tmp_path: Path,
) -> None:
    words = ["optimizer.lr=0.001,1", "algorithm.noise_multiplier=1.5,2.0"]
    search_record = carry_out(tmp_path, *words, sampler="grid", metric="loss")
    assert json.loads(next(tmp_path.glob("searches/*/search.json")).read_text()) == search_record
    assert (search_record["metric"], search_record["direction"]) == ("loss", "minimize")
    rates = [trial["values"]["optimizer.lr"] for trial in search_record["trials"]]
    scores = [trial["score"] for trial in search_record["trials"]]
    assert search_record["best"] == scores.index(min(scores)) + 1
    assert max(s for s, rate in zip(scores, rates, strict=True) if rate == "1") < max(scores)
    assert all(trial["score"] != trial["test"] for trial in search_record["trials"])

    every = records.read_all(tmp_path)
    assert {line["run"] for line in search_record["trials"]} == {record.run for record in every}
    assert len(every) == 3
    assert len({record.privacy.z for record in every}) == 2
    assert search_record["privacy"]["epsilon_all"] == pytest.approx(together_of(every), rel=3e-3)
    assert search_record["privacy"]["epsilon_all_unit"] > search_record["privacy"]["epsilon_all"]


def test_the_best_trial_of_a_plug_in_task_has_the_least_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_task(monkeypatch)
    words = [*WORDS, "algorithm.noise_multiplier=0.01", "optimizer.lr=1e-9,1"]
    search_record = carry_out(tmp_path, *words, sampler="grid", trials=2)
    assert (search_record["metric"], search_record["direction"]) == ("mae", "minimize")
    scores = [trial["score"] for trial in search_record["trials"]]
    assert scores[search_record["best"] - 1] == min(scores) < max(scores)
    assert sheet(search_record).numbers[0]["trial"] == search_record["best"]


def test_a_trial_that_is_drawn_again_otherwise_counts_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, say: it has other noise."""
    carry_out(tmp_path, RATES, trials=2)
    (path, _) = sorted(tmp_path.glob("runs/*/*/record.json"))
    path.unlink()
    (path.parent / "checkpoint.pt").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(run, "execution_digest", lambda *_: "another machine")
        search_record = carry_out(tmp_path, RATES, trials=2)
    spent = [(r.privacy.z, r.privacy.steps) for r in records.read_all(tmp_path)]
    assert sorted(steps for _, steps in spent) == [STEPS, 2 * STEPS]
    expected = together(spent, search_record["privacy"]["delta"])
    assert search_record["privacy"]["epsilon_all"] == pytest.approx(expected, rel=3e-3)


def test_the_command_for_other_seeds_names_a_recipe_file_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_digits.yaml").write_text((assets.RECIPES / "quickstart.yaml").read_text())
    words = ["recipe=./own_digits.yaml", *TINY[1:], "optimizer.lr=0.5,1"]
    search_record = search(read_search(words), "nothing")[0]
    again = shlex.split(sheet(search_record).notes[-1].partition(": zdp-bench ")[2])
    assert again[:3] == ["run", "-m", "recipe=./own_digits.yaml"]
    assert configured(again[2:-1]).recipe == "own_digits"


@pytest.mark.parametrize("epsilon", [None, 2.0])
def test_a_search_ends_with_commands_that_export_the_best_run_and_repeat_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], epsilon: float | None
) -> None:
    words = ["optimizer.lr=0.001,1", "seed=4"]
    search_record = carry_out(tmp_path, *words, sampler="grid", trials=2, epsilon=epsilon)
    (best,) = [line for line in search_record["trials"] if line["trial"] == search_record["best"]]
    best_line, export, again = sheet(search_record).notes[-3:]
    assert f"quickstart/{best['run'][:8]}, validation accuracy {best['score']:.4f}" in best_line
    words = shlex.split(export.partition(": zdp-bench ")[2])
    words[words.index("--to") + 1] = str(tmp_path / "best")
    assert command(capsys, *words)[0] == 0
    assert (tmp_path / "best").is_dir()
    words = shlex.split(again.partition(": zdp-bench ")[2])
    assert words[-1] == "seed=1,2,3"
    code, out, _ = command(capsys, *words[:1], *words[2:-1], "seed=4")
    assert (code, "done before" in out) == (0, True), "the same run, with its own seed"


def test_epsilon_is_that_of_the_whole_search(tmp_path: Path) -> None:
    search_record = carry_out(
        tmp_path, RATES, "algorithm.max_grad_norm=0.3,1.0", epsilon=1.0, trials=2
    )
    assert 0.999 < search_record["privacy"]["epsilon_all"] <= 1.0
    for record in records.read_all(tmp_path):
        assert record.privacy.epsilon_tight < 1.0
        assert record.stopped_by == "epochs"
        assert record.privacy.steps == STEPS


def test_trials_with_other_steps_share_what_the_trials_before_have_left(tmp_path: Path) -> None:
    """The last one, which takes the most steps, was never run."""
    search_record = carry_out(tmp_path, "trainer.epochs=1,2,3", epsilon=1.0, sampler="grid")
    assert [trial["state"] for trial in search_record["trials"]] == ["done"] * 3
    assert 0.99 < search_record["privacy"]["epsilon_all"] <= 1.0
    assert {record.stopped_by for record in records.read_all(tmp_path)} == {"epochs"}


def test_a_trial_that_would_pass_epsilon_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run has spent ε after the search has begun."""
    run_trial = module._run_trial

    def run_both(*arguments: Any) -> Any:
        outcome = run_trial(*arguments)
        run_one([*WHOLE, "algorithm.noise_multiplier=1.0", f"paths.results={tmp_path}"])
        return outcome

    monkeypatch.setattr(module, "_run_trial", run_both)
    search_record = carry_out(tmp_path, "optimizer.lr=0.1,1", epsilon=1.0, trials=2, sampler="grid")
    assert len(records.read_all(tmp_path)) == 2
    assert len(search_record["trials"]) == 1
    assert not search_record["finished"]
    assert "with trial 2 it would be" in " ".join(sheet(search_record).notes)


def test_two_searches_at_once_do_not_both_spend_the_rest_of_an_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins after the first has checked its ε, and before its first step."""
    carry_out_run = module.carry_out

    def begin_another(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(module, "carry_out", carry_out_run)
        with pytest.raises(UserError, match="so nothing useful is left"):
            carry_out(tmp_path, "optimizer.lr=0.3,0.4", epsilon=2.0, trials=1)
        return carry_out_run(*arguments, **options)

    monkeypatch.setattr(module, "carry_out", begin_another)
    search_record = carry_out(tmp_path, "optimizer.lr=0.1,0.2", epsilon=2.0, trials=1)
    assert len(records.read_all(tmp_path)) == 1
    assert search_record["privacy"]["epsilon_all"] <= 2.0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["algorithm=zeta_dp_sgd,sgd"], "algorithm=sgd: this algorithm adds no noise"),
        (["optimizer.momentum=interval(0,1.8)"], "^optimizer.momentum=1.8: must be less"),
        (["trainer=poisson,uniform", *UNIFORM], "so they have no common ε"),
        (["optimizer.lr=0.1,0.2", "force=true"], "a search keeps its finished trials"),
    ],
)
def test_what_would_end_a_search_later_ends_it_before_it_spends(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    options = read_search([*TINY, f"paths.results={tmp_path}", *words], trials=2, epsilon=2.0)
    with pytest.raises(UserError, match=sentence):
        search(options, "nothing")
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_earlier_runs_of_the_recipe_leave_less_room_or_none(tmp_path: Path) -> None:
    for seed in (7, 8):
        noise = "algorithm.noise_multiplier=1.5"
        run_one([*WHOLE, noise, f"seed={seed}", f"paths.results={tmp_path / 'beside'}"])
    results = tmp_path / "beside"
    earlier = records.read_all(results)
    alone = carry_out(tmp_path / "alone", RATES, epsilon=3.0, trials=2)
    search_record = carry_out(results, RATES, epsilon=3.0, trials=2)
    assert len(search_record["trials"]) == 2
    every = records.read_all(results)
    assert search_record["privacy"]["epsilon_all"] == pytest.approx(together_of(every), rel=3e-3)
    assert 2.99 < search_record["privacy"]["epsilon_all"] <= 3.0
    with_more_noise = min(record.privacy.z for record in every if record not in earlier)
    assert with_more_noise > records.read_all(tmp_path / "alone")[0].privacy.z
    assert alone["privacy"]["runs"] == 2
    again = carry_out(results, RATES, epsilon=3.0, trials=2)
    assert again == search_record
    epsilon = together_of(earlier)
    with pytest.raises(UserError, match=r"the 4 runs of .* already, so nothing useful is left"):
        carry_out(results, RATES, epsilon=epsilon, trials=3)
    # A search comes within rounding of its ε, and left the next one a noise multiplier of 300.
    with pytest.raises(UserError, match="so nothing useful is left"):
        carry_out(results, RATES, epsilon=3.0, trials=3)


def test_a_search_goes_on_with_its_own_noise_after_runs_that_came_between(tmp_path: Path) -> None:
    """Its trials are found again, whatever was spent since."""
    search_record = carry_out(tmp_path, RATES, epsilon=2.0, trials=2)
    run_one([*WHOLE, "algorithm.noise_multiplier=1.0", "seed=7", f"paths.results={tmp_path}"])
    again = carry_out(tmp_path, RATES, epsilon=2.0, trials=2)
    assert again["trials"] == search_record["trials"]
    assert again["privacy"]["epsilon_all"] > 2.0
    assert len(records.read_all(tmp_path)) == 3


def rename_a_trial(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a message of a damaged ledger advises."""
    home = min(path.parent for path in results.glob("runs/*/*/record.json"))
    renamed = home.rename(home.with_name("before"))
    # With equal times, the record of the trial's second run could be the same, as that of a copy.
    document = records.read_document(renamed / "record.json")
    assert document is not None
    document["measured"]["train_seconds"] += 1
    records.write(renamed / "record.json", document)


def propose_otherwise(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another version of Optuna may."""
    monkeypatch.setattr(module, "RandomSampler", lambda seed: RandomSampler(seed + 77))


@pytest.mark.parametrize("act", [rename_a_trial, propose_otherwise])
def test_no_run_of_an_earlier_call_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[..., None]
) -> None:
    carry_out(tmp_path, RATES, trials=2, sampler="random")
    act(tmp_path, monkeypatch)
    search_record = carry_out(tmp_path, RATES, trials=2, sampler="random")
    spendings, _ = find_spendings(tmp_path)
    (line,) = budget.sheet(spendings, None, [], tmp_path).numbers
    assert search_record["privacy"]["epsilon_all"] == line["epsilon"]
    assert search_record["privacy"]["epsilon_all_unit"] == line["epsilon_unit"]
    spent = [(spending.spent.z, spending.spent.steps) for spending in spendings]
    expected = together(spent, search_record["privacy"]["delta"])
    assert line["epsilon"] == pytest.approx(expected, rel=3e-3)
    assert search_record["privacy"]["runs"] == len(spendings) > 2


def test_a_search_that_is_stopped_as_it_continues_still_lists_every_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trial's line replaced all others, whose noise was then chosen anew after a kill."""
    search_record = carry_out(tmp_path, RATES, epsilon=3.0, trials=3, sampler="random")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_run_trial", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            carry_out(tmp_path, RATES, epsilon=3.0, trials=3, sampler="random")
    again = carry_out(tmp_path, RATES, epsilon=3.0, trials=3, sampler="random")
    assert again["trials"] == search_record["trials"]
    assert again["privacy"]["epsilon_all"] == search_record["privacy"]["epsilon_all"]


def run_another(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_one([*WHOLE, "algorithm.noise_multiplier=4.0", f"paths.results={results}"])


@pytest.mark.parametrize("act", [propose_otherwise, run_another])
def test_new_trials_share_what_the_saved_ones_and_other_runs_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[..., None]
) -> None:
    """The last one was never run: its noise ignored replaced trials, or that others had less."""
    run_trial = module._run_trial

    def run_only_first(*arguments: Any) -> Any:
        if records.read_all(tmp_path):
            raise KeyboardInterrupt
        return run_trial(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_run_trial", run_only_first)
        with pytest.raises(KeyboardInterrupt):
            carry_out(tmp_path, RATES, epsilon=3.0, trials=3, sampler="random")
    act(tmp_path, monkeypatch)
    search_record = carry_out(tmp_path, RATES, epsilon=3.0, trials=3, sampler="random")
    assert [trial["state"] for trial in search_record["trials"]] == ["done"] * 3
    assert 2.99 < search_record["privacy"]["epsilon_all"] <= 3.0


def test_a_trial_that_is_resumed_keeps_what_it_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its limit, the steps before the kill counted twice until it took the next one."""
    words = [RATES, "privacy.secure=true"]

    def kill(_: Any) -> None:
        raise KeyboardInterrupt

    for place in ("zdp_bench.training.run.Loop._count_step", "zdp_bench.training.run.Loop.restore"):
        with monkeypatch.context() as patch:
            patch.setattr(place, lambda *_: kill(_))
            with pytest.raises(KeyboardInterrupt):
                carry_out(tmp_path, *words, epsilon=3.0, trials=1, sampler="random")
        (ledger,) = tmp_path.glob("runs/*/*/ledger.jsonl")
        assert len(steps_in(ledger)) == 1
        assert read_spending(ledger.parent).spent.steps == STEPS


@pytest.mark.parametrize("epsilon", [None, 3.0])
@pytest.mark.parametrize("number", [1, 3])
def test_a_trial_whose_run_was_deleted_keeps_its_score_and_still_counts(
    tmp_path: Path, epsilon: float | None, number: int
) -> None:
    """It spent its ε again; with a limit, the search ended before it, or with no table at all."""
    words = ["optimizer.lr=0.1,0.5,1", "privacy.secure=true"]
    before = carry_out(tmp_path, *words, sampler="grid", epsilon=epsilon)
    assert before["best"] == 3
    trial = before["trials"][number - 1]
    delete(records.folder(tmp_path, "quickstart", trial["run"]))
    after = carry_out(tmp_path, *words, sampler="grid", epsilon=epsilon)
    assert after["trials"][number - 1] == trial | {"state": "deleted"}
    trial["state"] = "deleted"
    assert after == before
    notes = "\n".join(sheet(after).notes)
    assert f"Deleted runs: those of trials {number}." in notes
    assert ("Export it: " in notes) == (number == 1)
    run_again = [*run_of(after, trial), f"paths.results={tmp_path}"]
    with pytest.raises(UserError, match="have a tight ε of"):
        run_one([*run_again, "privacy.total_budget=0.001"])  # it spent its ε again after this
    assert carry_out(tmp_path, *words, sampler="grid", epsilon=epsilon) == before
    run_one(run_again)
    again = carry_out(tmp_path, *words, sampler="grid", epsilon=epsilon)
    assert again["trials"][number - 1]["state"] == "done"
    assert again["privacy"]["runs"] == 4


def run_of(search_record: Any, trial: Any) -> list[str]:
    """Return the overrides of a trial's run."""
    values = [f"{key}={value}" for key, value in trial["values"].items()]
    return [search_record["recipe_as_typed"], *search_record["fixed"], *values, *trial["noise"]]


@pytest.mark.parametrize("is_repeated", [False, True])
def test_new_trials_after_a_deleted_one_have_the_noise_of_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_repeated: bool
) -> None:
    """Its run was taken for one before the search, so that the last trial had more noise.

    If it was carried out again, which spends its ε again, the last trial had too little noise and
    never began.
    """
    words = ["optimizer.lr=0.1,0.5,1"]
    begin = module._begin_trial

    def stop_before_third(search_journal: Any, trial: Any, *others: Any) -> None:
        if trial["trial"] == 3:
            raise KeyboardInterrupt
        begin(search_journal, trial, *others)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_begin_trial", stop_before_third)
        with pytest.raises(KeyboardInterrupt):
            carry_out(tmp_path, *words, sampler="grid", epsilon=3.0)
    (path,) = tmp_path.glob("searches/*/search.json")
    stopped = json.loads(path.read_text())
    first_trial = stopped["trials"][0]
    delete(records.folder(tmp_path, "quickstart", first_trial["run"]))
    if is_repeated:
        run_one([*run_of(stopped, first_trial), f"paths.results={tmp_path}"])
    search_record = carry_out(tmp_path, *words, sampler="grid", epsilon=3.0)
    trials = search_record["trials"]
    states = [trial["state"] for trial in trials]
    assert states == ["done" if is_repeated else "deleted", "done", "done"]
    assert (trials[0]["noise"] == trials[2]["noise"]) != is_repeated
    assert 2.99 < search_record["privacy"]["epsilon_all"] <= 3.0


def test_a_search_whose_first_trial_cannot_be_repeated_still_shows_the_others(
    tmp_path: Path,
) -> None:
    """A first trial without its folder, and no ε left for it, ended the search without a table."""
    words = ["optimizer.lr=0.5,1"]
    before = carry_out(tmp_path, *words, sampler="grid", trials=2, epsilon=3.0)
    shutil.rmtree(records.folder(tmp_path, "quickstart", before["trials"][0]["run"]))
    run_one([*WHOLE, "algorithm.noise_multiplier=1.0", "seed=7", f"paths.results={tmp_path}"])
    after = carry_out(tmp_path, *words, sampler="grid", trials=2, epsilon=3.0)
    assert after["trials"] == before["trials"]
    assert "so the search ends before this trial" in after["ended_by"]


def test_steps_of_an_unknown_run_refuse_a_search(tmp_path: Path) -> None:
    """A ledger without its run's files was left out of the search's ε."""
    carry_out(tmp_path, RATES, trials=1, sampler="random")
    (record,) = tmp_path.glob("runs/*/*/record.json")
    record.unlink()
    record.with_name("spending.json").unlink()
    with pytest.raises(UserError, match="contains steps of an unfinished run"):
        carry_out(tmp_path, RATES, epsilon=100.0, trials=2, sampler="random")


def diverge_at_rate_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every run with a learning rate of 1 diverge."""
    refuse = evaluation.refuse_divergence

    def diverge(finite: bool, epoch: Any, step: int, rate: Any) -> None:
        refuse(finite and rate != 1, epoch, step, rate)

    monkeypatch.setattr("zdp_bench.training.run.refuse_divergence", diverge)


def test_a_trial_that_diverges_is_no_end_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverge_at_rate_1(monkeypatch)
    search_record = carry_out(tmp_path, "optimizer.lr=1,0.1", sampler="grid")
    assert [line["state"] for line in search_record["trials"]] == ["failed", "done"]
    assert search_record["best"] == 2
    alone = records.read_all(tmp_path)[0].privacy.epsilon_tight
    assert search_record["privacy"]["epsilon_all"] > 1.1 * alone


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_diverged_trial_with_secure_noise_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """It spent its ε again, or was done with the score of an untrained model.

    And it counted twice, so that it alone spent the ε of both trials.
    """
    diverge_at_rate_1(monkeypatch)
    words = ["optimizer.lr=1,0.1", "privacy.secure=true"]
    search_record = carry_out(tmp_path, *words, sampler="grid", epsilon=2.0)
    assert [trial["state"] for trial in search_record["trials"]] == ["failed", "done"]
    assert 1.99 < search_record["privacy"]["epsilon_all"] <= 2.0
    (path,) = tmp_path.glob("searches/*/search.json")
    if not is_listed:  # killed before
        failed, done = search_record["trials"]
        records.write(path, search_record | {"trials": [failed | {"state": "open"}, done]})
    again = carry_out(tmp_path, *words, sampler="grid", epsilon=2.0)
    # Without the list, only the ledger is left, which does not state why the run ended.
    reason = "diverged" if is_listed else "no ε left for a first step"
    failed, done = search_record["trials"]
    assert failed["reason"] == "diverged"
    assert again["trials"] == [failed | {"reason": reason}, done]
    assert again["privacy"]["epsilon_all"] == search_record["privacy"]["epsilon_all"]
    ledgers = tmp_path.glob("runs/*/*/ledger.jsonl")
    assert [len(steps_in(ledger)) for ledger in ledgers] == [STEPS, STEPS]


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_search_goes_on_in_a_moved_results_folder(plus: str) -> None:
    words = ["recipe=quickstart", "optimizer.lr=0.1,1"]
    places = [f"{plus}paths.results={name}" for name in "ab"]
    names = {read_search([*words, place, f"threads={n}"]).name for n, place in enumerate(places, 1)}
    assert len(names) == 1
    assert read_search([*words, places[0], "seed=9"]).name not in names
    assert read_search([*words, places[0], f"{plus}paths.data=b"]).name not in names


def test_a_search_on_other_data_leaves_the_record_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data may be chosen by ZDP_DATA. The search went on with the noise of the first."""
    first = carry_out(tmp_path, RATES, trials=1)
    load = module.load_data

    def load_others(config: Run) -> Splits:
        return dataclasses.replace(load(config), digest="0" * 64)

    monkeypatch.setattr(module, "load_data", load_others)
    with pytest.raises(UserError, match=r"search\.json: is of a search on other data"):
        carry_out(tmp_path, RATES, trials=1)
    assert json.loads(next(tmp_path.glob("searches/*/search.json")).read_text()) == first


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["optimizer.lr=0.1,abc"], "^optimizer.lr=abc: must be a valid number"),
        (["optimizer.momentum=0.5,0.9", "optimizer.lr=0.1,0.2,-1"], "^optimizer.lr=-1: "),
        (["model=complex_mlp,real_mlp"], "^model=real_mlp: has real weights, but the examples"),
    ],
)
def test_every_listed_value_is_checked_before_the_first_trial(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    """The trials before that of a wrong value had spent their ε."""
    whole = [word for word in TINY if not word.startswith("model.hidden")]
    options = read_search([*whole, f"paths.results={tmp_path}", "algorithm=sgd", *words])
    with pytest.raises(UserError, match=sentence):
        search(options, "nothing")
    assert not list(tmp_path.rglob("record.json"))


@pytest.mark.parametrize("epsilon", [None, 2.0])
def test_a_trial_whose_values_fail_together_only_fails_and_spends_nothing(
    tmp_path: Path, epsilon: float | None
) -> None:
    """The search ended there, also when it was called again."""
    words = ["optimizer.momentum=0.9,0,0.5", "optimizer.nesterov=false,true"]
    search_record = carry_out(tmp_path, *words, sampler="grid", trials=5, epsilon=epsilon)
    assert [trial["state"] for trial in search_record["trials"]] == [
        *3 * ["done"],
        "failed",
        "done",
    ]
    failed = search_record["trials"][3]
    assert failed["reason"] == (
        "optimizer=sgd: Nesterov momentum requires a momentum and zero dampening."
    )
    finished = records.read_all(tmp_path)
    assert len(finished) == search_record["privacy"]["runs"] == 4
    assert search_record["privacy"]["epsilon_all"] == pytest.approx(together_of(finished), rel=3e-3)
    assert carry_out(tmp_path, *words, sampler="grid", trials=5, epsilon=epsilon) == search_record


def test_a_trial_that_could_not_begin_begins_once_the_reason_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed failed for good, and so did an interrupted one, whose run had spent ε."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_run_trial", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            carry_out(tmp_path, RATES, sampler="random")
    with monkeypatch.context() as patch:
        misfits = Mock(side_effect=["weights.pt: does not exist.", None])
        patch.setattr(module, "_find_misfit", misfits)
        search_record = carry_out(tmp_path, RATES, sampler="random")
    assert [trial["state"] for trial in search_record["trials"]] == ["done", "failed", "done"]
    search_record = carry_out(tmp_path, RATES, sampler="random")
    assert [trial["state"] for trial in search_record["trials"]] == ["done"] * 3


def test_memory_that_ran_out_ends_a_search_and_fails_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = UserError("model=mlp: needs more memory than is available (out of memory).")
    monkeypatch.setattr(module.Setup, "of", Mock(side_effect=error))
    with pytest.raises(UserError, match="needs more memory"):
        carry_out(tmp_path, RATES, sampler="random")
    assert not list(tmp_path.rglob("search.json"))


def test_each_trial_names_its_run_if_representations_differ(tmp_path: Path) -> None:
    """All trials had the data of the first, so `export` did not find the others' runs."""
    words = ["recipe=quickstart", "dataset=synthetic_images", "dataset.shape=[1,16,16]"]
    words += ["model=real_mlp", "model.hidden=[]", "algorithm=dp_sgd", "trainer.epochs=1"]
    words += ["representation=scattering", "representation.groups=1", "representation.J=1,2"]
    options = read_search([*words, f"paths.results={tmp_path}", "threads=1"], epsilon=3.0)
    record, _ = search(options, "nothing")
    runs_of_trials = {trial["run"] for trial in record["trials"]}
    assert runs_of_trials == {run.run for run in records.read_all(tmp_path)}
    assert search(options, "nothing")[0] == record


def test_a_search_that_is_refused_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="adds no noise"):
        carry_out(tmp_path, "optimizer.lr=1,2", "algorithm=sgd", epsilon=1.0)
    assert not list(tmp_path.rglob("search.json"))


def test_why_a_search_ended_is_not_hidden_by_a_record_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        monkeypatch.setattr(journal, "make_record", Mock(side_effect=UserError("damaged")))
        raise UserError("why it ended")

    monkeypatch.setattr(module, "_run_trial", fail)
    with pytest.raises(UserError, match="why it ended"):
        carry_out(tmp_path, "optimizer.lr=1,2", sampler="grid", trials=2)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_every_seed_of_a_recipe_proposes_trials(seed: int, sampler: Any) -> None:
    words = ["recipe=quickstart", "optimizer.lr=0.1,1", f"seed={seed}"]
    options = read_search(words, sampler, trials=2)
    study = module.create_study(options, configured(options.overrides_of_first_values()), ACCURACY)
    assert study.ask(options.searched).params["optimizer.lr"] in ("0.1", "1")


def test_a_search_that_was_killed_goes_on_and_spends_nothing_twice(tmp_path: Path) -> None:
    words = [*TINY, RATES, f"paths.results={tmp_path / 'killed'}", "execution.checkpoint_steps=1"]

    def begin() -> None:
        step, taken = run.private_step, list[int]()

        def die(*arguments: Any) -> None:
            taken.append(1)
            if len(taken) == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            step(*arguments)

        run.private_step = die
        cli.main(["search", *words, "--trials", "2"])

    done = start(begin).wait()
    assert done.returncode == -9, done.stderr
    assert len(records.read_all(tmp_path / "killed")) == 1
    killed, whole = (
        carry_out(tmp_path / name, RATES, "execution.checkpoint_steps=1", trials=2)
        for name in ("killed", "whole")
    )
    steps = [record.privacy.steps for record in records.read_all(tmp_path / "killed")]
    assert sum(steps) == 2 * STEPS
    assert killed | {"fixed": []} == whole | {"fixed": []}  # the results folder is in it


def test_fewer_trials_than_were_made_lower_no_epsilon(tmp_path: Path) -> None:
    search_record = carry_out(tmp_path, RATES, sampler="random", trials=2)
    assert (
        carry_out(tmp_path, RATES, sampler="random", trials=1)["privacy"]
        == search_record["privacy"]
    )
    assert len(records.read_all(tmp_path)) == 2


def test_a_failed_trial_is_not_forgotten_by_a_call_with_fewer_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third call ran it again, with new noise, and the search's ε rose."""
    diverge_at_rate_1(monkeypatch)
    words = ["optimizer.lr=0.1,1", "privacy.secure=true"]
    first, fewer, again = (
        carry_out(tmp_path, *words, sampler="grid", trials=trials) for trials in (2, 1, 2)
    )
    assert [trial["state"] for trial in first["trials"]] == ["done", "failed"]
    assert fewer | {"asked": 2} == again == first
    ledgers = tmp_path.glob("runs/*/*/ledger.jsonl")
    assert [len(steps_in(ledger)) for ledger in ledgers] == [STEPS, STEPS]


def test_the_command_says_what_was_spent_and_refuses_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = command(capsys, "search", *TINY, "optimizer.lr=0.1,1", "--sampler", "grid")
    assert code == 0
    assert "ε of the whole search: " in out
    assert "trial 2 of 2: optimizer.lr=1: validation accuracy 0." in out
    (page,) = tmp_path.glob("results/searches/*/trials.md")
    assert "ε of the whole search: " in page.read_text()
    for words, sentence in [
        (["optimizer.lt=1,2"], "key 'optimizer.lt' is not known"),
        (["optimizer.lr=1,2", "--metric", "acuracy"], "Did you mean 'accuracy'?"),
        (["optimizer.lr=1,2", "federated.nodes=2"], "zdp-bench search uses one training set"),
        (["optimizer.lr=1,2", "algorithm=sgd", "--epsilon", "1"], "adds no noise"),
    ]:
        code, _, err = command(capsys, "search", *TINY, *words, "--trials", "2")
        assert (code, sentence in err, err.count("\n")) == (2, True, 1), err
    by_nothing = [*WHOLE, "dataset.validation_share=null", "optimizer.lr=1,2", "--trials", "2"]
    assert "validation_share=null: a search ch" in command(capsys, "search", *by_nothing)[2]


def test_trials_and_jobs_that_do_not_learn_are_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reason = "the model does not seem to learn: training diverged"
    for words, job in ((["search"], "trial 2"), (["run", "-m"], "optimizer.lr=1000")):
        code, out, _ = command(capsys, *words, *TINY, "optimizer.lr=0.1,1000")
        assert code == 0
        (line,) = [line for line in out.splitlines() if reason in line]
        assert f"{job}: " in line, line


SEQUENCES = ["recipe=complex_mri_sequences", "dataset=mri_sequences_synthetic", "trainer.epochs=1"]
SEQUENCES += ["dataset.patients=40", "trainer.sample_rate=0.2"]


@pytest.mark.parametrize("words", [WHOLE, SEQUENCES])
def test_a_data_set_without_validation_examples_can_be_searched(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, "optimizer.lr=0.1,0.2", f"paths.results={tmp_path}", "--trials", "1"]
    code, out, err = command(capsys, "search", *words)
    assert code == 0, err
    assert out.startswith("dataset.validation_share=0.1: this fraction of the owners is held out")
    (record,) = records.read_all(tmp_path)
    assert f"Chosen on {record.data.validation} validation examples, which no ε" in out
    assert len((tmp_path / "records.csv").read_text().splitlines()) == 2
