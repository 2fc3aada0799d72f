"""The schema of every key: a run's configuration as frozen dataclasses."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval, Len, MinLen
from pydantic import AfterValidator

from zdp_bench.config.types import SHARE, Count, Positive, Threads
from zdp_bench.privacy.mechanism import MOST


@dataclass(frozen=True)
class Trainer:
    """How examples are sampled and for how long.

    Attributes:
        sampling: poisson, uniform (fixed size, without replacement) or shuffled (non-private only).
        sample_rate: probability that a step draws an example (poisson); else batch size / examples.
            null: batch_size / examples.
        batch_size: of uniform and shuffled batches; with poisson, the expected one.
        epochs: passes over the data: epochs / sample_rate steps.
        micro_batch: examples processed at once, halved where memory runs out; never changes the
            result, so it enters no digest. null: 1024, which
            is the most; auto: as many as fit.
        checkpoint_epochs: epochs between checkpoints.
        ema: decay of an average over the weights of all steps, which is evaluated and saved in
            their place; it is made of releases, so it costs no ε. null: the last weights.
        augmentations: how many augmented views of an example make its share: their mean gradient is
            clipped. null: one.
    """

    sampling: Literal["poisson", "uniform", "shuffled"]
    sample_rate: Annotated[float, Interval(ge=1 / MOST, le=1)] | None
    batch_size: Count | None
    epochs: Count
    micro_batch: Count | Literal["auto"] | None
    checkpoint_epochs: Count
    ema: Annotated[float, SHARE] | None
    augmentations: Annotated[int, Ge(2)] | None


@dataclass(frozen=True)
class Privacy:
    """How ε is stated and kept.

    Attributes:
        delta: the δ at which ε is stated.
        max_epsilon: the budget: training stops before the step whose tight ε would exceed it.
            null: none.
        target_epsilon: replace `algorithm.noise_multiplier` by the one whose whole run has this
            tight ε; inf: by 0. null: as configured.
        claimed_epsilon: replace it by the one for which the accountant claims this ε; inf: by 0.
            null: as configured.
        total_budget: refuse a run that would take the tight ε of all runs on its data set, in its
            results folder, past this; see `training/spending.py`. null: none.
        secure: sample and draw noise from the operating system's cryptographic randomness instead
            of the seed.
        unit: whose ε is stated. example: an example's. patient: that of who owns examples, or of
            what the data set calls its unit. Patients are then drawn, at `trainer.sample_rate`, and
            the mean gradient of a patient's examples is clipped.
        max_examples: with unit=patient, at most so many examples of a drawn patient, drawn anew at
            each step. null: all.
    """

    delta: float
    max_epsilon: Positive | None
    target_epsilon: Positive | None
    claimed_epsilon: Positive | None
    total_budget: Positive | None
    secure: bool
    unit: Literal["example", "patient"]
    max_examples: Count | None

    @property
    def by_patient(self) -> bool:
        """True if a patient is the unit."""
        return self.unit == "patient"


@dataclass(frozen=True)
class Claims:
    """Which cell of which paper a recipe's runs fill.

    Attributes:
        table: PAPER/N. null: none.
        row: the row of that table.
        variant: what differs from the paper, in a few words. null: the paper's own settings.
    """

    table: str | None
    row: str | None
    variant: str | None


@dataclass(frozen=True)
class Paths:
    """Where data is read and results are written.

    Attributes:
        data: the data root.
        results: the results folder.
    """

    data: Annotated[str, MinLen(1)]
    results: Annotated[str, MinLen(1)]


@dataclass(frozen=True)
class Execution:
    """How a run is carried out; a result depends on it only in its last bits.

    Attributes:
        checkpoint_steps: also save every so many steps, beside `trainer.checkpoint_epochs`.
            null: do not.
        deterministic: refuse operations whose result differs from call to call (CUDA has some).
        evaluate: measure test metrics after each epoch, or after the last only, which takes less
            time but leaves no curve.
        prefetch: micro-batches that another thread reads ahead. null: 1 for a GPU, 0 for a CPU.
        callbacks: plug-ins that are told the metrics of every evaluation. null: none.
    """

    checkpoint_steps: Count | None
    deterministic: bool
    evaluate: Literal["each", "last"]
    prefetch: Annotated[int, Interval(ge=0, le=1024)] | None
    callbacks: list[str] | None


@dataclass(frozen=True)
class Federated:
    """Nodes that keep their patients to themselves and train one model together.

    `patience` does not change what is computed. See `zdp_bench.extras.federated`.

    Attributes:
        nodes: how many. `trainer.batch_size` is then each node's, and the optimiser the server's.
            null: one central run.
        patients: split (the seed divides the training set, whole patients, among the nodes) or own
            (each node trains on all that its own data root holds; over the network).
        local_steps: private steps of a node in a round.
        local_lr: rate of SGD between a node's steps of one round; unused if there is one step.
        min_nodes: how many must answer for a round to count. null: all.
        patience: seconds that a round waits for its answers.
    """

    nodes: Count | None
    patients: Literal["split", "own"]
    local_steps: Count
    local_lr: Annotated[float, Interval(gt=0, lt=math.inf)]
    min_nodes: int | None
    patience: Positive


def _require_device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", name):
        raise ValueError("must be auto, cpu, cuda (a GPU) or cuda:N")
    return name


def _require_tag(tag: str) -> str:
    if "," in tag:
        raise ValueError("a tag has no comma; write several as [a,b]")
    return tag


Name = Annotated[str, Len(1, 100)]
Tag = Annotated[str, Len(1, 100), AfterValidator(_require_tag)]
Notes = Annotated[str, Len(1, 10_000)]


@dataclass(frozen=True)
class Scalars:
    """The keys that belong to no group.

    Attributes:
        recipe: the recipe's name.
        seed: names the streams that model, sampling and noise each draw from.
        device: auto, cpu, cuda or cuda:N.
        threads: CPU threads. null: torch's choice.
        precision: null (float32), tf32 (non-private only) or bf16; norms, clipped sums and noise
            are float32 or wider.
        force: run again although the record is there.
        name: a name for the run, to find it by. null: none.
        tags: words to find the run by. null: none.
        notes: a text about the run. null: none.
    """

    recipe: str
    seed: Annotated[int, Interval(ge=0, lt=2**64)]  # the most that a record is read with
    device: Annotated[str, AfterValidator(_require_device)]
    threads: Threads | None
    precision: Literal["tf32", "bf16"] | None
    force: bool
    name: Name | None
    tags: list[Tag] | None
    notes: Notes | None


@dataclass(frozen=True)
class Plugin:
    """A plug-in by name, with its checked options."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Run(Scalars):
    """One run, fully specified and checked.

    Attributes:
        validation_share: `dataset.validation_share`, a key of every data set without an option of
            its own for it: the share of the owners who are held out of training to validate on;
            see `training/validation.py`.
        replace_batchnorm: `model.replace_batchnorm`, a key of every model: what takes BatchNorm's
            place in private training; see `nn/surgery.py`.
        weight_standardisation: `model.weight_standardisation`, likewise: convolutions compute with
            filters of mean 0 and norm 1; see `nn/surgery.py`.
        start: `model.start`, likewise: how the weights are scaled before training; see
            `nn/initialisation.py`.
        init_from: `model.init_from`, a key of every model: RECIPE or RECIPE/RUN, a finished run
            on public data whose weights the model starts from; see `training/public_start.py`.
        complex_as: `model.complex_as`, likewise: how complex records become real ones for a model
            with real weights; see `nn/surgery.py`.
        resolved: the same configuration as plain values, for the record.
    """

    dataset: Plugin
    validation_share: Annotated[float, SHARE] | None
    representation: Plugin | None
    model: Plugin
    task: Plugin
    replace_batchnorm: Literal["group", "instance", "frozen"] | None
    weight_standardisation: bool | None
    start: Literal["unit_variance"] | None
    init_from: str | None
    complex_as: Literal["magnitude", "channels"] | None
    algorithm: Plugin
    optimizer: Plugin
    scheduler: Plugin | None
    accountant: str
    trainer: Trainer
    privacy: Privacy
    claims: Claims
    execution: Execution
    logger: Plugin | None
    federated: Federated
    paths: Paths
    resolved: dict[str, Any]

    @property
    def forms_shares(self) -> bool:
        """True if several examples make one share: a patient's, or the views of one."""
        return self.privacy.by_patient or self.trainer.augmentations is not None

    @property
    def plugins(self) -> list[tuple[str, str]]:
        """(kind, name) of what other packages may have brought."""
        chosen = {kind: getattr(self, kind) for kind in PLUGIN_KINDS}
        return [(kind, plugin.name) for kind, plugin in chosen.items() if plugin]

    @property
    def data_root(self) -> Path:
        return Path(self.paths.data).expanduser()

    @property
    def results(self) -> Path:
        return Path(self.paths.results).expanduser()


