"""Connect a node to the server by Flower's HTTP client with its signatures."""

from __future__ import annotations

# Before anything of Flower's: it turns the telemetry off.
from zdp_bench.extras.federated.flower import Message

# isort: split
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

from zdp_bench.extras.federated.network.endpoint import BEAT, public_pem

__all__ = ["Link", "Lost", "Refused", "connected"]

RETRY = 0.5  # seconds between two calls of a server that cannot be reached
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
