"""One node of a federation over the network: a Flower SuperNode that runs the ClientApp in this process; see `superlink`."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supernode.fleet_http_connection import http_request_response

from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.experiment import only_one_process
from zdp_bench.federated.client import client_app, reply_of, site_open
from zdp_bench.federated.endpoint import endpoint, pem
from zdp_bench.federated.flower import ClientApp, Context, Message, RecordDict
from zdp_bench.federated.node import Site
from zdp_bench.survival import Stopped, stop_signals

RUN, TASK = 1, 1  # Flower's numbers of the one run that a server conducts
PAUSE = 0.05  # seconds between two looks for messages
GOODBYE = 10.0  # seconds that a server waits for its clients to hear that the run is over


def attend(config: Run, say: Callable[[str], None]) -> None:
    """Be one node until the server says that the run is over.

    Raises:
        UserError: the server cannot be reached within `federated.patience`, or is not the one the authority vouches for.
        Busy: another process is this node.
        Stopped: a signal asked for it; the ledger has every step, and the same command joins again.
    """
    host, port = endpoint(config)
    authority, number = pem(config, "authority"), config.federated.node
    if number is None:
        raise UserError("federated.node is not set: say which node this is, from 0.")
    if not config.privacy.secure:
        say("the noise comes from the seed, which the server knows: a rehearsal. privacy.secure=true is for real patients.")
    key = f"node {number}"
    here = config.results / "runs" / config.recipe / f"node-{number:02d}-seed-{config.seed}"
    with only_one_process(here, wait=False), site_open(key, Site(config)) as site, stop_signals() as asked:
        app, context = client_app(config, key), Context(RUN, 0, {"partition-id": number}, RecordDict(), {})
        site.node(number)  # reads the data, before the server is kept waiting
        over = False
        while not over:
            reach(host, port, authority, config.federated.patience, asked)
            say(f"node {number}: joins {host}:{port}")
            over = session(app, context, config, authority, asked)
            if signal := asked():
                raise Stopped(signal)
        ledger = site.node(number).ledger
        say(f"node {number}: the run is over; {ledger.releases if ledger else 0} steps stand in its ledger")


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
        raise UserError(f"federated.authority={authority}: holds no certificate in PEM: {error}.") from None
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
                f"{where}: its certificate is not vouched for by federated.authority={authority}, or is another host's: "
                f"{error.verify_message}."
            ) from None
        except OSError as error:
            if signal := asked():
                raise Stopped(signal) from None
            if time.monotonic() > until:
                raise UserError(
                    f"{where}: no server of zdp-bench answers there ({error.strerror or error}) within "
                    f"federated.patience={patience:g} seconds."
                ) from None
        time.sleep(10 * PAUSE)


def session(app: ClientApp, context: Context, config: Run, authority: str, asked: Callable[[], int]) -> bool:
    """Answer messages until the run is over; False where the connection was lost before."""
    over = False
    host, port = endpoint(config)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with http_request_response(address, False, authority, max_wait_time=config.federated.patience) as connection:
        node, receive, send, _, _, pull, push, confirm = connection
        context.node_id = node
        while not over and not asked():
            if (got := receive()) is None:
                time.sleep(PAUSE)
                continue
            header, tree = got
            name, run = header.metadata.message_id, header.metadata.run_id
            contents = pull_objects([t.object_id for t in iterate_object_tree(tree)], partial(pull, run))
            confirm(run, name)
            message = cast(Message, inflate_object_from_contents(name, contents))
            message.metadata.__dict__["_message_id"] = name
            answer = reply_of(app, message, context)
            with no_object_id_recompute():
                answer.metadata.__dict__["_message_id"] = answer.object_id
                objects: dict[str, Any] = get_all_nested_objects(answer)
                missing, place = send(answer, get_object_tree(answer), 0.0)
                for piece in missing:
                    push(run, place, piece, objects[piece].deflate())
            over = message.metadata.message_type == "query.dismiss"
    return over
