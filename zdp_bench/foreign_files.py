"""Read files from untrusted sources within limits, or reject them in one sentence.

All such files are read through this module: recipes, exported folders, cards, records. A limit is
checked before the bytes that it limits are read, so rejecting a file never takes minutes or
gigabytes.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import re
import stat
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from zdp_bench.errors import UserError, first_line, in_one_line, is_out_of_memory

# A type or a union of types; a list with the shape of its items; a dictionary with the shape of
# each key's value, where the key `str` stands for every key; a tuple of alternative shapes.
Shape = Any
T = TypeVar("T")
MAX_TEXT = 1 << 18  # bytes of a YAML or text file
MAX_TABLE = 1 << 22  # bytes of a table in `results/tables`
MAX_JSON = 1 << 26  # bytes of a JSON file or a drawing
MAX_DEPTH = 40  # nested collections
MAX_NODES = 20_000  # of YAML, with every alias expanded
MAX_INT = 1 << 64
MAX_PIXELS = 1 << 26  # of a picture, a plane, or a slice with all its coils
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a pair, which JSON escapes separately
# Errors of opening a folder, a device that is not there, and a socket.
_IRREGULAR = {errno.EISDIR, errno.ENXIO, errno.ENODEV}
# Other errors of the system that are about the file. After any further one, such as too many open
# files, the same file may be readable.
_ABOUT_FILE = _IRREGULAR | {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP}
_ABOUT_FILE |= {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.EOVERFLOW, errno.EFBIG}
_ARCHIVE = b"PK\x03\x04"  # beginning of a zip file
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")
# A token of a regular expression: a character or a class of characters, which may be repeated; or
# the beginning or end of a group, which may not; or the bar between two alternatives.
_CHARACTER = r"\\\D|\[\^?\]?+(?:\\.|[^\]\\])*+\]|[^][\\()|*+?{}]"
_REPEATS = r"(?P<sign>[*+?])|\{(?P<min>\d{1,3})(?P<comma>,(?P<max>\d{0,3}))?\}"
_TOKEN = re.compile(rf"(?:{_CHARACTER})(?:(?:{_REPEATS})\??)?+|\((?:\?:)?|\)|\|")
NAME_LENGTH = 255  # longest name of a file
MAX_WAYS = 10_000_000  # in which a regular expression may match a name of that length
_JSON_TYPES = {dict, list, str, int, float, bool, type(None)}


class Unfit(UserError):  # noqa: N818 - a fact about a file, which `reading` names
    """What is wrong with a file: the part of the sentence that follows the file's name."""


class Unavailable(UserError):  # noqa: N818 - a state of the system
    """The system refused a file, or the memory for it, which says nothing about the file."""


def exists(path: Path) -> bool:
    """Return True if something is at a path, with links followed.

    `Path.exists` and `Path.is_file` return False since Python 3.14 if the system cannot tell. A
    ledger that cannot be read would then count as none.

    Raises:
        OSError: the system cannot tell, such as without permission.
    """
    return _mode_of(path) is not None


def is_file(path: Path) -> bool:
    """Return True if a regular file is at a path; see `exists`."""
    mode = _mode_of(path)
    return mode is not None and stat.S_ISREG(mode)


def resolve(path: Path) -> Path:
    """Return a path with all links resolved. Parts that are missing or forbidden stay.

    Raises:
        OSError: a link leads to itself. `Path.resolve` raises another error, or since Python 3.13
            none.
    """
    try:
        return Path(os.path.realpath(path, strict=True))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
        return Path(os.path.realpath(path))


def _mode_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return None
        raise


@contextmanager
def reading(path: Path, max_bytes: int | None = None) -> Iterator[None]:
    """Convert every error inside the block to one `UserError` that names the file.

    All exceptions are caught because a library may raise any of them on malicious bytes. The
    exception is `ImportError`: a missing package is not the file's fault.

    Args:
        path: path of the file that the block reads.
        max_bytes: maximum size of the file, checked before anything is read. Default: no limit.

    Raises:
        UserError: The file is missing, too large or damaged, or an `expect` inside the block fails.
        Unavailable: The system refuses the file, or the memory for it.
    """
    try:
        expect(is_file(path), "is missing or not a file")
        if max_bytes is not None:
            size = path.stat().st_size
            expect(size <= max_bytes, f"has {size:,} bytes; at most {max_bytes:,} are read")
        yield
    except Unfit as error:
        raise UserError(f"{path}: {error}.") from None
    except (UserError, ImportError):
        raise
    except Exception as error:
        cause = _find_refusal(path) or error
        refusal = getattr(cause, "strerror", None)  # the system's, such as "Permission denied"
        is_refused = refusal or is_out_of_memory(cause)
        diagnosis = "" if is_refused else "; it is truncated, damaged or of another kind"
        why = refusal or f"{type(cause).__name__}: {in_one_line(cause)}"
        raise _kind_of(cause)(f"{path}: cannot be read ({why}){diagnosis}.") from None


