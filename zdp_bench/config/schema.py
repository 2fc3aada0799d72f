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
from zdp_bench.disk import expand_home
from zdp_bench.privacy.mechanism import MAX_COUNT


@dataclass(frozen=True)
class Trainer:
    """How examples are sampled and for how long.

    Attributes:
        sampling: poisson, uniform (fixed size, without replacement) or shuffled (non-private only).
        sample_rate: probability that a step draws an example. null: batch_size / examples.
        batch_size: size of uniform and shuffled batches; with poisson, the expected size.
            null: sample_rate sets it.
        epochs: number of epochs; a run takes epochs / sample_rate steps.
        micro_batch: number of examples processed at once, halved if memory runs out; it does not
            change the result and enters no digest. null: 1024, the maximum; auto: as many as fit.
        checkpoint_epochs: number of epochs between checkpoints.
        ema: decay of a moving average of the weights, which is evaluated and saved instead of them.
            It is computed from releases, so it costs no ε. null: no average.
        augmentations: number of augmented views of an example whose mean gradient is clipped.
            null: one.
    """

    sampling: Literal["poisson", "uniform", "shuffled"]
    sample_rate: Annotated[float, Interval(ge=1 / MAX_COUNT, le=1)] | None
    batch_size: Count | None
    epochs: Count
    micro_batch: Count | Literal["auto"] | None
    checkpoint_epochs: Count
    ema: Annotated[float, SHARE] | None
    augmentations: Annotated[int, Ge(2)] | None


