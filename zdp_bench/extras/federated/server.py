"""Conduct a federated run: request the nodes' releases, average them, and take optimizer steps.

In each round, the server sends the weights to every present node and waits up to
`federated.patience` seconds. An answer is valid if it is for this round, holds the model's tensors,
and is no larger than the clipping bound and the noise allow. Invalid answers are logged and
dropped. With at least `federated.min_nodes` valid answers (default: all nodes), the server applies
their weighted mean. With fewer, the run is saved and stops with an error message; the same command
resumes it at that round.

The server trusts only its own count of steps. It writes each round to a ledger before it requests
the round. Every node is assumed to have taken all steps of all rounds in that ledger, even if it
was not connected or never answered. A node's report can raise its count, but never lower it. A
round that is requested again counts as a new one of each node, within its budget, until the node
states its ledger's position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.extras.federated import messages
from zdp_bench.extras.federated.messages import Malformed
from zdp_bench.extras.federated.node import split_by_patient
from zdp_bench.extras.federated.roster import LEDGER_VALUES, Roster, reason_of
from zdp_bench.extras.federated.runner import combine_nodes, rounds_of, steps_of
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import real_view
from zdp_bench.privacy.tally import BudgetExceeded, Tally
from zdp_bench.records import Document
from zdp_bench.training import checkpoint
from zdp_bench.training.distributed import ALONE
from zdp_bench.training.evaluation import evaluate_trained
from zdp_bench.training.interrupts import CONTINUING, Stopped, stop_signals
from zdp_bench.training.progress import Watcher
from zdp_bench.training.public_start import run_digest_of
from zdp_bench.training.run import Beginning, Loop, privacy_report, run_record
from zdp_bench.training.run_folder import Outcome, find_or_run, open_ledger
from zdp_bench.training.setup import ModelSetup, Setup, count_units, load_data
from zdp_bench.training.step import descend

MAX_NORM = 1e18  # its square still fits in float32, which adaptive optimizers need

# For the ledger of rounds: execution digest, step and state digest; see `Ledger.choose_generation`.
# The digests are constants, so that every process continues the same generation: whether a round
# is repeated is decided by the digest of the weights that the server sends.
LEDGER_START = ("server", 0, "the weights it sends")


@dataclass(frozen=True)
class ServerContext:
    """What a server needs to conduct a run.

    Attributes:
        config: the run's configuration.
        data: the test set and, with `federated.patients=split`, the training set to split.
        run_digest: the digest that identifies the run.
        home: the run's folder.
        device: the device of the server's model.
        watcher: receives the progress.
        asked_to_stop: returns the number of the signal that was received, or 0.
    """

    config: Run
    data: Splits
    run_digest: str
    home: Path
    device: torch.device
    watcher: Watcher
    asked_to_stop: Callable[[], int]


def run_federation(
    transport: Callable[[ServerContext], Document],
    config: Run,
    watcher: Watcher,
    device: torch.device,
    wait: bool,
) -> Outcome:
    """Return a federated run if it is finished; otherwise conduct it.

    Args:
        transport: starts Flower, and calls `conduct` with its grid.
        config: the run's configuration.
        watcher: receives the progress.
        device: the device of the server's model.
        wait: wait while another process trains the same run.
    """
    data = load_data(config)
    digest = run_digest_of(config, data.digest)

    def train(home: Path) -> Document:
        with stop_signals() as asked_to_stop:
            context = ServerContext(config, data, digest, home, device, watcher, asked_to_stop)
            return transport(context)

    return find_or_run(config, digest, ALONE, wait, train)


def conduct(grid: Grid, context: ServerContext) -> Document:
    """Conduct a federated run and return its record.

    Formal guarantees:
        - the weights change only through the nodes' releases; each is made by its node's own
          mechanism and is in its node's ledger;
        - a node's ε in the record composes every release that the node can have made, as counted
          by the server, whatever the node reports; the run's ε is the largest of any node, which
          holds if each patient is at one node only. A patient at several has their composed ε.

    Raises:
        UserError: too few nodes take part or answer, or the data, ledger or checkpoint is unusable.
        Stopped: a signal was received; the run is saved.
    """
    beginning = Beginning()
    setup = ModelSetup.of(context.config, context.data, context.device)
    saved = checkpoint.load(context.home / "checkpoint.pt", context.run_digest)
    roster = gather_nodes(grid, context, saved.nodes if saved else {})
    rounds = Rounds(context, setup, roster, saved)
    # The nodes have one configuration, so the first one's precision is that of all.
    with closing(rounds.ledger), rounds.first_setup.arithmetic():
        rounds.prepare_nodes()
        loop = rounds.loop  # it calls back `take`, `save` and `epsilon` of `rounds`
        stopped_by = loop.take_steps(rounds, context.asked_to_stop)
        final = evaluate_trained(
            context.home,
            loop.trained,
            setup.task,
            context.data.test,
            context.device,
            rounds.batch_size.examples,
        )
        roster.report(context.config.federated.patience)
    privacy = account_nodes(
        roster,
        rounds.setups,
        repeatable=not context.config.privacy.secure,
        unit=context.data.unit,
    )
    record = run_record(loop, beginning, rounds.fixed_state, privacy, stopped_by, *final)
    record["federation"] = {"rounds": loop.step, "asked": roster.requested_rounds}
    return record


def gather_nodes(
    grid: Grid,
    context: ServerContext,
    known: Mapping[int, Mapping[str, Any]],
) -> Roster:
    """Wait for the nodes of a run to join.

    Args:
        grid: Flower's connection to the nodes.
        context: what the server needs to conduct the run.
        known: the nodes in the checkpoint, as `Roster.saved` returned them.

    Raises:
        UserError: too few nodes joined, or a node that the checkpoint does not know is missing.
        Stopped: a signal was received.
    """
    config, data = context.config, context.data
    nodes, patience = config.federated.nodes or 1, config.federated.patience
    expected = {"experiment": experiment_digest(config), "seed": config.seed}
    sizes = None
    if config.federated.patients == "split":
        expected["data"] = data.digest
        parts = split_by_patient(data, nodes, config.seed)
        sizes = [count_units(config, replace(data, train=part)) for part in parts]
    roster = Roster(grid, config, expected, sizes, known)
    all_present = roster.wait_for(nodes, patience, context.asked_to_stop)
    signal = context.asked_to_stop()
    if signal:
        raise Stopped(signal)
    # The plan needs every node's size, so every node must have joined once, perhaps before the
    # checkpoint.
    all_known = len(roster.standings) >= nodes
    enough_present = len(roster.present) >= roster.min_nodes
    if not all_present and not (all_known and enough_present):
        refusals = roster.list_refusals()
        reasons = f" ({'; '.join(map(str, refusals))})" if refusals else ""
        raise UserError(
            f"only {len(roster.present)} of {nodes} nodes joined within federated.patience="
            f"{patience:g} seconds{reasons}."
        )
    return roster


class Rounds:
    """The rounds of a federated run, which `Loop` takes as its steps.

    Attributes:
        setups: each node's setup, to check its releases and to account for them.
        fixed_state: the model's state that must stay fixed, as `Setup.check_model` returns it.
        ledger: the rounds that the server has requested.
    """

    def __init__(
        self,
        context: ServerContext,
        setup: ModelSetup,
        roster: Roster,
        saved: checkpoint.Checkpoint | None,
    ) -> None:
        config = context.config
        self.context, self.setup, self.roster = context, setup, roster
        # How many units a node draws from: patients if they are the privacy unit, else examples.
        self.sizes = {
            number: roster.standings[number].records for number in range(roster.num_nodes)
        }
        self.round_plan = rounds_of(config, list(self.sizes.values()))
        # These are cached by size, because nodes of the same size have the same setup and ε.
        self._setup_of = cache(
            lambda size: setup.with_plan(steps_of(config, size, self.round_plan.steps))
        )
        self._epsilon_of = cache(lambda size, releases: self._setup_of(size).epsilon(releases))
        self._affordable_of = cache(
            lambda size, max_releases: self._setup_of(size).affordable_releases(max_releases)
        )
        self.setups = {number: self._setup_of(size) for number, size in self.sizes.items()}
        self.limits = {
            number: largest_release(node_setup.mechanism, config.federated.local_steps)
            for number, node_setup in self.setups.items()
        }
        self.first_setup = self.setups[0]
        self.fixed_state = self.first_setup.check_model().fixed_state
        self.ledger = open_ledger(
            context.home / "rounds.jsonl",
            self.first_setup.mechanism,
            not config.privacy.secure,
            saved.ledger if saved else None,
            LEDGER_START,
            identity="server",
        )
        self.batch_size = self.first_setup.micro_batch_size()
        self.parameters = trainable(setup.model)
        self.loop = Loop(
            setup,
            self.round_plan,
            context.run_digest,
            context.home,
            context.watcher,
            self.batch_size,
            # By default, save after every round: a repeated round may count as a new release.
            config.execution.checkpoint_steps or 1,
            round_steps=config.federated.local_steps,
        )
        self.loop.restore(saved)
        self._rounds_at_start = self.ledger.releases  # by earlier attempts at this run
        roster.requested_rounds = self.ledger.releases
        roster.affordable_steps = lambda number, steps: self._affordable_of(
            self.sizes[number], steps
        )

    def prepare_nodes(self) -> None:
        """Ask the present nodes to prepare, and wait until they have."""
        num_present = len(self.roster.present)  # `prepare` empties `present` until they answer
        mechanism_digests = {
            number: node_setup.mechanism.digest() for number, node_setup in self.setups.items()
        }
        self.roster.prepare(self.context.run_digest, self.round_plan.steps, mechanism_digests)
        patience = self.context.config.federated.patience
        # If too few are ready in time, `take` says so.
        self.roster.wait_for(num_present, patience, self.context.asked_to_stop)

    def save(self) -> None:
        """Save the run, so that the same command resumes it here."""
        self.ledger.sync()
        self.loop.save(self.ledger.position, self.roster.saved())

    def epsilon(self, rounds: int) -> float:
        """Return the largest tight ε of any node after `rounds` rounds.

        Later rounds, which a killed run requested, are left out: they are in the ledger, and count
        once this run reaches them.
        """
        counted_rounds = self.ledger.releases_before(rounds)
        return max(
            self._epsilon_of(self.sizes[number], self.roster.spent(number, counted_rounds))
            for number in self.roster.standings
        )

    def take(self, round_: int) -> bool:
        """Conduct one round; return False if a signal was received instead.

        Raises:
            BudgetExceeded: the round would exceed a node's budget; no node was asked.
            UserError: too few nodes are present, or too few answers are valid; the run is saved.
        """
        roster, context = self.roster, self.context
        patience = context.config.federated.patience
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        weights_digest = messages.digest(weights)
        is_new = not self.ledger.has_released(round_, weights_digest)
        if not self._is_affordable(self.ledger.releases + int(is_new)):
            raise BudgetExceeded  # so that no node spends budget on a round that cannot complete
        has_enough = roster.wait_for(roster.min_nodes, patience, context.asked_to_stop)
        if context.asked_to_stop():
            return False
        if not has_enough:
            self._stop({})
        if not is_new:
            roster.count_repeat()
            self.save()  # so that the repeat counts even if this process is killed
        self.ledger.append(round_, weights_digest)
        self.ledger.sync()  # on disk before any node is asked, so that no round goes uncounted
        roster.requested_rounds = self.ledger.releases
        answers = roster.round(messages.content({"round": round_}, weights), patience)
        releases, reasons = valid_releases(roster, answers, round_, weights, self.limits)
        if len(releases) < roster.min_nodes:
            self._stop(reasons)
        for number in releases:
            roster.count_use(number)
        batch_sizes = {
            number: self.setups[number].plan.sampling.expected_batch_size for number in releases
        }
        mean = weighted_mean(releases, batch_sizes)
        descend(dict(self.setup.model.named_parameters()), self.setup.optimizer, mean)
        return True

    def _is_affordable(self, rounds: int) -> bool:
        """Return whether `rounds` rounds are within every node's budget."""
        # A run requests no more rounds than this, even if it requests every round anew. So
        # `affordable_releases` need not search beyond the releases of these rounds.
        max_rounds = self._rounds_at_start + self.round_plan.steps
        for number, size in self.sizes.items():
            affordable = self._affordable_of(size, self.roster.spent(number, max_rounds))
            if affordable is not None and self.roster.spent(number, rounds) > affordable:
                return False
        return True

    def _stop(self, reasons: Mapping[int, str]) -> NoReturn:
        """Save the run, and stop it with the reasons why nodes are missing."""
        self.save()
        raise UserError(missing_message(self.roster, reasons))


