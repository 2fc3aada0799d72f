"""Record every step of a run in its ledger, a file, before the step's noise is drawn.

A STEP of the training plan makes a RELEASE when it is taken. A step that is repeated with the same
bits makes the same release, which counts once. The ledger's file begins with a head. Each further
LINE is a JSON object that states an ENTRY: a step, or a start from which steps may be repeated.

The line of a step holds the SHA-256 of the head and all steps above it, so an edited, dropped or
reordered step breaks the chain. It is written as a whole before its step is taken. A kill thus
loses no step: it can only cut the last line short, and that step is counted, because its noise may
have been drawn. If writing a line fails or is interrupted and the process lives on, the line is
removed, because its step was not taken.

An fsync takes as long as several steps of a small model. So the file is forced to disk at most
every `MIN_SYNC_INTERVAL` seconds, and always before anything that depends on the steps is saved,
sent or shown (`Ledger.sync`). A power cut may lose the steps since then, together with the weights
they led to.

A step that is repeated after a kill counts once only if it is provably the same release. To prove
this, the ledger also records the states from which a process may start (`Start`), outside the hash
chain.
    - If step, state, code and machine match a recorded start, every step from there on has the same
      bits as before, and counts once.
    - Otherwise, a new GENERATION begins, which has its own key for noise and batches
      (`Ledger.generation`). Its steps are new, independent releases, and the earlier ones still
      count too, even if their ledger was set aside.
    - With secure noise, every step that is taken is a new release.
    - A node of a federation starts each step from the weights it receives, whose digest is in the
      step's line. Only the same step from the same weights is the same release.

The chain guards against damage and mistakes, not against forgery, because it has no key. A file
that is rewritten as a whole, or cut line by line back to the last checkpoint, looks like that of a
run that was killed there.
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
    MAX_LINE,
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

MIN_SYNC_INTERVAL = 0.2  # seconds between two fsyncs of the file
TAIL_BYTES = 4096  # bytes at the end of a file that are compared to detect that it was continued


class BudgetExceeded(Exception):  # noqa: N818 - an event of a run, not an error
    """The next step would exceed `max_epsilon`. Nothing was drawn and nothing changed."""


# ------------------------------------------------------------------------------ counting releases


@dataclass(frozen=True)
class Position:
    """How far a ledger reaches, as a checkpoint stores it.

    Attributes:
        releases: number of releases, including those in ledgers that were set aside.
        digest: digest of the chain.
    """

    releases: int
    digest: str


class Span(NamedTuple):
    """Consecutive steps `first` … `end` − 1 of one generation, each of which was released."""

    first: int
    end: int
    generation: str


class _ReleasedSteps:
    """The set of steps that were released.

    Of a step without a weights digest, only the largest number per generation is kept. That is
    enough because a generation takes its steps without gaps, and never asks about steps before its
    start.
    """

    def __init__(self) -> None:
        self.last_step: dict[str, int] = {}  # generation -> largest number of a released step
        self.with_weights: set[Step] = set()  # the steps that have a weights digest

    def add(self, step: Step) -> None:
        last = self.last_step.get(step.generation, -1)
        self.last_step[step.generation] = max(step.step, last)
        if step.weights_digest:
            self.with_weights.add(step)

    def holds(self, step: Step) -> bool:
        if step.weights_digest:
            return step in self.with_weights
        last = self.last_step.get(step.generation, -1)
        return step.step <= last


class Tally:
    """Counts a mechanism's releases in memory. `Ledger` adds the file.

    Formal guarantees:
        - `releases` never falls. It rises with each step that is not provably the same release as
          an earlier one, with the same generation, number and weights.
        - Only the process that created the tally, or one that it was pickled to, may count. A fork
          would repeat the noise without this count seeing it.
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
            repeatable: whether a step that is taken again has the same noise.
            earlier: number of releases so far that can never be repeated.
            spans: consecutive releases so far, of each generation.
            generation: generation of the steps that this process takes.
            digest: digest of the last ledger line.
        """
        self._process = os.getpid()
        self.repeatable = repeatable
        self.earlier = earlier
        self.generation = generation
        # Steps that another generation has released, and this process will take again.
        self.counted_again = 0
        self._digest = digest
        self._spans = list(spans)
        self._count = sum(end - first for first, end, _ in self._spans)
        # `spans` have no weights digests. Only nodes of federations have these, each of which is a
        # single process, whereas spans are given to the other ranks of one.
        self._released = _ReleasedSteps()
        for span in self._spans:
            self._released.add(Step(span.end - 1, generation=span.generation))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the process that unpickles a tally count with it."""
        vars(self).update(state, _process=os.getpid())

    def append(
        self,
        step: int,
        weights_digest: str = "",
    ) -> None:
        """Count the release of `step`, which is about to be taken, unless it is already counted.

        Args:
            step: number of the step, from 0.
            weights_digest: digest of the starting weights. Pass it only if a repeat of this step
                may start from other weights.
        """
        self.require_own_process()
        entry = Step(step, weights_digest, self.generation)
        if not self.holds(step, weights_digest):
            self._digest = chain(self._digest, entry)
            self._count_release(entry)

    def note(
        self,
        execution_digest: str,
        step: int,
        state_digest: str,
    ) -> None:
        """Do nothing: only `Ledger` records states."""

    def forbid_repeats(self, step: int) -> None:
        """Do nothing: only `Ledger` records states."""

    def sync(self) -> None:
        """Do nothing: only `Ledger` has a file."""

    def close(self) -> None:
        """Do nothing: only `Ledger` has a file."""

    def require_own_process(self) -> None:
        """Raise an error in a fork of the process that counts.

        Raises:
            UserError: this process is a fork.
        """
        if os.getpid() != self._process:
            raise UserError(
                "this process is a copy (fork) of the one that opened the ledger, and a step here "
                "would repeat that one's noise: begin the training in the process that takes its "
                "steps, each with a ledger of its own."
            )

    def holds(
        self,
        step: int,
        weights_digest: str = "",
    ) -> bool:
        """Return True if taking `step` makes no new release; see `append`."""
        return self.repeatable and self._released.holds(Step(step, weights_digest, self.generation))

    def _count_release(self, step: Step) -> None:
        spans = self._spans
        end = step.step + 1
        last = spans[-1] if spans else None
        if last is not None and (last.end, last.generation) == (step.step, step.generation):
            spans[-1] = last._replace(end=end)
        else:
            spans.append(Span(step.step, end, step.generation))
        self._count += 1
        self._released.add(step)

    @property
    def has_other_noise(self) -> bool:
        """True if this process cannot draw the noise of some earlier step again.

        Correlated noise, which needs that of earlier steps, cannot continue then.
        """
        if not self.repeatable:
            return self.releases > 0
        has_other_generation = any(span.generation != self.generation for span in self._spans)
        return has_other_generation or self.earlier > 0

    @property
    def releases(self) -> int:
        """Number of releases that the accountant must compose."""
        return self.earlier + self._count

    def releases_before(self, step: int) -> int:
        """Return the number of releases once this generation has taken `step` steps.

        Steps beyond these, which a killed process has taken, are left out: they will be repeated,
        and count when their turn comes.
        """
        if not self.repeatable:
            return self.releases
        count = self.earlier
        for first, end, generation in self._spans:
            if generation == self.generation:
                end = min(end, max(first, step))  # a span that begins after `step` counts 0
            count += end - first
        return count

    def releases_after(self, first: int, end: int) -> int:
        """Return the number of releases once steps `first` … `end` − 1 are taken."""
        new = [step for step in range(first, end) if not self.holds(step)]
        return self.releases + len(new)

    @property
    def position(self) -> Position:
        """The end of the ledger."""
        return Position(self.releases, self._digest)

    def copy(self) -> Tally:
        """Return a tally with the same count, for another process that writes no file."""
        spans, generation = self._spans, self.generation
        return Tally(self.repeatable, self.earlier, spans, generation, self._digest)