@dataclass(frozen=True)
class Privacy:
    """What ε protects, and how much of it a run may spend.

    Attributes:
        delta: δ of every ε.
        max_epsilon: budget of the run: training stops before a step whose tight ε would exceed it.
            null: no budget.
        target_epsilon: tight ε of the whole run; sets `algorithm.noise_multiplier`, with inf to 0.
            null: keep the noise multiplier.
        claimed_epsilon: ε of the whole run by `accountant`; sets `algorithm.noise_multiplier`, with
            inf to 0. null: keep the noise multiplier.
        total_budget: budget of all runs on the data set in the results folder: a run is rejected if
            their joint tight ε would exceed it; see `training/reservation.py`. null: no budget.
        secure: draw batches and noise from the operating system's cryptographic generator instead
            of the seed's streams.
        unit: what ε protects: an example, or a patient with all examples. "patient" stands for the
            data set's kind of owner, which may be another. With it, a step draws owners at
            `trainer.sample_rate`, and the mean gradient of an owner's examples is clipped.
        max_examples: with unit=patient, maximum number of an owner's examples used in a step; each
            step draws them anew. null: all.
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
    def by_owner(self) -> bool:
        """True if the unit is the owner, such as a patient, instead of the example."""
        return self.unit == "patient"


@dataclass(frozen=True)
class Claims:
    """The cell of a paper's table that a recipe's runs fill.

    Attributes:
        table: the table, PAPER/N. null: none.
        row: row of the table.
        variant: what differs from the paper, in a few words. null: the settings of the paper.
    """

    table: str | None
    row: str | None
    variant: str | None


@dataclass(frozen=True)
class Paths:
    """Folders of data and results.

    Attributes:
        data: folder that holds the data sets.
        results: folder that records, weights and tables are written to.
    """

    data: Annotated[str, MinLen(1)]
    results: Annotated[str, MinLen(1)]


@dataclass(frozen=True)
class Execution:
    """How a run is executed. This affects at most the last bits of a result.

    Attributes:
        checkpoint_steps: number of steps between checkpoints, in addition to
            `trainer.checkpoint_epochs`. null: only the latter.
        deterministic: reject operations whose result differs from call to call (CUDA has some), and
            use no CUDA graphs.
        evaluate: when to measure test metrics: after each epoch, or only after the last one, which
            is faster but gives no learning curve.
        prefetch: number of micro-batches that another thread reads ahead. null: 1 on a GPU, else 0.
        callbacks: plug-ins that receive the metrics of every evaluation. null: none.
    """

    checkpoint_steps: Count | None
    deterministic: bool
    evaluate: Literal["each", "last"]
    prefetch: Annotated[int, Interval(ge=0, le=1024)] | None
    callbacks: list[str] | None


@dataclass(frozen=True)
class Federated:
    """A federation: nodes train one model together, and each keeps the data of its own patients.

    See `zdp_bench.extras.federated`.

    Attributes:
        nodes: number of nodes. `trainer.batch_size` is then each node's, and the optimizer runs on
            the server. null: one central run.
        patients: split (the seed divides the patients of the training set among the nodes) or own
            (each node trains on all data in its own data root; over the network).
        local_steps: number of private steps that a node takes in a round.
        local_lr: learning rate of SGD for a node's steps within a round; unused with one step.
        min_nodes: number of nodes that must answer for a round to count. null: all.
        patience: seconds that a round waits for answers. It does not affect what is computed.
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
        recipe: name of the recipe.
        seed: seed of the separate streams for model, sampling and noise.
        device: auto, cpu, cuda or cuda:N.
        threads: number of CPU threads. null: torch's default.
        precision: null (float32), tf32 (non-private only) or bf16; norms, clipped sums and noise
            always have float32 or more.
        force: run again even if there is a record.
        name: a name by which to find the run. null: none; typed, it removes that of a finished run.
        tags: words by which to find the run. null or []: likewise.
        notes: text about the run. null: likewise.
    """

    recipe: str
    seed: Annotated[int, Interval(ge=0, lt=2**64)]  # 64 bits, as many as a record may hold
    device: Annotated[str, AfterValidator(_require_device)]
    threads: Threads | None
    precision: Literal["tf32", "bf16"] | None
    force: bool
    name: Name | None
    tags: list[Tag] | None
    notes: Notes | None


@dataclass(frozen=True)
class Plugin:
    """A plug-in's name and its checked options."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Run(Scalars):
    """One run, fully specified and checked.

    Attributes:
        validation_share: `dataset.validation_share`: fraction of owners held out of training for
            validation; see `training/validation.py`. Every data set has this key, unless it has an
            option of its own for it.
        replace_batchnorm: `model.replace_batchnorm`: the layer that replaces BatchNorm in private
            training; see `nn/surgery.py`. This and the following are keys of every model.
        weight_standardisation: `model.weight_standardisation`: whether convolutions use filters of
            mean 0 and norm 1; see `nn/surgery.py`.
        start: `model.start`: how initial weights are scaled; see `nn/initialisation.py`.
        init_from: `model.init_from`: RECIPE or RECIPE/RUN, a finished run on public data whose
            weights the model starts from; see `training/public_start.py`.
        complex_as: `model.complex_as`: how complex examples become real ones for a model with real
            weights; see `nn/surgery.py`.
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
        """True if several examples form one share: an owner's, or the views of an example."""
        return self.privacy.by_owner or self.trainer.augmentations is not None

    @property
    def plugins(self) -> list[tuple[str, str]]:
        """(kind, name) of each plug-in of a kind that other packages may provide."""
        chosen = {kind: getattr(self, kind) for kind in PLUGIN_KINDS}
        return [(kind, plugin.name) for kind, plugin in chosen.items() if plugin]

    @property
    def data_root(self) -> Path:
        return expand_home(self.paths.data)

    @property
    def results(self) -> Path:
        return expand_home(self.paths.results)


SECTIONS: dict[str, type] = {
    "trainer": Trainer,
    "privacy": Privacy,
    "claims": Claims,
    "execution": Execution,
    "federated": Federated,
    "paths": Paths,
}
# Kinds of plug-ins that other packages may provide.
PLUGIN_KINDS = ("dataset", "representation", "model", "task", "algorithm")
# Keys that every plug-in of a kind has in addition to its own options.
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
# Keys that affect only where and how a run is executed, so they enter no digest.
LABELS = ("name", "tags", "notes")
OPERATIONAL = ("paths", "force", "device", "threads", "execution", "claims", "logger", *LABELS)
# Keys that may change when a run is resumed, so they are not in a record's configuration.
NOT_RECORDED = {*OPERATIONAL} - {"claims"}
# Keys of `federated` that affect what is computed.
FEDERATED_RESULT = ("nodes", "patients", "local_steps", "local_lr", "min_nodes")