def valid_releases(
    roster: Roster,
    answers: Mapping[int, Message],
    round_: int,
    parameters: Mapping[str, Tensor],
    limits: Mapping[int, float],
) -> tuple[dict[int, dict[str, Tensor]], dict[int, str]]:
    """Check the nodes' answers to a round, and log why answers are dropped.

    Args:
        roster: notes what the answers report of the nodes' ledgers.
        answers: the answers, by the node's number.
        round_: the round that was requested.
        parameters: tensors with the names, shapes and dtypes of the model's parameters.
        limits: the largest norm that each node's release can have; see `largest_release`.

    Returns:
        the valid releases, and the reasons why the other answers are dropped, by node.
    """
    releases, reasons = {}, {}
    for number, answer in sorted(answers.items()):
        if answer.has_error():
            reasons[number] = reason_of(answer)
            continue
        try:
            values = messages.checked_values(answer, LEDGER_VALUES | {"round": int})
            if values["round"] != round_:
                raise Malformed(f"is for round {values['round']}, not for round {round_}")
            release = messages.tensors_of(answer, parameters)
            norm = norm_of(release)
            if not math.isfinite(norm):
                raise Malformed("is not finite")
            if norm > limits[number]:
                raise Malformed(
                    f"has a norm of {norm}; clipping bound and noise allow at most {limits[number]}"
                )
            roster.note_ledger(number, values)
            releases[number] = release
        except Malformed as error:
            reasons[number] = f"its answer {error}"  # the errors above are predicates
    for number, reason in reasons.items():
        roster.log_drop(number, reason)
    return releases, reasons


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """Return the joint L2 norm of all tensors, computed in float64."""
    norms = []
    for tensor in tensors.values():
        norms.append(float(torch.linalg.vector_norm(real_view(tensor), dtype=torch.float64)))
    return math.hypot(*norms)


