"""One configuration is one run: however a value is spelled, it gives one digest."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from zdp_bench import assets, registry
from zdp_bench.config import check, compose, configured, to_plain
from zdp_bench.config.compose import files
from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.plugins import check_plugin, common_keys, plugin_keys
from zdp_bench.config.schema import COMMON_KEYS, PLUGIN_KINDS, PLUGINS, SECTIONS, Plugin, Scalars
from zdp_bench.errors import UserError

VALUES: Any = (2, 0, 0.5, True, False, [2, 3], [0.5, 0.25], [8, 1.0])
TRUTHS = {True: ("true", "True", "yes", "on", "1", 1), False: ("false", "no", "off", "0", 0)}


def spellings(value: Any) -> Iterator[Any]:
    """Yield what else YAML, Hydra or a resolver may make of the same value."""
    if isinstance(value, bool):
        yield from TRUTHS[value]
    elif isinstance(value, list):
        yield tuple(value)
        for place, item in enumerate(value):
            yield from ([*value[:place], other, *value[place + 1 :]] for other in spellings(item))
    else:
        yield from (float(value), str(value), str(float(value)), f"{value:e}")
        yield from (int(value),) if value == int(value) else ()
        yield from (-0.0,) if value == 0 else ()


def require_one_value(checked: Callable[[Any], Any]) -> int:
    """Fail if spellings of one value are told apart; return how many of them were accepted."""

    def text(value: Any) -> str | None:
        with suppress(UserError):
            return json.dumps(checked(value))
        return None

    texts = {id(value): text(value) for value in VALUES}
    accepted = 0
    for value in VALUES:
        if (meant := texts[id(value)]) is None or '"' in meant:  # a text is what was typed
            continue
        others = {repr(other): as_text for other in spellings(value) if (as_text := text(other))}
        assert set(others.values()) <= {meant}, (value, others)
        accepted += len(others)
    return accepted


def option(kind: str, base: dict[str, Any], key: str, value: Any) -> Any:
    return check_plugin(kind, base | {key: value}).options[key]


@pytest.mark.parametrize("kind", PLUGINS)
def test_every_spelling_of_an_option_is_one_value(kind: str) -> None:
    accepted = 0
    for name in set(files(kind)) - {"none"}:
        yaml = assets.read_yaml(files(kind)[name])
        base = {key: "x" if value == "???" else value for key, value in yaml.items()}
        base.pop("card", None)
        for key in set(plugin_keys(kind, name)) - {*common_keys(kind, name)}:
            accepted += require_one_value(partial(option, kind, base, key))
    assert accepted > 0 or kind in ("task", "logger")


def test_every_spelling_of_another_key_is_one_configuration() -> None:
    base = to_plain(compose(["recipe=quickstart", "federated.nodes=3"]))
    keys = [("", field.name) for field in fields(Scalars) if field.name != "recipe"]
    keys += [(name, field.name) for name, schema in SECTIONS.items() for field in fields(schema)]
    keys += [(kind, key) for kind, common in COMMON_KEYS.items() for key in common]

    def resolved(section: str, key: str, value: Any) -> Any:
        plain = deepcopy(base)
        (plain[section] if section else plain)[key] = value
        resolved_config = check(plain).resolved
        return (resolved_config[section] if section else resolved_config).get(key)

    accepted = [require_one_value(partial(resolved, *place_of_key)) for place_of_key in keys]
    assert sum(map(bool, accepted)) > 20, "of them numbers and truth values"


def test_a_command_line_has_one_digest() -> None:
    norms = [f"algorithm.max_grad_norm={norm}" for norm in ("1", "1e0", "1.0", "'1.0'")]
    truths = [f"optimizer.nesterov={truth}" for truth in ("false", "no", "0")]
    runs = [configured(["recipe=quickstart", *both]) for both in product(norms, truths)]
    assert len({experiment_digest(run) for run in runs}) == 1


def test_what_a_recipe_looks_up_is_a_number_like_any_other(tmp_path: Path) -> None:
    nested = "${choose:${model.name},{complex_mlp: '${choose:1,{1: 1.5}}'}}"
    for name, value in (("looked_up", f'"{nested}"'), ("said", "1.5"), ("text", "'1.5'")):
        (tmp_path / f"{name}.yaml").write_text(f"privacy: {{target_epsilon: {value}}}\n")
    runs = [configured([f"recipe={path}"]) for path in sorted(tmp_path.glob("*.yaml"))]
    assert {run.privacy.target_epsilon for run in runs} == {1.5}
    assert len({experiment_digest(run) for run in runs}) == 1


@pytest.mark.parametrize("kind", PLUGIN_KINDS)
def test_false_is_not_null_for_a_plug_in_of_any_kind(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For other kinds than optimizers, false entered the digest as null did."""

    def build(*, bias: bool | None = None) -> None:
        """Null would let the plug-in choose."""

    registry.names(kind)  # loads the others first
    monkeypatch.setitem(registry._builders[kind], "mine", build)
    run = configured(["recipe=quickstart"])
    digests = []
    for options in ({"bias": None}, {"bias": False}, {"bias": True}, {}):
        resolved = run.resolved | {kind: {"name": "mine", **options}}
        changed: Any = {kind: Plugin("mine", options), "resolved": resolved}
        digests.append(experiment_digest(replace(run, **changed)))
    assert len(set(digests)) == 3
    assert digests[0] == digests[3]
