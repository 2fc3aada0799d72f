"""The run of a recipe that an audit attacks, set up as `training.run` does, but not begun."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from zdp_bench.config.constraints import require_central
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.privacy.noise import run_key, stream
from zdp_bench.training.machine import foreign_code
from zdp_bench.training.public_start import digest_of
from zdp_bench.training.setup import Setup


@dataclass(frozen=True)
class Subject(Setup):
    """A recipe's run, ready for its first step.

    Attributes:
        key: seeds batches and noise, as a run's key does, but gives other streams than the run's
            own: an audit's releases of the same data must not be subtracted from those of the run.
    """

    key: str

    @staticmethod
    def prepare(config: Run) -> Subject:
        """Set up the run of a recipe.

        Raises:
            UserError: the data is missing, the model is not fit for private training, or the
                recipe has no finite ε.
        """
        require_central(config, "audit")
        if config.trainer.augmentations:
            raise UserError(
                "zdp-bench audit draws one view of a record, and trainer.augmentations several: "
                "add trainer.augmentations=null, which is the same mechanism."
            )
        if config.threads:
            torch.set_num_threads(config.threads)
        setup = Setup.of(config)
        if setup.mechanism.z == 0 or setup.plan.sampling.scheme == "shuffled":
            raise UserError(
                f"recipe={config.recipe}: its ε is ∞, so there is nothing an audit could refute."
            )
        setup.check_model()
        config = setup.config
        own = f"{digest_of(config, setup.data.digest)}:audit"
        key = run_key(own, setup.mechanism, foreign_code(config.plugins))
        return Subject(**vars(setup), key=key)

    @property
    def units(self) -> int:
        """How many examples or, with `privacy.unit=patient`, patients a step draws from."""
        return len(self.data.train) if self.patients is None else self.patients.count

    def examples_of(self, unit: int) -> np.ndarray:
        """Return the training examples that come and go with one unit."""
        if self.patients is None:
            return np.array([unit])
        start, end = self.patients.starts[unit : unit + 2]
        return self.patients.examples[start:end]

    def rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(stream(self.config.seed, "audit", purpose))
