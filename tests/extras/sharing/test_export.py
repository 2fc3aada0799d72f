"""`zdp-bench export`: what it writes, what the card says, what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
import yaml

from tests.library.conftest import Make
from tests.library.small import train
from tests.test_cli import run as command
from tests.training.test_public_start import carry_out as carry_out_real
from tests.training.test_run import Silent
from zdp_bench import records
from zdp_bench.config import configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.export import export
from zdp_bench.extras.sharing.folder import read_weights, write_weights
from zdp_bench.extras.sharing.verification import verify
from zdp_bench.training.run import Outcome, run
from zdp_bench.training.run_folder import command_of


def head_of(card: Path) -> dict:
    return yaml.safe_load(card.read_text().split("---\n")[1])


def test_the_head_of_the_card_is_yaml_that_a_hub_reads(exported: Path, finished: Outcome) -> None:
    head, privacy = head_of(exported / "README.md"), finished.record["privacy"]
    (result,) = head["model-index"][0]["results"]
    assert {"task", "dataset", "metrics"} <= set(result)
    assert all({"type", "value"} <= set(metric) for metric in result["metrics"])
    assert result["metrics"][0]["value"] == finished.record["metrics"]["accuracy"]
    stated = head["differential_privacy"]
    for key in ("epsilon_claimed", "epsilon_tight", "epsilon_patient", "delta", "z", "ledger"):
        assert stated[key] == privacy[key]
    assert head["data"]["provenance"] == "derived"


def test_the_card_says_that_steps_sample_from_subsets_in_turn(tmp_path: Path) -> None:
    words = ["recipe=quickstart", "trainer.epochs=1", "algorithm=band_mf", "algorithm.bands=4"]
    words += ["model=real_mlp", "model.complex_as=magnitude", f"paths.results={tmp_path}"]
    run(configured(words), Silent())
    export(tmp_path, "quickstart", tmp_path / "model")
    text = (tmp_path / "model" / "README.md").read_text()
    assert "| sampling | poisson, rate 0.2 of 1,426 in one step of 4, 20 steps |" in text
    assert not [check for check in verify(tmp_path / "model") if check.state == "wrong"]


def test_the_card_says_whose_the_epsilon_is(tmp_path: Path) -> None:
    words = ["recipe=quickstart", "trainer.epochs=1", "privacy.unit=patient"]
    record = run(configured([*words, f"paths.results={tmp_path}"]), Silent()).record
    export(tmp_path, "quickstart", tmp_path / "model")
    text = (tmp_path / "model" / "README.md").read_text()
    assert (
        head_of(tmp_path / "model" / "README.md")["differential_privacy"]["epsilon_of"] == "image"
    )
    assert "| ε of an image with 2 examples, tight |" in text
    assert "ε of one example" not in text
    assert record["privacy"]["epsilon_patient"] == record["privacy"]["epsilon_tight"]
    assert not [check for check in verify(tmp_path / "model") if check.state == "wrong"]


def test_the_recipe_is_the_run_s_experiment(exported: Path, finished: Outcome) -> None:
    config = configured([f"recipe={exported / 'recipe.yaml'}"])
    assert experiment_digest(config) == finished.record["experiment"]


def test_several_runs_are_told_apart_and_each_is_named_as_tables_name_it(tmp_path: Path) -> None:
    words = [(), ("seed=2",), ("algorithm=sgd",)]
    runs = [carry_out_real(tmp_path, *own).record["run"] for own in words]
    with pytest.raises(UserError, match="3 runs match") as caught:
        export(tmp_path, "quickstart", tmp_path / "a")
    assert f"{runs[1][:8]} (dp_sgd, " in str(caught.value)
    assert "seed 2)" in str(caught.value)
    assert f"{runs[2][:8]} (sgd" in str(caught.value)
    assert export(tmp_path, runs[2][:8], tmp_path / "a")["run"] == runs[2]


def test_weights_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    numbers = torch.randn(3, 4, dtype=torch.complex128)
    weights = {
        "wide": numbers,
        "narrow": numbers.to(torch.complex64).conj(),
        "tied": numbers.real[::2],
        "count": torch.tensor(7),
    }
    write_weights(tmp_path / "w.safetensors", weights)
    found = read_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert all(found[name].dtype == weights[name].dtype for name in weights)


def test_a_clone_without_the_weights_says_how_to_get_them(
    finished: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "results/runs/quickstart" / finished.path.parent.name
    home.mkdir(parents=True)
    shutil.copy(finished.path, home)
    to = ["--to", str(tmp_path / "model"), "--results", str(tmp_path / "results")]
    code, _, err = command(capsys, "export", "quickstart", *to)
    assert code == 2
    assert "only its record, as in a clone" in err
    words = command_of(finished.record).replace("'", "").split()[2:]
    assert experiment_digest(configured(words)) == finished.record["experiment"]
    assert f"{' '.join(words)}." in err.replace("'", "")


def test_the_command_names_other_plug_ins(tmp_path: Path) -> None:
    record = carry_out_real(tmp_path, "seed=3", "task.headline=roc_auc").record
    words = command_of(record).replace("'", "").split()[2:]
    assert experiment_digest(configured(words)) == record["experiment"]
    assert "seed=3" in words


def test_what_cannot_be_exported_is_refused(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = finished.path.parents[3]
    with pytest.raises(UserError, match="no finished run with weights under"):
        export(results, "mnist", tmp_path / "a")
    with pytest.raises(UserError, match="Did you mean 'quickstart'"):
        export(results, "quickstrat", tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/note").touch()
    with pytest.raises(UserError, match="not empty; choose a new folder"):
        export(results, "quickstart", tmp_path / "full")
    export(results, str(finished.path), tmp_path / "by_path")
    export(results, str(finished.path.parent), tmp_path / "by_folder")
    with monkeypatch.context() as patch:  # an export of the recipe's name is not in the way
        patch.chdir(tmp_path)
        export(results, "quickstart", Path("quickstart"))
        export(results, "quickstart", Path("again"))
    old = Path(shutil.copytree(finished.path.parent, tmp_path / "old"))
    record = json.loads((old / "record.json").read_text())
    del record["measured"]["weights"]
    (old / "record.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"lacks measured.weights. To make it again: zdp-bench"):
        export(results, str(old), tmp_path / "b")


@pytest.mark.parametrize("own", [False, True])
def test_an_export_that_was_killed_anywhere_can_be_repeated(
    finished: Outcome, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    private, whole, model = make(), records.write_bytes, tmp_path / "model"
    train(private, most=2)
    left = 0

    def write() -> None:
        if own:
            private.export(tmp_path / "model")
        else:
            export(finished.path.parents[3], "quickstart", tmp_path / "model")

    def die(path: Path, content: bytes) -> None:
        nonlocal left
        if not (left := left - 1):
            path.with_name(f".{path.name}.1-1.partial").write_bytes(content[:9])
            raise KeyboardInterrupt
        whole(path, content)

    for kills in count():
        left = kills + 1
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(records, "write_bytes", die)
            write()
            break
        (tmp_path / "model/ledger.jsonl.7").touch()
    assert kills > 1
    assert [check for check in verify(tmp_path / "model") if check.state == "wrong"] == []
    assert not [path for path in (tmp_path / "model").iterdir() if "partial" in path.name]
    assert not (tmp_path / "model/ledger.jsonl.7").exists()
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    write()  # the same export changes nothing
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before
    (model / "README.md").write_text("another card")
    with pytest.raises(UserError, match="is not empty"):
        write()


def test_other_weights_than_the_record_s_are_refused(finished: Outcome, tmp_path: Path) -> None:
    home = Path(shutil.copytree(finished.path.parent, tmp_path / "run"))
    body = torch.load(home / "checkpoint.pt", weights_only=True)
    next(iter(body["model"].values())).view(-1)[0] += 1
    torch.save(body, home / "checkpoint.pt")
    with pytest.raises(UserError, match="does not contain the record's weights"):
        export(tmp_path, str(home), tmp_path / "model")


LEDGERS: dict[str, Callable[[list[str]], list[str]]] = {
    "a step less": lambda lines: [*lines[:2], *lines[3:]],
    "cut": lambda lines: lines[: max(n for n, line in enumerate(lines) if "state" not in line)],
    "two exchanged": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    "another number": lambda lines: [*lines[:3], lines[3].replace("step", "stop"), *lines[4:]],
    "nothing": lambda lines: [],
}


@pytest.mark.parametrize("name", LEDGERS)
def test_a_damaged_ledger_is_not_handed_on(name: str, finished: Outcome, tmp_path: Path) -> None:
    """Its copy is written anew, line by line, and would look whole."""
    results = shutil.copytree(finished.path.parents[3], tmp_path / "results")
    (path,) = results.glob("runs/*/*/ledger.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(LEDGERS[name](lines)))
    with pytest.raises(UserError, match=r"ledger\.jsonl: is damaged.*its ε cannot be trusted"):
        export(results, "quickstart", tmp_path / "model")
