"""Budgets: `privacy.max_epsilon` ends a run before the step that would exceed it, `target_epsilon`
and `claimed_epsilon` find its noise, and no order of runs passes `total_budget`."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ledgers import steps_in
from tests.privacy.ledger_runs import write
from tests.training.test_run import Silent, carry_out, configured
from zdp_bench import records
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.extras.sharing.export import export
from zdp_bench.nn.state import state_digest
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.composition import Spending, SpentSteps, compose_epsilon, list_spent_steps
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.report.budget import describe_together, group_by_data, sheet
from zdp_bench.report.sheet import Sheet
from zdp_bench.training import setup
from zdp_bench.training.build import build_algorithm
from zdp_bench.training.plan import Plan
from zdp_bench.training.reservation import reserve
from zdp_bench.training.run import Outcome, execute
from zdp_bench.training.setup import load_data
from zdp_bench.training.spending import find_spendings
from zdp_bench.training.spending_file import FILE


class Killed(Silent):
    """Stops a run at its seventh step, as a kill does."""

    def stepped(self, step: int) -> None:
        super().stepped(step)
        if len(self.steps) == 7:
            raise ZeroDivisionError


UNIFORM = ["trainer=uniform", "trainer.sample_rate=null", "trainer.batch_size=140"]


def epsilon_at(record: records.Document, steps: int) -> float:
    """The tight ε of `steps` steps of what the record says was run."""
    privacy = record["privacy"]
    blocks = tuple(
        Block(**{**block, "shape": tuple(block["shape"]), "fft_dims": ()})
        for block in privacy["mechanism"]["blocks"]
    )
    mechanism = Mechanism(blocks, Sampling(**privacy["sampling"]))
    return tight_epsilon(mechanism, steps, privacy["delta"])


def test_a_run_ends_before_the_step_that_would_exceed_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, heard = "privacy.max_epsilon=1.2", Silent()
    outcome = execute(configured(tmp_path, budget), heard)
    record, home = outcome.record.document, outcome.path.parent
    privacy, epochs, steps = record["privacy"], record["epochs"], record["privacy"]["steps"]
    assert record["stopped_by"] == "budget"
    assert heard.steps == list(range(1, steps + 1))
    assert privacy["epsilon_tight"] == epsilon_at(record, steps) <= 1.2
    assert epsilon_at(record, steps + 1) > 1.2
    assert len(steps_in(home / "ledger.jsonl")) == steps == privacy["ledger"]["entries"]
    # the last weights are kept, and are those that were evaluated
    assert torch.load(home / "checkpoint.pt", weights_only=True)["step"] == steps
    assert [epoch["step"] for epoch in epochs] == [10, steps]
    assert epochs[-1]["accuracy"] == record["metrics"]["accuracy"] == record["headline"]["value"]
    assert epochs[-1]["epsilon_tight"] == privacy["epsilon_tight"]
    assert heard.evaluations[-1][:2] == (2, steps)  # the epoch under way

    def forbidden(*_: Any) -> Any:
        raise AssertionError("a training example was read")
        yield

    outcome.path.unlink()
    monkeypatch.setattr(setup, "micro_batches", forbidden)
    again = carry_out(tmp_path, budget).record.document  # from its checkpoint
    assert (again["epochs"], again["privacy"]) == (epochs, privacy)


def test_a_budget_for_the_whole_run_or_for_an_epoch_is_spent_to_its_end(
    finished: Outcome, tmp_path: Path
) -> None:
    whole, first = finished.record.document["privacy"], finished.record.document["epochs"][0]
    enough = carry_out(
        tmp_path / "a", f"privacy.max_epsilon={whole['epsilon_tight']}"
    ).record.document
    assert (enough["stopped_by"], enough["privacy"]["steps"]) == ("epochs", whole["steps"])
    stopped = carry_out(
        tmp_path / "b", f"privacy.max_epsilon={first['epsilon_tight']}"
    ).record.document
    ends = [(epoch["step"], epoch["epsilon_tight"]) for epoch in stopped["epochs"]]
    assert ends == [(10, first["epsilon_tight"])]  # once
    assert stopped["stopped_by"] == "budget"


@pytest.mark.parametrize("evaluate", ["each", "last"])
def test_a_budget_that_ends_with_an_epoch_leaves_the_last_weights_evaluated_and_saved(
    finished: Outcome, tmp_path: Path, evaluate: str
) -> None:
    first = finished.record.document["epochs"][0]
    outcome = carry_out(
        tmp_path,
        f"privacy.max_epsilon={first['epsilon_tight']}",
        f"execution.evaluate={evaluate}",
        "trainer.checkpoint_epochs=3",
    )
    record = outcome.record.document
    assert record["stopped_by"] == "budget"
    assert [epoch["step"] for epoch in record["epochs"]] == [first["step"]]
    saved = torch.load(outcome.path.parent / "checkpoint.pt", weights_only=True)
    assert saved["step"] == first["step"]
    assert state_digest(saved["model"]) == record["measured"]["weights"]["digest"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["max_epsilon=1e-9"], r"^privacy\.max_epsilon=1e-09: one step costs a tight ε of \d"),
        (
            ["max_epsilon=0.4", "federated.nodes=2", "federated.local_steps=9"],
            r"one round of federated\.local_steps=9",
        ),
    ],
)
def test_a_budget_too_small_for_one_step_is_refused(
    tmp_path: Path, words: list[str], message: str
) -> None:
    config = configured(tmp_path, f"privacy.{words[0]}", *words[1:])
    with pytest.raises(UserError, match=message) as refused:
        validate(config, trial=False)
    if config.federated.nodes is None:  # a federation is carried out by tests/extras/federated
        with pytest.raises(UserError, match=message):
            execute(config, Silent())
        assert not list(tmp_path.glob("runs/*/*/record.json"))
    named = re.search(r"ε of ([\d.]+)", str(refused.value))
    assert named
    enough = replace(config, privacy=replace(config.privacy, max_epsilon=float(named[1])))
    assert validate(enough, trial=False).privacy["max_epsilon"] == float(named[1])


# ------------------------------------------------------------------------- noise for a given ε


@pytest.mark.parametrize(
    ("noise", "batches", "ratio"),  # of the noise multiplier to z
    [("per_component", [], 1), ("circular", UNIFORM, 2 * 2**0.5)],
)
def test_the_tight_epsilon_of_the_run_is_the_target(
    tmp_path: Path, noise: str, batches: list[str], ratio: float
) -> None:
    words = ["privacy.target_epsilon=2", f"algorithm.noise={noise}", "trainer.epochs=1", *batches]
    record = carry_out(tmp_path, *words).record.document
    privacy = record["privacy"]
    assert privacy["epsilon_tight"] == pytest.approx(2, rel=1e-3)
    assert privacy["epsilon_tight"] <= 2
    # of fixed-size batches only bounds are known
    at_least = privacy["epsilon_tight_at_least"]
    assert (at_least == privacy["epsilon_tight"]) == (not batches)
    assert 1.5 < at_least < privacy["epsilon_patient_at_least"]  # of an image in two examples
    assert record["config"]["algorithm"]["noise_multiplier"] == privacy["noise_multiplier"]
    assert privacy["noise_multiplier"] == pytest.approx(privacy["z"] * ratio)


def test_the_claimed_epsilon_is_what_the_accountant_says(tmp_path: Path) -> None:
    words = ["privacy.claimed_epsilon=3", "accountant=rdp", "algorithm.noise=circular"]
    privacy = carry_out(tmp_path, *words).record.document["privacy"]
    assert privacy["epsilon_claimed"] == pytest.approx(3, rel=1e-3)
    assert privacy["epsilon_tight"] > 3  # circular noise gives z = σ/√2


def test_what_is_calibrated_is_no_choice() -> None:
    def digest(*overrides: str) -> str:
        return experiment_digest(parse(compose(["recipe=quickstart", *overrides])))

    target = "privacy.target_epsilon=2"
    assert digest(target) == digest(target, "algorithm.noise_multiplier=9")
    assert digest(target) != digest("privacy.target_epsilon=3")
    assert digest(target) != digest("privacy.claimed_epsilon=2")
    assert digest("algorithm.noise_multiplier=9") != digest()
    assert digest("privacy.total_budget=2") == digest()


class _NoNoiseSomewhere:
    """An algorithm that leaves a direction without noise."""

    def __init__(self, problem: object, **options: float) -> None:
        pass

    def mechanism(self) -> Mechanism:
        sampling = Sampling("poisson", 0.1, 10, 100)
        return Mechanism((Block("b", (2,), "complex128", 1.0, 1.0, "real_on_complex"),), sampling)


def test_a_mechanism_without_noise_somewhere_reaches_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, "privacy.target_epsilon=2")
    monkeypatch.setattr("zdp_bench.training.build.algorithm_type", lambda name: _NoNoiseSomewhere)
    message = r"target_epsilon=2 with algorithm=zeta_dp_sgd: some direction gets no noise"
    with pytest.raises(UserError, match=message):
        build_algorithm(config, None, Plan.of(config, 1000))  # type: ignore[arg-type]


# ------------------------------------------------------------------------- budgets of all runs


def spent_by(record: records.Document) -> SpentSteps:
    privacy = record["privacy"]
    return SpentSteps(privacy["z"], Sampling(**privacy["sampling"]), privacy["steps"])


def begin(results: Path, *overrides: str, z: float = 1.5, steps: int = 20, name: str = "b") -> Path:
    """Begin a run as `run` does before its first step; return its folder."""
    config = configured(results, *overrides)
    data, home = load_data(config), records.folder(results, "quickstart", name * 64)
    mechanism = Mechanism.of_z(z, Plan.of(config, len(data.train)).sampling)
    reserve(config, data, mechanism, steps, home)
    return home


def budget_of(results: Path, *data: str) -> Sheet:
    """What `zdp-bench budget` shows."""
    return sheet(find_spendings(results)[0], None, [], results, *data)


def test_two_runs_one_after_the_other_cannot_pass_the_total_budget(
    finished: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = finished.record.document["privacy"]
    twice = compose_epsilon([spent_by(finished.record.document)] * 2, first["delta"])
    assert first["epsilon_tight"] < twice < 2 * first["epsilon_tight"]
    with pytest.raises(UserError, match=rf"tight ε of .* {show_epsilon(twice)}"):
        carry_out(tmp_path, "seed=1", f"privacy.total_budget={twice * 0.999}")
    assert len(list(tmp_path.glob("runs/*/*/record.json"))) == 1
    assert [len(steps_in(path)) for path in tmp_path.glob("runs/*/*/ledger.jsonl")].count(0) == 1
    second = carry_out(tmp_path, "seed=1", f"privacy.total_budget={twice * 1.001}").record.document
    assert second["privacy"]["steps"] == first["steps"]
    assert f": 1 earlier runs in {tmp_path} may share examples with this one" in caplog.text
    counted = f"Counted: the 2 runs in {tmp_path}. Runs in other folders are not included."
    assert counted in budget_of(tmp_path).notes
    # one that is done already spends nothing new, whatever the budget
    assert carry_out(tmp_path, "privacy.total_budget=0.001").was_recorded


def test_a_forced_run_that_is_refused_leaves_the_finished_one(
    finished: Outcome, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in finished.path.parent.glob("*.[jp][st]*")}
    (spending,), _ = find_spendings(tmp_path)
    with pytest.raises(UserError, match="total_budget"):
        carry_out(tmp_path, "force=true", "privacy.total_budget=0.001")
    assert carry_out(tmp_path).was_recorded
    for name in ("record.json", "checkpoint.pt"):
        path = finished.path.parent / name
        assert path.read_bytes() == before[path], name
    (after,), unknown = find_spendings(tmp_path)
    assert (after.spent, unknown) == (spending.spent, [])
    assert not [*finished.path.parent.glob("*.replaced")]
    carry_out(tmp_path, "force=true")
    assert not [*finished.path.parent.glob("*.replaced")]


def test_other_mechanisms_and_secure_runs_count_and_other_data_does_not(
    finished: Outcome, tmp_path: Path
) -> None:
    own = finished.record.document["privacy"]
    begin(tmp_path, "privacy.secure=true", z=4)
    spending = spent_by(finished.record.document)
    both = compose_epsilon([spending, replace(spending, z=4)], own["delta"])
    with pytest.raises(UserError, match=rf"2 runs .* ε of {show_epsilon(both)}"):
        begin(tmp_path, f"privacy.total_budget={both}", name="c")
    other = ["dataset=synthetic_images", "dataset.shape=[8,8]", "dataset.complex_valued=true"]
    begin(tmp_path, *other, f"privacy.total_budget={both}", name="d")
    lines = {
        (line["noise"], line["runs"]): line for line in budget_of(tmp_path, "phase_digits").numbers
    }
    assert set(lines) == {("seeded", 1), ("secure", 1), ("all", 2)}
    assert "Counted: the 2 runs in" in budget_of(tmp_path, "phase_digits").notes[-1]
    assert lines["all", 2]["epsilon"] == both
    assert lines["seeded", 1]["epsilon"] == pytest.approx(own["epsilon_tight"])
    assert lines["seeded", 1]["epsilon_unit"] == pytest.approx(own["epsilon_patient"])


@pytest.mark.parametrize(
    ("option", "listed"), [("pairing_seed=3", True), ("validation_share=0.01", False)]
)
def test_other_options_of_the_same_files_do_not_hide_what_was_spent(
    finished: Outcome, tmp_path: Path, option: str, listed: bool
) -> None:
    """Another share to validate on is another digest: a run without noise was not counted."""
    if not listed:  # of an older version, or in a clone: its record alone is there
        (finished.path.parent / FILE).unlink()
    spent = finished.record.document["privacy"]["epsilon_tight"]
    with pytest.raises(UserError, match=rf"1 runs .* ε of {show_epsilon(spent)}"):
        begin(tmp_path, f"dataset.{option}", f"privacy.total_budget={spent}")
    begin(tmp_path, f"dataset.{option}")
    shown = budget_of(tmp_path)
    assert [(line["noise"], line["runs"]) for line in shown.numbers] == [("seeded", 2)]
    assert len(str(shown.numbers[-1]["data_digest"]).split(", ")) == 2
    assert "phase_digits: runs whose data share files count together" in " ".join(shown.notes)


def test_runs_that_share_files_by_way_of_another_are_in_one_group(
    tiny: tuple[Path, Outcome],
) -> None:
    (spending,), _ = find_spendings(tiny[0])
    files = {"a": "1 2", "b": "5 6", "c": "2 5", "d": "7"}
    runs = [
        replace(spending, dataset=name, data=name, sources=frozenset(own.split()))
        for name, own in files.items()
    ]
    groups = sorted(sorted(run.data for run in group) for group in group_by_data(runs))
    assert groups == [["a", "b", "c"], ["d"]]


def test_a_budget_adds_what_is_spent_of_one_unit(finished: Outcome, tmp_path: Path) -> None:
    """A run with an ε of 8 for a beat counted as 8 for a patient."""
    by_unit, own = "privacy.unit=patient", finished.record.document["privacy"]
    of_unit = own["epsilon_patient"]
    with pytest.raises(UserError, match=f"have a tight ε of {show_epsilon(of_unit)}"):
        begin(tmp_path, by_unit, f"privacy.total_budget={own['epsilon_tight']}")
    both = of_unit + own["epsilon_tight"]
    done = carry_out(tmp_path, by_unit, f"privacy.total_budget={both}")
    with pytest.raises(UserError, match=r"units \(example, image"):
        begin(tmp_path, "privacy.total_budget=1000")
    runs, _ = find_spendings(tmp_path)
    shown = budget_of(tmp_path)
    assert shown.numbers[-1]["epsilon"] is None
    assert shown.numbers[-1]["epsilon_unit"] > of_unit
    assert "with different privacy units" in " ".join(shown.notes)
    others = [*runs, replace(runs[0], unit="slice")]
    for alone in (True, False):
        with pytest.raises(ValueError, match="protect different units"):
            list_spent_steps(others, alone)
    # a patient is one share of a run by patients, and of its plan
    of_patients = [run for run in runs if run.by_owner]
    (line,) = sheet(of_patients, None, [], tmp_path).numbers
    (sentence,) = describe_together([*of_patients, *of_patients])
    assert re.search(r"together: [\d.]+ per image \(δ", sentence)
    assert line["epsilon"] == line["epsilon_unit"]
    assert line["epsilon_unit"] == pytest.approx(done.record.document["privacy"]["epsilon_patient"])
    done.path.unlink()
    for spendings in (runs, find_spendings(tmp_path)[0]):
        assert [run.shares_per_owner for run in spendings if run.by_owner] == [1]


def test_a_run_that_was_stopped_counts_with_all_the_steps_it_plans(tmp_path: Path) -> None:
    def planned() -> Spending:
        (spending,), _ = find_spendings(tmp_path)
        return spending

    budget = "privacy.total_budget=3"
    home = begin(tmp_path, budget, steps=40, name="a")
    assert (planned().spent.steps, planned().finished) == (40, False)
    assert "Unfinished runs: 1" in " ".join(budget_of(tmp_path).notes)
    with pytest.raises(UserError, match=r"1 runs .*phase_digits"):
        begin(tmp_path, budget, steps=100)
    begin(tmp_path, budget, steps=45, name="a")  # itself, further
    # what is not known is not taken for nothing
    (home / FILE).write_text("{")
    with pytest.raises(UserError, match=r"is damaged .* So the ε of its run is not known"):
        begin(tmp_path, budget, steps=1)
    begin(tmp_path, budget, steps=45, name="a")  # the same run writes it again
    assert planned().spent.steps == 45


@pytest.mark.parametrize("steps", [1, 30])
def test_a_stopped_run_counts_no_fewer_steps_than_its_ledger(tmp_path: Path, steps: int) -> None:
    """Whatever its plan says: it may be damaged."""
    home = begin(tmp_path, steps=steps)
    write(home / "ledger.jsonl", *range(9))
    ((spending,), _) = find_spendings(tmp_path)
    assert spending.spent.steps == max(9, steps)


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("recipe", 7),
        ("data", "x"),
        ("data", {"digest": None}),
        ("data", {"title": []}),
        ("privacy", None),
        ("privacy", {"epsilon_of": 3}),
        ("privacy", {"unit": None}),
        ("privacy", {"examples_per_patient": "many"}),
        ("privacy", {"steps": -1}),
        ("privacy", {"steps": 10**18}),
        ("privacy", {"z": "nan"}),
        ("privacy", {"z": -1.0}),
        ("privacy", {"delta": 0}),
        ("privacy", {"nodes": [{}]}),
        ("privacy", {"nodes": 3}),
        ("privacy", {"sampling": {"scheme": "poisson"}}),
        ("privacy", {"sampling": {"records": None}}),
        ("sources", 1),
    ],
)
def test_a_damaged_plan_is_refused_and_left_out_of_what_budget_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, change: Any
) -> None:
    """Only the top level was checked, so the rest ended in tracebacks, of all runs' budget."""
    path = begin(tmp_path) / FILE
    begin(tmp_path, name="c")
    plan = json.loads(path.read_text())
    if isinstance(change, dict):
        change = plan[section] | change
    path.write_text(json.dumps(plan | {section: change}))
    with pytest.raises(UserError, match=rf"^{path}: is damaged: it does not fit at {section}"):
        find_spendings(tmp_path)
    (whole,), unknown = find_spendings(tmp_path, skip_damaged=True)
    assert whole.spent.steps == 20
    assert unknown == [path.parent]
    assert f"left out: {path}: is damaged" in capsys.readouterr().err


