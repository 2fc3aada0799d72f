"""A federation over the network: one process a node, TLS between them and the server (`zdp-bench federate`).

The server holds Flower's SuperLink state and serves its Fleet API, and nothing else of it, over HTTPS; a client is a SuperNode
that runs its ClientApp in its own process. So a node needs no port of its own, and no code travels: every site installs zdp-bench
and starts it with the recipe. (Flower's own `flower-supernode` fetches the app's code from the server, and starts a process for
every message, which would load torch anew for each private step.)

A client knows that it speaks to its server by the server's certificate. The server knows a client by the key that the client made
when it joined, so nobody can take a node's place; but it lets anybody join who reaches the port and comes with the same recipe.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import uvicorn
from fastapi import FastAPI
from flwr.app.message import remove_content_from_message
from flwr.proto.task_pb2 import Task, TaskStatus
from flwr.server.superlink.linkstate import InMemoryLinkState, LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
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

from zdp_bench import distributed
from zdp_bench.config.digests import run_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.distributed import ALONE
from zdp_bench.errors import UserError
from zdp_bench.experiment import Outcome, Watcher, once
from zdp_bench.federated.client import CRASHED
from zdp_bench.federated.endpoint import endpoint, pem
from zdp_bench.federated.flower import SERVER, Context, Error, FlowerRun, Grid, Message, RecordDict, identify
from zdp_bench.federated.server import Conducting, Result, server_app
from zdp_bench.records import Record
from zdp_bench.registry import lookup
from zdp_bench.survival import stop_signals

RUN, TASK = 1, 1  # Flower's numbers of the one run that a server conducts
PAUSE = 0.05  # seconds between two looks for messages
GOODBYE = 10.0  # seconds that a server waits for its clients to hear that the run is over


def served(config: Run, watcher: Watcher, device: torch.device, wait: bool) -> Outcome:
    """How `experiment.run` carries out a federation whose nodes come over the network.

    Raises:
        UserError: the certificate, its key or the port is not usable, or what `server.conduct` raises.
    """
    if distributed.launched():
        raise UserError("torchrun carries out central runs; start `zdp-bench federate server` by itself.")
    host, port = endpoint(config)
    certificate, key = pem(config, "certificate"), pem(config, "key")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"federated.certificate={certificate} and federated.key={key} are no certificate with its key: {error}."
        ) from None
    data: Splits = lookup("dataset", config.dataset.name)(config.data_root, **config.dataset.options)
    digest = run_digest(config, data.digest)

    def train(home: Path) -> Record:
        result = Result()
        identify(RUN)
        with stop_signals() as asked, fleet_api(host, port, certificate, key) as state:
            grid = LinkGrid(state)
            conducting = Conducting(config, data, digest, home, device, watcher, asked)
            server_app(conducting, result)(grid, Context(RUN, SERVER, {}, RecordDict(), {}))
            until = time.monotonic() + (GOODBYE if result.record else 0)
            while time.monotonic() < until and list(grid.get_node_ids()):
                time.sleep(PAUSE)
        return result.get()

    return once(config, digest, ALONE, wait, train)


@contextmanager
def fleet_api(host: str, port: int, certificate: str, key: str) -> Iterator[InMemoryLinkState]:
    """Within, Flower's Fleet API is served over TLS; yields the state behind it.

    Raises:
        UserError: the port is taken, or the host is not this machine's.
    """
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
    state = cast(InMemoryLinkState, factory.state())
    run = FlowerRun.create_empty(RUN)
    run.primary_task_id, run.federation_id = TASK, NOOP_FEDERATION_ID
    state.run_ids[RUN] = RunRecord(run=run)
    state.task_store[TASK] = Task(task_id=TASK, run_id=RUN, status=TaskStatus(status="running"))
    layers = [Middleware(BaseHTTPMiddleware, dispatch=http_error_translator)]
    layers += [Middleware(ProtobufTranslationMiddleware), Middleware(NodeAuthMiddleware)]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=layers)
    app.state.linkstate_factory, app.state.enable_supernode_auth = factory, False
    app.include_router(fleet)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise UserError(f"federated.address={host}:{port}: cannot listen there: {error.strerror or error}.") from None
        settings = uvicorn.Config(app, ssl_certfile=certificate, ssl_keyfile=key, log_level="error", access_log=False, ws="none")
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listener],), name="fleet-api", daemon=True)
        thread.start()
        try:
            while thread.is_alive() and not server.started:
                time.sleep(PAUSE)
            if not server.started:
                raise UserError(f"federated.address={host}:{port}: the Fleet API did not start; its own words are above.")
            yield state
        finally:
            server.should_exit = True
            thread.join(timeout=GOODBYE)


class LinkGrid(Grid):
    """A grid on the state of a SuperLink in this process: what Flower's HttpGrid does with a SuperLink in another."""

    def __init__(self, state: InMemoryLinkState) -> None:
        self._state = state
        self._sent: dict[str, Message] = {}  # without their content, to answer for nodes that do not
        self._arriving: dict[str, Message] = {}  # answers whose content is not here yet, by what they answer

    def set_run(self, run: FlowerRun) -> None:
        raise NotImplementedError("a server conducts one run")

    @property
    def run(self) -> FlowerRun:
        return self._state.get_run_info(run_ids=[RUN])[0]

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
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
                stored, missing = self._state.store_message_and_object_tree(bare, get_object_tree(message), session)
                for number in missing:
                    self._state.store_object(RUN, session, number, objects[number].deflate())
            if stored:
                self._sent[name] = bare
                pushed.append(name)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = [name for name in message_ids if name in self._sent]
        if new := {name for name in wanted if name not in self._arriving}:
            for answer in self._state.get_message_res(message_ids=new, run_id=RUN):
                self._arriving[answer.metadata.reply_to_message_id] = answer
        found = {name: self._whole(name) for name in wanted if name in self._arriving}
        whole = {name: answer for name, answer in found.items() if answer}
        for name in whole:
            del self._arriving[name], self._sent[name]
        self._state.delete_messages(set(whole))
        return list(whole.values())

    def _whole(self, asked: str) -> Message | None:
        """The answer with its content, which follows it in pieces: None while they arrive, an Error where they never will.

        Nothing waits here: a node that dies between two pieces must not keep the others' answers waiting.
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
        if b"" in pieces.values():
            return None
        store.delete(name)
        return cast(Message, inflate_object_from_contents(name, cast(dict[str, bytes], pieces)))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        waiting, answers = set(self.push_messages(messages)), list[Message]()
        until = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while waiting and time.monotonic() < until:
            found = list(self.pull_messages(waiting))
            answers += found
            waiting -= {answer.metadata.reply_to_message_id for answer in found}
            if waiting:
                time.sleep(PAUSE)
        return answers
