"""Conduct a federated run: rounds of asking nodes for releases, averaging, one optimiser step.

The rule for a round. Every node that is present is asked, and given `federated.patience` seconds.
An answer counts if it is to this round, holds the model's tensors, and is no larger than bound and
noise allow; any other is dropped with one line in the log. With at least `federated.min_nodes` of
them (all, where nothing is said) the round is their weighed mean, whoever is missing; with fewer
the run ends in one sentence, saved, and the same command goes on from that round.

The server trusts no count but its own. It writes a round into a ledger before it asks for it, and
every node is held to have taken the steps of every round in there, whether it was asked, or
answered, or was never heard of again. A node's own word raises that number where its ledger holds
more, and never lowers it.
"""

from __future__ import annotations

import hashlib
import math
import time
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

from zdp_bench.config.digests import experiment_digest, run_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.extras.federated import messages
from zdp_bench.extras.federated.messages import Malformed
from zdp_bench.extras.federated.node import split_by_patient
from zdp_bench.extras.federated.roster import SPENT, Roster, reason_of
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.ledger import BudgetExceeded, Tally
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.records import Document
from zdp_bench.training import checkpoint
from zdp_bench.training.distributed import ALONE
from zdp_bench.training.evaluation import evaluate_trained
from zdp_bench.training.interrupts import Stopped, stop_signals
from zdp_bench.training.machine import plugin_digests
from zdp_bench.training.plan import rounds_of, steps_of
from zdp_bench.training.progress import Watcher
from zdp_bench.training.run import Loop, privacy_report, run_record
from zdp_bench.training.run_folder import Outcome, find_or_run, open_ledger
from zdp_bench.training.setup import ModelSetup, Setup, count_units, load_data
from zdp_bench.training.step import descend

SQUARED = 1e18  # a norm whose square is a float32


@dataclass(frozen=True)
class ServerContext:
    """What a server works on."""

    config: Run
    data: Splits  # the test set; with `patients=split` also the training set that is split
    run: str
    home: Path
    device: torch.device
    watcher: Watcher
    asked_to_stop: Callable[[], int]


def run_federation(
    over: Callable[[ServerContext], Document],
    config: Run,
    watcher: Watcher,
    device: torch.device,
    wait: bool,
) -> Outcome:
    """Find a federated run, or carry it out by `over`, which calls `conduct` with a grid."""
    data = load_data(config)
    digest = run_digest(config, data.digest, plugin_digests(config.plugins))

    def train(home: Path) -> Document:
        with stop_signals() as asked_to_stop:
            return over(ServerContext(config, data, digest, home, device, watcher, asked_to_stop))

    return find_or_run(config, digest, ALONE, wait, train)


def conduct(grid: Grid, given: ServerContext) -> Document:
    """Conduct a federated run and return its record; the module gives the rule of a round.

    Formal guarantees:
        - the weights change only through what nodes released under their own mechanisms, each in
          its node's ledger;
        - the record's ε of a node composes every release it can have made, as the server counts
          them, whatever the node says; the run's ε is the worst node's, for each patient is at one
          node only.

    Raises:
        UserError: too few nodes take part or answer, or the data, ledger or checkpoint is not
            usable.
        Stopped: a signal asked for it; the run is saved.
    """
    began = time.time()
    setup = ModelSetup.of(given.config, given.data, given.device)
    saved = checkpoint.load(given.home / "checkpoint.pt", given.run)
    roster = gather_nodes(grid, given, saved.nodes if saved else {})
    rounds = Rounds(given, setup, roster, saved)
    with closing(rounds.ledger), rounds.first_setup.arithmetic():
        rounds.prepare_nodes()
        loop = rounds.loop
        stopped_by = loop.take_steps(rounds, given.asked_to_stop)
        final = evaluate_trained(
            given.home,
            loop.trained,
            setup.task,
            given.data.test,
            given.device,
            rounds.batch_size.examples,
        )
        roster.report(given.config.federated.patience)
    privacy = account_nodes(
        roster,
        rounds.setups,
        repeatable=not given.config.privacy.secure,
        unit=given.data.unit,
    )
    record = run_record(loop, began, rounds.fixed_state, privacy, stopped_by, *final)
    record["federation"] = {"rounds": loop.step, "asked": roster.asked}
    return record


