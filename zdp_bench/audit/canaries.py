"""Attack a whole run: a fair coin puts each canary in the training set or not, and the adversary
guesses which.

Gradient canaries are worst-case contributions, and their adversary reads every release; input
canaries are examples with another example's target, judged by their loss.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zdp_bench.algorithms import Algorithm
from zdp_bench.audit.bounds import guess
from zdp_bench.audit.coordinates import Coordinates, canary_supports
from zdp_bench.audit.finding import Finding
from zdp_bench.audit.subject import Subject
from zdp_bench.data import Source
from zdp_bench.gradients import Batch
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.training.batches import MicroBatches, micro_batches
from zdp_bench.training.step import Training, arguments_of, private_step


class WithCanaries:
    """An algorithm whose batches hold canaries among the examples, and whose releases are all read.

    Canaries come as a batch of their own, (their numbers, how much of each), and the others as the
    arguments of an algorithm's `accumulate`; see `attack_with_gradients`.
    """

    private = True

    def __init__(
        self, inner: Algorithm, coordinates: Coordinates, indices: np.ndarray, values: np.ndarray
    ) -> None:
        self.inner, self.coordinates = inner, coordinates
        self.noise_multiplier = inner.noise_multiplier
        self.indices, self.values = torch.from_numpy(indices), torch.from_numpy(values)
        self.drawn: Any = None
        self.rest: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []

    def mechanism(self) -> Mechanism:
        return self.inner.mechanism()

    def accumulate(self, total: dict[str, Tensor], batch: Any) -> None:
        if batch is not self.drawn:
            self.inner.accumulate(total, *batch)
            return
        self.rest = {block.name: total[block.name].clone() for block in self.mechanism().blocks}
        numbers, amounts = batch
        vector = torch.zeros(self.coordinates.size, dtype=torch.float64)
        vector[self.indices[numbers].flatten()] = (
            self.values[numbers] * amounts.unsqueeze(1)
        ).flatten()
        self.coordinates.add(vector.to(next(iter(total.values())).device), to=total)

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        return self.inner.contributions(batch)

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        """Read the release before it is used.

        The adversary knows all other examples, and subtracts their sum.
        """
        unknown_part = self.coordinates.of(
            {name: value - self.rest[name] for name, value in noisy.items()}
        )
        self.seen.append(unknown_part.cpu()[self.indices].float())  # [canaries, width]
        return self.inner.postprocess(noisy, expected_batch_size)


def attack_with_gradients(
    subject: Subject, confidence: float, canaries: int, steps: int
) -> Finding:
    """Attack the whole run with gradient canaries (white box), drawn by the recipe's own sampling.

    Each takes the place of a training example, or of a patient if patients are drawn. A canary that
    is out contributes nothing, or, if neighbours differ by a replaced example, its opposite.
    """
    mechanism, coordinates = subject.mechanism, Coordinates(subject.mechanism)
    rng = subject.rng("gradients")
    steps = min(steps, subject.plan.steps)
    most = coordinates.size if mechanism.joint else max(coordinates.sizes)
    canaries = min(canaries, most, subject.units // 2)
    width = max(1, min(16, int(1e8 / (steps * canaries))))
    indices, values = canary_supports(mechanism, coordinates, canaries, width, rng)
    slots = rng.permutation(subject.units)[:canaries]
    number = np.full(subject.units, -1)
    number[slots] = np.arange(canaries)
    included = rng.random(canaries) < 0.5
    replaced = mechanism.sampling.shift == 2
    audited = WithCanaries(subject.algorithm, coordinates, indices, values)

    def batches(drawn: np.ndarray) -> Iterator[Any]:
        yield from arguments_of(_batches(subject, subject.data.train, drawn[number[drawn] < 0]))
        here = number[drawn][number[drawn] >= 0]
        amounts = np.where(included[here], 1.0, -1.0 if replaced else 0.0)
        audited.drawn = torch.from_numpy(here), torch.from_numpy(amounts)
        yield audited.drawn

    releases = _train(subject, audited, steps, batches)
    scores = _gradient_scores(
        torch.stack(audited.seen).double(), audited, mechanism.sampling.sample_rate, replaced
    )
    delta = subject.config.privacy.delta
    allowed = 1 - (1 - confidence) / len(scores)  # so that the better bound has the confidence
    guesses = [guess(each, included, delta, allowed) for each in scores]
    bound, evidence = max(guesses, key=lambda found: found[0])
    return Finding.of(
        f"{subject.config.recipe}: run, gradient canaries",
        _run_claim(releases, subject.plan.steps),
        tight_epsilon(mechanism, releases, delta),
        bound,
        delta,
        confidence,
        "passes",
        evidence,
    )


def _run_claim(releases: int, planned: int) -> str:
    first = "" if releases == planned else f"the first {releases:,} of "
    return f"tight ε of {first}{planned:,} steps"


def _gradient_scores(
    seen: Tensor, audited: WithCanaries, rate: float, replaced: bool
) -> list[np.ndarray]:
    """Log-likelihood ratios of 'in' over 'out', summed over steps: [steps, canaries, width] ->
    [canaries]. If only a canary that is in moves, also how far the releases along it are from their
    mean: noise that comes again in every step hides no single one.

    At each step a canary is drawn with probability q: log(1 − q + q·exp(x − μ/2)), with x the
    release along it over the noise's variance, and μ its squared length over the same. The variance
    is measured, by block and part, not taken from the mechanism.
    """
    kinds = audited.coordinates.kinds()[audited.indices.numpy()]  # [canaries, width]
    variance = torch.empty(audited.values.shape, dtype=torch.float64)
    floor = 1e-12 * float(audited.values.square().max())
    for kind in np.unique(kinds):
        chosen = torch.from_numpy(kinds == kind)
        # of N(0, 1)²
        variance[chosen] = max(float(seen[:, chosen].square().flatten().median()) / 0.45494, floor)
    along = (seen * audited.values / variance).sum(dim=2)  # [steps, canaries]
    length = (audited.values.square() / variance).sum(dim=1)  # [canaries]
    inside, outside = math.log(rate), math.log1p(-rate) if rate < 1 else -math.inf

    def likelihood(x: Tensor) -> Tensor:
        return torch.logaddexp(torch.full_like(x, outside), inside + x - length / 2)

    ratio = likelihood(along) - (likelihood(-along) if replaced else 0.0)
    moved = [] if replaced or rate == 1 else [along.var(dim=0, correction=0)]
    return [each.numpy() for each in (ratio.sum(dim=0), *moved)]


@dataclass(frozen=True)
class WrongTargets:
    """Examples of which some carry another one's target."""

    of: Source
    partner: Tensor  # [n]: whose target an example carries

    @property
    def groups(self) -> Tensor | None:
        return self.of.groups

    @property
    def is_stochastic(self) -> bool:
        return self.of.is_stochastic

    def __len__(self) -> int:
        return len(self.of)

    def batch(self, indices: Tensor, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.of.batch(indices, uniforms)[0], self.of.batch(self.partner[indices], uniforms)[
            1
        ]


def attack_with_inputs(subject: Subject, confidence: float, canaries: int, steps: int) -> Finding:
    """Attack the whole run with input canaries (black box): examples with another's target, by how
    far their loss fell. A patient is a canary with all records, if patients are drawn.

    A canary that is out is not in the training set, or, if neighbours differ by a replaced example,
    has its own target.
    """
    rng = subject.rng("inputs")
    train = subject.data.train
    steps = min(steps, subject.plan.steps)
    canaries = min(canaries, max(2, subject.units // 5))
    slots = rng.permutation(subject.units)[:canaries]
    included = rng.random(canaries) < 0.5
    owned = [subject.examples_of(slot) for slot in slots]
    everyone = np.concatenate(owned)
    wrong, partner = torch.arange(len(train)), torch.arange(len(train))
    for mine, others, is_in in zip(owned, [owned[-1], *owned[:-1]], included, strict=True):
        wrong[mine] = torch.from_numpy(np.resize(others, len(mine)))
        if is_in:
            partner[mine] = wrong[mine]
    out = np.zeros(subject.units, dtype=bool)
    if subject.mechanism.sampling.shift == 1:
        out[slots[~included]] = True
    trained_on, judged = WrongTargets(train, partner), WrongTargets(train, wrong)

    def losses() -> np.ndarray:
        with torch.no_grad():
            parts = [
                subject.task.loss(subject.model(x), y).cpu()
                for x, y in micro_batches(
                    judged, everyone, subject.config, subject.device, subject.key
                )
            ]
        each = torch.cat(parts).double().numpy()
        many = [len(mine) for mine in owned]
        return np.add.reduceat(each, np.cumsum([0, *many[:-1]])) / many

    before = losses()
    releases = _train(
        subject,
        subject.algorithm,
        steps,
        lambda drawn: _batches(subject, trained_on, drawn[~out[drawn]]),
    )
    delta = subject.config.privacy.delta
    bound, evidence = guess(np.nan_to_num(before - losses()), included, delta, confidence)
    return Finding.of(
        f"{subject.config.recipe}: run, input canaries",
        _run_claim(releases, subject.plan.steps),
        tight_epsilon(subject.mechanism, releases, delta),
        bound,
        delta,
        confidence,
        "passes",
        evidence,
    )


def _batches(subject: Subject, source: Source, drawn: np.ndarray) -> MicroBatches:
    """Return the examples of the drawn units, as a run takes them."""
    return micro_batches(
        source, drawn, subject.config, subject.device, subject.key, patients=subject.patients
    )


def _train(
    subject: Subject,
    algorithm: Algorithm,
    steps: int,
    batches: Callable[[np.ndarray], Iterable[Batch]],
) -> int:
    """Take `steps` private steps with a temporary ledger; returns how many releases it counted."""
    noise = subject.noise(subject.key)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl", algorithm.mechanism(), noise.repeatable)
        training = Training(algorithm, subject.model, subject.optimizer, noise, ledger)
        for step in range(steps):
            drawn, divisor = subject.plan.draw(subject.key, step, subject.config.privacy.secure)
            private_step(training, step, batches(drawn), divisor)
        ledger.close()
        return ledger.releases
