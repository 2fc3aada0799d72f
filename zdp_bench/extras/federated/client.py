"""Wrap a node as a ClientApp that answers five kinds of message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.extras.federated.flower import ClientApp, ConfigRecord, Context, Error, Message
from zdp_bench.extras.federated.messages import content, tensors_of, values_of
from zdp_bench.extras.federated.node import Node, Site
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.ledger import BudgetExceeded, Position

CRASHED = 1  # an Error's code: the app raised
REFUSED = (
    700  # an Error of ours, whose reason is a sentence for people; Flower's own codes are below
)

# This process's sites by the key that a ClientApp carries: data and model do not travel.
_sites: dict[str, Site] = {}


@contextmanager
def open_site(key: str, site: Site) -> Iterator[Site]:
    """Let the ClientApps with this key work on this site until the block ends."""
    _sites[key] = site
    try:
        yield site
    finally:
        _sites.pop(key).close()


def client_app(config: Run, key: str) -> ClientApp:
    """Return the app of any node; `partition-id` of Flower's node configuration says which one.

    Messages:
        query.join      {} -> `Node.join`
        query.prepare   {run, rounds, entries, digest} -> `Node.standing` and the mechanism's digest
        train           {round}, weights -> `Node.standing`, the round, and the released gradients
        query.report    {} -> `Node.standing`
        query.dismiss   {} -> {}: the run is over
    """
    app = ClientApp()

    def node_of(context: Context) -> Node:
        site = _sites.setdefault(key, Site(config)) if key not in _sites else _sites[key]
        node = site.node(int(context.node_config["partition-id"]))
        if (
            node.ledger is None and "prepared" in context.state
        ):  # by another process: Ray gives a node to any that is free
            _prepare(node, dict(context.state.config_records["prepared"]))
        return node

    @app.query("join")
    def join(message: Message, context: Context) -> Message:
        return answer_or_refuse(
            message, lambda: Message(content(node_of(context).join()), reply_to=message)
        )

    @app.query("prepare")
    def prepare(message: Message, context: Context) -> Message:
        def work() -> Message:
            values, node = values_of(message), node_of(context)
            context.state["prepared"] = ConfigRecord(values)
            return Message(content(_prepare(node, values)), reply_to=message)

        return answer_or_refuse(message, work)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def release() -> Message:
            node = node_of(context)
            weights = tensors_of(message, trainable(node.site.model))
            standing, gradients = node.release(int(values_of(message)["round"]), weights)
            return Message(content(standing, gradients), reply_to=message)

        return answer_or_refuse(message, release)

    @app.query("report")
    def report(message: Message, context: Context) -> Message:
        def work() -> Message:
            node = node_of(context)
            if node.ledger is None:
                raise UserError("it was started anew, and joins again")
            return Message(content(node.standing()), reply_to=message)

        return answer_or_refuse(message, work)

    @app.query("dismiss")
    def dismiss(message: Message, context: Context) -> Message:
        return Message(content({}), reply_to=message)

    return app


def _prepare(node: Node, values: dict) -> dict:
    at_least = (
        Position(int(values["entries"]), str(values["digest"])) if values["entries"] else None
    )
    return node.prepare(str(values["run"]), int(values["rounds"]), at_least)


def answer_or_refuse(message: Message, work: Callable[[], Message]) -> Message:
    """Return the answer; a refusal that a person can act on becomes an Error with its sentence."""
    try:
        return work()
    except BudgetExceeded:
        return Message(
            Error(REFUSED, "the next step would pass privacy.max_epsilon"), reply_to=message
        )
    except (UserError, ValueError) as error:
        return Message(Error(REFUSED, str(error)), reply_to=message)


def reply_to(
    app: Callable[[Message, Context], Message], message: Message, context: Context
) -> Message:
    """Return the app's answer, or an Error if it raises, as Flower's own runtimes do."""
    try:
        return app(message, context)
    except Exception as error:
        return Message(Error(CRASHED, f"{type(error).__name__}: {error}"), reply_to=message)