def gather_nodes(
    grid: Grid,
    given: ServerContext,
    known: Mapping[int, Mapping[str, Any]],
) -> Roster:
    """Wait for the nodes of a run.

    Args:
        known: the nodes that a checkpoint left; see `Roster.saved`.

    Raises:
        UserError: too few joined, or one that was never heard of did not.
        Stopped: a signal asked for it.
    """
    config, data = given.config, given.data
    nodes, patience = config.federated.nodes or 1, config.federated.patience
    expected = {"experiment": experiment_digest(config), "seed": config.seed}
    sizes = None
    if config.federated.patients == "split":
        expected["data"] = data.digest
        parts = split_by_patient(data, nodes, config.seed)
        sizes = [count_units(config, replace(data, train=part)) for part in parts]
    roster = Roster(grid, config, expected, sizes, known)
    has_all = roster.wait_for(nodes, patience, given.asked_to_stop)
    if signal := given.asked_to_stop():
        raise Stopped(signal)
    has_enough = len(roster.present) >= roster.least and len(roster.standings) >= nodes
    if not has_all and not has_enough:
        refusals = [f"node {number}: {why}" for number, why in sorted(roster.refusals().items())]
        reasons = f" ({'; '.join(refusals)})" if refusals else ""
        raise UserError(
            f"only {len(roster.present)} of {nodes} nodes joined within federated.patience="
            f"{patience:g} seconds{reasons}."
        )
    return roster


class Rounds:
    """The rounds of a federated run: they ask nodes, average releases, and train the model.

    Attributes:
        setups: what each node trains with, to check and to account.
        fixed_state: what the check of the model found of its state.
        ledger: the rounds that were asked for.
    """

    def __init__(
        self,
        given: ServerContext,
        setup: ModelSetup,
        roster: Roster,
        saved: checkpoint.Checkpoint | None,
    ) -> None:
        config = given.config
        self.given, self.setup, self.roster = given, setup, roster
        self.sizes = {number: roster.standings[number].records for number in range(roster.nodes)}
        self.plan = rounds_of(config, list(self.sizes.values()))
        # Nodes of one size share what follows from it.
        self._setup_of = cache(
            lambda records: setup.with_plan(steps_of(config, records, self.plan.steps))
        )
        self._epsilon_of = cache(lambda records, steps: self._setup_of(records).epsilon(steps))
        self._affordable_of = cache(lambda records, most: self._setup_of(records).affordable(most))
        self.setups = {number: self._setup_of(size) for number, size in self.sizes.items()}
        self.limits = {
            number: largest_release(own.mechanism, config.federated.local_steps)
            for number, own in self.setups.items()
        }
        self.first_setup = self.setups[0]
        self.fixed_state = self.first_setup.check_model().fixed_state
        self.ledger = open_ledger(
            given.home / "rounds.jsonl",
            self.first_setup.mechanism,
            not config.privacy.secure,
            saved.ledger if saved else None,
            ("server", 0, "the weights it sends"),
            whose="server",
        )
        self.batch_size = self.first_setup.micro_batch_size()
        self.parameters = trainable(setup.model)
        self.loop = Loop(
            setup,
            self.plan,
            given.run,
            given.home,
            given.watcher,
            self.batch_size,
            # After every round: one that is made again may be another release.
            config.execution.checkpoint_steps or 1,
            round_steps=config.federated.local_steps,
        )
        self.loop.restore(saved)
        self._asked_before = self.ledger.releases
        roster.asked = self.ledger.releases

    def prepare_nodes(self) -> None:
        """Ask the nodes that are present to prepare, and wait for them."""
        present = len(self.roster.present)
        mechanisms = {number: own.mechanism.digest() for number, own in self.setups.items()}
        self.roster.prepare(self.given.run, self.plan.steps, mechanisms)
        patience = self.given.config.federated.patience
        self.roster.wait_for(present, patience, self.given.asked_to_stop)

    def save(self) -> None:
        """Save the run, so that the same command goes on from here."""
        self.ledger.sync()
        self.loop.save(self.ledger.position, self.roster.saved())

    def epsilon(self, rounds: int) -> float:
        """Return the worst node's tight ε, without rounds that a killed run asked for ahead."""
        rounds_asked = self.ledger.releases_before(rounds)
        return max(
            self._epsilon_of(self.sizes[number], self.roster.spent(number, rounds_asked))
            for number in self.roster.standings
        )

    def take(self, round_: int) -> bool:
        """Ask the nodes for a round and take its step; return False if a signal came instead.

        Raises:
            BudgetExceeded: a node has no budget for it; none was asked.
            UserError: too few nodes are there or answered; the run is saved.
        """
        roster, given = self.roster, self.given
        patience = given.config.federated.patience
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        weights_digest = messages.digest(weights)
        is_new = not self.ledger.holds(round_, weights_digest)
        if not self._is_affordable(self.ledger.releases + int(is_new)):
            raise BudgetExceeded  # no node has to spend on a round that would not count
        if not roster.wait_for(roster.least, patience, given.asked_to_stop):
            self._stop({})
        if given.asked_to_stop():
            return False
        self.ledger.append(round_, weights_digest)
        self.ledger.sync()  # before any node is asked
        roster.asked = self.ledger.releases
        answers = roster.round(messages.content({"round": round_}, weights), round_, patience)
        releases, reasons = valid_releases(roster, answers, round_, weights, self.limits)
        if len(releases) < roster.least:
            self._stop(reasons)
        for number in releases:
            roster.count_use(number)
        expected = {
            number: self.setups[number].plan.sampling.expected_batch_size for number in releases
        }
        mean = weighed_mean(releases, expected)
        descend(dict(self.setup.model.named_parameters()), self.setup.optimizer, mean)
        return True

    def _is_affordable(self, rounds: int) -> bool:
        """True if every node can have taken the steps of so many rounds within the budget."""
        last_round = self._asked_before + self.plan.steps
        for number, size in self.sizes.items():
            allowed = self._affordable_of(size, self.roster.spent(number, last_round))
            if allowed is not None and self.roster.spent(number, rounds) > allowed:
                return False
        return True

    def _stop(self, reasons: Mapping[int, str]) -> NoReturn:
        """Save the run, and end it in one sentence."""
        self.save()
        raise UserError(missing_message(self.roster, reasons))


