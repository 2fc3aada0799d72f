"""Mechanisms whose claim is known to be right or wrong: what an audit must let pass, and what it must catch.

Ours are the registered algorithms on a tiny network; what is broken is broken in one place. Opacus is driven as it is.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.audit import two_runs
from zdp_bench.audit.finding import Finding
from zdp_bench.audit.release import RELEASE_DELTA, Release, attack_release
from zdp_bench.gradients import reference
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.privacy.accounting import gdp_epsilon, tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import SeededNoise, draw, stream
from zdp_bench.registry import lookup

TRIALS = 40_000  # of each neighbour
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A mechanism whose claim is known to be right or wrong.

    Attributes:
        z: the noise multiplier it claims for one release.
        needs: a package that must be installed, else the case is skipped.
        make: seed -> its release.
        delta: where its attack sees most.
        mechanism: what it claims, where that is more than one Gaussian release with `z`.
        trials: at most so many of each neighbour.
    """

    name: str
    claim: str
    z: float
    expected: Literal["passes", "flagged"]
    make: Callable[[int], Release]
    needs: str = ""
    delta: float = RELEASE_DELTA
    mechanism: Mechanism | None = None
    trials: int = TRIALS

    def audit(self, seed: int, confidence: float, trials: int = TRIALS) -> Finding:
        """Attack it, unless what it needs is not installed."""
        claimed = (
            tight_epsilon(self.mechanism, 1, self.delta)
            if self.mechanism
            else gdp_epsilon(1 / self.z, self.delta)
        )
        if self.needs and find_spec(self.needs) is None:
            told = f"{self.needs} is not installed"
            return Finding(
                self.name,
                self.claim,
                claimed,
                0.0,
                self.delta,
                confidence,
                "skipped",
                "skipped",
                told,
            )
        bound, evidence = attack_release(
            self.make(seed), min(trials, self.trials), self.delta, confidence
        )
        return Finding.of(
            self.name, self.claim, claimed, bound, self.delta, confidence, self.expected, evidence
        )


_ONE_STEP = Sampling("full", 1.0, 4.0, 4)
SIGMA = 1.0
HALF_POWER = 1 / math.sqrt(2)


def _in_rows(releases: Tensor) -> Tensor:
    """[n, ...] -> [n, real coordinates], float64."""
    parts = torch.view_as_real(releases) if releases.is_complex() else releases
    return parts.reshape(len(parts), -1).double()


def _repeated(block: Block, releases: int) -> Block:
    """The block of `releases` independent releases: one more dimension in front, for noise is independent over entries."""
    dims = tuple(dim + 1 if dim >= 0 else dim for dim in block.fft_dims)
    return dataclasses.replace(block, shape=(releases, *block.shape), fft_dims=dims)


def _noisy(
    mechanism: Mechanism,
    sums: tuple[dict[str, Tensor], dict[str, Tensor]],
    seed: int,
    spoil: Callable[[Tensor], Tensor] = lambda noise: noise,
    post: Callable[[Tensor], Tensor] = lambda release: release,
) -> Release:
    """Releases of a mechanism, without and with the record: sum + noise, block by block, as the engine makes them."""
    source = SeededNoise(seed)

    def release(there: bool, count: int) -> Tensor:
        noisy = [
            sums[there][block.name].unsqueeze(0)
            + spoil(draw(_repeated(block, count), source, int(there), CPU))
            for block in mechanism.blocks
        ]
        return torch.cat([_in_rows(post(value)) for value in noisy], dim=1)

    return release


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _zeta(
    seed: int, noise: str = "per_component", spoil: Callable[[Tensor], Tensor] = lambda noise: noise
) -> Release:
    """ζ-DP-SGD as it is registered, on a complex network, at σ = 1: everything but the claim is the real thing."""
    model, (inputs, targets) = two_runs.network(seed)
    make = lookup("algorithm", "zeta_dp_sgd")
    # The loss is scaled up, so that every gradient is longer than the bound and is clipped to it.
    algorithm: Algorithm = make(
        Problem(model, lambda o, t: 1e3 * _cross_entropy(o, t), _ONE_STEP),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        noise=noise,
    )
    sums = (
        two_runs.sums_of(algorithm, (inputs[:3], targets[:3])),
        two_runs.sums_of(algorithm, (inputs, targets)),
    )
    return _noisy(algorithm.mechanism(), sums, seed, spoil)


def _forgets_the_imaginary_part(noise: Tensor) -> Tensor:
    return torch.complex(noise.real, torch.zeros_like(noise.imag))


