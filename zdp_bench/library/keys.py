"""Keys that seed the noise and the batches of a training with third-party code.

If two different trainings had the same noise, the difference of their steps would reveal the
difference of their sums without noise. A run of the command line avoids this with a digest of
everything that distinguishes it. Here, model, loss and loop are third-party code, which no digest
covers completely. Therefore:

    - With secure=True, there is no key. All random numbers come from the operating system.
    - Without a seed, each step's key is drawn from the operating system.
    - With a seed, the key covers the seed, the plan, the mechanism, the optimizer, ALL examples,
      the algorithm's contributions on the check's examples, and code, libraries and machine, which
      determine how sums are rounded. A digest of some examples would not suffice, because
      neighbouring data sets differ in a single example.

With a seed, each step's key also covers the end of the ledger and the weights that the step starts
from, and its noise depends on the sum that it is added to (`HedgedNoise`). So a resumed training
never repeats the noise of a lost step; the repeated step counts again. A seed therefore repeats a
training only as a whole, and only on one machine's CPU.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from zdp_bench.algorithms import Algorithm
from zdp_bench.gradients import Batch
from zdp_bench.gradients.losses import preserve_random_state, set_seed
from zdp_bench.gradients.parts import takes_parts
from zdp_bench.library.examples import Items
from zdp_bench.nn.state import state_digest
from zdp_bench.privacy.noise import HedgedNoise, NoiseSource, SecureNoise, SeededNoise, run_key
from zdp_bench.privacy.tally import Tally
from zdp_bench.training.batches import seed_layers
from zdp_bench.training.machine import foreign_code
from zdp_bench.training.plan import Plan

# source of randomness without a seed -> its kind
RANDOMNESS = {
    "the operating system, for every number": "cryptographic",
    "the operating system, at each step": "keyed",
}


def randomness_kind(source: str) -> str:
    """Return the kind of randomness for a report's `randomness_from`.

    Unlike the source, it does not contain the number of a seed.
    """
    return RANDOMNESS.get(source, "seeded")


@dataclass(frozen=True)
class Keys:
    """The source of the keys of a training's steps.

    Attributes:
        base_key: With a seed, the digest from which every step's key is derived; otherwise empty.
        seed: The seed; None if each key is drawn from the operating system.
        secure: Whether every random number comes from the operating system.
    """

    base_key: str
    seed: int | None
    secure: bool

    def step_key(self, model: nn.Module, ledger: Tally) -> str:
        """Return the key of the step that the next line of the ledger will record."""
        if self.seed is None:
            # Fresh randomness: a copy of the process or of its memory must not get the same key.
            return os.urandom(32).hex()
        parts = f"{self.base_key}:{ledger.position.digest}:{state_digest(model.state_dict())}"
        return hashlib.sha256(parts.encode()).hexdigest()

    def noise(self, key: str) -> NoiseSource:
        """Return the noise source of the step with this key."""
        if self.secure:
            return SecureNoise()
        return SeededNoise(key) if self.seed is None else HedgedNoise(key)

    def source(self) -> str:
        """Return where the random numbers come from, for the report."""
        if self.secure:
            return "the operating system, for every number"
        return "the operating system, at each step" if self.seed is None else f"seed {self.seed}"


def make_keys(
    seed: int | None,
    secure: bool,
    plan: Plan,
    algorithm: Algorithm,
    model: nn.Module,
    optimizer: Any,
    examples: Items,
    checked_batch: Batch,
    execution: str,
) -> Keys:
    """Return the keys of a training. With a seed, this reads every example once.

    Args:
        seed: Seed, or None.
        secure: Whether every random number comes from the operating system.
        plan: Number of steps and sampling of the training.
        algorithm: The algorithm.
        model: The model.
        optimizer: The optimizer, or several in one.
        examples: All training examples.
        checked_batch: Examples on which the model was checked. The algorithm's contributions on
            them stand for the code of model and loss.
        execution: Everything else that determines the bits of a step; see
            `machine.execution_digest`.
    """
    if seed is None or secure:
        return Keys("", None, secure)
    with takes_parts(model), preserve_random_state():
        set_seed(seed)
        contributions_digest = state_digest(algorithm.contributions(checked_batch))
    with preserve_random_state():
        seed_layers(seed, 0, 0)  # so that randomly augmented examples always have the same digest
        examples_digest = examples.digest()
    key_inputs = (
        seed,
        plan,
        type(optimizer).__name__,
        state_digest(optimizer.state_dict()),
        examples_digest,
        contributions_digest,
        execution,
    )
    training_digest = hashlib.sha256(repr(key_inputs).encode()).hexdigest()
    base_key = run_key(training_digest, algorithm.mechanism(), foreign_code(()))
    return Keys(base_key, seed, secure)
