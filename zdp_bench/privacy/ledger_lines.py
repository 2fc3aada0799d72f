"""The lines of a ledger's file, and what its chain of digests says of them.

Each line is one JSON object. `sha256` in it is the digest of everything above it and of itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from zdp_bench.errors import UserError
from zdp_bench.foreign_files import open_regular

FORMAT = 7  # version of the file's format
MOST_LINE = 1 << 16  # bytes
SHORTEST_STEP = 90  # bytes of the shortest line of a step
BEGINNING = "0" * 64  # the digest before the first line
OTHER_VERSION = (
    "was written by another version of zdp-bench, whose lines this one cannot count: keep its "
    "folder, with that version, outside of this results folder"
)
_encode, _decode = json.JSONEncoder(sort_keys=True).encode, json.JSONDecoder().raw_decode


class LedgerError(ValueError):
    """The ledger file is not the one this run wrote: truncated, edited, or another run's."""


class OtherVersionError(LedgerError):
    """The ledger file is of another version: what its lines stand for is not known."""


# ------------------------------------------------------------------------------ a line of the file


@dataclass(frozen=True)
class Head:
    """The first line: what all steps have in common.

    Attributes:
        mechanism: its digest.
        repeatable: a step that is drawn again has the same noise.
        whose: what else a ledger must not be confused by.
        earlier: releases of the ledgers that were set aside, with noise that is not repeatable.
        facts: what no mechanism says, such as whose ε it is. An older ledger lacks them.
    """

    mechanism: str
    repeatable: bool
    whose: str = ""
    earlier: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the line's JSON, without its digest."""
        optional = {"whose": self.whose, "earlier": self.earlier, "facts": dict(self.facts)}
        stated = {key: value for key, value in optional.items() if value}
        required = {"mechanism": self.mechanism, "repeatable": self.repeatable}
        return {"ledger": FORMAT, **required, **stated}


@dataclass(frozen=True)
class Step:
    """A release.

    Attributes:
        of: the digest of the weights it starts from, if they may differ when it is drawn again.
    """

    step: int
    of: str = ""
    generation: str = ""

    def body(self) -> dict[str, Any]:
        """Return the line's JSON, without its digest."""
        body: dict[str, Any] = {"step": self.step}
        if self.of:
            body["of"] = self.of
        if self.generation:
            body["generation"] = self.generation
        return body


@dataclass(frozen=True)
class Start:
    """A state from which a process may start `step`; it stands beside the chain.

    Attributes:
        made: the digest of code, libraries, machine and micro-batch.
        state: the digest of weights, optimiser and schedule; empty if the generation cannot be
            repeated, so that none of its starts holds any more.
    """

    made: str
    step: int
    state: str
    generation: str

    def body(self) -> dict[str, Any]:
        """Return the line's JSON, without its digest."""
        return dict(vars(self))


Entry = Head | Step | Start
_STEP_KEYS = {"step", "of", "generation"}
_START_KEYS = {"made", "step", "state", "generation"}
_HEAD_KEYS = {"ledger", "mechanism", "repeatable", "whose", "earlier", "facts"}
_TYPES: dict[str, type] = {
    **dict.fromkeys(("ledger", "earlier", "step"), int),
    **dict.fromkeys(("mechanism", "whose", "of", "generation", "made", "state", "sha256"), str),
    "repeatable": bool,
    "facts": dict,
}


def parse(line: bytes) -> tuple[Entry, str]:
    """Return what a line says, and the digest that it states.

    Raises:
        LedgerError: it is no line of a ledger.
    """
    damaged = LedgerError("not a ledger line; the file was edited or damaged")
    try:
        text = line.decode()
        body, end = _decode(text)
        digest = body.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise damaged from None
    typed = all(type(value) is _TYPES.get(key) for key, value in body.items())
    if text[end:].strip() or type(digest) is not str or not typed:
        raise damaged
    keys = body.keys()
    if keys == _START_KEYS:
        return Start(**body), digest
    if {"step"} <= keys <= _STEP_KEYS:
        return Step(**body), digest
    if {"ledger", "mechanism", "repeatable"} <= keys <= _HEAD_KEYS:
        facts = body.get("facts", {})
        if body.pop("ledger") != FORMAT:
            raise OtherVersionError(OTHER_VERSION)
        if all(type(value) is str for value in facts.values()):
            return Head(**body), digest
    raise damaged


def chain(previous: str, entry: Entry) -> str:
    """Return the digest that continues `previous` by an entry."""
    return hashlib.sha256((previous + _encode(entry.body())).encode()).hexdigest()


def make_line(previous: str, entry: Entry) -> bytes:
    """Return a line of the file: the entry and the chain's digest."""
    body = entry.body() | {"sha256": chain(previous, entry)}
    return _encode(body).encode() + b"\n"


# ---------------------------------------------------------------------------------- reading a file


class Line(NamedTuple):
    """An entry of a ledger that was read.

    Attributes:
        number: that of its line in the file, from 1.
        digest: the chain's, after it.
        is_cut: a kill cut the line short; the entry is the step that it stands for.
    """

    number: int
    entry: Entry
    digest: str
    is_cut: bool = False


def read_ledger(path: Path) -> Iterator[Line]:
    """Yield the entries of a ledger, each held to the chain.

    Raises:
        LedgerError: a line is damaged, or breaks the chain; names file and line.
    """
    digest = BEGINNING
    last = Step(-1)
    with open_regular(path) as file:
        for number, content in enumerate(lines_of(file), start=1):
            where = f"{path}, line {number}"
            if _is_cut(content):
                if number > 1:  # else nothing was released yet
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
            if not isinstance(entry, Start):
                digest = after
            if isinstance(entry, Step):
                last = entry
            yield Line(number, entry, digest)


def _is_cut(content: bytes) -> bool:
    """True if a kill cut a line short. Zeros are no part of what was written."""
    is_whole = content.endswith(b"\n") or len(content) == MOST_LINE
    return not is_whole and b"\0" not in content


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, in pieces of `MOST_LINE` bytes: a stranger's may have no end."""
    return iter(lambda: file.readline(MOST_LINE), b"")


def salvage(path: Path) -> tuple[list[Entry], int]:
    """Return the entries of a ledger, and how many releases its damaged lines hold at most.

    Raises:
        UserError: it is of another version, so that how many a line may hold is not known.
    """
    try:
        return [line.entry for line in read_ledger(path)], 0
    except OtherVersionError as error:
        raise UserError(f"{error}.") from None
    except LedgerError:
        pass
    steps: list[Entry] = []  # without starts: what is damaged repeats nothing
    lost = 0
    with open_regular(path) as file:
        for content in lines_of(file):
            try:
                entry, _ = parse(content)
            except LedgerError:
                lost += math.ceil(len(content) / SHORTEST_STEP)
                continue
            if isinstance(entry, Step):
                steps.append(entry)
    return steps, lost


def end_of(path: Path) -> str:
    """Return the digest at the end of a ledger that is to be shared.

    Raises:
        UserError: it is damaged, or its last line is cut short.
    """
    digest = BEGINNING
    try:
        for line in read_ledger(path):
            if line.is_cut:
                raise LedgerError("its last line is cut short")
            digest = line.digest
    except LedgerError:
        raise UserError(f"{path.name}: is damaged, and its ε cannot be trusted.") from None
    return digest
