"""Set up Hydra with our YAML files, and list its config groups and their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, OmegaConf

from zdp_bench import assets
from zdp_bench.config.schema import COMMON_KEYS, GROUPS, PLUGIN_KINDS
from zdp_bench.disk import expand_home
from zdp_bench.registry import FOREIGN, HOMES, installed, lookup, names

# Group with files outside `conf` -> the section of a configuration that its files set.
PACKAGES = {
    "recipe": "_global_",
    "dataset": "dataset",
    "representation": "representation",
    "logger": "logger",
}

# Groups that other packages may add names to.
OPEN_GROUPS = tuple(group for group in GROUPS if group in (*HOMES, *FOREIGN))


class OurYaml(ConfigSource):
    """Lets Hydra read recipes, data sets, and extras' representations and loggers.

    Their files are outside `conf`, and do not repeat their name, their package, or the keys that
    all data sets have.
    """

    @staticmethod
    def scheme() -> str:
        return "zdp-bench"

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        path = _files_outside_conf(group)[name]
        body = {key: value for key, value in assets.read_yaml(path).items() if key != "card"}
        recipe_name = {"recipe": name} if group == "recipe" else {}
        config = OmegaConf.create(unset_keys(group) | body | recipe_name)
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=config,
            header={"package": PACKAGES[group]},
        )

    def is_group(self, config_path: str) -> bool:
        return config_path in PACKAGES

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        return name in _files_outside_conf(group)

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if not config_path:
            return [] if results_filter is ObjectType.CONFIG else sorted(PACKAGES)
        if results_filter is ObjectType.GROUP:
            return []
        return sorted(_files_outside_conf(config_path))


def _files_outside_conf(group: str) -> dict[str, Path]:
    """Return the YAML files of a group outside `conf`. Hydra itself reads the files inside."""
    if group not in PACKAGES:
        return {}
    return {name: path for name, path in files(group).items() if assets.CONF not in path.parents}


class OurSearchPath(SearchPathPlugin):
    """Adds `OurYaml` to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("zdp-bench", f"{OurYaml.scheme()}://")


@contextmanager
def hydra_session() -> Iterator[Any]:
    """Set up Hydra for our YAML, and yield its driver (`compose_config`, `run`, `multirun`)."""
    from hydra import initialize_config_dir

    _register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(assets.CONF), job_name="zdp-bench", version_base="1.3"):
        driver = GlobalHydra.instance().hydra
        assert driver is not None
        yield driver


_STORED: dict[tuple[str, str], Any] = {}  # (kind, name) -> the builder registered with Hydra


def _register() -> None:
    """Register our search path and the plug-ins of other packages with Hydra."""
    Plugins.instance().register(OurYaml)
    Plugins.instance().register(OurSearchPath)
    store = ConfigStore.instance().store
    for kind in OPEN_GROUPS:
        for name in set(group_options(kind)) - set(files(kind)):
            builder = lookup(kind, name)
            if _STORED.get((kind, name)) != builder:
                _STORED[kind, name] = builder
                own_options = defaults(builder) if kind in PLUGIN_KINDS else {}
                options = {"name": name, **unset_keys(kind), **own_options}
                store(group=kind, name=name, node=options, package=kind)


def unset_keys(group: str) -> dict[str, Any]:
    """Return the keys that all data sets have, with the value None; {} for other groups.

    Those that all models have are in `conf/config.yaml`.
    """
    return dict.fromkeys(COMMON_KEYS["dataset"]) if group == "dataset" else {}


def recipe_body(name: str) -> dict[str, Any] | None:
    """Return the content of a recipe, ours or one from a file; None if there is none."""
    if name in files("recipe"):
        return assets.read_yaml(files("recipe")[name])
    if name not in group_options("recipe"):
        return None
    # Recipes from files are in Hydra's store, which its launchers pass on to other processes.
    node = ConfigStore.instance().load(f"recipe/{name}.yaml").node
    body = OmegaConf.to_container(node, resolve=False)
    assert isinstance(body, dict)
    return {str(key): value for key, value in body.items()}


def defaults(builder: Callable[..., Any]) -> dict[str, Any]:
    """Return a builder's options with their defaults; MISSING if there is no default."""
    parameters = inspect.signature(builder).parameters.values()
    options = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return {p.name: MISSING if p.default is inspect.Parameter.empty else p.default for p in options}


def choose(key: Any, options: dict[Any, Any]) -> Any:
    """Return the value of `options` for `key`, so that one key of a recipe can depend on another.

    In YAML: `${choose:${model.name},{lenet5: 1, ...}}`.
    """
    values = {str(name): value for name, value in options.items()}
    if str(key) not in values:
        raise KeyError(f"the recipe has no value for {key}, only for {', '.join(values)}")
    return values[str(key)]


OmegaConf.register_new_resolver("choose", choose, replace=True)
# Hydra's own folders in `conf`, whose ~ is the home folder, as in `Run.results`.
OmegaConf.register_new_resolver("home", lambda path: str(expand_home(str(path))), replace=True)


def group_options(group: str) -> list[str]:
    """Return the names in a config group: our files, and plug-ins and recipes from elsewhere."""
    foreign_names = names(group) if group in OPEN_GROUPS and installed() else []
    if group == "recipe":
        stored_names = ConfigStore.instance().repo.get(group, {})
        foreign_names = [name.removesuffix(".yaml") for name in stored_names]
    return sorted({*files(group), *foreign_names})


def files(group: str) -> dict[str, Path]:
    """Return the YAML files of a config group by name."""
    folders = {"recipe": assets.RECIPES, "dataset": assets.DATASETS}
    return assets.group(folders.get(group, assets.CONF / group))
