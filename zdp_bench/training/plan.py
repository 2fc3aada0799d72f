"""Plan the steps of a run, and draw the examples or whole patients of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zdp_bench.algorithms import algorithm_type
from zdp_bench.config.schema import Run
from zdp_bench.errors import require
from zdp_bench.gradients import Shares
from zdp_bench.privacy import sampling
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SecureRandom, stream

UNIT = "privacy.unit=patient"


@dataclass(frozen=True)
class Plan:
    """The number of steps of a run, and how each step draws its batch.

    Attributes:
        sampling: how a step draws its examples.
        epochs: number of epochs.
        steps: number of steps in all epochs.
        subset_of: index of the subset that each example or patient is in, [n]; None unless sampling
            is cyclic.
    """

    sampling: Sampling
    epochs: int
    steps: int
    subset_of: np.ndarray | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def of(config: Run, size: int) -> Plan:
        """Return the plan for `size` training examples or, if they are drawn, patients.

        Raises:
            UserError: there are fewer examples than in a batch, or too many bands.
        """
        trainer = config.trainer
        min_size = trainer.batch_size or 1
        units = "patients" if config.privacy.by_owner else "examples"
        too_large = f"the training set has only {size:,} {units}"
        require(min_size <= size, "trainer.batch_size", min_size, too_large)
        rate = trainer.sample_rate or 0.0
        batch = trainer.batch_size or max(1, round(rate * size))
        scheme: Any = trainer.sampling
        if scheme == "poisson":
            rate = rate or batch / size
            cycle = algorithm_type(config.algorithm.name).cycle(config.algorithm.options)
            max_subsets = math.floor((1 + 1e-9) / rate)  # 1 / (1 / 93) < 93
            fewer = f"the sample rate of {rate:g} leaves no more than {max_subsets:,} subsets"
            require(cycle <= max_subsets, "algorithm.bands", cycle, fewer)
            return Plan.poisson(size, rate, trainer.epochs, cycle)
        steps_per_epoch = size // batch
        if scheme == "shuffled":  # the last batch of an epoch may be smaller
            steps_per_epoch = math.ceil(size / batch)
        sampled = Sampling(scheme, batch / size, batch, size)
        return Plan(sampled, trainer.epochs, trainer.epochs * steps_per_epoch)

    @staticmethod
    def poisson(
        size: int,
        rate: float,
        epochs: int,
        cycle: int = 1,
    ) -> Plan:
        """Return the plan of Poisson sampling, in which an epoch has 1 / `rate` steps.

        Args:
            size: number of examples, or of patients if they are drawn.
            rate: probability that a step draws an example.
            epochs: number of epochs.
            cycle: number of subsets, which take turns. A step draws from one subset only, with
                probability `rate` · `cycle`. Default: 1.
        """
        rate_in_subset = min(1.0, rate * cycle)
        sampled = Sampling("poisson", rate_in_subset, rate * size, size, cycle)
        return Plan(sampled, epochs, max(1, round(epochs / rate)))

    def draw(
        self,
        key: int | str,
        step: int,
        secure: bool = False,
        records: int = 0,
    ) -> tuple[np.ndarray, float]:
        """Return the indices of a step's examples or patients, [n], and the divisor of its sum.

        Args:
            key: key of the run.
            step: number of the step.
            secure: whether to draw with the operating system's randomness. Otherwise, the indices
                are a function of (key, step).
            records: number of examples or patients, if `sampling.records` is 0.
        """
        size = self.sampling.records or records
        batch = int(self.sampling.expected_batch_size)
        if self.sampling.scheme == "shuffled":
            per_epoch = self.steps // self.epochs
            rng = np.random.default_rng(stream(key, "shuffle", step // per_epoch))
            indices = sampling.shuffled(size, batch, step % per_epoch, rng)
            return indices, len(indices)
        seeded = np.random.default_rng(stream(key, "sample", step))
        random: sampling.Random = SecureRandom() if secure else seeded
        if self.sampling.scheme == "poisson":
            indices = sampling.poisson(size, self.sampling.sample_rate, random)
        else:
            indices = sampling.uniform(size, batch, random)
        if self.sampling.cycle > 1:
            assert self.subset_of is not None, "no data was read"
            subset = step % self.sampling.cycle
            indices = indices[self.subset_of[indices] == subset]
        return indices, self.sampling.expected_batch_size

    def epoch_of(self, step: int) -> int:
        """Return the number, from 1, of the epoch to which the `step`-th step belongs."""
        nearest_epoch = max(1, round(step * self.epochs / self.steps))
        return nearest_epoch if step <= self._end_of(nearest_epoch) else nearest_epoch + 1

    def epoch_ending_at(self, step: int) -> int | None:
        """Return the number, from 1, of the epoch that ends with the `step`-th step, or None."""
        epoch = round(step * self.epochs / self.steps)
        return epoch if epoch > 0 and self._end_of(epoch) == step else None

    def epoch_ends(self, step: int) -> set[int]:
        """Return the numbers of steps, up to `step`, with which an epoch ends."""
        ends = map(self._end_of, range(1, self.epoch_of(step) + 1))  # not of later epochs: many
        return {end for end in ends if 0 < end <= step}

    def _end_of(self, epoch: int) -> int:
        """Return the number of steps from the first epoch to the end of an epoch."""
        return round(epoch * self.steps / self.epochs)


@dataclass(frozen=True)
class Patients:
    """The examples of each patient.

    Attributes:
        examples: indices of the training examples, sorted by patient, [n].
        starts: index in `examples` of each patient's first example, and n, [patients + 1].
        max_examples: largest number of a patient's examples in a share; None for no limit.
    """

    examples: np.ndarray
    starts: np.ndarray
    max_examples: int | None

    @staticmethod
    def of(owners: np.ndarray, max_examples: int | None) -> Patients:
        """Return the examples of each patient, given the number of each example's owner, [n]."""
        order = np.argsort(owners, kind="stable")
        _, counts = np.unique(owners, return_counts=True)
        starts = np.concatenate([[0], np.cumsum(counts)])
        return Patients(order, starts, max_examples)

    @property
    def count(self) -> int:
        """Number of patients."""
        return len(self.starts) - 1

    @property
    def largest(self) -> int:
        """Largest number of examples that one patient brings to a step."""
        owned = int(np.diff(self.starts).max())
        return min(owned, self.max_examples or owned)

    def take(
        self,
        drawn: np.ndarray,
        choice_key: bytes,
    ) -> tuple[np.ndarray, Shares]:
        """Return the examples of the drawn patients, and the number of examples in each share.

        If a patient has more than `max_examples`, a random choice is taken. It depends only on the
        key and the indices of the patient's own examples, so no other patient affects it.

        Args:
            drawn: numbers of the drawn patients.
            choice_key: AES key of the step's choices (`noise.step_key`).
        """
        indices = [np.empty(0, dtype=np.int64)]  # so that there is an array if no one is drawn
        shares = []
        for patient in drawn:
            start, end = self.starts[patient : patient + 2]
            owned = self.examples[start:end]
            if self.max_examples is not None and len(owned) > self.max_examples:
                priorities = sampling.uniforms_of(owned, 1, choice_key)[:, 0]
                chosen = np.argsort(priorities)[: self.max_examples]
                owned = np.sort(owned[chosen])
            indices.append(owned)
            shares.append(len(owned))
        return np.concatenate(indices), tuple(shares)
