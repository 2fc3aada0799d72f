"""Recipes, data sets and plug-ins: the YAML of each, its options, and what changes a digest."""

import re
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hydra.types import RunMode

from zdp_bench import assets
from zdp_bench.config import check, configured
from zdp_bench.config.compose import hydra_session
from zdp_bench.config.digests import experiment_digest, run_digest
from zdp_bench.config.plugins import (
    TORCH,
    TORCH_TYPES,
    check_options,
    find_builder,
    list_all_keys,
    plugin_keys,
)
from zdp_bench.config.schema import COMMON_KEYS, MAY_BE_NONE
from zdp_bench.config.types import Count, check_value
from zdp_bench.errors import UserError
from zdp_bench.experiments.claims import compose_job
from zdp_bench.registry import HOMES, lookup, names, register


def is_installed(recipe: str) -> bool:
    """Return True if the extras that a recipe needs are there, without which the core works."""
    content = assets.read_yaml(assets.group(assets.RECIPES)[recipe])
    chosen = content.get("defaults", [])
    needed = [
        entry["override /representation"] for entry in chosen if "representation" in str(entry)
    ]
    has_runner = "federated" not in content or "federated" in names("runner")
    return has_runner and set(needed) <= set(names("representation"))


@pytest.mark.parametrize("recipe", assets.group(assets.RECIPES))
def test_every_recipe_is_valid_and_says_how_to_run_it(recipe: str) -> None:
    """Hydra composes the same of it: `tests/experiments/test_claims.py`."""
    if is_installed(recipe):
        assert check(compose_job(recipe, ())).recipe == recipe
    header = assets.group(assets.RECIPES)[recipe].read_text(encoding="utf-8").splitlines()[:2]
    assert header[0].startswith("# ")
    words = header[1].split()
    assert words[:3] in (["#", "zdp-bench", "run"], ["#", "zdp-bench", "reproduce"])
    assert f"recipe={recipe}" in words


@pytest.mark.parametrize("kind", sorted(set(HOMES) - {"activation"}))
def test_every_plug_in_has_its_yaml(kind: str) -> None:
    ours = {*names(kind), *(["none"] if kind in MAY_BE_NONE else [])}
    torchs = set(TORCH[kind][1]) if kind in TORCH else set()
    folder = assets.DATASETS if kind == "dataset" else assets.CONF / kind
    assert ours <= set(assets.group(folder)) <= ours | torchs


def test_yaml_states_every_option_of_its_plug_in() -> None:
    """So that `key=value` works for each of them without a `+`, and a reader sees them all."""
    for kind in ("algorithm", "model", "task", "dataset"):
        folder = assets.DATASETS if kind == "dataset" else assets.CONF / kind
        for name, path in assets.group(folder).items():
            builder = lookup(kind, name)
            options = {
                p.name for p in signature(builder).parameters.values() if p.kind is p.KEYWORD_ONLY
            }
            if builder.__module__.startswith("zdp_bench.extras.standins."):  # or it is its reader's
                options &= {*builder.__annotations__}
            assert options <= set(assets.read_yaml(path)) - {"card"}, f"{kind} {name}"
            if kind == "model":
                file = f"{builder.__module__.replace('.', '/')}.py"
                assert f"\nname: {name}  # {file}\n" in path.read_text(encoding="utf-8")


def test_two_plug_ins_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="already registered"):

        @register("model", "complex_mlp")
        def another() -> None: ...


def test_another_algorithm_takes_no_options_the_recipe_meant_for_the_first() -> None:
    nonprivate = ["algorithm=sgd", "trainer=shuffled", "trainer.sample_rate=null"]
    run = configured(["recipe=phasemnist", *nonprivate])
    assert run.algorithm.options == {}
    real = ["algorithm=dp_sgd", "model=real_mlp"]
    run = configured(["recipe=phasemnist", *real])
    assert run.algorithm.options == {
        "noise_multiplier": 1.1,
        "max_grad_norm": 1.0,
        "clip_quantile": None,
        "start_steps": None,
        "per_layer": False,
        "gamma": None,
        "gradients": "auto",
    }
    with pytest.raises(UserError, match=r"'algorithm\.noise'"):  # the user asked for it
        configured(["recipe=quickstart", *real, "+algorithm.noise=circular"])


def test_a_misspelt_key_inside_a_recipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = "defaults:\n  - override /algorithm: dp_sgd\nalgorithm: {noize: 1}\n"
    bodies = {
        r"algorithm\.noize": chosen,
        r"optimizer\.lrr": "optimizer: {lrr: 0.1}\n",
        r"trainer\.epoch'": "trainer: {epoch: 3}\n",
    }
    monkeypatch.setattr(assets, "RECIPES", tmp_path)
    for number, (message, body) in enumerate(bodies.items()):
        (tmp_path / f"r{number}.yaml").write_text(body)
        with pytest.raises(UserError, match=message):
            configured([f"recipe=r{number}"])