def test_what_a_kill_makes_a_secure_run_repeat_is_counted_before_it_continues(
    tmp_path: Path,
) -> None:
    words = ["privacy.secure=true", "execution.checkpoint_steps=5"]
    for kills in (1, 2):
        with pytest.raises(ZeroDivisionError):
            execute(configured(tmp_path, *words), Killed())
        (spending,), _ = find_spendings(tmp_path)
        assert len(steps_in(spending.home / "ledger.jsonl")) == 7 * kills
    record = carry_out(tmp_path, *words).record.document
    assert record["privacy"]["steps"] <= spending.spent.steps
    (done,), _ = find_spendings(tmp_path)
    assert done.spent.steps == record["privacy"]["steps"]


def test_an_unfinished_secure_run_counts_at_most_what_its_max_epsilon_allows(
    finished: Outcome, tmp_path: Path
) -> None:
    allowed = finished.record.privacy.steps + 3
    max_epsilon = epsilon_at(finished.record.document, allowed)
    words = ["privacy.secure=true", f"privacy.max_epsilon={max_epsilon}"]
    with pytest.raises(ZeroDivisionError):
        execute(configured(tmp_path / "secure", *words), Killed())
    (spending,), _ = find_spendings(tmp_path / "secure")
    assert spending.spent.steps == allowed


