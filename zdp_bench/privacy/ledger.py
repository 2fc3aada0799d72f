"""The ledger of a run lists every step that was drawn, in its file before its noise is drawn.

A step is one JSON line, with the SHA-256 of everything above it, so a line that is edited, dropped
or reordered breaks the chain. A line is written as a whole before its step is taken: a kill loses
no step, and can only cut the last line short. That step is counted: its noise may have been drawn.
A line whose writing fails or is interrupted in a process that lives on is cut off again, for its
step was not taken.

An fsync takes as long as several steps of a small model. So the file is forced to disk at most
every `SYNC_SECONDS`, and always before anything that the steps led to is saved, sent or shown
(`Ledger.sync`). A power cut may lose the steps since then, together with the weights they led to.

A step that is drawn again after a kill counts once only if it is provably the same release. For
that the ledger also notes, beside the chain, the states from which a process may start (`Start`).
    - Same step, same state, same code and machine as such a line: every step from there on has the
      same bits as before, and counts once.
    - Anything else starts a new GENERATION with its own key for noise and batches
      (`Ledger.generation`). Steps that are drawn again are then new, independent releases, and they
      count again, also if the ledger that holds the earlier ones was set aside.
    - With secure noise every step that is drawn is a new release.
    - A node of a federation steps from the weights it is sent, whose digest the line holds as `of`:
      only the same step from the same weights is the same release.

The chain guards against damage and mistakes. It has no key: a file that is rewritten as a whole, or
cut line by line back to the last checkpoint, looks like that of a run that was killed there.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from zdp_bench import disk
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import open_regular
from zdp_bench.privacy.ledger_lines import (
    BEGINNING,
    MOST_LINE,
    Entry,
    Head,
    LedgerError,
    Line,
    OtherVersionError,
    Start,
    Step,
    chain,
    lines_of,
    make_line,
    parse,
    read_ledger,
    salvage,
)
from zdp_bench.privacy.mechanism import Mechanism

SYNC_SECONDS = 0.2  # between two fsyncs of the file, at least
END = 4096  # bytes at the end of a file that show that it was not continued


class BudgetExceeded(Exception):  # noqa: N818 - an event of a run, not an error
    """The next step would exceed `max_epsilon`. Nothing was drawn and nothing changed."""


# -------------------------------------------------------------------------------- what is counted


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


class _Reach:
    """Which steps a set of releases holds: how far each generation went, and from which weights."""

    def __init__(self) -> None:
        self.furthest: dict[str, int] = {}  # generation -> its last step
        self.of: set[Step] = set()  # those from stated weights

    def add(self, step: Step) -> None:
        last = self.furthest.get(step.generation, -1)
        self.furthest[step.generation] = max(step.step, last)
        if step.of:
            self.of.add(step)

    def holds(self, step: Step) -> bool:
        if step.of:
            return step in self.of
        last = self.furthest.get(step.generation, -1)
        return step.step <= last


class Tally:
    """The count of a mechanism's releases, for a process that writes no file of them.

    Formal guarantees:
        - `releases` never falls, and rises with each step that is not provably the same release as
          an earlier one: of the same generation, number and weights;
        - only the process that made it, or was sent it, counts: a copy of that process (fork) would
          take the same steps with the same key, and count them in another place.
    """

    def __init__(
        self,
        repeatable: bool,
        earlier: int = 0,
        spans: Iterable[Span] = (),
        generation: str = "",
        digest: str = BEGINNING,
    ) -> None:
        """Begin with earlier releases.

        Args:
            repeatable: a step that is drawn again has the same noise.
            earlier: releases that nothing repeats.
            spans: the others, which a step of their generation may repeat.
            digest: that of the last line of the file that they stand in.
        """
        self._process = os.getpid()
        self.repeatable = repeatable
        self.earlier = earlier
        self.generation = generation
        self.counted_again = 0  # steps that `Ledger.begin` found to be taken again as new ones
        self._digest = digest
        self._spans = list(spans)
        self._count = sum(end - first for first, end, _ in self._spans)
        self._reach = _Reach()
        for _, end, of in self._spans:
            self._reach.add(Step(end - 1, generation=of))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Belong to the process that was sent this copy."""
        vars(self).update(state, _process=os.getpid())

    def append(
        self,
        step: int,
        of: str = "",
    ) -> None:
        """Count that `step` is about to be released, unless the very same release is counted.

        `of` is the digest of the weights it starts from, if they may differ when it is drawn again.
        """
        self.require_own_process()
        entry = Step(step, of, self.generation)
        if not self.holds(step, of):
            self._digest = chain(self._digest, entry)
            self._enter(entry)

    def note(
        self,
        made: str,
        step: int,
        state: str,
    ) -> None:
        """Note a state that this generation passes through; the process with the file does."""

    def doubt(self, step: int) -> None:
        """Note that this generation cannot be repeated from `step` on; likewise."""

    def sync(self) -> None:
        """Force what was written to disk, before something that it led to leaves the process."""

    def close(self) -> None:
        """Close the file."""

    def require_own_process(self) -> None:
        """Reject a process that was copied from the one that counts."""
        if os.getpid() != self._process:
            raise UserError(
                "this process is a copy (fork) of the one that opened the ledger, and a step here "
                "would repeat that one's noise: begin the training in the process that takes its "
                "steps, each with a ledger of its own."
            )

    def holds(
        self,
        step: int,
        of: str = "",
    ) -> bool:
        """True if drawing `step` (again) makes no new release."""
        return self.repeatable and self._reach.holds(Step(step, of, self.generation))

    def _enter(self, step: Step) -> None:
        """Count a release."""
        spans = self._spans
        after = step.step + 1
        last = spans[-1] if spans else None
        if last is not None and (last.end, last.generation) == (step.step, step.generation):
            spans[-1] = last._replace(end=after)
        else:
            spans.append(Span(step.step, after, step.generation))
        self._count += 1
        self._reach.add(step)

    @property
    def has_other_noise(self) -> bool:
        """True if it holds steps whose noise this process cannot draw again."""
        if not self.repeatable:
            return self.releases > 0
        others = any(span.generation != self.generation for span in self._spans)
        return others or self.earlier > 0

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
        count = self.earlier
        for first, end, generation in self._spans:
            if generation == self.generation:
                end = min(end, max(first, step))
            count += end - first
        return count

    def releases_after(self, first: int, end: int) -> int:
        """Return how many releases there are when the steps from `first` to before `end` are."""
        new = [step for step in range(first, end) if not self.holds(step)]
        return self.releases + len(new)

    @property
    def position(self) -> Position:
        """Where the ledger ends."""
        return Position(self.releases, self._digest)

    def copy(self) -> Tally:
        """Return the same count for another process, which writes nothing."""
        spans, generation = self._spans, self.generation
        return Tally(self.repeatable, self.earlier, spans, generation, self._digest)