def largest_release(mechanism: Mechanism, steps: int) -> float:
    """Return an upper bound on the norm of an honest node's release, the sum of `steps` gradients.

    In the worst case, every example is drawn and has its largest norm, all in one direction. The
    noise of k reals has a norm of about √k standard deviations; ten more standard deviations are
    allowed. The bound is twice the sum, to allow for rounding, and at most `MAX_NORM`, which is the
    only limit without clipping.
    """
    sampling = mechanism.sampling
    bounds = [block.bound for block in mechanism.blocks]
    # A joint bound holds over all blocks together, and every block states it.
    bound = bounds[0] if mechanism.joint else math.hypot(*bounds)
    noise_norms = []
    for block in mechanism.blocks:
        num_reals = 2 * math.prod(block.shape)  # as if every block were complex
        noise_norms.append(block.std * (math.sqrt(num_reals) + 10))
    largest_sum = sampling.records * bound + math.hypot(*noise_norms)
    return min(2 * steps * largest_sum / sampling.expected_batch_size, MAX_NORM)


def missing_message(roster: Roster, reasons: Mapping[int, str]) -> str:
    """Return the error message of a round with too few valid answers.

    Args:
        roster: knows why absent nodes are refused.
        reasons: why answers to this round were dropped, by node.
    """
    refusals = [
        refusal
        for refusal in roster.list_refusals()
        if refusal.number not in {*roster.present, *reasons}
    ]
    parts = [*map(str, refusals), *(f"node {number}: {why}" for number, why in reasons.items())]
    explained = {*reasons, *(refusal.number for refusal in refusals)}
    silent = set(range(roster.num_nodes)) - roster.present.keys() - explained
    if silent:
        parts.append(f"no answer from node {', '.join(map(str, sorted(silent)))}")
    return (
        f"too few nodes answered ({'; '.join(parts)}): federated.min_nodes requires "
        f"{roster.min_nodes} of {roster.num_nodes}. The run is saved, and every step is counted; "
        f"{CONTINUING}."
    )


