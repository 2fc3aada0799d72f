"""Run one node of a federation over the network: its ClientApp in this process, connected to the
server by Flower's HTTP client with its signatures.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
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
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.flower import FIRST, RUN, ClientApp, Context, Message, RecordDict
from zdp_bench.extras.federated.network.endpoint import BEAT, endpoint, node_key, pem, public_pem
from zdp_bench.extras.federated.node import Site, client_app, open_site, reply_to
from zdp_bench.training.interrupts import Stopped, stop_signals
from zdp_bench.training.run_folder import only_one_process

PAUSE = 0.05  # seconds between two looks for messages
RETRY = 0.5  # seconds between two calls of a server that cannot be reached
BLIP = 30.0  # seconds that a connection may be away without this node having to join anew


def run_client(config: Run, say: Callable[[str], None]) -> None:
    """Be one node until the server says that the run is over.

    Raises:
        UserError: the server cannot be reached within `federated.patience`, is not the one the
            authority vouches for, does not know this node's key, or has another live client of it.
        Busy: another process is this node.
        Stopped: a signal asked for it; the ledger has every step, and the same command joins again.
    """
    host, port = endpoint(config)
    authority, number = pem(config, "authority"), config.federated.node
    if number is None:
        raise UserError("federated.node is not set: say which node this is, from 0.")
    private = node_key(config)
    if not config.privacy.secure:
        say(
            "the noise comes from the seed, which the server knows: a rehearsal. "
            "privacy.secure=true is for real patients."
        )
    key = f"node {number}"
    here = config.results / "runs" / config.recipe / f"node-{number:02d}-seed-{config.seed}"
    with (
        only_one_process(here, wait=False),
        open_site(key, Site(config)) as site,
        stop_signals() as asked,
    ):
        app, context = (
            client_app(config, key),
            Context(RUN, 0, {"partition-id": number}, RecordDict(), {}),
        )
        site.node(number)  # reads the data, before the server is kept waiting
        until, over = time.monotonic() + config.federated.patience, False
        while not over:
            reach(host, port, authority, config.federated.patience, asked)
            try:
                with connected(
                    f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
                    authority,
                    private,
                    BLIP,
                ) as link:
                    if link.node.node_id != FIRST + number:
                        raise UserError(
                            f"federated.node_key is node {link.node.node_id - FIRST}'s, "
                            f"and this is node {number}."
                        )
                    say(f"node {number}: joins {host}:{port}")
                    over = session(app, context, link, asked)
                until = time.monotonic() + config.federated.patience
            except Lost:
                pass  # it may be started anew
            except Refused as refused:
                if not refused.known or time.monotonic() > until:
                    why = (
                        "another client is this node"
                        if refused.known
                        else "its federated.node_keys lacks this key, or its clock differs"
                    )
                    raise UserError(
                        f"the server at {host}:{port} refuses node {number}: {why}."
                    ) from None
            if signal := asked():
                raise Stopped(signal)
            time.sleep(0 if over else 10 * PAUSE)
        ledger = site.node(number).ledger
        steps = ledger.releases if ledger else 0
        say(f"node {number}: the run is over; {steps} steps stand in its ledger")


def reach(host: str, port: int, authority: str, patience: float, asked: Callable[[], int]) -> None:
    """Wait until the server answers, and is the right one.

    Raises:
        UserError: it does not, in `patience` seconds, or is another one.
        Stopped: a signal asked for it.
    """
    where = f"federated.address={host}:{port}"
    try:
        trusting = ssl.create_default_context(cafile=authority)
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"federated.authority={authority}: holds no certificate in PEM: {error}."
        ) from None
    until = time.monotonic() + patience
    while True:
        try:
            with (
                socket.create_connection((host, port), timeout=patience) as plain,
                trusting.wrap_socket(plain, server_hostname=host),
            ):
                return
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"{where}: its certificate is not vouched for by "
                f"federated.authority={authority}, or is another host's: {error.verify_message}."
            ) from None
        except OSError as error:
            if signal := asked():
                raise Stopped(signal) from None
            if time.monotonic() > until:
                raise UserError(
                    f"{where}: no server of zdp-bench answers there ({error.strerror or error}) "
                    f"within federated.patience={patience:g} seconds."
                ) from None
        time.sleep(10 * PAUSE)


def session(app: ClientApp, context: Context, link: Link, asked: Callable[[], int]) -> bool:
    """Answer messages until the run is over, or a signal asks to stop: False.

    Raises:
        Lost: the connection.
    """
    context.node_id = link.node.node_id
    while not asked():
        if (message := link.receive()) is None:
            time.sleep(PAUSE)
            continue
        link.send(reply_to(app, message, context))
        if message.metadata.message_type == "query.dismiss":
            return True
    return False


Answer = TypeVar("Answer")


class Lost(Exception):  # noqa: N818 - an event, not a fault
    """The server is gone."""


class Refused(Exception):  # noqa: N818 - an event, not a fault
    """The server knows no such key, or the node has a live client; `known` says which."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.known = known


@contextmanager
def connected(
    address: str, authority: str, key: ec.EllipticCurvePrivateKey, patience: float
) -> Iterator[Link]:
    """Join the server as the node whose key this is, and send heartbeats until the block ends.

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
    """A node's connection: receives messages and sends answers."""

    def __init__(self, client: FleetHttpClient, node: Node, patience: float) -> None:
        self.node, self._client = node, client
        self._ask = partial(_patiently, patience=patience)

    def receive(self) -> Message | None:
        """Return the next message, or None.

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
        """Send an answer; the server drops one that comes too late.

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
        time.sleep(RETRY)