def test_a_ledger_that_nothing_explains_refuses_a_total_budget(
    finished: Outcome, tmp_path: Path
) -> None:
    home, budget = finished.path.parent, "privacy.total_budget=100"
    for name in ("record.json", FILE):
        (home / name).unlink()
    assert find_spendings(tmp_path) == ([], [home / "ledger.jsonl"])
    with pytest.raises(UserError, match="contains steps of an unfinished run"):
        begin(tmp_path, budget)
    assert carry_out(tmp_path, budget).path.parent == home  # which explains it


@pytest.mark.parametrize("to", ["runs/old", "runs/a/b/c", "archive/2025", "old/runs/quickstart/x"])
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_run_counts_wherever_in_the_results_folder_it_was_moved(
    finished: Outcome, tmp_path: Path, to: str, is_finished: bool
) -> None:
    """A folder one level up or down was no run's any more, and its ε was gone without a word."""
    home = finished.path.parent
    if not is_finished:
        finished.path.unlink()
    ((before,), _) = find_spendings(tmp_path)
    moved = tmp_path / to
    moved.parent.mkdir(parents=True, exist_ok=True)
    home.rename(moved)
    ((after,), unknown) = find_spendings(tmp_path)
    assert after == replace(before, home=moved)
    assert not unknown
    with pytest.raises(UserError, match=r"privacy.total_budget=0.01: 1 runs"):
        begin(tmp_path, "privacy.total_budget=0.01")


