"""The patient as the unit of privacy: which examples a drawn patient brings to a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zdp_bench.gradients import Shares
from zdp_bench.privacy import sampling
from zdp_bench.privacy.noise import stream

UNIT = "privacy.unit=patient"


@dataclass(frozen=True)
class Patients:
    """The examples of each patient.

    Attributes:
        examples: training examples, patient after patient, [n].
        starts: where each patient's begin in `examples`, and the end, [patients + 1].
        most: at most so many of a patient's examples make a share. None: all.
    """

    examples: np.ndarray
    starts: np.ndarray
    most: int | None

    @staticmethod
    def of(owners: np.ndarray, most: int | None) -> Patients:
        """Sort the examples by owner, given the number of each example's, [n]."""
        order = np.argsort(owners, kind="stable")
        _, many = np.unique(owners, return_counts=True)
        return Patients(order, np.concatenate([[0], np.cumsum(many)]), most)

    @property
    def count(self) -> int:
        """How many patients there are."""
        return len(self.starts) - 1

    @property
    def largest(self) -> int:
        """The most examples that one patient brings to a step."""
        owned = int(np.diff(self.starts).max())
        return min(owned, self.most or owned)

    def take(self, drawn: np.ndarray, key: int | str, step: int) -> tuple[np.ndarray, Shares]:
        """Return the examples of the drawn patients, share by share, and how many each has.

        Which of a patient's examples are taken, where they are more than `most`, is drawn anew at
        each step. It depends on (key, step) and on these examples alone: another patient changes
        nothing.
        """
        own = stream(key, "records", step).generate_state(2, np.uint64).tobytes()
        taken = []
        for patient in drawn:
            owned = self.examples[self.starts[patient] : self.starts[patient + 1]]
            if self.most is not None and len(owned) > self.most:
                chances = sampling.uniforms_of(owned, 1, own)[:, 0]
                owned = np.sort(owned[np.argsort(chances)[: self.most]])
            taken.append(owned)
        shares = tuple(map(len, taken))
        return np.concatenate([np.empty(0, dtype=np.int64), *taken]), shares
