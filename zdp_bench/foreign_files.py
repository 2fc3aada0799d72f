"""Foreign files: read within limits, or rejected in one sentence.

Everything foreign comes in by here: recipes, exported folders, cards, records. A limit stands
before the bytes it is about, so that no file takes minutes or gigabytes to be refused.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from zdp_bench.errors import UserError, first_line, in_one_line

# A type or a union of types; a list of a shape; a dictionary of shapes, where the key `str` means
# any key; a tuple of shapes, of which one must fit.
Shape = Any
T = TypeVar("T")
MOST_TEXT = 1 << 18  # bytes of a YAML file, or of a text for people
MOST_JSON = 1 << 26
MOST_DEPTH = 40
MOST_NODES = 20_000  # of YAML, with every alias written out
MOST_INT = 1 << 64
MOST_PIXELS = 1 << 26  # of a picture, a plane, or a slice with all its coils
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a pair that JSON writes one character as
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")
# A character of a regular expression, or a class of some, that may be repeated; a group may not.
_CHARACTER = r"(?:\\\D|\[\^?\]?(?:\\.|[^\]\\])*\]|[^][\\()|*+?{}])"
_REPEATS = r"(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})\??"
_PATTERN = re.compile(rf"(?:{_CHARACTER}(?:{_REPEATS})?|\((?:\?:)?|\)|\|)*")
MOST_REPEATS = 4  # in one regular expression
_PLAIN = {dict, list, str, int, float, bool, type(None)}


class Unfit(UserError):  # noqa: N818 - a fact about a file, which `reading` names
    """What is wrong with a file, in words that follow its name."""


@contextmanager
def reading(path: Path, most: int | None = None) -> Iterator[None]:
    """Turn any error while a file is read into one sentence with the file's name.

    A library may raise anything over bytes that a stranger wrote. A package that is not installed
    is not the file's fault, and passes.

    Args:
        most: bytes; a larger file is refused before any of it is read.

    Raises:
        UserError: the file is missing, too large, damaged, or not as `expect` wants it.
    """
    try:
        expect(path.is_file(), "is missing or not a file")
        if most is not None:
            size = path.stat().st_size
            expect(size <= most, f"has {size:,} bytes; at most {most:,} are read")
        yield
    except Unfit as error:
        raise UserError(f"{path}: {error}.") from None
    except (UserError, ImportError):
        raise
    except Exception as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {in_one_line(error)}"
        raise UserError(
            f"{path}: cannot be read ({why}); it is truncated, damaged or of another kind."
        ) from None


def expect(holds: bool, otherwise: str) -> None:
    """Reject the file of the enclosing `reading`, in words that follow its name."""
    if not holds:
        raise Unfit(otherwise)


def require_text(text: str, what: str = "text") -> str:
    """Return a foreign text; reject control characters other than tabs and ends of lines.

    Parsers differ in what they make of such a character: some drop it, so that `10<NUL>0` is read
    as 100, and others stop there. Whatever comes as text passes here before it is parsed.

    Args:
        what: the part of the file that is read, for the error.
    """
    match = _CONTROL.search(text)
    if match is None:
        return text
    line = text.count("\n", 0, match.start()) + 1
    where = f" in line {line}" if "\n" in text else ""
    raise Unfit(f"has a control character ({match[0]!r}) in its {what}{where}; it is damaged")


def require_size(*sides: int) -> None:
    """Reject an image whose header announces no pixel, or more than `MOST_PIXELS`.

    A few kilobytes announce, and unpack to, gigabytes: every reader asks before it reads a pixel.
    """
    announced = "×".join(f"{side:,}" for side in sides)
    rule = f"announces {announced} pixels; 1 to {MOST_PIXELS:,} are read"
    expect(min(sides) > 0 and math.prod(sides) <= MOST_PIXELS, rule)


def open_regular(path: Path, flags: int = 0) -> BufferedReader:
    """Open a regular file, nothing that blocks; `flags` of `os.open` may ask for more."""

    def open_it(name: str, own: int) -> int:  # a FIFO is known as one only once it is open
        return os.open(name, own | flags | os.O_NONBLOCK, 0o666)

    file = open(path, "rb", opener=open_it)  # noqa: SIM115 - the caller's
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UserError(f"{path}: is not a regular file.")
    return file


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        UserError: it is larger, or no regular file.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path}: is larger than the {limit:,} bytes that are read of one.")
    return content


def read_text(
    path: Path,
    limit: int = MOST_TEXT,
    encoding: str = "utf-8",
) -> str:
    """Return the text of a regular file of at most `limit` bytes, as `require_text` wants it.

    Raises:
        UserError: the file is missing, larger, of another encoding, or damaged.
    """
    try:
        content = read_bytes(path, limit)
        return require_text(content.decode(encoding))
    except Unfit as error:
        raise UserError(f"{path}: {error}.") from None
    except FileNotFoundError:
        raise UserError(f"{path}: file not found.") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}: is not UTF-8 in line {line}; save it in UTF-8.") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "its name is not one of a file"
        raise UserError(f"{path}: cannot be read: {why}.") from None


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds; see `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(
    text: str,
    source: str,
    most: int = MOST_NODES,
) -> Any:
    """Return a YAML text's values; a UserError if it is none, repeats a key or exceeds a limit."""
    try:
        _check_events(yaml.parse(text, yaml.SafeLoader), source, most)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()  # aliases are not written out yet
        _check_nodes(root, source, most)
        content = loader.construct_document(root) if root else None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{source}: is no YAML: {first_line(error)}") from None
    _check_plain(content, source)
    return content


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    """Return what a JSON file holds, read by `parse`, or raise a UserError; see `read_text`."""
    text = read_text(path, MOST_JSON)
    try:
        content = parse(text)
        if _HALF.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is damaged or not JSON.") from None
    _check_plain(content, str(path))
    return content