def weighted_mean(
    releases: Mapping[int, Mapping[str, Tensor]],
    batch_sizes: Mapping[int, float],
) -> dict[str, Tensor]:
    """Return Σ mᵢ gᵢ / Σ mᵢ over the nodes, where mᵢ is a node's expected batch size.

    The nodes are summed in the order of their numbers, so that the rounding is reproducible.
    """
    total = sum(batch_sizes.values())
    mean: dict[str, Tensor] = {}
    for number in sorted(releases):
        for name, gradient in releases[number].items():
            weighted = gradient * (batch_sizes[number] / total)
            mean[name] = mean[name] + weighted if name in mean else weighted
    return mean


def account_nodes(
    roster: Roster,
    setups: Mapping[int, Setup],
    repeatable: bool,
    unit: str,
) -> dict[str, Any]:
    """Return the record's section on privacy, for the steps that the server counts.

    `combine_nodes` states what holds for whom.

    Args:
        roster: the nodes, and the steps that each can have taken.
        setups: each node's setup, by its number.
        repeatable: whether the noise is seeded, so that a step can be repeated.
        unit: the kind of owner, such as "patient".
    """

    @cache
    def report(
        number: int,
        releases: int,
        examples: int,
    ) -> dict[str, Any]:
        return privacy_report(setups[number], Tally(repeatable, releases), examples, unit)

    # Nodes with the same mechanism share a report, so that the cache computes their ε once.
    first_with: dict[Mechanism, int] = {}
    for number in sorted(setups):
        first_with.setdefault(setups[number].mechanism, number)
    reports = []
    for number, standing in sorted(roster.standings.items()):
        setup, spent = setups[number], roster.spent(number)
        examples = standing.examples_per_patient
        counts_patients = setup.config.privacy.by_owner
        if not counts_patients:
            # `records` then counts examples, and one patient cannot have more than all of them.
            examples = min(examples, standing.records)
        node_report = {
            **report(first_with[setup.mechanism], spent, examples),
            "node": number,
            "answers": standing.answers,
            "ledger": {"entries": standing.entries, "digest": standing.digest},
            # Releases that the server counts and the node has not reported.
            "unconfirmed": spent - standing.entries,
        }
        reports.append(node_report)
    return combine_nodes(reports)
