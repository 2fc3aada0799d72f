"""Draw privacy noise. No other module does.

Noise is drawn as REAL numbers and added to `view_as_real` of a complex tensor, with the block's
full `std` on each part. (`torch.normal` on a complex tensor would put std/√2 on each part, and
Opacus's secure mode adds no noise to the imaginary part.)

Seeded noise is a pure function of (key, step, block), where each run has its own key (`run_key`):
    - A step that is repeated after a crash draws the same bits, so it is the same release and not a
      second one.
    - No two steps, blocks or purposes share a stream. The whole key is hashed into 128 bits or more
      (torch's CPU generator would keep only 32).
    - No two runs that differ in anything, such as σ, a rate or one training example, share a
      stream. If they did, the difference of their releases would reveal that of their sums without
      noise.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from zdp_bench.errors import UserError
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.privacy.normal_stream import Request, add_normals, hash_key


def run_key(
    run: str,
    mechanism: Mechanism,
    code: str,
) -> str:
    """Return the key of a run's random streams: a SHA-256 of everything that distinguishes runs.

    Args:
        run: digest of configuration, seed and data.
        mechanism: the run's mechanism. Its calibrated noise may depend on the libraries' versions,
            so no other digest covers it.
        code: digest of code that no other digest covers (`training.machine.foreign_code`).
    """
    return hashlib.sha256(f"{run}:{mechanism.digest()}:{code}".encode()).hexdigest()


def stream(
    key: int | str,
    *purpose: int | str,
) -> np.random.SeedSequence:
    """Return the seed of the random stream for a purpose, as in `stream(key, "augment", step)`.

    Args:
        key: the key of a run (`run_key`), or a plain seed for what several runs may share, such as
            initial weights.
        purpose: what identifies the stream among those of the key.
    """
    if isinstance(key, str):
        key = int.from_bytes(_digest(key))
    words = [_word(part) for part in purpose]
    return np.random.SeedSequence([key, *words])


def stream_bytes(key: int | str, *purpose: int | str) -> bytes:
    """Return the first 16 bytes of a stream, as an AES key for `sampling.uniforms_of`."""
    return stream(key, *purpose).generate_state(2, np.uint64).tobytes()


def step_key(key: int | str, purpose: str, step: int, secure: bool) -> bytes:
    """Return an AES key, for `sampling.uniforms_of`, for random choices within a step's examples.

    Args:
        key: key of the run.
        purpose: what is chosen.
        step: number of the step.
        secure: whether the operating system draws the key. The key of a run depends on all
            examples, so that removing one would change the choices for all others. This is hidden
            only if the choices cannot be computed.
    """
    return os.urandom(16) if secure else stream_bytes(key, purpose, step)


@lru_cache(maxsize=4096)
def _word(part: int | str) -> int:
    """Return 64 bits of a hash of one part of a key."""
    first_bytes = _digest(str(part))[:8]
    return int.from_bytes(first_bytes, "little")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class White(NamedTuple):
    """A request to set `out` = (`out` + std·N(0, 1)) · factor, independently in every real number.

    Attributes:
        out: contiguous tensor of any shape, overwritten.
        std: standard deviation of the noise.
        key: identifies the random stream among those of the noise source.
        factor: factor for the noisy tensor.
    """

    out: Tensor
    std: float
    key: tuple[int | str, ...]
    factor: float = 1.0

    def reals(self) -> Tensor:
        """Return a view of the real numbers in `out`, [n]."""
        return real_view(self.out).view(-1)


def real_view(value: Tensor) -> Tensor:
    """Return a view of a tensor's real numbers, of shape [..., 2] if the tensor is complex."""
    return torch.view_as_real(value) if value.is_complex() else value


class WhiteNoise(Protocol):
    """Gaussian noise of the steps' sums."""

    def add_white(self, *requests: White) -> None:
        """Add independent noise for each request. One call for many is faster than many calls."""