def _check_events(
    events: Iterable[yaml.Event],
    source: str,
    most: int,
) -> None:
    """Reject excessive length, nesting, and recursive aliases before a parser follows them."""
    enclosing: list[str | None] = []  # anchors of the collections that are open
    for number, event in enumerate(events):
        if isinstance(event, yaml.CollectionStartEvent):
            enclosing.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            enclosing.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in enclosing:
            raise UserError(f"{source}: '{event.anchor}' holds itself.")
        if len(enclosing) > MOST_DEPTH:
            raise _too_deep(source)
        if number > 2 * most:
            raise _too_many(source, most)


def _check_nodes(
    root: yaml.Node | None,
    source: str,
    most: int,
) -> None:
    """Reject a key that occurs twice, and more nodes than `most`, aliases written out."""
    pending = [root]
    count = 0
    while pending:
        node = pending.pop()
        count += 1
        if count + len(pending) > most:
            raise _too_many(source, most)
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key, times in keys.items():
                if times > 1:
                    raise UserError(f"{source}: says '{key}' twice.")
            pending += chain.from_iterable(node.value)
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value


def _check_plain(content: Any, source: str) -> None:
    """Reject excessive depth, non-JSON values such as dates, and numbers beyond a float."""
    level = [content]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for value in level:
            kind = type(value)
            if kind not in _PLAIN:
                raise UserError(f"{source}: {value} is a {kind.__name__}: put it in quotes.")
            if kind is int and abs(value) > MOST_INT:
                raise UserError(f"{source}: contains a number of more than {MOST_INT:,}.")
            if kind is dict:
                inner += [*value, *value.values()]
            elif kind is list:
                inner += value
        if not inner:
            return
        level = inner
    raise _too_deep(source)


def _too_deep(source: str) -> UserError:
    return UserError(f"{source}: is nested deeper than {MOST_DEPTH} levels.")


def _too_many(source: str, most: int) -> UserError:
    return UserError(f"{source}: holds more than {most:,} values.")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a foreign regular expression, of a kind that matches any text quickly.

    Repeats stand behind characters and classes of characters only. Where one repeat holds another,
    as in `(a+)+`, a text of thirty characters may take years.
    """
    repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
    if not _PATTERN.fullmatch(pattern) or repeats > MOST_REPEATS:
        raise Unfit(
            f"'{pattern[:200]}' is not a simple regular expression: repeat characters or classes "
            f"such as [0-9], not groups, and at most {MOST_REPEATS} times"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # of sets such as [[a], to come in Python
            return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise Unfit(f"'{pattern[:200]}' is not a regular expression: {error}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse_as(kind: type[T], values: Any, name: str = "") -> T:
    """Return plain values as an instance of a type, such as a dataclass; it ignores other keys.

    Args:
        name: of the part of a file that the values are, for the error.

    Raises:
        Unfit: they are not of that type; names the first place.
    """
    try:
        parsed: T = _adapter(kind).validate_python(values)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in (name, *first["loc"]) if part != "")
        rule = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
        raise Unfit(f"does not fit at {place or 'its top'} ({rule})") from None
    return parsed


def misfits(
    value: Any,
    shape: Shape,
    where: str = "",
) -> Iterator[str]:
    """Yield the dotted paths at which a value is not of a shape (see `Shape`)."""
    if isinstance(shape, dict) and isinstance(value, dict):
        for key, inner_shape in shape.items():
            items = value if key is str else {key: value.get(key)}
            for name, item in items.items():
                yield from misfits(item, inner_shape, f"{where}.{name}".lstrip("."))
    elif isinstance(shape, list) and isinstance(value, list):
        for place, item in enumerate(value):
            yield from misfits(item, shape[0], f"{where}[{place}]")
    elif isinstance(shape, tuple):
        of_each = [list(misfits(value, alternative, where)) for alternative in shape]
        if all(of_each):  # no alternative fits
            yield from of_each[-1]
    elif isinstance(shape, dict | list) or not isinstance(value, shape):
        yield where or "the whole"
