"""The model of a loop of one's own is handed on as a run's is: card, weights, every ε again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import zdp_bench
from tests.extras.sharing.test_verification import edit, wrong
from tests.library.conftest import Make
from tests.library.small import network, train
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.loading import predict_file
from zdp_bench.privacy.accounting import pld


@pytest.fixture
def exported(make: Make, tmp_path: Path) -> tuple[Path, nn.Module]:
    model = network()
    private = make(model)
    train(private)
    private.export(tmp_path / "model", data="points", metrics={"accuracy": torch.tensor(0.75)})
    return tmp_path / "model", model


def test_an_export_amid_the_training_holds_the_steps_taken(make: Make, tmp_path: Path) -> None:
    private = make(epochs=20)
    train(private, most=29)
    private.export(tmp_path / "model")
    assert not wrong(tmp_path / "model")
    assert private.report()["steps"] == 29


def head_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def edit_report(folder: Path, change: Callable[[dict], object]) -> None:
    report = json.loads((folder / "report.json").read_text())
    change(report)
    edit(folder / "report.json", lambda _: json.dumps(report))


def test_the_card_states_the_epsilon_of_the_ledger_and_where_the_noise_is_from(
    exported: tuple[Path, nn.Module],
) -> None:
    folder, _ = exported
    head, text = head_of(folder), (folder / "README.md").read_text()
    stated = head["differential_privacy"]
    assert stated["epsilon_tight"] == pytest.approx(pld(1.2, 0.2, 10, 1e-3))
    assert (stated["epsilon_of"], stated["steps"], stated["z"]) == ("example", 10, 1.2)
    assert head["datasets"] == ["points"]
    assert head["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.75
    assert head["run"]["versions"]["zdp-bench"] == zdp_bench.__version__
    assert "a key of the operating system" in text
    assert "It takes `float32 [n, 4]`" in text
    assert "a private number of training examples" in text


@pytest.mark.parametrize(
    ("given", "says", "leaves_out"),
    [
        ({"seed": 3}, "**Not for release to an adversary.**", "cryptographic randomness"),
        ({"secure": True}, "cryptographic randomness", "Not for release to an adversary"),
        ({"noise_multiplier": 0.0}, "**Not private.**", "cryptographic randomness"),
        (
            {"unit": lambda index: index // 2, "max_examples": 2},
            "ε of one owner with 2 examples or fewer in a step, tight",
            "a person who owns several examples",
        ),
    ],
    ids=["seed", "secure", "no noise", "owners"],
)
def test_trainings_of_every_kind_verify_and_say_what_they_are(
    make: Make, tmp_path: Path, given: dict[str, Any], says: str, leaves_out: str
) -> None:
    private = make(**given)
    train(private, most=2)
    private.export(tmp_path / "model")
    text = (tmp_path / "model/README.md").read_text()
    assert says in text
    assert leaves_out not in text
    assert wrong(tmp_path / "model") == {}
    assert "model-index" not in head_of(tmp_path / "model")  # a hub refuses one without numbers


def test_no_export_takes_the_place_of_another(make: Make, tmp_path: Path) -> None:
    private, folder = make(), tmp_path / "model"
    train(private, most=2)
    private.export(folder, metrics={"accuracy": 0.5})
    with pytest.raises(UserError, match="is not empty"):
        private.export(folder, metrics={"accuracy": 0.6})
    (folder / "SHA256SUMS").unlink()  # as a kill may leave it
    with pytest.raises(UserError, match="is not empty"):
        private.export(folder, metrics={"accuracy": 0.5})
    train(private, most=1)
    private.export(tmp_path / "later")
    train(private, most=1)
    with pytest.raises(UserError, match="is not empty"):
        private.export(tmp_path / "later")


def test_earlier_steps_of_the_ledger_count_also_when_it_is_verified(
    make: Make, tmp_path: Path
) -> None:
    train(make(), most=4)
    private = make(count_earlier=True)
    train(private)
    private.export(tmp_path / "model")
    assert head_of(tmp_path / "model")["differential_privacy"]["steps"] == 14
    text = (tmp_path / "model/README.md").read_text()
    assert "| steps of these weights | 10; ε counts all steps above |" in text
    assert wrong(tmp_path / "model") == {}


def test_another_mechanism_than_the_ledger_s_is_found(exported: tuple[Path, nn.Module]) -> None:
    folder, _ = exported
    edit_report(folder, lambda report: report["privacy"]["mechanism"]["blocks"][0].update(std=9.0))
    assert "another mechanism" in wrong(folder)["ledger.jsonl"]
    edit_report(folder, lambda report: report["privacy"]["mechanism"].pop("joint"))
    assert "describes no mechanism" in wrong(folder)["ledger.jsonl"]


def test_an_owner_s_epsilon_is_not_sold_for_an_example_s_ledger(
    exported: tuple[Path, nn.Module],
) -> None:
    folder, _ = exported
    edit_report(folder, lambda report: report["privacy"].update(epsilon_of="owner"))
    assert "privacy.epsilon_of" in wrong(folder)
    edit_report(folder, lambda report: report["privacy"].update(examples_per_owner=1))
    edit_report(folder, lambda report: report.update(owners="0" * 64))
    assert "another mechanism" in wrong(folder)["ledger.jsonl"]


def test_the_weights_come_back_into_the_module(exported: tuple[Path, nn.Module]) -> None:
    folder, model = exported
    loaded = zdp_bench.load(folder, model=network())
    assert not loaded.training
    torch.testing.assert_close(loaded(torch.ones(2, 4)), model.eval()(torch.ones(2, 4)))


def test_what_is_missing_or_does_not_fit_is_said_in_one_sentence(
    exported: tuple[Path, nn.Module], make: Make, tmp_path: Path
) -> None:
    folder, _ = exported
    with pytest.raises(UserError, match=r"of 'Sequential', whose code is not .*model=\.\.\."):
        zdp_bench.load(folder)
    with pytest.raises(UserError, match=r"does not fit the model that was given: .*size mismatch"):
        zdp_bench.load(folder, model=nn.Sequential(nn.Linear(4, 9)))
    with pytest.raises(UserError, match=r"model='network': pass the network itself"):
        zdp_bench.load(folder, model="network")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"modle: folder not found\."):
        zdp_bench.load(tmp_path / "modle")
    with pytest.raises(UserError, match=r"whose code is not in the folder.*zdp_bench\.load"):
        predict_file(folder, tmp_path / "in.npy", tmp_path / "out.npy")
    private = make(ledger=tmp_path / "other.jsonl")
    with pytest.raises(UserError, match="not empty; choose a new folder"):
        private.export(folder)
    refused: list[tuple[dict[str, Any], str]] = [
        *(({"metrics": given}, "give a dictionary of numbers by") for given in ([0.5], 5, {5: 1})),
        *(({"metrics": {"accuracy": given}}, "one finite number") for given in ("high", math.inf)),
        *(({key: 5}, f"{key}=5: must be a text") for key in ("name", "data")),
        *(({"folder": given}, "name a folder") for given in (5, "x\0y")),
        ({"folder": folder / "report.json" / "b"}, r"cannot be written \(Not a directory\)"),
    ]
    for given, sentence in refused:
        with pytest.raises(UserError, match=sentence):
            private.export(**{"folder": tmp_path / "b"} | given)
    assert not (tmp_path / "b").exists()
    broken = "x\r\n\n| ε | 0 |\u2028| ε | 0 |"
    private.export(tmp_path / "b", name=broken, data=broken, metrics={broken: 0.5})
    assert "\n| ε | 0" not in (tmp_path / "b" / "README.md").read_text().replace("\u2028", "\n")
    (folder / "report.json").write_text('{"privacy": {}}')
    with pytest.raises(UserError, match=r"report\.json: is damaged or from an older version"):
        zdp_bench.load(folder)
