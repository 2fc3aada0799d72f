"""A section's or a plug-in's keys, held against what its dataclass or its builder declares."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection
from dataclasses import is_dataclass, make_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zdp_bench import assets
from zdp_bench.config.compose import defaults, files, group_options
from zdp_bench.config.ranges import NOT_OURS, check_privacy_options, check_ranges
from zdp_bench.config.schema import GROUPS, PLUGIN_KINDS, PLUGINS, Plugin
from zdp_bench.errors import UserError, first_line, require, suggestion, unknown
from zdp_bench.registry import lookup, names


def plugin(kind: str, node: dict[str, Any]) -> Plugin:
    """Check a plug-in's options against the keyword-only parameters of its builder."""
    options = dict(node)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"{kind}.name is missing: say which {kind}, such as {kind}=NAME.")
    builder = TORCHS_OWN[kind](name) if kind in TORCHS_OWN else lookup(kind, name)
    for key in options:
        if key not in own_keys(kind, name):
            raise UserError(no_such_key(kind, name, key))
    options = {key: value for key, value in options.items() if key not in OF_EVERY.get(kind, ())}
    return Plugin(name, check_options(kind, builder, options))


# Keys of every model, beside its own
OF_EVERY = {"model": ("replace_batchnorm",)}


def own_keys(kind: str, name: str) -> list[str]:
    """The keys that a plug-in takes.

    Raises:
        UserError: there is no such plug-in.
    """
    builder = TORCHS_OWN[kind](name) if kind in TORCHS_OWN else lookup(kind, name)
    parameters = inspect.signature(builder).parameters.values()
    if kind in TORCHS_OWN:
        own = [parameter.name for parameter in parameters if parameter.name not in NOT_OURS]
    else:
        own = [
            parameter.name
            for parameter in parameters
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        ]
    return [*own, *OF_EVERY.get(kind, ())]


def every_key() -> list[tuple[str, str]]:
    """Every dotted key of a run, once, with its default; of a plug-in's, who has it."""
    plain = assets.read_yaml(assets.CONF / "config.yaml")
    groups = [next(iter(entry.items())) for entry in plain["defaults"] if isinstance(entry, dict)]
    found = [(group, str(name)) for group, name in groups if group in GROUPS or group == "launcher"]
    for section, default in plain.items():
        if section in ("defaults", "hydra", *OF_EVERY):
            continue
        inside = default if isinstance(default, dict) else {"": default}
        found += [(f"{section}.{key}".rstrip("."), _shown(value)) for key, value in inside.items()]
    for kind in (*PLUGINS, "trainer"):
        having: dict[str, list[str]] = {}
        for name in group_options(kind):
            own = assets.read_yaml(files(kind)[name]) if name in files(kind) else {}
            keys = (
                list(own) if kind == "trainer" else [] if name == "none" else own_keys(kind, name)
            )
            for key in keys:
                having.setdefault(key, []).append(
                    f"{name} {_shown(own[key])}" if key in own else name
                )
        found += [(f"{kind}.{key}", ", ".join(names)) for key, names in sorted(having.items())]
    return found


def _shown(value: Any) -> str:
    return str(json.dumps(value, ensure_ascii=False)) if not isinstance(value, str) else value


def no_such_key(kind: str, name: str, key: str) -> str:
    """The sentence for a key that the chosen plug-in does not have: only keys that it has are suggested."""
    has = own_keys(kind, name)
    near = suggestion(key, has).replace("'", f"'{kind}.", 1)
    return f"key '{kind}.{key}' is not known.{near} {kind}={name} has {', '.join(sorted(has)) or 'no keys'}."


def without_strangers(
    recipe: str, kind: str, node: dict[str, Any], said: Collection[str] = ()
) -> dict[str, Any]:
    """A plug-in's options without those that the recipe meant for another one.

    `recipe=phasemnist algorithm=sgd` puts sgd in the place of ζ-DP-SGD, but the recipe's `algorithm: {noise: circular}` is
    still merged on top. What the chosen plug-in's own YAML does not have, and the recipe has, was never meant for it. What the
    user typed (`said`) was, and stays, so that it is refused by name.
    """
    own_file = assets.group(assets.DATASETS if kind == "dataset" else assets.CONF / kind).get(
        str(node.get("name"))
    )
    recipe_file = assets.group(assets.RECIPES).get(recipe)
    known = own_file is not None or node.get("name") in (
        names(kind) if kind in PLUGIN_KINDS else ()
    )
    if not known or recipe_file is None:
        return node
    body = assets.read_yaml(recipe_file)
    choices: dict[str, str] = {}
    for entry in (
        *assets.read_yaml(assets.CONF / "config.yaml")["defaults"],
        *body.get("defaults", []),
    ):
        if isinstance(entry, dict):
            choices |= {key.removeprefix("override /"): name for key, name in entry.items()}
    if choices[kind] == node["name"]:
        return node
    own = assets.read_yaml(own_file) if own_file else defaults(lookup(kind, str(node["name"])))
    strangers = {
        key for key in body.get(kind) or {} if key not in own and f"{kind}.{key}" not in said
    }
    return {key: value for key, value in node.items() if key not in strangers}


