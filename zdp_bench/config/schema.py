"""The schema of every key: what a run is, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING


@dataclass(frozen=True)
class Trainer:
    """How records are sampled and for how long.

    Attributes:
        sampling: poisson, uniform (fixed size, without replacement) or shuffled (non-private only).
        sample_rate: probability of a record (poisson); batch size / records otherwise. Or null, and `batch_size` says it.
        batch_size: of uniform and shuffled batches; the expected one of Poisson's, whose rate is then batch_size / records.
        epochs: passes over the data: epochs / sample_rate steps.
        micro_batch: records processed at once; memory only, never the result, so it enters no digest. null: 2048; auto: as many
            as fit. Where memory runs out it is halved.
        checkpoint_epochs: epochs between checkpoints.
    """

    sampling: str = MISSING
    sample_rate: float | None = MISSING
    batch_size: int | None = MISSING
    epochs: int = MISSING
    micro_batch: int | str | None = MISSING
    checkpoint_epochs: int = MISSING


@dataclass(frozen=True)
class Privacy:
    """How ε is stated and kept.

    Attributes:
        delta: the δ at which ε is stated.
        max_epsilon: the budget: training stops before the step whose tight ε would exceed it. null: none.
        target_epsilon: replace `algorithm.noise_multiplier` by the one whose whole run has this tight ε; inf: by 0. null: as
            configured.
        claimed_epsilon: replace it by the one for which the accountant claims this ε; inf: by 0. null: as configured.
        range_test_steps: steps of a learning-rate range test that was made on the same records: every ε counts them. null: none.
        secure: sampling and noise from the operating system's cryptographic randomness instead of the seed.
    """

    delta: float = MISSING
    max_epsilon: float | None = MISSING
    target_epsilon: float | None = MISSING
    claimed_epsilon: float | None = MISSING
    range_test_steps: int | None = MISSING
    secure: bool = MISSING


@dataclass(frozen=True)
class Claims:
    """Which cell of which paper a recipe's runs fill: `table` PAPER/N, its `row`; a `variant` is ours, a row of its own."""

    table: str | None = MISSING
    row: str | None = MISSING
    variant: str | None = MISSING


@dataclass(frozen=True)
class Paths:
    """Where data is read and results are written."""

    data: str = MISSING
    results: str = MISSING


@dataclass(frozen=True)
class Execution:
    """How a run is carried out: no key of it changes a result, but for the last bits on a GPU.

    Attributes:
        checkpoint_steps: also save every so many steps, beside `trainer.checkpoint_epochs`. null: not.
        deterministic: refuse operations whose result differs from call to call (CUDA has some).
        prefetch: micro-batches read ahead by another thread. null: 1 for a GPU, 0 for a CPU.
        tensorboard: also write TensorBoard's event files; needs the extra `tensorboard`.
    """

    checkpoint_steps: int | None = MISSING
    deterministic: bool = MISSING
    prefetch: int | None = MISSING
    tensorboard: bool = MISSING


@dataclass(frozen=True)
class Federated:
    """Nodes that keep their patients to themselves and train one model together; see `zdp_bench.federated`.

    Attributes:
        nodes: how many. `trainer.batch_size` is then each node's, and the optimiser the server's. null: one central run.
        patients: split (the training set is dealt out, whole patients, by the seed) or own (each node trains on all that its own
            data root holds; for `zdp-bench federate`).
        local_steps: private steps of a node in a round.
        local_lr: the rate of SGD between a node's steps of one round; of no meaning where there is one.
        min_nodes: how many must answer for a round to count. null: all.
        backend: serial (one node after the other, in this process) or ray (Flower's own simulation). From here on, no key changes
            what is computed.
        patience: seconds that a round waits for its answers, and a client for its server.
        address: HOST:PORT, where the server of `zdp-bench federate` listens and its clients find it.
        certificate, key: the server's certificate (PEM, with its chain) and private key.
        authority: the certificate of who signed the server's; the clients trust no other.
        node: which node this client is, from 0.
        node_key: this client's private key (OpenSSH, ECDSA), by which the server knows the node.
        node_keys: the server's file of the nodes' public keys, a line each in the order of their numbers.
    """

    nodes: int | None = MISSING
    patients: str = MISSING
    local_steps: int = MISSING
    local_lr: float = MISSING
    min_nodes: int | None = MISSING
    backend: str = MISSING
    patience: float = MISSING
    address: str = MISSING
    certificate: str | None = MISSING
    key: str | None = MISSING
    authority: str | None = MISSING
    node: int | None = MISSING
    node_key: str | None = MISSING
    node_keys: str | None = MISSING


@dataclass(frozen=True)
class Scalars:
    """The keys that belong to no group."""

    recipe: str = MISSING
    seed: int = MISSING
    device: str = MISSING
    threads: int | None = MISSING
    precision: str | None = MISSING
    force: bool = MISSING


@dataclass(frozen=True)
class Plugin:
    """A plug-in by name, with its checked options."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run, fully specified and checked; `resolved` is the same as plain values, for the record."""

    recipe: str
    seed: int
    device: str
    threads: int | None
    precision: str | None
    force: bool
    dataset: Plugin
    model: Plugin
    task: Plugin
    replace_batchnorm: (
        Literal["group", "instance", "frozen"] | None
    )  # model.replace_batchnorm, for any model
    algorithm: Plugin
    optimizer: Plugin
    scheduler: Plugin | None
    accountant: str
    trainer: Trainer
    privacy: Privacy
    claims: Claims
    execution: Execution
    federated: Federated
    paths: Paths
    resolved: dict[str, Any]

    @property
    def plugins(self) -> list[tuple[str, str]]:
        """(kind, name) of what other packages may have brought."""
        return [(kind, getattr(self, kind).name) for kind in PLUGIN_KINDS]

    @property
    def data_root(self) -> Path:
        return Path(self.paths.data).expanduser()

    @property
    def results(self) -> Path:
        return Path(self.paths.results).expanduser()


PLUGINS = ("dataset", "model", "task", "algorithm", "optimizer", "scheduler")
PLUGIN_KINDS = ("dataset", "model", "task", "algorithm")  # those that other packages may add to
GROUPS = (*PLUGINS, "accountant", "trainer")
REPLACEMENTS = (
    "group",
    "instance",
    "frozen",
)  # of BatchNorm, for private training; see `batchnorm.py`
# Keys that say where and how a run is executed, not what it computes: they change no result and enter no digest.
OPERATIONAL = ("paths", "force", "device", "threads", "execution", "claims")
FEDERATED_RESULT = (
    "nodes",
    "patients",
    "local_steps",
    "local_lr",
    "min_nodes",
)  # the keys that change what is computed
