"""The reasons that a node sends to the server: about the protocol alone, never about its data."""

import itertools
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from PIL import Image

from tests.extras.federated.conftest import Make
from tests.extras.federated.test_server_orders import OWN, prepare, refuse_position
from zdp_bench.config import compose, parse
from zdp_bench.errors import UserError
from zdp_bench.extras.federated import network
from zdp_bench.extras.federated.messages import content
from zdp_bench.extras.federated.node import (
    SEE_LOG,
    RefusalError,
    Site,
    _check_and_prepare,
    call_handler,
    client_app,
    open_site,
)
from zdp_bench.extras.federated.simulation import set_sender
from zdp_bench.privacy.ledger_lines import LedgerError


def secret_folder(at: Path) -> Path:
    """Write a folder of pictures whose patients have names, and damage one of them."""
    root = at / "hospital"
    for number, (part, label) in enumerate(itertools.product(("train", "test"), "AB")):
        folder = root / part / label / f"{part}_Schmidt_Hans_{number}"
        folder.mkdir(parents=True)
        pixels = np.full((8, 8), 40 * number, np.uint8)
        Image.fromarray(pixels).save(folder / "x.png")
    next(root.glob("train/A/*/x.png")).write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    return root


def ask_to_join(app: Callable[[Message, Context], Message], **settings: Any) -> Message:
    message = Message(content({}), 2, "query.join")
    message.metadata.__dict__["_message_id"] = "1"
    return app(message, Context(1, 2, {"partition-id": 0, **settings}, RecordDict(), {}))


@pytest.mark.parametrize("over_network", [False, True])
def test_an_error_of_the_data_stays_in_the_nodes_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, over_network: bool
) -> None:
    """The server got the path of a damaged picture, with the patient's name in it."""
    set_sender()
    root = secret_folder(tmp_path)
    words = ["recipe=quickstart", *OWN, "dataset=folder", f"dataset.path={root}", "dataset.size=8"]
    words += ["model=real_mlp", f"paths.results={tmp_path / 'results'}"]
    if over_network:
        answer = ask_to_join(network.NodeApp(), overrides=shlex.join(words))
    else:
        with open_site("key", Site(parse(compose(words)))) as site:
            answer = ask_to_join(client_app(site.config, "key"))
    assert answer.error.reason == SEE_LOG
    assert "Schmidt" in caplog.text


@pytest.mark.parametrize("overrides", ["recipe=/hospital/Schmidt.yaml", "name='", "trainer.x=1"])
def test_an_error_of_a_sites_overrides_stays_in_its_log(
    overrides: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower's runtime sent it."""
    set_sender()
    assert ask_to_join(network.NodeApp(), overrides=overrides).error.reason == SEE_LOG
    assert caplog.messages


@pytest.mark.parametrize(
    "error",
    [UserError("Schmidt.png"), ValueError("Schmidt.png"), KeyError("Schmidt"), LedgerError("a.b")],
)
def test_no_error_but_a_refusal_is_quoted_to_the_server(error: Exception) -> None:
    def fail(message: Message, context: Context) -> Message:
        raise error

    set_sender()
    answer = ask_to_join(partial(call_handler, fail))
    assert answer.error.reason == SEE_LOG


def test_what_a_ledger_says_of_the_sites_folders_is_not_sent(configured: Make) -> None:
    site = Site(configured(*OWN))
    prepare(site.node(0))
    with pytest.raises(RefusalError) as refusal:
        refuse_position(site.node(0))
    site.close()
    assert str(site.config.results) in str(refusal.value.__cause__)
    assert str(site.config.results) not in str(refusal.value)


@pytest.mark.parametrize("number", [3, -1, 1.5, True, "a", None])
def test_a_number_that_no_node_of_the_federation_has_is_one_sentence(
    configured: Make, number: Any
) -> None:
    """3 and "a" were tracebacks, -1 the last node, and True and 1.5 were node 1."""
    set_sender()
    settings = {} if number is None else {"partition-id": number}
    message = Message(content({}), 2, "query.join")
    message.metadata.__dict__["_message_id"] = "1"
    app = client_app(configured("federated.nodes=3"), "key")
    answer = app(message, Context(1, 2, settings, RecordDict(), {}))
    reason = f"partition-id={number!r}: must be a whole number from 0 to 2"
    assert answer.error.reason == reason


@pytest.mark.parametrize("values", [{"run": "x"}, {"rounds": 10**6 + 1}])
def test_an_order_that_a_node_refuses_is_one_sentence(
    configured: Make, values: dict[str, Any]
) -> None:
    """The server prints it within another sentence."""
    order = {"run": "a" * 64, "rounds": 8, "entries": 0, "digest": ""} | values
    with pytest.raises(RefusalError, match=r"the server.*[^.]$"):
        _check_and_prepare(Site(configured(*OWN)).node(0), order)