def test_hydras_folder_is_within_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the name ~ was made in the working folder."""
    monkeypatch.setenv("HOME", "/me")
    words = ["recipe=quickstart", "paths.results='~/mine'", "launcher=submitit"]
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with hydra_session() as driver:
        hydra_config = driver.compose_config("config", words, run_mode=RunMode.MULTIRUN).hydra
    assert hydra_config.run.dir == hydra_config.sweep.dir == "/me/mine/runs/.hydra"
    assert hydra_config.launcher.submitit_folder == "/me/mine/runs/.submitit/%j"


def test_options_need_immutable_defaults() -> None:
    def builder(*, widths: list[int] = [1]) -> None:  # noqa: B006
        del widths

    with pytest.raises(TypeError, match="immutable default"):
        check_options("model", builder, {})


def test_every_key_is_listed_once_with_its_default() -> None:
    listed = list_all_keys()
    keys = dict(listed)
    assert len(keys) == len(listed)
    assert keys["seed"] == "0"
    assert keys["optimizer.momentum"] == "rmsprop 0.0, sgd 0.0"
    assert keys["scheduler.gamma"] == "exponential_lr 0.95, multi_step_lr 0.1, step_lr 0.1"
    assert {
        "dataset.pairing_seed",
        "model.hidden",
        "privacy.max_epsilon",
        "federated.nodes",
        "trainer.epochs",
    } <= set(keys)


def test_a_key_of_every_model_hides_no_option_of_one() -> None:
    for name in names("model"):
        own = set(signature(lookup("model", name)).parameters)
        assert not own & set(COMMON_KEYS["model"]), name


def test_a_recipes_schedule_can_be_left_out() -> None:
    assert configured(["recipe=mri_sequence_cl"]).scheduler is not None
    assert configured(["recipe=mri_sequence_cl", "scheduler=none"]).scheduler is None
    with pytest.raises(UserError, match=r"scheduler\.gamma: scheduler=none has no keys"):
        configured(["recipe=mri_sequence_cl", "scheduler=none", "scheduler.gamma=0.5"])


@pytest.mark.parametrize("kind", TORCH)
def test_every_parameter_of_torchs_has_a_type_and_its_default_is_of_it(kind: str) -> None:
    for name in TORCH[kind][1]:
        parameters = signature(find_builder(kind, name)).parameters
        for key in plugin_keys(kind, name):
            default = parameters[key].default
            assert key in TORCH_TYPES
            if default is not Parameter.empty and not isinstance(default, torch.Tensor):
                check_value(key, TORCH_TYPES[key], default)


def test_operational_keys_change_no_digest_and_others_do() -> None:
    where = ["threads=1", "device=cpu", "force=true", "paths.results=elsewhere", "seed=5"]
    base, same, other = (
        configured(["recipe=quickstart", *words])
        for words in ([], where, ["algorithm.max_grad_norm=0.9"])
    )
    assert experiment_digest(base) == experiment_digest(same) != experiment_digest(other)
    assert run_digest(base, "data") != run_digest(same, "data")  # the seed
    assert run_digest(base, "data") != run_digest(base, "other data")


def test_a_key_that_is_off_by_default_changes_no_older_digest() -> None:
    def digest(*words: str) -> str:
        return experiment_digest(configured(["recipe=speech", *words]))

    off = ("model.start=null", "dataset.standardise=null")
    on = ("model.start=unit_variance", "dataset.standardise=clip")
    on += ("model.weight_standardisation=true", "model.complex_as=magnitude", "trainer.ema=0.9")
    on += ("scheduler=step_lr", "privacy.unit=patient")
    # of the records made before there were these keys
    assert digest().startswith("96b3770a9a66fda4")
    assert {digest(*off)} == {digest()}
    assert len({digest(word) for word in on} | {digest()}) == 8


TAKEN: list[tuple[Any, Any, Any]] = [
    *((int, "3", 3), (float, 1, 1.0), (bool, "yes", True), (bool, 0, False), (str, 3, "3")),
    *((bool | None, True, True), (int | Literal["auto"], "auto", "auto")),
    *(
        (int | None, None, None),
        (Literal["a"] | None, None, None),
        (list[float] | None, [1], [1.0]),
    ),
]
REFUSED: list[tuple[Any, Any, str]] = [
    *(
        (int, 1.5, "must be a valid integer"),
        (bool, 2, "a valid boolean"),
        (str, [1], "a valid string"),
    ),
    *((int, True, "not true or false"), (float | None, False, "not true or false")),
    *((list[float], [0.5, True], "not true or false"),),
    *((list[int], 3, "a valid list"), (list[int], [1, "x"], "a valid integer")),
    *((Literal["a"], None, "'null' is not known"), (Count | None, 0, "equal to 1")),
    *((int, "${seed}", "is not resolved"), (float, 10**400, "a valid number")),
]


@pytest.mark.parametrize(("hint", "value", "expected"), TAKEN)
def test_a_value_is_taken_as_its_type(hint: Any, value: Any, expected: Any) -> None:
    checked = check_value("key", hint, value)
    assert (checked, type(checked)) == (expected, type(expected))


@pytest.mark.parametrize(("hint", "value", "says"), REFUSED)
def test_a_value_of_another_type_is_refused(hint: Any, value: Any, says: str) -> None:
    with pytest.raises(UserError, match=rf"^key.*{re.escape(says)}"):
        check_value("key", hint, value)
