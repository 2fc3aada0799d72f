"""`zdp-bench verify`: what it passes, and that it says where a folder was changed."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zdp_bench
from tests.extras.sharing.conftest import edit, edit_source, forge, head_of, source_of, wrong
from tests.gradients.zoo import resnet18_weights
from tests.library.conftest import Make
from tests.library.small import train
from tests.test_cli import run as command
from tests.training.test_public_start import GENERATED, train_transfer
from tests.training.test_public_start import carry_out as carry_out_real
from tests.training.test_run import Silent
from zdp_bench.config import compose, configured, parse
from zdp_bench.config.digests import experiment_digest, run_digest
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.export import export
from zdp_bench.extras.sharing.folder import read, write_sums
from zdp_bench.extras.sharing.loading import config_of, load
from zdp_bench.extras.sharing.verification import verify
from zdp_bench.library import starts
from zdp_bench.privacy.ledger_lines import Head, Start, chain, make_line, read_ledger
from zdp_bench.records import from_json
from zdp_bench.training.run import execute


@pytest.fixture(scope="module", autouse=True)
def forget() -> None:
    """The weights that other tests of this process left are none that these start from."""
    starts._KNOWN.clear()


WARNING = "Not for release to an adversary"
UNIFORM = ["trainer=uniform", "trainer.sample_rate=null", "trainer.batch_size=6"]


def test_an_export_passes_and_says_what_was_not_checked(
    either: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(capsys, "verify", str(either), "--format", "json")
    checks = json.loads(out)
    passed = {check["what"] for check in checks if check["state"] == "passed"}
    assert code == 0, out
    checked = ("epsilon_tight", "epsilon_of", "z", "steps", "ledger")
    assert {f"privacy.{key}" for key in checked} <= passed
    assert "weights are those that were exported" in passed
    unchecked = "fixed_state" if either.name == "loop" else "the training data"
    assert any(unchecked in c["what"] for c in checks if c["state"] == "not checked")
    edit_source(either, lambda body: body["privacy"].update(epsilon_tight=0.1))
    code, out, _ = command(capsys, "verify", str(either), "--format", "md")
    assert (code, "| privacy.epsilon_tight | failed | says 0.1, computed " in out) == (1, True)
    edit_source(either, lambda body: body["privacy"].pop("epsilon_tight"))
    with pytest.raises(UserError, match=r"\.json: .* privacy\.epsilon_tight"):
        verify(either)


@pytest.mark.parametrize("section", ["dataset", "model", "algorithm", "optimizer", "privacy"])
def test_an_option_of_an_earlier_version_counts_only_where_it_was_on(
    folder: Path, section: str
) -> None:
    """`dataset.columns: null` of a run on own pictures was an unknown key, and the export lost."""
    forge(folder, lambda body: body["config"][section].update(columns=None))
    assert not wrong(folder)
    assert load(folder)
    with pytest.raises(UserError, match=rf"key '{section}\.columns' is not known"):
        forge(folder, lambda body: body["config"][section].update(columns="a"))


def test_a_flipped_byte_is_found_in_every_file(either: Path) -> None:
    for path in {*either.iterdir()} - {source_of(either), either / "SHA256SUMS"}:
        before = path.read_bytes()
        path.write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + before[-1:])
        assert f"SHA-256 of {path.name}" in wrong(either)
        if path.name == "model.safetensors":  # held to the record, whatever the digests say
            write_sums(either)
            assert [*wrong(either)] == ["weights are those that were exported"]
        path.write_bytes(before)
        write_sums(either)


def other(value: Any) -> Any:
    """Return another value of the same kind, and one that a forger would like."""
    if isinstance(value, dict):
        return {key: other(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [other(inner) for inner in value] or ["x"]
    if isinstance(value, str):
        others = {"seeded": "cryptographic", "example": "owner", "poisson": "uniform"}
        return others.get(value, "example")
    if isinstance(value, float) and 0 < value <= 1:  # a δ and a rate stay ones
        return value * 2 if value < 0.5 else value / 2
    return not value if isinstance(value, bool) else value * 2 + 1


def test_no_value_on_privacy_is_right_because_it_says_so(either: Path) -> None:
    path = source_of(either)
    before = path.read_text()
    assert not wrong(either)
    privacy = from_json(before)["privacy"]
    given = {"mechanism", "randomness_from", "delta", "unit", "examples_per_patient"} & {*privacy}
    for keys in [privacy.keys() - given, *({key} for key in given)]:
        forged = {key: other(privacy[key]) for key in keys}
        findings = forge(either, lambda body, forged=forged: body["privacy"].update(forged))
        for key in keys:
            about = [check for check in findings if check.what in (f"privacy.{key}", "privacy")]
            assert about, key
            assert all(check.state != "passed" for check in about), key
        path.write_text(before)


@pytest.mark.parametrize(
    ("given", "stated", "source"),
    [
        ({"seed": 1}, "cryptographic", "the operating system, for every number"),
        ({"seed": 1}, "seeded", "the operating system, at each step"),
        ({}, "cryptographic", "the operating system, for every number"),
        ({"seed": 1}, "cryptographic", "seed 1"),
    ],
)
def test_the_ledger_says_where_randomness_came_from(
    make: Make, tmp_path: Path, given: dict[str, Any], stated: str, source: str
) -> None:
    train(private := make(**given), most=2)
    private.export(tmp_path / "own")
    forged = {"randomness": stated, "randomness_from": source}
    findings = forge(tmp_path / "own", lambda body: body["privacy"].update(forged))
    assert any(check.state == "failed" for check in findings)


def test_steps_that_were_left_out_of_the_ledger_lower_no_epsilon(either: Path) -> None:
    lines = (either / "ledger.jsonl").read_text().splitlines(keepends=True)
    edit(either / "ledger.jsonl", lambda _: "".join(lines[:-3]))
    assert {"privacy.ledger", "privacy.steps", "privacy.epsilon_tight"} <= set(wrong(either))


def test_an_example_s_epsilon_is_not_sold_for_an_owner_s(folder: Path, loop: Path) -> None:
    def sell(record: dict) -> None:
        record["config"]["privacy"]["unit"] = "patient"
        privacy = record["privacy"]
        privacy["epsilon_of"] = privacy["unit"]
        for end in ("", "_at_least"):
            privacy[f"epsilon_patient{end}"] = privacy[f"epsilon_tight{end}"]
        config = config_of(record)
        record["run"] = run_digest(config, record["data"]["digest"])
        record["experiment"] = experiment_digest(config)

    forge(folder, sell)
    assert [*wrong(folder)] == ["ledger.jsonl"]
    edit_source(loop, lambda report: report["privacy"].update(epsilon_of="owner"))
    assert "privacy.epsilon_of" in wrong(loop)
    edit_source(loop, lambda report: report["privacy"].update(examples_per_owner=1))
    edit_source(loop, lambda report: report.update(owners="0" * 64))
    assert "other owners" in wrong(loop)["ledger.jsonl"]


def test_what_an_older_ledger_does_not_say_is_not_checked(folder: Path, loop: Path) -> None:
    for place, key in ((folder, "epsilon_of"), (loop, "randomness")):
        path, digest = place / "ledger.jsonl", "0" * 64
        entries = [line.entry for line in read_ledger(path)]
        head = entries[0]
        assert isinstance(head, Head)
        assert key in head.facts
        entries[0] = replace(head, facts={})
        content = b""
        for entry in entries:
            content += make_line(digest, entry)
            digest = digest if isinstance(entry, Start) else chain(digest, entry)
        path.write_bytes(content)
        made = {"digest": digest}
        findings = forge(place, lambda body, made=made: body["privacy"]["ledger"].update(made))
        assert not wrong(place)
        assert [c.state for c in findings if c.what == f"privacy.{key}"] == ["not checked"]


@pytest.mark.parametrize("key", ["model.activation", "seed"])
def test_nothing_of_the_environment_is_looked_up_for_a_record(
    folder: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_MINE", "hush")

    def ask(record: dict) -> None:
        *group, name = key.split(".")
        (record["config"][group[0]] if group else record["config"])[name] = "${oc.env:OF_MINE}"

    edit_source(folder, ask)
    for use in (verify, zdp_bench.load):
        with pytest.raises(UserError) as caught:
            use(folder)
        assert "hush" not in str(caught.value)
        assert "${oc.env:OF_MINE}" in str(caught.value)


def test_an_edited_ledger_configuration_or_mechanism_is_found(folder: Path, loop: Path) -> None:
    edit(folder / "ledger.jsonl", lambda text: text.replace('"step": 1', '"step": 2', 1))
    assert "the chain of digests breaks here" in wrong(folder)["ledger.jsonl"]
    (folder / "ledger.jsonl").unlink()
    assert wrong(folder)["ledger.jsonl"] == "ledger.jsonl: is missing"
    edit_source(folder, lambda record: record["config"]["algorithm"].update(noise_multiplier=3.0))
    assert "configuration, seed and data name the run" in wrong(folder)
    edit_source(loop, lambda report: report["privacy"]["mechanism"]["blocks"][0].update(std=9.0))
    assert "another mechanism" in wrong(loop)["ledger.jsonl"]
    block = {"dtype": {}, "name": "0.weight"}  # a stranger's, of another type
    for forge_it in (
        lambda report: report["privacy"]["mechanism"]["blocks"][0].update(block),
        lambda report: report["privacy"]["mechanism"].pop("joint"),
    ):
        edit_source(loop, forge_it)
        assert "describes no mechanism" in wrong(loop)["ledger.jsonl"]


def test_an_edited_card_is_found(either: Path) -> None:
    edit(either / "README.md", lambda text: re.sub(r"epsilon_tight: \S+", "epsilon_tight: 9", text))
    assert "was edited after the export" in wrong(either)["text of README.md"]


@pytest.mark.parametrize(
    ("words", "says", "leaves_out"),
    [
        (["privacy.secure=true"], "cryptographic randomness", WARNING),
        (["algorithm=sgd"], "**Not private.**", "cryptographic randomness"),
        (UNIFORM, WARNING, "Not private"),
        (["privacy.target_epsilon=3", "trainer.ema=0.9"], WARNING, "Not private"),
        (["algorithm=band_mf", "algorithm.bands=2"], " in one step of 2, ", "Not private"),
    ],
)
def test_runs_of_every_kind_verify_and_say_what_they_are(
    tmp_path: Path, words: list[str], says: str, leaves_out: str
) -> None:
    record = carry_out_real(tmp_path, *words).record.document
    export(tmp_path, f"quickstart/{record['run'][:4]}", tmp_path / "model")
    assert wrong(tmp_path / "model") == {}
    card = (tmp_path / "model/README.md").read_text()
    assert says in card
    assert leaves_out not in card


def test_the_card_says_whose_the_epsilon_is(tmp_path: Path) -> None:
    words = ["recipe=quickstart", "trainer.epochs=1", "privacy.unit=patient"]
    execute(configured([*words, f"paths.results={tmp_path}"]), Silent())
    export(tmp_path, "quickstart", tmp_path / "model")
    text = (tmp_path / "model" / "README.md").read_text()
    assert head_of(tmp_path / "model")["differential_privacy"]["epsilon_of"] == "image"
    assert "| ε of an image with 2 examples, tight |" in text
    assert "ε of one example" not in text
    assert wrong(tmp_path / "model") == {}


@pytest.mark.parametrize(
    ("given", "says", "leaves_out"),
    [
        ({"seed": 3}, f"**{WARNING}.**", "cryptographic randomness"),
        ({"secure": True}, "cryptographic randomness", WARNING),
        ({"noise_multiplier": 0.0}, "**Not private.**", "cryptographic randomness"),
        (
            {"unit": lambda index: index // 2, "max_examples": 2},
            "ε of one owner with 2 examples or fewer in a step, tight",
            "a person who owns several examples",
        ),
    ],
)
def test_trainings_of_every_kind_verify_and_say_what_they_are(
    make: Make, tmp_path: Path, given: dict[str, Any], says: str, leaves_out: str
) -> None:
    train(private := make(**given), most=2)
    private.export(tmp_path / "model")
    text = (tmp_path / "model/README.md").read_text()
    assert says in text
    assert leaves_out not in text
    assert wrong(tmp_path / "model") == {}
    assert "model-index" not in head_of(tmp_path / "model")  # a hub refuses one without numbers


def test_the_releases_of_a_secure_run_that_was_set_aside_count(tmp_path: Path) -> None:
    once = carry_out_real(tmp_path, "privacy.secure=true").record.document
    twice = carry_out_real(tmp_path, "privacy.secure=true", "force=true").record.document
    assert twice["privacy"]["steps"] == 2 * once["privacy"]["steps"]
    export(tmp_path, "quickstart", tmp_path / "model")
    assert wrong(tmp_path / "model") == {}
    (tmp_path / "model/ledger.jsonl.1").unlink()
    assert "privacy.epsilon_tight" not in wrong(tmp_path / "model")  # by the record, if not ...
    assert "ledger.jsonl" in wrong(tmp_path / "model")  # ... by the ledger, which is named


@pytest.fixture(scope="module")
def exported_federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a federation with two nodes, which no test may change."""
    pytest.importorskip("flwr")
    from zdp_bench.extras.federated.simulation import run_simulated

    results = tmp_path_factory.mktemp("federation")
    words = [*GENERATED, f"paths.results={results}", "federated.nodes=2"]
    execute(parse(compose(words)), Silent(), runner=run_simulated)
    export(results, "quickstart", results / "model")
    return results / "model"