def _find_refusal(path: Path) -> Exception | None:
    """Return the system's error when a file is opened, which some libraries do not pass on."""
    try:
        path.open("rb").close()
    except Exception as error:
        return error
    return None


def _kind_of(error: Exception) -> type[UserError]:
    """Return `Unavailable` if an error says nothing about the file that was read."""
    number = error.errno if isinstance(error, OSError) else None
    is_about_file = number is None or number in _ABOUT_FILE
    return UserError if is_about_file and not is_out_of_memory(error) else Unavailable


def expect(holds: bool, otherwise: str) -> None:
    """Reject the file of the enclosing `reading` block unless a condition holds.

    Args:
        holds: the condition.
        otherwise: what is wrong if it does not hold, worded to follow the file's name.
    """
    if not holds:
        raise Unfit(otherwise)


def require_text(text: str, what: str = "text") -> str:
    """Return an untrusted text; reject control characters other than tabs and line ends.

    Parsers disagree about such characters: some drop them, so that `10<NUL>0` is read as 100, and
    others stop there. Every text is checked here before it is parsed.

    Args:
        what: the part of the file that the text comes from, for the error.
    """
    match = _CONTROL.search(text)
    if match is None:
        return text
    line = text.count("\n", 0, match.start()) + 1
    where = f" in line {line}" if "\n" in text else ""
    raise Unfit(f"has a control character ({match[0]!r}) in its {what}{where}; it is damaged")


def require_size(*sides: int) -> None:
    """Reject an image whose header announces no pixels, or more than `MAX_PIXELS`.

    A few compressed kilobytes can expand to gigabytes, so every reader calls this before it reads
    pixels.

    Args:
        sides: length of each side in pixels.
    """
    announced = "×".join(f"{side:,}" for side in sides)
    rule = f"announces {announced} pixels; 1 to {MAX_PIXELS:,} are read"
    expect(min(sides) > 0 and math.prod(sides) <= MAX_PIXELS, rule)


def open_regular(path: Path, flags: int = 0) -> BufferedReader:
    """Open a regular file for reading; reject FIFOs and devices, which could block, and folders.

    Args:
        flags: additional flags of `os.open`.
    """

    # Only an open file can be checked safely, and O_NONBLOCK keeps a FIFO from blocking `open`.
    def open_without_blocking(name: str, default_flags: int) -> int:
        return os.open(name, default_flags | flags | os.O_NONBLOCK, 0o666)

    irregular = UserError(f"{path}: is not a regular file.")
    try:
        file = open(path, "rb", opener=open_without_blocking)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        if error.errno not in _IRREGULAR:
            raise
        raise irregular from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise irregular
    return file


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read the content of a regular file.

    Raises:
        UserError: The file is larger than `max_bytes`, or not a regular file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise UserError(f"{path}: is larger than {max_bytes:,} bytes, the most that are read.")
        return file.read(max(size, MAX_TEXT))  # as much as is asked for is allocated


def read_setting(setting: str, path: Path, max_bytes: int, advice: str = "") -> bytes:
    """Read the content of a regular file that a setting names.

    Args:
        setting: the setting, such as "model.weights=a.pth", for errors.
        path: path of the file.
        max_bytes: maximum size of the file.
        advice: a sentence that says what else to set if there is no such file.

    Raises:
        UserError: The file is missing, larger than `max_bytes`, not a regular file or unreadable.
    """
    try:
        return read_bytes(path, max_bytes)
    except FileNotFoundError:
        raise UserError(f"{setting}: file not found. {advice}".rstrip()) from None
    except OSError as error:
        raise UserError(f"{setting}: {error.strerror}.") from None


def read_text(
    path: Path,
    max_bytes: int = MAX_TEXT,
    encoding: str = "utf-8",
) -> str:
    """Read the text of a regular file, and check it with `require_text`.

    Raises:
        UserError: The file is missing, damaged, larger than `max_bytes` or in another encoding.
        Unavailable: The system refuses the file.
    """
    try:
        content = read_bytes(path, max_bytes)
        return require_text(content.decode(encoding))
    except Unfit as error:
        raise UserError(f"{path}: {error}.") from None
    except FileNotFoundError:
        raise UserError(f"{path}: file not found.") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}: is not UTF-8 in line {line}; save it in UTF-8.") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "its name is not a valid path"
        raise _kind_of(error)(f"{path}: cannot be read: {why}.") from None