SECTIONS: dict[str, type] = {
    "trainer": Trainer,
    "privacy": Privacy,
    "claims": Claims,
    "execution": Execution,
    "federated": Federated,
    "paths": Paths,
}
# Other packages may add to these.
PLUGIN_KINDS = ("dataset", "representation", "model", "task", "algorithm")
# Keys of every plug-in of a kind, beside the options of its own.
COMMON_KEYS: dict[str, tuple[str, ...]] = {
    "dataset": ("validation_share",),
    "model": (
        "replace_batchnorm",
        "weight_standardisation",
        "start",
        "init_from",
        "complex_as",
    ),
}
MAY_BE_NONE = ("representation", "scheduler", "logger")
PLUGINS = (*PLUGIN_KINDS, "optimizer", "scheduler", "logger")
GROUPS = (*PLUGINS, "accountant", "trainer")
# Keys that say where and how a run is executed, not what it computes: they enter no digest.
LABELS = ("name", "tags", "notes")
OPERATIONAL = ("paths", "force", "device", "threads", "execution", "claims", "logger", *LABELS)
# Keys that may differ between a run and its resumption; a record's configuration lacks them.
NOT_RECORDED = {*OPERATIONAL} - {"claims"}
# Keys of `federated` that change what is computed.
FEDERATED_RESULT = ("nodes", "patients", "local_steps", "local_lr", "min_nodes")