def valid_releases(
    roster: Roster,
    answers: Mapping[int, Message],
    round_: int,
    parameters: Mapping[str, Tensor],
    limits: Mapping[int, float],
) -> tuple[dict[int, dict[str, Tensor]], dict[int, str]]:
    """Check the nodes' answers to a round.

    Args:
        parameters: tensors of the model's names, shapes and dtypes.
        limits: the largest norm of each node's release.

    Returns:
        the releases that count, by node, and why the others do not.
    """
    releases, reasons = {}, {}
    for number, answer in sorted(answers.items()):
        try:
            if answer.has_error():
                raise Malformed(reason_of(answer))
            values = messages.checked_values(answer, SPENT | {"round": int})
            if values["round"] != round_:
                raise Malformed(f"is to round {values['round']}, not to {round_}")
            release = messages.tensors_of(answer, parameters)
            norm = norm_of(release)
            if not math.isfinite(norm):
                raise Malformed("is not finite")
            if norm > limits[number]:
                most = f"{limits[number]:.3g}"
                raise Malformed(f"has a norm of {norm:.3g}, and bound and noise allow {most}")
            roster.note_ledger(number, values)
            releases[number] = release
        except Malformed as error:
            reasons[number] = str(error) if answer.has_error() else f"its answer {error}"
            roster.log_drop(number, reasons[number])
    return releases, reasons


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """Return the norm of all tensors together, in float64."""
    norms = []
    for tensor in tensors.values():
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        norms.append(float(torch.linalg.vector_norm(real, dtype=torch.float64)))
    return math.hypot(*norms)


def largest_release(mechanism: Mechanism, steps: int) -> float:
    """Return a norm that no honest node's sum of so many gradients exceeds.

    All examples are drawn at their bound in one direction, and noise is ten deviations over its
    usual norm; twice that, for roundings. Without a bound it is what optimisers can square.
    """
    sampling = mechanism.sampling
    bounds = [block.bound for block in mechanism.blocks]
    bound = bounds[0] if mechanism.joint else math.hypot(*bounds)
    noise = []
    for block in mechanism.blocks:
        numbers = 2 * math.prod(block.shape)
        noise.append(block.std * (math.sqrt(numbers) + 10))
    most = sampling.records * bound + math.hypot(*noise)
    return min(2 * steps * most / sampling.expected_batch_size, SQUARED)


