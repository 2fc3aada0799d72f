"""Describe, as data, what one step releases. An accountant sees nothing else.

    release  S̃ = Σᵢ uᵢ + ξ,   ‖uᵢ‖₂ ≤ bound,   ξ Gaussian

The sum S is a list of tensors, one per `Block`. A block states how far one example can move it
(`bound`) and the standard deviation of the noise on each of its REAL coordinates (`std`, in a
unitary basis). The effective noise multiplier `z` follows from these alone: the mechanism is
exactly as private as the real Gaussian mechanism with sensitivity 1 and standard deviation z,
because only the Mahalanobis length of the largest shift matters (Dong, Roth & Su 2019, Theorem
2.7).

Nothing here depends on data. A mechanism is fixed before the first example is read.

With a `strategy` c₀ = 1, c₁, ... of b numbers, the noise is correlated over steps. Step t releases
S_t + η_t with η_t = ξ_t − Σⱼ cⱼ η_{t−j}, so η is C⁻¹ξ for the banded Toeplitz matrix C of the cⱼ.
The noise on C·S is ξ, which is white. An example moves C·S by ‖c‖ bounds for each step that draws
it. Steps that are b or more apart move C·S in orthogonal directions, so they compose like those of
DP-SGD (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", Theorem 4).
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

# Within these limits, no accountant takes more than minutes.
MAX_COUNT = 10**9  # examples, epochs, steps
MIN_NOISE, MAX_NOISE = 1e-4, 1e6  # a noise multiplier other than 0


@dataclass(frozen=True)
class Block:
    """One tensor of the released sum S.

    Attributes:
        name: name of the parameter or spectrum whose sum it is.
        shape: shape of the tensor.
        dtype: "float32", "float64", "complex64" or "complex128".
        bound: largest ℓ₂ norm of one example's share, in this block or, under a joint bound, over
            all blocks together.
        std: standard deviation of the noise on each REAL coordinate in a unitary basis. A complex
            number has two coordinates.
        noise: distribution of the noise ξ.
            real: N(0, std²) on every entry of a real tensor.
            circular: N(0, std²) on the real and on the imaginary part, independently.
            correlated: as circular, but the two parts of an entry have correlation `rho` (Riess et
                al. 2024, Theorem 1).
            hermitian: the unitary FFT over `fft_dims` of real white noise, for spectra of real
                signals. Every share must be such a spectrum, because other directions get no noise.
            real_on_complex: N(0, std²) on the real parts only. The imaginary parts get no noise.
            none: no noise.
        rho: correlation of the real and the imaginary part (noise "correlated" only).
        fft_dims: the transformed dimensions (noise "hermitian" only).
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
            f"rounding a sum in {self.dtype} can exceed its bound; keep parameters in float32": (
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
        """Standard deviation of the noise in the direction that gets least; 0 if one gets none.

        For noise "correlated", the 2×2 covariance std²·[[1, ρ], [ρ, 1]] has eigenvalues
        std²(1 ± ρ). The worst direction has the smaller one, so 1/z² = Δ²/(std²(1−|ρ|)). This is
        Theorem 1 of Riess et al. 2024 at its worst split Δ_re = Δ_im = Δ/√2.
        """
        if self.noise in ("none", "real_on_complex"):
            return 0.0
        if self.noise == "correlated":
            return self.std * math.sqrt(1 - abs(self.rho))
        return self.std


@dataclass(frozen=True)
class Sampling:
    """How a step draws its examples, and so which neighbouring data sets the guarantee compares.

    Attributes:
        scheme: sampling scheme.
            poisson: each example independently, with probability `sample_rate`.
            uniform: a fixed-size batch without replacement.
            shuffled: a permutation per epoch, cut into batches. It has no guarantee here.
            full: every example.
        sample_rate: probability that an example is drawn, or batch size / examples.
        expected_batch_size: divisor of every step's sum, even of an empty batch's.
        records: size of the training set; 0 if it is private (poisson only).
        cycle: number b of subsets in cyclic Poisson sampling. Each example is in one of b public
            subsets. Step t draws from subset t mod b only, each example with probability
            `sample_rate`. With 1, each step draws from all examples.
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
        """The sampling of only those steps that may draw a given example: the cycle is 1."""
        return dataclasses.replace(self, cycle=1)

    def steps_of_one(self, steps: int) -> int:
        """Return how many of `steps` consecutive steps may draw a given example, at most."""
        return -(-steps // self.cycle)

    def cap_examples(self, count: int) -> int:
        """Return how many of `count` examples the training set can hold; all, if it is private."""
        return min(count, self.records) if self.records else count

    def covers(self, other: Sampling, count: int) -> bool:
        """Return True if a step draws at least as many of `count` examples as one of `other` does.

        That is so in the stochastic order: whatever j is, j or more are drawn at least as probably.
        A binomial number grows with the rate and with the examples; a hypergeometric one grows with
        the batch and with the examples, and falls with the records.
        """
        if self.adjacency != other.adjacency:
            return False
        if self.cap_examples(count) < other.cap_examples(count):
            return False
        if self.adjacency == "replace_one" and count > 1:
            return self.batch_size >= other.batch_size and self.records <= other.records
        return self.sample_rate >= other.sample_rate

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values for ledger and record."""
        plain = dict(vars(self))
        if self.cycle == 1:
            del plain["cycle"]
        return plain

    @property
    def adjacency(self) -> Literal["add_or_remove_one", "replace_one"]:
        """The relation between neighbouring data sets.

        Poisson and full batches hide whether an example takes part. Fixed-size batches hide only
        which example does.
        """
        return "add_or_remove_one" if self.scheme in ("poisson", "full") else "replace_one"

    @property
    def shift(self) -> int:
        """Number of bounds by which S can move: 1 if an example comes or goes, 2 if replaced."""
        return 1 if self.adjacency == "add_or_remove_one" else 2


@dataclass(frozen=True)
class Mechanism:
    """What one step releases: its blocks, their bounds, and how examples are sampled.

    Formal guarantees (given ‖uᵢ‖ ≤ bound, and noise as each block states):
        - One step is exactly as private as a Gaussian mechanism of sensitivity 1 and noise z,
          subsampled by `sampling`.
        - z is the noise multiplier of the WEAKEST direction. A direction without noise makes z 0
          and ε infinite.

    Attributes:
        blocks: the tensors of the released sum.
        sampling: how a step draws its examples.
        joint: whether one bound holds for an example's share over all blocks. Otherwise, each block
            has its own bound, and an example may move all of them at once.
        strategy: coefficients c of noise that is correlated over steps; see the module's docstring.
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
            raise ValueError("under a joint bound, every block must state the same bound")
        if self.strategy[:1] != (1.0,) or len(self.strategy) > self.sampling.cycle:
            raise ValueError(
                "a strategy must begin with 1, and be no longer than the sampling's cycle"
            )

    @property
    def reach(self) -> float:
        """‖c‖, by which an example of norm 1 moves C·S, whose noise is white."""
        return math.hypot(*self.strategy)

    @property
    def is_private(self) -> bool:
        """True if examples are bounded or noise is added. ε may still be ∞."""
        return any(block.std > 0 or math.isfinite(block.bound) for block in self.blocks)

    @property
    def z(self) -> float:
        """Effective noise multiplier, in the weakest direction.

        1/z² = shift² · reach² · Σ_b (bound_b / weakest_std_b)² over the blocks b. This is the
        squared Mahalanobis length of the largest shift. Under a joint bound, it has the maximum
        over the blocks instead of the sum.
        """
        if any(block.weakest_std == 0 or math.isinf(block.bound) for block in self.blocks):
            return 0.0
        ratios = [(block.bound / block.weakest_std) ** 2 for block in self.blocks]
        inverse_square = max(ratios) if self.joint else sum(ratios)
        return 1.0 / (self.sampling.shift * self.reach * math.sqrt(inverse_square))

    @staticmethod
    def of_z(z: float, sampling: Sampling) -> Mechanism:
        """Return the simplest mechanism with noise multiplier z: one number with bound 1."""
        std = sampling.shift * z
        block = Block("unit", (1,), "float64", bound=1.0, std=std, noise="real")
        return Mechanism((block,), sampling)

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> Mechanism:
        """Return the mechanism that `as_dict` described.

        Raises:
            ValueError: `plain` does not describe a mechanism.
        """
        try:
            blocks = tuple(Block.from_dict(block) for block in plain["blocks"])
            sampling = Sampling(**plain["sampling"])
            strategy = tuple(plain.get("strategy", (1.0,)))
            return Mechanism(blocks, sampling, plain["joint"], strategy)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"this describes no mechanism: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values for ledger and record. An infinite bound becomes "inf"."""
        plain = dataclasses.asdict(self) | {"sampling": self.sampling.as_dict()}
        if self.strategy == (1.0,):
            del plain["strategy"]
        for block in plain["blocks"]:
            if math.isinf(block["bound"]):
                block["bound"] = "inf"
        return json.loads(json.dumps(plain))

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON. Equal digests mean equal mechanisms."""
        canonical = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()