def count_releases(paths: Iterable[Path], repeatable: bool) -> int:
    """Return how many different releases ledgers hold; damaged lines count as many they may hold.

    Args:
        repeatable: the same step of one generation is one release, in whatever files it stands.
    """
    return _SetAside(paths, repeatable).releases


class _SetAside(Tally):
    """What the ledgers that are no longer written to hold."""

    def __init__(
        self,
        paths: Iterable[Path],
        repeatable: bool,
    ) -> None:
        super().__init__(repeatable)
        self.starts: list[Start] = []
        self.mechanisms: set[str] = set()
        for path in paths:
            entries, lost = salvage(path)
            self.earlier += lost
            known = copy.deepcopy(self._reach)  # a file's own lines are all releases
            for entry in entries:
                if isinstance(entry, Head):
                    self.mechanisms.add(entry.mechanism)
                elif isinstance(entry, Start):
                    self.starts.append(entry)
                elif not (repeatable and known.holds(entry)):
                    self._enter(entry)


# ------------------------------------------------------------------------------------- the ledger


class Ledger(Tally):
    """An append-only file of one mechanism's steps.

    Formal guarantees, beside those of `Tally`:
        - `append` returns only after the step's line is in the file, so a kill loses no step;
        - a step is on disk `SYNC_SECONDS` later if another follows, and after `sync`;
        - `releases` never counts fewer releases than were drawn, whenever the process was killed,
          and counts those of the ledgers that were `set_aside` at its path;
        - a step that is not counted again has the same noise, batch and start as before;
        - opening refuses a file whose chain is broken, or that ends before `at_least`, and names
          the line;
        - the file has one name, and is the one last written whenever a line is added
          (`require_intact`).
    """

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
        super().__init__(repeatable)
        _require_one_name(path)
        self.path, self._place = path, path.absolute()
        aside = those_aside(path)
        self._aside = "".join(_digest_file(earlier) for earlier in aside)
        self._before = _SetAside(aside, repeatable)
        if self._before.mechanisms - {mechanism.digest()}:
            raise LedgerError(
                f"{path}: a ledger that was set aside beside it has another noise, and no count "
                "covers both"
            )
        earlier = 0 if repeatable else self._before.releases
        self._head = Head(mechanism.digest(), repeatable, whose, earlier, dict(facts or {}))
        self._is_sound = True  # False while a line is being written and counted
        self._is_synced = True  # False while some lines may not be on disk
        self._ending: tuple[int, bytes] | None = None  # of the file, when it was closed
        self._when_synced = time.monotonic()
        is_new = not path.exists()
        if is_new and at_least is not None and at_least.entries:
            raise LedgerError(
                f"{path}: the ledger is missing, but the checkpoint beside it stands at step "
                f"{at_least.entries}"
            )
        self._begin_count()
        if not is_new:
            self._read(at_least)
        disk.make_folder(path.parent)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open for the run
        self._size = os.fstat(self._file.fileno()).st_size
        if is_new:
            self._put(self._head)
            self._digest = chain(self._digest, self._head)
            self._is_sound = True
            self.sync()
            disk.fsync_folder(path.parent)

    def _begin_count(self) -> None:
        """Set the counts to those of a file without lines."""
        before = self._before
        self.facts = self._head.facts
        self._digest = BEGINNING
        self.earlier = before.earlier
        self._spans = list(before._spans)
        self._count = before._count
        self._reach = copy.deepcopy(before._reach)
        self._written = _Reach()  # the steps of this file
        self._starts: dict[tuple[str, int, str], str] = {}  # (made, step, state) -> generation
        for start in before.starts:
            self._learn(start)

    def begin(
        self,
        made: str,
        step: int,
        state: str,
    ) -> None:
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
            for first, end, _ in self._spans:
                self.counted_again += max(0, end - max(first, step))
        self.note(made, step, state)

    def note(
        self,
        made: str,
        step: int,
        state: str,
    ) -> None:
        """Write a state that this generation passes through, before a checkpoint holds it."""
        if made and self.repeatable and (made, step, state) not in self._starts:
            self._note(Start(made, step, state, self.generation))

    def doubt(self, step: int) -> None:
        """Write that this generation cannot be repeated from `step` on: its batch was cut again."""
        if self.repeatable:
            self._note(Start("", step, "", self.generation))

    def _note(self, start: Start) -> None:
        self._put(start)
        self._learn(start)
        self._is_sound = True

    def _learn(self, start: Start) -> None:
        """Remember a start; one without a state ends all starts of its generation."""
        if start.state:
            self._starts[start.made, start.step, start.state] = start.generation
            return
        for key, generation in list(self._starts.items()):
            if generation == start.generation:
                del self._starts[key]

    def append(
        self,
        step: int,
        of: str = "",
    ) -> None:
        """Write that `step` is about to be released, unless this file has the very same release.

        `of` is the digest of the weights it starts from, if they may differ when it is drawn again.
        """
        self.require_own_process()
        self._cut_back()
        entry = Step(step, of, self.generation)
        if self.repeatable and self._written.holds(entry):
            return
        self._put(entry)
        self._digest = chain(self._digest, entry)
        self._take(entry)
        self._is_sound = True

    def _take(self, step: Step) -> None:
        """Count a step of this file, unless a ledger that was set aside has it."""
        self._written.add(step)
        if not (self.repeatable and self._before._reach.holds(step)):
            self._enter(step)

    def sync(self) -> None:
        """Force the file to disk; reject one that is not as it was last written."""
        if os.getpid() != self._process:
            return
        if self._file.closed:
            self._require_as_closed()
            return
        self.require_intact()
        if not self._is_synced:
            os.fsync(self._file.fileno())
            self._when_synced = time.monotonic()
            self._is_synced = True

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

        An error, or a signal, kept its step from being taken.
        """
        if self._is_sound or os.getpid() != self._process:
            return
        if os.fstat(self._file.fileno()).st_size < self._size:
            return  # which `require_intact` refuses
        os.ftruncate(self._file.fileno(), self._size)
        os.fsync(self._file.fileno())
        self._begin_count()
        self._read(None)
        self._is_sound = True

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self.sync()
            self._ending = read_ending(self._place)
        finally:
            self._file.close()

    def _require_as_closed(self) -> None:
        """Reject a file that has other lines than when it was closed: they may be releases."""
        if self._ending is None or self._ending != read_ending(self._place):
            raise UserError(
                f"{self.path}: another training continued this ledger after it was closed here; "
                "ask that one. If the file was moved or changed instead, put it back as it was."
            )

    def _put(self, entry: Entry) -> None:
        """Write a line. The caller counts it, and then sets `_is_sound`."""
        self.require_own_process()
        self.require_intact()
        left = make_line(self._digest, entry)
        self._is_sound = False
        self._is_synced = False
        while left:  # an unbuffered file may take less than it is given
            left = left[self._file.write(left) :]
        if time.monotonic() - self._when_synced >= SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._when_synced = time.monotonic()
            self._is_synced = True
        self._size = os.fstat(self._file.fileno()).st_size

    def _read(self, at_least: Position | None) -> None:
        """Count the steps of the file, and repair a line that a kill cut short."""
        number = 0
        cut: Line | None = None
        expected = at_least if at_least is not None and at_least.entries else None
        passed = expected is None
        for line in read_ledger(self.path):
            if line.is_cut:
                cut = line
                break
            number = line.number
            self._read_entry(line)
            if expected is not None and line.digest == expected.digest:
                passed = passed or self.releases >= expected.entries
        if expected is not None and self.releases < expected.entries:
            raise LedgerError(
                f"{self.path}, line {number + 1}: the file ends here. It holds {self.releases} "
                f"steps, but the checkpoint beside it was written after {expected.entries}; it was "
                "truncated"
            )
        if expected is not None and not passed:
            raise LedgerError(
                f"{self.path}: does not hold the step that the checkpoint beside it was written "
                f"after, its {expected.entries}th; the file was replaced"
            )
        if not number:  # killed while the very first line was written: nothing was released yet
            disk.write_bytes(self.path, make_line(BEGINNING, self._head))
            self._digest = chain(BEGINNING, self._head)
        elif cut is not None:
            self._mend(cut)

    def _read_entry(self, line: Line) -> None:
        entry = line.entry
        if isinstance(entry, Head):
            stated = replace(entry, facts=entry.facts or self._head.facts)
            if stated != self._head:
                raise LedgerError(
                    f"{self.path}, line 1: belongs to another mechanism or noise source than this "
                    "run's"
                )
            self.facts = entry.facts
        elif isinstance(entry, Start):
            self._learn(entry)
        else:
            self._take(entry)
        self._digest = line.digest

    def _mend(self, cut: Line) -> None:
        """Count the step whose line a kill cut short: replace the fragment by a whole line."""
        with open_regular(self.path) as file:
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        disk.write_bytes(self.path, whole + make_line(self._digest, cut.entry))
        self._read_entry(cut)


def read_ending(path: Path) -> tuple[int, bytes] | None:
    """Return a ledger's size and last bytes, whose digest covers all lines; None without a file."""
    if not path.is_file():
        return None
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END))
        return size, file.read()