def missing_message(roster: Roster, reasons: Mapping[int, str]) -> str:
    """Return why a round failed, in one sentence.

    Args:
        reasons: why answers are not used, by node.
    """
    all_reasons = {}
    for number, reason in roster.refusals().items():
        if number not in roster.present:
            all_reasons[number] = reason
    all_reasons |= reasons
    parts = [f"node {number}: {reason}" for number, reason in all_reasons.items()]
    silent = set(range(roster.nodes)) - roster.present.keys() - all_reasons.keys()
    if silent:
        parts.append(f"no answer of node {', '.join(map(str, sorted(silent)))}")
    return (
        f"too few nodes answered ({'; '.join(parts)}), and federated.min_nodes asks for "
        f"{roster.least} of {roster.nodes}. Everything is saved, and every step is counted: the "
        "same command continues."
    )


def weighed_mean(
    releases: Mapping[int, Mapping[str, Tensor]],
    batches: Mapping[int, float],
) -> dict[str, Tensor]:
    """Return Σ mᵢ gᵢ / Σ mᵢ over nodes in order of number; mᵢ is a node's expected batch."""
    total = sum(batches.values())
    mean: dict[str, Tensor] = {}
    for number in sorted(releases):
        for name, gradient in releases[number].items():
            weighed = gradient * (batches[number] / total)
            mean[name] = mean[name] + weighed if name in mean else weighed
    return mean


# What a node's line in the record holds, beside each ε.
LISTED = ("noise_multiplier", "z", "steps", "unconfirmed", "sampling", "ledger")


def account_nodes(
    roster: Roster,
    setups: Mapping[int, Setup],
    repeatable: bool,
    unit: str,
) -> dict[str, Any]:
    """Return the record's section on privacy: the worst node's, as a patient is at one node alone.

    Args:
        setups: what each node trains with.
        repeatable: noise is seeded.
        unit: who owns examples.
    """
    reports = _report_nodes(roster, setups, repeatable, unit)
    worst = max(reports.values(), key=lambda report: report["epsilon_tight"])
    privacy = {key: value for key, value in worst.items() if key != "unconfirmed"}
    for key in worst:
        if key == "steps" or key.startswith("epsilon_"):
            privacy[key] = max(report[key] for report in reports.values())
    ledgers = [report["ledger"] for report in reports.values()]
    digests = "".join(ledger["digest"] for ledger in ledgers)
    privacy["ledger"] = {
        "entries": sum(ledger["entries"] for ledger in ledgers),
        "digest": hashlib.sha256(digests.encode()).hexdigest(),
    }
    privacy["composition"] = "parallel: the worst node's"
    privacy["nodes"] = []
    for number, report in reports.items():
        line = {"node": number, "answers": roster.standings[number].answers}
        for key, value in report.items():
            if key in LISTED or key.startswith("epsilon_"):
                line[key] = value
        privacy["nodes"].append(line)
    return privacy


def _report_nodes(
    roster: Roster,
    setups: Mapping[int, Setup],
    repeatable: bool,
    unit: str,
) -> dict[int, dict[str, Any]]:
    """Return each node's section on privacy, by its mechanism and the server's count."""

    @cache
    def report(
        number: int,
        releases: int,
        examples: int,
    ) -> dict[str, Any]:
        return privacy_report(setups[number], Tally(repeatable, releases), examples, unit)

    # Nodes with one mechanism have one ε.
    first_with = {setups[number].mechanism: number for number in sorted(setups, reverse=True)}
    reports = {}
    for number, standing in sorted(roster.standings.items()):
        setup, spent = setups[number], roster.spent(number)
        examples = standing.examples_per_patient
        if not setup.config.privacy.by_patient:  # else `records` counts patients
            examples = min(examples, standing.records)
        reports[number] = {
            **report(first_with[setup.mechanism], spent, examples),
            "ledger": {"entries": standing.entries, "digest": standing.digest},
            "unconfirmed": spent - standing.entries,
        }
    return reports
