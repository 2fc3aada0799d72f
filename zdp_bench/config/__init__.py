"""A run's configuration, which Hydra composes from overrides and our YAML, and which is checked.

`compose` merges the YAML files and the overrides. `parse` turns the result into the frozen
dataclasses of `schema.py`. A plug-in (dataset, representation, model, task, algorithm, optimizer,
scheduler) takes the options that its builder declares as keyword-only parameters. Other options are
rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from zdp_bench.config.compose import files, hydra_session
from zdp_bench.config.constraints import check_typed, check_values
from zdp_bench.config.plugins import check_plugin, common_keys, drop_foreign_options
from zdp_bench.config.schema import (
    COMMON_KEYS,
    FEDERATED_RESULT,
    GROUPS,
    LABELS,
    MAY_BE_NONE,
    PLUGINS,
    SECTIONS,
    Federated,
    Run,
    Scalars,
)
from zdp_bench.config.types import REQUIRED, check_section, check_types, hints_of
from zdp_bench.config.words import KEYS, read_words, readable_errors, split_word
from zdp_bench.errors import UserError, unknown
from zdp_bench.registry import lookup


def compose(overrides: list[str]) -> DictConfig:
    """Compose the configuration of a run from overrides, without checking it."""
    from hydra import compose as hydra_compose

    words = [str(override.input_line) for override in read_words(overrides)]
    with hydra_session(), readable_errors(words):
        return hydra_compose("config", overrides=words)


def configured(overrides: Sequence[str]) -> Run:
    """Compose and check the run that overrides describe."""
    return parse(compose(list(overrides)), overrides)


def parse(config: DictConfig, overrides: Sequence[str] = ()) -> Run:
    """Check a composed configuration.

    Args:
        config: the composed configuration.
        overrides: overrides that the user typed. A key among them that the run would not read is an
            error, whereas a recipe may set such a key. Default: none.

    Raises:
        UserError: a key or value is not valid, or values contradict one another.
    """
    return check(to_plain(config), overrides)


def check(plain: dict[str, Any], overrides: Sequence[str] = ()) -> Run:
    """Check a configuration of plain values without references; see `parse`."""
    for kind in GROUPS:
        if not isinstance(node := plain.get(kind) or {}, dict):
            raise UserError(
                f"{kind}: {node}: a recipe chooses it in its defaults, as '- override /{kind}: "
                f"{node}'."
            )
    checked: dict[str, Any] = {
        name: check_section(schema, plain.get(name) or {}, name)
        for name, schema in SECTIONS.items()
    }
    ungrouped = {key: value for key, value in plain.items() if key not in (*SECTIONS, *GROUPS)}
    if unknown_keys := {*ungrouped} - KEYS:
        raise unknown("key", min(unknown_keys), KEYS)
    typed = {split_word(word)[0].lstrip("~") for word in overrides}
    scalars = _remove_labels(check_section(Scalars, ungrouped, ""), typed)
    types = {"name": (str, REQUIRED)}
    accountant = check_types(types, plain.get("accountant") or {}, "accountant")["name"]
    if accountant not in files("accountant"):
        lookup("accountant", accountant)  # only for others: importing ours takes half a second
    resolved = {
        **vars(scalars),
        **{name: asdict(section) for name, section in checked.items()},
        "accountant": {"name": accountant},
    }
    del resolved["federated"]
    resolved |= _federated_result(checked["federated"])
    for kind in PLUGINS:
        node = dict(drop_foreign_options(scalars.recipe, kind, plain.get(kind) or {}, typed))
        is_none = kind in MAY_BE_NONE and node.get("name") is None
        if is_none and (unread := [key for key, value in node.items() if value is not None]):
            raise UserError(
                f"{kind}.{unread[0]}: {kind}=none has no keys; remove this one, or choose a {kind}."
            )
        checked[kind] = None if is_none else check_plugin(kind, node)
        options = {} if is_none else checked[kind].options
        resolved[kind] = {key: options.get(key, value) for key, value in node.items()}
        if kind in COMMON_KEYS:
            keys = common_keys(kind, checked[kind].name)
            hints = {key: (hints_of(Run)[key], None) for key in keys}
            common = check_types(hints, {key: node.get(key) for key in keys}, kind)
            checked |= dict.fromkeys(COMMON_KEYS[kind]) | common
            resolved[kind] |= common
    run = Run(**vars(scalars), **checked, accountant=accountant, resolved=resolved)
    check_values(run)
    check_typed(run, typed)
    return run


def _remove_labels(scalars: Scalars, typed: Collection[str]) -> Scalars:
    """Return the keys with an empty label for each label that the user typed as null."""
    empty: dict[str, Any] = {"name": "", "tags": [], "notes": ""}
    removed = {key for key in LABELS if key in typed and getattr(scalars, key) is None}
    return replace(scalars, **{key: empty[key] for key in removed})


def to_plain(config: DictConfig) -> dict[str, Any]:
    """Resolve a composed configuration to plain Python values, without Hydra's own keys."""
    with readable_errors([]):
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items() if key not in ("hydra", "launcher")}


def _federated_result(federated: Federated) -> dict[str, Any]:
    """Return the keys of the section that affect what is computed, or {} for a central run."""
    if federated.nodes is None:
        return {}
    unused = ("local_lr",) if federated.local_steps == 1 else ()
    keys = [key for key in FEDERATED_RESULT if key not in unused]
    return {"federated": {key: getattr(federated, key) for key in keys}}