@pytest.fixture
def federation(exported_federation: Path, tmp_path: Path) -> Path:
    """A copy of the federation's export for a test to spoil."""
    return Path(shutil.copytree(exported_federation, tmp_path / "federation"))


# What only a node's ledger or data determines, which the folder lacks.
OPEN_KEYS = {"privacy.unit"} | {
    f"node 1.{key}" for key in ("ledger", "steps", "answers", "examples_per_patient")
}


@pytest.mark.filterwarnings("ignore")
def test_no_value_of_a_federation_is_right_because_it_says_so(federation: Path) -> None:
    """Of the whole, only the ε had been compared: a forger could claim any noise, δ or z."""
    path = source_of(federation)
    before = path.read_text()
    assert wrong(federation) == {}
    privacy = from_json(before)["privacy"]
    places = [("privacy", key) for key in privacy if key != "nodes"]
    places += [("node 1", key) for key in privacy["nodes"][1] if key != "node"]
    for where, key in places:

        def change(record: dict, where: str = where, key: str = key) -> None:
            stated = record["privacy"]
            section = stated if where == "privacy" else stated["nodes"][1]
            section[key] = other(section[key])

        states = {check.what: check.state for check in forge(federation, change)}
        expected = "not checked" if f"{where}.{key}" in OPEN_KEYS else "failed"
        assert states[f"{where}.{key}"] == expected, (where, key)
        path.write_text(before)


