"""One node of a federation: its patients, noise and ledger, the steps of a central run, and the
ClientApp that answers the server.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from zdp_bench import records
from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import Part, Source, Splits
from zdp_bench.data.owners import identify_owners
from zdp_bench.errors import UserError, require
from zdp_bench.extras.federated.messages import content, digest, tensors_of, values_of
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.composition import spent_of_one, together
from zdp_bench.privacy.ledger import BudgetExceeded, Position, Tally
from zdp_bench.privacy.noise import run_key, stream_bytes
from zdp_bench.privacy.sampling import place_each
from zdp_bench.training.machine import execution_digest, foreign_code, pick_device
from zdp_bench.training.plan import steps_of
from zdp_bench.training.run_folder import open_ledger
from zdp_bench.training.setup import ModelSetup, Setup, count_units, load_data
from zdp_bench.training.spending import plan_spending, read_spendings, reserve
from zdp_bench.training.step import Training, private_step

CRASHED = 1  # an Error's code: the app raised
REFUSED = 700  # an Error of ours, whose reason is for people; Flower's own codes are below
RESTARTED = "it was restarted, and joins again"
RUN = re.compile(r"[0-9a-f]{64}")  # the digest of a run, which names its folder
MOST_ROUNDS = 1_000_000  # of a run; a server that asks for more only keeps its nodes busy

Answer = Callable[[Message, Context], Message]

# This process's sites by the key that a ClientApp carries: data and model do not travel.
_sites: dict[str, Site] = {}


# ----------------------------------------------------------------------------------------- patients


def split_by_patient(
    data: Splits,
    nodes: int,
    seed: int,
) -> list[Part]:
    """Split the training set by patient: the seed and a patient's name decide the node.

    Formal guarantees: every record is at one node; all records of a patient are at the same one;
    adding or removing a patient moves no other. So nodes differ in size, as `place_each` says.

    Raises:
        UserError: a node has no patient, or the data set does not say whose examples are whose.
    """
    patient_of, patients = identify_owners(data, "federated.patients=split")
    key = stream_bytes(seed, "partition")
    node_of_patient = place_each(patients, nodes, key)
    node_of = node_of_patient[patient_of]
    parts = []
    for node in range(nodes):
        rows = np.flatnonzero(node_of == node)
        rule = (
            f"node {node} has none of the {len(patients):,} patients, whose names decide; use "
            "fewer nodes or another seed"
        )
        require(len(rows) > 0, "federated.nodes", nodes, rule)
        parts.append(Part(data.train, torch.from_numpy(rows)))
    return parts


# ----------------------------------------------------------------------------------------- one node


class AccumulatingSGD(torch.optim.SGD):
    """SGD between a node's steps of one round; keeps the sum of released gradients to send.

    That is (θ − θ')/lr of the round, without the rounding that θ' would bring.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        lr: float,
    ) -> None:
        super().__init__(parameters.values(), lr=lr)
        self._named = parameters
        self.sums: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name, parameter in self._named.items():
            assert parameter.grad is not None
            gradient = parameter.grad
            self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient
        super().step(closure)


