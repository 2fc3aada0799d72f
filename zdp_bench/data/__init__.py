"""Dataset adapters, one file each. An adapter turns files under the data root (or nothing) into `Splits`.

A builder gets the data root and its options by keyword. What a person should know of a data set (licence, source, checksums,
layout) stands in its card, `datasets/NAME.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Provenance = Literal["official", "derived", "synthetic"]
# (inputs [B, ...], chance [B, CHANCES] uniform in [0, 1)) -> inputs [B, ...]. A record's row of chance decides its change, so
# that neither micro-batches nor ranks make a difference.
Augment = Callable[[Tensor, Tensor], Tensor]
CHANCES = 8


@dataclass(frozen=True)
class Records:
    """Records held in memory: inputs [n, ...], targets [n, ...].

    Attributes:
        groups: the volume or patient of each record [n], for metrics that are defined on whole volumes; None where none is.
    """

    inputs: Tensor
    targets: Tensor
    groups: Tensor | None = None

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
        augment: changes training inputs at random each time they are drawn, one record at a time in effect: it must not let
            one record's values reach another's.
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
    augment: Augment | None = None
