"""`model.init_from`: what a run may start from, what it takes, and what its record says."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import write_mini_mnist
from tests.gradients.zoo import resnet18_weights
from tests.training.test_run import Silent
from zdp_bench.config import compose, parse
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.training.public_start import run_digest_of
from zdp_bench.training.run import Outcome, execute
from zdp_bench.training.setup import ModelSetup

SMALL = ["recipe=quickstart", "algorithm=dp_sgd", "model=real_mlp", "model.hidden=[8]"]
SMALL += ["trainer.epochs=1", "trainer.sample_rate=0.5"]
GENERATED = [*SMALL, "dataset=synthetic_images", "dataset.shape=[1,8,8]"]
GENERATED += ["dataset.train=60", "dataset.test=20"]
FROM = "model.init_from=quickstart"


def configured(results: Path, *overrides: str) -> Run:
    return parse(compose([*GENERATED, f"paths.results={results}", *overrides]))


def carry_out(results: Path, *overrides: str) -> Outcome:
    return execute(configured(results, *overrides), Silent())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A finished run on generated pictures, only to be read."""
    return carry_out(tmp_path_factory.mktemp("start"))


@pytest.fixture
def start(done: Outcome, tmp_path: Path) -> Outcome:
    """The finished run in this test's own results folder."""
    home = tmp_path.joinpath(*done.path.parts[-4:-1])
    shutil.copytree(done.path.parent, home)
    return replace(done, path=home / "record.json")


def state_data(outcome: Outcome, **data: str) -> None:
    """Let a finished run say that it was trained on other data."""
    record = json.loads(outcome.path.read_text())
    record["data"] |= data
    outcome.path.write_text(json.dumps(record))
    (outcome.path.parent / "spending.json").unlink(missing_ok=True)  # names the generated data


def setup_of(results: Path, *overrides: str) -> ModelSetup:
    return ModelSetup.of(configured(results, *overrides))


def test_a_model_starts_from_the_weights_that_a_run_ended_with(
    start: Outcome, tmp_path: Path
) -> None:
    saved = torch.load(start.path.parent / "checkpoint.pt", weights_only=True)["model"]
    weights = setup_of(tmp_path, FROM, "seed=5").model.state_dict()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    fresh = setup_of(tmp_path, "seed=5").model.state_dict()
    assert not all(torch.equal(fresh[name], saved[name]) for name in saved)


def test_the_record_names_the_start_and_its_data(start: Outcome, tmp_path: Path) -> None:
    record = carry_out(tmp_path, FROM, "seed=1").record.document
    named_start = record["start"]
    assert (named_start["run"], named_start["recipe"]) == (
        start.record.document["run"],
        "quickstart",
    )
    assert named_start["data"] == {"name": "synthetic_images", "provenance": "synthetic"}
    assert named_start["public"] is True
    message = "starts from public weights: recipe=quickstart on synthetic_images"
    assert message in record["data"]["notes"]
    assert "start" not in start.record.document


def test_runs_from_other_weights_are_other_runs_with_other_noise(
    start: Outcome, tmp_path: Path
) -> None:
    def digest_in(results: Path) -> str:
        return run_digest_of(configured(results, FROM), "data")

    first = digest_in(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "moved")
    assert digest_in(tmp_path / "moved") == first  # the same weights
    path = start.path.parent / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    next(iter(saved["model"].values())).add_(1)
    torch.save(saved, path)
    assert digest_in(tmp_path) != first  # the same configuration
    carry_out(tmp_path, "seed=1")
    with pytest.raises(UserError, match=r"2 runs match.*quickstart/"):
        setup_of(tmp_path, FROM)


def test_weights_that_know_private_data_are_refused(start: Outcome, tmp_path: Path) -> None:
    state_data(start, provenance="official", name="chest_xray")
    with pytest.raises(UserError, match=r"chest_xray, .*public"):
        setup_of(tmp_path, FROM)
    state_data(start, name="brought_by_a_plugin")
    with pytest.raises(UserError, match="neither generated nor public"):
        setup_of(tmp_path, FROM)
    state_data(start, name="cifar10")
    setup_of(tmp_path, FROM)  # its card says that it is public


def test_public_data_that_the_run_is_to_protect_is_refused(start: Outcome, tmp_path: Path) -> None:
    state_data(start, provenance="official", name="fashion_mnist")
    own = ["recipe=quickstart", "dataset=fashion_mnist", FROM, f"paths.results={tmp_path}"]
    config = parse(compose(own))
    with pytest.raises(UserError, match="whose files this run should keep private"):
        run_digest_of(config, "data")
    for dataset, other in (("public_kspace", "cifar10"), ("cifar10", "public_kspace")):
        state_data(start, provenance="derived", name=dataset)
        with pytest.raises(UserError, match="whose files this run should keep private"):
            run_digest_of(replace(config, dataset=replace(config.dataset, name=other)), "data")


def write_under_two_names(folder: Path) -> list[str]:
    """Write the same pictures as FashionMNIST and as Other; return the overrides that read them."""
    write_mini_mnist(folder)
    for name in ("FashionMNIST", "Other"):
        shutil.copytree(folder / "MNIST", folder / name)
    shutil.rmtree(folder / "MNIST")
    paths = [f"paths.data={folder}", f"paths.results={folder / 'results'}"]
    return [*SMALL, "dataset.check=false", *paths]


def test_the_same_files_under_another_name_are_refused(tmp_path: Path) -> None:
    words = write_under_two_names(tmp_path)
    execute(parse(compose([*words, "dataset=fashion_mnist"])), Silent())
    (tmp_path / "Other").rename(tmp_path / "MNIST")
    config = parse(compose([*words, "dataset=mnist", FROM]))
    with pytest.raises(UserError, match="whose files this run should keep private"):
        execute(config, Silent())
    write_mini_mnist(tmp_path, train=150, test=40)  # no file is as before
    execute(config, Silent())


