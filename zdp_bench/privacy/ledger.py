"""The ledger of a run lists every step that was drawn, on disk before its gradient is used.

Every step is in a JSON line with the SHA-256 of everything above it, so a line that is edited,
dropped or reordered breaks the chain. A line is written and fsynced as a whole; a kill can only cut
the last one short, and such a step is counted: its noise may have been drawn. A line whose writing
fails or is interrupted in a process that lives on is cut off again, for its step was not taken.

An fsync takes as long as several steps of a small model. So a line may reserve the steps that
follow too, as many as `RESERVED` seconds take: `{"step": s, "to": e}` says that every step from s
on, and before e, may be drawn. A checkpoint and the end write `{"taken": t}` after it, if only
those before t were. After a kill all that were reserved count, like steps that were drawn. The
chain goes from step to step, so its digest does not tell which of them stood in one line.

A step that is drawn again after a kill counts once only if it is provably the same release. For
that the ledger also notes, beside the chain, the states from which a process may start: `{"state":
digest of weights and optimiser, "step": s, "made": digest of the code and the machine}`.
    - Same step, same state, same code and machine as such a line: every step from there on has the
      same bits as before, and counts once.
    - Anything else starts a new GENERATION with its own key for noise and batches
      (`Ledger.generation`). Steps that are drawn again are then new, independent releases, and they
      count again.
    - With secure noise every step that is drawn is a new release.
    - A node of a federation steps from the weights it is sent, whose digest the line holds as `of`:
      only the same step from the same weights is the same release.

The chain guards against damage and mistakes. It has no key: a file that is rewritten as a whole, or
cut line by line back to the last checkpoint, looks like that of a run that was killed there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from zdp_bench import disk
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import open_regular
from zdp_bench.privacy.mechanism import Mechanism

# --------------------------------------------------------------------------- one line of the file

_KINDS = {"step": int, "to": int, "taken": int, "of": str, "generation": str}
_KINDS |= {"made": str, "state": str, "sha256": str}
_STEP = {"step", "to", "of", "generation"}
RESERVED, MOST_RESERVED = 0.2, 10_000  # seconds of steps, and steps, in one line
_STATE = {"made", "step", "state", "generation"}
MOST_LINE = 1 << 16  # bytes
_encode, _decode = json.JSONEncoder(sort_keys=True).encode, json.JSONDecoder().raw_decode


def chain(previous: str, body: dict[str, Any]) -> str:
    """Return the digest that continues `previous` by a line, or by each step that it reserves."""
    if "taken" in body:
        return previous  # which is that of the last step taken
    if "to" in body:
        for one in steps_of(body):
            previous = chain(previous, one)
        return previous
    return hashlib.sha256((previous + _encode(body)).encode()).hexdigest()


def steps_of(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a line, each as in a line of its own."""
    one = {key: value for key, value in body.items() if key != "to"}
    for step in range(body["step"], body.get("to", body["step"] + 1)):
        yield one | {"step": step}


def make_line(previous: str, body: dict[str, Any]) -> bytes:
    """Return a line of the file, without its end: the entry and the chain's digest."""
    return _encode(body | {"sha256": chain(previous, body)}).encode()


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a ledger, in pieces of `MOST_LINE` bytes: a stranger's may have no end."""
    return iter(lambda: file.readline(MOST_LINE), b"")


