"""Data sets, one module each: a `Dataset` reads or generates examples and returns `Splits`.

The card `datasets/NAME.yaml` states a data set's licence, source, checksums and file layout, and
the defaults of its options. A missing or damaged file raises one `UserError` that names the file
(`zdp_bench.foreign_files.reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from annotated_types import Ge, Interval, Len
from torch import Tensor

from zdp_bench.data.owner_names import require_owner_names
from zdp_bench.errors import UserError

Provenance = Literal["official", "derived", "synthetic", "own"]
# (inputs [B, ...], uniforms [B, N_UNIFORMS] in [0, 1)) -> inputs [B, ...]. Each example uses only
# its own row of uniforms, so the result does not depend on micro-batches or ranks.
Augment = Callable[[Tensor, Tensor], Tensor]
N_UNIFORMS = 8
# Types of options that several data sets have.
Pixels = Annotated[int, Interval(ge=8, le=1024)]  # along one side
Fraction = Annotated[float, Interval(gt=0, lt=1)]
PublicFraction = Annotated[float, Interval(ge=0, lt=1)]  # of the data that validates; 0: none
Window = Annotated[list[float], Len(2, 2)]  # [low, high]
MaxCount = Annotated[int, Ge(1)] | None  # None: no limit


class Source(Protocol):
    """Examples that are in memory (`Examples`), or read from disk when a batch is drawn."""

    @property
    def groups(self) -> Tensor | None:
        """The number of each example's owner [n]; in validation and test, its volume or owner.

        A number stands for the same owner in all parts of a data set.
        """

    @property
    def is_stochastic(self) -> bool:
        """True if an example also depends on its row of uniforms, so that it varies by draw."""

    def __len__(self) -> int: ...

    def batch(
        self,
        indices: Tensor,
        uniforms: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs [B, ...] and targets [B, ...] of the examples at `indices`.

        Args:
            indices: positions of the examples, int64 [B].
            uniforms: random numbers [B, N_UNIFORMS] in [0, 1), one row per example. Given only in
                training, and only to stochastic sources.
        """


@dataclass(frozen=True)
class Examples:
    """Examples in memory, or in memory-mapped arrays.

    Attributes:
        inputs: [n, ...].
        targets: [n, ...].
        groups: see `Source`.
        pixels: (mean, standard deviation) of pixels in [0, 1], both public constants. If given,
            `inputs` are bytes and `batch` returns (byte / 255 − mean) / standard deviation, so that
            only a batch is ever held as floats.
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
    """A subset of a source, indexed when a batch is drawn: memory-mapped arrays are not copied.

    Attributes:
        whole: the source.
        rows: indices into `whole`, [n].
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


EXAMPLE = "example"  # the unit of data sets that do not state owners


def _choose_unit(unit: str, has_groups: bool, examples_per_patient: int) -> str:
    """Return the unit, which is "patient" if a data set with owners does not state another."""
    has_owners = has_groups or examples_per_patient > 1
    return "patient" if has_owners and unit == EXAMPLE else unit


