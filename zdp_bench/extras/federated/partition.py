"""Split the patients over the nodes."""

from __future__ import annotations

import numpy as np
import torch

from zdp_bench.data import Part, Splits
from zdp_bench.data.owners import owners_of
from zdp_bench.errors import require
from zdp_bench.privacy.noise import stream


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
