"""`zdp-bench validate`: every recipe, without reading an example; its report against the run."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from tests.test_cli import leave
from tests.test_cli import run as command
from tests.training.test_run import Silent, carry_out, configured
from zdp_bench import assets, registry
from zdp_bench.config import compose, parse
from zdp_bench.data import Dataset, Splits
from zdp_bench.data.phasemnist import PhaseDigits
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import Report, validate
from zdp_bench.report.terminal import show_validation
from zdp_bench.training import build
from zdp_bench.training.run import execute


def validated(*words: str) -> Report:
    return validate(parse(compose([*words])), trial=False)


@pytest.fixture
def _nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a data set is an error, but for one that needs no files."""

    def forbid(dataset: Dataset, root: Path) -> Splits:
        raise AssertionError(f"{type(dataset).__name__} was read")

    for name in {*registry.names("dataset")} - {"phase_digits", "synthetic_images"}:
        monkeypatch.setattr(registry.lookup("dataset", name), "load", forbid)


def recipes() -> Iterator[Any]:
    """Every recipe: those with a data set or a model of their own now, the others at night."""
    seen = set[str]()
    for recipe, path in assets.group(assets.RECIPES).items():
        chosen = assets.read_yaml(path).get("defaults", [])
        kinds = {str(d) for d in chosen if {*d} & {"override /dataset", "override /model"}}
        yield pytest.param(recipe, marks=[pytest.mark.slow] * (kinds <= seen))
        seen |= kinds


@pytest.mark.usefixtures("_nothing_is_read")
@pytest.mark.parametrize("recipe", [*recipes()])
def test_every_recipe_validates_without_its_data(recipe: str, tmp_path: Path) -> None:
    own = []
    if recipe.startswith("gredp_transfer"):  # no download in a test
        own = [f"model.weights={tmp_path / 'resnet18.pth'}"]
        torch.save(
            torchvision.models.resnet18(weights=None).state_dict(), tmp_path / "resnet18.pth"
        )
    report = validated(f"recipe={recipe}", f"paths.data={tmp_path}", *own)
    assert report.data["train"] > 0
    assert sum(layer.parameters for layer in report.layers) == report.model["parameters_real"]
    # GReDP as published adds noise, and leaves a direction without any.
    private = report.privacy["z"] > 0
    assert (report.privacy["epsilon_tight"] < 1e6) == private
    epsilon = report.privacy["epsilon_patient"]
    assert epsilon is None or epsilon >= report.privacy["epsilon_tight"]
    assert show_validation(dataclasses.asdict(report))


def test_the_report_agrees_with_the_run(tmp_path: Path) -> None:
    report = validate(configured(tmp_path))
    record = carry_out(tmp_path).record.document
    assert report.model["parameters_real"] == record["model"]["parameters_real"]
    shared = ("z", "delta", "unit", "noise_multiplier")
    for key in (*shared, *(f"epsilon_{kind}" for kind in ("claimed", "tight", "rdp", "patient"))):
        assert report.privacy[key] == record["privacy"][key]
    assert report.sampling["steps"] == record["privacy"]["steps"]
    assert report.sampling["records"] == record["data"]["train"]
    assert report.cost is not None
    assert report.cost.seconds > 0
    assert report.cost.bytes > 4 * 3 * report.model["parameters_real"]


@pytest.mark.parametrize(
    ("recipe", "shown"),
    [("phasemnist", "7.27, for an image with 2 examples"), ("mnist", "1 example")],
)
def test_the_epsilon_of_an_image_is_shown(recipe: str, shown: str, tmp_path: Path) -> None:
    report = validated(f"recipe={recipe}", f"paths.data={tmp_path}")
    facts = show_validation(dataclasses.asdict(report))[0]
    assert shown in str(facts.rows)


@pytest.mark.parametrize(
    ("many", "rows"),
    [
        (1, {"tight ε": "per recording", "ε per recording": "for a recording with 1 example"}),
        (
            3,
            {
                "ε per recording": "for a recording with 3 examples",
                "ε per example": "for one of a recording's examples",
            },
        ),
    ],
)
def test_an_owner_of_one_example_has_no_epsilon_of_a_part(
    many: int, rows: dict[str, str], tmp_path: Path
) -> None:
    report = dataclasses.asdict(validated("recipe=phasemnist", f"paths.data={tmp_path}"))
    report["data"]["examples_per_patient"] = many
    report["privacy"] |= {"unit": "recording", "epsilon_of": "recording", "epsilon_part": 2.0}
    facts = dict(show_validation(report)[0].rows)
    assert all(words in facts[name] for name, words in rows.items())
    assert ("ε per example" in facts) == (many > 1)


def test_replaced_layers_and_rules_are_named(tmp_path: Path) -> None:
    words = ["recipe=chest_xray_strict", "model.width=8", "model.hidden=8", "model.pool=1"]
    words += ["dataset.size=32", f"paths.data={tmp_path}"]
    report = validated(*words)
    assert not report.data["found"]
    assert len(report.surgery) == 8
    assert {layer.rule for layer in report.layers if layer.kind == "Linear"} == {
        "book-keeping, linear; C = 1 over all layers"
    }
    reference = validated(*words, "algorithm.gradients=reference")
    assert all(layer.rule.startswith("torch.func, the whole model") for layer in reference.layers)


