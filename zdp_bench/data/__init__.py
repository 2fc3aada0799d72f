"""Data sets, one file each: a class turns files under the data root, or nothing, into `Splits`.

What a person should know of a data set (licence, source, checksums, layout) is in its card,
`datasets/NAME.yaml`, beside the defaults of its options. Whatever is wrong with a file is one
`UserError` with its name (`zdp_bench.foreign_files.reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from annotated_types import Ge, Interval, Len
from torch import Tensor

from zdp_bench.data.owner_names import require_owner_names
from zdp_bench.errors import UserError

Provenance = Literal["official", "derived", "synthetic", "own"]
# (inputs [B, ...], uniforms [B, N_UNIFORMS] in [0, 1)) -> inputs [B, ...]. Each example is changed
# by its own row of uniforms, so that neither micro-batches nor ranks make a difference.
Augment = Callable[[Tensor, Tensor], Tensor]
N_UNIFORMS = 8
# Options of several data sets.
Pixels = Annotated[int, Interval(ge=8, le=1024)]  # along a side
Share = Annotated[float, Interval(gt=0, lt=1)]
PublicShare = Annotated[float, Interval(ge=0, lt=1)]  # of what validates; may be none
Window = Annotated[list[float], Len(2, 2)]  # [low, high]
Most = Annotated[int, Ge(1)] | None  # at most so many; None: all


class Source(Protocol):
    """Examples in memory (`Examples`), or on disk until they are drawn."""

    @property
    def groups(self) -> Tensor | None:
        """The owner of each example [n], in training; the volume or owner in other parts.

        One number is one owner in all parts of a data set.
        """

    @property
    def is_stochastic(self) -> bool:
        """True if an example changes each time it is drawn, by its row of uniforms."""

    def __len__(self) -> int: ...

    def batch(
        self,
        indices: Tensor,
        uniforms: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the examples at `indices` [B], in that order: inputs [B, ...], targets [B, ...].

        Args:
            uniforms: [B, N_UNIFORMS] in [0, 1); given in training only, and only to stochastic
                sources.
        """


