"""Send requests to the nodes, and match each answer to the request that it answers.

A node writes the metadata of its answer itself, the sender included. It can also send messages that
nobody requested, which Flower delivers with any answer. So metadata is never used: each request has
a secret, which only its addressee receives, and an answer has to repeat it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from zdp_bench.extras.federated.messages import SECRET, VALUES, values_of

CHECK_INTERVAL = 1.0  # seconds between two checks for answers to a round

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A request to one node.

    Attributes:
        kind: Flower's message type, such as "query.join".
        address: Flower's id of the node.
        message_id: Flower's id of the message.
        secret: what the answer has to repeat.
    """

    kind: str
    address: int
    message_id: str
    secret: str


def send(
    grid: Grid,
    kind: str,
    addresses: Iterable[int],
    contents: RecordDict,
) -> list[Request]:
    """Send a request with the same contents to each address, and return the requests.

    Args:
        grid: Flower's connection to the nodes.
        kind: Flower's message type.
        addresses: Flower's ids of the nodes.
        contents: what all requests contain, apart from their secrets.
    """
    secret_of = {address: secrets.token_hex(16) for address in addresses}
    messages = []
    for address, secret in secret_of.items():
        values = ConfigRecord({**contents.config_records[VALUES], SECRET: secret})
        messages.append(Message(RecordDict({**contents, VALUES: values}), address, kind))
    requests = []
    message_ids = grid.push_messages(messages)  # in the order of the messages
    for (address, secret), message_id in zip(secret_of.items(), message_ids, strict=False):
        if message_id:  # otherwise, Flower could not send it
            requests.append(Request(kind, address, message_id, secret))
    return requests


def pull_answer(grid: Grid, request: Request) -> Message | None:
    """Return the answer to a request, or the `Error` instead of one; None if there is none yet.

    Formal guarantees: an answer with content was made by someone who received the request. A
    message that cannot be read affects no other request.

    Raises:
        httpx.TransportError: Flower's server cannot be reached.
        MemoryError: memory ran out.
    """
    try:
        messages = list(grid.pull_messages([request.message_id]))
    except (httpx.TransportError, MemoryError):  # the server's own failure: no message came
        raise
    except Exception as error:  # Flower unpacks untrusted bytes, which may raise anything
        log.warning(
            "an answer to the request to SuperNode %d cannot be read (%s); it is dropped",
            request.address,
            type(error).__name__,
        )
        return None  # if it was the answer, Flower returns an `Error` at the next check
    failure = None
    for message in messages:
        if message.has_error():
            failure = failure or message
        elif values_of(message).get(SECRET) == request.secret:
            return message
        else:
            log.warning(
                "an answer to the request to SuperNode %d lacks its secret; it is dropped",
                request.address,
            )
    return failure


def wait_for_answers(
    grid: Grid,
    requests: Sequence[Request],
    patience: float,
) -> dict[int, Message]:
    """Return the answers that come in time, by the address of the node.

    Args:
        grid: Flower's connection to the nodes.
        requests: the requests.
        patience: seconds to wait for the answers.
    """
    deadline = time.monotonic() + patience
    answers: dict[int, Message] = {}
    while True:
        for request in requests:
            if request.address not in answers:
                answer = pull_answer(grid, request)
                if answer is not None:
                    answers[request.address] = answer
        if len(answers) == len(requests) or time.monotonic() > deadline:
            return answers
        time.sleep(CHECK_INTERVAL)