def read_yaml(path: Path) -> Any:
    """Read a YAML file; see `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(
    text: str,
    source: str,
    max_nodes: int = MAX_NODES,
) -> Any:
    """Parse a YAML text to plain values.

    Args:
        source: where the text comes from, for the error.
        max_nodes: maximum number of keys and values, with every alias expanded.

    Raises:
        UserError: The text is not valid YAML, repeats a key or exceeds a limit.
    """
    try:
        _check_events(yaml.parse(text, yaml.SafeLoader), source, max_nodes)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()  # aliases are not expanded yet
        _check_nodes(root, source, max_nodes)
        content = loader.construct_document(root) if root else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}" if mark else ""
        reason = " ".join(str(error.problem or error.context).split())[:300]
        raise UserError(f"{source}: is not valid YAML{where}: {reason}.") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{source}: is not valid YAML: {first_line(error)}") from None
    _check_plain(content, source)
    return content


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    """Read a JSON file.

    Args:
        parse: converts the text to plain values.

    Raises:
        UserError: The file cannot be read, is not valid JSON or exceeds a limit.
    """
    text = read_text(path, MAX_JSON)
    try:
        content = parse(text)
        if _SURROGATE.search(text):  # encoding fails if one half of a pair is missing
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is damaged or not JSON.") from None
    _check_plain(content, str(path))
    return content


def parse_weights(content: bytes) -> dict[str, Any]:
    """Return the tensors, by name, of a state dictionary that `torch.save` wrote.

    Torch may raise any error on a file that was changed.

    Raises:
        Unfit: the file contains anything else.
    """
    import torch

    file = io.BytesIO(content)
    if content.startswith(_ARCHIVE):  # which older versions of torch did not write
        file = copy_verified(file)
    rule = "is damaged or contains more than tensors; save the network's state_dict()"
    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:  # not torch's message, which advises to run the file's code
        raise Unfit(rule) from None
    expect(isinstance(state, dict), rule)
    for name, value in state.items():
        expect(isinstance(name, str) and isinstance(value, torch.Tensor), rule)
    return dict(state)


def copy_verified(file: BinaryIO) -> io.BytesIO:
    """Return a copy of an archive for torch to read, with the checksum of each entry verified.

    Torch verifies none, and believes the directory, which has none: an entry that is marked as a
    folder becomes a tensor of uninitialized memory.

    Raises:
        ValueError: the archive unpacks to more bytes than it has, or contains a folder.
        zipfile.BadZipFile: an entry does not match its checksum.
    """
    size = file.seek(0, os.SEEK_END)
    copy = io.BytesIO()
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(copy, "w") as verified:
        if sum(entry.file_size for entry in archive.infolist()) > size:
            raise ValueError("unpacks to more than it is")
        for entry in archive.infolist():
            if entry.filename.endswith("/"):
                raise ValueError("contains a folder")
            # Without the time, of which zip cannot express every one.
            verified.writestr(zipfile.ZipInfo(entry.filename), archive.read(entry))
    copy.seek(0)
    return copy


def _check_events(
    events: Iterable[yaml.Event],
    source: str,
    max_nodes: int,
) -> None:
    """Reject excessive length, nesting, recursive aliases and tags, before nodes are built.

    On a value that does not fit its tag, PyYAML may raise any error.
    """
    enclosing: list[str | None] = []  # anchors of the collections that are open
    for number, event in enumerate(events):
        if isinstance(event, yaml.CollectionStartEvent):
            enclosing.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            enclosing.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in enclosing:
            raise UserError(f"{source}: '{event.anchor}' contains itself.")
        if tag := getattr(event, "tag", None):
            raise UserError(f"{source}: has the tag '{tag}', which is not supported; remove it.")
        if len(enclosing) > MAX_DEPTH:
            raise _too_deep(source)
        if number > 2 * max_nodes:  # a collection has two events, its start and its end
            raise _too_many(source, max_nodes)


def _check_nodes(
    root: yaml.Node | None,
    source: str,
    max_nodes: int,
) -> None:
    """Reject repeated keys, and more than `max_nodes` nodes with every alias expanded."""
    pending = [root]
    count = 0
    while pending:
        node = pending.pop()
        count += 1
        if count + len(pending) > max_nodes:
            raise _too_many(source, max_nodes)
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key, times in keys.items():
                if times > 1:
                    raise UserError(f"{source}: the key '{key}' occurs more than once.")
            pending += chain.from_iterable(node.value)
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value


def _check_plain(content: Any, source: str) -> None:
    """Reject excessive nesting, values that JSON lacks such as dates, and huge integers."""
    level = [content]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            kind = type(value)
            if kind not in _JSON_TYPES:
                raise UserError(f"{source}: {value} is a {kind.__name__}: put it in quotes.")
            if kind is int and abs(value) > MAX_INT:
                raise UserError(f"{source}: contains a number above {MAX_INT:,}.")
            if kind is dict:
                if None in value:  # a key of YAML that is empty or null
                    raise UserError(f"{source}: has a key without a name; put null in quotes.")
                if any(isinstance(key, bool) for key in value):
                    raise UserError(
                        f"{source}: has a key that YAML reads as true or false, as it does yes, "
                        "no, on and off; put it in quotes."
                    )
                inner += [*value, *value.values()]
            elif kind is list:
                inner += value
        if not inner:
            return
        level = inner
    raise _too_deep(source)


def _too_deep(source: str) -> UserError:
    return UserError(f"{source}: is nested deeper than {MAX_DEPTH} levels.")


def _too_many(source: str, max_nodes: int) -> UserError:
    return UserError(f"{source}: contains more than {max_nodes:,} values.")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile an untrusted regular expression; reject one that could take long to match.

    Only characters and classes of characters may be repeated: with nested repeats, as in `(a+)+`,
    matching a text of thirty characters can take years. Many repeats or alternatives in a row can
    too, so the number of ways in which they can match a file's name is limited (`MAX_WAYS`).
    """
    if _bound_ways(pattern) > MAX_WAYS:
        raise Unfit(
            f"'{pattern[:200]}' is not a simple regular expression: repeat characters or classes "
            "such as [0-9], not groups, and use few repeats and alternatives, of which one that "
            "begins with ^ may have more"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # about sets such as [[a]
            return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise Unfit(f"'{pattern[:200]}' is not a regular expression: {error}") from None


def _bound_ways(pattern: str) -> float:
    """Return an upper bound on the ways in which a regular expression can match a file's name.

    A way is a choice of the beginning of the match, of the length of each repeat, and of an
    alternative of each group. A way takes at most one pass over the pattern. ∞ stands for a pattern
    with anything but the tokens in `_TOKEN`.
    """
    alternatives = [1]  # of each open group; the first is the whole pattern
    ways = 1
    num_unbounded = 0  # choices of a position in the name
    end = 0
    while end < len(pattern):
        match = _TOKEN.match(pattern, end)
        if match is None:
            return math.inf
        end = match.end()
        token = match[0]
        if token == "|":
            alternatives[-1] += 1
        elif token in ("(", "(?:"):
            alternatives.append(1)
        elif token == ")" and len(alternatives) > 1:
            ways *= alternatives.pop()
        elif match["sign"] in ("*", "+") or (match["comma"] and not match["max"]):
            num_unbounded += 1
        elif match["sign"] == "?":
            ways *= 2
        elif match["max"]:
            ways *= 1 + max(0, int(match["max"]) - int(match["min"]))
        if len(alternatives) > MAX_DEPTH or ways > MAX_WAYS:
            return math.inf
    ways *= alternatives[0]
    is_anchored = pattern.startswith("^") and alternatives[0] == 1
    num_positions = num_unbounded + (not is_anchored)
    # The positions are in order, so of n, k can be chosen in (n + k over k) ways.
    return ways * math.comb(NAME_LENGTH + num_positions, num_positions)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse_as(kind: type[T], values: Any, name: str = "") -> T:
    """Convert plain values to a type, such as a dataclass; keys that it lacks are ignored.

    Args:
        kind: the type.
        values: plain values, as from JSON.
        name: the part of the file that they come from, for the error.

    Raises:
        Unfit: The values do not fit the type; names the first one that does not.
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
    """Yield the dotted path of every value that does not have its shape; see `Shape`.

    Args:
        where: dotted path of `value` itself.
    """
    if isinstance(shape, dict) and isinstance(value, dict):
        for key, inner_shape in shape.items():
            items = value if key is str else {key: value.get(key)}
            for name, item in items.items():
                yield from misfits(item, inner_shape, f"{where}.{name}".lstrip("."))
    elif isinstance(shape, list) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from misfits(item, shape[0], f"{where}[{index}]")
    elif isinstance(shape, tuple):
        paths_of_alternatives = [list(misfits(value, alternative, where)) for alternative in shape]
        if all(paths_of_alternatives):  # no alternative fits
            yield from paths_of_alternatives[-1]
    elif isinstance(shape, dict | list) or not isinstance(value, shape):
        yield where or "the whole"
