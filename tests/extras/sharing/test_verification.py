"""`zdp-bench verify`: what it passes, and that it says where a folder was changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zdp_bench
from tests.library.conftest import Make
from tests.library.small import train
from tests.test_cli import run as command
from tests.training.test_public_start import GENERATED
from tests.training.test_public_start import carry_out as carry_out_real
from tests.training.test_run import Silent
from zdp_bench import records
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest, run_digest
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.export import export, texts_of
from zdp_bench.extras.sharing.folder import write_sums
from zdp_bench.extras.sharing.loading import config_of
from zdp_bench.extras.sharing.verification import Check, verify
from zdp_bench.privacy.ledger import chain, make_line
from zdp_bench.records import from_json
from zdp_bench.training.run import run


def wrong(folder: Path) -> dict[str, str]:
    return {check.what: check.found for check in verify(folder) if check.state == "wrong"}


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Change a file, and the digests with it, as a forger would."""
    path.write_text(change(path.read_text()))
    write_sums(path.parent)


def edit_record(folder: Path, change: Callable[[dict], object]) -> None:
    record = json.loads((folder / "record.json").read_text())
    change(record)
    edit(folder / "record.json", lambda _: json.dumps(record, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize(
    ("own", "unchecked"), [(False, "the training data"), (True, "fixed_state")]
)
def test_an_export_passes_and_says_what_was_not_checked(
    folder: Path,
    make: Make,
    tmp_path: Path,
    own: bool,
    unchecked: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if own:
        train(private := make())
        private.export(folder := tmp_path / "own")
    code, out, _ = command(capsys, "verify", str(folder), "--format", "json")
    checks = json.loads(out)
    right = {check["what"] for check in checks if check["state"] == "right"}
    assert code == 0, out
    checked = ("epsilon_tight", "epsilon_of", "z", "steps", "ledger")
    assert {f"privacy.{key}" for key in checked} <= right
    assert "weights are those that were exported" in right
    assert any(unchecked in c["what"] for c in checks if c["state"] == "not checked")


@pytest.mark.parametrize("name", ["model.safetensors", "ledger.jsonl", "README.md", "recipe.yaml"])
def test_a_flipped_byte_is_found_in_every_file(folder: Path, name: str) -> None:
    body = bytearray((folder / name).read_bytes())
    body[-2] ^= 1
    (folder / name).write_bytes(body)
    assert f"SHA-256 of {name}" in wrong(folder)


def test_weights_are_held_to_the_record_whatever_the_digests_say(folder: Path) -> None:
    path = folder / "model.safetensors"
    body = bytearray(path.read_bytes())
    body[-2] ^= 1
    path.write_bytes(body)
    write_sums(folder)
    assert [*wrong(folder)] == ["weights are those that were exported"]


def test_an_edited_mechanism_or_configuration_is_found(folder: Path) -> None:
    def quieter(record: dict) -> None:
        record["privacy"]["mechanism"]["blocks"][0]["std"] *= 2

    edit_record(folder, quieter)
    assert "blocks[0].std" in wrong(folder)["privacy.mechanism"]
    edit_record(folder, lambda record: record["config"]["algorithm"].update(noise_multiplier=3.0))
    found = wrong(folder)
    assert "configuration, seed and data name the run" in found
    assert "another mechanism" in found["ledger.jsonl"]


def forge(folder: Path, change: Callable[[dict], object]) -> list[Check]:
    """Change the record, or report, write what follows from it anew, and return what is said."""
    own = (folder / "report.json").exists()
    path = folder / ("report.json" if own else "record.json")
    body = from_json(path.read_text())
    change(body)
    records.write(path, body)
    for name, text in texts_of(body).items():
        (folder / name).write_text(text)
    write_sums(folder)
    return verify(folder)


def other(value: Any) -> Any:
    """Return another value of the same kind, and one that a forger would like."""
    if isinstance(value, dict):
        return {key: other(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [other(inner) for inner in value] or ["x"]
    if isinstance(value, str):
        return {"seeded": "cryptographic", "example": "owner"}.get(value, "example")
    if isinstance(value, float) and 0 < value < 0.5:  # a δ stays one
        return value * 2
    return not value if isinstance(value, bool) else value * 2 + 1


@pytest.mark.parametrize("own", [False, True])
def test_no_value_on_privacy_is_right_because_it_says_so(
    folder: Path, make: Make, tmp_path: Path, own: bool
) -> None:
    if own:
        train(private := make(seed=1))
        private.export(folder := tmp_path / "own")
    path = folder / ("report.json" if own else "record.json")
    before = path.read_text()
    assert not [check for check in verify(folder) if check.state == "wrong"]
    privacy = from_json(before)["privacy"]
    given = {"mechanism", "randomness_from", "delta", "unit", "examples_per_patient"} & {*privacy}
    for keys in [privacy.keys() - given, *({key} for key in given)]:
        forged = {key: other(privacy[key]) for key in keys}
        said = forge(folder, lambda body, forged=forged: body["privacy"].update(forged))
        for key in keys:
            about = [check for check in said if check.what in (f"privacy.{key}", "privacy")]
            assert about, key
            assert all(check.state != "right" for check in about), key
        path.write_text(before)


@pytest.mark.parametrize(
    ("given", "stated", "source"),
    [
        ({"seed": 1}, "cryptographic", "the operating system, for every number"),
        ({"seed": 1}, "seeded", "the operating system, once"),
        ({}, "cryptographic", "the operating system, for every number"),
        ({"seed": 1}, "cryptographic", "seed 1"),
    ],
)
def test_the_ledger_says_where_randomness_came_from(
    make: Make, tmp_path: Path, given: dict[str, Any], stated: str, source: str
) -> None:
    train(private := make(**given))
    private.export(tmp_path / "own")
    forged = {"randomness": stated, "randomness_from": source}
    said = forge(tmp_path / "own", lambda body: body["privacy"].update(forged))
    assert any(check.state == "wrong" for check in said)


@pytest.mark.parametrize("own", [False, True])
def test_steps_that_were_left_out_of_the_ledger_lower_no_epsilon(
    folder: Path, make: Make, tmp_path: Path, own: bool
) -> None:
    if own:
        train(private := make())
        private.export(folder := tmp_path / "own")
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    edit(folder / "ledger.jsonl", lambda _: "".join(lines[:-3]))
    assert {"privacy.ledger", "privacy.steps", "privacy.epsilon_tight"} <= set(wrong(folder))


def test_a_run_whose_unit_is_the_example_is_not_sold_for_a_patient_s(folder: Path) -> None:
    def sell(record: dict) -> None:
        record["config"]["privacy"]["unit"] = "patient"
        privacy = record["privacy"]
        privacy["epsilon_of"] = privacy["unit"]
        for end in ("", "_at_least"):
            privacy[f"epsilon_patient{end}"] = privacy[f"epsilon_tight{end}"]
        config = config_of(record)
        record["run"] = run_digest(config, record["data"]["digest"])
        record["experiment"] = experiment_digest(config)

    (found,) = (check for check in forge(folder, sell) if check.state == "wrong")
    assert found.what == "ledger.jsonl"


def test_what_an_older_ledger_does_not_say_is_not_checked(
    folder: Path, make: Make, tmp_path: Path
) -> None:
    train(private := make(seed=1))
    private.export(tmp_path / "own")
    for place, key in ((folder, "epsilon_of"), (tmp_path / "own", "randomness")):
        path, digest = place / "ledger.jsonl", "0" * 64
        bodies = [json.loads(line) for line in path.read_text().splitlines()]
        assert key in bodies[0].pop("facts")
        lines = []
        for body in bodies:
            del body["sha256"]
            beside = "state" in body
            lines.append(make_line(digest, body).decode())
            digest = digest if beside else chain(digest, body)
        path.write_text("\n".join(lines) + "\n")
        made = {"digest": digest}
        said = forge(place, lambda body, made=made: body["privacy"]["ledger"].update(made))
        assert not [check for check in said if check.state == "wrong"]
        assert [c.state for c in said if c.what == f"privacy.{key}"] == ["not checked"]


@pytest.mark.parametrize("key", ["model.activation", "optimizer.lr", "seed", "privacy.delta"])
def test_nothing_of_the_environment_is_looked_up_for_a_record(
    folder: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_MINE", "hush")

    def ask(record: dict) -> None:
        *group, name = key.split(".")
        (record["config"][group[0]] if group else record["config"])[name] = "${oc.env:OF_MINE}"

    edit_record(folder, ask)
    for use in (verify, zdp_bench.load):
        with pytest.raises(UserError) as caught:
            use(folder)
        assert "hush" not in str(caught.value)
        assert "${oc.env:OF_MINE}" in str(caught.value)


def test_an_edited_ledger_is_found(folder: Path) -> None:
    digest = json.loads((folder / "record.json").read_text())["privacy"]["ledger"]["digest"]
    for name in ("record.json", "README.md"):
        edit(folder / name, lambda text: text.replace(digest, "0" * 64))
    assert f"says {'0' * 64}, computed {digest}" in wrong(folder)["privacy.ledger"]
    edit(folder / "ledger.jsonl", lambda text: text.replace('"step": 1', '"step": 2', 1))
    assert "the chain of digests breaks here" in wrong(folder)["ledger.jsonl"]
    (folder / "ledger.jsonl").unlink()
    assert wrong(folder)["ledger.jsonl"] == "ledger.jsonl: is missing"


def test_an_edited_card_is_found(folder: Path) -> None:
    edit(folder / "README.md", lambda text: re.sub(r"epsilon_tight: \S+", "epsilon_tight: 9", text))
    assert "it was edited" in wrong(folder)["text of README.md"]
    edit(folder / "README.md", lambda text: text.replace("**Not for release", "**Made for release"))
    assert "it was edited" in wrong(folder)["text of README.md"]


def test_the_command_exits_with_1_and_shows_the_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_record(folder, lambda record: record["privacy"].update(epsilon_tight=0.1))
    code, out, _ = command(capsys, "verify", str(folder), "--format", "md")
    assert code == 1
    assert "privacy.epsilon_tight says 0.1" in out
    edit_record(folder, lambda record: record["privacy"].pop("epsilon_tight"))
    with pytest.raises(UserError, match=r"record\.json: is damaged or not a record"):
        verify(folder)


WARNING = "Not for release to an adversary"


@pytest.mark.parametrize(
    ("overrides", "says", "leaves_out"),
    [
        (["privacy.secure=true"], "cryptographic randomness", WARNING),
        (["algorithm=sgd"], "**Not private.**", "cryptographic randomness"),
        (
            ["trainer=uniform", "trainer.sample_rate=null", "trainer.batch_size=6"],
            WARNING,
            "Not private",
        ),
        (["privacy.target_epsilon=3", "trainer.ema=0.9"], WARNING, "Not private"),
    ],
)
def test_runs_of_every_kind_verify_and_say_what_they_are(
    tmp_path: Path, overrides: list[str], says: str, leaves_out: str
) -> None:
    record = carry_out_real(tmp_path, *overrides).record
    export(tmp_path, f"quickstart/{record['run'][:4]}", tmp_path / "model")
    assert wrong(tmp_path / "model") == {}
    card = (tmp_path / "model/README.md").read_text()
    assert says in card
    assert leaves_out not in card


def test_the_releases_of_a_secure_run_that_was_set_aside_count(tmp_path: Path) -> None:
    once = carry_out_real(tmp_path, "privacy.secure=true").record
    twice = carry_out_real(tmp_path, "privacy.secure=true", "force=true").record
    assert twice["privacy"]["steps"] == 2 * once["privacy"]["steps"]
    export(tmp_path, "quickstart", tmp_path / "model")
    assert wrong(tmp_path / "model") == {}
    (tmp_path / "model/ledger.jsonl.1").unlink()
    assert "privacy.epsilon_tight" not in wrong(tmp_path / "model")  # by the record, if not ...
    assert "ledger.jsonl" in wrong(tmp_path / "model")  # ... by the ledger, which is named


@pytest.mark.filterwarnings("ignore")
def test_every_epsilon_of_a_federation_s_nodes_is_computed_again(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from zdp_bench.extras.federated.simulation import run_simulated

    words = [*GENERATED, f"paths.results={tmp_path}", "federated.nodes=2"]
    run(parse(compose(words)), Silent(), runner=run_simulated)
    export(tmp_path, "quickstart", tmp_path / "model")
    assert wrong(tmp_path / "model") == {}
    edit_record(
        tmp_path / "model", lambda record: record["privacy"]["nodes"][1].update(epsilon_tight=0.1)
    )
    assert "node 1.epsilon_tight" in wrong(tmp_path / "model")
