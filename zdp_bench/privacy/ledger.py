"""Record every step of a run in a file, its ledger, before the noise of the step is drawn.

Each STEP of the training plan makes one RELEASE, which `zdp_bench.privacy.tally` counts. A step
that is repeated with the same bits makes the same release, which counts once. Each LINE of the file
is a JSON object that states an ENTRY. The first is the head. The others are steps, states from
which steps may be repeated (`Start`), and revocations of such states (`Revocation`). A ledger that
is SET ASIDE is renamed to NAME.1, NAME.2 and so on, so that a new ledger can begin at the old path
(`zdp_bench.privacy.ledger_files`). The releases of the renamed ledger still count.

The line of a step holds the SHA-256 of the head, of all steps and revocations above it, and of the
step itself. So an edited, dropped or reordered line breaks the chain. The whole line is written
before its step is taken, so a kill loses no step. If writing a line fails or is interrupted and the
process lives on, the next use of the file removes the line, because its step was not taken.

An fsync takes as long as several steps of a small model. So a line forces the file to disk only if
the last fsync was `MIN_SYNC_INTERVAL` ago or longer. In addition, the file is forced to disk before
anything that depends on the steps is saved, sent or shown (`Ledger.sync`). A power failure may lose
the steps since the last fsync, but only together with the weights that they led to.

The last line may be cut short. If a kill cut it, its step was not taken. If a power failure cut it,
only a part of a whole line had reached the disk, and its step may have been taken. The file does
not show which of the two happened, so a line that is cut short counts as a step.

A step that is repeated after a kill counts once only if it is provably the same release. To prove
this, the ledger also records the states from which a process may start (`Start`). Starts are not
part of the chain: if one is missing, steps are counted again, never forgotten.
    - If step, state, code and machine match a recorded start, every step from there on has the same
      bits as before, and counts once. If memory runs out, the micro-batches are halved, and the
      start is revoked (`Revocation`), because a repeat would not have the same bits.
    - Otherwise, a new GENERATION begins, which has its own key for noise and batches
      (`Tally.generation`). Its steps are new, independent releases. The earlier releases still
      count, even if their ledger was set aside.
    - With secure noise, every step that is taken is a new release. Two files with equal steps may
      then be a file and its copy, whose releases count once, or two runs, whose releases add up. A
      random NONCE tells a copy from another run: each process writes one of its own before its
      first step.
    - A node of a federation starts each round from the weights that it receives. Each step of the
      round states the digest of these weights. Two steps are the same release only if they have the
      same number and the same digest.

The chain guards against damage and mistakes, not against forgery, because it has no key. It does
not reveal that a file was rewritten as a whole. Nor does it reveal that lines after the last
checkpoint were removed from the end: a run that was killed there leaves the same file.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from zdp_bench import disk
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import exists, is_file
from zdp_bench.privacy.ledger_files import list_set_aside, require_single_link
from zdp_bench.privacy.ledger_lines import (
    BEGINNING,
    Entry,
    Head,
    LedgerError,
    Line,
    Revocation,
    Start,
    Step,
    chain,
    make_line,
    open_ledger_file,
    read_ledger,
)
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.tally import Position, ReleasedSteps, Tally, TallyOfFiles

MIN_SYNC_INTERVAL = 0.2  # seconds between two fsyncs of the file
ENDING_BYTES = 4096  # number of last bytes, kept to notice if the file changes after `close`


class KnownStarts:
    """The states from which a recorded generation may continue, and their revocations."""

    def __init__(self, entries: Iterable[Start | Revocation] = ()) -> None:
        # (execution digest, step, state digest) -> the generations recorded for this state
        self._generations: dict[tuple[str, int, str], list[str]] = {}
        # generation -> its starts at or before this step are revoked
        self._revoked_until: dict[str, int] = {}
        for entry in entries:
            self.remember(entry)

    def __bool__(self) -> bool:
        return bool(self._generations)

    def remember(self, entry: Start | Revocation) -> None:
        """Remember a recorded start, or that the starts of a generation are revoked.

        A revocation may be read before or after the starts that it revokes, because ledgers that
        were set aside may be in any order.
        """
        if isinstance(entry, Revocation):
            revoked_until = self._revoked_until.get(entry.generation, entry.step)
            self._revoked_until[entry.generation] = max(revoked_until, entry.step)
        else:
            key = entry.execution_digest, entry.step, entry.state_digest
            self._generations.setdefault(key, []).append(entry.generation)

    def find_generation(self, execution_digest: str, step: int, state_digest: str) -> str | None:
        """Return the generation that continues from a state; None if there is none.

        A state may have several generations: several ledgers may each record one, and a later one
        is recorded after the start of the first was revoked. Of those whose start is not revoked,
        the last one in reading order is returned.
        """
        generations = self._generations.get((execution_digest, step, state_digest), [])
        for generation in reversed(generations):
            revoked_until = self._revoked_until.get(generation)
            if revoked_until is None or step > revoked_until:
                return generation
        return None


class Ledger(Tally):
    """An append-only file of one mechanism's steps.

    Formal guarantees, in addition to those of `Tally`:
        - `append` returns only after the step's line is in the file, so a kill loses no step.
        - `sync` forces all lines to disk. So does the first line that is written at least
          `MIN_SYNC_INTERVAL` after the last fsync.
        - `releases` is at least the number of releases that were made, no matter when the process
          was killed. It includes those in ledgers that were `set_aside` at the same path.
        - A step that is taken again without being counted again has the same noise, batch and
          starting state as before.
        - Opening raises an error if the chain of the file is broken, or if the file ends before the
          checkpoint's position. The error names the line.
        - The file has no second hard link. `append` raises an error unless the file that was opened
          is still at its path, with the size that it had after the last line (`require_intact`).

    Attributes:
        path: the ledger's file.
        facts: the facts that the file's head states; {} in ledgers of older versions.
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
            repeatable: whether a step may be taken again as the same release, with the same noise.
                False with secure noise, which cannot be drawn again, and in your own loop
                (`zdp_bench.library`), which never takes a step again.
            checkpoint_position: where the ledger ended at the last checkpoint. The file must
                contain this position. None without a checkpoint.
            identity: whose ledger it is: the name of a federation's node, or the digest of who owns
                which examples. Ledgers with another identity are not this run's.
            facts: what decides the meaning of ε, apart from the mechanism: its unit and the source
                of randomness. They must match as well, but ledgers of older versions lack them.

        Raises:
            LedgerError: the file is damaged or ends before the checkpoint. Or this file, or one
                that was set aside, has another mechanism, kind of noise, identity or facts.
            UserError: the file is a symbolic link, or has a second hard link.
        """
        super().__init__(repeatable)
        require_single_link(path)
        self.path, self._absolute_path = path, path.absolute()
        aside_paths = list_set_aside(path)
        # Identifies the ledgers that were set aside; "" without any.
        self._aside_digests = "".join(_digest_file(aside_path) for aside_path in aside_paths)
        self._aside_tally = TallyOfFiles(aside_paths)
        # The head states the number of releases in ledgers that were set aside. So a later process
        # notices if such a ledger is missing (`_require_same`). A repeatable ledger states 0
        # instead: the digest depends on the head, and a bit-for-bit repeat of a run must end with
        # the same digest, no matter how many ledgers were set aside.
        releases_aside = 0 if repeatable else self._aside_tally.releases
        self._own_head = Head(
            mechanism.digest(),
            repeatable,
            identity,
            releases_aside=releases_aside,
            facts=dict(facts or {}),
            nonce=self._own_part,
        )
        for aside_path, head in self._aside_tally.heads.items():
            if differences := self._name_differences(head):
                raise LedgerError(
                    f"{aside_path}: was set aside beside {path.name}, but belongs to {differences} "
                    "than this run's, so no single ε covers both"
                )
        # Size of the file before the line that is being written and counted; None between lines.
        self._size_before_line: int | None = None
        # False while some lines may not be on disk, such as those of a process that was killed
        self._is_synced = False
        self._ending: tuple[int, bytes] | None = None  # ending of the file when it was closed
        self._when_synced = time.monotonic()
        is_new = not exists(path)
        # In a new file, the head has the nonce of this process. A process that continues a file
        # writes its nonce before its first step (`append`).
        self._needs_nonce = not repeatable and not is_new
        if is_new and checkpoint_position is not None and checkpoint_position.releases:
            raise LedgerError(
                f"{path}: the ledger is missing, but the checkpoint beside it was written after "
                f"{checkpoint_position.releases} releases"
            )
        self._reset_count()
        if not is_new:
            self._read(checkpoint_position)
        disk.make_folder(path.parent)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open for the run
        self._size = os.fstat(self._file.fileno()).st_size
        if is_new:
            self._write_line(self._own_head)
            self.sync()
            disk.fsync_folder(path.parent)

    def _name_differences(self, head: Head) -> str:
        """Return what differs between a head and this run's, such as "another mechanism".

        If nothing differs, the result is "", and one ε covers the steps of both. A head of an older
        version has no facts, and is taken to have this run's facts.
        """
        own = self._own_head
        differs = {
            "another mechanism": head.mechanism != own.mechanism,
            "another kind of noise": head.repeatable != own.repeatable,
            "another node or other owners": head.identity != own.identity,
            "another unit of ε or source of randomness": head.facts not in ({}, own.facts),
        }
        return " and ".join(name for name, is_different in differs.items() if is_different)

    def _reset_count(self) -> None:
        """Forget what was read from the file. Only the ledgers that were set aside then count."""
        self.restart_from(self._aside_tally)
        self.facts = self._own_head.facts
        self.digest = BEGINNING
        self._steps_of_file = ReleasedSteps()
        self._starts = KnownStarts(self._aside_tally.starts)
        self._ends_of_parts = {}
        self._num_releases_of_chain = 0  # of the file, and of those that its head states

    def _read(self, checkpoint_position: Position | None) -> None:
        """Count the steps of the file, and replace a last line that was cut short.

        Raises:
            LedgerError: see the class.
        """
        last_whole_line = 0
        cut: Line | None = None
        reaches_checkpoint = False
        for line in read_ledger(self._absolute_path):  # the working directory may have changed
            if line.is_cut:  # the last line
                cut = line
                continue
            last_whole_line = line.number
            if isinstance(line.entry, Head):
                self._require_same(line.entry)
            self._add_entry(line.entry)
            # The releases are compared as well, because they are too few if a ledger that was set
            # aside is missing, which the digest may not show.
            if (
                checkpoint_position is not None
                and self.digest == checkpoint_position.digest
                and self.releases >= checkpoint_position.releases
            ):
                reaches_checkpoint = True
        if checkpoint_position is not None and checkpoint_position.releases > 0:
            self._require_checkpoint(checkpoint_position, reaches_checkpoint, last_whole_line)
        if last_whole_line == 0:  # even the head is cut short, so nothing was released yet
            disk.write_bytes(self._absolute_path, make_line(BEGINNING, self._own_head))
            self._add_entry(self._own_head)
        elif cut is not None:
            self._replace_cut_line(cut)

    def _require_same(self, head: Head) -> None:
        """Raise an error if the file is another run's, or a ledger that was set aside is missing.

        A ledger is missing if the head states more releases in ledgers that were set aside than
        there are now. The head of a repeatable ledger always states 0. There, only a checkpoint
        can show that a ledger is missing.
        """
        if differences := self._name_differences(head):
            raise LedgerError(f"{self.path}, line 1: belongs to {differences} than this run's")
        if head.releases_aside > self._own_head.releases_aside:
            raise LedgerError(
                f"{self.path}, line 1: states {head.releases_aside} releases in ledgers that were "
                f"set aside beside it, but there are {self._own_head.releases_aside}: such a "
                "ledger is missing"
            )

    def _add_entry(self, entry: Entry) -> None:
        """Count or remember the entry of a line that is in the file, and extend the chain by it."""
        if isinstance(entry, Head):
            self.facts = entry.facts
            # Heads of older versions have no nonce, so nothing tells their steps from others.
            self.part = entry.nonce or secrets.token_hex(16)
            self._num_releases_of_chain = entry.releases_aside
        elif isinstance(entry, Step):
            self._steps_of_file.add(entry)
            self._num_releases_of_chain += 1
            # A release that is in a ledger that was set aside is counted already.
            if not (self.repeatable and entry in self._aside_tally.released):
                self._count_release(entry)
        else:
            self._starts.remember(entry)
            if isinstance(entry, Start):
                self.part = entry.execution_digest  # see `Start.of_nonce`
        if not self.repeatable:
            self._ends_of_parts[self.part] = self._num_releases_of_chain
        if entry.is_chained:
            self.digest = chain(self.digest, entry)

    def _require_checkpoint(
        self, checkpoint_position: Position, reaches_checkpoint: bool, last_whole_line: int
    ) -> None:
        """Raise an error if the file was truncated or replaced since the last checkpoint.

        Args:
            checkpoint_position: where the ledger ended at the checkpoint.
            reaches_checkpoint: whether the file holds the line at that position, and counts at
                least as many releases there as the checkpoint states.
            last_whole_line: number of the last line that is not cut short.
        """
        releases = checkpoint_position.releases
        or_missing = "or a ledger that was set aside beside it is missing"
        if self.releases < releases:
            raise LedgerError(
                f"{self.path}, line {last_whole_line + 1}: the file ends here. With the ledgers "
                f"that were set aside, there are {self.releases} releases, but the checkpoint "
                f"beside it was written after {releases}: the file was truncated, {or_missing}"
            )
        if not reaches_checkpoint:
            raise LedgerError(
                f"{self.path}: the checkpoint beside it was written after release {releases}, "
                f"which this file does not hold: the file was replaced, {or_missing}"
            )

    def _replace_cut_line(self, cut: Line) -> None:
        """Replace a last line that was cut short with a whole line of a step, and count the step.

        `read_ledger` cannot know what the cut line stated. It assumes the step after the last step
        in a whole line. So the count may be one too high, but never too low.
        """
        with open_ledger_file(self._absolute_path) as file:
            content = file.read()
        whole_lines = content[: content.rfind(b"\n") + 1]
        disk.write_bytes(self._absolute_path, whole_lines + make_line(self.digest, cut.entry))
        self._add_entry(cut.entry)

    def choose_generation(
        self,
        execution_digest: str,
        step: int,
        state_digest: str,
        find_other_ledgers: Callable[[], list[Path]] | None = None,
    ) -> None:
        """Continue the generation of the recorded start that matches, or begin a new generation.

        Call it before the first step of the process. If the ledger is not repeatable, there are no
        generations, and nothing is done.

        Args:
            execution_digest: digest of code, libraries, machine and micro-batch, as
                `training.machine.execution_digest` returns it. Empty if no step can be repeated bit
                for bit.
            step: number of the next step.
            state_digest: digest of weights, optimizer and schedule.
            find_other_ledgers: finds ledgers of this training in other folders, such as of a run
                that was moved or copied. Their releases do not count here, but other releases must
                not have the same noise. Called only if this ledger is empty and none was set aside.
                Default: there are no such ledgers.
        """
        if not self.repeatable:
            return
        start = execution_digest, step, state_digest
        recorded_generation = self._starts.find_generation(*start)
        has_earlier_generation = bool(self.releases or self._starts or self._aside_digests)
        if recorded_generation is not None:
            self.generation = recorded_generation
        elif has_earlier_generation:
            # The name of the new generation is a digest of all that came before, so that no two
            # generations share their noise.
            before = f"{self.digest}:{self._aside_digests}"
            text = f"{before}:{execution_digest}:{step}:{state_digest}"
            self.generation = hashlib.sha256(text.encode()).hexdigest()[:32]
            self.num_to_count_again = self.num_released_from(step)  # for a warning only
        else:
            other_ledgers = find_other_ledgers() if find_other_ledgers is not None else []
            starts_elsewhere = KnownStarts(TallyOfFiles(other_ledgers).starts)
            generation_elsewhere = starts_elsewhere.find_generation(*start)
            if generation_elsewhere is not None:
                # From the same start, the steps are the same releases, with the same noise.
                self.generation = generation_elsewhere
            elif other_ledgers:
                # The name is random, because this ledger holds nothing from which to make a name.
                self.generation = secrets.token_hex(16)
            # Otherwise, there was no step before, and the generation stays the first one: "".
        self.record_start(execution_digest, step, state_digest)

    def record_start(self, execution_digest: str, step: int, state_digest: str) -> None:
        """Record that this generation may continue from a state.

        Only one generation continues from a state. If a generation is recorded for this state
        already, nothing is written, and a later process continues the recorded generation.

        Call it before saving the state: a process that loads a state that was not recorded begins a
        new generation, whose steps count again.

        Args:
            execution_digest: see `choose_generation`.
            step: number of the next step.
            state_digest: see `choose_generation`.
        """
        is_recorded = self._starts.find_generation(execution_digest, step, state_digest) is not None
        if execution_digest and self.repeatable and not is_recorded:
            self._write_line(Start(execution_digest, step, state_digest, self.generation))

    def revoke_starts(self, step: int) -> None:
        """Revoke all starts of this generation at or before `step`.

        Call it if a repeat of `step` would not have the same bits, because its micro-batches were
        halved. The states after `step` can be recorded as starts again (`record_start`).
        """
        if self.repeatable:
            self._write_line(Revocation(self.generation, step))

    def append(self, step: int, weights_digest: str = "") -> None:
        """Write that `step` is about to be taken, unless this file already has the same release.

        If another ledger, which was set aside, has the release, the step is written but not counted
        again. See `Tally.append`.

        Raises:
            UserError: the ledger is closed, or the file is not as it was last written.
        """
        self.require_own_process()
        if self._file.closed:  # another process may have continued the file since then
            raise UserError(f"{self.path}: the ledger is closed, so no step can be taken with it.")
        self._remove_interrupted_line()  # first, because `_steps_of_file` may hold the line's step
        entry = Step(step, weights_digest, self.generation)
        if self.repeatable and entry in self._steps_of_file:
            self.require_intact()
            return
        if self._needs_nonce:  # written in the form of a start, which is not part of the chain
            self._write_line(Start.of_nonce(self._own_part))
            self._needs_nonce = False
        self._write_line(entry)

    def _write_line(self, entry: Entry) -> None:
        """Write a line, and count its entry.

        If this fails or is interrupted, `_size_before_line` stays set, and the next
        `require_intact` removes the line.
        """
        self.require_own_process()
        self.require_intact()
        unwritten = make_line(self.digest, entry)
        self._size_before_line = self._size
        self._is_synced = False
        while unwritten:  # a write to an unbuffered file may take only a part of the bytes
            num_written = self._file.write(unwritten)
            unwritten = unwritten[num_written:]
        if time.monotonic() - self._when_synced >= MIN_SYNC_INTERVAL:
            self._force_to_disk()
        self._add_entry(entry)
        self._size = os.fstat(self._file.fileno()).st_size
        self._size_before_line = None

    def require_intact(self) -> None:
        """Remove an interrupted line. Then require the file to be as this process wrote it.

        Do nothing if the file is closed: `_require_as_closed` checks it then.

        Raises:
            UserError: the file was moved, deleted, cut or written to by something else, so it may
                lack steps.
        """
        if self._file.closed:
            return
        self._remove_interrupted_line()
        status = os.fstat(self._file.fileno())
        path = self._absolute_path  # the working directory may have changed
        is_there = exists(path) and os.path.samestat(os.lstat(path), status)
        if not is_there or status.st_size != self._size:
            raise UserError(
                f"{self.path}: was moved, deleted, cut or written to by something else during its "
                "training, and no longer lists every step: put it back as it was, or begin "
                "again with an untrained model and another ledger."
            )

    def _remove_interrupted_line(self) -> None:
        """Remove the line whose writing or counting was interrupted: its step was not taken.

        The lines above it are then read and counted anew, because the count may be halfway changed.
        """
        if self._size_before_line is None:
            return
        if os.getpid() != self._process:  # a fork shares the file, but must not change it
            return
        self._size = self._size_before_line
        if os.fstat(self._file.fileno()).st_size < self._size:
            return  # the file shrank: `require_intact` will reject it
        # Not forced to disk: if a power cut brings the line back, it counts as one step more.
        os.ftruncate(self._file.fileno(), self._size)
        self._reset_count()
        self._read(None)
        self._size_before_line = None

    def sync(self) -> None:
        """Force the file to disk. Call it before anything that depends on the steps is shown.

        Raises:
            UserError: the file is not as it was last written.
        """
        if os.getpid() != self._process:
            return  # a fork shares the file, and writes nothing to it
        if self._file.closed:
            self._require_as_closed()
            return
        self.require_intact()
        if not self._is_synced:
            self._force_to_disk()

    def _force_to_disk(self) -> None:
        os.fsync(self._file.fileno())
        self._when_synced = time.monotonic()
        self._is_synced = True

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

        The other lines may be releases of another training run, which this count lacks.
        """
        if self._ending is None or self._ending != read_ending(self._absolute_path):
            raise UserError(
                f"{self.path}: another training run continued this ledger after it was closed "
                "here: read ε from that run. If the file was moved or changed instead, put it back "
                "as it was."
            )


def _digest_file(path: Path) -> str:
    with open_ledger_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_ending(path: Path) -> tuple[int, bytes] | None:
    """Return a ledger's size and last bytes, or None if there is no file.

    The last bytes hold the last line. It identifies all steps, because a step's line holds the
    digest of those above it.
    """
    if not is_file(path):
        return None
    with open_ledger_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - ENDING_BYTES))
        return size, file.read()
