"""Budgets: `privacy.max_epsilon` ends a run before the step that would exceed it, `target_epsilon`
and `claimed_epsilon` find its noise, and no order of runs passes `total_budget`."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ledgers import steps_in
from tests.training.test_run import Silent, configured, same
from zdp_bench import records
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.composition import Spent, spent_of_one, together
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.report.budget import group_by_data, sheet
from zdp_bench.training import setup
from zdp_bench.training.build import build_algorithm
from zdp_bench.training.plan import Plan
from zdp_bench.training.run import run
from zdp_bench.training.setup import load_data
from zdp_bench.training.spending import FILE, read_sources, read_spendings, reserve


def carry_out(results: Path, *overrides: str) -> tuple[records.Record, Path, Silent]:
    heard = Silent()
    outcome = run(configured(results, "trainer.epochs=3", "threads=1", *overrides), heard)
    return outcome.record, outcome.path.parent, heard


def epsilon_at(record: records.Record, steps: int) -> float:
    """The tight ε of `steps` steps of what the record says was run."""
    blocks = tuple(
        Block(**{**b, "shape": tuple(b["shape"]), "fft_dims": ()})
        for b in record["privacy"]["mechanism"]["blocks"]
    )
    return tight_epsilon(
        Mechanism(blocks, Sampling(**record["privacy"]["sampling"])),
        steps,
        record["privacy"]["delta"],
    )


def test_one_more_step_would_exceed_the_budget(tmp_path: Path) -> None:
    budget = 0.6
    record, home, heard = carry_out(tmp_path, f"privacy.max_epsilon={budget}")
    steps = record["privacy"]["steps"]
    assert record["stopped_by"] == "budget"
    assert heard.steps == list(range(1, steps + 1))
    assert (
        record["privacy"]["epsilon_tight"]
        == epsilon_at(record, steps)
        <= budget
        < epsilon_at(record, steps + 1)
    )
    assert len(steps_in(home / "ledger.jsonl")) == steps == record["privacy"]["ledger"]["entries"]
    assert record["epochs"][-1]["step"] == steps
    # the last weights are kept, and are those that were evaluated
    assert torch.load(home / "checkpoint.pt", weights_only=True)["step"] == steps
    last = record["epochs"][-1]["accuracy"]
    assert last == record["metrics"]["accuracy"] == record["headline"]["value"]
    assert heard.told[-1][:2] == (-(-steps // 10), steps)  # the epoch under way, of ten steps
    assert record["epochs"][-1]["epsilon_tight"] == record["privacy"]["epsilon_tight"]
    assert [epoch["step"] for epoch in record["epochs"]] == sorted(
        {epoch["step"] for epoch in record["epochs"]}
    )


def test_a_budget_for_the_whole_run_or_for_an_epoch_is_spent_to_its_end(tmp_path: Path) -> None:
    free, _, _ = carry_out(tmp_path / "free")
    exact, first = free["privacy"]["epsilon_tight"], free["epochs"][0]
    enough, _, _ = carry_out(tmp_path / "enough", f"privacy.max_epsilon={exact}")
    assert enough["stopped_by"] == "epochs"
    assert enough["privacy"]["steps"] == free["privacy"]["steps"] == 30
    stopped, _, _ = carry_out(tmp_path / "stopped", f"privacy.max_epsilon={first['epsilon_tight']}")
    ends = [(epoch["step"], epoch["epsilon_tight"]) for epoch in stopped["epochs"]]
    assert ends == [(10, first["epsilon_tight"])]  # once
    assert stopped["stopped_by"] == "budget"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["privacy.max_epsilon=1e-9"],
            r"^privacy\.max_epsilon=1e-09: one step costs a tight ε of \d",
        ),
        (
            ["privacy.max_epsilon=0.4", "federated.nodes=2", "federated.local_steps=9"],
            r"one round of federated\.local_steps=9",
        ),
    ],
)
def test_a_budget_too_small_for_one_step_is_refused(
    tmp_path: Path, words: list[str], said: str
) -> None:
    config = configured(tmp_path, *words)
    with pytest.raises(UserError, match=said) as refused:
        validate(config, trial=False)
    if config.federated.nodes is None:  # a federation is carried out by tests/extras/federated
        with pytest.raises(UserError, match=said):
            run(config, Silent())
        assert not list(tmp_path.glob("runs/*/*/record.json"))
    named = re.search(r"ε of ([\d.]+)", str(refused.value))
    assert named
    enough = replace(config, privacy=replace(config.privacy, max_epsilon=float(named[1])))
    assert validate(enough, trial=False).privacy["max_epsilon"] == float(named[1])


def test_a_spent_budget_reads_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, home, _ = carry_out(tmp_path, "privacy.max_epsilon=0.6")
    (home / "record.json").unlink()

    def forbidden(*_: Any) -> Any:
        raise AssertionError("a training record was read")
        yield

    monkeypatch.setattr(setup, "micro_batches", forbidden)
    again, _, heard = carry_out(tmp_path, "privacy.max_epsilon=0.6")  # from its checkpoint
    assert heard.steps == []
    assert again["epochs"] == record["epochs"]
    assert again["privacy"] == record["privacy"]


def test_secure_runs_differ_and_say_so(tmp_path: Path) -> None:
    first, home, _ = carry_out(tmp_path / "a", "privacy.secure=true", "trainer.epochs=1")
    other, elsewhere, _ = carry_out(tmp_path / "b", "privacy.secure=true", "trainer.epochs=1")
    assert first["privacy"]["randomness"] == "cryptographic"
    assert first["run"] == other["run"]
    weights = [
        torch.load(path / "checkpoint.pt", weights_only=True)["model"] for path in (home, elsewhere)
    ]
    assert not same(*weights)
    seeded, _, _ = carry_out(tmp_path / "c", "trainer.epochs=1")
    assert seeded["privacy"]["randomness"] == "seeded"
    assert seeded["run"] != first["run"]
    assert seeded["privacy"]["epsilon_tight"] == first["privacy"]["epsilon_tight"]


@pytest.mark.parametrize(
    ("noise", "trainer"), [("per_component", "poisson"), ("circular", "uniform")]
)
def test_the_tight_epsilon_of_the_run_is_the_target(
    tmp_path: Path, noise: str, trainer: str
) -> None:
    batches = (
        []
        if trainer == "poisson"
        else ["trainer=uniform", "trainer.sample_rate=null", "trainer.batch_size=140"]
    )
    record, _, _ = carry_out(
        tmp_path,
        "privacy.target_epsilon=2",
        f"algorithm.noise={noise}",
        *batches,
        "trainer.epochs=1",
    )
    privacy = record["privacy"]
    assert privacy["epsilon_tight"] == pytest.approx(2, rel=1e-3)
    assert privacy["epsilon_tight"] <= 2
    exact = trainer == "poisson"  # of fixed-size batches only bounds are known
    assert (privacy["epsilon_tight_at_least"] == privacy["epsilon_tight"]) == exact
    assert (
        1.5 < privacy["epsilon_tight_at_least"] < privacy["epsilon_patient_at_least"]
    )  # of an image in two examples
    assert record["config"]["algorithm"]["noise_multiplier"] == privacy["noise_multiplier"]
    shift = 1 if trainer == "poisson" else 2
    assert privacy["noise_multiplier"] == pytest.approx(
        privacy["z"] * shift * (2**0.5 if noise == "circular" else 1)
    )


def test_the_claimed_epsilon_is_what_the_accountant_says(tmp_path: Path) -> None:
    record, _, _ = carry_out(
        tmp_path, "privacy.claimed_epsilon=3", "accountant=rdp", "algorithm.noise=circular"
    )
    assert record["privacy"]["epsilon_claimed"] == pytest.approx(3, rel=1e-3)
    assert record["privacy"]["epsilon_tight"] > 3  # circular noise gives z = σ/√2


def test_what_is_calibrated_is_no_choice() -> None:
    def digest(*overrides: str) -> str:
        return experiment_digest(parse(compose(["recipe=quickstart", *overrides])))

    assert digest("privacy.target_epsilon=2") == digest(
        "privacy.target_epsilon=2", "algorithm.noise_multiplier=9"
    )
    assert digest("privacy.target_epsilon=2") != digest("privacy.target_epsilon=3")
    assert digest("privacy.target_epsilon=2") != digest("privacy.claimed_epsilon=2")
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse(compose(["recipe=quickstart", "privacy.target_epsilon=2"]))
    monkeypatch.setattr("zdp_bench.training.build.algorithm_type", lambda name: _NoNoiseSomewhere)
    with pytest.raises(
        UserError,
        match=r"target_epsilon=2 with algorithm=zeta_dp_sgd: some direction gets no noise",
    ):
        build_algorithm(config, None, Plan.of(config, 1000))  # type: ignore[arg-type]


OTHER_DATA = ["dataset=synthetic_images", "dataset.shape=[8,8]", "dataset.complex_valued=true"]


def spent_by(record: records.Record) -> Spent:
    privacy = record["privacy"]
    return Spent(privacy["z"], Sampling(**privacy["sampling"]), privacy["steps"])


def test_two_runs_one_after_the_other_cannot_pass_the_total_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _, _ = carry_out(tmp_path, "privacy.total_budget=3")
    assert f"3: 0 earlier runs in {tmp_path} may share examples with this one" in caplog.text
    spent, delta = spent_by(first), first["privacy"]["delta"]
    twice = together([spent, spent], delta)
    assert first["privacy"]["epsilon_tight"] < 1.7 < twice < 2 * first["privacy"]["epsilon_tight"]
    with pytest.raises(UserError, match=rf"have a tight ε of .* would be {show_epsilon(twice)}"):
        carry_out(tmp_path, "seed=1", f"privacy.total_budget={twice * 0.999}")
    assert len(list(tmp_path.glob("runs/*/*/record.json"))) == 1
    assert [len(steps_in(path)) for path in tmp_path.glob("runs/*/*/ledger.jsonl")].count(0) == 1
    second, _, _ = carry_out(tmp_path, "seed=1", f"privacy.total_budget={twice * 1.001}")
    assert second["privacy"]["steps"] == first["privacy"]["steps"]
    assert f": 1 earlier runs in {tmp_path} may" in caplog.text
    notes = sheet(read_spendings(tmp_path)[0], None, [], tmp_path).notes
    assert f"Counted: the 2 runs in {tmp_path}. Runs in other folders are not included." in notes
    # one that is done already spends nothing new, whatever the budget
    again, _, heard = carry_out(tmp_path, "privacy.total_budget=0.001")
    assert (again, heard.steps) == (first, [])


def test_other_mechanisms_and_secure_runs_count_and_other_data_does_not(tmp_path: Path) -> None:
    one, _, _ = carry_out(tmp_path, "algorithm.noise_multiplier=4")
    two, _, _ = carry_out(tmp_path, "privacy.secure=true")
    delta = one["privacy"]["delta"]
    both = together([spent_by(one), spent_by(two)], delta)
    with pytest.raises(UserError, match=f"2 runs .* have a tight ε of {show_epsilon(both)}"):
        carry_out(tmp_path, "seed=1", f"privacy.total_budget={both}")
    other = [*OTHER_DATA, f"privacy.total_budget={both}"]
    assert carry_out(tmp_path, *other)[0]["stopped_by"] == "epochs"
    found, _ = read_spendings(tmp_path)
    shown = sheet(found, None, [], tmp_path, "phase_digits").numbers
    lines = {(line["noise"], line["runs"]): line for line in shown}
    assert set(lines) == {("seeded", 1), ("secure", 1), ("all", 2)}
    assert lines["all", 2]["epsilon"] == both
    assert lines["secure", 1]["epsilon"] == pytest.approx(two["privacy"]["epsilon_tight"])
    assert lines["secure", 1]["epsilon_unit"] == pytest.approx(two["privacy"]["epsilon_patient"])


@pytest.mark.parametrize(
    ("option", "listed"), [("pairing_seed=3", True), ("validation_share=0.01", False)]
)
def test_other_options_of_the_same_files_do_not_hide_what_was_spent(
    tmp_path: Path, option: str, listed: bool
) -> None:
    """Another share to validate on is another digest: a run without noise was not counted."""
    _, home, _ = carry_out(tmp_path, "algorithm=sgd")
    if not listed:  # of an older version, or in a clone: its record alone is there
        (home / FILE).unlink()
    with pytest.raises(UserError, match=r"1 runs in .* have a tight ε of ∞"):
        carry_out(tmp_path, f"dataset.{option}", "privacy.total_budget=100")
    carry_out(tmp_path, f"dataset.{option}")
    found, _ = read_spendings(tmp_path)
    shown = sheet(found, None, [], tmp_path)
    assert [(line["noise"], line["runs"]) for line in shown.numbers][-1] == ("all", 2)
    assert len(str(shown.numbers[-1]["data_digest"]).split(", ")) == 2
    assert "phase_digits: runs with other options" in " ".join(shown.notes)


def test_runs_that_share_files_by_way_of_another_are_in_one_group(tmp_path: Path) -> None:
    carry_out(tmp_path)
    (one,), _ = read_spendings(tmp_path)
    files = {"a": "1 2", "b": "5 6", "c": "2 5", "d": "7"}
    runs = [
        replace(one, dataset=name, data=name, sources=frozenset(own.split()))
        for name, own in files.items()
    ]
    assert sorted(sorted(run.data for run in group) for group in group_by_data(runs)) == [
        ["a", "b", "c"],
        ["d"],
    ]


def test_no_record_tells_which_files_were_read(tmp_path: Path) -> None:
    _, home, _ = carry_out(tmp_path)
    (source,) = read_sources(home) or ()
    assert source in (home / FILE).read_text()
    assert source not in (home / "record.json").read_text()


def test_a_patient_is_one_share_where_patients_are_the_unit(tmp_path: Path) -> None:
    record, _, _ = carry_out(tmp_path, "privacy.unit=patient")
    found, _ = read_spendings(tmp_path)
    assert [one.examples for one in found] == [1]
    (line,) = sheet(found, None, [], tmp_path).numbers
    assert line["epsilon"] == line["epsilon_unit"]
    assert line["epsilon_unit"] == pytest.approx(record["privacy"]["epsilon_patient"])
    (home,) = (path.parent for path in tmp_path.glob("runs/*/*/record.json"))
    (home / "record.json").unlink()  # what the plan says of a run under way
    assert [one.examples for one in read_spendings(tmp_path)[0]] == [1]


def test_a_budget_adds_what_is_spent_of_one_unit(tmp_path: Path) -> None:
    """A run with an ε of 8 for a beat counted as 8 for a patient."""
    example, _, _ = carry_out(tmp_path)
    by_unit = "privacy.unit=patient"
    of_unit = example["privacy"]["epsilon_patient"]
    both = of_unit + example["privacy"]["epsilon_tight"]
    with pytest.raises(UserError, match=f"have a tight ε of {show_epsilon(of_unit)}"):
        carry_out(tmp_path, by_unit, f"privacy.total_budget={example['privacy']['epsilon_tight']}")
    carry_out(tmp_path, by_unit, f"privacy.total_budget={both}")
    with pytest.raises(UserError, match=r"protect different units \(example, image.*\), so their"):
        carry_out(tmp_path, "seed=2", "privacy.total_budget=1000")
    runs, _ = read_spendings(tmp_path)
    shown = sheet(runs, None, [], tmp_path)
    assert shown.numbers[-1]["epsilon"] is None
    assert shown.numbers[-1]["epsilon_unit"] > of_unit
    assert "with different units of privacy" in " ".join(shown.notes)
    others = [*runs, replace(runs[0], unit="slice")]
    for of_unit in (True, False):
        with pytest.raises(ValueError, match="protect different units"):
            spent_of_one(others, of_unit)


def test_a_run_that_was_stopped_counts_with_all_the_steps_it_plans(tmp_path: Path) -> None:
    words = ["recipe=quickstart", f"paths.results={tmp_path}", "privacy.total_budget=3"]
    config = parse(compose(words))
    data, home = load_data(config), records.folder(tmp_path, "quickstart", "a" * 64)
    mechanism = Mechanism.of_z(1.5, Sampling("poisson", 0.05, 70.0, 1400))
    reserve(config, data, mechanism, 200, home)
    (planned,), unknown = read_spendings(tmp_path)
    assert (planned.spent.steps, planned.finished, unknown) == (200, False, [])
    assert "Unfinished runs: 1" in " ".join(sheet([planned], None, [], tmp_path).notes)
    beside = records.folder(tmp_path, "quickstart", "b" * 64)
    with pytest.raises(UserError, match=r"1 runs in .* on files of this phase_digits have a tight"):
        reserve(config, data, mechanism, 400, beside)
    assert not (beside / FILE).exists()
    reserve(config, data, mechanism, 250, home)  # itself, further
    # what is not known is not taken for nothing
    (home / FILE).write_text("{")
    with pytest.raises(UserError, match=r"is damaged .* So its run's ε is not known"):
        reserve(config, data, mechanism, 1, beside)
    reserve(config, data, mechanism, 250, home)  # the same run writes it again
    assert [one.spent.steps for one in read_spendings(tmp_path)[0]] == [250]


def test_what_a_kill_makes_a_secure_run_repeat_is_counted_before_it_continues(
    tmp_path: Path,
) -> None:
    class Killed(Silent):
        def stepped(self, step: int) -> None:
            super().stepped(step)
            if len(self.steps) == 7:
                raise ZeroDivisionError

    words = ["privacy.secure=true", "execution.checkpoint_steps=5"]
    for kills in (1, 2):
        with pytest.raises(ZeroDivisionError):
            run(configured(tmp_path, *words), Killed())
        (found,), _ = read_spendings(tmp_path)
        assert len(steps_in(found.home / "ledger.jsonl")) == 7 * kills
    record = run(configured(tmp_path, *words), Silent()).record
    assert record["privacy"]["steps"] <= found.spent.steps
    (done,), _ = read_spendings(tmp_path)
    assert done.spent.steps == record["privacy"]["steps"]


def test_a_ledger_that_nothing_explains_refuses_a_total_budget(tmp_path: Path) -> None:
    _, home, _ = carry_out(tmp_path, "seed=4")
    for name in ("record.json", FILE):
        (home / name).unlink()
    assert read_spendings(tmp_path) == ([], [home / "ledger.jsonl"])
    with pytest.raises(UserError, match="contains steps of an unfinished run"):
        carry_out(tmp_path, "seed=5", "privacy.total_budget=100")
    assert carry_out(tmp_path, "seed=4", "privacy.total_budget=100")[1] == home  # which explains it


def test_force_keeps_what_was_spent(tmp_path: Path) -> None:
    first, home, _ = carry_out(tmp_path, "privacy.secure=true")
    carry_out(tmp_path, "privacy.secure=true", "force=true")
    (found,), _ = read_spendings(tmp_path)
    assert found.spent.steps == 2 * first["privacy"]["steps"]
    assert json.loads((home / FILE).read_text())["privacy"]["steps"] == found.spent.steps


def test_runs_that_cannot_be_added_are_refused(tmp_path: Path) -> None:
    carry_out(tmp_path)
    uniform = ["trainer=uniform", "trainer.sample_rate=null", "trainer.batch_size=140"]
    with pytest.raises(UserError, match="protect different neighbours, so their total ε"):
        carry_out(tmp_path, *uniform, "privacy.total_budget=100")
    carry_out(tmp_path, "algorithm=sgd", "seed=2")
    with pytest.raises(UserError, match="have a tight ε of ∞"):
        carry_out(tmp_path, "seed=3", "privacy.total_budget=100")
    lines = sheet(read_spendings(tmp_path)[0], None, [], tmp_path).numbers
    assert [line["epsilon"] for line in lines if line["noise"] in ("none", "all")] == [math.inf] * 2


def test_of_a_federation_each_node_is_bounded(tmp_path: Path) -> None:
    """A patient is at one node, and not the same in every run: the worst of all stands for each."""
    record, home, _ = carry_out(tmp_path)
    own = record["privacy"]
    wide = own["sampling"] | {"sample_rate": 2 * own["sampling"]["sample_rate"]}
    changes: list[dict[str, Any]] = [{"z": own["z"] / 2}, {"steps": 99}, {"sampling": wide}]
    record["privacy"]["nodes"] = [own | {"node": i} | new for i, new in enumerate(changes)]
    (home / "record.json").write_text(json.dumps(record))
    (found,), unknown = read_spendings(tmp_path)
    assert found.spent == Spent(own["z"] / 2, Sampling(**wide), 99)
    assert not unknown
    with pytest.raises(UserError, match="applies to central runs"):
        parse(compose(["recipe=quickstart", "federated.nodes=2", "privacy.total_budget=1"]))
