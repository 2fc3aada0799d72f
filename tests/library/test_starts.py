"""Weights that went through a training before: who knows them, and the ε of all."""

import copy
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

import zdp_bench
from tests.library.conftest import Make
from tests.library.small import CLASSES, EXAMPLES, begin, epsilon_of, network, train
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.verification import verify
from zdp_bench.library import starts
from zdp_bench.library.starts import Earlier
from zdp_bench.privacy.mechanism import Sampling

HOLDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda model: model,
    "wrapped": lambda model: nn.Sequential(*model.children()),
    "copied": copy.deepcopy,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_export_composes_the_training_that_the_starting_weights_went_through(
    make: Make, tmp_path: Path, holder: str
) -> None:
    first = make(model := network(), ledger=tmp_path / "first.jsonl")
    train(first, most=3)
    assert first.report()["start"]["weights"] == "unknown, declared public"
    other = HOLDERS[holder](model)
    if holder == "copied":
        train(first, most=2)  # after which the copy is no more what the training holds
    second = make(other, ledger=tmp_path / "second.jsonl")
    train(second, most=2)
    second.export(tmp_path / "model")
    start = second.report()["start"]
    assert [(training["ledger"], training["steps"]) for training in start["trainings"]] == [
        ("first.jsonl", 3)
    ]
    assert start["epsilon_tight"] == pytest.approx(epsilon_of(1.2, 5), rel=2e-3)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "earlier trainings of the starting weights" in card
    stated = yaml.safe_load(card.split("---")[1])["differential_privacy"]
    assert stated["epsilon_tight_with_earlier_trainings"] == start["epsilon_tight"]
    if holder != "copied":  # the same tensors
        first.export(tmp_path / "again")
        assert first.report()["start"]["trainings"][0]["ledger"] == "second.jsonl"


def read_export(model: nn.Module, folder: Path) -> None:
    zdp_bench.load(folder, model=model).train()


def copy_state(model: nn.Module, folder: Path) -> None:
    read_export(copied := network(), folder)
    model.load_state_dict(copied.state_dict())


def copy_data(model: nn.Module, folder: Path) -> None:
    """Write weights in a way that autograd's version counters do not show."""
    read_export(copied := network(), folder)
    for parameter, value in zip(model.parameters(), copied.parameters(), strict=True):
        parameter.data.copy_(value)


WAYS_IN = {"load": read_export, "load_state_dict": copy_state, ".data": copy_data}


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("is_first_reported", [True, False], ids=["report", "step"])
def test_private_weights_that_come_after_make_private_are_known(
    tmp_path: Path, way: str, is_first_reported: bool
) -> None:
    with begin(network(), tmp_path / "first.jsonl") as first:
        train(first, most=3)
        first.export(tmp_path / "model")
    with begin(model := network(), tmp_path / "other" / "second.jsonl") as second:
        WAYS_IN[way](model, tmp_path / "model")
        if is_first_reported:
            assert second.report()["start"]["epsilon_tight"] == pytest.approx(
                epsilon_of(1.2, 3), rel=2e-3
            )
        train(second, most=2)
        whole = second.report()["start"]["epsilon_tight"]
        assert whole == pytest.approx(epsilon_of(1.2, 5), rel=2e-3)
        assert second.epsilon_with() == pytest.approx(whole)


def test_a_training_whose_loop_is_suspended_is_known(tmp_path: Path) -> None:
    with begin(model := network(), tmp_path / "first.jsonl") as first:
        batches = first.batches()
        for _ in range(3):
            first.step(next(batches))
        for holder in (model, copy.deepcopy(model)):
            with begin(holder, tmp_path / "second.jsonl") as second:
                trainings = second.report()["start"]["trainings"]
                assert [training["steps"] for training in trainings] == [3]


@pytest.mark.parametrize("turns", [[3, 2], [1, 1, 2, 1]], ids=str)
def test_trainings_of_one_model_created_up_front_know_each_other(
    tmp_path: Path, turns: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    with (
        begin(model, tmp_path / "0" / "first.jsonl") as first,
        begin(model, tmp_path / "1" / "second.jsonl") as second,
    ):
        for number, steps in enumerate(turns):
            train((first, second)[number % 2], most=steps)
        second.export(tmp_path / "model")
        start = second.report()["start"]
        assert start["epsilon_tight"] >= epsilon_of(1.2, 5) * (1 - 2e-3)
        assert {training["ledger"] for training in start["trainings"]} == {"first.jsonl"}
    assert caplog.text.count("changed outside private.step") == min(len(turns) - 1, 2)


@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_an_exported_model_are_known_in_another_process(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias), nn.Tanh(), nn.Linear(6, CLASSES, bias))
    first = make(model, ledger=tmp_path / "first.jsonl")
    train(first, most=3)
    first.export(tmp_path / "model")
    monkeypatch.setattr(starts, "_KNOWN", {})
    second = make(
        zdp_bench.load(tmp_path / "model", model=model).train(), ledger=tmp_path / "b.jsonl"
    )
    train(second, most=2)
    second.save()
    monkeypatch.setattr(starts, "_KNOWN", {})  # and in a third
    third = make(model, ledger=tmp_path / "b.jsonl")
    third.resume()
    for steps in (5, 6):
        assert third.report()["start"]["epsilon_tight"] == pytest.approx(
            epsilon_of(1.2, steps), rel=2e-3
        )
        train(third, most=1)


