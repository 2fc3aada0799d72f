"""Records of runs as typed values.

A record is one JSON file, the `Document` of a run. The types of `Record` and its sections are the
schema, which `parse_as` checks. Other fields of the document are kept, but not checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Interval
from pydantic import AfterValidator, BeforeValidator, ConfigDict
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from zdp_bench.errors import UserError
from zdp_bench.foreign_files import Unfit, exists, expect, parse_as, read_json
from zdp_bench.privacy.mechanism import MAX_COUNT, Sampling
from zdp_bench.records.json_numbers import from_json

Document = dict[str, Any]  # plain JSON values
Steps = Annotated[int, Interval(ge=0, le=MAX_COUNT)]
Noise = Annotated[float, Interval(ge=0, le=1e100)]  # whose square is a float
# Marks a section that a record may lack or contain as null.
OPTIONAL = BeforeValidator(lambda section: {} if section is None else section)

NUMBER = int | float


class _Trainer(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    epochs: Annotated[float, Ge(0)] | None


class _Privacy(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    target_epsilon: Annotated[float, Ge(0)] | None


class _Config(TypedDict, total=False):
    """The parts of a configuration that reports read: its sections, and some of their numbers."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    trainer: _Trainer
    privacy: _Privacy
    model: Mapping[str, Any]
    dataset: Mapping[str, Any]
    algorithm: Mapping[str, Any]
    federated: Mapping[str, Any] | None
    optimizer: Mapping[str, Any] | None


def _require_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    parse_as(_Config, config, "config")
    return config


ADVICE = "Delete it: the same run writes it again, from the checkpoint there."
# The owners of examples in data sets whose first records call any owner a patient
OWNERS = {
    "cpsc2018_synthetic": "recording",
    "kspace_from_volumes": "volume",
    "mri_sequences_from_volumes": "volume",
    "msd": "volume",
    "roahd": "person",
    "speech_commands_synthetic": "speaker",
}
# Dotted paths of the sections that make up most of a record, but that few commands need.
LARGE = ("epochs", "privacy.mechanism")


@dataclass(frozen=True)
class Claims:
    """The number in a paper's table that a run reproduces."""

    table: str | None = None  # PAPER/N
    row: str | None = None
    variant: str | None = None


@dataclass(frozen=True)
class Headline:
    """The metric by which a run is judged, and its value on the test set."""

    name: str
    value: float


