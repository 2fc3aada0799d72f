"""Plug-ins chosen by name, and their options, which their builders declare."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len, MinLen

from zdp_bench import assets
from zdp_bench.config.compose import defaults, files, group_options, recipe_body
from zdp_bench.config.schema import COMMON_KEYS, GROUPS, MAY_BE_NONE, PLUGINS, Plugin
from zdp_bench.config.types import (
    COUNT,
    NOISE,
    NORM,
    SEED,
    SHARE,
    check_types,
    check_value,
    hints_of,
    takes_text,
)
from zdp_bench.errors import UserError, unknown
from zdp_bench.registry import TORCH, lookup, names

# Types of the parameters of torch's classes. Torch declares none, and checks few of their values,
# some of them only at the first step.
NUMBER = Annotated[float, Interval(ge=0, le=1e30)]
UP_TO_ONE = Annotated[float, Interval(ge=0, le=1)]
BELOW_ONE = Annotated[float, Interval(ge=0, lt=1)]
EPOCH = Annotated[int, Interval(ge=1, lt=2**31)]
TORCH_TYPES: dict[str, Any] = {
    # optimizers
    "lr": NUMBER,
    "weight_decay": NUMBER,
    "eps": NUMBER,
    "lr_decay": NUMBER,
    "momentum_decay": NUMBER,
    "initial_accumulator_value": NUMBER,
    "momentum": UP_TO_ONE,
    "dampening": UP_TO_ONE,
    "alpha": BELOW_ONE,
    "betas": Annotated[list[BELOW_ONE], Len(2, 2)],
    "nesterov": bool,
    "centered": bool,
    "amsgrad": bool,
    "maximize": bool,
    "decoupled_weight_decay": bool,
    "foreach": bool | None,
    "fused": bool | None,
    # schedulers
    "floor": NUMBER,
    "eta_min": NUMBER,
    "min_lr": NUMBER,
    "threshold": NUMBER,
    "end_factor": UP_TO_ONE,
    "final": UP_TO_ONE,
    "warmup": BELOW_ONE,
    "gamma": Annotated[float, Interval(gt=0, le=1e30)],
    "start_factor": Annotated[float, Interval(gt=0, le=1)],
    "factor": Annotated[float, SHARE],
    "step_size": EPOCH,
    "T_max": EPOCH,
    "total_iters": EPOCH,
    "patience": Annotated[int, Interval(ge=0, lt=2**31)],
    "cooldown": Annotated[int, Interval(ge=0, lt=2**31)],
    "milestones": Annotated[list[EPOCH], MinLen(1)],
    "mode": Literal["min", "max"],
    "threshold_mode": Literal["rel", "abs"],
}
# Parameters that are not options: `steps` follows from the plan, and the others are for steps that
# are captured, differentiated or begun in the middle of a schedule, which ours are not.
NOT_OPTIONS = {
    "params",
    "optimizer",
    "steps",
    "capturable",
    "differentiable",
    "last_epoch",
    "verbose",
}

# Options of algorithms that have the same meaning, and thus range, in all of them.
PRIVACY_RULES = {
    "noise_multiplier": NOISE,
    "max_grad_norm": NORM,
    "gamma": NORM,
    "clip_quantile": SHARE,
    "start_steps": COUNT,
    "bands": COUNT,
    "scale": NORM,
}


def find_builder(kind: str, name: str) -> Callable[..., Any]:
    """Return the builder of a plug-in: a class of torch, or the registered function or class."""
    if kind not in TORCH:
        return lookup(kind, name)
    import torch

    module, classes = TORCH[kind]
    if name in classes:
        return getattr(attrgetter(module)(torch), classes[name])
    registered = names(kind)
    if name in registered:
        return lookup(kind, name)
    allowed = [*classes, *registered]
    if kind in MAY_BE_NONE:
        allowed.append("none")
    raise unknown(kind, name, allowed)


def plugin_keys(kind: str, name: str) -> list[str]:
    """Return all keys of a plug-in, including those that all of its kind have."""
    builder = find_builder(kind, name)
    if kind in TORCH:
        return [key for key in inspect.signature(builder).parameters if key not in NOT_OPTIONS]
    return [*defaults(builder), *common_keys(kind, name)]


def common_keys(kind: str, name: str) -> list[str]:
    """Return the keys that all plug-ins of a kind have, without those that this one declares."""
    declared = defaults(find_builder(kind, name)) if kind in COMMON_KEYS else {}
    return [key for key in COMMON_KEYS.get(kind, ()) if key not in declared]


def check_plugin(kind: str, node: dict[str, Any]) -> Plugin:
    """Return the plug-in that a config group describes, with checked options.

    Args:
        kind: kind of the plug-in.
        node: its name and options.

    Raises:
        UserError: there is no such plug-in, or an option or its value is not valid.
    """
    options = dict(node)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"{kind}.name is missing: choose one with {kind}=NAME.")
    builder = find_builder(kind, name)
    keys = plugin_keys(kind, name)
    for key in options:
        if key not in keys:
            raise unknown("key", f"{kind}.{key}", [f"{kind}.{known}" for known in keys])
    common = common_keys(kind, name)
    options = {key: value for key, value in options.items() if key not in common}
    return Plugin(name, check_options(kind, builder, options))


def check_options(
    kind: str, builder: Callable[..., Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Return options converted to their declared types, and completed by their defaults."""
    hints = option_types(kind, builder)
    if kind in TORCH:
        checked = {}
        for key, value in options.items():
            checked[key] = check_value(f"{kind}.{key}", hints.get(key, Any), value)
        return checked
    rules = PRIVACY_RULES if kind == "algorithm" else {}
    types: dict[str, tuple[Any, Any]] = {}
    for key, default in defaults(builder).items():
        if isinstance(default, list | dict):
            raise TypeError(f"{builder}: option '{key}' needs an immutable default")
        rule = SEED if key.rpartition("_")[2] == "seed" else rules.get(key)
        types[key] = (Annotated[hints[key], rule] if rule else hints[key], default)
    return check_types(types, options, kind)


