"""What a record says, as values with names and types.

A record is one JSON file, a run's `Document`. The types of `Record` and of its sections are its
schema, which `parse_as` applies. Fields that they do not name stay in the document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Interval
from pydantic import BeforeValidator

from zdp_bench.errors import UserError
from zdp_bench.foreign_files import Unfit, expect, parse_as, read_json
from zdp_bench.privacy.mechanism import MOST, Sampling
from zdp_bench.records.json_numbers import from_json

Document = dict[str, Any]  # plain JSON values
Steps = Annotated[int, Interval(ge=0, le=MOST)]
Noise = Annotated[float, Ge(0)]
# A section that a record may lack, or hold as null.
OPTIONAL = BeforeValidator(lambda section: {} if section is None else section)

NUMBER = int | float
ADVICE = "Delete it: the same run writes it again, from the checkpoint there."
# The sections that only few commands need, which are most of a record: a dotted path each.
LARGE = ("epochs", "privacy.mechanism")


@dataclass(frozen=True)
class Claims:
    """The number of a paper that a run stands for."""

    table: str | None = None  # PAPER/N
    row: str | None = None
    variant: str | None = None


@dataclass(frozen=True)
class Headline:
    """The metric that a run is judged by, on the test set."""

    name: str
    value: float


@dataclass(frozen=True)
class Data:
    """The data set of a run.

    Attributes:
        digest: of its examples.
        train: how many examples; None in a record that does not say.
        example: shapes and dtypes.
        title: what its user calls it.
    """

    name: str
    provenance: str
    digest: str
    notes: str = ""
    train: int | None = None
    test: int | None = None
    validation: int | None = None
    example: Mapping[str, Any] = field(default_factory=dict)
    title: str | None = None

    @property
    def shown(self) -> str:
        """What people call it: 'films: folder, own'."""
        title = f"{self.title}: " if self.title else ""
        return f"{title}{self.name}, {self.provenance}"


@dataclass(frozen=True)
class Releases:
    """Steps of one mechanism: a run's, or those of a federation's node."""

    z: Noise  # the effective noise multiplier, where it is least; 0 without noise
    sampling: Sampling
    steps: Steps


@dataclass(frozen=True)
class Clipping:
    """What an adaptive bound says of itself."""

    quantile: float
    last_bound: float
    epsilon_without_count: float


@dataclass(frozen=True, kw_only=True)
class Released:
    """What a run releases, and of whom.

    Attributes:
        z: the effective noise multiplier, where it is least; 0 without noise.
        steps: all steps that ε counts.
        unit: who owns examples, such as "patient".
        epsilon_of: whose presence the tight ε hides: "example", or the unit.
        examples_per_patient: the most shares of one owner in a step, if steps draw examples.
        nodes: the releases of each node of a federation.
    """

    z: Noise
    sampling: Sampling
    steps: Steps
    delta: Annotated[float, Interval(gt=0, lt=1)]
    epsilon_of: str
    examples_per_patient: Annotated[int, Interval(ge=0, le=MOST)]
    unit: str = "patient"
    randomness: str = "seeded"
    nodes: Annotated[tuple[Releases, ...], BeforeValidator(lambda nodes: nodes or ())] = ()

    @property
    def is_of_unit(self) -> bool:
        """True if a patient, or another owner of examples, was the unit of the steps."""
        return self.epsilon_of != "example"

    @property
    def shares_of_one(self) -> int:
        """How many shares of one owner a step may hold."""
        return 1 if self.is_of_unit else self.examples_per_patient

    @property
    def is_secure(self) -> bool:
        """True if the noise is cryptographic; else whoever knows seed and data can compute it."""
        return self.randomness == "cryptographic"

    @property
    def releases(self) -> tuple[Releases, ...]:
        """What was released at each place that has a mechanism of its own."""
        return self.nodes or (Releases(self.z, self.sampling, self.steps),)


@dataclass(frozen=True, kw_only=True)
class Privacy(Released):
    """What a run released, and every ε that follows from it.

    Attributes:
        epsilon_patient: the tight ε of one owner.
        epsilon_part: the tight ε of one of an owner's examples, if steps draw owners.
    """

    epsilon_claimed: float
    claimed_by: str
    epsilon_tight: float
    epsilon_tight_at_least: float | None = None
    epsilon_rdp: float | None = None
    epsilon_patient: float | None = None
    epsilon_patient_at_least: float | None = None
    epsilon_part: float | None = None
    noise_multiplier: float = math.nan
    clipping: Clipping | None = None


@dataclass(frozen=True)
class Environment:
    """Where a run was carried out."""

    device: str = ""
    threads: int | None = None
    commit: str | None = None


@dataclass(frozen=True)
class Measured:
    """What differs between two runs of one seed.

    Attributes:
        resumed_at_step: None if the run was never stopped.
    """

    started_utc: str = ""
    train_seconds: float | None = None
    peak_memory_bytes: int | None = None
    resumed_at_step: int | None = None


@dataclass(frozen=True)
class Labels:
    """What people find a run by, and no part of what it computes."""

    name: str | None = None
    tags: Sequence[str] | None = None
    notes: str | None = None


@dataclass(frozen=True)
class Epoch:
    """The end of an epoch; `number` is None where a stop came within one."""

    number: int | None
    step: Steps
    metrics: Mapping[str, float]
    epsilon_tight: float = math.nan


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        run: the digest of configuration, seed and data.
        experiment: the digest of what a run computes, but for its seed.
        config: the resolved configuration, by section.
        metrics: of the test set, by name.
        validation: those of validation examples, if there are any.
        stopped_by: "epochs", or what ended it before.
        warning: why its result is in doubt; "" if it is not.
        values: the document, without what `LARGE` names.
        path: its file; None if it was not read from one.
    """

    recipe: str
    run: str
    experiment: str
    seed: int
    headline: Headline
    privacy: Privacy
    data: Data
    config: Mapping[str, Any]
    metrics: Mapping[str, float]
    values: Mapping[str, Any] = field(repr=False, compare=False)
    claims: Annotated[Claims, OPTIONAL] = Claims()
    labels: Annotated[Labels, OPTIONAL] = Labels()
    environment: Annotated[Environment, OPTIONAL] = Environment()
    measured: Annotated[Measured, OPTIONAL] = Measured()
    validation: Annotated[Mapping[str, float], OPTIONAL] = field(default_factory=dict)
    stopped_by: str = "epochs"
    warning: str = ""
    path: Path | None = None

    @staticmethod
    def of(values: Mapping[str, Any], path: Path | None = None) -> Record:
        """Return the record of a document.

        Args:
            path: the file of which `values` may lack what `LARGE` names.

        Raises:
            Unfit: something is missing, or of another type.
        """
        record: Record = parse_as(Record, {**values, "values": values, "path": path})
        return record

    @cached_property
    def document(self) -> Document:
        """The whole JSON."""
        if self.path is None:
            return dict(self.values)
        document: Document = read_json(self.path, from_json)
        return document

    @cached_property
    def epochs(self) -> Sequence[Epoch]:
        """Each epoch, in order."""
        return _epochs_of(self.document)

    @property
    def has_each_epoch(self) -> bool:
        """True if it has the metrics of every epoch, as `execution.evaluate=each` writes them."""
        numbers = [epoch.number for epoch in self.epochs if epoch.number is not None]
        return numbers == [*range(1, len(numbers) + 1)]

    def get(self, path: str) -> Any:
        """Return the value at a dotted path of the document; None if it has none."""
        return get(self.values, path)