def check_options(
    kind: str, builder: Callable[..., Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The options with their declared types: unknown, missing and mistyped ones are refused by key."""
    if kind in TORCHS_OWN:  # their parameters are positional, and have no types
        check_ranges(kind, options)
        return {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in options.items()
        }

    function = inspect.isclass(builder) and not is_dataclass(builder)
    hints = get_type_hints(builder.__init__ if function else builder)
    fields: list[Any] = []
    choices: dict[str, tuple[Any, ...]] = {}
    for parameter in inspect.signature(builder).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        hint = hints[parameter.name]
        if get_origin(hint) is Literal:
            choices[parameter.name], hint = get_args(hint), str
        default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
        if isinstance(default, list | dict):
            raise TypeError(f"{builder}: option '{parameter.name}' needs an immutable default")
        fields.append((parameter.name, hint, default))
    checked = vars(typed(make_dataclass("Options", fields), options, kind))
    for key, allowed_values in choices.items():
        if checked[key] not in allowed_values:
            raise unknown(
                f"{kind}.{key}", str(checked[key]), [str(value) for value in allowed_values]
            )
    for key, value in checked.items():
        if (
            key.rpartition("_")[2] == "seed" and value is not None
        ):  # of a split or a pairing; no library takes more bits
            require(0 <= value < 2**32, f"{kind}.{key}", value, "must be 0 or more, and below 2³²")
    if kind == "algorithm":
        check_privacy_options(checked)
    return checked


def typed(schema: type, values: dict[str, Any], prefix: str) -> Any:
    """`values` as an instance of the dataclass `schema`; errors name the full key."""
    dot = f"{prefix}." if prefix else ""
    structure = OmegaConf.structured(schema)
    if not isinstance(values, dict):
        raise UserError(
            f"{prefix}={values}: is no value but a section; set one of its keys, such as {dot}{next(iter(structure))}."
        )
    known = [str(name) for name in structure]  # `in` would leave out keys that have no default
    for key in values:
        if key not in known:
            raise unknown("key", f"{dot}{key}", [f"{dot}{name}" for name in known])
    merged = structure
    for key, value in values.items():
        try:
            merged = OmegaConf.merge(merged, {key: value})
        except OmegaConfBaseException as error:
            said = rule_of(get_type_hints(schema)[key]) or first_line(error).rstrip(".")
            raise UserError(f"{dot}{key}={value}: {said}.") from None
    lacking = OmegaConf.missing_keys(merged)
    if lacking:
        raise UserError(
            f"{dot}{sorted(lacking)[0]} has no value: set it in the recipe or on the command line."
        )
    return OmegaConf.to_object(merged)


def rule_of(hint: Any) -> str:
    """What a value of this type must be, in words; empty where the type is none of the simple ones."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    of = [one for one in (get_args(hint) or (hint,)) if one is not Ellipsis]
    named = [words[one] for one in of if one in words]
    if not named or len(named) < len(of):
        return ""
    if get_origin(hint) in (list, tuple):
        return f"must be a list, each of it {named[0]}, such as [1,2]"
    return f"must be {' or '.join(named)}"


OPTIMIZERS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadam": "NAdam",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
}


def optimizer_class(name: str) -> Callable[..., Any]:
    """torch's optimiser of that name."""
    import torch

    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    return getattr(torch.optim, OPTIMIZERS[name])


SCHEDULERS = {
    "step_lr": "StepLR",
    "multi_step_lr": "MultiStepLR",
    "exponential_lr": "ExponentialLR",
    "cosine_annealing_lr": "CosineAnnealingLR",
    "linear_lr": "LinearLR",
    "reduce_on_plateau": "ReduceLROnPlateau",
}


def scheduler_class(name: str) -> Callable[..., Any]:
    """torch's learning-rate scheduler of that name; each takes one step an epoch."""
    import torch

    if name not in SCHEDULERS:
        raise unknown("scheduler", name, ["none", *SCHEDULERS])
    return getattr(torch.optim.lr_scheduler, SCHEDULERS[name])


TORCHS_OWN: dict[str, Callable[[str], Callable[..., Any]]] = {
    "optimizer": optimizer_class,
    "scheduler": scheduler_class,
}
