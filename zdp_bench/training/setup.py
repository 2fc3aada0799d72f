"""Build everything that a run trains with from its configuration.

A run, its cost estimate, its validation and an audit all start from `Setup.of(config)`. A
federation first builds the part that needs no plan (`ModelSetup`), because the number of a node's
steps is known only once all nodes have stated their numbers of examples.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config.schema import Run
from zdp_bench.data import Dataset, DatasetInfo, Splits
from zdp_bench.data.files import Absent, collect_sources, suggest_stand_in
from zdp_bench.data.owners import count_owners, identify_examples, identify_owners, owners_of
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, PerExample
from zdp_bench.privacy.accountants import claimed_epsilon
from zdp_bench.privacy.accounting import affordable_steps, tight_epsilon
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from zdp_bench.privacy.sampling import subsets
from zdp_bench.privacy.statement import warn_of
from zdp_bench.registry import lookup
from zdp_bench.representations import represent_info
from zdp_bench.tasks import Task, is_proved
from zdp_bench.tasks.metric import metric_of
from zdp_bench.training import model_checks
from zdp_bench.training.batches import (
    MICRO_BATCH,
    MicroBatches,
    Size,
    draw_batch,
    initial_size,
    micro_batches,
)
from zdp_bench.training.build import (
    build_algorithm,
    build_model,
    build_optimizer,
    check_fit,
    claim_of,
    fit_outputs,
    zeros_like,
)
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.evaluation import check_metrics
from zdp_bench.training.machine import arithmetic, pick_device
from zdp_bench.training.plan import UNIT, Patients, Plan
from zdp_bench.training.public_start import PublicStart, digest_weights_files, find_start
from zdp_bench.training.representation import build_representation, represent_data
from zdp_bench.training.validation import expect_held_out, hold_out, pick_owners


def load_data(config: Run) -> Splits:
    """Read the configured data set from the data root.

    Raises:
        UserError: the data set is not there.
    """
    try:
        with collect_sources() as sources:
            data = build_dataset(config).load(config.data_root)
    except Absent as error:
        raise UserError(f"{error}{suggest_stand_in(config.dataset.name)}") from None
    single_owners = {source: min(owners) for source, owners in sources.items() if len(owners) == 1}
    data = replace(
        data,
        sources=frozenset(sources or {data.digest[:16]}),
        source_owners=single_owners,
    )
    share = config.validation_share
    if share is None:
        return represent_data(config, data)
    # Pick from the original examples: the last bits of a representation may differ by machine.
    is_held_out = pick_owners(data, share)
    return hold_out(represent_data(config, data), is_held_out, share)


def build_dataset(config: Run) -> Dataset:
    """Return the configured data set with its options, without reading it."""
    dataset: Dataset = lookup("dataset", config.dataset.name)(**config.dataset.options)
    return dataset


def describe_data(config: Run) -> DatasetInfo:
    """Return counts and shapes of the configured data set, as the model receives it."""
    info = build_dataset(config).info(config.data_root)
    if config.validation_share is not None:
        info = _hold_out_of(info, config, config.validation_share)
    if config.representation is None:
        return info
    representation = build_representation(config, info.input_shape, info.dtype, fit=False)
    return represent_info(representation, info)


def _hold_out_of(
    info: DatasetInfo,
    config: Run,
    share: float,
) -> DatasetInfo:
    """Return a data set's counts with a part of its owners held out. Classes are not counted."""
    if not info.found:
        return expect_held_out(info, share)
    data = build_dataset(config).load(config.data_root)
    data = hold_out(data, pick_owners(data, share), share)
    assert data.validation is not None
    return replace(
        info,
        train=len(data.train),
        validation=len(data.validation),
        examples_per_patient=data.examples_per_patient,
        owners=None if data.train.groups is None else len(data.train.groups.unique()),
        classes={},
    )


def loss_of(task: Task) -> PerExample:
    """Return the task's loss, which gets one example at a time unless it is proved to be safe."""
    return PerExample(task.loss, proved=is_proved(task.loss))


