"""Hydra, set up on our YAML, with its groups and names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import MISSING, DictConfig, OmegaConf

from zdp_bench import assets
from zdp_bench.config.schema import COMMON_KEYS, PLUGIN_KINDS
from zdp_bench.registry import installed, lookup, names

# Hydra copies the store at every composition, although the store gives out copies itself.
ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


@contextmanager
def hydra_session() -> Iterator[Any]:
    """Set Hydra up on our folder; yields its driver (`compose_config`, `run`, `multirun`)."""
    from hydra import initialize_config_dir

    _register_yaml()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(assets.CONF), job_name="zdp-bench", version_base="1.3"):
        driver = GlobalHydra.instance().hydra
        assert driver is not None
        yield driver


_STORED: dict[tuple[str, str], Any] = {}  # (kind, name) -> the builder whose defaults Hydra has


def _register_yaml() -> None:
    """Register with Hydra what is not in `conf`: recipes, data sets, others' plug-ins."""
    store, repo = ConfigStore.instance().store, ConfigStore.instance().repo
    packages = {"recipe": "_global_", "dataset": "dataset", "representation": "representation"}
    for group, package in packages.items():
        for name, path in files(group).items():
            if assets.CONF in path.parents:  # Hydra reads it itself
                continue
            later: Any = _OfFile(path, group)
            node = ConfigNode(f"{name}.yaml", later, group, package, None)
            repo.setdefault(group, {})[node.name] = node
    for kind in PLUGIN_KINDS:
        for name in set(group_options(kind)) - set(files(kind)):
            if _STORED.get((kind, name)) != (builder := lookup(kind, name)):
                _STORED[kind, name] = builder
                options = {"name": name, **_common(kind), **defaults(builder)}
                store(group=kind, name=name, node=options, package=kind)


def _common(group: str) -> dict[str, Any]:
    """Return the keys of every data set; `conf/config.yaml` has those of every model."""
    return dict.fromkeys(COMMON_KEYS["dataset"]) if group == "dataset" else {}


@dataclass(frozen=True)
class _OfFile:
    """A recipe or data set that is loaded when Hydra copies it: each takes 4 ms."""

    path: Path
    group: str

    def __deepcopy__(self, memo: dict[int, Any]) -> DictConfig:
        body = {key: value for key, value in assets.read_yaml(self.path).items() if key != "card"}
        named = {"recipe": self.path.stem} if self.group == "recipe" else {}
        return OmegaConf.create(_common(self.group) | body | named)


def recipe_body(name: str) -> dict[str, Any] | None:
    """Return a recipe's YAML, also of one that was adopted; None if there is none."""
    if name in files("recipe"):
        return assets.read_yaml(files("recipe")[name])
    if name not in group_options("recipe"):
        return None
    # Hydra's launchers hand the store on to other processes.
    node = ConfigStore.instance().load(f"recipe/{name}.yaml").node
    body = OmegaConf.to_container(node, resolve=False)
    assert isinstance(body, dict)
    return {str(key): value for key, value in body.items()}


def defaults(builder: Callable[..., Any]) -> dict[str, Any]:
    """Return a builder's options with their defaults; MISSING where there is none."""
    parameters = inspect.signature(builder).parameters.values()
    options = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return {p.name: MISSING if p.default is inspect.Parameter.empty else p.default for p in options}


def choose(key: Any, options: dict[Any, Any]) -> Any:
    """Return the entry of `key`, so that one key of a recipe may follow another.

    In YAML: `${choose:${model.name},{lenet5: 1, ...}}`.
    """
    found = {str(name): value for name, value in options.items()}
    if str(key) not in found:
        raise KeyError(f"the recipe does not set {key}, only of {', '.join(found)}")
    return found[str(key)]


OmegaConf.register_new_resolver("choose", choose, replace=True)


def group_options(group: str) -> list[str]:
    """Return the names of a config group: its files, other packages' plug-ins, adopted recipes."""
    others = names(group) if group in PLUGIN_KINDS and installed() else []
    if group == "recipe":
        others = [name.removesuffix(".yaml") for name in ConfigStore.instance().repo.get(group, {})]
    return sorted({*files(group), *others})


def files(group: str) -> dict[str, Path]:
    """Return the YAML files of a config group by name."""
    folders = {"recipe": assets.RECIPES, "dataset": assets.DATASETS}
    return assets.group(folders.get(group, assets.CONF / group))
