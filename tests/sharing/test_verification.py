"""`zdp-bench verify`: what it passes, and that it says where a folder was changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_cli import run as command
from tests.training.test_public_start import GENERATED
from tests.training.test_public_start import carry_out as carry_out_real
from tests.training.test_run import Silent
from zdp_bench.config import compose, parse
from zdp_bench.errors import UserError
from zdp_bench.sharing.export import export
from zdp_bench.sharing.folder import write_sums
from zdp_bench.sharing.verification import verify
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


def test_an_export_passes_and_says_what_was_not_checked(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(capsys, "verify", str(exported), "--format", "json")
    checks = json.loads(out)
    assert code == 0
    assert "privacy.epsilon_tight" in {c["what"] for c in checks if c["state"] == "right"}
    assert any("the training data" in c["what"] for c in checks if c["state"] == "not checked")


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
    assert [*wrong(folder)] == ["weights are those of the record"]


@pytest.mark.parametrize("key", ["epsilon_tight", "epsilon_claimed", "epsilon_patient", "z"])
def test_an_edited_number_of_the_record_is_computed_again(folder: Path, key: str) -> None:
    edit_record(folder, lambda record: record["privacy"].update({key: 0.1}))
    assert f"privacy.{key} says 0.1, computed" in wrong(folder)[f"privacy.{key}"]


def test_an_edited_mechanism_or_configuration_is_found(folder: Path) -> None:
    def quieter(record: dict) -> None:
        record["privacy"]["mechanism"]["blocks"][0]["std"] *= 2

    edit_record(folder, quieter)
    assert "blocks[0].std" in wrong(folder)["privacy.mechanism"]
    edit_record(folder, lambda record: record["config"]["algorithm"].update(noise_multiplier=3.0))
    found = wrong(folder)
    assert "configuration, seed and data name the run" in found
    assert "another mechanism" in found["ledger.jsonl"]


def test_an_edited_ledger_is_found(folder: Path) -> None:
    digest = json.loads((folder / "record.json").read_text())["privacy"]["ledger"]["digest"]
    for name in ("record.json", "README.md"):
        edit(folder / name, lambda text: text.replace(digest, "0" * 64))
    assert f"says {'0' * 64}, computed {digest}" in wrong(folder)["privacy.ledger"]
    edit(folder / "ledger.jsonl", lambda text: text.replace('"step": 3', '"step": 4', 1))
    assert "the chain of digests breaks here" in wrong(folder)["ledger.jsonl"]
    (folder / "ledger.jsonl").unlink()
    assert wrong(folder)["ledger.jsonl"] == "ledger.jsonl: is missing"


def test_steps_that_were_left_out_of_the_ledger_lower_no_epsilon(folder: Path) -> None:
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    edit(folder / "ledger.jsonl", lambda _: "".join(lines[:-3]))
    found = wrong(folder)
    assert {"privacy.ledger", "privacy.steps", "privacy.epsilon_tight"} <= set(found)


def test_an_edited_card_is_found_by_key_and_by_line(folder: Path) -> None:
    edit(folder / "README.md", lambda text: re.sub(r"epsilon_tight: \S+", "epsilon_tight: 9", text))
    (found,) = (where for what, where in wrong(folder).items() if what.startswith("head"))
    assert "differential_privacy.epsilon_tight says 9" in found
    edit(folder / "README.md", lambda text: text.replace("**Not for release", "**Made for release"))
    text = wrong(folder)["README.md says what the record says"]
    assert text.startswith("line ")


def test_a_key_more_or_less_and_a_little_less_epsilon_are_found(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    stated = float(re.findall(r"epsilon_tight: (\S+)", card)[0])
    for old, new in (
        ("differential_privacy:\n", "differential_privacy:\n  approved: true\n"),
        (f"  epsilon_tight: {stated}\n", ""),
        (f"epsilon_tight: {stated}", f"epsilon_tight: {stated * 0.9999}"),
    ):
        assert old in card
        edit(folder / "README.md", lambda _, old=old, new=new: card.replace(old, new, 1))  # type: ignore[misc]
        assert "head of README.md says what the record says" in wrong(folder), new


def test_the_command_exits_with_1_and_shows_the_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_record(folder, lambda record: record["privacy"].update(epsilon_tight=0.1))
    code, out, _ = command(capsys, "verify", str(folder), "--format", "md")
    assert code == 1
    assert "privacy.epsilon_tight says 0.1" in out
    edit_record(folder, lambda record: record["privacy"].pop("epsilon_tight"))
    with pytest.raises(UserError, match=r"record\.json: is damaged or no record"):
        verify(folder)


@pytest.mark.parametrize(
    "overrides",
    [
        ["privacy.secure=true"],
        ["algorithm=sgd"],
        ["trainer=uniform", "trainer.sample_rate=null", "trainer.batch_size=6"],
        ["privacy.target_epsilon=3", "trainer.ema=0.9"],
    ],
    ids=lambda words: words[0],
)
def test_runs_of_every_kind_verify(tmp_path: Path, overrides: list[str]) -> None:
    record = carry_out_real(tmp_path, *overrides).record
    export(tmp_path, f"quickstart/{record['run'][:4]}", tmp_path / "model")
    assert wrong(tmp_path / "model") == {}


def test_a_run_whose_unit_is_the_patient_verifies(tmp_path: Path) -> None:
    words = ["recipe=quickstart", "trainer.epochs=1", "privacy.unit=patient"]
    run(parse(compose([*words, f"paths.results={tmp_path}"])), Silent())
    export(tmp_path, "quickstart", tmp_path / "model")
    assert wrong(tmp_path / "model") == {}


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
    from zdp_bench.federated.simulation import run_simulated

    words = [*GENERATED, f"paths.results={tmp_path}", "federated.nodes=2"]
    run(parse(compose(words)), Silent(), runner=run_simulated)
    export(tmp_path, "quickstart", tmp_path / "model")
    assert wrong(tmp_path / "model") == {}
    edit_record(
        tmp_path / "model", lambda record: record["privacy"]["nodes"][1].update(epsilon_tight=0.1)
    )
    assert "node 1.epsilon_tight" in wrong(tmp_path / "model")
