"""Draw privacy noise. No other module does.

Gaussian numbers are drawn as REAL numbers and added to `view_as_real` of a complex tensor, with the
block's full `std` on each part. (`torch.normal` on a complex tensor would put std/√2 on each part,
and Opacus's secure mode leaves the imaginary part without noise.)

A step's noise is a pure function of (key, step, block), where the key is the run's own (`run_key`):
    - a step that is run again after a crash draws the same bits, so it is the same release, not a
      second one;
    - no two steps, blocks or purposes share a stream: the whole key is hashed into 128 bits or more
      (torch's CPU generator would keep only 32);
    - no two runs share one that differ in anything: σ, a rate or one training example. If they did,
      their difference would show the sums without noise.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections import defaultdict, deque
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
    """Return the key of a run's streams: the SHA-256 of everything that distinguishes runs.

    Args:
        run: the digest of configuration, seed and data.
        mechanism: with its true noise, which another version of a library may calibrate otherwise.
        code: the code that no other digest covers (`training.machine.foreign_code`).
    """
    return hashlib.sha256(f"{run}:{mechanism.digest()}:{code}".encode()).hexdigest()


def stream(
    key: int | str,
    *purpose: int | str,
) -> np.random.SeedSequence:
    """Return the seed of a stream of one purpose: `stream(key, "noise", step, block)`.

    The key is a run's (`run_key`), or a plain seed for what runs may share (first weights).
    """
    if isinstance(key, str):
        key = int.from_bytes(_digest(key))
    words = [_word(part) for part in purpose]
    return np.random.SeedSequence([key, *words])


def stream_bytes(key: int | str, *purpose: int | str) -> bytes:
    """Return the 16 bytes of a stream: a key of AES for `sampling.uniforms_of`."""
    return stream(key, *purpose).generate_state(2, np.uint64).tobytes()


@lru_cache(maxsize=4096)
def _word(part: int | str) -> int:
    """64 bits that represent one part of a key."""
    first_bytes = _digest(str(part))[:8]
    return int.from_bytes(first_bytes, "little")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class White(NamedTuple):
    """A request: `out` = (`out` + std·N(0, 1)) · times, independently in every real number."""

    out: Tensor  # contiguous, of any shape
    std: float
    key: tuple[int | str, ...]  # names the stream of the numbers
    times: float = 1.0

    def reals(self) -> Tensor:
        """Return a view of the real numbers of `out`, [n]."""
        return real_view(self.out).view(-1)


def real_view(value: Tensor) -> Tensor:
    """Return a view of a tensor's real numbers; [..., 2] of a complex one."""
    return torch.view_as_real(value) if value.is_complex() else value


class NoiseSource(Protocol):
    """A source of standard normal numbers."""

    repeatable: bool  # a step drawn again has the same noise: it is the same release

    def add_white(self, *requests: White) -> None:
        """Add the noise of all requests, each independent of the others; many at once is faster."""


@dataclass(frozen=True)
class SeededNoise:
    """Reproducible noise for experiments, not for a release to an adversary.

    Whoever knows the seed, the configuration and all of the data but one example can try candidates
    for that one, and subtract the noise.

    On a CPU, noise is ChaCha20's bits made normal by Box and Muller (`normal_stream`): the same
    bits for any number of threads. None is beyond 6.7 standard deviations, where one of 10¹⁰ should
    be. On a GPU it is torch's Philox generator, which keeps 63 bits of the key: two of the n (step,
    block) pairs of a run share a stream with probability n²/2⁶⁴, 5e-6 for ten million.
    """

    key: int | str  # a run's (`run_key`)
    repeatable = True

    def add_white(self, *requests: White) -> None:
        on_gpu = [white for white in requests if not white.out.is_cpu]
        if on_gpu:
            self._add_at_once(on_gpu)
        streams: dict[torch.dtype, list[Request]] = defaultdict(list)
        for white in requests:
            if white.out.is_cpu:
                key = hash_key((self.key, "noise", *white.key))
                out = white.reals()
                streams[out.dtype].append(Request(key, out, white.std, white.times))
        for dtype, own_streams in streams.items():
            add_normals(own_streams, dtype)

    def _add_at_once(self, requests: list[White]) -> None:
        """Draw all from one stream, which their keys name: a kernel for each would take longer."""
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
        if any(white.times != 1 for white in requests):
            torch._foreach_mul_(outs, [white.times for white in requests])


@dataclass(frozen=True)
class HedgedNoise:
    """Seeded noise whose key also covers the sum that it is added to.

    For steps of foreign code, of which no key tells everything: two sums that differ in one bit
    have independent noise, and the same sum has the same, so it is the same release. That holds
    where noise is added in place (blocks "real" and "circular"); others have that of the key.
    """

    key: str
    repeatable = True

    def add_white(self, *requests: White) -> None:
        chain = hashlib.sha256(self.key.encode())
        for white in requests:
            chain.update(white.reals().cpu().numpy().data)
        SeededNoise(chain.hexdigest()).add_white(*requests)


class SecureRandom:
    """The operating system's randomness with the two methods of numpy's that sampling needs."""

    def random(self, size: int) -> np.ndarray:
        """Return uniform numbers on the odd multiples of 2⁻⁵³ in (0, 1): never 0 or 1."""
        words = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
        highest_bits = (words >> np.uint64(12)).astype(np.float64)
        return (highest_bits + 0.5) * 2.0**-52

    def choice(
        self,
        examples: int,
        size: int,
        replace: bool,
    ) -> np.ndarray:
        """Return `size` different numbers below `examples`: where the least random ones are."""
        if replace or size > examples:
            raise ValueError(
                "a secure choice is made without replacement, and of no more than there are"
            )
        return np.argsort(self.random(examples))[:size]