@pytest.mark.parametrize("linked", ["runs", "runs/quickstart", "runs/quickstart/RUN", "old"])
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_run_on_another_disk_that_a_link_leads_to_counts_once(
    finished: Outcome, tmp_path: Path, linked: str, is_finished: bool
) -> None:
    """`results` listed the run, but its ε was missing from every budget."""
    home = finished.path.parent
    if not is_finished:
        finished.path.unlink()
    ((before,), _) = find_spendings(tmp_path)
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-disk") / "folder"
    elsewhere.parent.mkdir()
    if linked == "old":
        home.rename(elsewhere)
        (tmp_path / "old").symlink_to(elsewhere)
        home = tmp_path / "old"
    else:
        folder = tmp_path / linked.replace("RUN", home.name)
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
    (tmp_path / "round").symlink_to(tmp_path)
    ((after,), unknown) = find_spendings(tmp_path)
    assert after == replace(before, home=home)
    assert not unknown
    with pytest.raises(UserError, match=r"privacy.total_budget=0.01: 1 runs"):
        begin(tmp_path, "privacy.total_budget=0.01")


def test_ledgers_in_a_linked_folder_of_a_run_count(tmp_path: Path) -> None:
    home = begin(tmp_path / "results", steps=1)
    write(home / "ledger.jsonl", *range(3))
    write(tmp_path / "disk" / "ledger.jsonl.1", 0, 1, repeatable=False)
    (home / "old").symlink_to(tmp_path / "disk")
    ((spending,), _) = find_spendings(tmp_path / "results")
    assert spending.spent.steps == 5


