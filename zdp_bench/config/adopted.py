"""Recipes from files, and words of the command line: data, checked before Hydra sees them.

Hydra would run what a `_target_` names, write where its logging says and read the environment. Of
its own keys a recipe may hold `hydra.sweeper.params` alone, and of resolvers `RESOLVERS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from zdp_bench.config.compose import files, group_options
from zdp_bench.config.schema import GROUPS, SECTIONS, Scalars
from zdp_bench.errors import UserError, unknown
from zdp_bench.foreign_files import parse_yaml, read_text

MOST_TEXT = 1 << 15
MOST_VALUES = 1_000
MOST_REFERENCES = 16  # of one key to another: they can grow as aliases do
KEYS = {*GROUPS, *SECTIONS, *(field.name for field in fields(Scalars))} - {"paths"}
RESOLVERS = "oc.select or choose"
REFERENCE = re.compile(r"\$\{(?:choose:|(?:oc\.select:)?(\w+)[\w.]*[,}])")
NOT_NAMES = {"nan", "inf", "true", "false", "null"}  # to Hydra
NAMES = {"recipe", "launcher", *GROUPS}  # of groups, whose values name files to Hydra


def adopt_recipes(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with a recipe's name for each `recipe=PATH.yaml`, entered into Hydra.

    Raises:
        UserError: a word runs a program or names a file to Hydra; there is no such file, it is no
            recipe, holds more than data, or has the name of one that ships.
    """
    words = list(overrides)
    for place, word in enumerate(words):
        key, _, value = word.partition("=")
        if key == "recipe" and is_file_name(value):
            words[place] = f"recipe={','.join(_adopt(part) for part in value.split(','))}"
        else:
            check_word(word)
    return words


def is_file_name(recipe: str) -> bool:
    """True if `recipe=` was given a file, or several."""
    return any(part.endswith((".yaml", ".yml")) for part in recipe.split(","))


def check_word(word: str) -> None:
    """Refuse an override that names a program, a file to Hydra, or another place for a group.

    Raises:
        UserError: says which word and why.
    """
    key, _, value = word.partition("=")
    group = key.lstrip("+~")
    if re.search(r"(?<!\w)_target_(?!\w)", word):
        raise UserError(
            f"{word}: names a program to run; what runs is chosen by name alone, such as "
            "launcher=NAME."
        )
    if "@" in key:
        raise UserError(f"{word}: a group has its own place; leave the @ and what follows out.")
    if "/" in value.strip("/") and (group in NAMES or group.startswith("hydra/")):
        raise unknown(group, value, group_options(group) if group in NAMES else [])


def _adopt(value: str) -> str:
    """Enter one recipe file and return its name; a name stays as it is."""
    path, said = Path(value).expanduser(), f"recipe={value}"
    if not is_file_name(value):
        check_word(said)
        return value
    if path.stem in files("recipe"):
        raise UserError(f"{said}: a recipe of zdp-bench has this name; rename the file.")
    if not re.fullmatch(r"[A-Za-z]\w*", path.stem) or path.stem.lower() in NOT_NAMES:
        raise UserError(
            f"{said}: a recipe's name has letters, digits and _ only, and is no truth value."
        )
    body = parse_yaml(read_text(path, MOST_TEXT), said, MOST_VALUES)
    try:
        check_recipe(body)
    except UserError as error:
        raise UserError(f"{said}: {error}") from None
    node = {**body, "recipe": path.stem}
    ConfigStore.instance().store(group="recipe", name=path.stem, node=node, package="_global_")
    return path.stem


def check_recipe(body: Any) -> None:
    """Refuse a recipe that holds more than keys of a run and their values.

    Raises:
        UserError: names the first key or value that is no data.
    """
    if not isinstance(body, dict):
        raise UserError("holds no keys of a run; see recipes/quickstart.yaml.")
    check_values(body)
    for key, node in body.items():
        if key == "defaults":
            _check_defaults(node)
        elif key == "hydra":
            _check_sweep(node)
        elif key == "paths":
            raise UserError(
                "paths: where your data and results lie is for you to say, not for a "
                "recipe; leave it out, and write paths.data=DIR or paths.results=DIR."
            )
        elif key not in KEYS:
            raise unknown("key", str(key), KEYS)


def check_values(node: Any, most: int = MOST_REFERENCES) -> None:
    """Refuse keys that Hydra obeys, and values that name more than other keys of the run.

    Args:
        most: how many references to other keys there may be.

    Raises:
        UserError: names the first.
    """
    references = 0
    for key, value in _walk(node):
        if re.fullmatch(r"_\w+_", key):
            raise UserError(f"{key}: runs a program, and this is data; leave it out.")
        for begun in re.finditer(r"\$\{", value):
            named, references = REFERENCE.match(value, begun.start()), references + 1
            if not named or (named[1] or "recipe") not in KEYS:
                raise UserError(
                    f"{value[:80]}: may name a key of the run as ${{SECTION.KEY}}, with "
                    f"{RESOLVERS} at most; write the value itself."
                )
    if references > most:
        raise UserError(
            f"refers to other keys {references} times, where {most} are allowed; write "
            "the values themselves."
        )


def _walk(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key of a nested value with the text that stands there, if there is any."""
    if isinstance(node, dict):
        for name, inner in node.items():
            yield str(name), ""
            yield from _walk(inner, str(name))
            yield from _walk(name) if isinstance(name, str) else ()
    elif isinstance(node, list):
        for inner in node:
            yield from _walk(inner, key)
    elif isinstance(node, str):
        yield key, node


def _check_defaults(node: Any) -> None:
    """Refuse entries but `_self_` and `override /GROUP: NAME`, of our groups and their names."""
    for entry in node if isinstance(node, list) else [node]:
        pairs = entry.items() if isinstance(entry, dict) else [(entry, None)]
        for key, name in pairs:
            group = str(key).removeprefix("override /")
            if group in GROUPS and str(key) != group:
                if name not in group_options(group):
                    raise unknown(group, str(name), group_options(group))
            elif key != "_self_":
                raise UserError(
                    f"defaults: {key}: must be 'override /GROUP: NAME', and GROUP one of "
                    f"{', '.join(GROUPS)}."
                )


def _check_sweep(node: Any) -> None:
    """Refuse all of Hydra's keys but what a sweep goes over, and that by key of the run."""
    given = node
    for key in ("sweeper", "params"):
        if not isinstance(given, dict) or list(given) != [key]:
            named = next((name for name in given if name != key), key) if given else key
            raise UserError(
                f"hydra: {named}: of Hydra's own keys a recipe may hold "
                "hydra.sweeper.params only; leave the others out."
            )
        given = given[key]
    for key, value in given.items() if isinstance(given, dict) else [("", given)]:
        if str(key).partition(".")[0] not in KEYS - {"recipe"}:
            raise UserError(f"hydra.sweeper.params: '{key}' is no key of a run.")
        check_word(f"{key}={value}")
