"""Run the server of a federation over the network (`zdp-bench federate server`).

One process per node, TLS between them and the server. A client knows its server by the server's
certificate. The server knows a node by its key, as Flower's SuperLink does with
`--enable-supernode-auth`: `federated.node_keys` holds the public half of each. A node needs no open
port, and no code travels: every site installs zdp-bench and starts it with the recipe.

Why not `flower-superlink` and `flower-supernode` as shipped (Flower 1.41): a SuperNode fetches the
app's code from the server, which no hospital should run, and starts a process per message, which
would load torch anew for each private step. Its SuperLink takes an answer of any size, and lets a
node with a key of its own answer in the name of another. So this file and `supernode.py` put
Flower's own parts together in one process: on the server its Fleet API over TLS, its state and its
node authentication; at a site its HTTP client with its signatures. This file checks what Flower
does not: that a node speaks for itself, how much, and that it has one client. `door.py` limits
clients without a key.

These three files and `flower.py` hold all imports of Flower's private modules. Flower may move
those in any release, so pyproject.toml holds to 1.41.
"""

from __future__ import annotations

import gc
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
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
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStoreFactory
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router as fleet
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware

from zdp_bench.config.digests import run_digest
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.flower import (
    FIRST,
    RUN,
    SERVER,
    TASK,
    Context,
    Error,
    FlowerRun,
    Message,
    OneRunGrid,
    RecordDict,
    identify,
)
from zdp_bench.extras.federated.network.door import Door, Limit, log_once_a_minute
from zdp_bench.extras.federated.network.endpoint import BEAT, endpoint, node_keys, pem
from zdp_bench.extras.federated.node import CRASHED
from zdp_bench.extras.federated.server import Result, ServerContext, server_app
from zdp_bench.records import Record
from zdp_bench.training import distributed
from zdp_bench.training.distributed import ALONE
from zdp_bench.training.interrupts import stop_signals
from zdp_bench.training.machine import plugin_digests
from zdp_bench.training.run import Watcher
from zdp_bench.training.run_folder import Outcome, find_or_run
from zdp_bench.training.setup import load_data

PAUSE = 0.05  # seconds between two looks for messages, or whether the clients have gone
GOODBYE = 10.0  # seconds for the clients to hear that the run is over, and for the API to end
MORE = 2**16  # bytes by which an answer may be longer than its question: ledger state and headers
PIECES = 4  # objects by which an answer may have more than its question
WAITING = 128  # connections that the system keeps until they are accepted
IDLE = 15  # seconds that a node's connection may wait for its next request; longer than a beat


def run_server(config: Run, watcher: Watcher, device: torch.device, wait: bool) -> Outcome:
    """Run a federation whose nodes come over the network; `training.run` calls it for such a run.

    Raises:
        UserError: the certificate, its key, the nodes' keys or the port is not usable, or what
            `server.conduct` raises.
    """
    if distributed.is_distributed():
        raise UserError(
            "torchrun carries out central runs; start `zdp-bench federate server` by itself."
        )
    host, port = endpoint(config)
    certificate, key = pem(config, "certificate"), pem(config, "key")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certificate, key, password=""
        )
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"federated.certificate={certificate} and federated.key={key} are no certificate "
            f"with its key: {error}."
        ) from None
    keys = node_keys(config)
    data = load_data(config)
    digest = run_digest(config, data.digest, plugin_digests(config.plugins))

    def train(home: Path) -> Record:
        result = Result()
        identify()
        with stop_signals() as asked, fleet_api(host, port, certificate, key, keys) as grid:
            owners = {FIRST + number: number for number in range(len(keys))}
            conducting = ServerContext(config, data, digest, home, device, watcher, asked, owners)
            server_app(conducting, result)(grid, Context(RUN, SERVER, {}, RecordDict(), {}))
            until = time.monotonic() + (GOODBYE if result.record else 0)
            while time.monotonic() < until and list(grid.get_node_ids()):
                time.sleep(PAUSE)
        return result.get()

    return find_or_run(config, digest, ALONE, wait, train)


