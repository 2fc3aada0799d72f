"""Paths of the YAML and CSV files that ship with zdp-bench.

In a wheel they are beside the code, in a checkout at its root.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

import yaml

_PACKAGE = Path(__file__).resolve().parent
_ROOT = _PACKAGE / "_assets" if (_PACKAGE / "_assets").is_dir() else _PACKAGE.parent

CONF = _ROOT / "conf"
DATASETS = _ROOT / "datasets"
PAPERS = _ROOT / "papers"
RECIPES = _ROOT / "recipes"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first is ten times as fast


def group(folder: Path) -> dict[str, Path]:
    """Return the YAML files of a folder by name, sorted: `{"mnist": .../mnist.yaml, ...}`.

    An extra has those of its plug-ins in a folder of the same name.
    """
    found: dict[str, Path] = {}
    for one in (folder, *_of_extras(folder.name)):
        state = one.stat().st_mtime_ns if one.is_dir() else 0  # a new file changes it
        found |= _list(one, state)
    return dict(sorted(found.items()))


@cache
def _of_extras(name: str) -> list[Path]:
    return sorted(_PACKAGE.glob(f"extras/*/{name}"))


@cache
def _list(folder: Path, state: int) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_yaml(path: Path) -> dict:
    """Return a YAML file's mapping, the caller's own, as plain Python; interpolations stay text."""
    return deepcopy(_parse(path))


@cache
def _parse(path: Path) -> dict:
    return yaml.load(path.read_text(encoding="utf-8"), LOADER) or {}