def option_types(kind: str, builder: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints of a builder's options, with their annotated ranges."""
    if kind in TORCH:
        return TORCH_TYPES
    in_init = inspect.isclass(builder) and not is_dataclass(builder)
    return hints_of(builder.__init__ if in_init else builder)


def option_takes_text(kind: str, key: str) -> bool:
    """Return True if an option of this name is a text in some plug-in of a kind."""
    if kind in TORCH:  # whose texts are among few words
        return False
    builders = [lookup(kind, name) for name in names(kind)]
    having_it = [builder for builder in builders if key in defaults(builder)]
    return any(takes_text(option_types(kind, builder)[key]) for builder in having_it)


def drop_foreign_options(
    recipe: str, kind: str, node: dict[str, Any], typed: Collection[str] = ()
) -> dict[str, Any]:
    """Return a plug-in's options without those that the recipe sets for another plug-in.

    `recipe=phasemnist algorithm=sgd` replaces ζ-DP-SGD by SGD, but Hydra still adds the recipe's
    `algorithm: {noise: circular}`. So a key is dropped if the recipe sets it for another plug-in
    than the chosen one, which lacks it; and if all models have it.

    Args:
        recipe: name of the recipe.
        kind: kind of the plug-in.
        node: name and options of the chosen plug-in.
        typed: keys that the user typed, which are never dropped. Default: none.
    """
    name = node.get("name") or "none"  # scheduler=none, representation=none
    body = recipe_body(recipe) or {}
    recipes_options = body.get(kind)
    if not recipes_options or name not in group_options(kind):
        return node
    base = assets.read_yaml(assets.CONF / "config.yaml")
    plugins: dict[str, str] = {}  # kind -> the plug-in that the recipe chooses
    for entry in (*base["defaults"], *body.get("defaults", [])):
        if isinstance(entry, dict):
            plugins |= {key.removeprefix("override /"): value for key, value in entry.items()}
    if plugins[kind] == name:
        return node
    builder = find_builder(kind, name) if name != "none" else None
    own = defaults(builder) if builder and kind not in TORCH else {}
    yaml = files(kind).get(name)
    if yaml:
        written = assets.read_yaml(yaml)
    else:  # torch's signatures, which a package's optimizers and schedulers have
        written = dict.fromkeys(plugin_keys(kind, name)) if builder and kind in TORCH else own
    # What all models have, such as `replace_batchnorm`, was chosen for the recipe's model. What all
    # data sets have, such as `validation_share`, holds for each of them.
    shared = COMMON_KEYS["dataset"] if kind == "dataset" else ()
    options = {}
    for key, value in node.items():
        # A default that the YAML does not write is left out, as it is without the recipe: the
        # digest is then the same.
        is_known = key in written or key in shared or (key in own and value != own[key])
        is_foreign = key in recipes_options and not is_known
        if not is_foreign or f"{kind}.{key}" in typed:
            options[key] = value
    return options


def list_all_keys() -> list[tuple[str, str]]:
    """Return all dotted keys of a run, each with its default or the plug-ins that have it."""
    plain = assets.read_yaml(assets.CONF / "config.yaml")
    keys = []
    for entry in plain["defaults"]:
        if isinstance(entry, dict):
            group, name = next(iter(entry.items()))
            if group in (*GROUPS, "launcher"):
                keys.append((group, str(name)))
    for section, default in plain.items():
        if section in ("defaults", "hydra", "model"):
            continue
        if isinstance(default, dict):
            keys += [(f"{section}.{key}", _show(value)) for key, value in default.items()]
        else:
            keys.append((section, _show(default)))
    for kind in (*PLUGINS, "trainer"):
        owners = _owners_of_keys(kind)
        keys += [(f"{kind}.{key}", ", ".join(owners[key])) for key in sorted(owners)]
    return keys


def _owners_of_keys(kind: str) -> dict[str, list[str]]:
    """Return key -> plug-ins of a kind that have it, each followed by its default in YAML."""
    owners: dict[str, list[str]] = {}
    for name in group_options(kind):
        if name == "none":
            continue
        yaml = assets.read_yaml(files(kind)[name]) if name in files(kind) else {}
        for key in yaml if kind == "trainer" else plugin_keys(kind, name):
            owner = f"{name} {_show(yaml[key])}" if key in yaml else name
            owners.setdefault(key, []).append(owner)
    return owners


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