@contextmanager
def fleet_api(
    host: str, port: int, certificate: str, key: str, keys: Sequence[bytes]
) -> Iterator[LinkGrid]:
    """Serve Flower's Fleet API over TLS within; yield the grid of the nodes that join.

    Args:
        keys: the nodes' public keys (PEM), by node number; nobody else is let in.

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
    door = Door(socket.AF_INET6 if ":" in host else socket.AF_INET)
    layers = [Middleware(Limit, door=door, keys=state.node_public_key_to_node_id)]
    layers += [Middleware(BaseHTTPMiddleware, dispatch=http_error_translator)]
    layers += [Middleware(ProtobufTranslationMiddleware), Middleware(NodeAuthMiddleware)]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=layers)
    app.state.linkstate_factory, app.state.enable_supernode_auth = factory, True

    async def check(request: Request) -> None:
        _check(grid, state, getattr(request.state, "protobuf_request", None))

    app.include_router(fleet, dependencies=[Depends(check)])
    with door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((host, port))
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
            proxy_headers=False,  # a client is who connects, not who it says
            loop="asyncio",  # it calls the door's accept
            http="h11",  # it bounds a request's headers
            backlog=WAITING,
            timeout_keep_alive=IDLE,
            callback_notify=door.end_late_ones,
            timeout_notify=1,
        )
        # A closed connection's 256 KB are garbage in a cycle. They are found the sooner, the fewer
        # objects the collector has to look at.
        gc.freeze()
        gc.collect()
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([door],), name="fleet-api", daemon=True)
        thread.start()
        try:
            while thread.is_alive() and not server.started:
                time.sleep(PAUSE)
            if not server.started:
                raise UserError(
                    f"federated.address={host}:{port}: the Fleet API did not start; "
                    "its own words are above."
                )
            yield grid
        finally:
            server.should_exit = True
            thread.join(timeout=GOODBYE)
            gc.unfreeze()


def _register(state: InMemoryLinkState, node: int, public: bytes) -> None:
    """Do what `flwr supernode register` does, under a fixed number.

    So a client can go on with a server that was started anew.
    """
    drawn = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, BEAT)
    info = state.nodes.pop(drawn)
    info.node_id = node
    state.nodes[node] = info
    state.node_public_key_to_node_id[public] = node
    state.owner_to_node_ids[NOOP_FLWR_AID] = set(state.nodes)


def _check(grid: LinkGrid, state: InMemoryLinkState, asked: Any) -> None:
    """Check what Flower leaves open: a node speaks for itself alone, and not too much.

    Raises:
        HTTPException: it does not. The client gets the status.
    """
    if isinstance(asked, ActivateNodeRequest):
        node = state.get_node_id_by_public_key(asked.public_key)
        if node is None:
            raise HTTPException(401, "unknown key")
        if state.get_node_info(node_ids=[node])[0].status == NodeStatus.ONLINE:
            log_once_a_minute(
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
            log_once_a_minute(
                f"node {node - FIRST}", "an answer that is not its own, or not one; it is dropped"
            )
            raise HTTPException(400, "not one answer of this node")
        pieces = sum(1 for _ in iterate_object_tree(asked.message_object_trees[0]))
        if pieces > grid.asked.get(to, (0, 0))[0]:
            log_once_a_minute(
                f"node {node - FIRST}",
                "an answer that comes late, or in too many pieces; it is dropped",
            )
            raise HTTPException(410, "late or too large")
    elif isinstance(asked, ConfirmMessageReceivedRequest):
        message = state.message_ins_store.get(asked.message_object_id)
        if message is None or message.metadata.dst_node_id != asked.node.node_id:
            raise HTTPException(400, "not a message to this node")


class LinkGrid(OneRunGrid):
    """A grid on the state of a SuperLink in this process (Flower's HttpGrid uses another process).

    Attributes:
        asked: message -> how many objects and bytes its answer may have.
    """

    def __init__(self, state: InMemoryLinkState) -> None:
        self._state = state
        # messages without their content, to answer for nodes that do not
        self._sent: dict[str, Message] = {}
        # message -> its answer, whose content is still arriving
        self._arriving: dict[str, Message] = {}
        self.asked: dict[str, tuple[int, int]] = {}

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
        """Return the whole answer, None while pieces of it arrive, an Error if they never will.

        Does not wait: a node that dies between two pieces must not hold up the others' answers.
        Which question an answer belongs to is read from the question, never from the answer.
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