class Site:
    """What a process needs to be one or more nodes: data and model, each made when first used."""

    def __init__(
        self,
        config: Run,
        data: Splits | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.config, self._data = config, data
        self.device = device or pick_device(config.device)
        self.nodes: dict[int, Node] = {}
        self._checked = False

    @cached_property
    def data(self) -> Splits:
        return self._data or load_data(self.config)

    @cached_property
    def setup(self) -> ModelSetup:
        """The model that all nodes here share: each round sets its weights."""
        return ModelSetup.of(self.config, self.data, self.device)

    @cached_property
    def parts(self) -> list[Part]:
        assert self.config.federated.nodes is not None
        return split_by_patient(self.data, self.config.federated.nodes, self.config.seed)

    def check(self, setup: Setup) -> None:
        """Call `Setup.check_model` for the first node only: nodes differ in their noise alone."""
        if not self._checked:
            setup.check_model()
            self._checked = True

    def node(self, number: int) -> Node:
        """The node of that number, always the same."""
        if number not in self.nodes:
            self.nodes[number] = Node(self, number)
        return self.nodes[number]

    def close(self) -> None:
        for node in self.nodes.values():
            if node.ledger:
                node.ledger.close()


class Node:
    """One node. It is asked to `join`, then to `prepare`, then for a `release` a round.

    Formal guarantees:
        - what a release is computed from, and its noise, is a function of (run, node, its data,
          step, weights): on the same weights it is the same release, bit for bit, and on others it
          has another sample and other noise;
        - its steps stand in this node's own ledger before they exist, so a release that never
          arrives is counted as well;
        - a site with data of its own keeps `privacy.max_epsilon` over all runs in its results
          folder that may share examples with it, whatever runs a server asks for.
    """

    def __init__(self, site: Site, number: int) -> None:
        self.site, self.number = site, number
        self.config = site.config
        self.is_split = site.config.federated.patients == "split"
        self.records: Source = site.parts[number] if self.is_split else site.data.train
        self.ledger: Tally | None = None

    @cached_property
    def units(self) -> int:
        """How many examples, or patients if they are the unit, a step of this node draws from."""
        return count_units(self.config, replace(self.site.data, train=self.records))

    def join(self) -> dict[str, Any]:
        """What the server must know to plan the rounds; nothing else of the data leaves the node.

        A digest of a site's own data would tell a server that knows all of it but one record what
        that one is. Where one data set is split over the nodes, the server has it anyway, and must
        see that all have the same.
        """
        values = {
            "node": self.number,
            "experiment": experiment_digest(self.config),
            "seed": self.config.seed,
            "records": self.units,
            "examples_per_patient": self.site.data.examples_per_patient,
        }
        if self.is_split:
            values["data"] = self.site.data.digest
        return values

    def prepare(
        self,
        run: str,
        rounds: int,
        at_least: Position | None,
    ) -> dict[str, Any]:
        """Make the mechanism and open the ledger, which had come `at_least` so far.

        Returns:
            `standing`, and the mechanism's digest.
        """
        site = self.site
        own_setup = replace(site.setup, data=replace(site.data, train=self.records))
        self.setup = own_setup.with_plan(steps_of(site.config, self.units, rounds))
        site.check(self.setup)
        self.mechanism = self.setup.mechanism
        self.size = self.setup.micro_batch_size()
        # The data's digest is used only here: it leaves no node.
        code = f"{foreign_code(site.config.plugins)}:node {self.number}:{site.data.digest}"
        self._key = run_key(run, self.mechanism, code)
        run_home = records.folder(self.config.results, self.config.recipe, run)
        if self.ledger:
            self.ledger.close()
        config = self.setup.config
        if not self.is_split:
            reserve(config, self.setup.data, self.mechanism, self.setup.plan.steps, run_home)
        execution = execution_digest(
            config.plugins,
            site.device,
            self.size.examples,
            1,
            config.execution.deterministic,
        )
        self.ledger = open_ledger(
            run_home / "nodes" / self._name() / "ledger.jsonl",
            self.mechanism,
            not config.privacy.secure,
            at_least,
            # and nothing else: each step's line says which weights
            (execution, 0, "the weights it is sent"),
            whose=f"node {self.number}",
        )
        # All that can have been released at the end.
        most = self.ledger.releases + self.setup.plan.steps
        if self.is_split:
            self.limit = self.setup.affordable(most)
        else:
            self.limit = self._affordable_beside_others(most, run_home)
        return self.standing() | {"mechanism": self.mechanism.digest()}

    def _name(self) -> str:
        """Return the name of this node's folder in the run's."""
        name = f"{self.number:02d}"
        return name if self.is_split else f"{name}-{self.site.data.digest[:8]}"

    def _affordable_beside_others(self, most: int, run_home: Path) -> int | None:
        """Return how many of `most` releases the budget pays for after the site's other runs."""
        privacy = self.setup.config.privacy
        if privacy.max_epsilon is None:
            return None
        own = plan_spending(self.setup.config, self.setup.data, self.mechanism, most, run_home)
        every, _ = read_spendings(self.setup.config.results, but=run_home)
        others = [spending for spending in every if spending.may_share(own)]
        if not others:
            return self.setup.affordable(most)
        try:
            *earlier, planned = spent_of_one([*others, own], own.by_unit)

            def epsilon_after(steps: int) -> float:
                return together([*earlier, replace(planned, steps=steps)], privacy.delta)

            return max(0, bisect_right(range(most + 1), privacy.max_epsilon, key=epsilon_after) - 1)
        except ValueError as error:
            raise UserError(
                f"privacy.max_epsilon={privacy.max_epsilon:g}: {error}, so this site's total ε is "
                "not known; use the earlier runs' sampling and unit."
            ) from None

    def standing(self) -> dict[str, Any]:
        """Return how far the ledger has come, on disk, for the server."""
        if self.ledger is None:
            raise UserError(RESTARTED)
        self.ledger.sync()
        position = self.ledger.position
        return {"entries": position.entries, "digest": position.digest}

    def release(
        self, round_: int, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Take a round of private steps from these weights; return the sum of released gradients.

        Raises:
            BudgetExceeded: a step would pass `privacy.max_epsilon`; it was not taken.
            UserError: the model has changed beside its weights, or this process was not asked to
                `prepare`; the server asks it to join again.
        """
        if self.ledger is None:
            raise UserError(RESTARTED)
        setup = self.setup
        parameters = trainable(setup.model)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        weights_digest = digest(weights)
        key = f"{self._key}:{self.ledger.generation}:{weights_digest}"
        optimizer = AccumulatingSGD(parameters, setup.config.federated.local_lr)
        training = Training(
            setup.algorithm,
            setup.model,
            optimizer,
            setup.noise(key),
            self.ledger,
            self.limit,
        )
        steps = self.config.federated.local_steps
        with setup.arithmetic():
            for step in range(round_ * steps, (round_ + 1) * steps):
                batches, divisor = setup.draw(key, step, self.size)
                private_step(training, step, batches, divisor, weights_digest)
        return self.standing() | {"round": round_}, optimizer.sums


# ------------------------------------------------------------------------------------ its ClientApp


@contextmanager
def open_site(key: str, site: Site) -> Iterator[Site]:
    """Let the ClientApps with this key work on this site until the block ends."""
    _sites[key] = site
    try:
        yield site
    finally:
        _sites.pop(key).close()


def client_app(config: Run, key: str) -> ClientApp:
    """Return the app of any node; `partition-id` of Flower's node configuration selects it.

    Messages:
        query.join      {} -> `Node.join`
        query.prepare   {run, rounds, entries, digest} -> `Node.standing` and the mechanism's digest
        train           {round}, weights -> `Node.standing`, the round, and the released gradients
        query.report    {} -> `Node.standing`
    """
    app = ClientApp()

    def node_of(context: Context) -> Node:
        if key not in _sites:
            _sites[key] = Site(config)
        node = _sites[key].node(int(context.node_config["partition-id"]))
        if node.ledger is None and "prepared" in context.state:
            # By another process: a SuperNode starts one for each message.
            _prepare(node, dict(context.state.config_records["prepared"]))
        return node

    def prepare(message: Message, context: Context) -> RecordDict:
        values, node = values_of(message), node_of(context)
        context.state["prepared"] = ConfigRecord(values)
        return content(_prepare(node, values))

    def train(message: Message, context: Context) -> RecordDict:
        node = node_of(context)
        weights = tensors_of(message, trainable(node.site.setup.model))
        values, release = node.release(int(values_of(message)["round"]), weights)
        return content(values, release)

    def join(message: Message, context: Context) -> RecordDict:
        return content(node_of(context).join())

    def report(message: Message, context: Context) -> RecordDict:
        return content(node_of(context).standing())

    app.query("join")(_answering(join))
    app.query("prepare")(_answering(prepare))
    app.train()(_answering(train))
    app.query("report")(_answering(report))
    return app


def _prepare(node: Node, values: dict[str, Any]) -> dict[str, Any]:
    run, rounds = str(values["run"]), int(values["rounds"])
    if not RUN.fullmatch(run):
        raise UserError("the server names a run by something else than 64 hexadecimal digits.")
    if not 1 <= rounds <= MOST_ROUNDS:
        raise UserError(
            f"the server asks for {rounds:,} rounds; 1 to {MOST_ROUNDS:,} are possible."
        )
    entries, digest = int(values["entries"]), str(values["digest"])
    at_least = Position(entries, digest) if entries else None
    return node.prepare(run, rounds, at_least)


def _answering(work: Callable[[Message, Context], RecordDict]) -> Answer:
    """Return what answers a message; a refusal that a person can act on becomes an Error."""

    def answer(message: Message, context: Context) -> Message:
        try:
            return Message(work(message, context), reply_to=message)
        except BudgetExceeded:
            reason = "the next step would pass privacy.max_epsilon"
        except (UserError, ValueError) as error:
            reason = str(error)
        return Message(Error(REFUSED, reason), reply_to=message)

    return answer


def reply_to(
    app: Answer,
    message: Message,
    context: Context,
) -> Message:
    """Return the app's answer, or an Error if it raises, as Flower's own runtimes do."""
    try:
        return app(message, context)
    except Exception as error:
        return Message(Error(CRASHED, f"{type(error).__name__}: {error}"), reply_to=message)