def count_units(config: Run, data: Splits | DatasetInfo) -> int:
    """Return the number of examples or, if they are the unit, patients that a step draws from."""
    if config.privacy.by_owner:
        return count_owners(data, UNIT)
    return data.train if isinstance(data, DatasetInfo) else len(data.train)


def assign_subsets(
    config: Run,
    data: Splits,
    cycle: int,
) -> np.ndarray:
    """Return the index of the subset that each training example or patient is in, [n].

    Args:
        config: the run's configuration, which states whether steps draw patients.
        data: the data set.
        cycle: number of subsets; see `privacy.sampling.subsets`.
    """
    if config.privacy.by_owner:
        _, identities = identify_owners(data, UNIT)
    else:
        identities = identify_examples(data.train)
    return subsets(identities, cycle)


@dataclass(frozen=True)
class ModelSetup:
    """Data, task, model and optimizer of a run, before its steps are planned.

    Attributes:
        config: the run's configuration.
        data: the data set, or a `DatasetInfo`, from which nothing can be drawn.
        device: where the model is.
        task: the task, which defines loss and metrics.
        model: the model.
        optimizer: the optimizer of its trainable parameters.
        start: public weights from which the run starts; None without any, or if no data was read.
        weights_files: SHA-256 of each file of weights that the model reads, by key; see
            `digest_weights_files`. Empty if no data was read.
    """

    config: Run
    data: Splits
    device: torch.device
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    start: PublicStart | None
    weights_files: dict[str, str]

    @staticmethod
    def of(
        config: Run,
        data: Splits | DatasetInfo | None = None,
        device: torch.device | None = None,
    ) -> ModelSetup:
        """Build task, model and optimizer, and check that they fit the data.

        Args:
            config: the run's configuration.
            data: the data set, or its counts and shapes. Default: read the configured one.
            device: where the model is moved to. Default: the configured device.
        """
        device = device or pick_device(config.device)
        task: Task = lookup("task", config.task.name)(**config.task.options)
        metric_of(task, task.headline)  # raises an error if the metric's direction is unknown
        data = fit_outputs(config, task, data or load_data(config))
        weights_files = digest_weights_files(config) if isinstance(data, Splits) else {}
        model = build_model(config, data)
        start = find_start(config) if isinstance(data, Splits) else None
        if start and isinstance(data, Splits):
            start.require_apart(data)
            start.load_into(model)
        check_fit(config, model, task, data)
        if isinstance(data, Splits):
            check_metrics(config, model, task, data.test)
        model = model.to(device)
        optimizer = build_optimizer(config, model)
        return ModelSetup(
            config, cast(Splits, data), device, task, model, optimizer, start, weights_files
        )

    def with_plan(self, plan: Plan | None = None) -> Setup:
        """Return the setup for a plan, with the algorithm and its calibrated noise.

        Args:
            plan: plan of the steps. Default: the configured one for the data.
        """
        plan = plan or Plan.of(self.config, count_units(self.config, self.data))
        inputs, _ = self.empty_batch()
        problem = Problem(
            self.model,
            loss_of(self.task),
            plan.sampling,
            self.config.seed,
            inputs,
            plan.steps,
        )
        config, algorithm = build_algorithm(self.config, problem, plan)
        if algorithm.mechanism().is_private:
            warn_of(config.privacy.delta, plan.sampling.records)
        data = self.data
        views = config.trainer.augmentations
        is_read = isinstance(data, Splits)
        if views and is_read and data.augment is None and not data.train.is_stochastic:
            # All augmented versions of an example would be identical.
            raise UserError(
                f"trainer.augmentations={views}: dataset={config.dataset.name} does not augment "
                "examples. Set dataset.augment, or remove the key."
            )
        patients = None
        if config.privacy.by_owner and is_read:
            patients = Patients.of(owners_of(data, UNIT), config.privacy.max_examples)
        if plan.sampling.cycle > 1 and is_read:
            subset_of = assign_subsets(config, data, plan.sampling.cycle)
            plan = replace(plan, subset_of=subset_of)
        return Setup(
            **vars(self) | {"config": config}, plan=plan, algorithm=algorithm, patients=patients
        )

    def empty_batch(self) -> Batch:
        """Return inputs [0, ...] and targets [0, ...] of the training set's shapes and dtypes."""
        if isinstance(self.data, DatasetInfo):
            return zeros_like(self.data, 0)
        return self.data.train.batch(torch.arange(0))


