"""The ledger of a run: every step that was drawn, on disk before its gradient is used.

One JSON line a step, each carrying the SHA-256 of everything above it, so a line that is edited, dropped or reordered breaks
the chain. A line is written and fsynced as a whole; a kill can only cut the last one short, and such a step is counted: its
noise may have been drawn.

A step drawn again after a crash:
    - with repeatable noise it is bit for bit the same release (see `noise.py`), so step t stands once;
    - with secure noise it is a new release, so it is written, and counted, once more;
    - where it may start from something else than before (a node of a federation steps from the weights it is sent), the line says
      from what, `of`, and only the same step of the same weights is the same release.

The chain guards against damage and careless hands. It has no key, so whoever rewrites the whole file, or cuts off what came
after the last checkpoint, line by line, cannot be told from a run that was killed there.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zdp_bench.privacy.mechanism import Mechanism

_START = "0" * 64
# Raised whenever a seed's noise comes out in other bits: a step drawn again would then be a second release, and no run goes on.
_FORMAT = 5


class LedgerError(ValueError):
    """The ledger file is not the one this run wrote: truncated, edited, or another run's."""


class BudgetExceeded(Exception):  # noqa: N818 - it is an event of a run, not a fault
    """The next step would pass `max_epsilon`. Nothing was drawn and nothing changed."""


def _without(head: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in head.items() if name != key}


def _chain(previous: str, body: dict[str, Any]) -> str:
    return hashlib.sha256((previous + json.dumps(body, sort_keys=True)).encode()).hexdigest()


@dataclass(frozen=True)
class Position:
    """How far a ledger had come when a checkpoint was written: entries and the chain's digest there."""

    entries: int
    digest: str


