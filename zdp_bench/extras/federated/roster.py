"""Keep what the server knows of the nodes: addresses, what was asked, what was spent at most.

A node is not trusted. Its messages are checked before use and only ever raise the count of what it
has spent. A malformed message is dropped with one line in the log; nothing a node sends ends a run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from zdp_bench.config.schema import Run
from zdp_bench.extras.federated.messages import Malformed, checked_values, content, values_of

PAUSE = 0.1  # seconds between two looks for nodes
AGAIN = 30.0  # seconds until a refused node is asked again: it may have been started anew
MOST_RUNS = 100  # a node that claims to have spent this many times the run's steps is not believed

JOINED = {"node": int, "records": int, "examples_per_patient": int}
SPENT = {"entries": int, "digest": str}  # what a node says of its ledger

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standing:
    """What the server knows of one node.

    Attributes:
        records: how many a step draws from, as it said when it first joined: records, or patients
            with `privacy.unit=patient`.
        examples_per_patient: the most that one patient has, likewise.
        entries, digest: how far its ledger had come, as it said last.
        excess: the most steps it ever claimed beyond those asked for by then.
        answers: rounds in which its release was used.
    """

    records: int
    examples_per_patient: int
    entries: int = 0
    digest: str = ""
    excess: int = 0
    answers: int = 0

    def note_ledger(
        self,
        entries: int,
        digest: str,
        steps_asked: int,
    ) -> Standing:
        """Return it updated: the node reports a ledger of `entries`, after `steps_asked` steps."""
        excess = max(self.excess, entries - steps_asked)
        if entries < self.entries:
            return replace(self, excess=excess)
        return replace(self, entries=entries, digest=digest, excess=excess)

    def spent(self, steps_asked: int) -> int:
        """Return the most steps there can be once `steps_asked` were asked for.

        Formal guarantees: at least `steps_asked`; a node's word only raises it; it never falls.
        """
        return steps_asked + self.excess


@dataclass(frozen=True)
class Refusal:
    """Why one of Flower's nodes is rejected, its number if known, and until when."""

    why: str
    number: int | None
    until: float