@dataclass(frozen=True)
class SecureNoise:
    """Noise for a release to an adversary: it cannot be drawn again, and hides the sum's digits.

    Each tensor's noise has a key of 256 bits from the operating system (`os.urandom`), which
    ChaCha20 expands, made normal by Box and Muller in float64 (`normal_stream`). One number is the
    mean of FOUR independent ones, times two (Holohan & Braghin 2021, "Secure random sampling in
    differential privacy", section 5.1, n = 2): otherwise the digits that a floating-point normal
    number can have distinguish it from a shifted one (Mironov 2012; Jin et al. 2022). Opacus's
    secure mode does the same, but leaves the imaginary part without noise; here a complex tensor's
    parts are drawn as twice as many real numbers.

    This is not enough if noise is added to a float32 sum: whoever knows all examples but one then
    sees in thousands of coordinates which of two sums can have led to the release. So sum and noise
    are float64 (`widen`), and the release is rounded to a grid that does not depend on the sum
    (`round_to_grid`).

    Drawn on the CPU and moved. The request's key is ignored: a step that is drawn again is a new
    release, and the ledger counts it.
    """

    repeatable = False

    def add_white(self, *requests: White) -> None:
        streams = []
        for white in requests:
            key = os.urandom(32)
            streams.append(Request(key, white.reals(), white.std, white.times))
        add_normals(streams, torch.float64, terms=4)


class CorrelatedNoise:
    """Add noise that later steps partly cancel: η_t = ξ_t − Σⱼ cⱼ η_{t−j}, with ξ white.

    The η of the last len(c) steps are kept in float64. It is a function of the key
    and the step all the same: a process that resumes a run draws the ξ of all earlier steps once
    more. Secure ξ cannot be drawn again, so such a process must not go on
    (`Tally.has_other_noise`).
    """

    def __init__(
        self,
        white: NoiseSource,
        strategy: tuple[float, ...],
    ) -> None:
        self.white, self.strategy = white, strategy
        self.repeatable = white.repeatable
        self._last: dict[str, tuple[int, deque[Tensor]]] = {}  # block -> the next step, η

    def add_white(self, *requests: White) -> None:
        """Add η where each request's key is (step, block)."""
        for request in requests:
            out = request.reals()
            step, block = request.key
            noise = self._noise_of(int(step), str(block), request.std, out)
            out.add_(noise).mul_(request.times)

    def _noise_of(
        self,
        step: int,
        block: str,
        std: float,
        out: Tensor,
    ) -> Tensor:
        """Return η of a step, after drawing the ξ of all steps before it that are not drawn yet."""
        none_yet: deque[Tensor] = deque(maxlen=len(self.strategy))
        begun, past = self._last.get(block, (0, none_yet))
        if begun > step:
            if not self.repeatable:
                raise UserError(f"step {step:,}: its secure noise was drawn before, and is gone.")
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
    """Return the source of a mechanism's noise: `source` itself if steps are independent."""
    if mechanism.strategy == (1.0,):
        return source
    return CorrelatedNoise(source, mechanism.strategy)


def draw(
    block: Block,
    source: NoiseSource,
    step: int,
    device: torch.device,
) -> Tensor:
    """Return one step's noise ξ for one block, in the block's shape and dtype.

    Formal guarantees: zero mean, and in every entry the covariance that the block's kind declares
    (see `Block.noise`).
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


def widen(total: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sum in float64."""
    for name, value in total.items():
        wide = torch.complex128 if value.is_complex() else torch.float64
        total[name] = value.resolve_conj().to(wide)
    return total


def round_to_grid(
    release: dict[str, Tensor], mechanism: Mechanism, source: NoiseSource
) -> dict[str, Tensor]:
    """Round a sum with secure noise to a grid that depends on `std` alone, in its own dtype.

    The grid is 2⁻¹⁶ of std or a little finer: negligible beside the noise, but coarse beside the
    digits of the sum that float64 keeps (and float32 would show; see `SecureNoise`). Seeded noise
    is not rounded to it.
    """
    for block in mechanism.blocks:
        value = release[block.name]
        if block.std > 0 and not source.repeatable:
            grid = 2.0 ** (math.floor(math.log2(block.std)) - 16)
            real_view(value).div_(grid).round_().mul_(grid)
        release[block.name] = value.to(getattr(torch, block.dtype))
    return release


def add_noise(
    total: dict[str, Tensor],
    mechanism: Mechanism,
    source: NoiseSource,
    step: int,
    times: float = 1.0,
) -> dict[str, Tensor]:
    """Return `(total + ξ) · times`, block by block, in the precision of `total`.

    `total` is overwritten, and nothing in it is lazily conjugated any more.

    If several ranks hold a part of the sum each, one of them adds ξ, once. With a secure source
    call `widen` first, and `round_to_grid` on the result.

    Args:
        total: the sum of shares, by the name of the block.
        mechanism: declares the noise of each block.
        source: of standard normal numbers.
        step: the number of the step, which the noise is a function of.
        times: a factor for the noisy sum.
    """
    requests: list[White] = []  # white noise is added in place
    for block in mechanism.blocks:
        sum_ = total[block.name].resolve_conj()
        total[block.name] = sum_
        if block.noise in ("real", "circular") and sum_.is_contiguous():
            requests.append(White(sum_, block.std, (step, block.name), times))
            continue
        if block.noise != "none":
            dtype = str(sum_.dtype).removeprefix("torch.")
            sum_.add_(draw(replace(block, dtype=dtype), source, step, sum_.device))
        if times != 1:
            real_view(sum_).mul_(times)
    source.add_white(*requests)
    return total