def _under_measured(seed: int) -> Release:
    """A clipper that takes |Σ g²| for ‖g‖² = Σ|g|²: without the conjugate, parts of a complex gradient cancel."""
    model, _ = two_runs.network(seed)
    generator = torch.Generator().manual_seed(seed % 2**63)
    inputs = torch.randn(200, 3, dtype=torch.complex64, generator=generator)
    targets = torch.randint(0, 2, (200,), generator=generator)
    gradients = reference.per_sample_gradients(
        model, lambda o, t: 1e3 * _cross_entropy(o, t), (inputs, targets)
    )
    rows = torch.cat([g.flatten(1) for g in gradients.values()], dim=1).to(
        torch.complex128
    )  # [200, parameters]
    measured = rows.square().sum(dim=1).abs().sqrt()
    shares = rows / measured.clamp(min=1.0).unsqueeze(1)
    record = int(
        shares.abs().square().sum(dim=1).argsort()[100]
    )  # an ordinary record, not the worst
    rest = shares[:4].sum(dim=0)
    block = Block("gradient", tuple(rest.shape), "complex128", 1.0, SIGMA, "circular")
    return _noisy(
        Mechanism((block,), _ONE_STEP),
        ({"gradient": rest}, {"gradient": rest + shares[record]}),
        seed,
    )


