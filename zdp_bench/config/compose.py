"""Hydra, set up on our YAML: what groups, names and keys there are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import MISSING, DictConfig, OmegaConf

from zdp_bench import assets
from zdp_bench.config.schema import GROUPS, PLUGIN_KINDS
from zdp_bench.registry import lookup, names

# Hydra copies its sources at every composition, and with them all that is stored. There is one store, and it gives out copies.
ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


@contextmanager
def hydra_session() -> Iterator[Any]:
    """Hydra, set up on our config folder; yields hydra's own driver object (`compose_config`, `run`, `multirun`)."""
    from hydra import initialize_config_dir

    register_yaml()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(assets.CONF), job_name="zdp-bench", version_base="1.3"):
        driver = GlobalHydra.instance().hydra
        assert driver is not None
        yield driver


def register_yaml() -> None:
    """Enter `recipes/*.yaml` and `datasets/*.yaml` (without their cards) into Hydra's ConfigStore as config groups."""
    for name, path in assets.group(assets.RECIPES).items():
        _store("recipe", name, path, {**assets.read_yaml(path), "recipe": name}, "_global_")
    for name, path in assets.group(assets.DATASETS).items():
        options = {key: value for key, value in assets.read_yaml(path).items() if key != "card"}
        _store("dataset", name, path, options, "dataset")
    if entry_points(group="zdp_bench.plugins"):
        for kind in PLUGIN_KINDS:
            for name in set(names(kind)) - set(files(kind)):
                builder = lookup(kind, name)
                _store(kind, name, builder, {"name": name} | defaults(builder), kind)


_STORED: dict[
    tuple[str, str], Any
] = {}  # (group, name) -> what it was made of: Hydra takes 10 ms to store what it has already


def _store(group: str, name: str, source: Any, node: dict[str, Any], package: str) -> None:
    if _STORED.get((group, name)) != source:
        ConfigStore.instance().store(group=group, name=name, node=node, package=package)
        _STORED[group, name] = source


def defaults(builder: Callable[..., Any]) -> dict[str, Any]:
    """The YAML that a plug-in of another package would have: its options, with their defaults."""
    options = (
        p
        for p in inspect.signature(builder).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    )
    return {p.name: MISSING if p.default is inspect.Parameter.empty else p.default for p in options}


def choose(key: Any, options: dict[Any, Any]) -> Any:
    """What stands for `key` among `options`: one key of a recipe follows another, `${choose:${model.name},{lenet5: 1, ...}}`.

    Raises:
        KeyError: nothing does; the sentence says what does.
    """
    found = {str(name): value for name, value in options.items()}
    if str(key) not in found:
        raise KeyError(f"the recipe says nothing of {key}, only of {', '.join(found)}")
    return found[str(key)]


OmegaConf.register_new_resolver("choose", choose, replace=True)


def group_options(group: str) -> list[str]:
    """The names of a config group: its files', and those of other packages' plug-ins."""
    others = (
        names(group) if group in PLUGIN_KINDS and entry_points(group="zdp_bench.plugins") else []
    )
    return sorted({*files(group), *others})


def files(group: str) -> dict[str, Path]:
    """The YAML files of a config group, by name."""
    folders = {"recipe": assets.RECIPES, "dataset": assets.DATASETS}
    return assets.group(folders.get(group, assets.CONF / group))


def chosen(overrides: list[str], group: str) -> list[str]:
    """The name that a group has with these overrides; all of them, where they sweep over several."""
    said = next(
        (o.partition("=")[2].split(",") for o in reversed(overrides) if o.startswith(f"{group}=")),
        [],
    )
    return [name for name in said if name in group_options(group)] or [
        str(_with_groups(overrides)[group].name)
    ]


def _with_groups(overrides: list[str]) -> DictConfig:
    """The configuration with the recipe and the names that the overrides choose, and none of their keys."""
    from hydra import compose as hydra_compose

    words = dict(override.split("=", 1) for override in overrides if "=" in override)
    choices = {
        group: words[group]
        for group in ("recipe", *GROUPS)
        if words.get(group) in group_options(group)
    }
    with hydra_session():
        return hydra_compose(
            "config",
            overrides=[
                f"{key}={name}" for key, name in ({"recipe": "quickstart"} | choices).items()
            ],
        )


def known_keys(overrides: list[str]) -> list[str]:
    """Every dotted key and group there is, in the recipe and with the plug-ins that the overrides name."""
    config = _with_groups(overrides)
    return [*GROUPS, *dotted(OmegaConf.to_container(config, resolve=False))]


def dotted(node: Any, prefix: str = "") -> list[str]:
    """The dotted names of a nested mapping's leaves and branches."""
    if not isinstance(node, dict):
        return []
    names = []
    for key, value in node.items():
        names += [f"{prefix}{key}", *dotted(value, f"{prefix}{key}.")]
    return names