@dataclass(frozen=True)
class Data:
    """The data set of a run.

    Attributes:
        digest: digest of its examples.
        train, test, validation: number of examples; None if the record does not state it.
        example: shapes and types of one example.
        title: the user's name for it.
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
        """The name that reports show, such as 'films: folder, own'."""
        title = f"{self.title}: " if self.title else ""
        return f"{title}{self.name}, {self.provenance}"


@dataclass(frozen=True)
class Releases:
    """The releases of one mechanism: that of a run, or of one node of a federation."""

    z: Noise  # effective noise multiplier in the direction with the least noise; 0 without noise
    sampling: Sampling
    steps: Steps


@dataclass(frozen=True)
class Clipping:
    """The report of an adaptive clipping bound.

    Attributes:
        quantile: fraction of the shares that the bound is to leave unclipped.
        last_bound: the bound after the last step.
        epsilon_without_count: the tight ε that the gradients alone would have.
    """

    quantile: float
    last_bound: float
    epsilon_without_count: float


@dataclass(frozen=True, kw_only=True)
class Released:
    """The releases of a run, and whose presence their ε hides.

    Attributes:
        z: effective noise multiplier in the direction with the least noise; 0 without noise.
        sampling: how steps draw examples or owners.
        steps: number of releases that ε composes.
        delta: δ.
        unit: kind of the owners of examples, such as "patient".
        epsilon_of: whose presence the tight ε hides: "example", or the unit.
        examples_per_patient: maximum number of one owner's examples in a step that draws examples.
        randomness: source of the noise: "seeded", "keyed" (your own loop) or "cryptographic".
        nodes: the releases of each node of a federation.
    """

    z: Noise
    sampling: Sampling
    steps: Steps
    delta: Annotated[float, Interval(gt=0, lt=1)]
    epsilon_of: str
    examples_per_patient: Annotated[int, Interval(ge=0, le=MAX_COUNT)]
    unit: str = "patient"
    randomness: str = "seeded"
    nodes: Annotated[tuple[Releases, ...], BeforeValidator(lambda nodes: nodes or ())] = ()

    @property
    def by_owner(self) -> bool:
        """True if steps draw owners instead of examples."""
        return self.epsilon_of != "example"

    @property
    def shares_per_owner(self) -> int:
        """The maximum number of shares of one owner in a step."""
        return 1 if self.by_owner else self.examples_per_patient

    @property
    def is_secure(self) -> bool:
        """True if the noise is cryptographic. Otherwise, the seed determines it."""
        return self.randomness == "cryptographic"

    @property
    def releases(self) -> tuple[Releases, ...]:
        """The releases of each mechanism: one per node, or those of the run."""
        return self.nodes or (Releases(self.z, self.sampling, self.steps),)


@dataclass(frozen=True, kw_only=True)
class Privacy(Released):
    """The releases of a finished run, and every ε that follows from them.

    Attributes:
        epsilon_claimed: the ε of the paper's accountant, which `claimed_by` names.
        epsilon_tight: upper bound of ε for the mechanism that ran; see `epsilon_of`.
        epsilon_patient: the tight ε of an owner.
        epsilon_part: the tight ε of one example of an owner, if steps draw owners.
    """

    epsilon_claimed: float
    claimed_by: str
    epsilon_tight: float
    epsilon_tight_at_least: float | None = None
    epsilon_rdp: float | None = None
    epsilon_patient: float | None = None
    epsilon_patient_at_least: float | None = None
    epsilon_part: float | None = None
    noise_multiplier: float | None = None
    clipping: Clipping | None = None


@dataclass(frozen=True)
class Environment:
    """The machine and the commit that carried out a run."""

    device: str = ""
    threads: int | None = None
    commit: str | None = None


@dataclass(frozen=True)
class Measured:
    """Measurements, which differ between two runs with the same seed.

    Attributes:
        resumed_at_step: step at which a stopped run was resumed. None: it was never stopped.
    """

    started_utc: str = ""
    train_seconds: float | None = None
    peak_memory_bytes: int | None = None
    resumed_at_step: int | None = None


@dataclass(frozen=True)
class Labels:
    """Labels by which users find a run. They do not affect what it computes."""

    name: str | None = None
    tags: Sequence[str] | None = None
    notes: str | None = None


@dataclass(frozen=True)
class Epoch:
    """The metrics after an epoch. `number` is None if the run stopped within the epoch."""

    number: int | None
    step: Steps
    metrics: Mapping[str, float]
    epsilon_tight: float | None = None


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        run: digest of configuration, seed and data.
        experiment: digest of what the run computes, without its seed.
        headline: the metric by which the run is judged.
        config: resolved configuration, by section.
        metrics: metrics on the test set, by name.
        validation: metrics on the validation examples, by name; empty without such examples.
        stopped_by: what ended the run: "epochs", or what came earlier, such as a budget.
        warning: why the result is in doubt. Default: "", which means that it is not.
        values: the document, without the sections in `LARGE`.
        path: path of the file that it was read from. Default: None.
    """

    recipe: str
    run: str
    experiment: str
    seed: int
    headline: Headline
    privacy: Privacy
    data: Data
    config: Annotated[Mapping[str, Any], AfterValidator(_require_config)]
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
            values: the document. If `path` is given, it may lack the sections in `LARGE`, which
                are then read from the file when they are needed.
            path: path of the file. Default: None.

        Raises:
            Unfit: A field is missing or has another type.
        """
        values = name_owner(values)
        record: Record = parse_as(Record, {**values, "values": values, "path": path})
        return record

    @cached_property
    def document(self) -> Document:
        """The complete document."""
        if self.path is None:
            return dict(self.values)
        document: Document = read_json(self.path, from_json)
        return document

    @cached_property
    def epochs(self) -> Sequence[Epoch]:
        """The epochs, in order."""
        return _epochs_of(self.document)

    @property
    def has_each_epoch(self) -> bool:
        """True if every epoch has metrics, as with `execution.evaluate=each`."""
        numbers = [epoch.number for epoch in self.epochs if epoch.number is not None]
        return numbers == [*range(1, len(numbers) + 1)]

    def get(self, path: str) -> Any:
        """Return the value at a dotted path of the document; None if there is none."""
        return get(self.values, path)


def name_owner(document: Any) -> Any:
    """Return a document that names the owner of examples as later records of its data set do."""
    owner = OWNERS.get(str(get(document, "data.name")))
    privacy = get(document, "privacy")
    if owner is None or not isinstance(privacy, dict):
        return document  # parsing states what is wrong with it
    names = {key: owner for key in ("unit", "epsilon_of") if privacy.get(key) == "patient"}
    return {**document, "privacy": {**privacy, **names}}


def get(document: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a document; None if there is none."""
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _epochs_of(document: Mapping[str, Any]) -> Sequence[Epoch]:
    """Return a record's epochs. In the document, metrics are keys beside `epoch` and `step`."""
    epochs = []
    for values in parse_as(list[dict[str, Any]], document.get("epochs") or [], "epochs"):
        number = values.pop("epoch", None)
        step = values.pop("step", None)
        epsilon_tight = values.pop("epsilon_tight", None)
        epochs.append(
            {"number": number, "step": step, "epsilon_tight": epsilon_tight, "metrics": values}
        )
    return parse_as(list[Epoch], epochs, "epochs")


