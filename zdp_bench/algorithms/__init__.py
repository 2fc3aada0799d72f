"""The algorithms, one file each. Each is one line: y = Post( Σᵢ Boundᵢ(xᵢ) + ξ ).

An algorithm bounds one example's share and turns the noisy sum into a gradient. Sampling, noise,
ledger and optimizer are in `training/step.py`, once for all. No algorithm computes or prints an ε.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, Engine, Loss, add_up, per_example
from zdp_bench.gradients.clipping import trainable
from zdp_bench.gradients.spectra import FourierDomain
from zdp_bench.privacy.mechanism import Block, Mechanism, NoiseKind, Sampling
from zdp_bench.privacy.noise import real_view
from zdp_bench.registry import lookup


@dataclass(frozen=True)
class Problem:
    """What an algorithm trains: a model, a loss per example, and how examples are sampled.

    Any loss becomes one that sees an example at a time (`PerExample`).
    """

    model: nn.Module
    loss: Loss
    sampling: Sampling
    seed: int = 0  # for what an algorithm draws before it sees an example (feedback matrices)
    like: Tensor | None = None  # inputs [n, ...] of the shape and dtype to come; n may be 0
    steps: int = 1  # how many are planned

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", per_example(self.loss))


class Algorithm(ABC):
    """How examples are bounded, what a step releases, and what becomes of the noisy sum.

    Derive from it and register the class; nothing else needs to know an algorithm by name. Keyword
    parameters of its `__init__` are its options. The module docstrings have the formulas.
    """

    # `accumulate` and `contributions` also take `shares`, and bound the mean of each as one
    takes_shares: ClassVar[bool] = False
    sums_gradients: ClassVar[bool] = False  # the uᵢ are whole gradients of examples, clipped
    sums_in_float32: ClassVar[bool] = False  # also if the forward pass runs in bfloat16
    releases_once: ClassVar[bool] = False  # the first release gives the weights

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
    ) -> None:
        self.problem = problem
        self.noise_multiplier = noise_multiplier  # σ as the paper states it; 0 without noise
        # numbers that follow from earlier releases and that the next step needs; saved
        self.carried: dict[str, float] = {}

    @staticmethod
    def cycle(options: Mapping[str, Any]) -> int:
        """Return after how many steps an example may be drawn again, given the options."""
        return 1

    @abstractmethod
    def mechanism(self) -> Mechanism:
        """Return what a step releases, fixed before the first example is read."""

    @abstractmethod
    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Batch,
    ) -> None:
        """Add Σᵢ uᵢ with ‖uᵢ‖₂ ≤ bound to `total`, so that micro-batches and ranks add up.

        An empty batch adds nothing. The model's parameters do not change.
        """

    @abstractmethod
    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        """Return the uᵢ themselves, block name -> [B, *shape]: for tests and audits only."""

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        """Return the gradient, by parameter name, from the noisy sum alone, which costs no privacy.

        `noisy` may be overwritten.
        """
        return mean(noisy, expected_batch_size)

    @property
    def averages(self) -> bool:
        """True if `postprocess` is the mean: the private step then divides as it adds noise."""
        return type(self).postprocess is Algorithm.postprocess

    @property
    def sets_weights(self) -> bool:
        """True if `postprocess` returns the weights, and not a gradient, for the step to come."""
        return False

    def report(
        self,
        releases: int,
        delta: float,
    ) -> dict[str, Any]:
        """Return this algorithm's own entries in a record's `privacy` section."""
        return {}


class InSpectra(Algorithm):
    """Clips layers at C/√L and adds noise in a `FourierDomain`, where a weight has a spectrum."""

    domain: FourierDomain
    max_grad_norm: float
    spectral_noise: tuple[NoiseKind, float]  # on spectra: its kind and std
    engine: Engine = "auto"

    def mechanism(self) -> Mechanism:
        bound = self.max_grad_norm
        kind, std = self.spectral_noise
        blocks = []
        for name, parameter in trainable(self.problem.model).items():
            spectrum = self.domain.spectra.get(name)
            if spectrum is None:
                white = self.noise_multiplier * bound
                block = parameter_block(name, parameter, bound, white, "real")
            else:
                dtype = str(parameter.dtype.to_complex()).removeprefix("torch.")
                dims = spectrum.dims if kind == "hermitian" else ()
                block = Block(name, spectrum.shape, dtype, bound, std, kind, fft_dims=dims)
            blocks.append(block)
        return Mechanism(tuple(blocks), self.problem.sampling)

    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Batch,
    ) -> None:
        add_up(total, self.domain.clipped_sum(batch, self.max_grad_norm, self.engine))

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        return self.domain.contributions(batch, self.max_grad_norm)


def algorithm_type(name: str) -> type[Algorithm]:
    """Return the algorithm of a name."""
    registered = lookup("algorithm", name)
    if not isinstance(registered, type) or not issubclass(registered, Algorithm):
        raise UserError(
            f"algorithm={name}: {registered.__module__}.{registered.__qualname__} is not derived "
            "from zdp_bench.algorithms.Algorithm."
        )
    return registered


def mean(noisy: dict[str, Tensor], expected_batch_size: float) -> dict[str, Tensor]:
    """Divide by the EXPECTED batch size: the true size of a Poisson batch is private.

    `noisy` is overwritten.
    """
    for value in noisy.values():
        memory = value.conj() if value.is_conj() else value
        real_view(memory).mul_(1 / expected_batch_size)  # a complex one takes five times as long
    return noisy


def parameter_block(
    name: str,
    parameter: nn.Parameter,
    bound: float,
    std: float,
    noise: NoiseKind,
) -> Block:
    """Return the block that releases one parameter's gradient sum."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Block(name, tuple(parameter.shape), dtype, bound, std, noise)
