"""Plug-ins of every kind by name, added by a decorator: `@register("model", "complex_mlp")`.

A builder is any callable. zdp-bench supplies its positional parameters (the problem, the input
shape); its keyword-only parameters are its options, one YAML key each, which `config/plugins.py`
checks against their annotations. So a new algorithm, model or data set is one file and one YAML.

Other packages add theirs through the entry-point group `zdp_bench.plugins`: a module that
registers on import. The folders of `zdp_bench/extras` add theirs through `ADDS` in their
`plugins.py`: kind -> name -> where it is, as entry points write it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from zdp_bench.errors import UserError, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# kind -> the package whose modules are imported to find the plug-ins of that kind, or the module
HOMES = {
    "algorithm": "zdp_bench.algorithms",
    "model": "zdp_bench.models",
    "representation": "zdp_bench.representations",
    "activation": "zdp_bench.nn",
    "dataset": "zdp_bench.data",
    "task": "zdp_bench.tasks",
    "scheduler": "zdp_bench.training.schedules",
    "accountant": "zdp_bench.privacy.accountants",
}

# Kinds without a home in the core, which does without them: verbs of the command line (modules),
# what carries out a run elsewhere, what writes a model of one's own loop, and experiment trackers.
OPTIONAL = ("command", "runner", "exporter", "logger")
FOREIGN = ("optimizer", "callback")  # kinds of which other packages alone register some
EXTRAS = "zdp_bench.extras"

_builders: dict[str, dict[str, Callable[..., Any]]] = {
    kind: {} for kind in (*HOMES, *OPTIONAL, *FOREIGN)
}

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Callable[..., Any])


def register(kind: str, name: str) -> Callable[[B], B]:
    """Register the decorated class or function as `name` among the plug-ins of `kind`.

    Raises:
        ValueError: another builder has this name.
    """

    def enter(builder: B) -> B:
        taken = _builders[kind].setdefault(name, builder)
        if (taken.__module__, taken.__qualname__) != (builder.__module__, builder.__qualname__):
            raise ValueError(
                f"{kind} '{name}' is already registered by {taken.__module__}.{taken.__qualname__}"
            )
        return builder

    return enter


@cache
def installed() -> tuple[EntryPoint, ...]:
    """Return the entry points of installed packages, read once, which takes milliseconds.

    One that is not, because its folder moved, is said so, and no command fails that does without.
    """
    from importlib.metadata import entry_points  # for --help would wait for it

    found = []
    for point in entry_points(group="zdp_bench.plugins"):
        try:
            there = importlib.util.find_spec(point.module) is not None
        except ImportError:
            there = False
        if there:
            found.append(point)
        else:
            log.warning(
                "plug-in '%s' is skipped: its module %s does not exist any more. Install its "
                "package again, or uninstall it.",
                point.name,
                point.module,
            )
    return tuple(found)


@cache
def of_extras(kind: str) -> dict[str, str]:
    """Return what the folders of `zdp_bench/extras` add to a kind: name -> where, for `resolve`."""
    found: dict[str, str] = {}
    for folder in pkgutil.iter_modules(importlib.import_module(EXTRAS).__path__):
        plugins = importlib.import_module(f"{EXTRAS}.{folder.name}.plugins")
        found |= plugins.ADDS.get(kind, {})
    return found


def resolve(where: str) -> Any:
    """Import 'module' or 'module:name', and return it."""
    module, _, name = where.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@cache
def _load(kind: str) -> None:
    """Import every module of the kind's package, then the plug-ins of other packages."""
    if kind in HOMES:
        package = importlib.import_module(HOMES[kind])
        for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{HOMES[kind]}."):
            importlib.import_module(module.name)
    _load_others()


@cache
def _load_others() -> None:
    for point in installed():
        try:
            point.load()
        except Exception as error:
            log.warning("plug-in '%s' (%s) is skipped: %r", point.name, point.module, error)


def names(kind: str) -> list[str]:
    """Return all names of a kind, sorted."""
    _load(kind)
    return sorted({*_builders[kind], *of_extras(kind)})


def lookup(kind: str, name: str) -> Callable[..., Any]:
    """Return the builder registered as `name`.

    Raises:
        UserError: no plug-in of that kind has this name; suggests the nearest.
    """
    _load(kind)
    if name in _builders[kind]:
        return _builders[kind][name]
    if name in of_extras(kind):
        found = resolve(of_extras(kind)[name])  # and no other of its kind
        return _builders[kind].get(name, found)
    if kind not in OPTIONAL:
        raise unknown(kind, name, names(kind))
    raise UserError(
        f"{kind} '{name}' belongs to an extra that is not installed (zdp_bench/extras)."
    )


def foreign_packages(used: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the other packages, by name, with plug-ins installed, or in use as (kind, name)."""
    packages = {point.module.partition(".")[0] for point in installed()}
    return tuple(sorted((packages | {package_of(*one) for one in used}) - {"zdp_bench"}))


def package_of(kind: str, name: str) -> str:
    """Return the package, by top-level name, that registered a plug-in."""
    return lookup(kind, name).__module__.partition(".")[0]


def names_of_others(kind: str) -> list[str]:
    """Return the names that other packages registered; without any, nothing is imported."""
    found = names(kind) if installed() else []
    return [name for name in found if package_of(kind, name) != "zdp_bench"]
