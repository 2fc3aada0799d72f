"""Dataset adapters, one file each. An adapter turns files under the data root (or nothing) into `Splits`.

A builder gets the data root and its options by keyword. What a person should know of a data set (licence, source, checksums,
layout) stands in its card, `datasets/NAME.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Provenance = Literal["official", "derived", "synthetic"]


@dataclass(frozen=True)
class Records:
    """Records held in memory: inputs [n, ...], targets [n, ...]."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The records at `indices` [B], in that order: inputs [B, ...], targets [B, ...]."""
        return self.inputs[indices], self.targets[indices]


@dataclass(frozen=True)
class Splits:
    """A data set ready to train on.

    Attributes:
        outputs: how many numbers a model must answer with.
        provenance: official (the released files, checksums matched), derived (made from real records) or synthetic.
        digest: SHA-256 over what was read and how it was turned into records.
        notes: what differs from the official release, shown wherever a number from it is.
        records_per_patient: the most training records that any one patient owns; an adapter that knows patients bounds it.
    """

    train: Records
    test: Records
    input_shape: tuple[int, ...]
    outputs: int
    provenance: Provenance
    digest: str
    notes: str = ""
    records_per_patient: int = 1
