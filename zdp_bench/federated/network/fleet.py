"""All that is taken from Flower's private modules: the server's end of a connection, a node's end, and who speaks.

Why not `flower-superlink` and `flower-supernode` as they are shipped (1.41): a SuperNode fetches the app's code from the server,
which no hospital should run, and starts a process for every message, which would load torch anew for each private step. Its
SuperLink takes an answer of any size, and lets a node with a key of its own answer in the name of another. So this file puts
Flower's own parts together in one process: on the server its Fleet API over TLS, its state and its node authentication; at a site
its HTTP client with its signatures. What Flower does not check is checked here: who speaks, how much, and that a node has one
client. Flower may move these parts in any release, so pyproject.toml holds to 1.41.
"""

from __future__ import annotations

# Before anything of Flower's: it turns the telemetry off.
from zdp_bench.federated.flower import FIRST, SERVER, Error, Grid, Message, RecordDict

# isort: split
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import Depends, FastAPI, HTTPException, Request
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.task_pb2 import Task, TaskStatus
from flwr.server.superlink.linkstate import InMemoryLinkState, LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, NodeStatus
from flwr.supercore.error import http_error_translator
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStoreFactory
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router as fleet
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from zdp_bench.errors import UserError
from zdp_bench.federated.client import CRASHED
from zdp_bench.federated.network.endpoint import public_pem

__all__ = ["FlowerRun", "Link", "LinkGrid", "Lost", "Refused", "connected", "fleet_api", "identify"]

RUN, TASK = 1, 1  # Flower's numbers of the one run that a server conducts
PAUSE = 0.05  # seconds between two looks for messages
GOODBYE = 10.0  # seconds until a server gives up on its own thread
BEAT = 10  # seconds: a node is held to be gone after twice that without a sign, and tells of itself four times in between
LARGEST = 32 * 2**20  # bytes of one request; Flower sends tensors in pieces of 20 MiB
MORE = (
    2**16
)  # bytes by which an answer may be longer than its question: what a node says of its ledger, and headers
PIECES = 4  # objects that it may have more
MINUTE = 60.0  # seconds in which the log says the same of the same client once

log = logging.getLogger(__name__)
_said: dict[tuple[str, str], float] = {}  # who and what -> when the log said it
Answer = TypeVar("Answer")


