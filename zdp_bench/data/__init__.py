"""Dataset adapters, one file each. An adapter turns files under the data root (or nothing) into `Splits`.

A builder gets the data root and its options by keyword. What a person should know of a data set (licence, source, checksums,
layout) stands in its card, `datasets/NAME.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Provenance = Literal["official", "derived", "synthetic"]
# (inputs [B, ...], uniforms [B, N_UNIFORMS] uniform in [0, 1)) -> inputs [B, ...]. A record's row of uniforms decides its change, so
# that neither micro-batches nor ranks make a difference.
Augment = Callable[[Tensor, Tensor], Tensor]
N_UNIFORMS = 8


class Source(Protocol):
    """Records wherever they lie: in memory (`Examples`), or on disk until they are drawn."""

    @property
    def groups(self) -> Tensor | None:
        """The volume or patient of each record [n], for metrics that are defined on whole volumes; None where none is."""

    @property
    def is_stochastic(self) -> bool:
        """Whether a record is made anew each time it is drawn, from its row of uniforms, as `Augment`'s is."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The records at `indices` [B], in that order: inputs [B, ...], targets [B, ...].

        Args:
            uniforms: [B, N_UNIFORMS], uniform in [0, 1); given in training only, and only to sources that are stochastic.
        """


@dataclass(frozen=True)
class Examples:
    """Records held in memory: inputs [n, ...], targets [n, ...].

    Attributes: see `Source`, and
        pixels: (mean, deviation) of pixels in [0, 1], public constants. Then `inputs` are bytes, perhaps mapped from a file, and
            `batch` answers with (byte / 255 − mean) / deviation: a set larger than memory streams.
    """

    inputs: Tensor
    targets: Tensor
    groups: Tensor | None = None
    pixels: tuple[float, float] | None = None
    is_stochastic = False

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Tensor, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[indices]
        if self.pixels:
            mean, deviation = self.pixels
            inputs = (inputs.to(torch.float32) / 255 - mean) / deviation
        return inputs, self.targets[indices]


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
        augment_targets: changes the targets along with their inputs, by the same uniforms; None where they stay what they are.
        validation: records that steer training (`scheduler=reduce_on_plateau`) and are held to be PUBLIC, as the test set is: no
            ε covers them. None where the set has none.
        examples_per_patient: the most training records that any one patient owns; an adapter that knows patients bounds it.
        unit: what owns them, in a word for the reader, where it is no patient: "image", "speaker".
    """

    train: Source
    test: Source
    input_shape: tuple[int, ...]
    outputs: int
    provenance: Provenance
    digest: str
    notes: str = ""
    examples_per_patient: int = 1
    augment: Augment | None = None
    augment_targets: Augment | None = None
    validation: Examples | None = None
    unit: str = "patient"


@dataclass(frozen=True)
class DatasetInfo:
    """What an adapter knows of its records before it reads any: from names and headers, or from the release's own numbers.

    An adapter enters a function for it under `@register("outline", NAME)`, with the adapter's own root and options; it is what
    `zdp-bench validate` builds its report from.

    Attributes:
        train, test: how many records there are; an upper bound where only reading them tells which are used.
        input_shape, dtype: of one record, as the model will get it.
        outputs: how many numbers a model must answer with.
        target_shape, target_dtype: of one record's target.
        examples_per_patient, unit: the most training records of any one patient, or of what else owns them; see `Splits`.
        found: whether the files are there; if not, the numbers are the release's.
        validation: how many records validate; 0 where the set has none.
    """

    train: int
    test: int
    input_shape: tuple[int, ...]
    outputs: int
    dtype: torch.dtype = torch.float32
    target_shape: tuple[int, ...] = ()
    target_dtype: torch.dtype = torch.int64
    examples_per_patient: int = 1
    found: bool = True
    validation: int = 0
    unit: str = "patient"