@dataclass(frozen=True)
class Setup(ModelSetup):
    """Everything that a run needs for its first step.

    Attributes:
        plan: plan of the steps.
        algorithm: the algorithm, with its calibrated noise.
        patients: the examples of each patient, if patients are drawn and data was read.
    """

    plan: Plan
    algorithm: Algorithm
    patients: Patients | None

    @staticmethod
    def of(
        config: Run,
        data: Splits | DatasetInfo | None = None,
        device: torch.device | None = None,
        plan: Plan | None = None,
    ) -> Setup:
        """Build everything; see `ModelSetup.of` and `ModelSetup.with_plan`."""
        return ModelSetup.of(config, data, device).with_plan(plan)

    @property
    def max_share_examples(self) -> int:
        """Largest number of examples in one share, counting each augmented version."""
        privacy = self.config.privacy
        owned = self.data.examples_per_patient if privacy.by_owner else 1
        views = self.config.trainer.augmentations or 1
        return min(owned, privacy.max_examples or owned) * views

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of a step."""
        return self.algorithm.mechanism()

    def affordable_releases(self, max_releases: int) -> int | None:
        """Return how many of `max_releases` releases the budget allows; None without a budget."""
        privacy = self.config.privacy
        if privacy.max_epsilon is None:
            return None
        return affordable_steps(self.mechanism, privacy.delta, privacy.max_epsilon, max_releases)

    def epsilon(self, releases: int) -> float:
        """Return the tight ε of a number of releases."""
        return tight_epsilon(self.mechanism, releases, self.config.privacy.delta)

    def claimed_epsilon(self, releases: int) -> float:
        """Return the ε that the configured accountant claims for a number of releases."""
        claim = claim_of(self.config, self.plan, self.algorithm.noise_multiplier, releases)
        return claimed_epsilon(self.config.accountant, claim)

    def noise(self, key: str) -> NoiseSource:
        """Return the noise source of a run: seeded by its key, or cryptographic if it is secure."""
        return SecureNoise() if self.config.privacy.secure else SeededNoise(key)

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return a context that computes in the configured precision; see `machine.arithmetic`."""
        config = self.config
        return arithmetic(
            config.precision,
            config.execution.deterministic,
            self.model,
            self.algorithm,
            self.device,
        )

    def check_model(self) -> model_checks.Checked:
        """Reject a model that cannot be trained privately as it is; see `model_checks.check`."""
        empty_batch = self.empty_batch()
        if not self.mechanism.is_private:
            return model_checks.Checked([], empty_batch)
        loss, forms_shares = loss_of(self.task), self.config.forms_shares
        return model_checks.check(self.model, self.algorithm, loss, empty_batch, forms_shares)

    def micro_batch_size(self) -> Size:
        """Return the initial size of micro-batches."""
        fixed = self.config.trainer.micro_batch
        if not isinstance(fixed, str):
            return Size(fixed or MICRO_BATCH)
        inputs, targets = self.empty_batch()
        like = inputs.to(self.device), targets.to(self.device)
        expected = self.plan.sampling.expected_batch_size * self.max_share_examples
        return initial_size(self.model, self.task.loss, like, expected, self.device)

    def draw(
        self,
        key: int | str,
        step: int,
        size: Size | None = None,
        ranks: Ranks = ALONE,
    ) -> tuple[MicroBatches, float]:
        """Draw a step's batch.

        Args:
            key: key of the run.
            step: number of the step.
            size: size of the micro-batches. Default: `trainer.micro_batch`.
            ranks: processes that share the batch.

        Returns:
            This rank's micro-batches, and the divisor of the sum over all ranks.
        """
        data, secure = self.data, self.config.privacy.secure
        indices, shares, divisor = draw_batch(self.plan, key, step, secure, ranks, self.patients)
        batches = micro_batches(
            data.train,
            indices,
            self.config,
            self.device,
            key,
            step,
            data.augment,
            data.augment_targets,
            size,
            shares,
        )
        return batches, divisor
