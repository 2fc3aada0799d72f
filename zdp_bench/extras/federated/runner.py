"""What the core asks of a federation: to check, plan and carry it out, and to combine its nodes' ε.

The core finds this module in the registry, as the runner of recipes with `federated.nodes`. Flower
is imported only when a federation is carried out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zdp_bench.algorithms import algorithm_type
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError, require
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.training.plan import Plan
from zdp_bench.training.run import Watcher
from zdp_bench.training.run_folder import Outcome

# The keys of a node's entry in the record, in addition to every `epsilon_*` key.
NODE_KEYS = (
    "node",
    "answers",
    "examples_per_patient",
    "noise_multiplier",
    "z",
    "steps",
    "unconfirmed",
    "sampling",
    "ledger",
)
# The keys that are the largest of any node, in addition to every `epsilon_*` key.
LARGEST_KEYS = ("examples_per_patient", "steps")
# The keys that describe a node alone.
KEYS_OF_NODE_ALONE = ("node", "answers", "unconfirmed")


def carry_out(
    config: Run,
    watcher: Watcher,
    device: torch.device,
    wait: bool,
) -> Outcome:
    """Run a federation on this machine. See `training.run.execute` for the arguments."""
    from zdp_bench.extras.federated.simulation import run_simulated

    return run_simulated(config, watcher, device, wait)


def check(run: Run) -> None:
    """Reject settings that a federation does not support.

    Raises:
        UserError: The message names the setting.
    """
    nodes, min_nodes = run.federated.nodes, run.federated.min_nodes
    assert nodes is not None
    if run.privacy.total_budget is not None:
        raise UserError("privacy.total_budget: applies to central runs; set privacy.max_epsilon.")
    for key, what in (("clip_quantile", "have its own bound"), ("start_steps", "start apart")):
        if run.algorithm.options.get(key) is not None:
            raise UserError(
                f"algorithm.{key} with federated.nodes: each node would {what}. Leave it out."
            )
    if algorithm_type(run.algorithm.name).cycle(run.algorithm.options) > 1:
        raise UserError(
            f"algorithm={run.algorithm.name} with federated.nodes: a node's noise would go on from "
            "steps that other nodes have hidden theirs in. Use dp_sgd."
        )
    rule = f"must lie between 1 and the {nodes} nodes"
    require(min_nodes is None or 1 <= min_nodes <= nodes, "federated.min_nodes", min_nodes, rule)
    sampling = run.trainer.sampling
    rule = "a node's steps are Poisson or uniform samples: use trainer=poisson or trainer=uniform"
    require(sampling != "shuffled", "trainer.sampling", sampling, rule)
    views = run.trainer.augmentations
    if views is not None:
        raise UserError(
            f"trainer.augmentations={views} with federated.nodes: a node draws one view of an "
            "example. Remove one of them."
        )


def rounds_of(config: Run, sizes: Sequence[int]) -> Plan:
    """Return a federation's plan of rounds. In expectation, an epoch draws each record once.

    Args:
        config: the run's configuration.
        sizes: number of records of each node.
    """
    samplings = [Plan.of(config, size).sampling for size in sizes]
    expected = sum(sampling.expected_batch_size for sampling in samplings)
    records = sum(sizes)
    epochs_of_round = config.federated.local_steps * expected / records
    union = Sampling(samplings[0].scheme, expected / records, expected, records)
    epochs = config.trainer.epochs
    return Plan(union, epochs, max(1, round(epochs / epochs_of_round)))


def plan(config: Run, records: int) -> Plan:
    """Return a node's plan if all nodes have equally many records.

    It is used before the patients are split. With `trainer.batch_size`, a smaller node draws each
    record more often.
    """
    assert config.federated.nodes is not None
    nodes = config.federated.nodes
    size = records // nodes
    rule = f"must be at most the {records:,} examples or owners of the training set"
    require(size > 0, "federated.nodes", nodes, rule)
    rounds = rounds_of(config, [size] * nodes).steps
    return steps_of(config, size, rounds)


def steps_of(
    config: Run,
    size: int,
    rounds: int,
) -> Plan:
    """Return the plan of a node with `size` examples: its own sampling, and all rounds' steps."""
    steps = rounds * config.federated.local_steps
    return replace(Plan.of(config, size), steps=steps)


def combine_nodes(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record's section on privacy, with an entry for every node under `nodes`.

    Each ε and the numbers of steps and of examples of one patient are the largest of any node.
    Everything else is that of the node with the largest tight ε. They hold for a patient whose
    examples are all at one node.

    Args:
        reports: each node's section on privacy as `privacy_report` returns it, with the keys of
            `NODE_KEYS`.
    """
    worst = max(reports, key=lambda report: report["epsilon_tight"])
    privacy = {key: value for key, value in worst.items() if key not in KEYS_OF_NODE_ALONE}
    for key in privacy:
        if key in LARGEST_KEYS or key.startswith("epsilon_"):
            privacy[key] = max(report[key] for report in reports)
    digests = "".join(report["ledger"]["digest"] for report in reports)
    privacy["ledger"] = {
        "entries": sum(report["ledger"]["entries"] for report in reports),
        "digest": hashlib.sha256(digests.encode()).hexdigest(),
    }
    privacy["composition"] = "parallel: the worst node's"
    privacy["nodes"] = [_entry_of(report) for report in reports]
    return privacy


def _entry_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's entry in the record."""
    entry = {}
    for key, value in report.items():
        if key in NODE_KEYS or key.startswith("epsilon_"):
            entry[key] = value
    return entry