@dataclass(frozen=True)
class Splits:
    """A data set ready to train on.

    Attributes:
        train: training examples, which ε covers.
        test: test examples, which no ε covers.
        input_shape: shape of one example's input, without the batch dimension.
        outputs: number of values that a model must return for each example.
        provenance: official (the released files, as their checksums or at least their number
            shows), derived (made from real examples), synthetic, or own (a person's files, which
            nobody else can check).
        digest: SHA-256 of the files that were read and of how they became examples.
        notes: how the data differ from the official release; shown beside every score on them. Of
            training examples, they state only what `docs/threat-model.md` lists under "What leaves
            a run", such as the number of examples, and no numbers of examples per class.
        augment: random augmentation of the training inputs, applied each time they are drawn. The
            result for one example must not depend on the values of another.
        augment_targets: the same augmentation of the targets, with the same uniforms. Default:
            targets are not augmented.
        validation: examples that steer training (`scheduler=reduce_on_plateau`). Like the test
            examples, they are assumed to be PUBLIC: no ε covers them.
        examples_per_patient: the maximum number of training examples of one patient. If `train` has
            groups, this is counted from them and the given number is ignored.
        sources: digests of the files that were read (`collect_sources`). They reveal who is in the
            data, so they are never written to a record.
        source_owners: the owner of each source that belongs to a single owner, if the user states
            the owners. Default: the definition of the data set states them.
        parts_share_owners: allow owners of training examples to be in another part too. Default: an
            error.
        representation: for the record, the transform that computed the inputs from the examples.
            None: the inputs are the examples.
        unit: who or what owns examples, as one word such as "image" or "speaker". Default:
            "patient" if there are groups or `examples_per_patient` exceeds 1, and else "example".
        title: the user's name for the data. Default: the name of its plug-in.
        owner_names: the name of each owner, indexed by the owner's number in `groups`. The name
            decides the owner's subset (`algorithm=band_mf`) and node (`federated.nodes`), so that
            neither depends on which other owners there are. Default: the number decides, and must
            then not depend on the other owners. A missing name, and two spellings of one name, are
            errors, except of volumes, which are files.
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
    unit: str = EXAMPLE
    sources: frozenset[str] = frozenset()
    source_owners: Mapping[str, str] = field(default_factory=dict)
    parts_share_owners: bool = False
    representation: dict[str, Any] | None = None
    owner_names: Sequence[str] = ()
    title: str = ""

    def __post_init__(self) -> None:
        has_groups = self.train.groups is not None
        unit = _choose_unit(self.unit, has_groups, self.examples_per_patient)
        object.__setattr__(self, "unit", unit)
        require_owner_names(self.unit, tuple(self.owner_names))
        if self.train.groups is None:
            return
        owners, counts = self.train.groups.unique(return_counts=True)
        object.__setattr__(self, "examples_per_patient", max(counts.tolist(), default=1))
        num_names = len(self.owner_names)
        if num_names and len(owners) and owners[-1] >= num_names:
            raise UserError(
                f"dataset: group {owners[-1]} has no name: `owner_names` has {num_names}."
            )
        if self.parts_share_owners:
            return
        for name, part in (("test", self.test), ("validation", self.validation)):
            if part is None or part.groups is None:
                continue
            shared = owners[torch.isin(owners, part.groups)]
            if len(shared):
                raise UserError(
                    f"the data set has {len(shared)} owners of training examples in its {name} "
                    f"part too (the first is group {shared[0]}), where no ε covers them. Split by "
                    "owner. If they are different owners, give every owner of all parts a number "
                    "of its own."
                )


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Counts and shapes of a data set's examples.

    Attributes:
        train, test, validation: number of examples in each part.
        input_shape, dtype: shape and type of one example's input.
        outputs: number of values that a model must return for each example.
        target_shape, target_dtype: shape and type of one example's target.
        examples_per_patient, unit: see `Splits`.
        owners: number of patients that own the training examples. None: one per example, or
            unknown.
        is_estimate: True if an owner may have more than `examples_per_patient` examples, so that
            ε per owner is unknown.
        found: False if the files are missing. The numbers are then estimated from the release.
        classes: number of training examples per class name, if classes have names. `validate` shows
            them to the owner of the data; they are never written to a record.
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
    unit: str = EXAMPLE
    owners: int | None = None
    is_estimate: bool = False
    found: bool = True
    classes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unit = _choose_unit(self.unit, self.owners is not None, self.examples_per_patient)
        object.__setattr__(self, "unit", unit)


class Dataset:
    """Base class of data sets. A data set's options are the fields of a frozen dataclass.

    Each field is one YAML key:

        @register("dataset", "rings")
        @dataclass(frozen=True, kw_only=True)
        class Rings(Dataset):
            noise: float = 0.1

            def load(self, root: Path) -> Splits: ...

    A field's type may state a range, such as `Annotated[int, Ge(1)]`, against which configurations
    are checked. Reject combinations of options that make no sense in `__post_init__`, which runs
    before anything is read or written.

    Attributes:
        names_owners: False if the training part has no `groups`, so that owners are unknown.
        num_folds: number of values of its option `fold`; None if it has no such option.
    """

    names_owners: ClassVar[bool] = True
    num_folds: ClassVar[int | None] = None

    def load(self, root: Path) -> Splits:
        """Read or generate the examples.

        Args:
            root: the data root.

        Raises:
            UserError: Files are missing or damaged.
        """
        raise NotImplementedError

    def published_info(self, root: Path) -> DatasetInfo | None:
        """Return the counts and shapes of the published data set if its files are missing.

        Return None if they are under the data root, or if the data set needs none: `info` then
        describes what `load` returns.
        """
        return None

    def info(self, root: Path) -> DatasetInfo:
        """Describe the examples of `load` or, without the files, those that are published."""
        published = self.published_info(root)
        if published is not None:
            return replace(published, found=False)
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