def parse(line: bytes) -> Any:
    """Return what a line holds."""
    text = line.decode()
    try:
        body, end = _decode(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if text[end:].strip():
        raise ValueError("text follows the object")
    return body


def is_start(body: dict[str, Any]) -> bool:
    """True if the line notes a state from which a process may start, beside the chain."""
    return "state" in body and body.keys() - {"sha256"} == _STATE and _has_kinds(body)


def is_step(body: dict[str, Any]) -> bool:
    """True if the line, without its digest, is a release."""
    if "step" not in body or not body.keys() <= _STEP or not _has_kinds(body):
        return False
    return 0 < body.get("to", body["step"] + 1) - body["step"] <= MOST_RESERVED


def _has_kinds(body: dict[str, Any]) -> bool:
    return all(type(value) is _KINDS[name] for name, value in body.items())


# ------------------------------------------------------------------------------------- the ledger

_START = "0" * 64
_FORMAT = 6  # version of the file's format


class LedgerError(ValueError):
    """The ledger file is not the one this run wrote: truncated, edited, or another run's."""


class BudgetExceeded(Exception):  # noqa: N818 - an event of a run, not an error
    """The next step would exceed `max_epsilon`. Nothing was drawn and nothing changed."""


@dataclass(frozen=True)
class Position:
    """The end of a ledger at a checkpoint: releases, with those set aside, and the digest."""

    entries: int
    digest: str


class Span(NamedTuple):
    """Releases of steps in a row, `first` to before `end`, that have one generation's noise."""

    first: int
    end: int
    generation: str


class Ledger:
    """An append-only file of one mechanism's steps.

    Formal guarantees:
        - `append` returns only after the step is on disk, in a line of its own or a reserved one;
        - `releases` never counts fewer releases than were drawn, whenever the process was killed;
        - a step that is not counted again has the same noise, batch and start as before;
        - opening refuses a file whose chain is broken, or that ends before `at_least`, and names
          the line;
        - only the process that opened it writes: a copy of that process (fork) would take the same
          steps with the same key, and count them in another place;
        - the file has one name, and is the one last written whenever a line is added
          (`require_intact`).
    """

    _digest = _START  # the chain's
    _is_sound = True  # False while a line is being written and counted
    _until, _most = 0, math.inf  # see `reserve`
    _written, _many = 0.0, 1  # when the last line was written, and how many steps it has

    def __init__(
        self,
        path: Path,
        mechanism: Mechanism,
        repeatable: bool,
        at_least: Position | None = None,
        whose: str = "",
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """Open or create the ledger at `path`, and read those that were `set_aside` there.

        Args:
            mechanism: every entry is one step of it.
            repeatable: a step that is drawn again has the same noise.
            at_least: a checkpoint's position, which the file must contain.
            whose: what else a ledger must not be confused by: the name of a federation's node, or
                the digest of who owns which examples.
            facts: what else the steps have in common and no mechanism says, such as whose ε it is,
                and where randomness comes from. A ledger of before lacks them (`facts`).

        Raises:
            LedgerError: see the class.
            UserError: the file has another name too.
        """
        _require_one_name(path)
        self.path, self._place = path, path.absolute()
        self._process = os.getpid()
        self.repeatable, self.generation = repeatable, ""
        self.counted_again = 0  # steps in the file that `begin` found to be taken again as new ones
        self._starts: dict[tuple[str, int, str], str] = {}  # (made, step, state) -> generation
        aside = those_aside(path)
        counted = sum(self._read_starts(earlier) for earlier in aside)
        self.earlier = 0 if repeatable else counted
        self._aside = "".join(_digest_file(earlier) for earlier in aside)
        head = {"whose": whose, "earlier": self.earlier, "facts": dict(facts or {})}
        self._head: dict[str, Any] = {
            "ledger": _FORMAT,
            "mechanism": mechanism.digest(),
            "repeatable": repeatable,
            **{key: value for key, value in head.items() if value},
        }
        self._forget()
        if not path.exists() and at_least is not None and at_least.entries:
            raise LedgerError(
                f"{path}: the ledger is missing, but the checkpoint beside it stands at step "
                f"{at_least.entries}"
            )
        is_new = not path.exists()
        if not is_new:
            self._read(at_least or Position(0, _START))
        disk.make_folder(path.parent)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open for the run
        self._size = os.fstat(self._file.fileno()).st_size
        if is_new:
            self._put(self._head)
            self._digest = chain(self._digest, self._head)
            self._is_sound = True
            disk.fsync_folder(path.parent)

    def _forget(self) -> None:
        """Reset the counts to those of a file without lines."""
        self.facts = self._head.get("facts", {})
        self._spans: list[Span] = []
        self._count = 0  # releases in them
        self._furthest: dict[str, int] = {}  # generation -> its last step
        self._of: set[tuple[str, int, str]] = set()
        self._digest = _START
        # of the last line: the first step that was not taken, and where it ends
        self._next = self._end = 0

    def begin(self, made: str, step: int, state: str) -> None:
        """Start, or continue, at `step` from `state`: in that start's generation, or a new one.

        Args:
            made: `training.machine.execution_digest` of code, libraries, machine and micro-batch;
                empty if no step can be repeated bit for bit.
            state: the digest of weights, optimiser and schedule.
        """
        if not self.repeatable:
            return
        known = self._starts.get((made, step, state)) if made else None
        if known is not None:
            self.generation = known
        elif self._spans or self._starts or self._aside:
            parts = f"{self._digest}:{self._aside}:{made}:{step}:{state}"
            self.generation = hashlib.sha256(parts.encode()).hexdigest()[:32]
            again = (end - max(first, step) for first, end, _ in self._spans)
            self.counted_again = sum(max(0, steps) for steps in again)
        self.note(made, step, state)

    def note(self, made: str, step: int, state: str) -> None:
        """Write a state that this generation passes through, before a checkpoint holds it."""
        if made and self.repeatable and (made, step, state) not in self._starts:
            self._note(made, step, state)

    def doubt(self, step: int) -> None:
        """Write that this generation cannot be repeated from `step` on: its batch was cut again."""
        if self.repeatable:
            self._note("", step, "")

    def _note(self, made: str, step: int, state: str) -> None:
        body = {"made": made, "step": step, "state": state, "generation": self.generation}
        self.settle()  # the line's digest is that of the steps taken
        self._put(body)
        self._learn(body)
        self._is_sound = True

    def _learn(self, body: dict[str, Any]) -> None:
        """Remember a start; a line without a state ends all starts of its generation."""
        if body["state"]:
            self._starts[body["made"], body["step"], body["state"]] = body["generation"]
        else:
            self._starts = {
                start: of for start, of in self._starts.items() if of != body["generation"]
            }

    def _read_starts(self, path: Path) -> int:
        """Read the starts of a ledger that was set aside; return how many steps it has at most.

        A line that cannot be read may have reserved twice as many as the one before.
        """
        steps, many, end = 0, 1, 0
        with open_regular(path) as file:
            for line in read_lines(file):
                try:
                    body = parse(line)
                    body.pop("sha256", None)
                    if is_start(body):
                        self._learn(body)
                    elif is_step(body):
                        end = body.get("to", body["step"] + 1)
                        many = end - body["step"]
                        steps += many
                    elif body.keys() == {"taken"} and end - many < body["taken"] < end:
                        steps, end = steps - (end - body["taken"]), 0
                    elif "ledger" not in body:
                        raise ValueError
                except (ValueError, TypeError, AttributeError):
                    many = min(2 * many, MOST_RESERVED)
                    steps += many
        return steps

    def append(self, step: int, of: str = "") -> None:
        """Write that `step` is about to be released, unless the very same release is there.

        `of` is the digest of the weights it starts from, if they may differ when it is drawn again.
        """
        self.require_own_process()
        self._cut_back()
        if self.holds(step, of):
            return
        body = {"step": step} | ({"of": of} if of else {})
        body |= {"generation": self.generation} if self.generation else {}
        if step != self._next or step >= self._end:
            self._many = self._ahead(step)
            self.settle()
            self._put(body | ({"to": step + self._many} if self._many > 1 else {}))
            self._written, self._end = time.monotonic(), step + self._many
        self._is_sound = False
        self._next, self._digest = step + 1, chain(self._digest, body)
        self._enter(step, of, self.generation)
        self._is_sound = True

    def reserve(self, until: int, most: int | None = None) -> None:
        """Let a line reserve steps ahead: to before `until`, and up to `most` releases in all."""
        self._until, self._most = until, math.inf if most is None else most

    def _ahead(self, step: int) -> int:
        """Return how many steps, from this one on, the next line is to have."""
        taken = self._many - max(0, self._end - self._next)
        took = (time.monotonic() - self._written) / max(1, taken)
        room = min(self._until - step, self._most - self.releases, MOST_RESERVED)
        return max(1, int(min(2 * self._many, RESERVED / max(took, 1e-9), room)))

    def settle(self) -> None:
        """Write which of the reserved steps were taken, if not all were; not in a fork."""
        if os.getpid() == self._process:
            if self._next < self._end:
                self._put({"taken": self._next})
                self._end, self._is_sound = self._next, True
            else:
                self.require_intact()

    def require_own_process(self) -> None:
        """Reject a process that was copied from the one that opened the ledger."""
        if os.getpid() != self._process:
            raise UserError(
                "this process is a copy (fork) of the one that opened the ledger, and a step here "
                "would repeat that one's noise: begin the training in the process that takes its "
                "steps, each with a ledger of its own."
            )

    def require_intact(self) -> None:
        """Reject a file that is not as it was last written: steps may be missing from it."""
        if self._file.closed:
            return
        self._cut_back()
        held = os.fstat(self._file.fileno())
        is_there = self._place.exists() and os.path.samestat(os.lstat(self._place), held)
        if not is_there or held.st_size != self._size:
            raise UserError(
                f"{self.path}: was moved, deleted, cut or written to by something else while its "
                "training runs, and no longer lists every step: put it back as it was, or begin "
                "again with an untrained model and another ledger."
            )

    def _cut_back(self) -> None:
        """Cut off a line that was not written, or not counted, and read those before it again.

        An error, or a signal, kept its step from being taken. Reserved steps then count as taken.
        """
        if self._is_sound or os.getpid() != self._process:
            return
        if os.fstat(self._file.fileno()).st_size < self._size:
            return  # which `require_intact` refuses
        os.ftruncate(self._file.fileno(), self._size)
        os.fsync(self._file.fileno())
        self._forget()
        self._read(Position(0, _START))
        self._is_sound = True

    def holds(self, step: int, of: str = "") -> bool:
        """True if drawing `step` (again) makes no new release."""
        if of:
            return self.repeatable and (self.generation, step, of) in self._of
        return self.repeatable and step <= self._furthest.get(self.generation, -1)

    def _enter(self, step: int, of: str, generation: str) -> None:
        first, end, last = self._spans[-1] if self._spans else Span(0, 0, "")
        if (end, last) == (step, generation) and self._spans:
            self._spans[-1] = Span(first, step + 1, generation)
        else:
            self._spans.append(Span(step, step + 1, generation))
        self._count += 1
        self._furthest[generation] = max(step, self._furthest.get(generation, -1))
        if of:
            self._of.add((generation, step, of))

    @property
    def has_other_noise(self) -> bool:
        """True if it holds steps whose noise this process cannot draw again."""
        if not self.repeatable:
            return self.releases > 0
        return any(generation != self.generation for _, _, generation in self._spans)

    @property
    def releases(self) -> int:
        """How many releases the accountant must compose."""
        return self.earlier + self._count

    def releases_before(self, step: int) -> int:
        """Return how many releases were made when `step` steps are done.

        What this generation drew ahead will be drawn again, so it counts when its turn comes.
        """
        if not self.repeatable:
            return self.releases
        return sum(
            (min(end, max(first, step)) if generation == self.generation else end) - first
            for first, end, generation in self._spans
        )

    @property
    def position(self) -> Position:
        return Position(self.releases, self._digest)

    def copy(self) -> Copy:
        """Return the same count for another process, which writes nothing."""
        return Copy(tuple(self._spans), self.position, self.repeatable, self.generation)

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._file.close()

    def _put(self, body: dict[str, Any]) -> None:
        """Write a line. The caller counts it, and then sets `_is_sound`."""
        self.require_own_process()
        self.require_intact()
        left = make_line(self._digest, body) + b"\n"
        self._is_sound = False
        while left:  # an unbuffered file may take less than it is given
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())
        self._size = os.fstat(self._file.fileno()).st_size

    def _read(self, at_least: Position) -> None:
        passed: set[str] = set()  # the chain's digests at the checkpoint's number of steps
        number, whole, cut = 0, 0, False  # lines, their bytes, and if a kill cut the next one short
        with open_regular(self.path) as file:
            for number, line in enumerate(read_lines(file), start=1):
                if cut := not line.endswith(b"\n") and len(line) < MOST_LINE:
                    number -= 1
                    break
                whole += len(line)
                for digest in self._take(number, line):
                    if self.releases == at_least.entries:
                        passed.add(digest)
        self._next = self._end  # what was reserved counts
        if self.releases < at_least.entries:
            raise LedgerError(
                f"{self.path}, line {number + 1}: the file ends here. It holds {self.releases} "
                f"steps, but the checkpoint beside it was written after {at_least.entries}; it was "
                "truncated"
            )
        if at_least.entries and at_least.digest not in passed:
            raise LedgerError(
                f"{self.path}: does not hold the step that the checkpoint beside it was written "
                f"after, its {at_least.entries}th; the file was replaced"
            )
        if not number:  # killed while the very first line was written: nothing was released yet
            self._mend(0, self._head)
        # count the step whose line a kill cut short: replace the fragment by a whole line
        elif cut:
            _, end, generation = self._spans[-1] if self._spans else Span(0, 0, "")
            self._mend(whole, {"step": end} | ({"generation": generation} if generation else {}))
            self._enter(end, "", generation)

    def _take(self, number: int, line: bytes) -> Iterator[str]:
        """Read a whole line; hold it to the chain, whose digests it yields."""
        try:
            body = parse(line)
            claimed = body.pop("sha256")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise LedgerError(
                f"{self.path}, line {number}: not a ledger line; the file was edited or damaged"
            ) from None
        broken = LedgerError(
            f"{self.path}, line {number}: the chain of digests breaks here; the file was edited"
        )
        strange = LedgerError(f"{self.path}, line {number}: not a step; the file was edited")
        if number > 1 and is_step(body):
            self._next, self._end = body["step"], body.get("to", body["step"] + 1)
            self._within = []
            for one in steps_of(body):
                self._digest = chain(self._digest, one)
                self._within.append(self._digest)
                self._enter(one["step"], body.get("of", ""), body.get("generation", ""))
                yield self._digest
            if claimed != self._digest:
                raise broken
            return
        if number > 1 and body.keys() == {"taken"} and type(body["taken"]) is int:
            if not self._next < body["taken"] < self._end:
                raise strange
            self._take_back(body["taken"])
            if claimed != self._digest:
                raise broken
            return
        if claimed != chain(self._digest, body if isinstance(body, dict) else {}):
            raise broken
        if number > 1 and is_start(body):  # beside the chain
            self._learn(body)
            return
        if number > 1:
            raise strange
        if {"facts": self.facts} | body != {"facts": self.facts} | self._head:
            raise LedgerError(
                f"{self.path}, line 1: belongs to another mechanism or noise source than this run's"
            )
        self.facts = body.get("facts", {})
        self._digest = claimed
        yield claimed

    def _take_back(self, taken: int) -> None:
        """Leave of the steps in the line before those that were taken."""
        first, end, generation = self._spans[-1]
        self._digest = self._within[taken - self._next - 1]
        self._spans[-1] = Span(first, taken, generation)
        self._count -= end - taken
        self._furthest[generation] = max(of.end for of in self._spans if of[2] == generation) - 1
        self._end = taken

    def _mend(self, kept: int, body: dict[str, Any]) -> None:
        """Keep so many bytes of the file and end it with a line, all or nothing."""
        with open_regular(self.path) as file:
            whole = file.read(kept)
        disk.write_bytes(self.path, whole + make_line(self._digest, body) + b"\n")
        self._digest = chain(self._digest, body)


class Copy(Ledger):
    """A ledger without a file, for a process that only counts; rank 0 or a node has the file."""

    def __init__(
        self, spans: tuple[Span, ...], position: Position, repeatable: bool, generation: str = ""
    ) -> None:
        self._process = os.getpid()
        self.repeatable = repeatable
        self.generation = generation
        self.counted_again = 0
        self._spans = list(spans)
        self._count = sum(end - first for first, end, _ in spans)
        self.earlier = position.entries - self._count
        self._furthest = {}
        self._of = set()
        self._starts = {}
        self._next = self._end = 0
        self._digest = position.digest
        for _, end, own in spans:
            self._furthest[own] = max(end - 1, self._furthest.get(own, -1))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Belong to the process that was sent this copy."""
        vars(self).update(state, _process=os.getpid())

    def close(self) -> None: ...

    def require_intact(self) -> None: ...

    def _cut_back(self) -> None: ...

    def _put(self, body: dict[str, Any]) -> None: ...


def set_aside(path: Path) -> None:
    """Rename the ledger at `path` to `ledger.jsonl.1`, and so on, before a new one begins.

    None is ever deleted.
    """
    if path.exists():
        number = 1
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        disk.rename(path, aside)


def those_aside(path: Path) -> list[Path]:
    """Return the ledgers that were `set_aside` at `path`, the first one first."""
    ours = re.compile(re.escape(path.name) + r"\.(\d+)")
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    found = sorted(
        (match for name in names if (match := ours.fullmatch(name))), key=lambda m: int(m[1])
    )
    return [path.with_name(match[0]) for match in found]


def has_steps(path: Path) -> bool:
    """True if a ledger holds a release; its other lines are its head and the states of starts."""
    with open_regular(path) as file:
        return any(b'"ledger"' not in line and b'"state"' not in line for line in read_lines(file))


def may_repeat(path: Path) -> int:
    """Return the most releases that a process that starts now must repeat.

    They are those since the last noted state but one: the last may not have been saved.
    """
    count, before, last = 0, 0, 0
    with open_regular(path) as file:
        for line in read_lines(file):
            try:
                body = parse(line)
            except ValueError:  # cut off by a kill, before its noise
                continue
            body.pop("sha256", None)
            if is_step(body):
                count += body.get("to", body["step"] + 1) - body["step"]
            elif is_start(body):
                before, last = last, count
    return count - before


def spread(path: Path) -> str:
    """Rewrite a ledger to share with one line for each step; return the digest at its end.

    How many a line reserved tells the time that they took, and so of how many examples there are.
    """
    try:
        lines, digest = _one_by_one(path)
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return digest
    except (ValueError, TypeError, AttributeError, LookupError):
        raise UserError(f"{path.name}: is damaged, and its ε cannot be trusted.") from None


def _one_by_one(path: Path) -> tuple[list[bytes], str]:
    digest = _START
    written: list[tuple[bytes, str]] = []  # lines, and the chain's digest after each
    end = 0
    for line in path.read_bytes().splitlines():
        body = parse(line)
        claimed = body.pop("sha256")
        if is_step(body):
            end = body.get("to", body["step"] + 1)
            for one in steps_of(body):
                own, digest = make_line(digest, one), chain(digest, one)
                written.append((own, digest))
        elif "taken" in body:
            del written[len(written) - (end - body["taken"]) :]
            digest = written[-1][1]
        elif is_start(body):
            written.append((line, digest))
            claimed = digest if claimed == chain(digest, body) else ""
        else:
            digest = chain(digest, body)
            written.append((line, digest))
        if claimed != digest:
            raise ValueError
    return [line for line, _ in written], digest


def _require_one_name(path: Path) -> None:
    """Reject a link and a file of several names: locks go by name, and two would write at once."""
    found = os.lstat(path) if os.path.lexists(path) else None
    if found and (stat.S_ISLNK(found.st_mode) or found.st_nlink > 1):
        raise UserError(
            f"{path}: is a link, or has a second name by a hard link, under which another run "
            "could write to it: name the file itself, or a copy of its own (cp)."
        )


def _digest_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
