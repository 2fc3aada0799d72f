"""Write, parse and verify the lines of a ledger's file.

Each line is one JSON object. Its key `sha256` is the digest of the lines above it and of its own
content, so the lines form a chain of digests. Starts are outside of it (`is_chained`): lines below
do not depend on them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self

from zdp_bench.errors import UserError
from zdp_bench.foreign_files import open_regular

FORMAT = 7  # version of the file format
MAX_LINE = 1 << 16  # bytes
MIN_STEP_LINE = 90  # bytes of the shortest line of a step
BEGINNING = "0" * 64  # digest before the first line
OTHER_VERSION = (
    "was written by another version of zdp-bench, whose lines this one cannot count: keep its "
    "folder, with that version, outside of this results folder"
)
MAX_LEDGER = 1 << 32  # bytes, of about 30 million steps
MAX_TEXT = 80  # characters of the longest text in a line
MAX_PAIRS = 8  # entries of the longest object in a line
_encode, _decode = json.JSONEncoder(sort_keys=True).encode, json.JSONDecoder().raw_decode


class LedgerError(ValueError):
    """The ledger file is not as this run wrote it: it was truncated, edited or replaced."""


class OtherVersionError(LedgerError):
    """The ledger file has the format of another version, whose lines cannot be counted."""


# ------------------------------------------------------------------------------ a line of the file


class _Written:
    """What a line states: the values of its fields.

    Attributes:
        is_chained: whether the lines below depend on this one.
        fields_of_keys: key in the file -> name of the field.
        optional: keys that are left out if the value is 0 or empty.
    """

    is_chained: ClassVar[bool] = True
    fields_of_keys: ClassVar[dict[str, str]]
    optional: ClassVar[Set[str]] = frozenset()

    def body(self) -> dict[str, Any]:
        """Return the line's JSON object without its digest."""
        values = {key: getattr(self, name) for key, name in self.fields_of_keys.items()}
        return {key: value for key, value in values.items() if value or key not in self.optional}

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Self:
        """Return the entry that `body` described."""
        return cls(**{cls.fields_of_keys[key]: value for key, value in body.items()})


@dataclass(frozen=True)
class Head(_Written):
    """The first line, which states what all steps of the file have in common.

    Attributes:
        mechanism: digest of the mechanism.
        repeatable: whether a step that is taken again has the same noise.
        identity: what else must match; see `Ledger`.
        releases_aside: number of releases in ledgers that were set aside. 0 if noise is repeatable.
        facts: properties that the mechanism does not cover, such as whose ε it is. Ledgers of older
            versions lack them.
        nonce: random, so that a copy of the file differs from another one with the same steps. ""
            if noise is repeatable, and in ledgers of older versions. It is left out of the digest,
            from which seeded steps of your own loop take their keys.
        version: version of the file format.
    """

    fields_of_keys: ClassVar = {
        "ledger": "version",
        "mechanism": "mechanism",
        "repeatable": "repeatable",
        "whose": "identity",
        "earlier": "releases_aside",
        "facts": "facts",
        "nonce": "nonce",
    }
    optional: ClassVar = {"whose", "earlier", "facts", "nonce"}
    mechanism: str
    repeatable: bool
    identity: str = ""
    releases_aside: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    nonce: str = ""
    version: int = FORMAT


@dataclass(frozen=True)
class Step(_Written):
    """A step that was taken.

    Attributes:
        step: number of the step, from 0.
        weights_digest: digest of the weights before the step, if the same step number may be taken
            again from other weights; otherwise "".
        generation: generation of the noise and the batches; see `Tally.generation`.
    """

    fields_of_keys: ClassVar = {"step": "step", "of": "weights_digest", "generation": "generation"}
    optional: ClassVar = {"of", "generation"}
    step: int
    weights_digest: str = ""
    generation: str = ""


@dataclass(frozen=True)
class Start(_Written):
    """A recorded start: a state from which a process may start `step`.

    It is outside the hash chain, so that the digest does not depend on when a run was interrupted
    and saved. Without it, more releases are counted, never fewer.

    A ledger that is not repeatable has no starts. There, the line is a mark; see `of_nonce`.

    Attributes:
        execution_digest: digest of code, libraries, machine and micro-batch.
        step: number of the first step from this state.
        state_digest: digest of weights, optimizer and schedule.
        generation: generation of the steps that follow.
    """

    is_chained: ClassVar = False
    fields_of_keys: ClassVar = {
        "made": "execution_digest",
        "step": "step",
        "state": "state_digest",
        "generation": "generation",
    }
    execution_digest: str
    step: int
    state_digest: str
    generation: str

    @staticmethod
    def of_nonce(nonce: str) -> Start:
        """Return the mark of a process that continues a ledger that is not repeatable.

        It is no start. It has the form of one, because starts are outside the hash chain.
        """
        return Start(execution_digest=nonce, step=0, state_digest="", generation="")


