"""The registry of plug-ins: `@register("model", "complex_mlp")` adds one of a kind under a name.

A plug-in is a builder, any callable. zdp-bench passes its positional parameters (the problem, the
input shape). Its keyword-only parameters are its options: each is one YAML key, which
`config/plugins.py` checks against the annotation. A new algorithm, model or data set is therefore
one Python file and one YAML file.

Other packages register plug-ins through the entry-point group `zdp_bench.plugins`, which names
modules that register when they are imported. Folders of `zdp_bench/extras` name theirs in `ADDS` of
their `plugins.py`: kind -> name -> "module:name", as in entry points.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from zdp_bench.errors import UserError, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# kind -> the module, or the package of modules, that registers plug-ins of that kind when imported
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

# Kinds that only extras add, and that the core works without: commands of the command line
# (modules), runners that plan and carry out a run elsewhere (modules), exporters of models trained
# in a user's own loop, and experiment trackers.
OPTIONAL = ("command", "runner", "exporter", "logger")
FOREIGN = ("optimizer", "callback")  # kinds that only other packages register
EXTRAS = "zdp_bench.extras"
OPTIMIZERS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadam": "NAdam",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
}
SCHEDULERS = {  # those of torch, which take one step per epoch
    "step_lr": "StepLR",
    "multi_step_lr": "MultiStepLR",
    "exponential_lr": "ExponentialLR",
    "cosine_annealing_lr": "CosineAnnealingLR",
    "linear_lr": "LinearLR",
    "reduce_on_plateau": "ReduceLROnPlateau",
}
# kind -> torch's module, and our names of its classes, which are not registered
TORCH = {"optimizer": ("optim", OPTIMIZERS), "scheduler": ("optim.lr_scheduler", SCHEDULERS)}

_builders: dict[str, dict[str, Callable[..., Any]]] = {
    kind: {} for kind in (*HOMES, *OPTIONAL, *FOREIGN)
}

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Callable[..., Any])


def register(kind: str, name: str) -> Callable[[B], B]:
    """Return a decorator that registers a class or function as a plug-in.

    Args:
        kind: the kind of plug-in, such as "model".
        name: its name in configurations.

    Raises:
        ValueError: Another builder has this name.
    """

    def add(builder: B) -> B:
        if _top_package(builder) != "zdp_bench":
            _require_not_ours(kind, name)
        registered = _builders[kind].setdefault(name, builder)
        # Not `is`: a module that is imported again defines an equal builder.
        if _full_name(registered) != _full_name(builder):
            raise ValueError(f"{kind} '{name}' is already registered by {_full_name(registered)}")
        return builder

    return add


def _require_not_ours(kind: str, name: str) -> None:
    """Reject a name that zdp-bench has and that is registered only when it is needed."""
    _load_ours(kind)
    module, classes = TORCH.get(kind, ("", {}))
    owner = of_extras(kind).get(name) or (name in classes and f"torch.{module}.{classes[name]}")
    if owner:
        raise ValueError(f"{kind} '{name}' is already registered by {owner}")


def _full_name(builder: Callable[..., Any]) -> str:
    return f"{builder.__module__}.{builder.__qualname__}"


def _top_package(builder: Callable[..., Any]) -> str:
    return builder.__module__.partition(".")[0]


@cache
def installed() -> tuple[EntryPoint, ...]:
    """Return the plug-in entry points of installed packages.

    An entry point whose module no longer exists, for example because its folder moved, is skipped
    with a warning, so that commands that do not need it still work.
    """
    from importlib.metadata import entry_points  # imported here, because it would slow down --help

    points = []
    # Sorted, so that the same one of two packages with one name is skipped on every machine.
    for point in sorted(entry_points(group="zdp_bench.plugins"), key=lambda p: (p.name, p.value)):
        try:
            exists = importlib.util.find_spec(point.module) is not None
        except ImportError:
            exists = False
        except Exception:  # of the code of its package; `_load_others` states it
            exists = True
        if exists:
            points.append(point)
        else:
            log.warning(
                "plug-in '%s' is skipped: its module %s no longer exists. Install its package "
                "again, or uninstall it.",
                point.name,
                point.module,
            )
    return tuple(points)


@cache
def of_extras(kind: str) -> dict[str, str]:
    """Return the plug-ins of a kind that extras add: name -> reference for `resolve`."""
    references: dict[str, str] = {}
    for folder in pkgutil.iter_modules(importlib.import_module(EXTRAS).__path__):
        plugins = importlib.import_module(f"{EXTRAS}.{folder.name}.plugins")
        references |= plugins.ADDS.get(kind, {})
    return references


def resolve(reference: str) -> Any:
    """Import and return the object that "module" or "module:name" refers to."""
    module_name, _, name = reference.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, name) if name else module


@cache
def _load_ours(kind: str) -> None:
    """Import our modules that register plug-ins of a kind."""
    if kind in HOMES:
        package = importlib.import_module(HOMES[kind])
        for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{HOMES[kind]}."):
            importlib.import_module(module.name)


@cache
def _load_others() -> None:
    """Import the modules of other packages, and undo what those that raise an error registered.

    A module may import that of another entry point, which is loaded only once: what that registers
    stays.
    """
    for point in installed():
        registered = {kind: {*builders} for kind, builders in _builders.items()}
        try:
            point.load()
        except Exception as error:
            for kind, builders in _builders.items():
                for name in builders.keys() - registered[kind]:
                    if not _is_of_another(builders[name], point.module):
                        del builders[name]
            log.warning("plug-in '%s' (%s) is skipped: %r", point.name, point.module, error)


def _is_of_another(builder: Callable[..., Any], failed: str) -> bool:
    """Return True if a builder is of another plug-in than the module whose import failed."""
    module, package = builder.__module__, _top_package(builder)
    if module not in sys.modules:  # its import failed too
        return False
    if package != failed.partition(".")[0]:
        packages = {point.module.partition(".")[0] for point in installed()} | {"zdp_bench"}
        return package in packages
    homes = [point.module for point in installed() if f"{module}.".startswith(f"{point.module}.")]
    return bool(homes) and max(homes, key=len) != failed


def names(kind: str) -> list[str]:
    """Return the names of all plug-ins of a kind, sorted."""
    _load_ours(kind)
    _load_others()
    return sorted({*_builders[kind], *of_extras(kind)})


def lookup(kind: str, name: str) -> Callable[..., Any]:
    """Return the builder registered as `name`.

    Raises:
        UserError: No plug-in of that kind has this name. The error suggests the nearest name.
    """
    _load_ours(kind)
    _load_others()
    if name in _builders[kind]:
        return _builders[kind][name]
    if name in of_extras(kind):
        # Import this extra only. The import registers a builder, or the object is the plug-in.
        imported = resolve(of_extras(kind)[name])
        return _builders[kind].get(name, imported)
    if kind not in OPTIONAL:
        raise unknown(kind, name, names(kind))
    raise UserError(
        f"{kind} '{name}' belongs to an extra that is not installed (zdp_bench/extras)."
    )


def find_module(kind: str, name: str) -> Any:
    """Return the module that an extra adds as a command or runner; see `lookup` for its error."""
    return lookup(kind, name)


def foreign_packages(used: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names of other packages whose plug-ins were imported, sorted.

    Args:
        used: (kind, name) of plug-ins in use. They may have been registered without an entry point.
    """
    _load_others()
    packages = {point.module.partition(".")[0] for point in installed()}
    packages &= {*sys.modules}  # without those that could not be imported
    packages |= {package_of(kind, name) for kind, name in used}
    return tuple(sorted(packages - {"zdp_bench"}))


def package_of(kind: str, name: str) -> str:
    """Return the top-level name of the package that registered a plug-in."""
    return _top_package(lookup(kind, name))


def names_of_others(kind: str) -> list[str]:
    """Return the names of the plug-ins of a kind that other packages registered."""
    if not installed():
        return []  # without importing all of zdp-bench's own
    return [name for name in names(kind) if package_of(kind, name) != "zdp_bench"]