class NoiseSource(Protocol):
    """A source of Gaussian noise.

    Attributes:
        repeatable: whether a step that is repeated has the same noise, so that it is the same
            release. Only secure noise is not repeatable.
    """

    repeatable: bool

    def for_sum(self, sum_: Sequence[Tensor]) -> WhiteNoise:
        """Return the noise of one sum, given the sum's tensors (contiguous, of all blocks)."""


@dataclass(frozen=True)
class SeededNoise:
    """Reproducible noise for experiments. Do not use it if a release may reach an adversary.

    Anyone who knows the seed, the configuration and all of the data but one example can try
    candidates for that example and subtract the noise.

    On a CPU, the noise comes from ChaCha20 by the Box–Muller transform (`normal_stream`), with the
    same bits for any number of threads. No number exceeds 6.7 standard deviations, where one in
    10¹⁰ should. On a GPU, it comes from torch's Philox generator, which keeps 63 bits of the key.
    Two of a run's n (step, block) pairs share a stream with probability n²/2⁶⁴, which is 5e-6 for
    ten million pairs.

    Attributes:
        key: key of the run (`run_key`).
    """

    key: int | str
    repeatable = True

    def for_sum(self, sum_: Sequence[Tensor]) -> WhiteNoise:
        return self

    def add_white(self, *requests: White) -> None:
        on_gpu = [white for white in requests if not white.out.is_cpu]
        if on_gpu:
            self._add_at_once(on_gpu)
        streams: dict[torch.dtype, list[Request]] = defaultdict(list)
        for white in requests:
            if white.out.is_cpu:
                key = hash_key((self.key, "noise", *white.key))
                out = white.reals()
                streams[out.dtype].append(Request(key, out, white.std, white.factor))
        for dtype, own_streams in streams.items():
            add_normals(own_streams, dtype)

    def _add_at_once(self, requests: list[White]) -> None:
        """Draw the noise of all requests from one stream: a kernel per request is slower."""
        outs = [white.reals() for white in requests]
        lengths = [len(out) for out in outs]
        device, dtype = outs[0].device, outs[0].dtype
        parts = itertools.chain.from_iterable(white.key for white in requests)
        seeds = stream(self.key, "noise", *parts)
        generator = torch.Generator(device=device)
        generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0]) % 2**63)
        drawn = torch.randn(sum(lengths), generator=generator, device=device, dtype=dtype)
        normal = drawn.split(lengths)
        torch._foreach_mul_(normal, [white.std for white in requests])
        torch._foreach_add_(outs, normal)
        if any(white.factor != 1 for white in requests):
            torch._foreach_mul_(outs, [white.factor for white in requests])


@dataclass(frozen=True)
class HedgedNoise:
    """Seeded noise whose key also covers the sum that it is added to.

    Use it for steps of third-party code, which the key cannot fully cover. Two sums that differ in
    one bit of any block get independent noise in all blocks. Equal sums get equal noise, so they
    are the same release. This source cannot draw noise before it has the sum.
    """

    key: str
    repeatable = True

    def for_sum(self, sum_: Sequence[Tensor]) -> WhiteNoise:
        chain = hashlib.sha256(self.key.encode())
        for value in sum_:
            chain.update(real_view(value).cpu().numpy().data)
        return SeededNoise(chain.hexdigest())


class SecureRandom:
    """The operating system's randomness, with the two methods of numpy's Generator in use."""

    def random(self, size: int) -> np.ndarray:
        """Return odd multiples of 2⁻⁵³, uniform in (0, 1), [size]."""
        words = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
        highest_bits = (words >> np.uint64(12)).astype(np.float64)
        return (highest_bits + 0.5) * 2.0**-52

    def choice(
        self,
        examples: int,
        size: int,
        replace: bool,
    ) -> np.ndarray:
        """Return `size` distinct numbers below `examples`, [size].

        They are the indices of the smallest of `examples` random numbers.

        Raises:
            ValueError: `replace` is true, or `size` exceeds `examples`.
        """
        if replace or size > examples:
            raise ValueError(
                "a secure choice must be without replacement, and of at most all examples"
            )
        return np.argsort(self.random(examples))[:size]