@dataclass(frozen=True)
class Revocation(_Written):
    """Revokes the starts of a generation at or before a step, whose repeat would have other bits.

    Attributes:
        generation: generation of the starts.
        step: number of the step.
    """

    fields_of_keys: ClassVar = {"revokes": "generation", "step": "step"}
    generation: str
    step: int


Entry = Head | Step | Start | Revocation
_KINDS: list[tuple[type[Entry], Set[str]]] = [
    (kind, kind.fields_of_keys.keys() - kind.optional) for kind in (Step, Start, Revocation, Head)
]
_TYPES: dict[str, type] = {
    **dict.fromkeys(("ledger", "earlier", "step"), int),
    **dict.fromkeys(("mechanism", "whose", "nonce", "of", "generation", "made", "state"), str),
    "revokes": str,
    "repeatable": bool,
    "facts": dict,
}


def parse(line: bytes) -> tuple[Entry, str]:
    """Return a line's entry, and the digest that the line states.

    Raises:
        LedgerError: `line` is not a line of a ledger.
        OtherVersionError: it is a line of a ledger of another version.
    """
    damaged = LedgerError("not a ledger line; the file was edited or damaged")
    try:
        text = line.decode()
        body, end = _decode(text)
        digest = body.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise damaged from None
    typed = all(type(value) is _TYPES.get(key) for key, value in body.items())
    if text[end:] not in ("", "\n", "\r\n") or not _is_digest(digest) or not typed:
        raise damaged
    kind = _kind_of(body.keys())
    if kind is None:
        raise damaged
    # A start without what made it is a revocation of an older version, which had the same `FORMAT`.
    if body.get("ledger", FORMAT) != FORMAT or body.get("made") == "":
        raise OtherVersionError(OTHER_VERSION)
    if not all(type(value) is str for value in body.get("facts", {}).values()):
        raise damaged
    return kind.from_body(body), digest


def _kind_of(keys: Set[str]) -> type[Entry] | None:
    """Return the kind of entry that has these keys, or None. No two kinds can have the same."""
    for kind, required in _KINDS:
        if required <= keys <= kind.fields_of_keys.keys():
            return kind
    return None


def _is_digest(value: object) -> bool:
    """Return True for 64 hexadecimal digits. Others are what damage has left of several lines."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def chain(previous: str, entry: Entry) -> str:
    """Return the digest of the chain after `entry`, given the digest before it."""
    body = entry.body()
    body.pop("nonce", None)  # see `Head`
    return hashlib.sha256((previous + _encode(body)).encode()).hexdigest()


def make_line(previous: str, entry: Entry) -> bytes:
    """Return a line of the file: the entry and the digest of the chain after it."""
    body = entry.body() | {"sha256": chain(previous, entry)}
    return _encode(body).encode() + b"\n"


# ---------------------------------------------------------------------------------- reading a file


class Line(NamedTuple):
    """A line that was read from a ledger.

    Attributes:
        number: number of the line in the file, from 1.
        entry: what the line states.
        digest: digest of the chain after the line.
        is_cut: whether a kill or a power failure cut the line short. The entry is then the step
            after the last one. If the line was another entry, this counts one release too many,
            never one too few.
    """

    number: int
    entry: Entry
    digest: str
    is_cut: bool = False


def read_ledger(path: Path) -> Iterator[Line]:
    """Yield the lines of a ledger, and verify the chain of digests.

    Raises:
        LedgerError: a line is damaged or breaks the chain. The message names file and line.
    """
    digest = BEGINNING
    last = Step(-1)
    with open_ledger_file(path) as file:
        for number, content in enumerate(lines_of(file), start=1):
            where = f"{path}, line {number}"
            if _is_cut(content):
                if number > 1:  # a cut first line precedes every release
                    cut = Step(last.step + 1, generation=last.generation)
                    yield Line(number, cut, chain(digest, cut), is_cut=True)
                return
            try:
                entry, stated = parse(content)
            except LedgerError as error:
                raise type(error)(f"{where}: {error}") from None
            after = chain(digest, entry)
            if after != stated:
                raise LedgerError(f"{where}: the chain of digests breaks here; the file was edited")
            if isinstance(entry, Head) != (number == 1):
                raise LedgerError(f"{where}: not a step; the file was edited")
            if entry.is_chained:
                digest = after
            if isinstance(entry, Step):
                last = entry
            yield Line(number, entry, digest)


def _make_beginning_of_line() -> re.Pattern[bytes]:
    """Return the pattern of every beginning of a line, with or without its end.

    A line is an object of texts, whole numbers and truth values. One value of a head, its facts, is
    an object of texts. No text is longer than `MAX_TEXT`, so damage that covers several lines, such
    as a run of equal bytes, does not match.
    """
    characters = rf'(?:[^"\\\0\n]|\\[^\0\n]){{0,{MAX_TEXT}}}'
    text, cut_text = f'"{characters}"', rf'"{characters}\\?'
    value = rf"(?:{text}|\d{{1,20}}|true|false)"
    cut_value = rf"(?:{cut_text}|{text}|\d{{0,20}}|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?)"
    pairs_before = rf"{{0,{MAX_PAIRS - 1}}}"  # how many there are before the last one
    facts = rf"\{{(?:{text}: {text}(?:, {text}: {text}){pairs_before})?\}}"
    cut_fact = rf"(?:{cut_text}|{text}(?::(?: (?:{cut_text}|{text})?)?)?)"
    cut_facts = rf"\{{(?:{text}: {text}, ){pairs_before}(?:{cut_fact},?)?"
    pair = rf"{text}: (?:{value}|{facts})"
    cut_pair = rf"(?:{cut_text}|{text}(?::(?: (?:{cut_value}|{facts}|{cut_facts})?)?)?)"
    line = rf"\{{(?:{pair}, ){pairs_before}(?:{cut_pair},?)?\}}?"
    return re.compile(line.encode())


_BEGINNING_OF_LINE = _make_beginning_of_line()


def _is_cut(content: bytes) -> bool:
    """Return True if a line was cut short: it begins as a line does, but lacks its end.

    All else without an end is damage, which may hold more than one step.
    """
    return _BEGINNING_OF_LINE.fullmatch(content) is not None


def open_ledger_file(path: Path) -> BufferedReader:
    """Open the file of a ledger for reading.

    Raises:
        UserError: the file cannot be read, or is too large, so its steps cannot be counted.
    """
    file = open_possible_ledger(path)
    if os.fstat(file.fileno()).st_size > MAX_LEDGER:
        file.close()
        raise UserError(f"{path}: is larger than any ledger, so its steps cannot be counted.")
    return file


def open_possible_ledger(path: Path) -> BufferedReader:
    """Open a file of any size that may be a ledger.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return open_regular(path)
    except OSError as error:
        raise unreadable(error) from None


