"""An answer counts for the request that it answers, whoever and whatever its metadata names."""

import logging
from collections.abc import Callable, Iterable

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp

from tests.extras.federated.conftest import Make, Sound, carried_out
from zdp_bench.extras.federated import exchange, simulation
from zdp_bench.extras.federated.exchange import Request, pull_answer
from zdp_bench.extras.federated.messages import VALUES
from zdp_bench.extras.federated.simulation import FIRST, SerialGrid
from zdp_bench.records import Document

LIAR, VICTIM = 0, 2
KINDS = ("query.join", "query.prepare", "train", "query.report")
SHORT = ("federated.nodes=3", "federated.min_nodes=2", "trainer.epochs=1")
ROUNDS = 4


class Damaged(SerialGrid):
    """Flower's SuperLink, of which node 0 abuses what Flower does not check.

    `changed` is what node 0 answers instead of an answer of the kind `kind`. `unrequested` are
    messages that Flower delivers at the next pull, whatever is pulled.
    """

    kind = ""
    changed: Callable[["Damaged", Message], Message | None] = lambda self, answer: answer

    def __init__(self, app: ClientApp, nodes: int) -> None:
        super().__init__(app, nodes)
        self.unrequested: list[Message | None] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        message_ids = list(super().push_messages(sent))
        for message, message_id in zip(sent, message_ids, strict=True):
            is_liar = message.metadata.dst_node_id == FIRST + LIAR
            if is_liar and message.metadata.message_type == self.kind:
                changed = self.changed(self._answers[message_id])
                self._answers[message_id] = changed  # type: ignore[assignment]
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers to the requests and all unrequested messages, as Flower does."""
        pulled: list[Message | None] = []
        for message_id in message_ids:
            pulled.append(self._answers.pop(message_id, UNAVAILABLE))
        pulled += self.unrequested
        self.unrequested = []
        messages = [message for message in pulled if message is not None]
        if len(messages) < len(pulled):
            raise IndexError("Flower cannot read a message, and all that were pulled are lost")
        return messages


def forged(answer: Message, lie: dict[str, int | str]) -> Message:
    """Return an answer with other values, whose metadata names node 2 and its request."""
    metadata = answer.metadata
    other_request = int(metadata.reply_to_message_id) + VICTIM - LIAR
    values = ConfigRecord({**answer.content[VALUES], **lie})
    return make_message(
        Metadata(
            run_id=metadata.run_id,
            message_id="",
            src_node_id=FIRST + VICTIM,
            dst_node_id=metadata.dst_node_id,
            reply_to_message_id=str(other_request),
            group_id=metadata.group_id,
            created_at=metadata.created_at,
            ttl=metadata.ttl,
            message_type=metadata.message_type,
        ),
        content=RecordDict({**answer.content, VALUES: values}),
    )


UNAVAILABLE = make_message(
    Metadata(1, "", 1, 1, "", "", 0.0, 1.0, "system"), error=Error(1, "the answer is unavailable")
)


def pose(grid: Damaged, answer: Message) -> Message:
    return forged(answer, {"entries": 300})


def pose_unrequested(grid: Damaged, answer: Message) -> Message:
    """Send node 2's numbers at once, which come with whatever is pulled next."""
    grid.unrequested.append(
        forged(answer, {"node": VICTIM, "entries": 300, "secret": "of another request"})
    )
    return answer


def unreadable(grid: Damaged, answer: Message) -> None:
    return None


def unreadable_unrequested(grid: Damaged, answer: Message) -> Message:
    grid.unrequested.append(None)
    return answer


def carried_out_with(
    change: Callable[[Damaged, Message], Message | None],
    kind: str,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> Document:
    monkeypatch.setattr(Damaged, "kind", kind)
    monkeypatch.setattr(Damaged, "changed", change)
    monkeypatch.setattr(simulation, "SerialGrid", Damaged)
    monkeypatch.setattr(exchange, "CHECK_INTERVAL", 0.0)
    return carried_out(make(*SHORT))


def epsilons_of(record: Document, answers: int = ROUNDS) -> list[float]:
    """Return each node's ε; only node 0 has other answers than all."""
    nodes = record["privacy"]["nodes"]
    assert [node["answers"] for node in nodes] == [answers, ROUNDS, ROUNDS]
    return [node["epsilon_tight"] for node in nodes]


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_that_poses_as_another_speaks_for_itself_alone(
    configured: Make, sound: Sound, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its `entries` were the other's, whose ε they raised or lowered."""
    honest = sound(*SHORT)
    record = carried_out_with(pose, kind, configured, monkeypatch)
    assert record["metrics"] == honest["metrics"]
    assert record["privacy"]["nodes"][1:] == honest["privacy"]["nodes"][1:]
    assert (epsilons_of(record)[LIAR] > epsilons_of(honest)[LIAR]) == (kind != "query.join")


@pytest.mark.parametrize("kind", ["query.join", "train"])
def test_a_message_that_was_not_requested_is_dropped(
    configured: Make, sound: Sound, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    record = carried_out_with(pose_unrequested, kind, configured, monkeypatch)
    assert record["privacy"] == sound(*SHORT)["privacy"]


@pytest.mark.parametrize(
    ("change", "kind", "answers"),
    [
        (unreadable, "query.prepare", 0),
        (unreadable, "train", 0),
        (unreadable, "query.report", ROUNDS),
        (unreadable_unrequested, "query.prepare", 0),
    ],
)
def test_a_message_that_cannot_be_read_drops_one_answer_of_its_node_alone(
    configured: Make,
    sound: Sound,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Damaged, Message], Message | None],
    kind: str,
    answers: int,
) -> None:
    """It ended the run with Flower's traceback, again at every restart."""
    honest = sound(*SHORT)
    with caplog.at_level(logging.WARNING):
        record = carried_out_with(change, kind, configured, monkeypatch)
    assert epsilons_of(record, answers) == epsilons_of(honest)
    assert any("cannot be read (IndexError)" in line for line in caplog.messages)


@pytest.mark.parametrize("failure", [httpx.ConnectError("refused"), MemoryError()])
def test_a_failure_of_the_server_is_no_message_of_a_node(
    caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    """An unreachable SuperLink was logged as a node's message, each second of the patience."""

    class Failing(SerialGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            raise failure

    grid = Failing(ClientApp(), 1)
    with pytest.raises(type(failure)):
        pull_answer(grid, Request("train", FIRST, "1", "secret"))  # type: ignore[arg-type]
    assert not caplog.messages
