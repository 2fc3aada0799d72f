"""Everything a run trains with, built from its configuration in one place.

`Setup.of(config)` is what a run, its cost estimate, its validation and an audit all start from. A
federation builds the part that needs no plan (`ModelSetup`) first: how many steps a node takes is
known once all nodes have said how many examples they have.
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
from zdp_bench.training.machine import arithmetic, pick_device
from zdp_bench.training.plan import UNIT, Patients, Plan
from zdp_bench.training.public_start import PublicStart, find_start
from zdp_bench.training.representation import build_representation, represent_data
from zdp_bench.training.validation import expect_held_out, hold_out, pick_owners


def load_data(config: Run) -> Splits:
    """Return the configured data set, read from the data root."""
    try:
        with collect_sources() as sources:
            data = build_dataset(config).load(config.data_root)
    except Absent as error:
        raise UserError(f"{error}{suggest_stand_in(config.dataset.name)}") from None
    data = replace(data, sources=frozenset(sources or {data.digest[:16]}))
    share = config.validation_share
    if share is None:
        return represent_data(config, data)
    held = pick_owners(data, share)  # of the examples: a representation's last bits may differ
    return hold_out(represent_data(config, data), held, share)


def build_dataset(config: Run) -> Dataset:
    """Return the configured data set with its options; nothing is read yet."""
    dataset: Dataset = lookup("dataset", config.dataset.name)(**config.dataset.options)
    return dataset


def describe_data(config: Run) -> DatasetInfo:
    """Return counts and shapes of the configured data set, as the model gets it."""
    info = build_dataset(config).info(config.data_root)
    if config.validation_share is not None:
        info = _hold_out_of(info, config, config.validation_share)
    if config.representation is None:
        return info
    return represent_info(build_representation(config, info.input_shape, info.dtype), info)


def _hold_out_of(
    info: DatasetInfo,
    config: Run,
    share: float,
) -> DatasetInfo:
    """Return a data set's counts with a share of its owners held out; classes are not counted."""
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
    """Return the task's loss; one that is not proved to keep examples apart gets one at a time."""
    return PerExample(task.loss, proved=is_proved(task.loss))


def count_units(config: Run, data: Splits | DatasetInfo) -> int:
    """Return how many examples, or patients if they are the unit, a step draws from."""
    if config.privacy.by_patient:
        return count_owners(data, UNIT)
    return data.train if isinstance(data, DatasetInfo) else len(data.train)


def assign_subsets(
    config: Run,
    data: Splits,
    cycle: int,
) -> np.ndarray:
    """Return which of `cycle` subsets each training example, or patient, is in (`subsets`)."""
    if config.privacy.by_patient:
        _, identities = identify_owners(data, UNIT)
    else:
        identities = identify_examples(data.train)
    return subsets(identities, cycle)


@dataclass(frozen=True)
class ModelSetup:
    """Data, task, model and optimiser of a run, before its steps are planned."""

    config: Run
    data: Splits  # or a `DatasetInfo`, of which nothing can be drawn
    device: torch.device
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    start: PublicStart | None  # the weights it starts from, if data is read

    @staticmethod
    def of(
        config: Run,
        data: Splits | DatasetInfo | None = None,
        device: torch.device | None = None,
    ) -> ModelSetup:
        """Build task, model and optimiser, and check that they fit the data."""
        device = device or pick_device(config.device)
        task: Task = lookup("task", config.task.name)(**config.task.options)
        metric_of(task, task.headline)  # a run without its direction could not be judged
        data = fit_outputs(config, task, data or load_data(config))
        model = build_model(config, data)
        start = find_start(config) if isinstance(data, Splits) else None
        if start and isinstance(data, Splits):
            start.require_apart(data)
            start.load_into(model)
        check_fit(config, model, task, data)
        model = model.to(device)
        optimizer = build_optimizer(config, model)
        return ModelSetup(config, cast(Splits, data), device, task, model, optimizer, start)

    def with_plan(self, plan: Plan | None = None) -> Setup:
        """Return the setup for a plan, with the algorithm and the noise calibrated to it."""
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
            # all would be the same
            raise UserError(
                f"trainer.augmentations={views}: dataset={config.dataset.name} does not augment "
                "examples. Set dataset.augment, or remove the key."
            )
        patients = None
        if config.privacy.by_patient and is_read:
            patients = Patients.of(owners_of(data, UNIT), config.privacy.max_examples)
        if plan.sampling.cycle > 1 and is_read:
            subset_of = assign_subsets(config, data, plan.sampling.cycle)
            plan = replace(plan, subset_of=subset_of)
        return Setup(
            **vars(self) | {"config": config}, plan=plan, algorithm=algorithm, patients=patients
        )

    def empty_batch(self) -> Batch:
        """Return inputs and targets of the shapes and dtypes to come, without an example."""
        if isinstance(self.data, DatasetInfo):
            return zeros_like(self.data, 0)
        return self.data.train.batch(torch.arange(0))


