"""Recipes, data sets and plug-ins, and the YAML file of each."""

from __future__ import annotations

import pytest

from zdp_bench import assets
from zdp_bench.config import compose, parse
from zdp_bench.config.compose import known_keys
from zdp_bench.config.plugins import SCHEDULERS
from zdp_bench.config.schema import MAY_BE_NONE
from zdp_bench.registry import HOMES, names, register


@pytest.mark.parametrize("recipe", assets.group(assets.RECIPES))
def test_every_recipe_is_valid_and_says_how_to_run_it(recipe: str) -> None:
    run = parse(compose([f"recipe={recipe}"]))
    assert run.recipe == recipe
    header = assets.group(assets.RECIPES)[recipe].read_text(encoding="utf-8").splitlines()[:2]
    assert header[0].startswith("# ")
    words = header[1].split()
    assert words[:3] in (["#", "zdp-bench", "run"], ["#", "zdp-bench", "reproduce"])
    assert f"recipe={recipe}" in words


@pytest.mark.parametrize("kind", sorted(set(HOMES) - {"activation", "dataset", "figure"}))
def test_every_plug_in_has_its_yaml(kind: str) -> None:
    torchs = set(SCHEDULERS) if kind == "scheduler" else set()
    none = {"none"} if kind in MAY_BE_NONE else set()
    assert {*names(kind), *torchs, *none} == set(assets.group(assets.CONF / kind))


def test_every_dataset_has_its_card() -> None:
    assert set(names("dataset")) == set(assets.group(assets.DATASETS))


def test_yaml_states_every_option_of_its_plug_in() -> None:
    """So that `key=value` works for each of them without a `+`, and a reader sees them all."""
    import inspect

    from zdp_bench.registry import lookup

    for kind in ("algorithm", "model", "task", "dataset"):
        folder = assets.DATASETS if kind == "dataset" else assets.CONF / kind
        for name, path in assets.group(folder).items():
            options = {
                p.name
                for p in inspect.signature(lookup(kind, name)).parameters.values()
                if p.kind is p.KEYWORD_ONLY
            }
            assert options <= set(assets.read_yaml(path)) - {"card"}, f"{kind} {name}"


def test_known_keys_hold_groups_and_leaves() -> None:
    keys = known_keys(["recipe=phasemnist"])
    assert {
        "algorithm",
        "algorithm.noise",
        "trainer.sample_rate",
        "dataset.pairing_seed",
        "privacy.delta",
    } <= set(keys)


def test_two_plug_ins_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="already registered"):

        @register("model", "complex_mlp")
        def another() -> None: ...