def holds_line(path: Path) -> bool:
    """Return True if any line of a file is an intact line of a ledger, of this version or another.

    Raises:
        UserError: the file cannot be read.
    """
    with open_possible_ledger(path) as file:
        for content in lines_of(file):
            try:
                parse(content)
            except OtherVersionError:
                return True
            except LedgerError:
                continue
            return True
    return False


def unreadable(error: OSError) -> UserError:
    """Return the sentence for a ledger, or a folder with ledgers, that the system cannot read."""
    return UserError(
        f"{error.filename}: cannot be read ({error.strerror}), so its steps cannot be counted."
    )


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, in parts of `MAX_LINE` bytes: a foreign file may have no lines."""
    return iter(lambda: file.readline(MAX_LINE), b"")


def salvage(path: Path) -> tuple[list[Entry], int]:
    """Return the entries of a ledger, and an upper bound on the releases in its damaged lines.

    Raises:
        UserError: the ledger has the format of another version, so there is no such bound.
    """
    try:
        return [line.entry for line in read_ledger(path)], 0
    except OtherVersionError as error:
        raise UserError(f"{error}.") from None
    except LedgerError:
        pass
    steps: list[Entry] = []  # no starts, because a damaged ledger proves no repeat
    max_lost = 0
    for content, entry in _read_damaged(path):
        if entry is None:
            max_lost += math.ceil(len(content) / MIN_STEP_LINE)
        elif isinstance(entry, Step):
            steps.append(entry)
    return steps, max_lost


def count_intact_steps(path: Path) -> int:
    """Return the number of steps in the undamaged lines of a ledger; damaged lines are skipped."""
    return sum(isinstance(entry, Step) for _, entry in _read_damaged(path))


def _read_damaged(path: Path) -> Iterator[tuple[bytes, Entry | None]]:
    """Yield each line of a ledger and its entry, or None for the entry of a damaged line.

    The chain of digests is not verified.
    """
    with open_ledger_file(path) as file:
        for content in lines_of(file):
            entry = None
            with suppress(LedgerError):
                entry, _ = parse(content)
            yield content, entry


def end_of(path: Path) -> str:
    """Return the digest at the end of a ledger.

    Raises:
        UserError: the ledger is damaged, or its last line is cut short.
    """
    digest = BEGINNING
    try:
        for line in read_ledger(path):
            if line.is_cut:
                raise LedgerError("its last line is cut short")
            digest = line.digest
    except LedgerError:
        raise UserError(f"{path.name}: is damaged, so its ε cannot be trusted.") from None
    return digest
