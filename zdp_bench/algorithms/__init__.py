"""The algorithms, one file each. Each has the form y = Post( Σᵢ Boundᵢ(xᵢ) + ξ ).

An algorithm bounds each share and turns the noisy sum into a gradient. Sampling, noise, ledger and
optimizer are the same for all algorithms, and are in `training/step.py`. No algorithm computes or
prints an ε.
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
    """What an algorithm trains.

    Attributes:
        model: the model.
        loss: (outputs, targets) -> one loss per example, [B]. It is wrapped so that it computes
            each example separately (`PerExample`).
        sampling: how examples are sampled.
        seed: seed of what an algorithm draws before it reads examples, such as feedback matrices.
        like: inputs [n, ...] of the shape and data type that the model will get; n may be 0.
        steps: number of planned steps.
    """

    model: nn.Module
    loss: Loss
    sampling: Sampling
    seed: int = 0
    like: Tensor | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", per_example(self.loss))


class Algorithm(ABC):
    """How shares are bounded, what a step releases, and how the noisy sum becomes a gradient.

    To add an algorithm, derive a class and register it; no other code refers to an algorithm by
    name. The keyword arguments of its `__init__` are its options. The module docstrings contain the
    formulas.

    Attributes:
        takes_shares: `accumulate` and `contributions` also take `shares`, and bound the mean of
            each share as one.
        sums_gradients: each uᵢ is the whole gradient of an example, clipped or not.
        sums_in_float32: sums have float32 precision even if the forward pass runs in bfloat16.
        releases_once: there is one release, which sets the weights.
    """

    takes_shares: ClassVar[bool] = False
    sums_gradients: ClassVar[bool] = False
    sums_in_float32: ClassVar[bool] = False
    releases_once: ClassVar[bool] = False

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
    ) -> None:
        self.problem = problem
        self.noise_multiplier = noise_multiplier  # σ as the paper defines it; 0 without noise
        # State that follows from earlier releases and that the next step needs, by name; it is part
        # of a checkpoint.
        self.carried: dict[str, float] = {}

    @staticmethod
    def cycle(options: Mapping[str, Any]) -> int:
        """Return the smallest number of steps between two draws of one example, given the options.

        Default: 1.
        """
        return 1

    @abstractmethod
    def mechanism(self) -> Mechanism:
        """Return what a step releases. It must not depend on the examples."""

    @abstractmethod
    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Batch,
    ) -> None:
        """Add Σᵢ uᵢ to `total` in place, where ‖uᵢ‖₂ ≤ bound.

        The sums of micro-batches and ranks must add up to the sum of the whole batch. An empty
        batch adds nothing. The model's parameters do not change.
        """

    @abstractmethod
    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        """Return each uᵢ, block name -> [B, *shape]. For tests and audits only."""

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        """Return the gradient by parameter name. Default: the mean.

        The result depends on the examples only through the noisy sum, so it costs no privacy.

        Args:
            noisy: the noisy sum by block name; may be overwritten.
            expected_batch_size: see `mean`.
        """
        return mean(noisy, expected_batch_size)

    @property
    def averages(self) -> bool:
        """True if `postprocess` is the mean. The private step then divides while it adds noise."""
        return type(self).postprocess is Algorithm.postprocess

    @property
    def sets_weights(self) -> bool:
        """True if, for the next step, `postprocess` returns the weights instead of a gradient."""
        return False

    def report(
        self,
        releases: int,
        delta: float,
    ) -> dict[str, Any]:
        """Return this algorithm's own entries of a record's `privacy` section."""
        return {}


class InSpectra(Algorithm):
    """An algorithm that clips each of L layers at C/√L and adds noise in a `FourierDomain`.

    Attributes:
        domain: the spectra of the weights that have one.
        max_grad_norm: C.
        spectral_noise: kind and standard deviation of the noise on spectra.
        engine: engine that computes clipped sums.
    """

    domain: FourierDomain
    max_grad_norm: float
    spectral_noise: tuple[NoiseKind, float]
    engine: Engine = "auto"

    def mechanism(self) -> Mechanism:
        bound = self.max_grad_norm
        kind, std = self.spectral_noise
        blocks = []
        for name, parameter in trainable(self.problem.model).items():
            spectrum = self.domain.spectra.get(name)
            if spectrum is None:
                block = parameter_block(
                    name, parameter, bound, self.noise_multiplier * bound, "real"
                )
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
    """Return the class of the algorithm registered as `name`.

    Raises:
        UserError: no algorithm has this name, or it is not derived from `Algorithm`.
    """
    registered = lookup("algorithm", name)
    if not isinstance(registered, type) or not issubclass(registered, Algorithm):
        raise UserError(
            f"algorithm={name}: {registered.__module__}.{registered.__qualname__} is not derived "
            "from zdp_bench.algorithms.Algorithm."
        )
    return registered


def mean(noisy: dict[str, Tensor], expected_batch_size: float) -> dict[str, Tensor]:
    """Divide a noisy sum by the EXPECTED batch size, because the true one is private.

    `noisy` is overwritten and returned.
    """
    for value in noisy.values():
        memory = value.conj() if value.is_conj() else value
        # Multiplying the real view takes a fifth of the time of a complex multiplication.
        real_view(memory).mul_(1 / expected_batch_size)
    return noisy


def parameter_block(
    name: str,
    parameter: nn.Parameter,
    bound: float,
    std: float,
    noise: NoiseKind,
) -> Block:
    """Return the block of a mechanism that releases the sum of one parameter's gradients."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Block(name, tuple(parameter.shape), dtype, bound, std, noise)