def test_the_verb_prints_json_and_refuses_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=quickstart", "--format", "json", f"paths.data={tmp_path}"]
    code, out, _ = command(capsys, "validate", *words)
    assert code == 0
    assert json.loads(out)["data"]["train"] == 1426
    words = ["recipe=quickstart", "algorithm.noise_multiplier=0", *words[1:]]
    _, out, _ = command(capsys, "validate", *words)
    shown = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert shown["privacy"]["epsilon_tight"] == "inf"
    assert "Did you mean 'quickstart'" in leave(["validate", "recipe=quickstrt"], capsys)


def test_a_data_set_that_can_only_load_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    described = validated("recipe=quickstart")
    monkeypatch.setattr(PhaseDigits, "info", Dataset.info)
    assert validated("recipe=quickstart") == described


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("precision=tf32", "precision=tf32 is for non-private"),
        ("task=segmentation", "task=segmentation: needs two classes, but dataset=phase_digits"),
        ("model.init_from=mnist", "model.init_from=mnist: no finished run with weights"),
        (
            "dataset=synthetic_images dataset.shape=[3,32,32] model=vgg11 model.norm=batch "
            "model.width=4 model.hidden=4 model.pool=1 algorithm=dp_sgd",
            "set model.replace_batchnorm",
        ),
        ("privacy.total_budget=0.001", "privacy.total_budget=0.001: "),
        ("model=resnet20", "model=resnet20 and task=classification do not fit"),
    ],
)
@pytest.mark.parametrize(
    "does", [lambda config: validate(config, as_run=True), lambda config: execute(config, Silent())]
)
def test_what_a_run_refuses_is_refused_by_validate_too(
    tmp_path: Path, word: str, sentence: str, does: Any
) -> None:
    with pytest.raises(UserError, match=sentence):
        does(parse(compose(["recipe=quickstart", f"paths.results={tmp_path}", *word.split()])))


def test_a_federation_has_no_more_nodes_than_examples() -> None:
    with pytest.raises(UserError, match=r"^federated.nodes=100000: must be at most the [\d,]+ ex"):
        validated("recipe=quickstart", "federated.nodes=100000")


def test_what_an_optimizer_refuses_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^optimizer=sgd: .*fused.*foreach"):
        validated("recipe=mnist", "++optimizer.fused=true", "++optimizer.foreach=true")

    def refuses(self: torch.optim.SGD) -> None:
        kinds = {parameter.dtype for group in self.param_groups for parameter in group["params"]}
        raise RuntimeError(f"not of {kinds}\nand more")

    monkeypatch.setattr(torch.optim.SGD, "step", refuses)
    monkeypatch.setattr(build, "_STEPPING", set())
    with pytest.raises(UserError, match=r"^optimizer=sgd: .*complex64"):
        validated("recipe=quickstart", "optimizer=sgd")


@pytest.mark.parametrize(
    ("noise", "asked"), [("real", "max_epsilon"), ("as_published", "target_epsilon")]
)
def test_no_budget_and_no_target_where_a_direction_gets_no_noise(
    tmp_path: Path, noise: str, asked: str
) -> None:
    words = ["recipe=quickstart", "dataset=synthetic_images", "model=lenet5", "algorithm=gredp"]
    words += [f"algorithm.noise={noise}", f"privacy.{asked}=2", "threads=1"]
    config = parse(compose([*words, f"paths.results={tmp_path}"]))
    message = (
        rf"^privacy\.{asked}=2 with algorithm=gredp.*: some direction gets no noise, so .*ε is ∞"
    )
    for does in (validate, lambda config: execute(config, Silent())):
        with pytest.raises(UserError, match=message):
            does(config)
    assert not list(tmp_path.glob("runs/*/*/record.json"))


def test_without_the_files_an_epsilon_per_owner_is_not_guessed(tmp_path: Path) -> None:
    """It was that of the average speaker, as if nobody had more clips."""
    root = f"paths.data={tmp_path}"
    report = validated("recipe=speech_linear", "privacy.unit=example", root)
    assert report.data["examples_per_patient"] is report.privacy["epsilon_patient"] is None
    facts = dict(show_validation(dataclasses.asdict(report))[0].rows)
    assert facts["data"].endswith("the counts are estimated from the release; see `zdp-bench data`")
    says = "unknown without the files, as is the largest number of examples of a speaker"
    assert facts["ε per speaker"] == says
    report = validated("recipe=speech_linear", root)
    assert report.privacy["epsilon_patient"] == report.privacy["epsilon_tight"]
    facts = dict(show_validation(dataclasses.asdict(report))[0].rows)
    assert facts["ε per speaker"].endswith(", for a speaker")


def test_a_data_set_without_owners_has_one_epsilon() -> None:
    report = dataclasses.asdict(validated("recipe=quickstart"))
    report["privacy"]["unit"] = "example"
    facts = dict(show_validation(report)[0].rows)
    assert facts["tight ε"].startswith("1.98 per example")
    assert [name for name in facts if name.startswith("ε per")] == []