@dataclass(frozen=True)
class Examples:
    """Examples in memory: inputs [n, ...], targets [n, ...].

    Attributes: see `Source`, and pixels: (mean, deviation) of pixels in [0, 1], public constants.
        Then `inputs` are bytes, perhaps mapped from a file, and `batch` returns (byte / 255 − mean)
        / deviation: a set larger than memory streams.
    """

    inputs: Tensor
    targets: Tensor
    groups: Tensor | None = None
    pixels: tuple[float, float] | None = None
    is_stochastic = False

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(
        self,
        indices: Tensor,
        uniforms: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[indices]
        if self.pixels:
            mean, deviation = self.pixels
            inputs = (inputs.to(torch.float32) / 255 - mean) / deviation
        return inputs, self.targets[indices]


@dataclass(frozen=True)
class Part:
    """Some examples of a set, taken out as they are drawn: what is mapped from a file stays there.

    Attributes: see `Source`, and rows: their places in `whole`, [n].
    """

    whole: Source
    rows: Tensor

    @property
    def groups(self) -> Tensor | None:
        return None if self.whole.groups is None else self.whole.groups[self.rows]

    @property
    def is_stochastic(self) -> bool:
        return self.whole.is_stochastic

    def __len__(self) -> int:
        return len(self.rows)

    def batch(
        self,
        indices: Tensor,
        uniforms: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.whole.batch(self.rows[indices], uniforms)


@dataclass(frozen=True)
class Splits:
    """A data set ready to train on.

    Attributes:
        outputs: how many numbers a model must return for an example.
        provenance: official (the released files, checksums matched), derived (made from real
            examples), synthetic, or own (a person's files, which nobody else can check).
        digest: SHA-256 over what was read and how it was turned into examples.
        notes: what differs from the official release, shown wherever a number from it is.
        augment: changes training inputs at random each time they are drawn. It must not let one
            example's values reach another's.
        augment_targets: changes the targets with their inputs, by the same uniforms. None: targets
            stay as they are.
        validation: examples that steer training (`scheduler=reduce_on_plateau`). They are held to
            be PUBLIC, as the test set is: no ε covers them.
        examples_per_patient: the most training examples of any one patient. Where `train` has
            groups it is counted from them, whatever is given.
        sources: names of the files that were read, by their content (`collect_sources`). They tell
            who is in the data, so a record does not hold them.
        parts_share_owners: False refuses an owner who is in `train` and in another part.
        representation: what the inputs are of the examples, for the record. None: the examples.
        unit: who or what owns examples, in a word, where it is no patient: "image", "speaker".
        title: what the user calls the data. Empty: as its plug-in is called.
        owner_names: the name of each owner, by its number in `groups`. It decides the owner's
            subset (`algorithm=band_mf`) and node (`federated.nodes`), whoever else is there. Empty:
            the number does, which must then not depend on who else is there. A missing name, or two
            spellings of one, are refused.
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
    validation: Source | None = None
    unit: str = "patient"
    sources: frozenset[str] = frozenset()
    parts_share_owners: bool = False
    representation: dict[str, Any] | None = None
    owner_names: Sequence[str] = ()
    title: str = ""

    def __post_init__(self) -> None:
        require_owner_names(self.unit, tuple(self.owner_names))
        if self.train.groups is None:
            return
        owners, counts = self.train.groups.unique(return_counts=True)
        object.__setattr__(self, "examples_per_patient", max(counts.tolist(), default=1))
        last, named = int(owners[-1]) if len(owners) else -1, len(self.owner_names)
        if named and last >= named:
            raise UserError(f"dataset: group {last} has no name: `owner_names` has {named}.")
        for name, part in (("test", self.test), ("validation", self.validation)):
            if part is None or part.groups is None or self.parts_share_owners:
                continue
            if len(both := owners[torch.isin(owners, part.groups)]):
                raise UserError(
                    f"the data set has {len(both)} owners of training examples in its {name} part "
                    f"too (group {both[0]} is the first), where no ε covers them. Split by owner, "
                    "or, if these are others, number all parts' owners once."
                )


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Counts and shapes of a data set's examples.

    Attributes:
        train, test, validation: numbers of examples.
        input_shape, dtype: of one example, as the model gets it.
        outputs: how many numbers a model must return for an example.
        target_shape, target_dtype: of one example's target.
        examples_per_patient, unit: see `Splits`.
        owners: how many patients own the training examples. None: as many as examples, or unknown.
        found: False if the files are missing; the numbers are then the release's.
        classes: training examples of each class, by name, where names tell them. Shown to the
            data's owner by `validate`, and never written to a record.
    """

    train: int
    test: int
    validation: int = 0
    input_shape: tuple[int, ...]
    outputs: int
    dtype: torch.dtype = torch.float32
    target_shape: tuple[int, ...] = ()
    target_dtype: torch.dtype = torch.int64
    examples_per_patient: int = 1
    unit: str = "patient"
    owners: int | None = None
    found: bool = True
    classes: dict[str, int] = field(default_factory=dict)


class Dataset:
    """A data set: its options are the fields of a frozen dataclass, one YAML key each.

        @register("dataset", "rings")
        @dataclass(frozen=True, kw_only=True)
        class Rings(Dataset):
            noise: float = 0.1

            def load(self, root: Path) -> Splits: ...

    A field's type may carry a range (`Annotated[int, Ge(1)]`), which a configuration is held to.
    What means nothing together is refused in `__post_init__`, before anything is read or written.
    `root` is the data root.

    Attributes:
        names_owners: False if its training part has no `groups`: nobody said who owns what.
    """

    names_owners: ClassVar[bool] = True

    def load(self, root: Path) -> Splits:
        """Read the examples, or generate them.

        Raises:
            UserError: files are missing or damaged.
        """
        raise NotImplementedError

    def released(self, root: Path) -> DatasetInfo | None:
        """Return the release's counts and shapes where its files are not under the data root.

        None: they are there, or none are needed.
        """
        return None

    def info(self, root: Path) -> DatasetInfo:
        """Describe the examples: those of `load`, or the release's without its files."""
        if known := self.released(root):
            return replace(known, found=False)
        splits = self.load(root)
        inputs, targets = splits.train.batch(torch.arange(1))
        groups = splits.train.groups
        return DatasetInfo(
            train=len(splits.train),
            test=len(splits.test),
            validation=len(splits.validation or ()),
            input_shape=tuple(splits.input_shape),
            outputs=splits.outputs,
            dtype=inputs.dtype,
            target_shape=tuple(targets.shape[1:]),
            target_dtype=targets.dtype,
            examples_per_patient=splits.examples_per_patient,
            unit=splits.unit,
            owners=None if groups is None else len(groups.unique()),
        )
