"""The server trusts only its own count: clients that lie, come twice or pose as others."""

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from hypothesis import given
from hypothesis import strategies as some

from tests.extras.federated.conftest import Make, Sound, carried_out, change_answers
from tests.ledgers import steps_in
from zdp_bench.errors import UserError
from zdp_bench.extras.federated import node, simulation
from zdp_bench.extras.federated.exchange import Request
from zdp_bench.extras.federated.messages import SECRET, VALUES, Malformed, content, values_of
from zdp_bench.extras.federated.node import SEE_LOG
from zdp_bench.extras.federated.roster import Roster, Standing, check_counts, digest_of_key
from zdp_bench.extras.federated.server import gather_nodes, missing_message
from zdp_bench.extras.federated.simulation import FIRST, set_sender
from zdp_bench.records import Document

Change = Callable[[Message, Message, int], Message]
LIAR = 1


def lying(monkeypatch: pytest.MonkeyPatch, change: Change, who: int = LIAR) -> None:
    """Pass node 1's answers through `change(asked, answer, how many of this kind before)`."""
    counts = dict[str, int]()

    def count(asked: Message, answer: Message) -> Message:
        kind = asked.metadata.message_type
        counts[kind] = counts.get(kind, -1) + 1
        return change(asked, answer, counts[kind])

    change_answers(monkeypatch, count, who)


def change_values(**values: Any) -> Change:
    def change(asked: Message, answer: Message, count: int) -> Message:
        for name in values.keys() & answer.content[VALUES].keys():
            answer.content[VALUES][name] = values[name]
        return answer

    return change


def told_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [entry for entry in caplog.records if entry.name.startswith("zdp_bench.extras.federated")]
    lines = [entry.getMessage() for entry in own]
    assert not any("\n" in line for line in lines)
    return lines


def of_nodes(record: Document, key: str) -> list[Any]:
    return [node[key] for node in record["privacy"]["nodes"]]


def epsilons(record: Document) -> dict[str, float]:
    return {key: value for key, value in record["privacy"].items() if key.startswith("epsilon_")}