@dataclass(frozen=True)
class Setup(ModelSetup):
    """A run that is ready for its first step."""

    plan: Plan
    algorithm: Algorithm
    patients: Patients | None  # if they are drawn and the data was read

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
    def most_records(self) -> int:
        """The most examples of one share at a step, each as often as it is augmented."""
        privacy = self.config.privacy
        owned = self.data.examples_per_patient if privacy.by_patient else 1
        views = self.config.trainer.augmentations or 1
        return min(owned, privacy.max_examples or owned) * views

    @property
    def mechanism(self) -> Mechanism:
        """What a step releases."""
        return self.algorithm.mechanism()

    def affordable(self, most: int) -> int | None:
        """Return how many of `most` releases the budget pays for; None without a budget."""
        privacy = self.config.privacy
        if privacy.max_epsilon is None:
            return None
        return affordable_steps(self.mechanism, privacy.delta, privacy.max_epsilon, most)

    def epsilon(self, releases: int) -> float:
        """Return the tight ε of so many releases."""
        return tight_epsilon(self.mechanism, releases, self.config.privacy.delta)

    def claimed_epsilon(self, releases: int) -> float:
        """Return the ε that the configured accountant claims for as many releases."""
        claim = claim_of(self.config, self.plan, self.algorithm.noise_multiplier, releases)
        return claimed_epsilon(self.config.accountant, claim)

    def noise(self, key: str) -> NoiseSource:
        """Return the noise of a run: seeded by its key, or cryptographic if it is secure."""
        return SecureNoise() if self.config.privacy.secure else SeededNoise(key)

    def arithmetic(self) -> AbstractContextManager[None]:
        """Compute in the configured precision within; see `machine.arithmetic`."""
        config = self.config
        return arithmetic(
            config.precision,
            config.execution.deterministic,
            self.model,
            self.algorithm,
            self.device,
        )

    def check_model(self) -> model_checks.Checked:
        """Reject a model that must not be trained privately as it is (`model_checks.check`)."""
        like = self.empty_batch()
        if not self.mechanism.is_private:
            return model_checks.Checked([], like)
        loss, forms_shares = loss_of(self.task), self.config.forms_shares
        return model_checks.check(self.model, self.algorithm, loss, like, forms_shares)

    def micro_batch_size(self) -> Size:
        """Return how many examples a step processes at once to begin with."""
        fixed = self.config.trainer.micro_batch
        if not isinstance(fixed, str):
            return Size(fixed or MICRO_BATCH)
        inputs, targets = self.empty_batch()
        like = inputs.to(self.device), targets.to(self.device)
        expected = self.plan.sampling.expected_batch_size * self.most_records
        return initial_size(self.model, self.task.loss, like, expected, self.device)

    def draw(
        self,
        key: int | str,
        step: int,
        size: Size | None = None,
        ranks: Ranks = ALONE,
    ) -> tuple[MicroBatches, float]:
        """Draw a step's batch; return this rank's micro-batches, and the divisor over all ranks."""
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
