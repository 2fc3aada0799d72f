"""Keep track of the nodes: their addresses, pending requests, and the steps they can have taken.

Nodes are not trusted. The server checks each message before it uses it, and a message can only
raise the number of steps that a node is assumed to have taken. Malformed messages are logged and
dropped; no message stops a run.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from zdp_bench.config.schema import Run
from zdp_bench.extras.federated.exchange import Request, pull_answer, send, wait_for_answers
from zdp_bench.extras.federated.messages import (
    MAX_ROUNDS,
    Malformed,
    checked_values,
    content,
    values_of,
)
from zdp_bench.extras.federated.runner import rounds_of

POLL_INTERVAL = 0.1  # seconds between two checks for new nodes
RETRY_AFTER = 30.0  # seconds until a refused node is asked again, as it may have been restarted
SELF_REGISTRATION = 1.0  # seconds within which a SuperNode that registers itself has connected
# A patient's ε takes longer to compute the more examples the patient has: seconds for this many.
MAX_EXAMPLES_PER_PATIENT = 1000
MAX_RUNS = 100  # reject a report of more steps than this many runs of the plan would take

JOIN_VALUES = {"node": int, "records": int, "examples_per_patient": int}
LEDGER_VALUES = {"entries": int, "digest": str}  # a node's report of its ledger's position

SAME_VERSION = "both need the same version of zdp-bench"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standing:
    """What the server knows about one node.

    Attributes:
        records: the number of examples (patients, with `privacy.unit=patient`) that a step samples
            from, as the node reported when it first joined.
        examples_per_patient: the largest number of examples of any one patient that the node ever
            reported.
        entries, digest: the position of the node's ledger, as the node last reported.
        excess: the largest number of steps that the node ever reported beyond the requested ones.
        repeats: the number of steps that were requested from the node again since it last stated
            its ledger's position. A restarted node may have released them anew.
        answers: the number of rounds in which the node's release was used.
        key: the digest of the key with which the node first joined; see `digest_of_key`. No other
            key joins as this node. Empty in a checkpoint of an older version.
    """

    records: int
    examples_per_patient: int
    entries: int = 0
    digest: str = ""
    excess: int = 0
    repeats: int = 0
    answers: int = 0
    key: str = ""

    def note_ledger(
        self,
        entries: int,
        digest: str,
        requested_steps: int,
    ) -> Standing:
        """Return the standing after a report of `entries` ledger entries.

        Args:
            entries, digest: the position of the ledger in the report.
            requested_steps: the number of steps requested so far.
        """
        if entries < self.entries:  # the node contradicts itself, so its repeats stay doubtful
            return self
        excess = max(self.excess, entries - requested_steps)
        return replace(self, entries=entries, digest=digest, excess=excess, repeats=0)

    def spent(self, requested_steps: int) -> int:
        """Return the largest number of steps that the node can have taken.

        Formal guarantees: the number is at least `requested_steps`, and at least what the node ever
        reported. A report lowers it only by the repeats that the node's ledger does not hold.
        """
        return requested_steps + self.excess + self.repeats


@dataclass(frozen=True)
class Refusal:
    """A node that is refused for some time.

    Attributes:
        reason: why the node is refused.
        number: the node's number, if known.
        until: the end of the refusal, in seconds of `time.monotonic`.
    """

    reason: str
    number: int | None
    until: float

    def __str__(self) -> str:
        name = "a node that joins" if self.number is None else f"node {self.number}"
        return f"{name}: {self.reason}"


class Roster:
    """The nodes of a run.

    The server asks a node to join as soon as Flower lists it, and then to prepare. The node is
    present once it has answered both requests validly. It is asked again after a round that it did
    not answer, and `RETRY_AFTER` seconds after a refusal. A number belongs to the key that joined
    with it first, also after the run is resumed. A key has one number, which it can change until
    the run is planned.

    Attributes:
        num_nodes: the number of nodes in the federation.
        min_nodes: the number of valid answers that a round needs.
        steps_per_round: the number of private steps that a node takes in a round.
        standings: what is known about each node that has ever joined, by its number.
        requested_rounds: the number of rounds requested so far, over all attempts; the server's
            ledger holds them.
        present: Flower's id of each present node, by its number.
        affordable_steps: returns how many of a number of steps a node's budget allows; None if it
            has no budget.
    """

    def __init__(
        self,
        grid: Grid,
        config: Run,
        expected: Mapping[str, Any],
        sizes: Sequence[int] | None,
        known: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Create the roster of a new or resumed run.

        Args:
            grid: Flower's connection to the nodes.
            config: the run's configuration.
            expected: the values that every node must report when it joins, such as the digest of
                its experiment.
            sizes: the number of records that each node must have. If None, a node may have any
                number.
            known: the nodes in the checkpoint, as `saved` returned them.
        """
        self.grid = grid
        self._config = config
        self.num_nodes = config.federated.nodes or 1
        self.min_nodes = config.federated.min_nodes or self.num_nodes
        self.steps_per_round = config.federated.local_steps
        self.standings = {number: Standing(**values) for number, values in known.items()}
        self.requested_rounds = 0
        self.present: dict[int, int] = {}
        self.affordable_steps: Callable[[int, int], int | None] = lambda number, steps: None
        self._expected = expected
        self._sizes = sizes
        self._is_planned = bool(known)
        # Flower's id -> number, for every node that has joined and is still connected
        self._number_of: dict[int, int] = {}
        self._connected: dict[int, NodeInfo] = {}  # by Flower's id
        self._pending: dict[int, Request] = {}  # requests without an answer, by Flower's id
        self._refused: dict[int, Refusal] = {}  # by Flower's id
        self._preparation: dict[str, Any] | None = None  # run and rounds, once the plan is known
        self._mechanism_digests: Mapping[int, str] = {}
        self._max_entries = 0

    def meet(self) -> None:
        """Ask new nodes to join, forget disconnected ones, and process the answers so far."""
        self._connected = {node.node_id: node for node in self.grid.get_nodes()}
        connected = set(self._connected)
        self._forget_disconnected(connected)
        busy = self._pending.keys() | self._refused.keys() | set(self.present.values())
        for address in sorted(connected - busy):
            self._ask("query.join", address, {})
        has_answers = True
        while has_answers:  # an answer may lead to the next request
            has_answers = False
            for request in list(self._pending.values()):
                answer = pull_answer(self.grid, request)
                if answer is not None:
                    has_answers = True
                    del self._pending[request.address]
                    self._admit(request.kind, request.address, answer)

    def _forget_disconnected(self, connected: set[int]) -> None:
        """Forget nodes that are no longer connected, and refusals that have expired."""
        now = time.monotonic()
        for number, address in list(self.present.items()):
            if address not in connected:
                del self.present[number]
        for address in self._number_of.keys() - connected:
            del self._number_of[address]
        for address, refusal in list(self._refused.items()):
            if address not in connected or now >= refusal.until:
                del self._refused[address]
        for address in self._pending.keys() - connected:
            del self._pending[address]

    def wait_for(
        self,
        count: int,
        patience: float,
        asked_to_stop: Callable[[], int],
    ) -> bool:
        """Wait until `count` nodes are present.

        Returns:
            True if they are, or if a signal was received: callers check `asked_to_stop` first.
            False after `patience` seconds, or as soon as every other node is refused.
        """
        deadline = time.monotonic() + patience
        while True:
            self.meet()
            if len(self.present) >= count or asked_to_stop():
                return True
            if not self._pending and self._is_decided():
                return False
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_INTERVAL)

    def _is_decided(self) -> bool:
        """Return True if every node that is not present is refused.

        A refused client whose number is not known may be any of these nodes. One with a number that
        the federation does not have, or that of a present node, is none of them.
        """
        absent = set(range(self.num_nodes)) - self.present.keys()
        refused_numbers = [refusal.number for refusal in self._refused.values()]
        num_without_number = refused_numbers.count(None)
        return len(absent.difference(refused_numbers)) <= num_without_number

    def prepare(
        self,
        run: str,
        rounds: int,
        mechanism_digests: Mapping[int, str],
    ) -> None:
        """Ask the present nodes, and those that join later, to prepare.

        No node is present until it has answered.

        Args:
            run: the digest of the run.
            rounds: the number of rounds in the plan.
            mechanism_digests: the digest of the mechanism that each node must have, by its number.
        """
        self._is_planned = True
        self._preparation = {"run": run, "rounds": rounds}
        self._mechanism_digests = mechanism_digests
        self._max_entries = MAX_RUNS * rounds * self.steps_per_round
        for number, address in self.present.items():
            self._ask_to_prepare(number, address)
        self.present = {}

    def note_ledger(
        self,
        number: int,
        values: Mapping[str, Any],
    ) -> None:
        """Update a node's standing with the position of its ledger in a message's values."""
        entries = values["entries"]
        if entries > self._max_entries:
            raise Malformed(f"has entries={entries}, more than {MAX_RUNS} runs like this can have")
        requested_steps = self.requested_rounds * self.steps_per_round
        standing = self.standings[number]
        self.standings[number] = standing.note_ledger(entries, values["digest"], requested_steps)

    def count_repeat(self) -> None:
        """Count a round that is about to be requested again as a new one of each present node.

        The node's next report (`note_ledger`) takes back what its ledger does not hold.
        """
        self._pending.clear()  # a report from before the repeat takes nothing back: ask again
        for number in self.present:
            standing = self.standings[number]
            repeats = standing.repeats + self.steps_per_round
            self.standings[number] = replace(standing, repeats=repeats)

    def round(
        self,
        contents: RecordDict,
        patience: float,
    ) -> dict[int, Message]:
        """Request a round from every present node; return the answers, by the node's number."""
        number_of = {address: number for number, address in self.present.items()}
        requests = send(self.grid, "train", number_of, contents)
        answers_by_address = wait_for_answers(self.grid, requests, patience)
        answers = {number_of[address]: answer for address, answer in answers_by_address.items()}
        # A node that failed or did not answer has to join again, as it may have been restarted.
        for number in list(self.present):
            if number not in answers or answers[number].has_error():
                del self.present[number]
        return answers

    def log_drop(self, number: int, reason: str) -> None:
        """Log that a node's message is dropped."""
        log.warning("node %d: %s; it is dropped", number, reason)

    def count_use(self, number: int) -> None:
        """Count a round in which the node's release was used."""
        standing = self.standings[number]
        self.standings[number] = replace(standing, answers=standing.answers + 1)

    def spent(
        self,
        number: int,
        rounds: int | None = None,
    ) -> int:
        """Return the largest number of releases that a node can have made.

        A node stops at its budget, which is the same by its own count. So it cannot have released
        repeats beyond the budget anew.

        Args:
            number: the node's number.
            rounds: the number of rounds requested by then. If None, those requested so far.
        """
        rounds = self.requested_rounds if rounds is None else rounds
        standing = self.standings[number]
        steps = standing.spent(rounds * self.steps_per_round)
        if not standing.repeats:
            return steps
        affordable = self.affordable_steps(number, steps)
        return steps if affordable is None else max(affordable, steps - standing.repeats)

    def report(self, patience: float) -> None:
        """Ask every connected node for the final position of its ledger."""
        if not self._number_of:
            return
        requests = send(self.grid, "query.report", self._number_of, content({}))
        for address, answer in wait_for_answers(self.grid, requests, patience).items():
            if answer.has_error():
                continue
            number = self._number_of[address]
            try:
                self.note_ledger(number, checked_values(answer, LEDGER_VALUES))
            except Malformed as error:
                self.log_drop(number, f"its report {error}")

    def saved(self) -> dict[int, dict[str, Any]]:
        """Return the nodes' standings as plain values, for a checkpoint."""
        return {number: asdict(standing) for number, standing in sorted(self.standings.items())}

    def list_refusals(self) -> list[Refusal]:
        """Return why nodes are refused, including nodes whose numbers are not known."""
        return sorted(self._refused.values(), key=str)

    def _ask(
        self,
        kind: str,
        address: int,
        values: Mapping[str, Any],
    ) -> None:
        for request in send(self.grid, kind, [address], content(values)):
            self._pending[address] = request

    def _ask_to_prepare(self, number: int, address: int) -> None:
        assert self._preparation is not None
        standing = self.standings[number]
        at_least = {"entries": standing.entries, "digest": standing.digest}
        self._ask("query.prepare", address, self._preparation | at_least)

    def _admit(
        self,
        kind: str,
        address: int,
        answer: Message,
    ) -> None:
        """Process the answer to join or prepare: ask for the next, or mark the node present."""
        number = self._number_of.get(address)
        try:
            if answer.has_error():
                # An earlier version's answer repeats no secret, so it was dropped: none is left.
                if answer.error.code == ErrorCode.MESSAGE_UNAVAILABLE:
                    raise Malformed(f"no valid answer came; {SAME_VERSION}")
                raise Malformed(reason_of(answer))
            if kind == "query.join":
                values = checked_values(answer, JOIN_VALUES)
                number = values["node"]
                self._join(number, address, values_of(answer))
                if self._preparation:
                    self._ask_to_prepare(number, address)
                    return
            assert number is not None
            if kind == "query.prepare":
                values = checked_values(answer, LEDGER_VALUES | {"mechanism": str})
                if values["mechanism"] != self._mechanism_digests[number]:
                    raise Malformed(f"its mechanism differs from the server's: {SAME_VERSION}")
                self.note_ledger(number, values)
            self.present[number] = address
        except Malformed as error:
            refusal = Refusal(str(error), number, time.monotonic() + RETRY_AFTER)
            self._refused[address] = refusal
            log.warning("%s; it is refused", refusal)

    def _join(
        self,
        number: int,
        address: int,
        values: Mapping[str, Any],
    ) -> None:
        """Check the values with which a node joins, and register it."""
        if number >= self.num_nodes:
            raise Malformed(f"federated.nodes={self.num_nodes} has no such node")
        for key, value in self._expected.items():
            if values.get(key) != value:
                hint = ", and the same data set, or federated.patients=own" if key == "data" else ""
                raise Malformed(
                    f"its {key} differs from the server's: "
                    f"start both with the same recipe, seed and keys{hint}"
                )
        if self._sizes and values["records"] != self._sizes[number]:
            raise Malformed(
                "does not have the patients that the server assigned to it: all nodes need the "
                "same data set"
            )
        if not values["records"] or not values["examples_per_patient"]:
            raise Malformed("has no records")
        records, examples = values["records"], values["examples_per_patient"]
        check_counts(self._config, records, examples)
        node = self._connected[address]
        key = digest_of_key(node)
        self._free_other_numbers(number, address, key)
        # A node that joins again keeps its standing: nothing it says takes back what was counted.
        standing = self.standings.get(number, Standing(records, examples))
        if standing.key not in ("", key):
            raise Malformed(
                f"its key is not the one with which node {number} first joined: start its "
                "SuperNode with that key, or begin again with force=true"
            )
        if records != standing.records:
            raise Malformed(
                f"samples from {records:,} records, but from {standing.records:,} when it first "
                "joined: restore its data, or begin again with force=true"
            )
        if not standing.key and is_registered_at_start(node):
            log.warning(
                "node %d: its SuperNode has no key of its own, so it cannot return to this run "
                "after a restart: start it with --auth-supernode-private-key",
                number,
            )
        examples = max(examples, standing.examples_per_patient)
        self.standings[number] = replace(standing, examples_per_patient=examples, key=key)
        self._number_of[address] = number

    def _free_other_numbers(
        self,
        number: int,
        address: int,
        key: str,
    ) -> None:
        """Free the numbers under which a key joined before the run was planned.

        Raises:
            Malformed: the run is planned, so that each key keeps its number.
        """
        for other, standing in list(self.standings.items()):
            if standing.key != key or other == number:
                continue
            if self._is_planned:
                raise Malformed(
                    f"its key joined as node {other} before: start its SuperNode with "
                    f"partition-id={other}"
                )
            del self.standings[other]
            self._number_of.pop(address, None)


