"""The cache folder, which is used only if no other user can write to it."""

from __future__ import annotations

import logging
import os
import re
import stat
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from zdp_bench.disk import find_target

log = logging.getLogger(__name__)
_ARRAY, _NUMBER = "[0-9a-f-]{32}", "[0-9a-f]{64}"
# Names of the files in the cache: arrays (`data.cache`), numbers (`privacy.memory`), and what a
# killed process of an older version has left of an array.
_OWN_NAMES = re.compile(rf"{_ARRAY}\.npy|{_NUMBER}\.json|\.{_ARRAY}\.\d+\.npy")


def cache_folder(kind: str) -> Path | None:
    """Return the folder for one kind of cached files; None, with one warning, if it is not safe.

    Runs train on cached arrays, so other users must not be able to replace them. The root of the
    cache must belong to this user, have mode 0700 and not be a link, and no other user may be able
    to put another folder in its place.
    """
    root = cache_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (why := _find_weakness(root)):
            root.chmod(0o700)
            return root / kind
    except OSError as error:
        why = error.strerror or type(error).__name__
    _warn(root, why)
    return None


def cache_root() -> Path:
    """Return the root of the cache, which may not exist."""
    return user_cache_path("zdp-bench")


def list_files() -> dict[str, list[Path]]:
    """Return the files that the cache wrote, by their kind.

    The cache's root is also the default folder of data sets, whose files are left out.
    """
    files: dict[str, list[Path]] = {}
    for folder in sorted(path for path in cache_root().glob("*") if path.is_dir()):
        files[folder.name] = list_own_files(folder)
    return files


def list_own_files(folder: Path) -> list[Path]:
    """Return the cache's files in one of its folders, and what killed processes left of them."""
    own_files = []
    for path in folder.iterdir():
        target = find_target(path) or path
        if _OWN_NAMES.fullmatch(target.name) and path.is_file():
            own_files.append(path)
    return own_files


def _find_weakness(root: Path) -> str:
    """Return how another user could write to the root of the cache; '' if that is impossible."""
    if not hasattr(os, "geteuid"):  # Windows has no such modes
        return ""
    if root.is_symlink():
        return "it is a link"
    here, above = root.stat(), root.parent.resolve()
    if here.st_uid != os.geteuid():
        return "it belongs to another user"
    if here.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    if above.stat().st_uid not in (0, os.geteuid()):
        return f"{above} belongs to another user"
    for path in (above, *above.parents):
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"everybody may write to {path}"
    return ""


@cache
def _warn(root: Path, why: str) -> None:
    log.warning(
        "%s: %s, so it is not used and arrays stay in memory. Set XDG_CACHE_HOME to another folder",
        root,
        why,
    )