def get(document: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _epochs_of(document: Mapping[str, Any]) -> Sequence[Epoch]:
    """Return a record's epochs, whose metrics stand beside number and step."""
    epochs = []
    for values in parse_as(list[dict[str, Any]], document.get("epochs") or [], "epochs"):
        own = {"number": values.pop("epoch", None), "step": values.pop("step", None)}
        own["epsilon_tight"] = values.pop("epsilon_tight", math.nan)
        epochs.append(own | {"metrics": values})
    return parse_as(list[Epoch], epochs, "epochs")


def read_document(path: Path, advice: str = ADVICE) -> Document | None:
    """Return a record's JSON, checked, or None if there is no file.

    Args:
        advice: what to do about a damaged one.

    Raises:
        UserError: the file is damaged, or no record.
    """
    try:
        if not path.exists():
            return None
    except OSError:  # which `read_json` tells
        pass
    try:
        document: Document = read_json(path, from_json)
        require_record(document, path)
    except UserError as error:
        raise UserError(f"{error} {advice}") from None
    return document


def require_record(document: Any, path: Path) -> None:
    """Reject what was read from `path` if it is no record."""
    try:
        expect(isinstance(document, dict), "is no object")
        record = Record.of(document)
        expect(record.headline.name in record.metrics, "has no value of its headline.name")
        _epochs_of(document)
    except Unfit as error:
        raise UserError(f"{path}: is damaged or not a record of zdp-bench: it {error}.") from None


def read(path: Path, advice: str = ADVICE) -> Record | None:
    """Return a record, or None if there is no file, as `read_document` does."""
    document = read_document(path, advice)
    return None if document is None else Record.of(document)


def without_large(document: Document) -> Document:
    """Return a document without what `LARGE` names."""
    kept = {key: value for key, value in document.items() if key not in LARGE}
    for path in LARGE:
        section, _, key = path.partition(".")
        if key and section in kept:
            kept[section] = {name: of for name, of in kept[section].items() if name != key}
    return kept