def read_document(path: Path, advice: str = ADVICE) -> Document | None:
    """Read and check a record's document; None if there is no file.

    Args:
        path: path of the file.
        advice: what to do about a damaged file, for the error.

    Raises:
        UserError: The file is damaged, or not a record.
    """
    try:
        if not exists(path):
            return None
    except OSError:  # such as a missing permission, which `read_json` reports
        pass
    try:
        document: Document = read_json(path, from_json)
        require_record(document, path)
    except UserError as error:
        is_forbidden = not os.access(path, os.R_OK)  # and so not damaged
        raise UserError(str(error) if is_forbidden else f"{error} {advice}") from None
    return document


def require_record(document: Any, path: Path) -> None:
    """Raise an error if a document is not a record.

    Args:
        document: the document.
        path: path of the file that it was read from, for the error.

    Raises:
        UserError: the document is not a record.
    """
    try:
        expect(isinstance(document, dict), "is no object")
        record = Record.of(document)
        expect(record.headline.name in record.metrics, "has no value of its headline.name")
        in_ledger = record.get("privacy.ledger.entries")
        if isinstance(in_ledger, int) and not record.privacy.nodes:  # whose steps add up to these
            rule = f"has {record.privacy.steps} privacy.steps, but its ledger {in_ledger}"
            expect(record.privacy.steps >= in_ledger, rule)
        _epochs_of(document)
    except Unfit as error:
        raise UserError(f"{path}: is damaged or not a record of zdp-bench: it {error}.") from None


def read(path: Path, advice: str = ADVICE) -> Record | None:
    """Read a record; None if there is no file. See `read_document`."""
    document = read_document(path, advice)
    return None if document is None else Record.of(document)


def without_large(document: Document) -> Document:
    """Return a copy of a document without the sections in `LARGE`."""
    kept = {key: value for key, value in document.items() if key not in LARGE}
    for path in LARGE:
        section, _, key = path.partition(".")
        if key and section in kept:
            kept[section] = {name: value for name, value in kept[section].items() if name != key}
    return kept
