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
from typing import Any

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
        with stop_signals() as asked:
            return over(ServerContext(config, data, digest, home, device, watcher, asked))

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
    config, data, home, device = given.config, given.data, given.home, given.device
    federated = config.federated
    nodes, patience, a_round = federated.nodes or 1, federated.patience, federated.local_steps
    least = federated.min_nodes or nodes

    setup = ModelSetup.of(config, data, device)
    saved = checkpoint.load(home / "checkpoint.pt", given.run)

    split = federated.patients == "split"
    expected = {"experiment": experiment_digest(config), "seed": config.seed}
    expected |= {"data": data.digest} if split else {}
    parts = split_by_patient(data, nodes, config.seed) if split else []
    shares_of = [count_units(config, replace(data, train=part)) for part in parts] or None
    roster = Roster(grid, config, expected, shares_of, saved.nodes if saved else {})
    come = roster.wait_for(nodes, patience, given.asked_to_stop)
    if signal := given.asked_to_stop():
        raise Stopped(signal)
    if not come and (len(roster.present) < least or len(roster.standings) < nodes):
        why = "; ".join(
            f"node {number}: {why}" for number, why in sorted(roster.refusals().items())
        )
        raise UserError(
            f"only {len(roster.present)} of {nodes} nodes joined within federated.patience="
            f"{patience:g} seconds{why and f' ({why})'}."
        )
    sizes = {n: roster.standings[n].records for n in range(nodes)}
    plan = rounds_of(config, [*sizes.values()])

    @cache
    def of_size(records: int) -> Setup:
        """Return what a node with so many examples trains with, to check and to account."""
        return setup.with_plan(steps_of(config, records, plan.steps))

    made = {n: of_size(size) for n, size in sizes.items()}
    mechanisms = {n: own.mechanism for n, own in made.items()}
    limits = {n: largest_release(mechanism, a_round) for n, mechanism in mechanisms.items()}
    fixed = made[0].check_model().fixed_state
    repeatable = not config.privacy.secure
    at_least, start = saved.ledger if saved else None, ("server", 0, "the weights it sends")
    asked = open_ledger(
        home / "rounds.jsonl", mechanisms[0], repeatable, at_least, start, whose="server"
    )
    size, parameters = made[0].micro_batch_size(), trainable(setup.model)
    # After every round: one that is made again may be another release.
    save_every = config.execution.checkpoint_steps or 1
    own = (setup, plan, given.run, home, given.watcher, size, save_every)
    loop = Loop(*own, round_steps=a_round)
    loop.restore(saved)

    def save() -> None:
        asked.sync()
        loop.save(asked.position, roster.saved())

    @cache
    def epsilon_of(records: int, steps: int) -> float:
        return of_size(records).epsilon(steps)

    def epsilon(rounds: int) -> float:
        """Return the worst node's tight ε, without rounds that a killed run asked for ahead."""
        known = asked.releases_before(rounds)
        return max(epsilon_of(sizes[n], roster.spent(n, known)) for n in roster.standings)

    @cache
    def limit(records: int, most: int) -> int | None:
        """Return how many of at most `most` steps of a node of that size the budget allows."""
        return of_size(records).affordable(most)

    def affordable(rounds: int) -> bool:
        """True if every node can have taken the steps of so many rounds within the budget."""
        allowed = {n: limit(sizes[n], roster.spent(n, first + plan.steps)) for n in sizes}
        return all(of is None or roster.spent(n, rounds) <= of for n, of in allowed.items())

    def take_round(round_: int) -> bool:
        """Ask the nodes for a round and take its step; return False if a signal came instead."""
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        of = messages.digest(weights)
        if not affordable(asked.releases + (not asked.holds(round_, of))):
            raise BudgetExceeded  # no node has to spend on a round that would not count
        if not roster.wait_for(least, patience, given.asked_to_stop):
            save()
            raise UserError(missing_message(roster, nodes, least, {}))
        if given.asked_to_stop():
            return False
        asked.append(round_, of)
        asked.sync()  # before any node is asked
        roster.asked = asked.releases
        answers = roster.round(messages.content({"round": round_}, weights), round_, patience)
        releases, reasons = valid_releases(roster, answers, round_, weights, limits)
        if len(releases) < least:
            save()
            raise UserError(missing_message(roster, nodes, least, reasons))
        for number in releases:
            roster.count_use(number)
        shares = {n: made[n].plan.sampling.expected_batch_size for n in releases}
        mean = weighed_mean(releases, shares)
        descend(dict(setup.model.named_parameters()), setup.optimizer, mean)
        return True

    with closing(asked), made[0].arithmetic():
        roster.asked = first = asked.releases
        come_again = len(roster.present)
        roster.prepare(given.run, plan.steps, {n: of.digest() for n, of in mechanisms.items()})
        roster.wait_for(come_again, patience, given.asked_to_stop)
        stopped_by = loop.take_steps(take_round, epsilon, save, given.asked_to_stop)
        final = evaluate_trained(home, loop.trained, setup.task, data.test, device, size.examples)
        roster.report(patience)

    privacy = accounted(roster, made, repeatable, data.unit)
    record = run_record(loop, began, fixed, privacy, stopped_by, *final)
    record["federation"] = {"rounds": loop.step, "asked": roster.asked}
    return record