def test_a_client_that_reports_too_few_steps_is_counted_all_that_the_server_used(
    configured: Make, sound: Sound, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["federated.nodes=3", "federated.local_steps=2", "privacy.claimed_epsilon=2.0"]
    honest = sound(*own)
    assert (honest["federation"]["rounds"], honest["privacy"]["steps"]) == (4, 8)

    def fewer(asked: Message, answer: Message, count: int) -> Message:
        entries = min(answer.content[VALUES].get("entries", 0), 3)
        return change_values(entries=entries, before=0, left=-1)(asked, answer, count)

    lying(monkeypatch, fewer)
    record = carried_out(configured(*own))
    assert of_nodes(record, "answers") == [4, 4, 4]
    assert of_nodes(record, "steps") == [8, 8, 8]
    assert of_nodes(record, "unconfirmed")[LIAR] == 8 - 3
    assert of_nodes(record, "epsilon_tight") == of_nodes(honest, "epsilon_tight")
    assert epsilons(record) == epsilons(honest)
    assert record["epochs"] == honest["epochs"]


def test_a_clients_word_raises_the_count_and_takes_nothing_back(
    configured: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(asked: Message, answer: Message, count: int) -> Message:
        if asked.metadata.message_type == "train" and count == 2:
            answer.content[VALUES]["entries"] = 13  # three had been asked for
        return answer

    lying(monkeypatch, once)
    record = carried_out(configured("federated.nodes=3"))
    assert of_nodes(record, "steps") == [8, 8 + 10, 8]
    assert record["privacy"]["steps"] == 18
    epsilon = of_nodes(record, "epsilon_tight")
    assert record["privacy"]["epsilon_tight"] == epsilon[1] > epsilon[0]


def test_a_budget_is_the_servers_count_too(
    configured: Make, sound: Sound, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["federated.nodes=1", "privacy.max_epsilon=1.5", "trainer.epochs=6"]
    honest = sound(*own)
    lying(monkeypatch, change_values(entries=0, before=0, left=10**6), who=0)
    record = carried_out(configured(*own))
    assert record["stopped_by"] == honest["stopped_by"] == "budget"
    assert record["privacy"]["steps"] == honest["privacy"]["steps"]
    assert 0 < record["privacy"]["steps"] < 24
    assert record["privacy"]["epsilon_tight"] <= 1.5
    assert epsilons(record) == epsilons(honest)
    assert record["epochs"][0]["epsilon_tight"] == honest["epochs"][0]["epsilon_tight"] > 0


@given(
    some.lists(
        some.tuples(some.integers(0, 3), some.one_of(some.none(), some.integers(0, 100))),
        max_size=20,
    )
)
def test_a_count_never_falls_and_never_is_below_what_was_asked_for(
    events: list[tuple[int, int | None]],
) -> None:
    """Whatever is asked for and whatever a node says of it, in whatever order."""
    standing, asked, last = Standing(10, 1), 0, 0
    for more, entries in events:
        asked += more
        if entries is not None:
            standing = standing.note_ledger(entries, "d", asked)
        assert standing.spent(asked) >= max(asked, entries or 0, last)
        last = standing.spent(asked)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_round_asked_for_again_counts_again_for_a_node_that_does_not_answer(
    configured: Make, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """The node was restarted on another machine, so what it released again was a new release."""

    class Killed(BaseException):
        pass

    again = 7

    def until_killed(asked: Message, answer: Message) -> Message:
        if asked.metadata.message_type == "train" and values_of(asked)["round"] == again:
            raise Killed
        return answer

    kinds = list[str]()

    def lost(asked: Message, answer: Message) -> Message:
        kinds.append(asked.metadata.message_type)
        if kinds[-1] == "train" or ("train" in kinds and not comes_back):
            raise ConnectionError
        return answer

    config = configured("federated.nodes=3", "federated.min_nodes=2")
    change_answers(monkeypatch, until_killed, who=LIAR)
    with pytest.raises(Killed):
        carried_out(config)
    change_answers(monkeypatch, lost, who=LIAR)
    monkeypatch.setattr(node, "execution_digest", lambda *_, **__: "another machine")
    record = carried_out(config)
    (ledger,) = config.results.glob(f"runs/*/*/nodes/{LIAR:02d}/ledger.jsonl")
    assert of_nodes(record, "steps")[LIAR] >= len(steps_in(ledger))
    assert of_nodes(record, "steps") == [8 + 1, 8 + 1, 8]  # node 2 was not asked before
    assert of_nodes(record, "unconfirmed") == [0, 0 if comes_back else 1, 0]


def test_a_repeat_counts_until_the_node_states_its_ledger(configured: Make) -> None:
    known = {number: asdict(Standing(20, 1, entries=3)) for number in range(2)}
    roster = Roster(None, configured("federated.nodes=2"), {}, None, known)  # type: ignore[arg-type]
    roster.prepare("run", 8, {})
    roster.requested_rounds, roster.present = 3, {LIAR: FIRST}
    roster._pending = {FIRST + 1: Request("query.prepare", FIRST + 1, "0", "secret")}
    for repeats in (1, 2):
        roster.count_repeat()
        assert (roster.spent(0), roster.spent(LIAR)) == (3, 3 + repeats)
    assert not roster._pending  # its report would be from before the repeat
    saved = Roster(None, configured("federated.nodes=2"), {}, None, roster.saved())  # type: ignore[arg-type]
    assert saved.standings == roster.standings
    for entries, spent in ((2, 3 + 2), (4, 3 + 1), (3, 3 + 1)):
        roster.note_ledger(LIAR, {"entries": entries, "digest": "d"})
        assert roster.spent(LIAR) == spent


@pytest.mark.parametrize("allowed", [3, 4, 9])
def test_a_repeat_is_within_the_budget_at_which_its_node_stops(
    configured: Make, allowed: int
) -> None:
    known = {0: asdict(Standing(20, 1, entries=3))}
    roster = Roster(None, configured("federated.nodes=1"), {}, None, known)  # type: ignore[arg-type]
    roster.affordable_steps = lambda _, steps: min(steps, allowed)
    roster.requested_rounds, roster.present = 3, {0: FIRST}
    for repeats in (1, 2):
        roster.count_repeat()
        assert roster.spent(0) == min(3 + repeats, allowed)
        assert roster.spent(0, rounds=9) == 9


def test_a_node_that_missed_its_last_answer_states_its_ledger_when_it_prepares(
    configured: Make, sound: Sound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget of exactly these rounds, the run ended a round early, above its budget."""
    is_lost = True

    def lose(asked: Message, answer: Message) -> Message:
        is_round = asked.metadata.message_type == "train"
        if is_round and values_of(asked)["round"] == last_round and is_lost:
            raise ConnectionError
        return answer

    own, last_round = "federated.nodes=3", 7
    epsilon = sound(own)["privacy"]["epsilon_tight"]
    config = configured(own, f"privacy.max_epsilon={epsilon}")
    change_answers(monkeypatch, lose, who=LIAR)
    for _ in range(3):
        with pytest.raises(UserError, match="too few nodes answered"):
            carried_out(config)
    is_lost = False
    record = carried_out(config)
    assert record["stopped_by"] == "epochs"
    assert of_nodes(record, "steps") == [8, 8, 8]
    assert record["privacy"]["epsilon_tight"] <= epsilon


# who is who


TOLD = {"node": LIAR, "records": 10, "examples_per_patient": 1}
SAME = {"experiment": "e", "seed": 1, "data": "d"}


class Clients:
    """Flower's grid: clients that connect when the server has looked a number of times."""

    def __init__(self, number_of: dict[int, int | None], joins_at: dict[int, int]) -> None:
        """Take each client's number, or None if it fails, and when it connects if not at once."""
        self.number_of, self.joins_at = number_of, joins_at
        self.looks = 0
        self.answers: dict[str, Message] = {}

    def get_nodes(self) -> list[NodeInfo]:
        self.looks += 1
        return [
            NodeInfo(node_id=client, public_key=KEYS.get(client, b""))
            for client in self.number_of
            if self.looks > self.joins_at.get(client, 0)
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            message_id = str(len(self.answers))
            message.metadata.__dict__["_message_id"] = message_id
            number = self.number_of[message.metadata.dst_node_id]
            values = TOLD | {"node": number, SECRET: values_of(message)[SECRET]}
            body = Error(1, "it fails") if number is None else content(values)
            self.answers[message_id] = Message(body, reply_to=message)
            yield message_id

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.answers[message_id] for message_id in message_ids]


KEYS = {12: b"key of node 2", 22: b"key of node 2"}  # Flower gave the key a new id
LATE = {12: 9}  # node 2 connects when the server looks for the tenth time


@pytest.mark.parametrize(
    ("number_of", "joins_at", "is_complete", "looks"),
    [
        ({10: 0, 11: 1, 12: 2}, LATE, True, 10),
        ({10: 0, 11: 1, 99: 7, 12: 2}, LATE, True, 10),  # a client too many
        ({10: 0, 11: 1, 98: 7, 99: 8, 12: 2}, LATE, True, 10),
        ({10: 0, 11: 1, 99: None}, {}, False, 1),  # whose number is not known: it may be node 2
        ({10: 0, 11: None, 99: 7, 12: None}, {}, False, 1),
        ({10: 0, 11: None, 99: 7, 12: 2}, LATE, False, 10),
    ],
)
def test_the_server_waits_for_each_node_that_may_still_come(
    configured: Make,
    monkeypatch: pytest.MonkeyPatch,
    number_of: dict[int, int | None],
    joins_at: dict[int, int],
    is_complete: bool,
    looks: int,
) -> None:
    """A client too many that it refused passed for one of the nodes."""
    set_sender()
    monkeypatch.setattr("zdp_bench.extras.federated.roster.POLL_INTERVAL", 0.0)
    clients = Clients(number_of, joins_at)
    roster = Roster(clients, configured("federated.nodes=3"), {}, None, {})  # type: ignore[arg-type]
    assert roster.wait_for(3, 60.0, lambda: 0) == is_complete
    assert clients.looks == looks


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"node": 99}, "federated.nodes=3 has no such node"),
        ({"node": "1"}, "has node of type str"),
        ({"records": 0}, "does not have the patients that the server assigned to it"),
        ({"examples_per_patient": 0}, "has no records"),
        ({"experiment": "other"}, "its experiment differs from the server's"),
        ({"seed": 7}, "its seed differs from the server's"),
        ({"data": "other"}, "its data differs from the server's"),
    ],
)
def test_a_node_that_joins_as_something_else_is_refused(
    configured: Make, caplog: pytest.LogCaptureFixture, values: dict[str, Any], sentence: str
) -> None:
    set_sender()
    address = FIRST + LIAR
    grid = simulation.SerialGrid(None, 0)  # type: ignore[arg-type]
    roster = Roster(grid, configured("federated.nodes=3"), SAME, [10] * 3, {})
    roster._connected = {address: NodeInfo(node_id=address)}
    for announcement, present in ((TOLD | SAME | values, []), (TOLD | SAME, [LIAR])):
        answer = Message(
            content(announcement), reply_to=Message(content({}), address, "query.join")
        )
        roster._admit("query.join", address, answer)
        assert list(roster.present) == present
    (line,) = told_by(caplog)
    assert sentence in line
    assert line.endswith("; it is refused")


def test_a_node_that_joins_again_raises_what_is_known_of_it_or_is_refused(
    configured: Make, caplog: pytest.LogCaptureFixture
) -> None:
    set_sender()
    client = NodeInfo(node_id=FIRST)
    key = digest_of_key(client)
    known = {LIAR: asdict(Standing(10, 2, entries=4, excess=1, key=key))}
    grid = simulation.SerialGrid(None, 0)  # type: ignore[arg-type]
    for records, examples, is_present, most in ((10, 1, 1, 2), (10, 5, 1, 5), (12, 9, 0, 2)):
        roster = Roster(grid, configured("federated.nodes=3"), {}, None, known)
        roster._connected = {FIRST: client}
        announcement = TOLD | {"records": records, "examples_per_patient": examples}
        answer = Message(content(announcement), reply_to=Message(content({}), FIRST, "query.join"))
        roster._admit("query.join", FIRST, answer)
        assert len(roster.present) == is_present
        expected = Standing(10, most, entries=4, excess=1, key=key)
        assert roster.standings[LIAR] == expected
    (line,) = told_by(caplog)
    assert "samples from 12 records, but from 10 when it first joined" in line


BATCHES = ("trainer.sample_rate=null", "trainer.batch_size=32")


@pytest.mark.parametrize(
    ("overrides", "records", "examples", "reason"),
    [
        ((), 10**9, 10**9, "has 1,000,000,000 examples of one patient, more than 1,000: use priv"),
        ((), 10**9, 1000, None),
        ((), 999, 10**9, None),  # no patient has more examples than the node
        (("privacy.unit=patient",), 10**9, 10**9, None),
        (BATCHES, 31, 1, "has only 31 examples, fewer than trainer.batch_size=32"),
        (BATCHES, 32, 1, None),
        (BATCHES, 10**9, 1, "the run would take 62,500,000 rounds, more than 1,000,000"),
        (("trainer.sample_rate=1e-7",), 10**9, 1, "the run would take 20,000,000 rounds"),
    ],
)
def test_a_node_whose_counts_no_run_can_have_is_refused_as_it_joins(
    configured: Make, overrides: tuple[str, ...], records: int, examples: int, reason: str | None
) -> None:
    """All rounds ran before their accounting hung; a small node ended the run as the server's."""
    config = configured("federated.nodes=3", *overrides)
    if reason is None:
        check_counts(config, records, examples)
    else:
        with pytest.raises(Malformed, match=re.escape(reason)):
            check_counts(config, records, examples)


def test_a_node_that_is_too_small_is_named(
    configured: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence was about the server's training set."""
    set_sender()
    monkeypatch.setitem(TOLD, "records", 31)
    clients = Clients({10: 0}, {})
    roster = Roster(clients, configured("federated.nodes=1", *BATCHES), {}, None, {})  # type: ignore[arg-type]
    assert not roster.wait_for(1, 60.0, lambda: 0)
    (refusal,) = roster.list_refusals()
    assert str(refusal) == "node 0: has only 31 examples, fewer than trainer.batch_size=32"


def test_a_round_without_enough_answers_names_every_refused_node(configured: Make) -> None:
    """One that was refused before its number was known was left out."""
    set_sender()
    config = configured("federated.nodes=4")
    roster = Roster(Clients({10: 0, 99: None}, {}), config, {}, None, {})  # type: ignore[arg-type]
    roster.meet()
    message = missing_message(roster, {2: "its release is too large"})
    assert (
        "(a node that joins: it fails; node 2: its release is too large; no answer from node 1, 3)"
    ) in message


def test_a_number_belongs_to_the_key_that_joined_with_it_first(
    configured: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The last to join was used, and the two took the number from one another for ever."""
    set_sender()
    config = configured("federated.nodes=3")
    clients = Clients({10: 0, 11: 1, 12: 2}, {})
    roster = Roster(clients, config, {}, None, {})  # type: ignore[arg-type]
    roster.meet()
    clients.number_of = {10: 0, 12: 2}  # client 11 leaves
    roster.meet()
    clients.number_of = {10: 0, 11: 2, 12: 2}  # and comes back as node 2
    for _ in range(3):
        roster.meet()
    assert roster.present == {0: 10, 2: 12}
    (line,) = told_by(caplog)
    assert line.startswith("node 2: its key is not the one with which node 2 first joined: start ")
    resumed = Roster(clients, config, {}, None, roster.saved())  # type: ignore[arg-type]
    clients.number_of = {10: 0, 11: 2, 22: 2}
    resumed.meet()
    assert resumed.present == {0: 10, 2: 22}


def test_a_key_frees_its_earlier_number_until_the_run_is_planned(
    configured: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A site that was started once with a wrong partition-id kept another site's number."""
    set_sender()
    config = configured("federated.nodes=3")
    clients = Clients({10: 1}, {})
    roster = Roster(clients, config, {}, None, {})  # type: ignore[arg-type]
    roster.meet()
    clients.number_of = {12: 2}
    roster.meet()
    monkeypatch.setitem(TOLD, "records", 12)  # the numbers may have different counts
    clients.number_of = {10: 0, 11: 1, 12: 2}
    roster.meet()
    assert roster.present == {0: 10, 1: 11, 2: 12}
    assert not told_by(caplog)
    resumed = Roster(clients, config, {}, None, roster.saved())  # type: ignore[arg-type]
    clients.number_of = {10: 1}
    resumed.meet()
    (line,) = told_by(caplog)
    assert "node 1: its key joined as node 0 before: start its SuperNode with part" in line
    assert resumed.standings == roster.standings


@pytest.mark.parametrize(("seconds", "is_warned"), [(0.02, True), (20.0, False)])
def test_a_supernode_that_flower_gave_a_key_is_warned_as_it_first_joins(
    configured: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
    is_warned: bool,
) -> None:
    """Its key is lost as it ends, so its number was refused for good, without a word before."""
    set_sender()
    registered = datetime(2026, 1, 1, tzinfo=UTC)
    connected = registered + timedelta(seconds=seconds)
    client = NodeInfo(
        node_id=12,
        public_key=b"drawn at the start",
        registered_at=registered.isoformat(),
        last_activated_at=connected.isoformat(),
    )
    clients = Clients({12: 2}, {})
    monkeypatch.setattr(clients, "get_nodes", lambda: [client])
    roster = Roster(clients, configured("federated.nodes=3"), {}, None, {})  # type: ignore[arg-type]
    for _ in range(2):
        roster.meet()
        assert roster.present == {2: 12}
        roster.present = {}  # so that it joins again
    lines = told_by(caplog)
    assert len(lines) == int(is_warned)
    assert all("node 2: its SuperNode has no key of its own, so it" in line for line in lines)


def test_a_node_of_an_earlier_version_is_told_so(
    configured: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It repeats no secret, and Flower's words for a lost answer were all that was said."""
    set_sender()
    clients = Clients({10: 0}, {})
    lost = Error(ErrorCode.MESSAGE_UNAVAILABLE, "it may have expired")
    pulled: list[Message] = []

    def pull(message_ids: Iterable[str]) -> list[Message]:
        """Return the answer once, and then Flower's error, as Flower does."""
        answers = [clients.answers[message_id] for message_id in message_ids]
        if pulled:
            return [Message(lost, reply_to=Message(content({}), 10, "query.join"))]
        for answer in answers:
            del answer.content[VALUES][SECRET]
        pulled.extend(answers)
        return answers

    monkeypatch.setattr(clients, "pull_messages", pull)
    config = configured("federated.nodes=1")
    data = SimpleNamespace(train=range(10), digest="d")
    monkeypatch.setattr("zdp_bench.extras.federated.server.split_by_patient", lambda *_: [])
    context = SimpleNamespace(config=config, data=data, asked_to_stop=lambda: 0)
    with pytest.raises(UserError, match="a node that joins: no valid answer came; both need the"):
        gather_nodes(clients, context, {})  # type: ignore[arg-type]


def test_a_node_that_comes_back_as_something_else_is_missed_and_the_run_goes_on(
    configured: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured("federated.nodes=3", "federated.min_nodes=2")

    def later(asked: Message, answer: Message, count: int) -> Message:
        kind = asked.metadata.message_type
        if kind == "train" and count == 2:
            raise ConnectionError("the node's machine is gone")
        is_later_join = kind == "query.join" and count
        return change_values(seed=7)(asked, answer, count) if is_later_join else answer

    lying(monkeypatch, later)
    with caplog.at_level(logging.WARNING):
        record = carried_out(config)
    assert of_nodes(record, "answers") == [8, 2, 8]
    assert of_nodes(record, "steps") == [8, 8, 8]
    lines = told_by(caplog)
    assert len(lines) == 3, lines
    assert "ConnectionError: the node's machine is gone" in lines[0]  # in the node's log
    assert f"{SEE_LOG}; it is dropped" in lines[1]
    assert "its seed differs from the server's" in lines[2]

    # from its first word on: without its size there is no plan
    lying(monkeypatch, change_values(seed=7))
    with pytest.raises(UserError, match="only 2 of 3 nodes joined"):
        carried_out(configured("federated.nodes=3", "federated.min_nodes=2", results="never"))


def test_a_node_that_refuses_to_prepare_is_missed_and_a_run_that_goes_on_goes_on(
    configured: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lying(monkeypatch, change_values(mechanism="other"))
    with caplog.at_level(logging.WARNING):
        record = carried_out(configured("federated.nodes=3", "federated.min_nodes=2"))
    assert of_nodes(record, "answers") == [8, 0, 8]
    (line,) = told_by(caplog)
    assert "node 1: its mechanism differs" in line
    with pytest.raises(UserError, match="node 1: its mechanism"):
        carried_out(configured("federated.nodes=3", results="all"))
