"""Over TLS: who is let in, who speaks for whom, and what happens to bad or late answers."""

from __future__ import annotations

import hashlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree

from tests.extras.federated.conftest import Make, node_keys
from tests.extras.federated.test_network import certificate
from tests.ports import free_port
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.flower import (
    FIRST,
    RUN,
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    RecordDict,
    identify,
)
from zdp_bench.extras.federated.messages import content, values_of
from zdp_bench.extras.federated.network import door, endpoint
from zdp_bench.extras.federated.network import supernode as node_end
from zdp_bench.extras.federated.network.superlink import LinkGrid, fleet_api
from zdp_bench.extras.federated.network.supernode import Link, Lost, Refused, connected


@dataclass
class Wire:
    """A server of two nodes, and the way to it."""

    grid: LinkGrid
    address: str
    chain: str
    keys: list[ec.EllipticCurvePrivateKey]
    key_files: str

    def joins(self, number: int, patience: float = 2.0) -> Any:
        return connected(self.address, self.chain, self.keys[number], patience)

    def plain(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def tls(self) -> ssl.SSLSocket:
        trusting = ssl.create_default_context(cafile=self.chain)
        return trusting.wrap_socket(self.plain(), server_hostname="127.0.0.1")

    def asks(self, number: int, kind: str = "query.report", **values: Any) -> str:
        (name,) = self.grid.push_messages([Message(content(values), FIRST + number, kind)])
        return name


@pytest.fixture
def wire(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Wire]:
    identify()
    monkeypatch.setattr(door, "_logged", {})
    chain, key = certificate(tmp_path, "server")
    file = node_keys(tmp_path, 2)
    keys = [
        serialization.load_ssh_private_key((tmp_path / f"node-{n}").read_bytes(), None)
        for n in range(2)
    ]
    public = [endpoint.public_pem(one.public_key()) for one in keys]  # type: ignore[arg-type,union-attr]
    port = free_port()
    with caplog.at_level(logging.WARNING), fleet_api("127.0.0.1", port, chain, key, public) as grid:
        yield Wire(grid, f"127.0.0.1:{port}", chain, keys, file)  # type: ignore[arg-type]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not any("\n" in line or "Traceback" in line for line in lines), lines
    assert not any(record.exc_info for record in caplog.records)
    return lines


def taken(link: Link) -> Message:
    """The message that waits for a node; there is one."""
    for _ in range(100):
        if message := link.receive():
            return message
    raise AssertionError("no message came")


def answers(wire: Wire, name: str, looks: int = 20) -> list[Message]:
    for _ in range(looks):
        if found := list(wire.grid.pull_messages([name])):
            return found
    return []


def envelope(link: Link, answer: Message) -> PushMessagesRequest:
    """A node's request that announces an answer and the pieces it is made of."""
    answer.metadata.__dict__["_message_id"] = answer.object_id
    bare = node_end.message_to_proto(node_end.remove_content_from_message(answer))
    return PushMessagesRequest(
        node=link.node,
        messages_list=[bare],
        message_object_trees=[node_end.get_object_tree(answer)],
    )


def push(link: Link, request: PushMessagesRequest, pieces: dict[str, bytes]) -> None:
    """Send an announced answer, piece by piece."""
    got = link._client.PushMessages(request)
    send = node_end.make_push_object_fn_protobuf(
        link._client.PushObject, link.node, RUN, got.session_id
    )
    for number in got.objects_to_push:
        send(number, pieces[number])


def pieces_of(whole: Any) -> dict[str, bytes]:
    return {number: one.deflate() for number, one in node_end.get_all_nested_objects(whole).items()}


def test_a_node_is_known_by_its_key_and_answers(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    assert list(wire.grid.get_node_ids()) == []
    with wire.joins(1) as link:
        assert list(wire.grid.get_node_ids()) == [FIRST + 1]
        name = wire.asks(1, hello=3)
        message = taken(link)
        assert values_of(message) == {"hello": 3}
        link.send(Message(content({"round": 7}), reply_to=message))
        (answer,) = answers(wire, name)
        assert values_of(answer) == {"round": 7}
        assert answer.metadata.src_node_id == FIRST + 1
    assert list(wire.grid.get_node_ids()) == []
    assert wire.grid.asked == {}
    assert len(wire.grid._state.object_store) == 0  # nothing is kept of what is answered
    assert told(caplog) == []


def test_a_stranger_is_refused_in_one_line(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with (
            pytest.raises(Refused) as refused,
            connected(wire.address, wire.chain, ec.generate_private_key(ec.SECP384R1()), 1.0),
        ):
            pass
        assert not refused.value.known
    assert list(wire.grid.get_node_ids()) == []
    assert told(caplog) == [
        "a client at 127.0.0.1: has no key of federated.node_keys, or another clock; it is refused"
    ]


def test_a_second_client_with_a_nodes_key_waits_until_the_first_is_gone(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    with wire.joins(0) as first:
        for _ in range(3):
            with pytest.raises(Refused) as refused, wire.joins(0):
                pass
            assert refused.value.known
        wire.asks(0, hello=1)
        assert values_of(taken(first)) == {"hello": 1}  # nothing was taken from it
    assert told(caplog) == [
        "node 0: a second client asks to be it; it is refused until the first is gone"
    ]
    with wire.joins(0):
        assert list(wire.grid.get_node_ids()) == [FIRST]


def test_a_node_cannot_answer_for_another(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    """It has a key of its own, and knows what the other was asked."""
    with wire.joins(0) as honest, wire.joins(1) as hostile:
        name = wire.asks(0, hello=1)
        message = taken(honest)
        forged = envelope(hostile, Message(content({"entries": 0}), reply_to=message))
        with pytest.raises(httpx.HTTPStatusError):  # Flower asks whose key it is, no more
            hostile._client.PushMessages(forged)
        honest.send(Message(content({"entries": 5}), reply_to=message))
        (answer,) = answers(wire, name)
        assert values_of(answer) == {"entries": 5}
    assert told(caplog) == ["node 1: an answer that is not its own, or not one; it is dropped"]


def test_the_name_inside_an_answer_has_no_say(wire: Wire) -> None:
    """The envelope is the node's own, and the letter in it says that it comes from another."""
    with wire.joins(0) as link:
        name = wire.asks(0, hello=1)
        message = taken(link)
        answer = Message(content({"entries": 0}), reply_to=message)
        answer.metadata.__dict__["_src_node_id"] = FIRST + 1
        answer.metadata.__dict__["_reply_to_message_id"] = "0" * 64
        request = envelope(link, answer)
        outside = request.messages_list[0].metadata
        outside.src_node_id, outside.reply_to_message_id = FIRST, name
        push(link, request, pieces_of(answer))
        (arrived,) = answers(wire, name)
        assert arrived.metadata.src_node_id == FIRST
        assert arrived.metadata.reply_to_message_id == name


def test_a_late_or_repeated_answer_is_dropped(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    with wire.joins(0) as link:
        asked = Message(content({"round": 0}), FIRST, "train")
        assert list(wire.grid.send_and_receive([asked], timeout=0.0)) == []
        assert link.receive() is None  # nor does the node begin what nobody waits for
        name = wire.asks(0, round=1)
        message = taken(link)
        for _ in range(3):
            link.send(Message(content({"round": 1}), reply_to=message))
        assert [values_of(answer) for answer in answers(wire, name)] == [{"round": 1}]
        link.send(Message(content({"round": 1}), reply_to=message))
        assert answers(wire, name, looks=3) == []
        asked = Message(content({"round": 2}), FIRST, "train")
        (name,) = wire.grid.push_messages([asked])
        link.send(
            Message(content({"round": 2}), reply_to=taken(link))
        )  # it comes, and nobody has looked when the time is up
        wire.grid._forget(name)
    assert "node 0: an answer that comes late, or in too many pieces; it is dropped" in told(caplog)
    assert len(wire.grid._state.object_store) == 0


@pytest.mark.parametrize("floats", [2**17, 2**24])
def test_an_answer_that_is_larger_than_its_question_is_dropped(
    wire: Wire, floats: int, caplog: pytest.LogCaptureFixture
) -> None:
    with wire.joins(0) as link:
        name = wire.asks(0, hello=1)
        letter = {
            "values": ConfigRecord({}),
            "arrays": ArrayRecord({"x": Array(np.zeros(floats, np.float32))}),
        }
        link.send(Message(RecordDict(letter), reply_to=taken(link)))
        is_read = floats < 2**20
        reasons = [answer.error.reason for answer in answers(wire, name)]
        assert reasons == (["its answer is too large"] if is_read else [])
        dropped = "an answer that comes late, or in too many pieces" in "".join(told(caplog))
        assert dropped != is_read


def test_a_request_of_any_size_is_not_read(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    url, kind = (
        f"https://{wire.address}/v1/fleet/push-object",
        {"content-type": "application/x-protobuf"},
    )
    with httpx.Client(verify=ssl.create_default_context(cafile=wire.chain)) as client:
        assert client.post(url, content=bytes(door.LARGEST + 1), headers=kind).status_code == 413
        assert (
            client.post(url, content=iter([b"x"] * 3), headers=kind).status_code == 413
        )  # no length is told
    with wire.tls() as raw:
        raw.sendall(
            b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        assert raw.recv(100).split()[1] in (b"413", b"400")
    assert told(caplog) == [
        f"a client at 127.0.0.1: a request of more than {door.LARGEST} bytes; it is dropped"
    ]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n", b"401"),
        (b"GET / HTTP/1.1\r\nX-Long: " + b"y" * 2**18, b"400"),
    ],
    ids=["body", "header"],
)
def test_nothing_of_a_stranger_s_request_is_waited_for(
    wire: Wire, sent: bytes, status: bytes
) -> None:
    """It is answered before its body comes, and without an end of what stands before it."""
    with wire.tls() as raw:
        with suppress(OSError):
            raw.sendall(sent)
        assert raw.recv(100).split()[1] == status


def is_closed(one: socket.socket, within: float) -> bool:
    one.settimeout(within)
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_strangers_hold_few_connections_and_not_for_long(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_UNAUTHENTICATED", 5)
    monkeypatch.setattr(door, "AUTH_TIMEOUT", 3.0)
    with ExitStack() as held, wire.joins(0) as link:
        strangers = [held.enter_context(wire.plain()) for _ in range(12)]
        assert all(is_closed(one, 2.0) for one in strangers[:7])  # the oldest, for newcomers
        assert not is_closed(strangers[-1], 0.1)
        name = wire.asks(0, hello=1)  # meanwhile a node is served
        link.send(Message(content({"round": 1}), reply_to=taken(link)))
        assert [values_of(answer) for answer in answers(wire, name)] == [{"round": 1}]
        assert all(is_closed(one, 10.0) for one in strangers)


def test_a_node_holds_few_connections_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_PER_NODE", 2)
    with ExitStack() as held, door.Door(socket.AF_INET) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        clients = []
        for _ in range(3):
            clients.append(held.enter_context(socket.create_connection(listening.getsockname())))
            held.enter_context(listening.accept()[0])
            listening.admit(clients[-1].getsockname()[:2], 0)
        assert [is_closed(one, 0.2) for one in clients] == [True, False, False]


BROKEN: dict[str, Callable[[PushMessagesRequest], None]] = {
    "no tree": lambda request: request.ClearField("message_object_trees"),
    "two": lambda request: request.messages_list.append(request.messages_list[0]),
    "no metadata": lambda request: request.messages_list[0].ClearField("metadata"),
    "another run": lambda request: setattr(request.messages_list[0].metadata, "run_id", 99),
    "no such question": lambda request: setattr(
        request.messages_list[0].metadata, "reply_to_message_id", "f" * 64
    ),
    "no number": lambda request: setattr(
        request.message_object_trees[0], "object_id", "not a digest"
    ),
    "many pieces": lambda request: request.message_object_trees[0].children.extend(
        [ObjectTree(object_id=f"{n:064x}") for n in range(100)]
    ),
    "for ever": lambda request: setattr(request.messages_list[0].metadata, "ttl", 1e300),
    "never": lambda request: setattr(request.messages_list[0].metadata, "ttl", float("nan")),
}


def test_a_broken_envelope_ends_nothing(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    with wire.joins(0) as link, wire.joins(1) as other:
        for case, break_it in BROKEN.items():
            name = wire.asks(0, hello=1)
            request = envelope(link, Message(content({"round": 1}), reply_to=taken(link)))
            break_it(request)
            with suppress(httpx.HTTPStatusError):
                link._client.PushMessages(request)
            assert all(found.has_error() for found in answers(wire, name, looks=3)), case
            second = wire.asks(1, hello=2)
            other.send(Message(content({"round": 2}), reply_to=taken(other)))
            assert [values_of(found) for found in answers(wire, second)] == [{"round": 2}], case
    told(caplog)


def test_content_that_cannot_be_read_is_an_error_of_that_node(wire: Wire) -> None:
    """Every piece has the right digest and head, but the whole is an Array, not a content."""
    with wire.joins(0) as link:
        name = wire.asks(0, hello=1)
        answer = Message(content({"round": 1}), reply_to=taken(link))
        array = Array(np.zeros(2, np.float32))
        pieces = pieces_of(answer)
        head = pieces[answer.object_id]
        (inner,) = [number.encode() for number in pieces if number.encode() in head]
        wrong = head.replace(inner, array.object_id.encode())
        root = hashlib.sha256(wrong).hexdigest()
        answer.metadata.__dict__["_message_id"] = root
        bare = node_end.message_to_proto(node_end.remove_content_from_message(answer))
        tree = ObjectTree(object_id=root, children=[node_end.get_object_tree(array)])
        request = PushMessagesRequest(
            node=link.node, messages_list=[bare], message_object_trees=[tree]
        )
        push(link, request, pieces_of(array) | {root: wrong})
        (arrived,) = answers(wire, name)
        assert arrived.error.reason.startswith("its answer cannot be read")


def test_a_node_outlives_a_server_that_is_started_anew(wire: Wire, tmp_path: Path) -> None:
    """Its number is the same there, so it goes on; where its key is known no more, it is told."""
    with wire.joins(1) as link:
        assert link.node.node_id == FIRST + 1
        state = wire.grid._state
        del state.node_public_key_to_node_id[endpoint.public_pem(wire.keys[1].public_key())]
        with pytest.raises(Lost):
            link.receive()


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (lambda lines: [lines[0], lines[0]], "holds one key twice: each node needs its own"),
        (lambda lines: [lines[0], b"nonsense"], "key 1: not a public key"),
        (lambda lines: [], "holds 0 keys"),
    ],
)
def test_a_wrong_file_of_keys_is_one_sentence(
    configured: Make, tmp_path: Path, lines: Callable[[list[bytes]], list[bytes]], sentence: str
) -> None:
    file = Path(node_keys(tmp_path, 2))
    right = configured("federated.nodes=2", f"federated.node_keys={file}")
    assert len(endpoint.node_keys(right)) == 2
    file.write_bytes(b"\n".join(lines(file.read_bytes().splitlines())))
    with pytest.raises(UserError) as caught:
        endpoint.node_keys(right)
    assert sentence in str(caught.value)
    wrong = configured("federated.nodes=2", f"federated.node_key={file}")
    with pytest.raises(UserError, match="not a private key without a password"):
        endpoint.node_key(wrong)