def valid_releases(
    roster: Roster,
    answers: Mapping[int, Message],
    round_: int,
    like: Mapping[str, Tensor],
    limits: Mapping[int, float],
) -> tuple[dict[int, dict[str, Tensor]], dict[int, str]]:
    """The releases that count, by node, and why the others do not; `limits` are of their norms."""
    releases, reasons = {}, {}
    for number, answer in sorted(answers.items()):
        try:
            if answer.has_error():
                raise Malformed(reason_of(answer))
            values = messages.checked_values(answer, SPENT | {"round": int})
            if values["round"] != round_:
                raise Malformed(f"is to round {values['round']}, not to {round_}")
            release = messages.tensors_of(answer, like)
            real = (torch.view_as_real(t) if t.is_complex() else t for t in release.values())
            norms = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in real)
            norm = math.hypot(*map(float, norms))
            if not math.isfinite(norm):
                raise Malformed("is not finite")
            if norm > limits[number]:
                most = f"{limits[number]:.3g}"
                raise Malformed(f"has a norm of {norm:.3g}, and bound and noise allow {most}")
            roster.note_ledger(number, values)
            releases[number] = release
        except Malformed as error:
            reasons[number] = f"its answer {error}" if not answer.has_error() else str(error)
            roster.log_drop(number, reasons[number])
    return releases, reasons


def largest_release(mechanism: Mechanism, steps: int) -> float:
    """Return a norm that no honest node's sum of so many gradients exceeds.

    All examples are drawn at their bound in one direction, and noise is ten deviations over its
    usual norm; twice that, for roundings. Without a bound it is what optimisers can square.
    """
    bounds = [block.bound for block in mechanism.blocks]
    shares = mechanism.sampling.records * (bounds[0] if mechanism.joint else math.hypot(*bounds))
    reals = [(block.std, 2 * math.prod(block.shape)) for block in mechanism.blocks]
    noise = math.hypot(*(std * (math.sqrt(count) + 10) for std, count in reals))
    return min(2 * steps * (shares + noise) / mechanism.sampling.expected_batch_size, SQUARED)


def missing_message(roster: Roster, nodes: int, least: int, reasons: Mapping[int, str]) -> str:
    """Why a round failed, in one sentence."""
    refused = {n: why for n, why in roster.refusals().items() if n not in roster.present}
    reasons = {**refused, **reasons}
    absent = [n for n in range(nodes) if n not in roster.present and n not in reasons]
    told = [f"node {number}: {reason}" for number, reason in reasons.items()]
    told += [f"no answer of node {', '.join(map(str, absent))}"] if absent else []
    return (
        f"too few nodes answered ({'; '.join(told)}), and "
        f"federated.min_nodes asks for {least} of {nodes}. Everything is saved, and every step is "
        "counted: the same command continues."
    )


def weighed_mean(
    releases: Mapping[int, Mapping[str, Tensor]], shares: Mapping[int, float]
) -> dict[str, Tensor]:
    """Return Σ mᵢ gᵢ / Σ mᵢ over nodes in order of number; mᵢ is a node's expected batch."""
    whole, mean = sum(shares.values()), dict[str, Tensor]()
    for number in sorted(releases):
        for name, gradient in releases[number].items():
            weighed = gradient * (shares[number] / whole)
            mean[name] = mean[name] + weighed if name in mean else weighed
    return mean


def accounted(
    roster: Roster, made: Mapping[int, Setup], repeatable: bool, unit: str
) -> dict[str, Any]:
    """Return each node's ε and the run's, the worst node's, as a patient is at one node alone."""

    @cache
    def of(like: int, releases: int, patient: int) -> dict[str, Any]:
        ledger = Tally(repeatable, releases)
        return privacy_report(made[like], ledger, patient, unit)

    # Nodes with one mechanism have one ε.
    first = {made[number].mechanism: number for number in sorted(made, reverse=True)}
    found = {}
    for number, standing in sorted(roster.standings.items()):
        patient = standing.examples_per_patient
        if not made[number].config.privacy.by_patient:  # else `records` counts patients
            patient = min(patient, standing.records)
        own = of(first[made[number].mechanism], roster.spent(number), patient)
        ledger = {"entries": standing.entries, "digest": standing.digest}
        unconfirmed = roster.spent(number) - standing.entries
        found[number] = own | {"ledger": ledger, "unconfirmed": unconfirmed}
    worst = max(found.values(), key=lambda own: own["epsilon_tight"])
    bounded = [key for key in worst if key.startswith("epsilon_") or key == "steps"]
    bounds = {key: max(own[key] for own in found.values()) for key in bounded}
    digests = "".join(own["ledger"]["digest"] for own in found.values())
    kept = ("noise_multiplier", "z", "steps", "unconfirmed", "sampling", "ledger")
    listed = [
        {"node": number, "answers": roster.standings[number].answers}
        | {key: value for key, value in own.items() if key in kept or key.startswith("epsilon_")}
        for number, own in found.items()
    ]
    entries = sum(own["ledger"]["entries"] for own in found.values())
    whole = {
        "ledger": {"entries": entries, "digest": hashlib.sha256(digests.encode()).hexdigest()},
        "composition": "parallel: the worst node's",
        "nodes": listed,
    }
    return {key: value for key, value in worst.items() if key != "unconfirmed"} | bounds | whole