def identify(run: int = RUN) -> None:
    """Say who speaks: Flower's messages carry the run's number, and the server's."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, SERVER, TASK


def _say(who: str, what: str) -> None:
    """Say it in the log, in one line; what a client does again and again fills no disk."""
    now = time.monotonic()
    if now - _said.get((who, what), -MINUTE) >= MINUTE:
        _said[who, what] = now
        log.warning("%s: %s", who, what)


# -------------------------------------------------------------------------------------------------------------- the server


@contextmanager
def fleet_api(
    host: str, port: int, certificate: str, key: str, keys: Sequence[bytes]
) -> Iterator[LinkGrid]:
    """Within, Flower's Fleet API is served over TLS; yields the grid of the nodes that join.

    Args:
        keys: of each node, in the order of their numbers, its public key (PEM); nobody else is let in.

    Raises:
        UserError: the port is taken, or the host is not this machine's.
    """
    factory = LinkStateFactory(
        FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
    )
    state = cast(InMemoryLinkState, factory.state())
    run = FlowerRun.create_empty(RUN)
    run.primary_task_id, run.federation_id = TASK, NOOP_FEDERATION_ID
    state.run_ids[RUN] = RunRecord(run=run)
    state.task_store[TASK] = Task(task_id=TASK, run_id=RUN, status=TaskStatus(status="running"))
    for number, public in enumerate(keys):
        _register(state, FIRST + number, public)
    grid = LinkGrid(state)
    layers = [Middleware(Limit), Middleware(BaseHTTPMiddleware, dispatch=http_error_translator)]
    layers += [Middleware(ProtobufTranslationMiddleware), Middleware(NodeAuthMiddleware)]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=layers)
    app.state.linkstate_factory, app.state.enable_supernode_auth = factory, True

    async def check(request: Request) -> None:
        _check(grid, state, getattr(request.state, "protobuf_request", None))

    app.include_router(fleet, dependencies=[Depends(check)])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise UserError(
                f"federated.address={host}:{port}: cannot listen there: {error.strerror or error}."
            ) from None
        settings = uvicorn.Config(
            app,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            log_level="error",
            access_log=False,
            ws="none",
        )
        server = uvicorn.Server(settings)
        thread = threading.Thread(
            target=server.run, args=([listener],), name="fleet-api", daemon=True
        )
        thread.start()
        try:
            while thread.is_alive() and not server.started:
                time.sleep(PAUSE)
            if not server.started:
                raise UserError(
                    f"federated.address={host}:{port}: the Fleet API did not start; its own words are above."
                )
            yield grid
        finally:
            server.should_exit = True
            thread.join(timeout=GOODBYE)


def _register(state: InMemoryLinkState, node: int, public: bytes) -> None:
    """Do what `flwr supernode register` does, under a number of ours: then a client outlives a server that is started anew."""
    drawn = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, BEAT)
    info = state.nodes.pop(drawn)
    info.node_id = node
    state.nodes[node] = info
    state.node_public_key_to_node_id[public] = node
    state.owner_to_node_ids[NOOP_FLWR_AID] = set(state.nodes)


class Limit:
    """Refuse a request of more bytes than any node needs before it is read, and tell of whoever has no key of this run."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        who = f"a client at {scope['client'][0]}" if scope.get("client") else "a client"
        headers = dict(scope["headers"])
        length = (
            b"" if b"transfer-encoding" in headers else headers.get(b"content-length", b"")
        )  # in chunks: of any length
        if not length.isdigit() or len(length) > 12 or int(length) > LARGEST:
            _say(who, f"a request of more than {LARGEST} bytes; it is dropped")
            await JSONResponse({"detail": "too large"}, status_code=413)(scope, receive, send)
            return

        async def told(message: Any) -> None:
            if message.get("status") == 401:
                _say(who, "has no key of federated.node_keys, or another clock; it is refused")
            await send(message)

        await self._app(scope, receive, told)


def _check(grid: LinkGrid, state: InMemoryLinkState, asked: Any) -> None:
    """Check what Flower leaves open once it knows whose key signed a request: the node speaks for itself alone, and not too much.

    Raises:
        HTTPException: it does not; the client gets the status.
    """
    if isinstance(asked, ActivateNodeRequest):
        node = state.get_node_id_by_public_key(asked.public_key)
        if node is None:
            raise HTTPException(401, "unknown key")
        if state.get_node_info(node_ids=[node])[0].status == NodeStatus.ONLINE:
            _say(
                f"node {node - FIRST}",
                "a second client asks to be it; it is refused until the first is gone",
            )
            raise HTTPException(409, "the node has a live client")
    elif isinstance(asked, PushMessagesRequest):
        node, whose = asked.node.node_id, {m.metadata.src_node_id for m in asked.messages_list}
        roots = [m.metadata.message_id for m in asked.messages_list]
        to = asked.messages_list[0].metadata.reply_to_message_id if roots else ""
        if (
            whose != {node}
            or len(roots) != 1
            or roots != [tree.object_id for tree in asked.message_object_trees]
        ):
            _say(f"node {node - FIRST}", "an answer that is not its own, or not one; it is dropped")
            raise HTTPException(400, "not one answer of this node")
        pieces = sum(1 for _ in iterate_object_tree(asked.message_object_trees[0]))
        if pieces > grid.asked.get(to, (0, 0))[0]:
            _say(
                f"node {node - FIRST}",
                "an answer that comes late, or in too many pieces; it is dropped",
            )
            raise HTTPException(410, "late or too large")
    elif isinstance(asked, ConfirmMessageReceivedRequest):
        message = state.message_ins_store.get(asked.message_object_id)
        if message is None or message.metadata.dst_node_id != asked.node.node_id:
            raise HTTPException(400, "not a message to this node")