class Roster:
    """The nodes of a run, by number.

    A node is asked to join as soon as Flower lists it, then to prepare, and is present once it has
    answered both well. It is asked again after a round it did not answer, and some time after it
    was refused. Of two clients that say they are one node, the last to join is asked.

    Attributes:
        asked: rounds asked for so far, over all attempts; the server keeps them in its own ledger.
        present: number -> Flower's id.
    """

    def __init__(
        self,
        grid: Grid,
        config: Run,
        expected: Mapping[str, Any],
        sizes: Sequence[int] | None,
        known: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Start with the nodes that `saved` left in a checkpoint.

        Args:
            expected: what every node must say when it joins, such as its experiment's digest.
            sizes: how many records each node must have; None: as many as it says.
        """
        self.grid = grid
        self.nodes = config.federated.nodes or 1
        self.least = config.federated.min_nodes or self.nodes
        self.steps_a_round = config.federated.local_steps
        self.standings = {number: Standing(**values) for number, values in known.items()}
        self.asked = 0
        self.present: dict[int, int] = {}
        self._expected, self._sizes = expected, sizes
        # Flower's id -> number, of every node that has joined and is still connected
        self._met: dict[int, int] = {}
        self._pending: dict[str, tuple[str, int]] = {}  # message -> what it asks for, Flower's id
        self._refused: dict[int, Refusal] = {}  # by Flower's id
        self._preparation: dict[str, Any] | None = None  # run and rounds, once they are known
        self._mechanisms: Mapping[int, str] = {}
        self._most_entries = 0

    def meet(self) -> None:
        """Let new nodes join, and drop those that have left."""
        connected = set(self.grid.get_node_ids())
        self._forget_all_but(connected)
        waiting = {address for _, address in self._pending.values()}
        busy = waiting | self._refused.keys() | set(self.present.values())
        for address in sorted(connected - busy):
            self._ask("join", address, {})
        while self._pending:
            answers = list(self.grid.pull_messages(list(self._pending)))
            if not answers:
                break
            for answer in answers:
                kind, address = self._pending.pop(answer.metadata.reply_to_message_id)
                self._admit(kind, address, answer)

    def _forget_all_but(self, connected: set[int]) -> None:
        """Forget nodes that have left, and refusals that are over."""
        now = time.monotonic()
        for number, address in list(self.present.items()):
            if address not in connected:
                del self.present[number]
        for address in self._met.keys() - connected:
            del self._met[address]
        for address, refusal in list(self._refused.items()):
            if address not in connected or now >= refusal.until:
                del self._refused[address]
        for message, (_, address) in list(self._pending.items()):
            if address not in connected:
                del self._pending[message]

    def wait_for(
        self,
        count: int,
        patience: float,
        asked_to_stop: Callable[[], int],
    ) -> bool:
        """Wait for `count` nodes; False after `patience` seconds, or if all others are refused."""
        until = time.monotonic() + patience
        while True:
            self.meet()
            if len(self.present) >= count or asked_to_stop():
                return True
            settled = len(self.present) + len(self._refused)
            if not self._pending and settled >= self.nodes:
                return False
            if time.monotonic() > until:
                return False
            time.sleep(PAUSE)

    def prepare(
        self,
        run: str,
        rounds: int,
        mechanisms: Mapping[int, str],
    ) -> None:
        """Ask every node, also later ones, to prepare; none is present until it has answered."""
        self._preparation = {"run": run, "rounds": rounds}
        self._mechanisms = mechanisms
        self._most_entries = MOST_RUNS * rounds * self.steps_a_round
        for number, address in self.present.items():
            self._ask_to_prepare(number, address)
        self.present = {}

    def note_ledger(
        self,
        number: int,
        values: Mapping[str, Any],
    ) -> None:
        """Note what a node reports of its ledger."""
        entries = values["entries"]
        if entries > self._most_entries:
            raise Malformed(f"has entries={entries}, more than {MOST_RUNS} runs like this one")
        steps_asked = self.asked * self.steps_a_round
        standing = self.standings[number]
        self.standings[number] = standing.note_ledger(entries, values["digest"], steps_asked)

    def round(
        self,
        contents: RecordDict,
        round_: int,
        patience: float,
    ) -> dict[int, Message]:
        """Ask every present node for a round; return the first timely answer of each, by number."""
        number_of = {address: number for number, address in self.present.items()}
        messages = [
            Message(contents, address, "train", group_id=str(round_)) for address in number_of
        ]
        answers: dict[int, Message] = {}
        for answer in self.grid.send_and_receive(messages, timeout=patience):
            number = number_of.get(answer.metadata.src_node_id)
            if number is not None:
                answers.setdefault(number, answer)
        # A node that failed or is silent joins again: it may have been started anew.
        for number in list(self.present):
            if number not in answers or answers[number].has_error():
                del self.present[number]
        return answers

    def log_drop(self, number: int, why: str) -> None:
        """Log that a node's message is not used."""
        log.warning("node %d: %s; it is dropped", number, why)

    def count_use(self, number: int) -> None:
        """Note that a node's release went into the model."""
        standing = self.standings[number]
        self.standings[number] = replace(standing, answers=standing.answers + 1)

    def spent(
        self,
        number: int,
        rounds: int | None = None,
    ) -> int:
        """Return the most releases this node can have made after `rounds` (None: asked) rounds."""
        rounds = self.asked if rounds is None else rounds
        return self.standings[number].spent(rounds * self.steps_a_round)

    def report(self, patience: float) -> None:
        """Ask every node for its ledger a last time."""
        if not self._met:
            return
        messages = [Message(content({}), address, "query.report") for address in self._met]
        for answer in self.grid.send_and_receive(messages, timeout=patience):
            number = self._met.get(answer.metadata.src_node_id)
            if number is None or answer.has_error():
                continue
            try:
                self.note_ledger(number, checked_values(answer, SPENT))
            except Malformed as error:
                self.log_drop(number, f"its report {error}")

    def saved(self) -> dict[int, dict[str, Any]]:
        """Return the nodes as plain values, for a checkpoint."""
        return {number: asdict(standing) for number, standing in sorted(self.standings.items())}

    def refusals(self) -> dict[int, str]:
        """Return why nodes are rejected, by number."""
        return {
            refusal.number: refusal.why
            for refusal in self._refused.values()
            if refusal.number is not None
        }

    def _ask(
        self,
        kind: str,
        address: int,
        values: Mapping[str, Any],
    ) -> None:
        message = Message(content(values), address, f"query.{kind}")
        for name in self.grid.push_messages([message]):
            self._pending[name] = (kind, address)

    def _ask_to_prepare(self, number: int, address: int) -> None:
        assert self._preparation is not None
        standing = self.standings[number]
        at_least = {"entries": standing.entries, "digest": standing.digest}
        self._ask("prepare", address, self._preparation | at_least)

    def _admit(
        self,
        kind: str,
        address: int,
        answer: Message,
    ) -> None:
        """Advance a node by its answer: from joining to preparing, then to being present."""
        number = self._met.get(address)
        try:
            if answer.has_error():
                raise Malformed(reason_of(answer))
            if kind == "join":
                values = checked_values(answer, JOINED)
                if number is not None and values["node"] != number:
                    raise Malformed(f"says that it is node {values['node']}")
                number = values["node"]
                self._join(number, address, values_of(answer))
                if self._preparation:
                    self._ask_to_prepare(number, address)
                    return
            assert number is not None
            if kind == "prepare":
                values = checked_values(answer, SPENT | {"mechanism": str})
                if values["mechanism"] != self._mechanisms[number]:
                    raise Malformed(
                        "has another mechanism than the server: both need the same version of "
                        "zdp-bench"
                    )
                self.note_ledger(number, values)
            self.present[number] = address
        except Malformed as error:
            self._refused[address] = Refusal(str(error), number, time.monotonic() + AGAIN)
            who = "a node that joins" if number is None else f"node {number}"
            log.warning("%s: %s; it is refused", who, error)

    def _join(
        self,
        number: int,
        address: int,
        values: Mapping[str, Any],
    ) -> None:
        """Note which node this is, and what it has."""
        if number >= self.nodes:
            raise Malformed(f"federated.nodes={self.nodes} has no such node")
        for key, value in self._expected.items():
            if values.get(key) != value:
                hint = ", and the same data set, or federated.patients=own" if key == "data" else ""
                raise Malformed(
                    f"has another {key} than the server: "
                    f"start both with the same recipe, seed and keys{hint}"
                )
        if self._sizes and values["records"] != self._sizes[number]:
            raise Malformed(
                "has other patients than the server assigned to it: all nodes need the same data "
                "set"
            )
        if not values["records"] or not values["examples_per_patient"]:
            raise Malformed("has no records")
        standing = Standing(values["records"], values["examples_per_patient"])
        self.standings.setdefault(number, standing)
        self._met[address] = number


def reason_of(answer: Message) -> str:
    """Return the reason of an Error in one short line."""
    lines = (answer.error.reason or "").strip().splitlines() or ["it failed"]
    return "".join(letter for letter in lines[-1] if letter.isprintable())[:300]