def count_releases(paths: Iterable[Path], repeatable: bool) -> int:
    """Return the number of distinct releases in several ledgers.

    A damaged line counts as the most releases that it can hold.

    Args:
        paths: the ledgers' files.
        repeatable: whether a step that is taken again has the same noise. If so, the same step of
            the same generation is one release, even if it is in several files.
    """
    return _SetAside(paths, repeatable).releases


class _SetAside(Tally):
    """The releases and recorded starts in ledgers that are no longer written to."""

    def __init__(
        self,
        paths: Iterable[Path],
        repeatable: bool,
    ) -> None:
        super().__init__(repeatable)
        self.starts: list[Start] = []
        self.mechanisms: set[str] = set()
        for path in paths:
            entries, max_lost = salvage(path)
            self.earlier += max_lost
            # Compare with earlier files only: within one file, no release is repeated.
            in_earlier_files = copy.deepcopy(self._released)
            for entry in entries:
                if isinstance(entry, Head):
                    self.mechanisms.add(entry.mechanism)
                elif isinstance(entry, Start):
                    self.starts.append(entry)
                elif not (repeatable and in_earlier_files.holds(entry)):
                    self._count_release(entry)


# ------------------------------------------------------------------------------------- the ledger


class Ledger(Tally):
    """An append-only file of one mechanism's steps.

    Formal guarantees, in addition to those of `Tally`:
        - `append` returns only after the step's line is in the file, so a kill loses no step.
        - A step is forced to disk by `sync`, or by the first append at least `MIN_SYNC_INTERVAL`
          after the last fsync.
        - `releases` is at least the number of releases that were drawn, no matter when the process
          was killed. It includes those in ledgers that were `set_aside` at the same path.
        - A step that is not counted again has the same noise, batch and starting state as before.
        - Opening raises an error if the chain of the file is broken, or if the file ends before the
          checkpoint's position. The error names the line.
        - The file has no second hard link, and each append verifies that the file is unchanged
          (`require_intact`).
    """

    def __init__(
        self,
        path: Path,
        mechanism: Mechanism,
        repeatable: bool,
        checkpoint_position: Position | None = None,
        identity: str = "",
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """Open or create the ledger at `path`, and read the ledgers that were `set_aside` there.

        Args:
            path: the ledger's file.
            mechanism: mechanism of every step.
            repeatable: whether a step that is taken again has the same noise.
            checkpoint_position: end of the ledger at the last checkpoint, which the file must
                contain; None without a checkpoint.
            identity: identifies what else must match: the name of a federation's node, or the
                digest of who owns which examples.
            facts: properties that the mechanism does not cover, such as whose ε it is, and where
                randomness comes from. Ledgers of older versions lack them.

        Raises:
            LedgerError: the file is damaged, ends before the checkpoint, or has another mechanism,
                identity or facts.
            UserError: the file is a symbolic link, or has a second hard link.
        """
        super().__init__(repeatable)
        _require_single_link(path)
        self.path, self._absolute_path = path, path.absolute()
        aside_paths = those_aside(path)
        self._aside_digests = "".join(_digest_file(aside) for aside in aside_paths)
        self._set_aside = _SetAside(aside_paths, repeatable)
        if self._set_aside.mechanisms - {mechanism.digest()}:
            raise LedgerError(
                f"{path}: a ledger that was set aside beside it uses another noise or mechanism, "
                "so no single ε covers both"
            )
        head_earlier = 0 if repeatable else self._set_aside.releases
        self._head = Head(
            mechanism.digest(),
            repeatable,
            identity,
            head_earlier,
            dict(facts or {}),
        )
        self._is_sound = True  # False while a line is being written and counted
        self._is_synced = True  # False while some lines may not be on disk
        self._ending: tuple[int, bytes] | None = None  # ending of the file when it was closed
        self._when_synced = time.monotonic()
        is_new = not path.exists()
        if is_new and checkpoint_position is not None and checkpoint_position.releases:
            raise LedgerError(
                f"{path}: the ledger is missing, but the checkpoint beside it was written after "
                f"{checkpoint_position.releases} steps"
            )
        self._reset_count()
        if not is_new:
            self._read(checkpoint_position)
        disk.make_folder(path.parent)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open for the run
        self._size = os.fstat(self._file.fileno()).st_size
        if is_new:
            self._write_line(self._head)
            self._digest = chain(self._digest, self._head)
            self._is_sound = True
            self.sync()
            disk.fsync_folder(path.parent)

    def _reset_count(self) -> None:
        """Set the counts to those of a file without lines."""
        aside = self._set_aside
        self.facts = self._head.facts
        self._digest = BEGINNING
        self.earlier = aside.earlier
        self._spans = list(aside._spans)
        self._count = aside._count
        self._released = copy.deepcopy(aside._released)
        self._in_file = _ReleasedSteps()  # the steps of this file
        # (execution digest, step, state digest) of each recorded start -> generation
        self._starts: dict[tuple[str, int, str], str] = {}
        for start in aside.starts:
            self._remember_start(start)

    def begin(
        self,
        execution_digest: str,
        step: int,
        state_digest: str,
    ) -> None:
        """Start or continue at `step`: in the generation of a recorded start, or in a new one.

        A ledger without any steps and starts keeps its first generation, "".

        Args:
            execution_digest: digest of code, libraries, machine and micro-batch, as
                `training.machine.execution_digest` returns it. Empty if no step can be repeated bit
                for bit.
            step: number of the next step.
            state_digest: digest of weights, optimizer and schedule.
        """
        if not self.repeatable:
            return
        generation = None
        if execution_digest:
            generation = self._starts.get((execution_digest, step, state_digest))
        if generation is not None:
            self.generation = generation
        elif self._spans or self._starts or self._aside_digests:
            start = f"{execution_digest}:{step}:{state_digest}"
            parts = f"{self._digest}:{self._aside_digests}:{start}"
            self.generation = hashlib.sha256(parts.encode()).hexdigest()[:32]
            for first, end, _ in self._spans:
                num_taken_again = max(0, end - max(first, step))
                self.counted_again += num_taken_again
        self.note(execution_digest, step, state_digest)

    def note(
        self,
        execution_digest: str,
        step: int,
        state_digest: str,
    ) -> None:
        """Record a state from which this generation may continue; call it before saving the state.

        Args:
            execution_digest: see `begin`.
            step: number of the next step.
            state_digest: see `begin`.
        """
        key = execution_digest, step, state_digest
        if execution_digest and self.repeatable and key not in self._starts:
            self._write_start(Start(*key, self.generation))

    def forbid_repeats(self, step: int) -> None:
        """Record that no later process may repeat this generation.

        Call it if a repeat of `step` would not have the same bits, because its micro-batches were
        halved.
        """
        if self.repeatable:
            self._write_start(Start.forbid(self.generation, step))

    def _write_start(self, start: Start) -> None:
        self._write_line(start)
        self._remember_start(start)
        self._is_sound = True

    def _remember_start(self, start: Start) -> None:
        """Remember a recorded start, or forget all those of a generation that must not repeat."""
        if not start.forbids_repeats:
            key = start.execution_digest, start.step, start.state_digest
            self._starts[key] = start.generation
            return
        for key, generation in list(self._starts.items()):
            if generation == start.generation:
                del self._starts[key]

    def append(
        self,
        step: int,
        weights_digest: str = "",
    ) -> None:
        """Write that `step` is about to be taken, unless this file has the very same release.

        See `Tally.append`.
        """
        self.require_own_process()
        self._cut_back()
        entry = Step(step, weights_digest, self.generation)
        if self.repeatable and self._in_file.holds(entry):
            return
        self._write_line(entry)
        self._digest = chain(self._digest, entry)
        self._count_file_step(entry)
        self._is_sound = True

    def _count_file_step(self, step: Step) -> None:
        """Count a step of this file, unless a ledger that was set aside has the same release."""
        self._in_file.add(step)
        if not (self.repeatable and self._set_aside._released.holds(step)):
            self._count_release(step)

    def sync(self) -> None:
        """Force the file to disk. Call it before anything that depends on the steps is shown.

        Raises:
            UserError: the file is not as it was last written.
        """
        if os.getpid() != self._process:
            return  # a fork shares the file, and only its owner syncs it
        if self._file.closed:
            self._require_as_closed()
            return
        self.require_intact()
        if not self._is_synced:
            os.fsync(self._file.fileno())
            self._when_synced = time.monotonic()
            self._is_synced = True

    def require_intact(self) -> None:
        """Raise an error if the file is not as it was last written: it may lack steps.

        Raises:
            UserError: the file was moved, deleted, cut or written to by something else.
        """
        if self._file.closed:
            return
        self._cut_back()
        status = os.fstat(self._file.fileno())
        path = self._absolute_path  # the working directory may have changed
        is_there = path.exists() and os.path.samestat(os.lstat(path), status)
        if not is_there or status.st_size != self._size:
            raise UserError(
                f"{self.path}: was moved, deleted, cut or written to by something else during its "
                "training, and no longer lists every step: put it back as it was, or begin "
                "again with an untrained model and another ledger."
            )

    def _cut_back(self) -> None:
        """Remove a line that was only partly written, or written but not counted.

        Such a line is left if an error or a signal came before its step was taken. The lines above
        it are then counted anew.
        """
        if self._is_sound or os.getpid() != self._process:
            return
        if os.fstat(self._file.fileno()).st_size < self._size:
            return  # the file shrank: `require_intact` will reject it
        os.ftruncate(self._file.fileno(), self._size)
        os.fsync(self._file.fileno())
        self._reset_count()
        self._read(None)
        self._is_sound = True

    def close(self) -> None:
        """Force the file to disk and close it."""
        if self._file.closed:
            return
        try:
            self.sync()
            self._ending = read_ending(self._absolute_path)
        finally:
            self._file.close()

    def _require_as_closed(self) -> None:
        """Raise an error if the file has other lines than when it was closed.

        They may be releases of another training, which this count lacks.
        """
        if self._ending is None or self._ending != read_ending(self._absolute_path):
            raise UserError(
                f"{self.path}: another training continued this ledger after it was closed here; "
                "ask that one. If the file was moved or changed instead, put it back as it was."
            )

    def _write_line(self, entry: Entry) -> None:
        """Write a line. The caller counts it, and then sets `_is_sound`."""
        self.require_own_process()
        self.require_intact()
        unwritten = make_line(self._digest, entry)
        self._is_sound = False
        self._is_synced = False
        while unwritten:  # a write to an unbuffered file may take only a part of the bytes
            unwritten = unwritten[self._file.write(unwritten) :]
        if time.monotonic() - self._when_synced >= MIN_SYNC_INTERVAL:
            os.fsync(self._file.fileno())
            self._when_synced = time.monotonic()
            self._is_synced = True
        self._size = os.fstat(self._file.fileno()).st_size

    def _read(self, checkpoint_position: Position | None) -> None:
        """Count the steps of the file, and mend a line that a kill cut short.

        Raises:
            LedgerError: see the class.
        """
        checkpoint = checkpoint_position
        if checkpoint is not None and not checkpoint.releases:
            checkpoint = None  # nothing was released before it, so there is nothing to find
        found_checkpoint = checkpoint is None
        number = 0
        cut: Line | None = None
        for line in read_ledger(self.path):
            if line.is_cut:
                cut = line
                break
            number = line.number
            self._read_entry(line)
            if checkpoint is not None and line.digest == checkpoint.digest:
                found_checkpoint = found_checkpoint or self.releases >= checkpoint.releases
        if checkpoint is not None and self.releases < checkpoint.releases:
            raise LedgerError(
                f"{self.path}, line {number + 1}: the file ends here. It holds {self.releases} "
                f"releases, but the checkpoint beside it was written after {checkpoint.releases}; "
                "it was truncated"
            )
        if checkpoint is not None and not found_checkpoint:
            raise LedgerError(
                f"{self.path}: does not hold the release after which the checkpoint beside it was "
                f"written, number {checkpoint.releases}; the file was replaced"
            )
        if not number:  # a kill cut the head short: nothing was released yet
            disk.write_bytes(self.path, make_line(BEGINNING, self._head))
            self._digest = chain(BEGINNING, self._head)
        elif cut is not None:
            self._mend(cut)

    def _read_entry(self, line: Line) -> None:
        entry = line.entry
        if isinstance(entry, Head):
            # Heads of older versions have no facts: accept this run's.
            stated = replace(entry, facts=entry.facts or self._head.facts)
            if stated != self._head:
                raise LedgerError(
                    f"{self.path}, line 1: belongs to another mechanism or noise source than this "
                    "run's"
                )
            self.facts = entry.facts
        elif isinstance(entry, Start):
            self._remember_start(entry)
        else:
            self._count_file_step(entry)
        self._digest = line.digest

    def _mend(self, cut: Line) -> None:
        """Replace a line that a kill cut short by the whole line, and count its step."""
        with open_regular(self.path) as file:
            content = file.read()
        whole_lines = content[: content.rfind(b"\n") + 1]
        disk.write_bytes(self.path, whole_lines + make_line(self._digest, cut.entry))
        self._read_entry(cut)


def read_ending(path: Path) -> tuple[int, bytes] | None:
    """Return a ledger's size and last bytes, or None if there is no file.

    The last bytes identify all steps, because a step's line holds the digest of those above it.
    """
    if not path.is_file():
        return None
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return size, file.read()


def set_aside(path: Path) -> None:
    """If there is a ledger at `path`, rename it to `NAME.1`, or to the next free number.

    A new ledger can then begin at `path`. No ledger is ever deleted.
    """
    if path.exists():
        disk.rename(path, _next_aside(path))


def _next_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


def those_aside(path: Path) -> list[Path]:
    """Return the ledgers that were `set_aside` at `path`, the oldest first."""
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
    """Return True if a file is a ledger, whatever its name, or is named like one."""
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
        LedgerError: the first line of the file is not the head of a ledger.
    """
    with open_regular(path) as file:
        first_line = file.readline(MAX_LINE)
    entry, _ = parse(first_line)
    if not isinstance(entry, Head):
        raise LedgerError(f"{path}, line 1: not the first line of a ledger")
    return entry


def ledgers_below(folder: Path, but: Collection[str] = ()) -> list[Path]:
    """Return the ledgers in a folder and its subfolders, sorted by path.

    Args:
        folder: the folder.
        but: names of files in the folder itself that are known to be no ledgers.
    """
    ledgers = []
    for place, _, names in os.walk(folder):
        others = names
        if place == str(folder):
            others = [name for name in names if name not in but]
        ledgers += [path for path in (Path(place, name) for name in others) if is_ledger(path)]
    return sorted(ledgers)


def without_copies(ledgers: Sequence[Path]) -> list[Path]:
    """Return ledgers without copies of one another, sorted by path.

    Of ledgers with the same content, only the first is kept.
    """
    if len(ledgers) < 2:
        return [*ledgers]
    contents = {}
    for path in ledgers:
        with open_regular(path) as file:
            contents[path] = file.read()
    kept: list[Path] = []
    # The longest come first: a copy made while the original was being written is a prefix of it.
    for path in sorted(contents, key=lambda path: -len(contents[path])):
        content = contents[path]
        if not any(contents[other].startswith(content) for other in kept):
            kept.append(path)
    return sorted(kept)


def adopt(path: Path, identity: str = "") -> None:
    """Set aside, beside the ledger at `path`, all other ledgers of its training.

    These are the ledgers in its folder, which were renamed or moved by hand, and those in
    subfolders, where a federation's server keeps the ledgers of its nodes. Their steps count.

    Args:
        path: the training's ledger.
        identity: identity of the ledger at `path`; see `Ledger`. Ledgers in subfolders with another
            one are left alone.
    """
    own = [ledger for ledger in [path, *those_aside(path)] if ledger.exists()]
    others = [ledger for ledger in ledgers_below(path.parent) if ledger not in own]
    for ledger in without_copies([*own, *others]):
        is_in_folder = ledger.parent == path.parent
        is_ours = not identity or is_in_folder or _read_identity(ledger) == identity
        if is_ours and ledger not in own:
            disk.rename(ledger, _next_aside(path))


def _read_identity(path: Path) -> str | None:
    """Return the identity that the head of a ledger states, or None if the head is damaged."""
    try:
        return _read_head(path).identity
    except LedgerError:
        return None


def has_steps(path: Path) -> bool:
    """Return True if a ledger holds a step, and not only its head and recorded starts."""
    with open_regular(path) as file:
        for line in lines_of(file):
            if b'"ledger"' not in line and b'"state"' not in line:
                return True
    return False


def _require_single_link(path: Path) -> None:
    """Raise an error for a link, and for a file with a second hard link.

    Locks are per path, so two runs could write to the file at once.
    """
    if not os.path.lexists(path):
        return
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode) or status.st_nlink > 1:
        raise UserError(
            f"{path}: is a link, or has a second hard link, through which another run could write "
            "to it: give the path of the file itself, or of a copy (cp)."
        )


def _digest_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
