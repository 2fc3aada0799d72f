"""Exports of a run and of a loop of one's own: what they contain, what the card says."""

import errno
import math
import shlex
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save
from torch import nn

import zdp_bench
from tests.extras.sharing.conftest import head_of, wrong
from tests.library.conftest import Make
from tests.library.small import CLASSES, begin, train
from tests.test_cli import run as command
from tests.training.test_public_start import carry_out as carry_out_real
from zdp_bench import records
from zdp_bench.config import configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.export import export
from zdp_bench.extras.sharing.folder import read_shapes, read_weights, write_sums, write_weights
from zdp_bench.privacy.accounting import pld
from zdp_bench.training.run import Outcome
from zdp_bench.training.run_folder import command_of


def test_the_head_of_the_card_is_yaml_that_a_hub_reads(exported: Path, finished: Outcome) -> None:
    head, privacy = head_of(exported), finished.record.document["privacy"]
    (result,) = head["model-index"][0]["results"]
    assert {"task", "dataset", "metrics"} <= set(result)
    assert all({"type", "value"} <= set(metric) for metric in result["metrics"])
    assert result["metrics"][0]["value"] == finished.record.document["metrics"]["accuracy"]
    stated = head["differential_privacy"]
    for key in ("epsilon_claimed", "epsilon_tight", "epsilon_patient", "delta", "z", "ledger"):
        assert stated[key] == privacy[key]
    assert head["data"]["provenance"] == "derived"


def test_the_card_of_a_loop_states_the_epsilon_of_the_ledger(of_loop: Path) -> None:
    head, text = head_of(of_loop), (of_loop / "README.md").read_text()
    stated = head["differential_privacy"]
    assert stated["epsilon_tight"] == pytest.approx(pld(1.2, 0.2, 10, 1e-3))
    assert (stated["epsilon_of"], stated["steps"], stated["z"]) == ("example", 10, 1.2)
    assert head["datasets"] == ["points"]
    assert head["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.75
    assert head["run"]["versions"]["zdp-bench"] == zdp_bench.__version__
    assert "a key of the operating system" in text
    assert "It takes `float32 [n, 4]`" in text
    assert "a private number of training examples" in text


def test_the_recipe_is_the_run_s_experiment(exported: Path, finished: Outcome) -> None:
    config = configured([f"recipe={exported / 'recipe.yaml'}"])
    assert experiment_digest(config) == finished.record.document["experiment"]


def test_several_runs_are_told_apart(tmp_path: Path) -> None:
    words = ("algorithm=dp_sgd", "algorithm=sgd")
    private, plain = (carry_out_real(tmp_path, own).record.document["run"] for own in words)
    with pytest.raises(UserError, match="2 runs match") as caught:
        export(tmp_path, "quickstart", tmp_path / "a")
    assert f"{private[:8]} (dp_sgd" in str(caught.value)
    assert f"{plain[:8]} (sgd" in str(caught.value)
    assert export(tmp_path, plain[:8], tmp_path / "a")["run"] == plain


def test_every_file_of_an_export_may_be_read_by_the_same_people(exported: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in exported.iterdir() if path.is_file()}
    assert len(modes) == 1


def test_weights_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    numbers = torch.randn(3, 4, dtype=torch.complex128)
    weights = {"wide": numbers, "narrow": numbers.to(torch.complex64).conj()}
    weights |= {"a b.weight": numbers, '["c"].d\n': numbers.conj(), "5": numbers}
    weights |= {"tied": numbers.real[::2], "count": torch.tensor(7)}
    write_weights(tmp_path / "w.safetensors", weights)
    read_back = read_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(read_back[name], weights[name]) for name in weights)
    assert all(read_back[name].dtype == weights[name].dtype for name in weights)
    shapes = {name: list(weight.shape) for name, weight in weights.items()}
    assert read_shapes(tmp_path / "w.safetensors") == shapes
    with pytest.raises(UserError, match=r"its state '_extra_state' is of type float"):
        write_weights(tmp_path / "w.safetensors", {"_extra_state": 0.5})