def test_weights_that_another_process_saved_are_known_by_the_file_beside_its_ledger(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(model := network(), ledger=tmp_path / "first.jsonl")
    train(first, most=3)
    first.save()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    monkeypatch.setattr(starts, "_KNOWN", {})
    loaded = network()
    loaded.load_state_dict(torch.load(tmp_path / "weights.pt"))
    second = make(loaded, ledger=tmp_path / "second.jsonl")
    assert [training["ledger"] for training in second.report()["start"]["trainings"]] == [
        "first.jsonl"
    ]
    (tmp_path / "first.weights.json").write_text("{}")
    damage = r"first\.weights\.json: is damaged: it .*\. Delete it"
    # An error that is kept, as a notebook keeps the last one, does not keep the ledger locked.
    with pytest.raises(UserError, match=damage) as _kept:
        make(loaded, ledger=tmp_path / "third.jsonl")
    (tmp_path / "first.weights.json").unlink()
    assert make(loaded, ledger=tmp_path / "third.jsonl").done == 0


def test_ledgers_of_the_same_name_are_all_counted_after_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    for stage in "abc":
        with begin(model, tmp_path / stage / "dp.jsonl") as private:
            train(private, most=2)
            private.export(tmp_path / stage / "model")
    folder = tmp_path / "c" / "model"
    assert not [check for check in verify(folder) if check.state == "failed"]
    report = json.loads((folder / "report.json").read_text())
    start = report["privacy"]["start"]
    assert [training["ledger"] for training in start["trainings"]] == ["dp.jsonl"] * 2
    assert start["epsilon_tight"] == pytest.approx(epsilon_of(1.2, 6), rel=2e-3)
    for number in range(2):  # the second time, its trainings are not counted again
        monkeypatch.setattr(starts, "_KNOWN", {})
        model = zdp_bench.load(folder, model=network()).train()
        with begin(model, tmp_path / f"{number}.jsonl") as private:
            train(private, most=1)
            assert private.report()["start"]["epsilon_tight"] == pytest.approx(
                epsilon_of(1.2, 7), rel=2e-3
            )


def test_a_ledger_in_a_moved_folder_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(model := network(), tmp_path / "old" / "first.jsonl") as first:
        train(first, most=3)
        first.save()
    monkeypatch.setattr(starts, "_KNOWN", {})
    (tmp_path / "old").rename(tmp_path / "new")
    ledger = tmp_path / "new" / "first.jsonl"
    with begin(model, ledger, count_earlier=True) as again:
        assert again.report()["start"] == {"weights": "unknown, declared public"}
    with begin(network(), ledger) as again, begin(model, ledger.with_name("b.jsonl")) as second:
        assert again.resume()
        trainings = second.report()["start"]["trainings"]
        assert [training["steps"] for training in trainings] == [3]


def test_a_ledger_that_was_deleted_and_begun_anew_does_not_hide_its_training(
    tmp_path: Path,
) -> None:
    ledger = tmp_path / "first.jsonl"
    with begin(model := network(), ledger) as first:
        train(first, most=3)
    ledger.unlink()
    for steps in (5, 7):
        with begin(model, ledger, count_earlier=True) as second:
            train(second, most=2)
            start = second.report()["start"]
            assert start["epsilon_tight"] >= epsilon_of(1.2, steps) * (1 - 2e-3)


@pytest.mark.parametrize("is_moved", [True, False], ids=["moved", "deleted"])
def test_a_ledger_that_was_begun_anew_counts_the_earlier_training_however_many_steps_it_has(
    tmp_path: Path, is_moved: bool
) -> None:
    """`epsilon_with` left the first one out once the second had as many steps."""
    ledger = tmp_path / "first.jsonl"
    with begin(model := network(), ledger) as first:
        train(first, most=3)
    if is_moved:
        ledger.rename(tmp_path / "moved.jsonl")
    else:
        ledger.unlink()
    with begin(model, ledger) as second:
        train(second, most=4)
        assert second.epsilon_with() == second.report()["start"]["epsilon_tight"]
        assert second.epsilon_with() >= epsilon_of(1.2, 7) * (1 - 2e-3)
        with begin(network(), tmp_path / "third.jsonl") as third:
            train(third, most=2)
            assert third.epsilon_with(second) >= epsilon_of(1.2, 9) * (1 - 2e-3)


def test_weights_of_a_moved_training_are_counted_however_few_steps_it_has(tmp_path: Path) -> None:
    ledger = tmp_path / "first.jsonl"
    with begin(model := network(), ledger) as first:
        train(first, most=3)
    ledger.rename(tmp_path / "moved.jsonl")
    other = network()
    with begin(other, ledger) as second:
        train(second, most=4)
    other.load_state_dict(model.state_dict())
    with begin(other, ledger, count_earlier=True) as third:
        train(third, most=2)
        assert third.epsilon_with() >= epsilon_of(1.2, 9) * (1 - 2e-3)


def files_of(ledger: Path) -> list[Path]:
    return [ledger.with_suffix(suffix) for suffix in (".jsonl", ".pt", starts.SUFFIX)]


@pytest.mark.parametrize("seed", range(3))
def test_epsilon_with_counts_all_steps_wherever_their_ledgers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A training was left out that had as few steps as the new one at its path when opened."""
    draw = random.Random(seed)
    saved: dict[Path, dict[str, Tensor]] = {}  # ledger -> its saved weights
    behind: dict[Path, set[int]] = {}  # ledger -> the steps behind these weights
    listed: dict[Path, set[int]] = {}  # ledger -> the steps in it
    for turn in range(6):
        ledger = tmp_path / "a.jsonl"
        if draw.random() < 0.5:
            monkeypatch.setattr(starts, "_KNOWN", {})  # another process
        if ledger in saved and draw.random() < 0.4:
            other = tmp_path / f"{turn}.jsonl"
            carry = draw.choice([shutil.move, shutil.copy])
            for source, target in zip(files_of(ledger), files_of(other), strict=True):
                carry(source, target)
            for known in (saved, behind, listed):
                known[other] = known[ledger].copy()
                if carry is shutil.move:
                    del known[ledger]
        start = draw.choice([ledger, *saved])
        num_steps = draw.randint(1, 3)
        steps = {10 * turn + number for number in range(num_steps)}
        with begin(model := network(), ledger, epochs=20, count_earlier=True) as private:
            if start == ledger:
                private.resume()
            else:
                model.load_state_dict(saved[start])
            train(private, most=num_steps)
            behind[ledger] = behind.get(start, set()) | steps
            listed[ledger] = listed.get(ledger, set()) | steps
            lowest = epsilon_of(1.2, len(behind[ledger] | listed[ledger])) * (1 - 2e-3)
            report = private.report()
            stated = report["start"].get("epsilon_tight", report["epsilon_tight"])
            assert private.epsilon_with() >= stated >= lowest
            private.save()
            saved[ledger] = copy.deepcopy(model.state_dict())


def test_a_finished_training_that_is_resumed_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(network(), tmp_path / "first" / "dp.jsonl") as first:
        train(first)
        first.save()
    monkeypatch.setattr(starts, "_KNOWN", {})
    with begin(model := network(), tmp_path / "first" / "dp.jsonl") as first:
        assert first.resume()
        train(first)  # takes no step
    with begin(model, tmp_path / "second" / "dp.jsonl") as second:
        trainings = second.report()["start"]["trainings"]
        assert [training["steps"] for training in trainings] == [10]


TRAINING = Earlier("first.jsonl", "", 1.2, Sampling("poisson", 0.2, 12.0, 60), 3, "first").as_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"steps": -3},  # which would take steps off the sum
        {"steps": 10**12},
        {"z": -1.0},
        {"z": 1e200},
        {"z": math.nan},
        {"z": None},
        {"sampling": TRAINING["sampling"] | {"scheme": "none"}},
        {"sampling": TRAINING["sampling"] | {"sample_rate": 0.0}},
        {"sampling": 3},
    ],
    ids=str,
)
def test_a_file_that_states_no_training_is_damaged(
    tmp_path: Path, change: dict[str, object]
) -> None:
    weights = starts.weights_digest(network())
    body = {"weights": weights, "trainings": [TRAINING | change], "own": 0}
    (tmp_path / "first.weights.json").write_text(json.dumps(body))
    with pytest.raises(UserError, match=r"first\.weights\.json: is damaged: it .*\. Delete it"):
        starts.find(network(), tmp_path)
    with pytest.raises(ValueError, match="does not fit"):
        Earlier.from_dict(TRAINING | change)


OWNERS = {"unit": [index // 2 for index in range(EXAMPLES)], "max_examples": 2}


@pytest.mark.parametrize(
    ("units_of_first", "reason"),
    [({}, "another unit or sampling"), (OWNERS, "owners whose list is private")],
    ids=["examples", "private owners"],
)
def test_weights_are_not_exported_if_their_whole_epsilon_is_unknown(
    make: Make, tmp_path: Path, units_of_first: dict[str, object], reason: str
) -> None:
    first = make(model := network(), ledger=tmp_path / "first.jsonl", **units_of_first)
    train(first, most=1)
    second = make(model, ledger=tmp_path / "second.jsonl", **OWNERS)
    train(second, most=1)
    assert first.done == second.done == 1
    with pytest.raises(UserError, match=rf"first\.jsonl, which .*{reason}"):
        second.export(tmp_path / "model")
    with pytest.raises(UserError, match=r"also come from first\.jsonl, .* pass this training too"):
        second.epsilon_with()


def test_a_training_from_the_same_start_or_repeated_by_its_seed_is_apart(
    make: Make, tmp_path: Path
) -> None:
    for number in range(2):
        private = make(network(), seed=3, ledger=tmp_path / f"{number}.jsonl")
        train(private)
        private.save()
        assert private.report()["start"] == {"weights": "unknown, declared public"}


def keep_body(model: nn.Module) -> nn.Module:
    return nn.Sequential(model[0], nn.Tanh(), nn.Linear(6, CLASSES))


def keep_frozen_body(model: nn.Module) -> nn.Module:
    model[0].requires_grad_(False)
    return keep_body(model)


def load_body(model: nn.Module) -> nn.Module:
    other = keep_body(network())
    other[0].load_state_dict(model[0].state_dict())
    return other


KEPT = {"body": keep_body, "frozen": keep_frozen_body, "loaded": load_body}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("is_saved", [False, True])
def test_weights_that_come_in_part_from_a_training_are_said_once(
    make: Make, tmp_path: Path, kept: str, is_saved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Their ε was left out in silence."""
    first = make(model := network(), ledger=tmp_path / "first.jsonl")
    train(first, most=3)
    if is_saved:
        first.save()
    other = KEPT[kept](model)
    second = make(other, ledger=tmp_path / "second.jsonl")
    train(second, most=2)
    second.report()
    assert caplog.text.count("'0.weight' comes from the training with the ledger first.jsonl") == 1


def test_a_parameter_without_numbers_comes_from_no_training(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "second"):
        model = network()
        model[0].empty = nn.Parameter(torch.zeros(0))
        train(make(model, ledger=tmp_path / f"{name}.jsonl"), most=1)
    assert "comes from the training" not in caplog.text


def test_whole_public_and_own_weights_are_not_said_to_come_in_part_from_a_training(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    public = nn.Linear(4, 6).requires_grad_(False)
    body = [public, nn.Tanh()]
    model = nn.Sequential(*body, nn.Linear(6, CLASSES))
    first = make(model, ledger=tmp_path / "first.jsonl")
    train(first, most=3)
    first.save()
    make(model, ledger=tmp_path / "second.jsonl")  # all weights: these are counted
    other = make(nn.Sequential(*body, nn.Linear(6, CLASSES)), ledger=tmp_path / "third.jsonl")
    train(other, most=1)
    again = make(nn.Sequential(*body, nn.Linear(6, CLASSES)), ledger=tmp_path / "first.jsonl")
    assert again.resume()
    train(again, most=1)
    again.report()
    assert "comes from the training" not in caplog.text


def test_weights_that_are_frozen_or_unfrozen_late_are_those_that_were_trained(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    model[0].requires_grad_(False)
    first = make(model, ledger=tmp_path / "first.jsonl")
    train(first, most=1)
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    with pytest.raises(UserError, match="was frozen, unfrozen or replaced"):
        train(first)
    first.report()
    assert "changed outside private.step" not in caplog.text
    unknown = nn.Sequential(network()[0], nn.Tanh(), nn.Linear(6, CLASSES))
    train(make(unknown, ledger=tmp_path / "second.jsonl"), most=1)
    assert "comes from the training" not in caplog.text
    known = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), copy.deepcopy(model[2]).requires_grad_())
    train(make(known, ledger=tmp_path / "third.jsonl"), most=1)
    assert "'2.weight' comes from the training with the ledger first.jsonl" in caplog.text


def test_trainings_of_one_layer_after_the_other_are_all_known(tmp_path: Path) -> None:
    """The first one, whose loop is suspended, took the place of the second at random."""
    model = network()
    model[2].requires_grad_(False)
    first = begin(model, tmp_path / "first.jsonl")
    train(first, most=1)
    model[0].requires_grad_(False)
    model[2].requires_grad_(True)
    second = begin(model, tmp_path / "second.jsonl")
    train(second, most=1)
    third = begin(model, tmp_path / "third.jsonl")
    assert {Path(earlier.ledger).name for earlier in third._earlier} == {
        "first.jsonl",
        "second.jsonl",
    }
    for training in (first, second, third):
        training.close()