class Ledger:
    """An append-only file of the steps of one mechanism.

    Formal guarantees:
        - `append` returns only after the step is on disk;
        - `releases` never counts fewer releases than were drawn, whenever the process was killed;
        - opening refuses a file whose chain does not hold, or that ends before `at_least`, and names the line.
    """

    def __init__(
        self,
        path: Path,
        mechanism: Mechanism,
        repeatable: bool,
        at_least: Position | None = None,
        whose: str = "",
        drawn_on: str = "cpu",
    ) -> None:
        """Open or create the ledger at `path`.

        Args:
            mechanism: every entry is one step of it.
            repeatable: the noise of a step drawn again is the same noise.
            at_least: a checkpoint's position, which the file must contain.
            whose: names a node of a federation: ledgers of one mechanism must not be taken for one another.
            drawn_on: names what draws the noise (`noise.drawn_on`): repeatable noise is the same on the same device only.

        Raises:
            LedgerError: see the class.
        """
        self.path = path
        self.repeatable = repeatable
        self._head: dict[str, Any] = {"ledger": _FORMAT, "mechanism": mechanism.digest(), "repeatable": repeatable}
        self._head |= {"whose": whose} if whose else {}
        self._head |= {"drawn_on": drawn_on} if repeatable and drawn_on != "cpu" else {}
        self._steps: list[int] = []
        self._of: set[tuple[int, str]] = set()
        self._digest = _START
        if path.exists():
            self._read(at_least or Position(0, _START))
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open for the run
        else:
            if at_least is not None and at_least.entries:
                raise LedgerError(
                    f"{path}: the ledger is missing, but the checkpoint beside it stands at step {at_least.entries}"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
            self._write(self._head)
            _fsync_folder(path.parent)

    def append(self, step: int, of: str = "") -> None:
        """Write down that `step` is about to be released. Does nothing when the very same release is already in.

        Args:
            of: the digest of what the step starts from, where that is not the same whenever the step is drawn.
        """
        if self.holds(step, of):
            return
        self._write({"step": step} | ({"of": of} if of else {}))
        self._enter(step, of)

    def holds(self, step: int, of: str = "") -> bool:
        """Whether drawing `step` (again) makes no new release."""
        if of:
            return self.repeatable and (step, of) in self._of
        return self.repeatable and bool(self._steps) and step <= self._steps[-1]

    def _enter(self, step: int, of: str) -> None:
        self._steps.append(step)
        if of:
            self._of.add((step, of))

    @property
    def releases(self) -> int:
        """How many releases the accountant must compose."""
        return len(self._steps)

    def releases_before(self, step: int) -> int:
        """How many of them were made by the time `step` steps are done, counting what a killed process drew ahead.

        With repeatable noise the releases drawn ahead are those that will be drawn again, so they count when their turn comes.
        """
        return sum(done < step for done in self._steps) if self.repeatable else len(self._steps)

    @property
    def position(self) -> Position:
        return Position(len(self._steps), self._digest)

    @property
    def steps(self) -> tuple[int, ...]:
        """Every release's step, in the order they were made."""
        return tuple(self._steps)

    def close(self) -> None:
        self._file.close()

    def _write(self, body: dict[str, Any]) -> None:
        left = _line(self._digest, body) + b"\n"
        while left:  # an unbuffered file may take less than it is given
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())
        self._digest = _chain(self._digest, body)

    def _read(self, at_least: Position) -> None:
        *lines, cut = self.path.read_bytes().split(b"\n")
        digest_there = _START
        for number, line in enumerate(lines, start=1):
            try:
                body = json.loads(line)
                claimed = body.pop("sha256")
            except (ValueError, KeyError, AttributeError, TypeError):
                raise LedgerError(f"{self.path}, line {number}: not a ledger line; the file was edited or damaged") from None
            if claimed != _chain(self._digest, body):
                raise LedgerError(f"{self.path}, line {number}: the chain of digests breaks here; the file was edited")
            if number == 1:
                if _without(body, "drawn_on") == _without(self._head, "drawn_on") and body != self._head:
                    there, here = (str(head.get("drawn_on", "cpu")) for head in (body, self._head))
                    raise LedgerError(
                        f"{self.path}, line 1: this run's noise was drawn on {there}, and {here} draws other noise from the same "
                        f"seed, so it can only go on there"
                    )
                if body != self._head:
                    raise LedgerError(f"{self.path}, line 1: belongs to another mechanism or noise source than this run's")
            elif set(body) - {"of"} != {"step"} or type(body["step"]) is not int or type(body.get("of", "")) is not str:
                raise LedgerError(f"{self.path}, line {number}: not a step; the file was edited")
            else:
                self._enter(body["step"], body.get("of", ""))
            self._digest = claimed
            if len(self._steps) == at_least.entries:
                digest_there = self._digest
        if len(self._steps) < at_least.entries:
            raise LedgerError(
                f"{self.path}, line {len(lines) + 1}: the file ends here. It holds {len(self._steps)} steps, but the checkpoint "
                f"beside it was written after {at_least.entries}; it was truncated"
            )
        if at_least.entries and digest_there != at_least.digest:
            raise LedgerError(
                f"{self.path}, line {at_least.entries + 1}: not the step the checkpoint beside it was written after; the file "
                "was replaced"
            )
        if not lines:  # killed while the very first line was written: nothing was released yet
            self._rewrite([])
            self._digest = _chain(_START, self._head)
        elif cut:  # count the step whose line a kill cut short: drop the fragment, write the line whole
            body = {"step": self._steps[-1] + 1 if self._steps else 0}
            self._rewrite([*lines, _line(self._digest, body)])
            self._digest = _chain(self._digest, body)
            self._steps.append(body["step"])

    def _rewrite(self, lines: list[bytes]) -> None:
        """Put these lines, or the first one alone, in the file's place: all or nothing, for a kill may come here too."""
        partial = self.path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(b"\n".join([*(lines or [_line(_START, self._head)]), b""]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)
        _fsync_folder(self.path.parent)


class Copy(Ledger):
    """A ledger as another process knows it: the same count, no file. Rank 0 of a run, or a federation's node, has that."""

    def __init__(self, steps: tuple[int, ...], digest: str, repeatable: bool) -> None:
        self.repeatable = repeatable
        self._steps = list(steps)
        self._of = set()
        self._digest = digest

    def close(self) -> None: ...

    def _write(self, body: dict[str, Any]) -> None:
        self._digest = _chain(self._digest, body)


def _line(previous: str, body: dict[str, Any]) -> bytes:
    """A line of the file, without its end: the entry and the chain's digest there."""
    return json.dumps(body | {"sha256": _chain(previous, body)}, sort_keys=True).encode()


def _fsync_folder(folder: Path) -> None:
    """Make a file's creation durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
