"""What the server knows of the nodes: where they are, what they were asked for, and what they have spent at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.federated.flower import Grid, Message, RecordDict
from zdp_bench.federated.messages import content, values_of

PAUSE = 0.1  # seconds between two looks for nodes


@dataclass(frozen=True)
class Standing:
    """One node, as the server last heard of it.

    Attributes:
        records, records_per_patient: of its training set.
        entries, digest: how far its ledger had come.
        before: releases that the steps done so far have cost; fewer than `entries` where a killed run drew ahead.
        left: steps that its budget still allows; -1: it has none.
        heard: how many rounds had been asked for, over all attempts, when the server last heard of the node.
        answers: rounds in which its release was used.
    """

    records: int
    records_per_patient: int
    entries: int = 0
    digest: str = ""
    before: int = 0
    left: int = -1
    heard: int = 0
    answers: int = 0

    def spent(self, asked: int, steps_a_round: int) -> int:
        """The most releases there can be after `asked` rounds: a node that is silent is held to have taken every one."""
        return self.entries + (asked - self.heard) * steps_a_round


class Roster:
    """The nodes of a run, by number.

    Attributes:
        asked: rounds asked for so far, over all attempts at the run; the server counts them in a ledger of its own.

    A node is present from its joining until it is gone from Flower's list, or left a round without an answer; then it is asked
    for a sign of life, and is present again when that comes.
    """

    def __init__(self, grid: Grid, config: Run, data_digest: str, known: Mapping[int, Mapping[str, Any]]) -> None:
        self.grid, self.config = grid, config
        self.standings = {number: Standing(**values) for number, values in known.items()}
        self.asked = 0
        self.present: dict[int, int] = {}  # number -> Flower's id
        self._data_digest = data_digest
        self._met: dict[int, int] = {}  # Flower's id -> number
        self._silent: dict[str, int] = {}  # message that asks for a sign of life -> number
        self._prepare: dict[str, Any] | None = None
        self._mechanisms: Mapping[int, str] = {}

    def meet(self) -> None:
        """Let nodes that have come join, and drop those that have gone.

        Raises:
            UserError: a node that has come does not belong to this run, or its ledger is not to be trusted.
        """
        there = set(self.grid.get_node_ids())
        self.present = {number: address for number, address in self.present.items() if address in there}
        for sign in self.grid.pull_messages(list(self._silent)) if self._silent else []:
            number = self._silent.pop(sign.metadata.reply_to_message_id)
            if not sign.has_error() and sign.metadata.src_node_id in there:
                self.present[number] = sign.metadata.src_node_id
        if not (new := sorted(there - set(self._met))):
            return
        for answer in self._asked("query.join", dict.fromkeys(new, content({}))):
            values = values_of(answer)
            number = int(values["node"])
            self._check(values, number)
            known = self.standings.get(number, Standing(int(values["records"]), int(values["records_per_patient"])))
            self.standings[number] = known
            self._met[answer.metadata.src_node_id] = number
            self.present[number] = answer.metadata.src_node_id  # the one that came last is the one that is alive
        if self._prepare:
            self._prepare_those([n for n, address in self.present.items() if address in new])

    def wait_for(self, count: int, patience: float, asked_to_stop: Callable[[], int]) -> bool:
        """Wait until so many nodes are present; False when `patience` seconds did not suffice."""
        until = time.monotonic() + patience
        while True:
            self.meet()
            if len(self.present) >= count or asked_to_stop():
                return True
            if time.monotonic() > until:
                return False
            time.sleep(PAUSE)

    def prepare(self, run: str, rounds: int, mechanisms: Mapping[int, str]) -> None:
        """Let every node, also those to come, make its mechanism and open its ledger.

        Args:
            mechanisms: the digest of the mechanism that each node must come to.

        Raises:
            UserError: a node refuses, or comes to another mechanism.
        """
        self._prepare, self._mechanisms = {"run": run, "rounds": rounds}, mechanisms
        self._prepare_those(list(self.present))

    def _prepare_those(self, numbers: list[int]) -> None:
        assert self._prepare is not None
        contents = {}
        for number in numbers:
            known = self.standings[number]
            told = self._prepare | {"entries": known.entries, "digest": known.digest}
            contents[self.present[number]] = content(told)
        for answer in self._asked("query.prepare", contents):
            values = values_of(answer)
            number = int(values["node"])
            if values["mechanism"] != self._mechanisms[number]:
                raise UserError(
                    f"node {number} comes to another mechanism than the server: both need the same version of zdp-bench."
                )
            self.heard(number, values)

    def heard(self, number: int, values: Mapping[str, Any]) -> None:
        """Note what a node said of its ledger: it covers all rounds asked for so far."""
        self.standings[number] = replace(
            self.standings[number],
            entries=int(values["entries"]),
            digest=str(values["digest"]),
            before=int(values["before"]),
            left=int(values["left"]),
            heard=self.asked,
        )

    def round(self, contents: RecordDict, round_: int, patience: float) -> dict[int, Message]:
        """Ask every node that is present for a round: the answers that came in time, by number."""
        messages = {number: Message(contents, address, "train", group_id=str(round_)) for number, address in self.present.items()}
        replies = self.grid.send_and_receive(messages.values(), timeout=patience)
        answers = {self._met[reply.metadata.src_node_id]: reply for reply in replies if reply.metadata.src_node_id in self._met}
        for number in set(messages) - set(answers):
            address = self.present.pop(number)
            (sign,) = self.grid.push_messages([Message(content({}), address, "query.report")]) or ("",)
            if sign:
                self._silent[sign] = number
        return answers

    def used(self, number: int) -> None:
        """Note that a node's release went into the model."""
        self.standings[number] = replace(self.standings[number], answers=self.standings[number].answers + 1)

    def spent(self, number: int) -> int:
        """The most releases this node can have made."""
        standing, federated = self.standings[number], self.config.federated
        return standing.spent(self.asked, federated.local_steps)

    def report(self, patience: float) -> None:
        """Ask every node for its ledger a last time; of one that does not answer, `spent` stays the bound."""
        contents = {address: content({}) for address in self.present.values()}
        for answer in self._replies("query.report", contents, patience):
            if not answer.has_error():
                values = values_of(answer)
                self.heard(int(values["node"]), values)

    def dismiss(self) -> None:
        """Tell every node that the run is over."""
        contents = {address: content({}) for address in self._met if address in set(self.grid.get_node_ids())}
        self.grid.push_messages([Message(c, address, "query.dismiss") for address, c in contents.items()])

    def saved(self) -> dict[int, dict[str, Any]]:
        """For a checkpoint."""
        return {number: asdict(standing) for number, standing in sorted(self.standings.items())}

    def _asked(self, kind: str, contents: Mapping[int, RecordDict]) -> list[Message]:
        """Answers to a question that a node must answer, if it is alive."""
        answers = self._replies(kind, contents, self.config.federated.patience)
        for answer in answers:
            if answer.has_error():
                which = self._met.get(answer.metadata.src_node_id)
                raise UserError(f"node {'that joins' if which is None else which}: {answer.error.reason}")
        return answers

    def _replies(self, kind: str, contents: Mapping[int, RecordDict], patience: float) -> list[Message]:
        messages = [Message(record, address, kind) for address, record in contents.items()]
        return list(self.grid.send_and_receive(messages, timeout=patience)) if messages else []

    def _check(self, values: Mapping[str, Any], number: int) -> None:
        own = {"experiment": experiment_digest(self.config), "seed": self.config.seed}
        if self.config.federated.patients == "split":
            own["data"] = self._data_digest
        for key, value in own.items():
            if values[key] != value:
                raise UserError(
                    f"node {number} has another {key} than the server: start both with the same recipe, seed and keys"
                    + (", and the same data set, or federated.patients=own." if key == "data" else ".")
                )