@dataclass(frozen=True)
class SecureNoise:
    """Noise for releases that may reach an adversary. It cannot be drawn again.

    Each tensor's noise has a key of 256 bits from the operating system (`os.urandom`), which
    ChaCha20 expands. The Box–Muller transform in float64 makes it normal (`normal_stream`). Each
    number is the mean of FOUR independent ones, times two (Holohan & Braghin 2021, "Secure random
    sampling in differential privacy", section 5.1, n = 2). Otherwise, the digits that a
    floating-point normal number can have would distinguish it from a shifted one (Mironov 2012; Jin
    et al. 2022). Opacus's secure mode does the same, but adds no noise to imaginary parts. Here,
    the parts of a complex tensor are drawn as twice as many real numbers.

    This is not enough if noise is added to a float32 sum: anyone who knows all examples but one
    would see in thousands of coordinates which of two sums can have led to the release. So sum and
    noise are float64 (`to_float64`), and the release is rounded to a grid that does not depend on
    the sum (`make_release`).

    Noise is drawn on the CPU, then moved to the tensor's device. A request's key is ignored. A step
    that is repeated is a new release, which the ledger counts.
    """

    repeatable = False

    def for_sum(self, sum_: Sequence[Tensor]) -> WhiteNoise:
        return self

    def add_white(self, *requests: White) -> None:
        streams = []
        for white in requests:
            key = os.urandom(32)
            streams.append(Request(key, white.reals(), white.std, white.factor))
        add_normals(streams, torch.float64, terms=4)


class CorrelatedNoise:
    """Noise that later steps partly cancel: η_t = ξ_t − Σⱼ cⱼ η_{t−j}, with ξ white.

    The η of the last len(c) steps are kept in float64. With a repeatable ξ, η is still a function
    of the key and the step: a process that resumes a run draws the ξ of all earlier steps again.
    Secure ξ cannot be drawn again, so a process must not resume such a run
    (`Tally.has_other_noise`).

    Args:
        white: source of ξ.
        strategy: the coefficients c, of which the first is 1.
    """

    def __init__(
        self,
        white: SeededNoise | SecureNoise,
        strategy: tuple[float, ...],
    ) -> None:
        self.white, self.strategy = white, strategy
        self.repeatable = white.repeatable
        # block -> its next step, and η of the steps before, the latest first
        self._last: dict[str, tuple[int, deque[Tensor]]] = {}

    def for_sum(self, sum_: Sequence[Tensor]) -> WhiteNoise:
        return self

    def add_white(self, *requests: White) -> None:
        """Add η for each request, whose key must be (step, block)."""
        for request in requests:
            out = request.reals()
            step, block = request.key
            noise = self._noise_of(int(step), str(block), request.std, out)
            out.add_(noise).mul_(request.factor)

    def _noise_of(
        self,
        step: int,
        block: str,
        std: float,
        out: Tensor,
    ) -> Tensor:
        """Return η of a step. First draw the ξ of all earlier steps that are not drawn yet."""
        none_yet: deque[Tensor] = deque(maxlen=len(self.strategy))
        begun, past = self._last.get(block, (0, none_yet))
        if begun > step:
            if not self.repeatable:
                raise UserError(f"step {step:,}: its secure noise was drawn before, and is lost.")
            begun, past = 0, none_yet
        for earlier_step in range(begun, step + 1):
            noise = torch.zeros_like(out, dtype=torch.float64)
            self.white.add_white(White(noise, std, (earlier_step, block)))
            for coefficient, earlier in zip(self.strategy[1:], past, strict=False):
                noise.sub_(earlier, alpha=coefficient)
            past.appendleft(noise)
        self._last[block] = step + 1, past
        return past[0]


def correlate(source: NoiseSource, mechanism: Mechanism) -> NoiseSource:
    """Return the noise source of a mechanism: `source` itself if it has the mechanism's strategy.

    Args:
        source: source of white noise, or one that this function returned.
        mechanism: its strategy correlates the noise of its steps.

    Raises:
        ValueError: the strategy correlates noise that depends on the sum. The noise of earlier
            steps, which later noise cancels, could not be drawn again.
    """
    if isinstance(source, CorrelatedNoise):
        if source.strategy == mechanism.strategy:
            return source
        source = source.white
    if mechanism.strategy == (1.0,):
        return source
    if not isinstance(source, SeededNoise | SecureNoise):
        raise ValueError("noise whose key covers the sum cannot be correlated over steps")
    return CorrelatedNoise(source, mechanism.strategy)


