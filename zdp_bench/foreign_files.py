"""Files that somebody else wrote: read within limits, or refused in one sentence.

Everything foreign comes in by here: recipes, exported folders, cards, records. A limit stands
before the bytes it is about, so that no file takes minutes or gigabytes to be refused.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml

from zdp_bench.errors import UserError, first_line

MOST_TEXT = 1 << 18  # bytes of a YAML file, or of a text for people
MOST_JSON = 1 << 26
MOST_DEPTH = 40
MOST_NODES = 20_000  # of YAML, with every alias written out


def open_regular(path: Path, flags: int = 0) -> BufferedReader:
    """Open a regular file for reading; `flags` of `os.open` may ask for more.

    Raises:
        UserError: it is a FIFO, a device or another thing that could be waited for without end.
        OSError: as `open` does.
    """

    def open_it(name: str, own: int) -> int:  # a FIFO is known as one only once it is open
        return os.open(name, own | flags | os.O_NONBLOCK, 0o666)

    file = open(path, "rb", opener=open_it)  # noqa: SIM115 - the caller's
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UserError(f"{path}: is no regular file.")
    return file


def read_text(path: Path, limit: int = MOST_TEXT) -> str:
    """Return the text of a regular file of at most `limit` bytes.

    Raises:
        UserError: it is none, is larger, cannot be read, or is not UTF-8.
    """
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise UserError(f"{path}: is larger than the {limit:,} bytes that are read of one.")
        return content.decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file.") from None
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"{path}: cannot be read: {said}.") from None


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds; see `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Return what a YAML text holds: mappings, lists, texts, numbers, truth values and nulls.

    Raises:
        UserError: it is no YAML, says a key twice, or is deeper or, with every alias written out,
            larger than the limits.
    """
    try:
        _check_depth(yaml.parse(text, yaml.SafeLoader), source)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()  # aliases are not written out yet
        _check_nodes(root, source)
        found = loader.construct_document(root) if root else None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{source}: is no YAML: {first_line(error)}") from None
    _check_plain(found, source)
    return found


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    """Return what a JSON file holds; see `read_text`.

    Args:
        parse: reads the text, such as `records.from_json`.

    Raises:
        UserError: it is no JSON, or deeper than `MOST_DEPTH`.
    """
    try:
        found = parse(read_text(path, MOST_JSON))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is damaged, or no JSON.") from None
    _check_plain(found, str(path))
    return found


def _check_depth(events: Iterable[yaml.Event], source: str) -> None:
    """Refuse nesting, and aliases within what they name, before a parser follows them."""
    open_ones: list[str | None] = []
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            open_ones.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            open_ones.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in open_ones:
            raise UserError(f"{source}: '{event.anchor}' holds itself.")
        if len(open_ones) > MOST_DEPTH:
            raise _too_deep(source)


def _check_nodes(root: yaml.Node | None, source: str) -> None:
    """Refuse a key that stands twice, and more nodes than `MOST_NODES`, aliases written out."""
    pending, count = [root], 0
    while pending:
        node, count = pending.pop(), count + 1
        if count + len(pending) > MOST_NODES:
            raise UserError(f"{source}: holds more than {MOST_NODES:,} values.")
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [key for key, times in keys.items() if times > 1]:
                raise UserError(f"{source}: says '{twice[0]}' twice.")
            pending += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value


def _check_plain(found: Any, source: str) -> None:
    """Refuse depth, and what JSON does not have, such as a date."""
    level = [found]
    for _ in range(MOST_DEPTH):
        for value in level:
            if not isinstance(value, dict | list | str | int | float | None):
                kind = type(value).__name__
                raise UserError(f"{source}: {value} is a {kind}: put it in quotes.")
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in ([*value, *value.values()] if isinstance(value, dict) else value)
        ]
    if level:
        raise _too_deep(source)


def _too_deep(source: str) -> UserError:
    return UserError(f"{source}: is nested deeper than {MOST_DEPTH} levels.")