PAIRS = torch.zeros(3, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("names", "tensors", "reason"),
    [
        ("a", {"a": PAIRS}, None),  # of an older version
        ("0 1", {"0": PAIRS, "1": PAIRS.clone()}, None),
        ("0", {"0": PAIRS}, None),
        ('["a", "a"]', {"a": PAIRS}, None),
        ("b", {"a": PAIRS}, "lacks the complex tensor b"),
        ('["b"]', {"a": PAIRS}, "lacks the complex tensor b"),
        ('["a"]', {"a": PAIRS[:, :1].clone()}, "no pairs of numbers"),
        ('["a"]', {"a": torch.tensor(1.0, dtype=torch.float64)}, "no pairs of numbers"),
        ('["a"]', {"a": PAIRS.float()}, "no pairs of numbers"),
        ('["a", 1]', {"a": PAIRS}, "no names of tensors"),
        ("[" * 100_000, {"a": PAIRS}, "lacks the complex tensor"),
    ],
)
def test_complex_weights_that_the_file_does_not_have_are_named(
    tmp_path: Path, names: str, tensors: dict[str, torch.Tensor], reason: str | None
) -> None:
    """`verify` and `load` ended in a KeyError."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(save(tensors, {"complex128_as_pairs": names}))
    for read in (read_weights, read_shapes):
        if reason is None:
            assert read(path).keys() == tensors.keys()
        else:
            with pytest.raises(UserError, match=rf"w\.safetensors: .*{reason}"):
                read(path)


def test_weights_that_may_not_be_read_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(save({"a": PAIRS}))
    refusal = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr("zdp_bench.extras.sharing.folder.safe_open", Mock(side_effect=refusal))
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\)\.$"):
        read_weights(path)


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
    words = shlex.split(command_of(finished.record))[2:]
    assert experiment_digest(configured(words)) == finished.record.document["experiment"]
    assert f"{shlex.join(words)}." in err


@pytest.mark.parametrize("key", ["target_epsilon", "claimed_epsilon"])
def test_the_command_to_train_again_is_accepted_with_noise_for_an_epsilon(
    finished: Outcome, key: str
) -> None:
    """It gave the noise as well as the ε that had set it, and was refused."""
    config = configured(["recipe=quickstart", f"privacy.{key}=2"]).resolved
    config["algorithm"]["noise_multiplier"] = 1.234  # as a run records it
    record = replace(finished.record, config=config)
    words = shlex.split(command_of(record))[2:]
    assert configured(words).resolved["privacy"][key] == 2


@pytest.mark.parametrize("path", ["/data/José", "/data/José 2", "C:\\x y", "null"])
def test_the_command_to_train_again_reads_the_path_of_the_data(
    finished: Outcome, path: str
) -> None:
    config = configured(["recipe=quickstart", "dataset=folder", "dataset.path=x"]).resolved
    config["dataset"]["path"] = path
    record = replace(finished.record, config=config)
    words = shlex.split(command_of(record))[2:]
    assert configured(words).resolved["dataset"]["path"] == path


def test_what_cannot_be_exported_is_refused(finished: Outcome, tmp_path: Path) -> None:
    results = finished.path.parents[3]
    with pytest.raises(UserError, match="Did you mean 'quickstart'"):
        export(results, "quickstrat", tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/note").touch()
    with pytest.raises(UserError, match="not empty; choose a new folder"):
        export(results, "quickstart", tmp_path / "full")
    export(results, str(finished.path), tmp_path / "by_path")
    export(results, str(finished.path.parent), tmp_path / "by_folder")
    home = Path(shutil.copytree(finished.path.parent, tmp_path / "run"))
    body = torch.load(home / "checkpoint.pt", weights_only=True)
    next(iter(body["model"].values())).view(-1)[0] += 1
    torch.save(body, home / "checkpoint.pt")
    with pytest.raises(UserError, match="does not contain the record's weights"):
        export(tmp_path, str(home), tmp_path / "model")


@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "relative"])
def test_an_export_goes_where_a_link_leads(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A link was "not a directory", and the sentence named a temporary folder."""
    folder, target = tmp_path / "link", tmp_path / "target"
    if kind == "relative":
        monkeypatch.chdir(tmp_path)
        folder = Path("target")
    else:
        folder.symlink_to(target)
    if kind == "link to a folder":
        target.mkdir()
    export(finished.path.parents[3], "quickstart", folder)
    assert wrong(target) == {}
    assert folder.is_symlink() == (kind != "relative")
    export(finished.path.parents[3], "quickstart", folder)  # the same export changes nothing


@pytest.mark.parametrize("name", [".", "", "../here", "link"])
def test_an_export_does_not_take_the_place_of_the_current_folder(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)
    folder = tmp_path / name if name == "link" else Path(name)
    with pytest.raises(UserError, match=r"current folder .* new folder in it, such as .*model"):
        export(finished.path.parents[3], "quickstart", folder)
    assert not any(here.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"here", "link"}


