"""Paths of the YAML and CSV files that ship with zdp-bench.

A wheel has them beside the code, and a checkout at its root.
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
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast


def group(folder: Path) -> dict[str, Path]:
    """Return the YAML files of a folder by name, sorted: `{"mnist": .../mnist.yaml, ...}`.

    Extras keep the files of their plug-ins in folders of the same name, which are included.
    """
    files: dict[str, Path] = {}
    for each_folder in (folder, *_of_extras(folder.name)):
        # A new file changes the modification time, which is part of the key of the cached list.
        modified = each_folder.stat().st_mtime_ns if each_folder.is_dir() else 0
        files |= _list(each_folder, modified)
    return dict(sorted(files.items()))


@cache
def _of_extras(name: str) -> list[Path]:
    return sorted(_PACKAGE.glob(f"extras/*/{name}"))


@cache
def _list(folder: Path, modified: int) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_yaml(path: Path) -> dict:
    """Read a YAML file's mapping as plain Python; the caller may change it.

    Interpolations are not resolved.
    """
    return deepcopy(_parse(path))


@cache
def _parse(path: Path) -> dict:
    return yaml.load(path.read_text(encoding="utf-8"), LOADER) or {}
