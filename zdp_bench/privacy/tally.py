"""Count the releases of a run, which its accountant composes.

A `Tally` counts in memory: one release for each step that is not provably the same release as an
earlier one (`zdp_bench.privacy.ledger` states when it is). A `Ledger`, which is a tally, also
writes each step to its file. `TallyOfFiles` counts the steps in files that are no longer written
to.
"""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zdp_bench.errors import UserError
from zdp_bench.privacy.ledger_lines import (
    BEGINNING,
    Head,
    Revocation,
    Start,
    Step,
    chain,
    salvage,
)


class BudgetExceeded(Exception):  # noqa: N818 - an event of a run, not an error
    """Raised if the next step would exceed `max_epsilon`, before it draws or changes anything."""


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


class ReleasedSteps:
    """The set of steps that were released.

    Of the steps without a weights digest, it holds only the largest number per generation. That is
    enough because a generation takes its steps without gaps, and never asks about steps before its
    start.
    """

    def __init__(self) -> None:
        self.last_step: dict[str, int] = {}  # generation -> largest number of a released step
        self.with_weights: set[Step] = set()  # the steps that have a weights digest

    def add(self, step: Step) -> None:
        last = self.last_step.get(step.generation, step.step)
        self.last_step[step.generation] = max(step.step, last)
        if step.weights_digest:
            self.with_weights.add(step)

    def __contains__(self, step: Step) -> bool:
        if step.weights_digest:
            return step in self.with_weights
        last = self.last_step.get(step.generation)
        return last is not None and step.step <= last

    def count_from(self, first: int, end: int, generation: str) -> int:
        """Return how many of a generation's steps `first` … `end` − 1 are in the set."""
        released_end = self.last_step.get(generation, -1) + 1
        return max(0, min(end, released_end) - first)