class LinkGrid(Grid):
    """A grid on the state of a SuperLink in this process: what Flower's HttpGrid does with a SuperLink in another.

    Attributes:
        asked: of every message that waits for its answer: how many objects and bytes the answer may have.
    """

    def __init__(self, state: InMemoryLinkState) -> None:
        self._state = state
        self._sent: dict[
            str, Message
        ] = {}  # without their content, to answer for nodes that do not
        self._arriving: dict[
            str, Message
        ] = {}  # answers whose content is not here yet, by what they answer
        self.asked: dict[str, tuple[int, int]] = {}

    def set_run(self, run: FlowerRun) -> None:
        raise NotImplementedError("a server conducts one run")

    @property
    def run(self) -> FlowerRun:
        return self._state.get_run_info(run_ids=[RUN])[0]

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self._state.get_nodes(RUN))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = []
        for message in messages:
            session = self._state.start_session(RUN)  # it ends with the last of a message's objects
            with no_object_id_recompute():
                name = message.metadata.__dict__["_message_id"] = message.object_id
                objects = get_all_nested_objects(message)
                bare = remove_content_from_message(message) if message.has_content() else message
                pieces = {number: one.deflate() for number, one in objects.items()}
                self.asked[name] = len(pieces) + PIECES, sum(map(len, pieces.values())) + MORE
                self._sent[name] = bare
                stored, missing = self._state.store_message_and_object_tree(
                    bare, get_object_tree(message), session
                )
                for number in missing:
                    self._state.store_object(RUN, session, number, pieces[number])
            if stored:
                pushed.append(name)
            else:
                self._forget(name)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = [name for name in message_ids if name in self._sent]
        if new := {name for name in wanted if name not in self._arriving}:
            for answer in self._state.get_message_res(message_ids=new, run_id=RUN):
                self._arriving[answer.metadata.reply_to_message_id] = answer
        found = {name: self._whole(name) for name in wanted if name in self._arriving}
        whole = {name: answer for name, answer in found.items() if answer}
        for name in whole:
            self._forget(name)
        return list(whole.values())

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        waiting, answers = set(self.push_messages(messages)), list[Message]()
        until = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while waiting and time.monotonic() < until:
            found = list(self.pull_messages(waiting))
            answers += found
            waiting -= {answer.metadata.reply_to_message_id for answer in found}
            if waiting:
                time.sleep(PAUSE)
        for name in waiting:
            self._forget(name)
        return answers

    def _whole(self, asked: str) -> Message | None:
        """The answer with its content, which follows it in pieces: None while they arrive, an Error where they never will.

        Nothing waits here: a node that dies between two pieces must not keep the others' answers waiting. Who answers what is the
        question's word, never that of the answer's own content.
        """
        answer, to, store = self._arriving[asked], self._sent[asked], self._state.object_store
        if answer.has_error():
            return Message(answer.error, reply_to=to)
        name = answer.metadata.message_id
        try:
            numbers = [tree.object_id for tree in iterate_object_tree(store.get_object_tree(name))]
            pieces = {number: self._state.get_object(RUN, number) for number in numbers}
        except (NoObjectInStoreError, KeyError):
            pieces = {name: None}
        if None in pieces.values():
            return Message(Error(CRASHED, "its answer broke off"), reply_to=to)
        if sum(len(piece or b"") for piece in pieces.values()) > self.asked[asked][1]:
            return Message(Error(CRASHED, "its answer is too large"), reply_to=to)
        if b"" in pieces.values():
            return None
        try:
            whole = cast(
                Message, inflate_object_from_contents(name, cast(dict[str, bytes], pieces))
            )
            return Message(whole.error if whole.has_error() else whole.content, reply_to=to)
        except Exception as error:  # bytes of a stranger: whatever Flower makes of them
            return Message(
                Error(CRASHED, f"its answer cannot be read: {type(error).__name__}"), reply_to=to
            )

    def _forget(self, name: str) -> None:
        """Drop a message, its answer and their content: whatever still comes to it is late."""
        del self.asked[name], self._sent[name]
        self._arriving.pop(name, None)
        answer = self._state.message_ins_id_to_message_res_id.get(name, name)
        self._state.delete_messages({name})
        for number in (name, answer):
            with suppress(KeyError):  # of a tree that was never whole
                self._state.object_store.delete(number)


# -------------------------------------------------------------------------------------------------------------- a node


class Lost(Exception):  # noqa: N818 - an event, not a fault
    """The server is not there any more."""