def lower_steps(record: dict) -> None:
    for section in (record["privacy"], *record["privacy"]["nodes"]):
        section["steps"] = 1


def lower_rounds(record: dict) -> None:
    lower_steps(record)
    record["federation"] = {"rounds": 1, "asked": 1}
    record["stopped_by"] = "budget"  # though it has none


def lower_counts(record: dict) -> None:
    """State fewer steps than the node's ledger has entries."""
    lower_steps(record)
    record.pop("federation")


def hide_nodes(record: dict) -> None:
    record["privacy"].update(nodes=[], ledger={"entries": 0, "digest": ""})


def enlarge_node(record: dict) -> None:
    record["privacy"]["nodes"][0]["sampling"]["records"] += 1000


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda record: record["privacy"]["nodes"].pop(0), "numbers of the nodes"),
        (hide_nodes, "numbers of the nodes"),
        (lower_steps, "fewest steps of node 1"),
        (lower_rounds, "federation.rounds"),
        (lower_counts, "fewest steps of node 0"),
        (enlarge_node, "records of the nodes"),
    ],
)
def test_a_federation_states_all_its_nodes_rounds_and_records(
    federation: Path, change: Callable[[dict], object], what: str
) -> None:
    edit_source(federation, change)
    assert what in wrong(federation)


