"""A mechanism describes as data what one step releases. The accountant sees nothing else.

    release  S̃ = Σᵢ uᵢ + ξ,   ‖uᵢ‖₂ ≤ bound,   ξ Gaussian

S is a list of tensors, one `Block` each. A block says how far one example can move it (`bound`) and
how much noise each of its REAL coordinates gets (`std`, in a unitary basis). The effective noise
multiplier `z` follows from these alone: the mechanism is exactly as private as the real Gaussian
mechanism with sensitivity 1 and standard deviation z (Dong, Roth & Su 2019, Theorem 2.7: only the
Mahalanobis length of the largest shift matters).

Nothing here depends on data; a mechanism is fixed before the first example is read.

With a `strategy` c₀ = 1, c₁, ... of b numbers, the noise of steps is correlated: step t releases
S_t + η_t with η_t = ξ_t − Σⱼ cⱼ η_{t−j}, so η is C⁻¹ξ for the banded Toeplitz matrix C of the cⱼ.
An example moves C·S, on which ξ is white noise, by ‖c‖ bounds for each step that draws it. Steps at
a distance of b or more move it in orthogonal directions, so they compose like those of DP-SGD
(Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", Theorem 4).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

NoiseKind = Literal["none", "real", "circular", "correlated", "hermitian", "real_on_complex"]
Scheme = Literal["poisson", "uniform", "shuffled", "full"]

# The largest numbers that every accountant can work with in minutes.
MOST = 10**9  # examples, epochs, steps
LEAST_NOISE, MOST_NOISE = 1e-4, 1e6  # a noise multiplier other than 0


@dataclass(frozen=True)
class Block:
    """One tensor of the released sum S.

    Attributes:
        name: the parameter (or spectrum) it holds.
        shape: its shape.
        dtype: "float32", "float64", "complex64" or "complex128".
        bound: the largest ℓ₂ norm of one example's share, in this block or, under a joint bound, in
            all blocks together.
        std: noise standard deviation of each REAL coordinate in a unitary basis; a complex number
            has two coordinates.
        noise: the law of ξ. real: N(0, std²) on every entry of a real tensor. circular: N(0, std²)
            on the real and on the imaginary part, independently: circularly symmetric. correlated:
            as circular, but the two parts of one entry have correlation `rho` (Riess et al.
                2024, Theorem 1).
            hermitian: the unitary FFT over `fft_dims` of real white noise. For spectra of real
                signals: every share must be such a spectrum, for outside that half of the space
                there is no noise.
            real_on_complex: noise on the real parts only; the imaginary parts are released without.
            none: no noise.
        rho: correlation of real and imaginary part (kind "correlated" only).
        fft_dims: the transformed dimensions (kind "hermitian" only).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bound: float
    std: float
    noise: NoiseKind
    rho: float = 0.0
    fft_dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        is_complex = self.noise in ("circular", "correlated", "hermitian", "real_on_complex")
        rank = len(self.shape)
        named = {dim % rank for dim in self.fft_dims if -rank <= dim < rank}
        rules = {
            f"a sum in {self.dtype} is rounded past its bound; keep parameters in float32": (
                self.dtype in ("float32", "float64", "complex64", "complex128")
            ),
            f"noise '{self.noise}' does not fit dtype {self.dtype}": (
                self.noise == "none" or is_complex == self.dtype.startswith("complex")
            ),
            f"bound must be positive, not {self.bound}": self.bound > 0,
            f"std must be finite and not negative, not {self.std}": 0 <= self.std < math.inf,
            f"rho must lie in [-1, 1], not {self.rho}": -1 <= self.rho <= 1,
            f"rho belongs to noise 'correlated', not to '{self.noise}'": (
                not self.rho or self.noise == "correlated"
            ),
            "noise 'hermitian', and it alone, names the transformed dimensions fft_dims": (
                (self.noise == "hermitian") == bool(self.fft_dims)
            ),
            f"fft_dims {self.fft_dims} do not name dimensions of shape {self.shape}, once each": (
                len(named) == len(self.fft_dims)
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"block '{self.name}': {rule}")

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> Block:
        """Return the block that `Mechanism.as_dict` described."""
        bound = math.inf if plain["bound"] == "inf" else plain["bound"]
        lists = {name: tuple(plain[name]) for name in ("shape", "fft_dims")}
        return Block(**plain | lists | {"bound": bound})

    @property
    def weakest_std(self) -> float:
        """Noise standard deviation along the direction that gets least; 0 if one gets none.

        correlated: the 2×2 covariance std²·[[1, ρ], [ρ, 1]] has eigenvalues std²(1 ± ρ). The
        adversary picks the smaller, so 1/z² = Δ²/(std²(1−|ρ|)): Theorem 1 of Riess et al. 2024 at
        its worst split Δ_re = Δ_im = Δ/√2.
        """
        if self.noise in ("none", "real_on_complex"):
            return 0.0
        if self.noise == "correlated":
            return self.std * math.sqrt(1 - abs(self.rho))
        return self.std


@dataclass(frozen=True)
class Sampling:
    """How a step draws its examples, and so which neighbours the guarantee compares.

    Attributes:
        scheme: poisson (each example independently with probability `sample_rate`), uniform (a
            fixed-size batch without replacement), shuffled (an epoch's permutation cut into
            batches; no guarantee here), full (every example).
        sample_rate: the probability, or batch size / examples.
        expected_batch_size: the divisor of every step, also of an empty one.
        records: the size of the training set; 0 where it is private (poisson only).
        cycle: b of cyclic Poisson sampling: each example is in one of b public subsets, and step t
            draws from subset t mod b alone, each with probability `sample_rate`. 1: from all.
    """

    scheme: Scheme
    sample_rate: float
    expected_batch_size: float
    records: int
    cycle: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate must lie in (0, 1], not {self.sample_rate}")
        if self.scheme == "full" and self.sample_rate != 1:
            raise ValueError("a full batch has a sample_rate of 1")
        most_cycle = math.inf if self.scheme == "poisson" else 1
        if not 1 <= self.cycle <= most_cycle:
            raise ValueError("only Poisson sampling goes in cycles, of 1 step or more")

    @property
    def batch_size(self) -> int:
        """The size of a fixed-size batch."""
        return round(self.sample_rate * self.records)

    @property
    def of_one(self) -> Sampling:
        """How the steps that one example may be drawn for draw it: without the cycle."""
        return dataclasses.replace(self, cycle=1)

    def steps_of_one(self, steps: int) -> int:
        """Return how many of `steps` steps in a row one example may be drawn for, at most."""
        return -(-steps // self.cycle)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values for ledger and record."""
        plain = dict(vars(self))
        if self.cycle == 1:
            del plain["cycle"]
        return plain

    @property
    def adjacency(self) -> Literal["add_or_remove_one", "replace_one"]:
        """Poisson batches hide whether an example takes part, fixed-size ones only which does."""
        return "add_or_remove_one" if self.scheme in ("poisson", "full") else "replace_one"

    @property
    def shift(self) -> int:
        """By how many bounds a neighbour can move S: 1 (one comes or goes) or 2 (is replaced)."""
        return 1 if self.adjacency == "add_or_remove_one" else 2


@dataclass(frozen=True)
class Mechanism:
    """What one step releases: its blocks, how they are bounded, and how examples are sampled.

    Formal guarantees (given ‖uᵢ‖ ≤ bound, and noise as each block says):
        - one step is exactly as private as a Gaussian mechanism of sensitivity 1 and noise z,
          subsampled by `sampling`;
        - z is the multiplier of the WEAKEST direction; a direction without noise makes it 0, and ε
          infinite.

    Attributes:
        joint: True if one bound holds for an example's share over all blocks; False if each block
            is bounded by itself, and an example may move all of them at once.
        strategy: c of noise that is correlated over steps; see above.
    """

    blocks: tuple[Block, ...]
    sampling: Sampling
    joint: bool = True
    strategy: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("a mechanism needs at least one block")
        bounds = {block.bound for block in self.blocks}
        if self.joint and len(bounds) != 1:
            raise ValueError("under a joint bound every block states the same bound")
        if self.strategy[:1] != (1.0,) or len(self.strategy) > self.sampling.cycle:
            raise ValueError("a strategy begins with 1, and is no longer than the sampling's cycle")

    @property
    def reach(self) -> float:
        """‖c‖: how far an example of norm 1 moves the sums that white noise hides."""
        return math.hypot(*self.strategy)

    @property
    def is_private(self) -> bool:
        """True if examples are bounded, or noise is added; ε may still be ∞."""
        return any(block.std > 0 or math.isfinite(block.bound) for block in self.blocks)

    @property
    def z(self) -> float:
        """Effective noise multiplier of the weakest direction.

        1/z² = shift² · Σ_b (bound_b / weakest_std_b)² over separately bounded blocks; under one
        joint bound the maximum instead of the sum. It is the squared Mahalanobis length of the
        largest shift, times `reach` squared where noise is correlated over steps.
        """
        if any(block.weakest_std == 0 or math.isinf(block.bound) for block in self.blocks):
            return 0.0
        ratios = [(block.bound / block.weakest_std) ** 2 for block in self.blocks]
        inverse_square = max(ratios) if self.joint else sum(ratios)
        return 1.0 / (self.sampling.shift * self.reach * math.sqrt(inverse_square))

    @staticmethod
    def of_z(z: float, sampling: Sampling) -> Mechanism:
        """Return the simplest mechanism that is exactly as private: one number, bound 1."""
        std = sampling.shift * z
        block = Block("unit", (1,), "float64", bound=1.0, std=std, noise="real")
        return Mechanism((block,), sampling)

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> Mechanism:
        """Return the mechanism that `as_dict` described."""
        try:
            blocks = tuple(Block.from_dict(block) for block in plain["blocks"])
            sampling = Sampling(**plain["sampling"])
            strategy = tuple(plain.get("strategy", (1.0,)))
            return Mechanism(blocks, sampling, plain["joint"], strategy)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"this describes no mechanism: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values for ledger and record; an infinite bound becomes "inf"."""
        plain = dataclasses.asdict(self) | {"sampling": self.sampling.as_dict()}
        if self.strategy == (1.0,):
            del plain["strategy"]
        for block in plain["blocks"]:
            if math.isinf(block["bound"]):
                block["bound"] = "inf"
        return json.loads(json.dumps(plain))

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON: equal digests mean equal mechanisms."""
        canonical = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()