class Refused(Exception):  # noqa: N818 - an event, not a fault
    """The server knows no such key, or the node has a live client; `known` says which."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.known = known


@contextmanager
def connected(
    address: str, authority: str, key: ec.EllipticCurvePrivateKey, patience: float
) -> Iterator[Link]:
    """Within, the server takes this process for the node whose key it is.

    Raises:
        Refused: it does not.
        Lost: it does not answer.
    """
    signs: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    ]
    over = threading.Event()
    trusted = Path(authority).read_bytes()
    with FleetHttpClient.from_server_address(address, False, trusted, interceptors=signs) as client:
        joins = ActivateNodeRequest(
            public_key=public_pem(key.public_key()), heartbeat_interval=BEAT
        )
        node = Node(node_id=_patiently(client.ActivateNode, joins, patience=patience).node_id)

        def beat() -> None:
            while not over.wait(BEAT / 2):
                with suppress(httpx.HTTPError):
                    client.SendNodeHeartbeat(
                        SendNodeHeartbeatRequest(node=node, heartbeat_interval=BEAT)
                    )

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield Link(client, node, patience)
        finally:
            over.set()
            thread.join()
            with suppress(httpx.HTTPError):
                client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


class Link:
    """A node's connection: takes messages, and brings answers."""

    def __init__(self, client: FleetHttpClient, node: Node, patience: float) -> None:
        self.node, self._client = node, client
        self._ask = partial(_patiently, patience=patience)

    def receive(self) -> Message | None:
        """Take the next message, if there is one.

        Raises:
            Lost: the server does not answer, or knows this node no more.
        """
        got = self._ask(self._client.PullMessages, PullMessagesRequest(node=self.node))
        if not got.messages_list:
            return None
        metadata = message_from_proto(got.messages_list[0]).metadata
        numbers = [tree.object_id for tree in iterate_object_tree(got.message_object_trees[0])]
        pull = make_pull_object_fn_protobuf(
            partial(self._ask, self._client.PullObject), self.node, metadata.run_id
        )
        try:
            contents = pull_objects(numbers, pull)
            confirm = partial(self._ask, self._client.ConfirmMessageReceived)
            make_confirm_message_received_fn_protobuf(confirm, self.node, metadata.run_id)(
                metadata.message_id
            )
        except (
            ObjectPullError,
            httpx.HTTPStatusError,
        ):  # the server does not wait for an answer any more
            return None
        message = cast(Message, inflate_object_from_contents(metadata.message_id, contents))
        message.metadata.__dict__["_message_id"] = metadata.message_id
        return message

    def send(self, answer: Message) -> None:
        """Bring an answer; one that comes too late is dropped by the server.

        Raises:
            Lost: the server does not answer, or knows this node no more.
        """
        run = answer.metadata.run_id
        with no_object_id_recompute():
            answer.metadata.__dict__["_message_id"] = answer.object_id
            objects: dict[str, Any] = get_all_nested_objects(answer)
            bare = remove_content_from_message(answer) if answer.has_content() else answer
            brings = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(bare)],
                message_object_trees=[get_object_tree(answer)],
            )
            with suppress(ObjectPushError, httpx.HTTPStatusError):
                taken = self._ask(self._client.PushMessages, brings)
                push = partial(self._ask, self._client.PushObject)
                pushing = make_push_object_fn_protobuf(push, self.node, run, taken.session_id)
                for number in taken.objects_to_push:
                    pushing(number, objects[number].deflate())


def _patiently(call: Callable[[Any], Answer], request: Any, patience: float) -> Answer:
    """Call the server, again and again while it cannot be reached, for `patience` seconds.

    Raises:
        Lost: it cannot be reached, or knows this node no more.
        Refused: it does not let the node join.
        httpx.HTTPStatusError: it refuses the request.
    """
    until = time.monotonic() + patience
    while True:
        try:
            return call(request)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status in (401, 409) and isinstance(request, ActivateNodeRequest):
                raise Refused(known=status == 409) from None
            if status == 401:
                raise Lost from None
            if status < 500 or status == 500:
                raise
        except httpx.HTTPError:
            pass
        if time.monotonic() > until:
            raise Lost
        time.sleep(10 * PAUSE)
