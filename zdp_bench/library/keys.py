"""Keys that seed the noise and the batches of a training with foreign code.

A run of the command line has a digest of everything that distinguishes it. Here model, loss and
loop are foreign code, of which no digest tells everything. If two trainings shared noise, the
difference of their steps would be that of their sums without noise. So

    - secure=True has no key: all randomness is the operating system's;
    - without a seed each step's key is drawn from the operating system;
    - with a seed the key covers the seed, the plan, the mechanism, the optimizer, ALL examples, the
      gradients that model and loss give on random inputs, and code, libraries and machine, which
      decide how sums are rounded. A digest of some examples would not do: neighbouring data sets,
      which ε is about, agree in all but one.

With a seed each step's key also covers the ledger's end and the weights the step starts from, and
its noise the sum it is added to (`HedgedNoise`). No step of a resumed training repeats the noise of
one that was lost: it counts again. So a seed repeats a whole training on one machine's CPU alone.
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
from zdp_bench.privacy.noise import HedgedNoise, NoiseSource, SecureNoise, SeededNoise, run_key
from zdp_bench.privacy.tally import Tally
from zdp_bench.training.batches import seed_layers
from zdp_bench.training.checkpoint import state_digest
from zdp_bench.training.machine import foreign_code
from zdp_bench.training.plan import Plan

RANDOMNESS = {
    "the operating system, for every number": "cryptographic",
    "the operating system, once": "keyed",  # as older exports say
    "the operating system, at each step": "keyed",
}  # where it comes from, if no seed -> its kind


def kind_of(source: str) -> str:
    """Return the kind of randomness of a report's `randomness_from`, without a seed's number."""
    return RANDOMNESS.get(source, "seeded")


@dataclass(frozen=True)
class Keys:
    """Where the keys of a training's steps come from."""

    first: str  # with a seed, what every step's key follows from
    seed: int | None  # None: each key is drawn from the operating system
    secure: bool

    def of_step(self, model: nn.Module, ledger: Tally) -> str:
        """Return the key of the step that the ledger's next line is for."""
        if self.seed is None:  # never from what a copy of the process, or of its memory, has too
            return os.urandom(32).hex()
        parts = f"{self.first}:{ledger.position.digest}:{state_digest(model.state_dict())}"
        return hashlib.sha256(parts.encode()).hexdigest()

    def noise(self, key: str) -> NoiseSource:
        """Return the noise of the step with this key."""
        if self.secure:
            return SecureNoise()
        return SeededNoise(key) if self.seed is None else HedgedNoise(key)

    def source(self) -> str:
        """Return where the randomness comes from, for the report."""
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
    batch: Batch,  # that the check of the model looked at
    made: str,  # whatever else decides a step's bits; see `machine.execution_digest`
) -> Keys:
    """Return the keys of a training; with a seed, every example is read once."""
    if seed is None or secure:
        return Keys("", None, secure)
    with takes_parts(model), preserve_random_state():
        set_seed(seed)
        behaviour = state_digest(algorithm.contributions(batch))
    seed_layers(seed, 0, 0)  # so that the digest of randomly changed examples can be repeated
    given = (
        seed,
        plan,
        type(optimizer).__name__,
        state_digest(optimizer.state_dict()),
        examples.digest(),
        behaviour,
        made,
    )
    run = hashlib.sha256(repr(given).encode()).hexdigest()
    return Keys(run_key(run, algorithm.mechanism(), foreign_code(())), seed, secure)