class Tally:
    """Counts a mechanism's releases in memory. `Ledger` adds the file.

    Formal guarantees:
        - `releases` never falls. It rises with each step that is not provably the same release as
          an earlier one, with the same generation, number and weights.
        - Only the process that created the tally, or one that it was pickled to, may count. A fork
          would repeat the noise for other sums, which this tally would not count.

    Attributes:
        generation: name of the generation of the steps that this process takes; "" is the first.
        digest: digest of the chain of ledger lines after the last step.
        released: the steps that were released.
        part: if the tally is not repeatable, random name of the process that took the last step.
    """

    def __init__(
        self,
        repeatable: bool,
        earlier: int = 0,
        spans: Iterable[Span] = (),
        generation: str = "",
        digest: str = BEGINNING,
    ) -> None:
        """Create a tally that begins with the releases so far.

        Args:
            repeatable: whether a step that is taken again has the same noise.
            earlier: number of releases so far that can never be repeated.
            spans: all other releases so far.
            generation: generation of the steps that this process takes.
            digest: digest of the last ledger line.
        """
        self._process = os.getpid()
        self.repeatable = repeatable
        self.earlier = earlier
        self.generation = generation
        # For a warning only: how many steps of an earlier process this one will release again.
        self.num_to_count_again = 0
        self.digest = digest
        self._own_part = "" if repeatable else secrets.token_hex(16)
        self.part = self._own_part
        self._ends_of_parts: dict[str, int] = {}  # number of releases up to the end of each part
        self._spans = list(spans)
        self._count = sum(end - first for first, end, _ in self._spans)
        # Spans lack weights digests, which only the steps of a federation's nodes have. That loses
        # nothing: spans are passed between the ranks of a run, and a node has a single process.
        self.released = ReleasedSteps()
        for span in self._spans:
            self.released.add(Step(span.end - 1, generation=span.generation))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a tally, with which the process that unpickles it may count."""
        vars(self).update(state, _process=os.getpid())

    def append(self, step: int, weights_digest: str = "") -> None:
        """Count the release of `step`, which is about to be taken, unless it is already counted.

        Args:
            step: number of the step, from 0.
            weights_digest: in a federation, the digest of the weights from which the step's round
                starts: the same step from other weights is another release.
        """
        self.require_own_process()
        entry = Step(step, weights_digest, self.generation)
        if not self.has_released(step, weights_digest):
            self.digest = chain(self.digest, entry)
            self._count_release(entry)
            self.part = self._own_part
            self._ends_of_parts[self.part] = self.releases

    def record_start(self, execution_digest: str, step: int, state_digest: str) -> None:
        """Do nothing: only `Ledger` records states."""

    def revoke_starts(self, step: int) -> None:
        """Do nothing: only `Ledger` records states."""

    def sync(self) -> None:
        """Do nothing: only `Ledger` has a file."""

    def close(self) -> None:
        """Do nothing: only `Ledger` has a file."""

    def require_own_process(self) -> None:
        """Raise an error if this process is a fork of the one that counts.

        Raises:
            UserError: this process is a fork.
        """
        if os.getpid() != self._process:
            raise UserError(
                "this process is a copy (fork) of the one that opened the ledger, and a step here "
                "would repeat that one's noise: begin the training in the process that takes its "
                "steps, each with a ledger of its own."
            )

    def has_released(self, step: int, weights_digest: str = "") -> bool:
        """Return True if `step` was released before, with the same bits, so that it costs nothing.

        Args:
            step: number of the step.
            weights_digest: see `append`.
        """
        return self.repeatable and Step(step, weights_digest, self.generation) in self.released

    def holds(self, part: str, steps: int) -> bool:
        """Return True if the first `steps` steps of a tally, the last of them by `part`, are here.

        That is so if `part` ends here after as many steps or more, because a process writes its
        name behind all steps before its own. A copy of a ledger does not hold the steps that the
        original took later.
        """
        return steps <= self._ends_of_parts.get(part, -1)

    def restart_from(self, other: Tally) -> None:
        """Forget all releases, and count those of another tally."""
        self.earlier = other.earlier
        self._spans = list(other._spans)
        self._count = other._count
        self.released = copy.deepcopy(other.released)

    def _count_release(self, step: Step) -> None:
        spans = self._spans
        end = step.step + 1
        last = spans[-1] if spans else None
        if last is not None and (last.end, last.generation) == (step.step, step.generation):
            spans[-1] = last._replace(end=end)
        else:
            spans.append(Span(step.step, end, step.generation))
        self._count += 1
        self.released.add(step)

    @property
    def has_other_noise(self) -> bool:
        """True if this process cannot draw the noise of some earlier step again.

        Correlated noise cannot continue then, because it needs the noise of earlier steps.
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
        """Return the number of releases once this generation has taken its first `step` steps.

        Later steps, which a killed process took, are left out: they will be repeated and counted
        when their turn comes. If noise is not repeatable, all releases so far are counted.
        """
        if not self.repeatable:
            return self.releases
        count = self.earlier
        for first, end, generation in self._spans:
            if generation == self.generation:
                end = min(end, max(first, step))  # a span from `step` on counts 0
            count += end - first
        return count

    def releases_after(self, first: int, end: int) -> int:
        """Return the number of releases once steps `first` … `end` − 1 are taken as well."""
        new = max(0, end - first)
        if self.repeatable:
            new -= self.released.count_from(first, end, self.generation)
        return self.releases + new

    def num_released_from(self, step: int) -> int:
        """Return how many of the steps from `step` on were released.

        A step that several generations released is counted once.
        """
        num_released = 0
        counted_until = step
        for first, end, _ in sorted(self._spans):
            num_released += max(0, end - max(first, counted_until))
            counted_until = max(counted_until, end)
        return num_released

    @property
    def position(self) -> Position:
        """How far the count reaches, for a checkpoint."""
        return Position(self.releases, self.digest)

    def copy(self) -> Tally:
        """Return a tally with the same count and no file, for another rank."""
        copied = Tally(self.repeatable, self.earlier, self._spans, self.generation, self.digest)
        copied.part, copied._own_part = self.part, self._own_part
        copied._ends_of_parts = dict(self._ends_of_parts)
        return copied


def count_releases(paths: Iterable[Path]) -> int:
    """Return the number of distinct releases in several ledgers.

    The same step of the same generation is one release, even if it is in several files, unless one
    of them is damaged or states that its noise is not repeatable. A damaged line counts as the most
    releases that it can hold.
    """
    return TallyOfFiles(paths).releases


class TallyOfFiles(Tally):
    """The releases and recorded starts in ledgers that are no longer written to.

    Attributes:
        heads: the head of each undamaged ledger.
        starts: the recorded starts, and the revocations of starts.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__(repeatable=True)
        self.heads: dict[Path, Head] = {}
        self.starts: list[Start | Revocation] = []
        for path in paths:
            entries, max_lost = salvage(path)
            self.earlier += max_lost
            head = entries[0] if entries else None
            if isinstance(head, Head):
                self.heads[path] = head
                self.starts += [entry for entry in entries if isinstance(entry, Start | Revocation)]
            steps = [entry for entry in entries if isinstance(entry, Step)]
            if isinstance(head, Head) and head.repeatable:
                self._count_new(steps)
            else:  # nothing proves that a step is the same release as one in another file
                self.earlier += len(steps)

    def _count_new(self, steps: Iterable[Step]) -> None:
        """Count the steps of a file that no earlier file holds.

        Within the file, each step is another release.
        """
        in_earlier_files = copy.deepcopy(self.released)
        for step in steps:
            if step not in in_earlier_files:
                self._count_release(step)