def _fourier(
    seed: int, algorithm: str = "gredp", noise: str = "sound", std: float = SIGMA, back: bool = True
) -> Release:
    """GReDP or Spectral-DP as it is registered, on one circulant block of eight numbers: its release, transformed back or not."""
    generator = torch.Generator().manual_seed(
        int(stream(seed, "audit", "fourier").generate_state(1, np.uint64)[0]) % 2**63
    )
    layer = CirculantLinear(8, 8, 8, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(
            torch.randn(layer.weight.shape, dtype=torch.float64, generator=generator)
        )
    inputs = torch.randn(4, 8, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 8, (4,), generator=generator)
    problem = Problem(
        nn.Sequential(layer), lambda o, t: 1e3 * _cross_entropy(o, t), _ONE_STEP, like=inputs[:0]
    )
    made: Algorithm = lookup("algorithm", algorithm)(
        problem, noise_multiplier=std, max_grad_norm=1.0, noise=noise
    )
    sums = (
        two_runs.sums_of(made, (inputs[:3], targets[:3])),
        two_runs.sums_of(made, (inputs, targets)),
    )
    (name,) = sums[0]

    def as_gradient(spectra: Tensor) -> Tensor:
        return made.postprocess({name: spectra}, 1.0)[name] if back else spectra

    return _noisy(made.mechanism(), sums, seed, post=as_gradient)


def _opacus(seed: int, ghost: bool = False, secure_mode: bool = False) -> Release:
    """Opacus itself, driven with one complex linear layer: its gradients, its clipping, its noise."""
    with warnings.catch_warnings(action="ignore"):
        sums, optimizer = _opacus_sums(seed, ghost, secure_mode)

    def release(there: bool, count: int) -> Tensor:
        (parameter,) = optimizer.params
        rows = torch.empty((count, *parameter.shape), dtype=parameter.dtype)
        with torch.no_grad():
            for i in range(count):
                parameter.summed_grad = sums[there].clone()
                optimizer.add_noise()
                rows[i] = parameter.grad
        return _in_rows(rows)

    return release


def _opacus_sums(seed: int, ghost: bool, secure_mode: bool) -> tuple[tuple[Tensor, Tensor], Any]:
    """Opacus's clipped sums without and with the record that moves them most, and the optimiser that adds its noise."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    generator = torch.Generator().manual_seed(seed % 2**63)
    layer = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    with torch.no_grad():
        layer.weight.copy_(
            torch.randn(layer.weight.shape, dtype=torch.complex64, generator=generator)
        )
    inputs = 100 * torch.randn(40, 2, dtype=torch.complex64, generator=generator)
    targets = torch.randint(0, 2, (40,), generator=generator)
    wrapped = GradSampleModuleFastGradientClipping if ghost else GradSampleModule
    optimizing = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    more = {"max_grad_norm": 1.0, "use_ghost_clipping": True} if ghost else {}
    model = wrapped(layer, batch_first=True, loss_reduction="sum", **more)
    optimizer = optimizing(
        torch.optim.SGD(model.parameters(), lr=0.0),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        expected_batch_size=None,
        loss_reduction="sum",
        generator=generator,
        secure_mode=secure_mode,
    )
    criterion = nn.CrossEntropyLoss(reduction="sum")
    loss = (
        DPLossFastGradientClipping(model, optimizer, criterion, loss_reduction="sum")
        if ghost
        else criterion
    )

    def clipped_sum(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss(model(inputs[batch]).abs(), targets[batch]).backward()
        if ghost:
            optimizer.accumulate()
        else:
            optimizer.clip_and_accumulate()
        (parameter,) = optimizer.params
        return parameter.summed_grad.detach().clone()

    rest = clipped_sum(torch.tensor([0, 1]))
    with_each = [clipped_sum(torch.tensor([0, 1, record])) for record in range(2, len(inputs))]
    return (rest, max(with_each, key=lambda moved: float((moved - rest).norm()))), optimizer


CASES: tuple[Case, ...] = (
    Case("per_component", "ζ-DP-SGD, σ on each part: z = σ", SIGMA, "passes", _zeta),
    Case(
        "circular",
        "circular noise, at what it gives: z = σ/√2",
        SIGMA * HALF_POWER,
        "passes",
        lambda s: _zeta(s, "circular"),
    ),
    Case(
        "circular_2021",
        "circular noise of Ziller et al. 2021: z = σ",
        SIGMA,
        "flagged",
        lambda s: _zeta(s, "circular"),
    ),
    Case(
        "no_imaginary_noise",
        "noise that forgets the imaginary part: z = σ",
        SIGMA,
        "flagged",
        lambda s: _zeta(s, spoil=_forgets_the_imaginary_part),
    ),
    Case(
        "under_measured_norm",
        "clipping by |Σ g²| for Σ|g|²: z = σ",
        SIGMA,
        "flagged",
        _under_measured,
    ),
    Case("gredp", "GReDP, sound noise: z = σ", SIGMA, "passes", _fourier),
    Case(
        "gredp_complex_at_z",
        "GReDP, complex noise, at what it gives: z = σ/√2",
        SIGMA * HALF_POWER,
        "passes",
        lambda s: _fourier(s, noise="complex"),
    ),
    Case(
        "gredp_complex",
        "GReDP, complex noise (its Theorem 1): z = σ",
        SIGMA,
        "flagged",
        lambda s: _fourier(s, noise="complex"),
    ),
    Case(
        "gredp_real",
        "GReDP, real noise (its Algorithm 2): z = σ",
        SIGMA,
        "flagged",
        lambda s: _fourier(s, noise="as_published"),
    ),
    Case(
        "spectral_dp",
        "Spectral-DP, sound noise: z = σ",
        SIGMA,
        "passes",
        lambda s: _fourier(s, "spectral_dp"),
    ),
    Case(
        "spectral_dp_2023",
        "Spectral-DP as published: z = σ",
        SIGMA,
        "flagged",
        lambda s: _fourier(s, "spectral_dp", "as_published", back=False),
    ),
    Case("opacus", "Opacus, complex layer, hooks: z = σ", SIGMA, "flagged", _opacus, "opacus"),
    Case(
        "opacus_secure",
        "Opacus, complex layer, secure mode: z = σ",
        SIGMA,
        "flagged",
        lambda s: _opacus(s, secure_mode=True),
        "opacus",
    ),
    Case(
        "opacus_ghost",
        "Opacus, complex layer, ghost clipping: z = σ",
        SIGMA,
        "flagged",
        lambda s: _opacus(s, ghost=True),
        "opacus",
    ),
    *(
        Case(
            f"two_runs_{change}" if keyed else f"shared_noise_{change}",
            f"two runs that differ in {what}, noise of {'a key each' if keyed else 'one seed'}: z = {z:.3g} together",
            z,
            "passes" if keyed else "flagged",
            partial(two_runs.two_runs, change=change, keyed=keyed),
            trials=two_runs.TRIALS,
        )
        for change, what, z in (
            ("sigma", "σ", two_runs.together(SIGMA, 1.25)),
            ("rate", "the rate", two_runs.together(SIGMA, SIGMA)),
            ("record", "one record", SIGMA),
        )
        for keyed in (True, False)
    ),
    *(
        Case(
            name,
            f"Poisson batches drawn at {rate:g} times the rate of 0.1 that is claimed",
            two_runs.SHARP,
            "passes" if rate == 1 else "flagged",
            partial(two_runs.sampled, too_many=rate),
            delta=two_runs.BESIDE,
            mechanism=two_runs.subsampled(two_runs.SHARP),
        )
        for name, rate in (("sampling", 1.0), ("over_sampling", 1.3))
    ),
    Case(
        "cancelling",
        "clipping of a record whose terms cancel: z = σ",
        SIGMA,
        "passes",
        two_runs.cancelling,
    ),
    Case(
        "cancelling_unguarded",
        "the same, clipped by its exact norm and summed in float32: z = σ",
        SIGMA,
        "flagged",
        partial(two_runs.cancelling, guarded=False),
    ),
)
