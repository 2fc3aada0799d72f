"""Split the patients over the nodes, and plan how many steps that makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from zdp_bench.config.schema import Run
from zdp_bench.data import Part, Splits
from zdp_bench.data.owners import owners_of
from zdp_bench.errors import require
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import stream
from zdp_bench.training.plan import Plan


def split_by_patient(data: Splits, nodes: int, seed: int) -> list[Part]:
    """Split the training set by patient: shuffled by the seed, one patient to each node in turn.

    Formal guarantees: every record is at one node; all records of a patient are at the same one.

    Raises:
        UserError: there are fewer patients than nodes, or nobody knows whose records are whose.
    """
    patients, patient_of = find_patients(data, nodes)
    node_of = np.empty(len(patients), dtype=np.int64)
    node_of[np.random.default_rng(stream(seed, "partition")).permutation(len(patients))] = (
        np.arange(len(patients)) % nodes
    )
    return [
        Part(data.train, torch.from_numpy(np.flatnonzero(node_of[patient_of] == node)))
        for node in range(nodes)
    ]


def find_patients(data: Splits, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the training set's patients [m], and which of them owns each record [n].

    Raises:
        UserError: there are fewer patients than nodes, or nobody knows whose records are whose.
    """
    owners = owners_of(data, "federated.patients=split")
    patients, patient_of = np.unique(owners, return_inverse=True)
    require(
        nodes <= len(patients),
        "federated.nodes",
        nodes,
        f"the training set has only {len(patients):,} patients",
    )
    return patients, patient_of


def rounds_of(config: Run, sizes: Sequence[int]) -> Plan:
    """Return the federation's plan, whose `steps` are rounds.

    An epoch is as many rounds as draw, in expectation, every record of all nodes once.

    Args:
        sizes: how many records, or patients where they are drawn, each node has.
    """
    own = [Plan.of(config, size).sampling for size in sizes]
    expected, records = sum(s.expected_batch_size for s in own), sum(sizes)
    a_round, epochs = config.federated.local_steps * expected / records, config.trainer.epochs
    union = Sampling(own[0].scheme, expected / records, expected, records)
    return Plan(
        union, epochs, max(1, round(epochs / a_round)), config.privacy.range_test_steps or 0
    )


def evenly(config: Run, records: int) -> Plan:
    """Return a node's plan as if all nodes had equally many of `records` examples.

    `validate` uses it before the patients are split.
    """
    assert config.federated.nodes is not None
    size = records // config.federated.nodes
    return steps_of(config, size, rounds_of(config, [size] * config.federated.nodes).steps)


def steps_of(config: Run, size: int, rounds: int) -> Plan:
    """Return the plan of a node with `size` examples: its own sampling, the steps of all rounds."""
    return replace(Plan.of(config, size), steps=rounds * config.federated.local_steps)