@pytest.mark.parametrize("also", [None, "model.safetensors"])
def test_a_run_whose_files_have_checksums_beside_them_counts(
    finished: Outcome, tmp_path: Path, also: str | None
) -> None:
    """It was taken for an export, which is a copy of a run."""
    home = finished.path.parent
    ((before,), _) = find_spendings(tmp_path)
    for name in ["SHA256SUMS", *([also] if also else [])]:
        (home / name).write_text("")
    assert find_spendings(tmp_path) == ([before], [])


def test_a_copy_or_an_export_of_a_finished_run_counts_no_second_time(
    finished: Outcome, tmp_path: Path
) -> None:
    shutil.copytree(finished.path.parent, tmp_path / "backup" / "run")
    labels = {"name": "renamed", "tags": [], "notes": ""}
    finished.path.write_text(json.dumps(finished.record.document | {"labels": labels}))
    export(tmp_path, "quickstart", tmp_path / "exports" / "model")
    ((spending,), unknown) = find_spendings(tmp_path)
    assert spending.spent.steps == finished.record.privacy.steps
    assert not unknown


def test_runs_that_cannot_be_added_are_refused(finished: Outcome, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="different neighbours"):
        begin(tmp_path, *UNIFORM, "privacy.total_budget=100")
    carry_out(tmp_path, "algorithm=sgd")
    with pytest.raises(UserError, match="have a tight ε of ∞"):
        begin(tmp_path, "privacy.total_budget=100")
    lines = budget_of(tmp_path).numbers
    assert [line["epsilon"] for line in lines if line["noise"] in ("none", "all")] == [math.inf] * 2


def test_of_a_federation_each_node_is_bounded(finished: Outcome, tmp_path: Path) -> None:
    """A patient is at one node, and not the same in every run: none of them is left out."""
    own = finished.record.document["privacy"]
    wide = own["sampling"] | {"sample_rate": 2 * own["sampling"]["sample_rate"]}
    changes: list[dict[str, Any]] = [{"z": own["z"] / 2}, {"steps": 99}, {"sampling": wide}]
    nodes = [own | {"node": i} | new for i, new in enumerate(changes)]
    record = finished.record.document | {"privacy": own | {"nodes": nodes}}
    finished.path.write_text(json.dumps(record))
    (spending,), unknown = find_spendings(tmp_path)
    elsewhere = (Sampling(**own["sampling"]),)
    assert spending.spent == SpentSteps(own["z"] / 2, Sampling(**wide), 99, elsewhere=elsewhere)
    assert not unknown
    with pytest.raises(UserError, match="applies to central runs"):
        configured(tmp_path, "federated.nodes=2", "privacy.total_budget=1")