@pytest.mark.filterwarnings("ignore")
def test_examples_that_a_node_of_version_0_1_does_not_state_are_not_checked(
    federation: Path,
) -> None:
    def age(record: dict) -> None:
        for node in record["privacy"]["nodes"]:
            del node["examples_per_patient"]

    states = {check.what: check.state for check in forge(federation, age)}
    assert "failed" not in states.values()
    for what in ("privacy.examples_per_patient", "node 0.epsilon_patient"):
        assert states[what] == "not checked"
    assert states["privacy.epsilon_patient"] == "passed"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("records", "examples", "fits"), [(9000, 3000, True), (9, 10, False)])
def test_a_site_may_have_more_examples_of_a_patient_than_its_server_has_in_all(
    federation: Path, records: int, examples: int, fits: bool
) -> None:
    """With `federated.patients=own`, no export could be made of such a record."""

    def enlarge(record: dict) -> None:
        record["data"]["train"] = 1
        privacy = record["privacy"]
        privacy["examples_per_patient"] = examples
        for node in privacy["nodes"]:
            node["sampling"]["records"] = records
            node["examples_per_patient"] = examples

    edit_source(federation, enlarge)
    if fits:
        assert read(federation)["privacy"]["examples_per_patient"] == examples
    else:
        with pytest.raises(UserError, match="examples_per_patient"):
            read(federation)


def test_a_run_that_calls_itself_a_federation_keeps_its_ledger(folder: Path) -> None:
    def disguise(record: dict) -> None:
        privacy = record["privacy"]
        privacy["steps"] = 1
        privacy["nodes"] = [{**privacy, "node": 0}]

    edit_source(folder, disguise)
    assert {"privacy.nodes", "privacy.steps"} <= wrong(folder).keys()


def test_values_that_no_check_compares_are_named(either: Path) -> None:
    edit_source(either, lambda source: source.update(anything=1))
    names = " ".join(check.what for check in verify(either) if check.state == "not checked")
    keys = {"inputs", "name"} if either.name == "loop" else {"epochs", "headline"}
    assert keys | {"anything"} <= set(re.findall(r"\w+", names))


def test_the_digest_of_a_file_of_weights_names_the_run(tmp_path: Path) -> None:
    train_transfer(tmp_path, Path(resnet18_weights()))
    folder = tmp_path / "model"
    export(tmp_path, "quickstart", folder)
    assert not wrong(folder)
    forge(folder, lambda record: record["model"]["files"].update({"model.weights": "0" * 64}))
    assert [*wrong(folder)] == ["configuration, seed and data name the run"]
