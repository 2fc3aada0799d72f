"""Run one node of a federation over the network: a SuperNode with its ClientApp."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable

from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.client import client_app, open_site, reply_to
from zdp_bench.extras.federated.flower import FIRST, RUN, ClientApp, Context, RecordDict
from zdp_bench.extras.federated.network.endpoint import endpoint, node_key, pem
from zdp_bench.extras.federated.network.link import Link, Lost, Refused, connected
from zdp_bench.extras.federated.node import Site
from zdp_bench.training.interrupts import Stopped, stop_signals
from zdp_bench.training.run_folder import only_one_process

PAUSE = 0.05  # seconds between two looks for messages
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
