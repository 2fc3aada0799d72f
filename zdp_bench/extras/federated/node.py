"""One node of a federation: its patients, noise and ledger, and Flower's ClientApp around it.

A node takes the same private steps as a central run.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
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
from zdp_bench.extras.federated.messages import (
    MAX_ROUNDS,
    SECRET,
    VALUES,
    Malformed,
    checked_values,
    content,
    digest,
    tensors_of,
    values_of,
)
from zdp_bench.extras.federated.runner import steps_of
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.composition import compose_epsilon, list_spent_steps
from zdp_bench.privacy.noise import run_key, stream_bytes
from zdp_bench.privacy.sampling import place_each
from zdp_bench.privacy.tally import BudgetExceeded, Position, Tally
from zdp_bench.training.machine import execution_digest, foreign_code, pick_device
from zdp_bench.training.reservation import plan_spending, reserve
from zdp_bench.training.run_folder import open_ledger
from zdp_bench.training.setup import ModelSetup, Setup, count_units, load_data
from zdp_bench.training.spending import find_other_ledgers, read_spendings
from zdp_bench.training.spending_file import NODE, NODES
from zdp_bench.training.step import Training, private_step

CRASHED = 1  # code of an `Error`: the app raised an exception
REFUSED = 700  # code of an `Error`: the node refuses; Flower's own codes are smaller
MUST_JOIN_AGAIN = "it was restarted and has to join again"
# What the server gets instead of the text of an error that may quote the site's data or folders.
SEE_LOG = "it cannot answer; the reason is in its own log"
# Values of a `prepare` message. `entries` and `digest` are the last position of the ledger that the
# server knows: the number of releases and the chain's digest. All messages use these names.
PREPARE_VALUES = {"run": str, "rounds": int, "entries": int, "digest": str}
# The state digest of every start in a node's ledger. A node may start from any weights, because the
# line of each step states those of its round. So a process with the same code and machine continues
# the generation, from step 0 on.
ANY_WEIGHTS = "the weights it is sent"
RUN_DIGEST = re.compile(r"[0-9a-f]{64}")  # names the run's folder, so nothing else is accepted

log = logging.getLogger(__name__)
Handler = Callable[[Message, Context], Message]

# The sites of this process, by the key of their ClientApp. The app cannot hold data and model,
# because Flower may copy it to another process.
_sites: dict[str, Site] = {}


class RefusalError(UserError):
    """A reason that may leave the site: its text is about the protocol and quotes no data."""


# ----------------------------------------------------------------------------------------- patients


def split_by_patient(data: Splits, nodes: int, seed: int) -> list[Part]:
    """Split the training set by patient.

    A hash of the patient's name and the seed decides the node. The nodes' sizes therefore differ;
    see `place_each`.

    Formal guarantees: every example is at exactly one node; all examples of a patient are at the
    same node; adding or removing a patient moves no other patient.

    Raises:
        UserError: a node has no patient, or the data set does not state the owners of its examples.
    """
    # the index of each example's patient, and the patients' names
    patient_of_example, patients = identify_owners(data, "federated.patients=split")
    hash_key = stream_bytes(seed, "partition")
    node_of_patient = place_each(patients, nodes, hash_key)
    node_of_example = node_of_patient[patient_of_example]
    parts = []
    for node in range(nodes):
        rows = np.flatnonzero(node_of_example == node)
        fault = (
            f"node {node} has none of the {len(patients):,} patients, which a hash of their names "
            "assigns to nodes; use fewer nodes or another seed"
        )
        require(len(rows) > 0, "federated.nodes", nodes, fault)
        parts.append(Part(data.train, torch.from_numpy(rows)))
    return parts


# ----------------------------------------------------------------------------------------- one node


class AccumulatingSGD(torch.optim.SGD):
    """SGD for a node's steps within a round, which also sums the released gradients.

    The sum is what the node sends. It equals (θ − θ')/lr for weights θ before and θ' after the
    round, without the rounding of θ'.

    Attributes:
        sums: the sum of each parameter's gradients, by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor], lr: float) -> None:
        super().__init__(parameters.values(), lr=lr)
        self._named = parameters
        self.sums: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name, parameter in self._named.items():
            assert parameter.grad is not None
            if name in self.sums:
                self.sums[name] = self.sums[name] + parameter.grad
            else:  # copied, because the next step may overwrite the gradient's memory
                self.sums[name] = parameter.grad.clone()
        super().step(closure)


class Site:
    """The data and model of a process that runs one or more nodes.

    Data, model and nodes are created at first use. Over the network, a site is one Flower client (a
    SuperNode) with one node. In a simulation, all nodes share one site.
    """

    def __init__(
        self, config: Run, data: Splits | None = None, device: torch.device | None = None
    ) -> None:
        self.config, self._data = config, data
        self.device = device or pick_device(config.device)
        self.nodes: dict[int, Node] = {}
        self._checked = False

    @cached_property
    def data(self) -> Splits:
        """The data set, of which each node has all or a part."""
        return self._data or load_data(self.config)

    @cached_property
    def setup(self) -> ModelSetup:
        """The model and its setup, which the nodes of this process share.

        They can share it because every round starts by setting the weights.
        """
        return ModelSetup.of(self.config, self.data, self.device)

    @cached_property
    def parts(self) -> list[Part]:
        """Each node's part of the training set, with `federated.patients=split`."""
        assert self.config.federated.nodes is not None
        return split_by_patient(self.data, self.config.federated.nodes, self.config.seed)

    def check(self, setup: Setup) -> None:
        """Call `Setup.check_model` for the first node only, because nodes share the model."""
        if not self._checked:
            setup.check_model()
            self._checked = True

    def node(self, number: int) -> Node:
        """Return the node with this number, creating it at the first call."""
        if number not in self.nodes:
            self.nodes[number] = Node(self, number)
        return self.nodes[number]

    def close(self) -> None:
        """Close the ledgers of all nodes."""
        for node in self.nodes.values():
            node.close()


class Node:
    """One node. The server asks it to `join`, then to `prepare`, then to `take_round` repeatedly.

    Formal guarantees:
        - With seeded noise, the sample and the noise of a step are functions of the plug-ins' code,
          the run, the mechanism, the node, its data, the ledger's generation, the weights at the
          start of the round, and the step. Within a generation, the same step from the same weights
          is the same release, bit for bit. Other weights give another sample and other noise.
        - Every step is written to the node's own ledger before its noise is drawn, so a round whose
          sum never arrives is counted too.
        - With `federated.patients=own`, `privacy.max_epsilon` bounds the ε of this run and all
          other runs in the site's results folder that may share examples with it, whatever the
          server requests.

    Attributes:
        examples: the node's training examples.
        ledger: counts the node's releases. None until `prepare`, which also sets `setup`,
            `mechanism`, `micro_batch_size`, `reserved` and `max_releases`.
        reserved: upper bound on this run's releases. The site's other runs count all of them, taken
            or not.
        first_allowed_round: the first round that this process may take. Earlier ones began with
            larger micro-batches, so a repeat would add the same noise to a sum that is rounded
            otherwise.
    """

    def __init__(self, site: Site, number: int) -> None:
        self.site, self.number = site, number
        self.config = site.config
        self.is_split = site.config.federated.patients == "split"
        self.examples: Source = site.parts[number] if self.is_split else site.data.train
        self.ledger: Tally | None = None

    @cached_property
    def num_units(self) -> int:
        """The number of examples, or of patients if they are the unit, that a step samples from."""
        return count_units(self.config, replace(self.site.data, train=self.examples))

    def join(self) -> dict[str, Any]:
        """Return what the server needs to plan the rounds; nothing else about the data is sent.

        With `federated.patients=own`, the digest of the data is not sent: a server that knows all
        records but one could test guesses of that record. With `federated.patients=split`, the
        server has the data anyway, and has to check that all nodes have the same.
        """
        values = {
            "node": self.number,
            "experiment": experiment_digest(self.config),
            "seed": self.config.seed,
            "records": self.num_units,  # named so in the message, whatever the unit is
            "examples_per_patient": self.site.data.examples_per_patient,
        }
        if self.is_split:
            values["data"] = self.site.data.digest
        return values

    def prepare(
        self, run: str, rounds: int, known_position: Position | None, reserved: int | None = None
    ) -> dict[str, Any]:
        """Calibrate the mechanism, open the ledger and reserve the releases of all rounds.

        Args:
            run: the digest of the run.
            rounds: the number of rounds in the server's plan.
            known_position: the last position of the ledger that the server knows. A ledger that
                has not reached it is rejected. If None, the node may start a new ledger.
            reserved: what another process reserved when it answered this message first. Default: an
                upper bound, from the ledger as it is before the first round.

        Returns:
            the ledger's position (see `report_position`), and the mechanism's digest.

        Raises:
            RefusalError: the ledger is behind the known position. The cause has the details.
            UserError: the node's total ε is not known.
        """
        self.close()  # if the node refuses below, it takes no rounds with its earlier ledger
        site = self.site
        node_setup = replace(site.setup, data=replace(site.data, train=self.examples))
        self.setup = node_setup.with_plan(steps_of(site.config, self.num_units, rounds))
        site.check(self.setup)
        self.mechanism = self.setup.mechanism
        self.micro_batch_size = self.setup.micro_batch_size()
        self.first_allowed_round = 0
        # With `federated.patients=own`, only the site knows the digest of its data, so nobody else
        # can compute its noise.
        key_parts = f"{foreign_code(site.config.plugins)}:node {self.number}:{site.data.digest}"
        self._key = run_key(run, self.mechanism, key_parts)
        run_home = records.folder(self.config.results, self.config.recipe, run)
        home = run_home / NODES / self._name()
        execution = execution_digest(
            self.config.plugins,
            site.device,
            self.micro_batch_size.examples,
            ranks=1,
            deterministic=self.config.execution.deterministic,
        )
        start = (execution, 0, ANY_WEIGHTS)
        try:
            ledger = open_ledger(
                home / "ledger.jsonl",
                self.mechanism,
                repeatable=not self.config.privacy.secure,
                checkpoint_position=known_position,
                start=start,
                find_other_ledgers=partial(find_other_ledgers, self.config.results, run, home),
                identity=f"{NODE}{self.number}",
            )
        except UserError as error:
            raise RefusalError(
                "its ledger cannot be used, or is behind what the server knows; the reason is in "
                "its own log"
            ) from error
        try:
            if reserved is None:  # an upper bound, reached if every step is taken anew
                reserved = ledger.releases + self.setup.plan.steps
            self.reserved = reserved
            if self.is_split:
                self.max_releases = self.setup.affordable_releases(self.reserved)
            else:
                # Other runs at this site count these releases from now on, even if this run is
                # stopped. This run counts theirs only after it has reserved its own, so two that
                # begin at once count one another.
                reserve(
                    self.setup.config,
                    self.setup.data,
                    self.mechanism,
                    self.reserved,
                    home,
                    run=run,
                )
                self.max_releases = self._affordable_after_other_runs(self.reserved, home)
        except BaseException:
            ledger.close()
            raise
        self.ledger = ledger  # last: with it, the node takes rounds
        return self.report_position() | {"mechanism": self.mechanism.digest()}

    def close(self) -> None:
        """Close the ledger, so that the node takes no round until it has prepared again."""
        if self.ledger:
            self.ledger.close()
        self.ledger = None

    def _name(self) -> str:
        """Return the name of this node's folder in the run's folder.

        A site's own data may change between two runs. The name then changes with its digest, so
        that another ledger begins.
        """
        name = f"{self.number:02d}"
        return name if self.is_split else f"{name}-{self.site.data.digest[:8]}"

    def _affordable_after_other_runs(self, planned_releases: int, home: Path) -> int | None:
        """Return how many of this run's releases the budget allows beside the site's other runs.

        If the site's data has changed during this run, the releases before are in another folder
        (`_name`) and count as those of another run.

        Args:
            planned_releases: the number of releases that this run plans.
            home: the node's folder.

        Returns:
            at most `planned_releases`; 0 if the other runs alone exceed the budget. None without
            `privacy.max_epsilon`.
        """
        config = self.setup.config
        budget = config.privacy.max_epsilon
        if budget is None:
            return None
        this_run = plan_spending(config, self.setup.data, self.mechanism, planned_releases, home)
        earlier = read_spendings(config.results, except_home=home)
        others = [spending for spending in earlier if spending.may_share(this_run)]
        if not others:
            return self.setup.affordable_releases(planned_releases)
        try:
            all_spent = list_spent_steps([*others, this_run], this_run.by_owner)
            spent_before, planned = all_spent[:-1], all_spent[-1]

            def epsilon_after(steps: int) -> float:
                taken = replace(planned, steps=steps)
                return compose_epsilon([*spent_before, taken], config.privacy.delta)

            return _largest_within(budget, planned_releases, epsilon_after)
        except ValueError as error:
            raise UserError(
                f"privacy.max_epsilon={budget:g}: {error}, so this site's total ε is "
                "not known; use the earlier runs' sampling and unit."
            ) from None

    def report_position(self) -> dict[str, Any]:
        """Write the ledger to disk, and return its position for the server."""
        if self.ledger is None:
            raise RefusalError(MUST_JOIN_AGAIN)
        self.ledger.sync()
        position = self.ledger.position
        return {"entries": position.releases, "digest": position.digest}

    def take_round(
        self, round_: int, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Take the private steps of a round.

        Args:
            round_: the number of the round, from 0.
            weights: the server's weights, from which the steps start.

        Returns:
            the ledger's position and the number of the round, and the sum of the released gradients
            by parameter.

        Raises:
            BudgetExceeded: the next step would exceed `privacy.max_epsilon`. Earlier steps of the
                round count, although their sum is not sent.
            RefusalError: this process was not asked to `prepare`, or memory ran out since the round
                was taken first. The server then asks it to join again.
            WeightsChangedError: the model or the loss changed a weight.
        """
        if self.ledger is None or round_ < self.first_allowed_round:
            raise RefusalError(MUST_JOIN_AGAIN)
        setup = self.setup
        size_before = self.micro_batch_size.examples  # `private_step` halves it if memory runs out
        parameters = trainable(setup.model)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        weights_digest = digest(weights)
        # Other weights get other noise, and so does a new generation of the ledger, which begins
        # after a restart that cannot repeat the earlier steps bit for bit.
        key = f"{self._key}:{self.ledger.generation}:{weights_digest}"
        optimizer = AccumulatingSGD(parameters, setup.config.federated.local_lr)
        training = Training(
            algorithm=setup.algorithm,
            model=setup.model,
            optimizer=optimizer,
            noise=setup.noise(key),
            ledger=self.ledger,
            max_releases=self.max_releases,
        )
        local_steps = self.config.federated.local_steps
        first = round_ * local_steps
        try:
            with setup.arithmetic():
                for step in range(first, first + local_steps):
                    batches, divisor = setup.draw(key, step, self.micro_batch_size)
                    private_step(training, step, batches, divisor, weights_digest)
        finally:
            if self.micro_batch_size.examples != size_before:
                self.first_allowed_round = round_ + 1
        values = self.report_position() | {"round": round_}
        return values, optimizer.sums


def _largest_within(budget: float, max_steps: int, epsilon_after: Callable[[int], float]) -> int:
    """Return the largest number of steps, up to `max_steps`, within a budget; 0 if none is."""
    return bisect_right(range(1, max_steps + 1), budget, key=epsilon_after)  # ε rises with steps


# ------------------------------------------------------------------------------------ its ClientApp


@contextmanager
def open_site(key: str, site: Site) -> Iterator[Site]:
    """Let ClientApps with this key use this site within the block."""
    _sites[key] = site
    try:
        yield site
    finally:
        _sites.pop(key).close()


def client_app(config: Run, key: str) -> ClientApp:
    """Return the ClientApp of all nodes.

    `partition-id` in Flower's node configuration is the node's number.

    Messages and their answers:
        query.join      {} -> `Node.join`
        query.prepare   {run, rounds, entries, digest} -> the position, the mechanism's digest
        train           {round}, weights -> the position, the round, the sum of released gradients
        query.report    {} -> the position

    The position is that of the ledger; see `Node.report_position`.
    """
    app = ClientApp()

    def find_node(context: Context) -> Node:
        if key not in _sites:
            _sites[key] = Site(config)
        number = context.node_config.get("partition-id")
        nodes = config.federated.nodes or 1
        if type(number) is not int or not 0 <= number < nodes:
            raise RefusalError(
                f"partition-id={number!r}: must be a whole number from 0 to {nodes - 1}"
            )
        return _sites[key].node(number)

    def join(message: Message, context: Context) -> RecordDict:
        return content(find_node(context).join())

    def prepare(message: Message, context: Context) -> RecordDict:
        values = checked_values(message, PREPARE_VALUES)
        # Until the node has prepared, no other process may take a round for it.
        context.state.pop("prepared", None)
        node = find_node(context)
        prepared = _check_and_prepare(node, values)
        context.state["prepared"] = ConfigRecord(values | {"reserved": node.reserved})
        return content(prepared)

    def prepared_node(context: Context) -> Node:
        """Return the node. If another process prepared it, prepare it here as well.

        A SuperNode starts a process for each message.
        """
        node = find_node(context)
        if node.ledger is None and "prepared" in context.state:
            values: dict[str, Any] = dict(context.state.config_records["prepared"])
            reserved = values.pop("reserved")
            _check_and_prepare(node, values, reserved)
        return node

    def train(message: Message, context: Context) -> RecordDict:
        node = prepared_node(context)
        round_ = checked_values(message, {"round": int})["round"]
        weights = tensors_of(message, trainable(node.site.setup.model))
        values, gradients = node.take_round(round_, weights)
        return content(values, gradients)

    def report(message: Message, context: Context) -> RecordDict:
        return content(prepared_node(context).report_position())

    app.query("join")(_handler(join))
    app.query("prepare")(_handler(prepare))
    app.train()(_handler(train))
    app.query("report")(_handler(report))
    return app


def _check_and_prepare(
    node: Node, values: dict[str, Any], reserved: int | None = None
) -> dict[str, Any]:
    """Check the values of a `prepare` message, and prepare the node; see `Node.prepare`."""
    run, rounds = values["run"], values["rounds"]
    if not RUN_DIGEST.fullmatch(run):
        raise RefusalError("the server's name for the run is not 64 hexadecimal digits")
    if not 1 <= rounds <= MAX_ROUNDS:
        raise RefusalError(f"the server requests {rounds:,} rounds, not 1 to {MAX_ROUNDS:,}")
    # With 0 entries, the server knows no ledger of this node yet.
    entries = values["entries"]
    known_position = Position(entries, values["digest"]) if entries else None
    return node.prepare(run, rounds, known_position, reserved)


def _handler(respond: Callable[[Message, Context], RecordDict]) -> Handler:
    """Return a handler of messages that answers with an `Error` if the node refuses."""

    def answer(message: Message, context: Context) -> Message:
        contents = respond(message, context)
        # the only proof of who answers that the server accepts; see `exchange.py`
        contents.config_records[VALUES][SECRET] = str(values_of(message).get(SECRET))
        return Message(contents, reply_to=message)

    return partial(call_handler, answer)


def call_handler(handler: Handler, message: Message, context: Context) -> Message:
    """Return the answer of a handler or ClientApp, or an `Error` that quotes nothing of the data.

    The texts of `BudgetExceeded`, `Malformed` and `RefusalError` are about the protocol alone. Any
    other error may quote a patient, a file or a folder, so it is only logged here.
    """
    code = REFUSED
    try:
        return handler(message, context)
    except BudgetExceeded:
        reason = "the next step would exceed privacy.max_epsilon"
    except Malformed as error:
        reason = f"the server's message {error}"
    except RefusalError as error:
        reason = str(error)
        if error.__cause__:
            log.warning("the node refuses: %s", error.__cause__)
    except (UserError, ValueError) as error:
        reason = SEE_LOG
        log.warning("the node cannot answer: %s", error)
    except Exception as error:
        code, reason = CRASHED, SEE_LOG
        log.warning("the node failed: %s: %s", type(error).__name__, error, exc_info=True)
    return Message(Error(code, reason), reply_to=message)
