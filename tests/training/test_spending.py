"""privacy.total_budget: no order of runs, finished, stopped or side by side, passes it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ledgers import steps_in
from tests.training.test_budget import carry_out
from zdp_bench import records
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.privacy.composition import Spent, together
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.statement import write_epsilon
from zdp_bench.report.budget import group_by_data, sheet
from zdp_bench.training.setup import load_data
from zdp_bench.training.spending import FILE, read_sources, read_spendings, reserve

OTHER_DATA = ["dataset=synthetic_images", "dataset.shape=[8,8]", "dataset.complex_valued=true"]


def spent_by(record: records.Record) -> Spent:
    privacy = record["privacy"]
    return Spent(privacy["z"], Sampling(**privacy["sampling"]), privacy["steps"])


def test_two_runs_one_after_the_other_cannot_pass_the_total_budget(tmp_path: Path) -> None:
    first, _, _ = carry_out(tmp_path, "privacy.total_budget=3")
    spent, delta = spent_by(first), first["privacy"]["delta"]
    twice = together([spent, spent], delta)
    assert first["privacy"]["epsilon_tight"] < 1.7 < twice < 2 * first["privacy"]["epsilon_tight"]
    with pytest.raises(UserError, match=rf"spent a tight ε of .* would be {write_epsilon(twice)}"):
        carry_out(tmp_path, "seed=1", f"privacy.total_budget={twice * 0.999}")
    assert len(list(tmp_path.glob("runs/*/*/record.json"))) == 1
    assert [len(steps_in(path)) for path in tmp_path.glob("runs/*/*/ledger.jsonl")].count(0) == 1
    second, _, _ = carry_out(tmp_path, "seed=1", f"privacy.total_budget={twice * 1.001}")
    assert second["privacy"]["steps"] == first["privacy"]["steps"]
    # one that is done already spends nothing new, whatever the budget
    again, _, heard = carry_out(tmp_path, "privacy.total_budget=0.001")
    assert (again, heard.steps) == (first, [])


def test_other_mechanisms_and_secure_runs_count_and_other_data_does_not(tmp_path: Path) -> None:
    one, _, _ = carry_out(tmp_path, "algorithm.noise_multiplier=4")
    two, _, _ = carry_out(tmp_path, "privacy.secure=true")
    delta = one["privacy"]["delta"]
    both = together([spent_by(one), spent_by(two)], delta)
    with pytest.raises(UserError, match=f"2 runs .* have spent a tight ε of {write_epsilon(both)}"):
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


@pytest.mark.parametrize("option", ["pairing_seed=3", "validation_share=0.01", "test_share=0.5"])
@pytest.mark.parametrize("listed", [True, False])
def test_other_options_of_the_same_files_do_not_hide_what_was_spent(
    tmp_path: Path, option: str, listed: bool
) -> None:
    """Another share to validate on is another digest: a run without noise was not counted."""
    _, home, _ = carry_out(tmp_path, "algorithm=sgd")
    if not listed:  # of an older version, or in a clone: its record alone is there
        (home / FILE).unlink()
    with pytest.raises(UserError, match=r"1 runs in .* have spent a tight ε of ∞"):
        carry_out(tmp_path, f"dataset.{option}", "privacy.total_budget=100")
    carry_out(tmp_path, f"dataset.{option}")
    found, _ = read_spendings(tmp_path)
    shown = sheet(found, None, [], tmp_path)
    assert [(line["noise"], line["runs"]) for line in shown.numbers][-1] == ("all", 2)
    assert len(str(shown.numbers[-1]["data_digest"]).split(", ")) == 2
    assert "phase_digits: other options" in " ".join(shown.notes)


def test_what_is_counted_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    carry_out(tmp_path, *OTHER_DATA)
    carry_out(tmp_path, "privacy.total_budget=5")
    assert f"5: 0 earlier runs in {tmp_path} may share examples with this one" in caplog.text
    carry_out(tmp_path, "privacy.total_budget=5", "seed=1")
    assert f"5: 1 earlier runs in {tmp_path} may" in caplog.text
    notes = sheet(read_spendings(tmp_path)[0], None, [], tmp_path).notes
    assert f"Counted: the 3 runs in {tmp_path}. Runs in other folders are not." in notes


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


def test_a_run_that_was_stopped_counts_with_all_the_steps_it_plans(tmp_path: Path) -> None:
    words = ["recipe=quickstart", f"paths.results={tmp_path}", "privacy.total_budget=3"]
    config = parse(compose(words))
    data, home = load_data(config), records.folder(tmp_path, "quickstart", "a" * 64)
    mechanism = Mechanism.of_z(1.5, Sampling("poisson", 0.05, 70.0, 1400))
    reserve(config, data, mechanism, 200, home)
    (planned,), unknown = read_spendings(tmp_path)
    assert (planned.spent.steps, planned.finished, unknown) == (200, False, [])
    assert "have not ended: 1" in " ".join(sheet([planned], None, [], tmp_path).notes)
    beside = records.folder(tmp_path, "quickstart", "b" * 64)
    with pytest.raises(UserError, match=r"1 runs in .* on files of this phase_digits have spent"):
        reserve(config, data, mechanism, 400, beside)
    assert not (beside / FILE).exists()
    reserve(config, data, mechanism, 250, home)  # itself, further
    # what is not known is not taken for nothing
    (home / FILE).write_text("{")
    with pytest.raises(UserError, match="is damaged, so what its run has spent is not known"):
        reserve(config, data, mechanism, 1, beside)


def test_a_ledger_that_nothing_explains_refuses_a_total_budget(tmp_path: Path) -> None:
    _, home, _ = carry_out(tmp_path, "seed=4")
    for name in ("record.json", FILE):
        (home / name).unlink()
    assert read_spendings(tmp_path) == ([], [home / "ledger.jsonl"])
    with pytest.raises(UserError, match="holds steps of a run that did not end"):
        carry_out(tmp_path, "seed=5", "privacy.total_budget=100")


def test_force_keeps_what_was_spent(tmp_path: Path) -> None:
    first, home, _ = carry_out(tmp_path, "privacy.secure=true")
    carry_out(tmp_path, "privacy.secure=true", "force=true")
    (found,), _ = read_spendings(tmp_path)
    assert found.spent.steps == 2 * first["privacy"]["steps"]
    assert json.loads((home / FILE).read_text())["privacy"]["steps"] == found.spent.steps


def test_runs_that_cannot_be_added_are_refused(tmp_path: Path) -> None:
    carry_out(tmp_path)
    uniform = ["trainer=uniform", "trainer.sample_rate=null", "trainer.batch_size=140"]
    with pytest.raises(UserError, match="protect different neighbours, so the ε of all together"):
        carry_out(tmp_path, *uniform, "privacy.total_budget=100")
    carry_out(tmp_path, "algorithm=sgd", "seed=2")
    with pytest.raises(UserError, match="have spent a tight ε of ∞"):
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
    with pytest.raises(UserError, match="it refuses central runs only"):
        parse(compose(["recipe=quickstart", "federated.nodes=2", "privacy.total_budget=1"]))


def test_a_budget_is_no_part_of_an_experiment() -> None:
    plain = parse(compose(["recipe=quickstart"]))
    limited = parse(compose(["recipe=quickstart", "privacy.total_budget=2"]))
    assert experiment_digest(plain) == experiment_digest(limited)
    assert replace(plain.privacy, total_budget=2.0) == limited.privacy