def set_aside(path: Path) -> None:
    """Rename the ledger at `path` to `ledger.jsonl.1`, and so on, before a new one begins.

    None is ever deleted.
    """
    if path.exists():
        disk.rename(path, _next_aside(path))


def _next_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


def those_aside(path: Path) -> list[Path]:
    """Return the ledgers that were `set_aside` at `path`, the first one first."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)")
    if not path.parent.is_dir():
        return []
    numbered: dict[int, Path] = {}
    for name in os.listdir(path.parent):
        match = pattern.fullmatch(name)
        if match:
            numbered[int(match[1])] = path.with_name(name)
    return [numbered[number] for number in sorted(numbered)]


def is_ledger(path: Path) -> bool:
    """True if a file is a ledger, whatever its name, or is named like one."""
    if re.fullmatch(r".*\.jsonl(\.\d+)?", path.name):
        return not path.is_dir()
    if path.is_symlink() or not path.is_file():
        return False
    try:
        _read_head(path)
    except OtherVersionError:
        return True
    except LedgerError:
        return False
    return True


def _read_head(path: Path) -> Head:
    """Return the first line of a ledger.

    Raises:
        LedgerError: the file does not begin as a ledger.
    """
    with open_regular(path) as file:
        first_line = file.readline(MOST_LINE)
    entry, _ = parse(first_line)
    if not isinstance(entry, Head):
        raise LedgerError(f"{path}, line 1: not the first line of a ledger")
    return entry


def ledgers_below(folder: Path, but: Collection[str] = ()) -> list[Path]:
    """Return the ledgers anywhere in a folder and its subfolders, by path.

    Args:
        but: names of files in the folder itself that are known to be none.
    """
    found = []
    for place, _, names in os.walk(folder):
        others = names if place != str(folder) else [name for name in names if name not in but]
        found += [path for path in (Path(place, name) for name in others) if is_ledger(path)]
    return sorted(found)


def without_copies(ledgers: Sequence[Path]) -> list[Path]:
    """Return ledgers, by path, without copies; of two that are the same, the first is kept."""
    if len(ledgers) < 2:
        return [*ledgers]
    contents = {}
    for path in ledgers:
        with open_regular(path) as file:
            contents[path] = file.read()
    kept: list[Path] = []
    for path in sorted(contents, key=lambda path: -len(contents[path])):
        # A copy that was made while the other was written is how that one begins.
        content = contents[path]
        if not any(contents[other].startswith(content) for other in kept):
            kept.append(path)
    return sorted(kept)


def adopt(path: Path, whose: str = "") -> None:
    """Set aside the other ledgers in the folder of the one at `path`, which is its own.

    They were renamed or moved by hand, and their steps count. So do those in its subfolders, where
    a federation's server leaves those of its nodes.

    Args:
        whose: what the first line of the one at `path` says.
    """
    own = [ledger for ledger in [path, *those_aside(path)] if ledger.exists()]
    others = [ledger for ledger in ledgers_below(path.parent) if ledger not in own]
    for ledger in without_copies([*own, *others]):
        is_ours = not whose or ledger.parent == path.parent or _read_whose(ledger) == whose
        if is_ours and ledger not in own:
            disk.rename(ledger, _next_aside(path))


def _read_whose(path: Path) -> str | None:
    """Return what the first line of a ledger says of whose it is; None if it is damaged."""
    try:
        return _read_head(path).whose
    except LedgerError:
        return None


def has_steps(path: Path) -> bool:
    """True if a ledger holds a release; its other lines are its head and the states of starts."""
    with open_regular(path) as file:
        for line in lines_of(file):
            if b'"ledger"' not in line and b'"state"' not in line:
                return True
    return False


def _require_one_name(path: Path) -> None:
    """Reject a link and a file of several names: locks go by name, and two would write at once."""
    if not os.path.lexists(path):
        return
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode) or status.st_nlink > 1:
        raise UserError(
            f"{path}: is a link, or has a second name by a hard link, under which another run "
            "could write to it: name the file itself, or a copy of its own (cp)."
        )


def _digest_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