def test_an_export_does_not_take_the_place_of_a_stranger_s(
    finished: Outcome, tmp_path: Path
) -> None:
    """A record that is a list was a traceback."""
    (tmp_path / "record.json").write_text("[]")
    write_sums(tmp_path)
    with pytest.raises(UserError, match="is not empty"):
        export(finished.path.parents[3], "quickstart", tmp_path)


def test_the_name_of_an_export_may_be_as_long_as_the_system_allows(
    finished: Outcome, tmp_path: Path
) -> None:
    export(finished.path.parents[3], "quickstart", tmp_path / ("m" * 255))
    assert wrong(tmp_path / ("m" * 255)) == {}


@pytest.mark.parametrize("own", [False, True])
def test_an_export_that_was_killed_can_be_repeated_and_none_takes_the_place_of_another(
    finished: Outcome, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    private, model = make(), tmp_path / "model"
    train(private, most=2)

    def write() -> None:
        if own:
            private.export(model, metrics={"accuracy": 0.5})
        else:
            export(finished.path.parents[3], "quickstart", model)

    def die(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    model.mkdir()  # an empty folder may be there
    with monkeypatch.context() as patch:
        patch.setattr(records.files, "write_bytes", die)
        with pytest.raises(KeyboardInterrupt):
            write()
    assert not any(model.iterdir())
    write()
    assert wrong(model) == {}
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    write()  # the same export changes nothing
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before
    assert not [*tmp_path.glob(".export*")]
    if own:
        with pytest.raises(UserError, match="is not empty"):
            private.export(model, metrics={"accuracy": 0.6})
    (model / "README.md").write_text("another card")
    with pytest.raises(UserError, match="is not empty"):
        write()


DAMAGES: list[Callable[[list[str]], list[str]]] = [
    lambda lines: [*lines[:2], *lines[3:]],
    lambda lines: lines[: max(n for n, line in enumerate(lines) if "state" not in line)],
    lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    lambda lines: [*lines[:3], lines[3].replace("step", "stop"), *lines[4:]],
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_ledger_is_not_handed_on(
    damage: Callable[[list[str]], list[str]], finished: Outcome, tmp_path: Path
) -> None:
    """Its copy is written anew, line by line, and would look whole."""
    results = shutil.copytree(finished.path.parents[3], tmp_path / "results")
    (path,) = results.glob("runs/*/*/ledger.jsonl")
    path.write_text("".join(damage(path.read_text().splitlines(keepends=True))))
    with pytest.raises(UserError, match=r"ledger\.jsonl: is damaged"):
        export(results, "quickstart", tmp_path / "model")


def test_earlier_steps_of_the_ledger_count_also_when_it_is_verified(
    make: Make, tmp_path: Path
) -> None:
    train(make(), most=4)
    train(private := make(count_earlier=True))
    private.export(tmp_path / "model")
    assert head_of(tmp_path / "model")["differential_privacy"]["steps"] == 14
    text = (tmp_path / "model/README.md").read_text()
    assert "steps of these weights" not in text  # whether they took the earlier steps is unknown
    assert wrong(tmp_path / "model") == {}


class Scaled(nn.Linear):
    """A layer whose state has a part that is no tensor."""

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 1.0}

    def set_extra_state(self, state: dict[str, float]) -> None:
        pass


def test_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    """It was left out, and the export could not be loaded."""
    model = nn.Sequential(Scaled(4, CLASSES))
    with begin(model, tmp_path / "ledger.jsonl") as private:
        train(private, most=1)
        with pytest.raises(UserError, match=r"its state '0\._extra_state' is of type dict"):
            private.export(tmp_path / "model")


def test_what_a_loop_cannot_export_is_refused(of_loop: Path, make: Make, tmp_path: Path) -> None:
    private = make()
    train(private, most=1)
    refused: list[tuple[dict[str, Any], str]] = [
        *(({"metrics": {"accuracy": given}}, "one finite number") for given in ("high", math.inf)),
        ({"folder": of_loop / "report.json" / "b"}, "cannot be written"),
        ({"folder": of_loop}, "not empty; choose a new folder"),
    ]
    for given, sentence in refused:
        with pytest.raises(UserError, match=sentence):
            private.export(**{"folder": tmp_path / "b"} | given)
    assert not (tmp_path / "b").exists()
    broken = "x\r\n\n| ε | 0 |\u2028| ε | 0 |"
    private.export(tmp_path / "b", name=broken, data=broken, metrics={broken: 0.5})
    assert "\n| ε | 0" not in (tmp_path / "b" / "README.md").read_text().replace("\u2028", "\n")