def check_counts(
    config: Run,
    records: int,
    examples_per_patient: int,
) -> None:
    """Check that the server can plan and account for a node with these counts.

    Formal guarantees: the federation takes at most `MAX_ROUNDS` rounds, because it takes no more
    than the node with the most would take alone.

    Args:
        config: the run's configuration.
        records: number of records from which the node samples.
        examples_per_patient: largest number of examples of one patient at the node.

    Raises:
        Malformed: the node has too few records, or too many, or too many examples of a patient.
    """
    units = "patients" if config.privacy.by_owner else "examples"
    batch_size = config.trainer.batch_size or 1
    if records < batch_size:
        raise Malformed(f"has only {records:,} {units}, fewer than trainer.batch_size={batch_size}")
    rounds = rounds_of(config, [records]).steps
    if rounds > MAX_ROUNDS:
        raise Malformed(
            f"has {records:,} {units}, so that the run would take {rounds:,} rounds, more than "
            f"{MAX_ROUNDS:,}"
        )
    # If patients are drawn, a patient is one share of the sum, whatever its number of examples. And
    # if examples are drawn, one patient cannot have more than all of them.
    shares = 1 if config.privacy.by_owner else min(examples_per_patient, records)
    if shares > MAX_EXAMPLES_PER_PATIENT:
        raise Malformed(
            f"has {shares:,} examples of one patient, more than {MAX_EXAMPLES_PER_PATIENT:,}: use "
            "privacy.unit=patient"
        )


def digest_of_key(node: NodeInfo) -> str:
    """Return the digest of a node's public key.

    A SuperNode without `--auth-supernode-private-key` draws a new key at each start. A node of a
    simulation has no key; its address is used.
    """
    key = node.public_key or str(node.node_id).encode()
    return hashlib.sha256(key).hexdigest()


def is_registered_at_start(node: NodeInfo) -> bool:
    """Return True if a SuperNode seems to have registered itself, with a key that it drew.

    Flower does not state this. But such a SuperNode connects as soon as it is registered, whereas a
    site's own key is registered earlier, by a separate command.
    """
    if not (node.registered_at and node.last_activated_at):  # as in a simulation
        return False
    registered = datetime.fromisoformat(node.registered_at)
    connected = datetime.fromisoformat(node.last_activated_at)
    return (connected - registered).total_seconds() < SELF_REGISTRATION


def reason_of(answer: Message) -> str:
    """Return the reason of Flower's `Error` as one short printable line."""
    lines = (answer.error.reason or "").strip().splitlines() or ["it failed"]
    return "".join(letter for letter in lines[-1] if letter.isprintable())[:300]