def let_start_from(start: Outcome, *names: str) -> None:
    """Let a finished run on generated pictures say that it started from weights of other data."""
    document = json.loads(start.path.read_text())
    trained_on = [{"name": name, "provenance": "official"} for name in names]
    document["start"] = {"recipe": "quickstart", "trained_on": trained_on}
    start.path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("earlier", "dataset", "reason"),
    [
        (["fashion_mnist"], "fashion_mnist", "on dataset=fashion_mnist, whose files this run"),
        (["cifar10", "fashion_mnist"], "fashion_mnist", "on dataset=fashion_mnist, whose files"),
        (["public_kspace"], "cifar10", "on dataset=public_kspace, whose files this run"),
        (["chest_xray"], "fashion_mnist", "on dataset=chest_xray, which is neither generated nor"),
        (["fashion_mnist", "cifar10"], "mnist", None),
    ],
)
def test_what_a_start_itself_started_from_is_public_and_other_data_too(
    start: Outcome, tmp_path: Path, earlier: list[str], dataset: str, reason: str | None
) -> None:
    """A few steps on generated pictures made the weights of any run a public start."""
    let_start_from(start, *earlier)
    words = ["recipe=quickstart", f"dataset={dataset}", FROM, f"paths.results={tmp_path}"]
    config = parse(compose(words))
    if reason is None:
        assert run_digest_of(config, "data")
        return
    with pytest.raises(UserError, match=reason):
        run_digest_of(config, "data")


@pytest.mark.parametrize("start_of_record", [{"recipe": "a"}, {"trained_on": [{"name": 3}]}, "a"])
def test_a_start_that_does_not_state_all_its_data_is_refused(
    start: Outcome, tmp_path: Path, start_of_record: object
) -> None:
    document = json.loads(start.path.read_text()) | {"start": start_of_record}
    start.path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="does not state all data"):
        setup_of(tmp_path, FROM)


def test_files_that_a_start_itself_started_from_are_refused_under_another_name(
    tmp_path: Path,
) -> None:
    words = write_under_two_names(tmp_path)
    first = execute(parse(compose([*words, "dataset=fashion_mnist"])), Silent())
    generated = [*words[:-3], *GENERATED, "dataset.shape=[1,28,28]", words[-1]]
    started = f"model.init_from={first.record.run[:8]}"
    second = execute(parse(compose([*generated, "seed=1", started])), Silent())
    trained_on = second.record.document["start"]["trained_on"]
    assert trained_on == [{"name": "fashion_mnist", "provenance": first.record.data.provenance}]
    started = f"model.init_from={second.record.run[:8]}"
    third = execute(parse(compose([*generated, "seed=2", started])), Silent())
    names = [data_set["name"] for data_set in third.record.document["start"]["trained_on"]]
    assert names == ["synthetic_images", "fashion_mnist"]
    assert "on synthetic_images (synthetic), after fashion_mnist (" in third.record.data.notes
    (tmp_path / "Other").rename(tmp_path / "MNIST")
    for run in (second, third):
        started = f"model.init_from={run.record.run[:8]}"
        with pytest.raises(UserError, match="fashion_mnist, whose files this run should keep"):
            execute(parse(compose([*words, "dataset=mnist", started])), Silent())


def test_a_start_that_cannot_be_used_is_explained(start: Outcome, tmp_path: Path) -> None:
    for word, message in (
        ("model.init_from=mnist", r"no finished run.*zdp-bench run recipe=mnist"),
        ("model.init_from=0123456789", "`zdp-bench results` lists the runs"),
        ("model.hidden=[9]", r"belong to another model .*Set model\.init_from=null"),
        ("federated.nodes=2", "federated training starts from new weights"),
        ("model.start=unit_variance", r"model\.start=unit_variance.*Use only one of them"),
    ):
        with pytest.raises(UserError, match=message):
            setup_of(tmp_path, FROM, word)
    setup_of(
        tmp_path, f"model.init_from={start.record.document['run'][:8]}"
    )  # as `results` prints it
    (start.path.parent / "checkpoint.pt").unlink()
    with pytest.raises(UserError, match="no finished run with weights"):
        setup_of(tmp_path, FROM)


def train_transfer(results: Path, weights: Path) -> Outcome:
    """Train ResNet-18 for one step, from a file of weights."""
    words = ["recipe=quickstart", "algorithm=dp_sgd", "model=resnet18_transfer"]
    words += ["dataset=synthetic_images", "dataset.shape=[3,32,32]", "dataset.train=10"]
    words += ["dataset.test=10", "trainer.epochs=1", "trainer.sample_rate=1"]
    words += [f"model.weights={weights}", f"paths.results={results}"]
    return execute(parse(compose(words)), Silent())


def test_a_run_from_another_file_of_weights_is_another_run(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    shutil.copy(resnet18_weights(), path)
    first = train_transfer(tmp_path, path)
    assert train_transfer(tmp_path, path).was_recorded
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert first.record.document["model"]["files"] == {"model.weights": sha256}
    weights = torch.load(path)
    weights["conv1.weight"].add_(1)
    torch.save(weights, path)
    other = train_transfer(tmp_path, path)  # was "done before", with the first file's metrics
    assert not other.was_recorded
    assert other.record.run != first.record.run
    path.unlink()
    with pytest.raises(UserError, match=r"^model\.weights=.*weights\.pth: file not found\. Set it"):
        train_transfer(tmp_path, path)