def draw(
    block: Block,
    source: WhiteNoise,
    step: int,
    device: torch.device,
) -> Tensor:
    """Return the noise ξ of one step for one block, in the block's shape and dtype.

    Formal guarantees: ξ has zero mean, and the covariance that `Block.noise` declares.
    """
    dtype: torch.dtype = getattr(torch, block.dtype)
    if block.noise == "none":
        return torch.zeros(block.shape, dtype=dtype, device=device)
    has_two_parts = block.noise in ("circular", "correlated")
    shape = (*block.shape, 2) if has_two_parts else block.shape
    white = torch.zeros(shape, dtype=dtype.to_real(), device=device)
    source.add_white(White(white, block.std, (step, block.name)))
    if block.noise == "real":
        return white
    if block.noise == "real_on_complex":
        return torch.complex(white, torch.zeros_like(white))
    if block.noise == "hermitian":
        return torch.fft.fftn(white, dim=block.fft_dims, norm="ortho")
    if block.noise == "circular":
        return torch.view_as_complex(white)
    real, independent = white.unbind(-1)
    imaginary = block.rho * real + (1 - block.rho**2) ** 0.5 * independent
    return torch.complex(real, imaginary)


def to_float64(total: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a sum to float64 or complex128; overwrite and return `total`."""
    for name, value in total.items():
        wide = torch.complex128 if value.is_complex() else torch.float64
        total[name] = value.resolve_conj().to(wide)
    return total


def make_release(
    noisy_sum: dict[str, Tensor], mechanism: Mechanism, source: NoiseSource
) -> dict[str, Tensor]:
    """Convert a noisy sum to its blocks' dtypes; overwrite and return `noisy_sum`.

    Secure noise is first rounded, with its sum, to a grid that depends on `std` alone. The grid's
    step is a power of two, at most std/2¹⁶: negligible compared with the noise, but coarse compared
    with the digits that float64 keeps of the sum (and float32 would reveal; see `SecureNoise`).
    """
    for block in mechanism.blocks:
        value = noisy_sum[block.name]
        if block.std > 0 and not source.repeatable:
            grid_step = 2.0 ** (math.floor(math.log2(block.std)) - 16)
            real_view(value).div_(grid_step).round_().mul_(grid_step)
        noisy_sum[block.name] = value.to(getattr(torch, block.dtype))
    return noisy_sum


def add_noise(
    total: dict[str, Tensor],
    mechanism: Mechanism,
    source: NoiseSource,
    step: int,
    factor: float = 1.0,
) -> dict[str, Tensor]:
    """Return `(total + ξ) · factor`, block by block, in the precision of `total`.

    `total` is overwritten. Afterwards, all of its tensors are contiguous, and none is lazily
    conjugated.

    If several ranks hold a part of the sum each, exactly one of them must add ξ. With a secure
    source, call `to_float64` before and `make_release` after.

    Args:
        total: sum of shares, by the name of the block.
        mechanism: declares the noise of each block.
        source: source of the noise.
        step: number of the step. Seeded noise is a function of it.
        factor: factor for the noisy sum. Default: 1.
    """
    for block in mechanism.blocks:
        total[block.name] = total[block.name].resolve_conj().contiguous()
    noise = source.for_sum([total[block.name] for block in mechanism.blocks])
    requests: list[White] = []  # white noise is added in place
    for block in mechanism.blocks:
        sum_ = total[block.name]
        if block.noise in ("real", "circular"):
            requests.append(White(sum_, block.std, (step, block.name), factor))
            continue
        if block.noise != "none":
            dtype = str(sum_.dtype).removeprefix("torch.")
            sum_.add_(draw(replace(block, dtype=dtype), noise, step, sum_.device))
        if factor != 1:
            real_view(sum_).mul_(factor)
    noise.add_white(*requests)
    return total
