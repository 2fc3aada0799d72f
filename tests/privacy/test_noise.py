"""Noise, seeded and secure: its law in every coordinate, and what is independent of what."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from zdp_bench.errors import UserError
from zdp_bench.privacy import noise
from zdp_bench.privacy.mechanism import Block, Mechanism, NoiseKind, Sampling
from zdp_bench.privacy.noise import SecureNoise, SeededNoise, White, add_noise, draw
from zdp_bench.privacy.normal_stream import Request, add_normals, hash_key

WhiteSource = SeededNoise | SecureNoise

CPU = torch.device("cpu")
SOURCES = [SeededNoise(7), SecureNoise()]
# Standard errors allowed, and the p-value below which a test of fit fails: the secure source draws
# anew in every run, and a false alarm should come once in ten million runs.
Z = 6.5
P = 1e-10
SAMPLES = 200_000


@pytest.fixture(params=SOURCES, ids=["seeded", "secure"])
def source(request: pytest.FixtureRequest) -> WhiteSource:
    return request.param


def block(
    kind: NoiseKind, shape: tuple[int, ...], std: float = 2.5, wide: bool = False, **more: object
) -> Block:
    name, bits = ("float", 32) if kind == "real" else ("complex", 64)
    dtype = f"{name}{2 * bits if wide else bits}"
    return Block("layer.weight", shape, dtype, 1.0, std, kind, **more)


def alone(*blocks: Block) -> Mechanism:
    return Mechanism(blocks, Sampling("poisson", 0.1, 10.0, 100))


def white(source: WhiteSource, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`count` standard normal numbers."""
    numbers = torch.zeros(count, dtype=dtype)
    source.add_white(White(numbers, 1.0, (0, "w")))
    return numbers


def coordinates(drawn: Tensor) -> Tensor:
    """[n, ...] -> [n, real coordinates], float64."""
    if drawn.is_complex():
        drawn = torch.view_as_real(drawn)
    return drawn.reshape(len(drawn), -1).double()


def assert_covariance(drawn: Tensor, expected: Tensor) -> None:
    """Mean zero, and every entry of the covariance within Z standard errors of the expected."""
    n = len(drawn)
    spread = expected.diagonal().clamp(min=0).sqrt()
    assert (drawn.mean(dim=0).abs() <= Z * spread / math.sqrt(n) + 1e-9).all()
    measured = drawn.T @ drawn / n
    # Var(xy) = σx²σy² + cov² for Gaussian x, y
    error = ((spread[:, None] ** 2 * spread[None, :] ** 2 + expected**2) / n).sqrt()
    assert ((measured - expected).abs() <= Z * error + 1e-9).all(), (measured, expected)


# --------------------------------------------------------------------------------- every kind's law


def correlated(rho: float) -> list[list[float]]:
    pair = torch.tensor([[1.0, rho], [rho, 1.0]])
    return torch.block_diag(pair, pair).tolist()


@pytest.mark.parametrize(
    ("kind", "more", "law"),
    [
        ("real", {}, np.eye(2)),
        ("circular", {}, np.eye(4)),  # the full std on each part, and no correlation
        *(("correlated", {"rho": rho}, correlated(rho)) for rho in (-0.8, 0.3, 1.0)),
        ("real_on_complex", {}, np.diag([1.0, 0.0, 1.0, 0.0])),
    ],
)
def test_each_kind_has_its_covariance(
    source: WhiteSource, kind: NoiseKind, more: dict[str, float], law: object
) -> None:
    drawn = coordinates(draw(block(kind, (SAMPLES, 2), **more), source, 0, CPU))
    assert_covariance(drawn, 2.5**2 * torch.tensor(law, dtype=torch.float64))
    if kind == "real_on_complex":
        assert not drawn[:, 1::2].any()


@pytest.mark.parametrize(("shape", "dims"), [((6,), (1,)), ((2, 3), (1, 2)), ((2, 5), (2,))])
def test_hermitian_noise_is_the_unitary_transform_of_white_noise(
    source: WhiteSource, shape: tuple[int, ...], dims: tuple[int, ...]
) -> None:
    spectra = draw(block("hermitian", (40_000, *shape), fft_dims=dims, wide=True), source, 0, CPU)
    signals = torch.fft.ifftn(spectra, dim=dims, norm="ortho")
    assert float(signals.imag.abs().max()) < 1e-12  # spectra of real signals
    entries = math.prod(shape)
    identity = torch.eye(entries, dtype=torch.float64)
    assert_covariance(signals.real.reshape(-1, entries), 2.5**2 * identity)
    # and so the covariance of the spectrum's real coordinates is F Fᵀ for the transform's matrix F
    basis = identity.view(entries, *shape).to(torch.complex128)
    transform = coordinates(torch.fft.fftn(basis, dim=dims, norm="ortho"))  # [inputs, coordinates]
    assert_covariance(coordinates(spectra), 2.5**2 * transform.T @ transform)


@pytest.mark.parametrize("wide", [False, True])
def test_the_law_is_normal(source: WhiteSource, wide: bool) -> None:
    """Kolmogorov-Smirnov, and the fourth moment, which the distance hardly feels."""
    complex_numbers = draw(block("circular", (SAMPLES // 2,), std=1.0, wide=wide), source, 3, CPU)
    drawn = coordinates(complex_numbers).flatten().numpy()
    assert stats.kstest(drawn, "norm").pvalue > P
    assert abs(np.mean(drawn**4) - 3) < Z * math.sqrt(96 / len(drawn))
    real = draw(block("real", (3,), wide=wide), source, 0, CPU)
    assert real.dtype == (torch.float64 if wide else torch.float32)


def test_std_zero_and_empty_blocks_are_quiet(source: WhiteSource) -> None:
    assert not draw(Block("w", (5,), "float32", math.inf, 0.0, "none"), source, 0, CPU).any()
    assert not draw(block("circular", (4,), std=0.0), source, 0, CPU).any()
    assert draw(block("circular", (0, 3)), source, 0, CPU).shape == (0, 3)
    assert draw(block("real", ()), source, 0, CPU).shape == ()


# ---------------------------------------------------------------------- what is independent of what


def assert_independent(streams: list[Tensor]) -> None:
    unit = [stream.flatten().double() / stream.double().norm() for stream in streams]
    for a, b in combinations(unit, 2):
        assert abs(float(a @ b)) < Z / math.sqrt(a.numel())


def test_steps_blocks_and_draws_are_independent(source: WhiteSource) -> None:
    named = [Block(name, (20_000,), "float32", 1.0, 1.0, "real") for name in ("a", "b", "a.b")]
    assert_independent(
        [
            draw(block_of_name, source, step, CPU)
            for block_of_name in named
            for step in (0, 1, 2, 10, 12, 1_000_000)
        ]
    )


def test_neighbouring_entries_are_independent(source: WhiteSource) -> None:
    """A lag of one entry, and of one chunk of the secure source."""
    drawn = white(source, 2**20, torch.float64)
    for lag in (1, 2, 2**17, 2**18, 2**19):
        assert_independent([drawn[: 2**19], drawn[lag : lag + 2**19]])


def test_no_two_purposes_steps_or_blocks_share_a_stream() -> None:
    names = ("w", "b", "net.0.weight", "net.0.bias")
    keys: list[tuple[int | str, ...]] = [("noise", step, n) for step in range(300) for n in names]
    keys += [(purpose, step) for purpose in ("sample", "shuffle") for step in range(300)]
    seeds = (0, 1, 7, 2**32, 2**32 + 1, 2**64)
    asked = [(seed, *key) for seed in seeds for key in [*keys, ("model",)]]
    of_numpy = [noise.stream(*key).generate_state(4, np.uint64) for key in asked]
    # The 64 bits that a GPU's generator takes; even 32 hold for this few.
    for bits in (tuple, lambda state: int(state[0]) % 2**63, lambda state: int(state[0]) % 2**32):
        assert len({bits(state) for state in of_numpy}) == len(asked)
    assert len({hash_key(key) for key in asked}) == len(asked)  # what a CPU's noise is made of


def test_seeded_noise_repeats_and_secure_noise_does_not() -> None:
    circular = block("circular", (50,))
    assert SeededNoise.repeatable
    assert not SecureNoise.repeatable
    assert torch.equal(
        draw(circular, SeededNoise(1), 4, CPU), draw(circular, SeededNoise(1), 4, CPU)
    )
    assert not torch.equal(
        draw(circular, SecureNoise(), 4, CPU), draw(circular, SecureNoise(), 4, CPU)
    )


def test_numbers_of_a_seed_are_the_same_from_version_to_version() -> None:
    """A run repeats from commit to commit: if these change, say so in the changelog."""
    for dtype, numbers in (
        (torch.float32, [-1.4849043, 0.4808564, -0.0422465, 0.2296981]),
        (torch.float64, [0.0601518, -1.9393233, -0.5294959, -0.3807691]),
    ):
        drawn = white(SeededNoise(7), 4, dtype).tolist()
        assert drawn == pytest.approx(numbers, abs=1e-6)  # processors round differently
    at_once = White(torch.zeros(2), 1.0, ("a", 0)), White(torch.zeros(2), 1.0, ("b", 0))
    SeededNoise(7)._add_at_once([*at_once])
    numbers = [-0.1019681, 1.4015741, -1.0611891, -0.3303441]
    assert torch.cat([white.out for white in at_once]).tolist() == pytest.approx(numbers, abs=1e-6)
    doubled = White(torch.zeros(2), 1.0, ("a", 0), 2.0), White(torch.zeros(2), 1.0, ("b", 0), 2.0)
    SeededNoise(4)._add_at_once([*doubled])
    numbers = [0.9810006, 0.0427903, 0.2453988, -1.3515882]
    assert torch.cat([white.out for white in doubled]).tolist() == pytest.approx(numbers, abs=1e-6)
    state = noise.stream("key", "augment", 3).generate_state(2, np.uint64)
    assert state.tolist() == [6108440915898473565, 1518258773089673919]
    assert noise.stream_bytes("key", "augment", 3).hex() == "5d1c972ba68ac554bf62215f4ff01115"


def test_a_runs_key_changes_with_everything_that_sets_a_run_apart() -> None:
    mechanisms = [alone(block("real", (3,))) for _ in range(2)]
    mechanisms.append(Mechanism(mechanisms[0].blocks, Sampling("poisson", 0.2, 20.0, 100)))
    keys = {noise.run_key(*of) for of in product("ab", mechanisms, "cd")}
    assert len(keys) == 8  # the first two mechanisms are one
    for wide in (False, True):
        real_block = block("real", (20,), wide=wide)
        rows = torch.stack([draw(real_block, SeededNoise(key), 0, CPU) for key in keys])
        assert rows.unique().numel() == rows.numel()  # no number of one run occurs in another


def test_noise_that_is_asked_for_together_has_the_bits_of_each_asked_alone() -> None:
    """Streams are laid one behind the other and cut among threads, which must not show."""
    sizes = [0, 1, 7, 40_001, 100_000, 2, 131_072, 131_075, 3, 300_001]
    asked = [White(torch.zeros(n), 0.5 + n % 3, (4, f"block {n}")) for n in sizes]
    SeededNoise(3).add_white(*asked)
    for together in asked:
        own = White(torch.zeros_like(together.out), together.std, together.key)
        SeededNoise(3).add_white(own)
        assert torch.equal(together.out, own.out)


@pytest.mark.parametrize("kind", ["circular", "correlated", "hermitian", "none", "real"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("factor", [0.3, 2.0])
@pytest.mark.parametrize("source", [*SOURCES, noise.HedgedNoise("7")])
def test_a_sum_may_be_lazily_conjugated_and_multiplied_as_noise_is_laid_over_it(
    kind: NoiseKind, factor: float, lazy: bool, wide: bool, source: noise.NoiseSource
) -> None:
    more = {"correlated": {"rho": 0.5}, "hermitian": {"fft_dims": (0, 1)}}.get(kind, {})
    of = block(kind, (60, 71), std=0.0 if kind == "none" else 2.5, wide=wide, **more)
    given = torch.randn(of.shape, dtype=getattr(torch, of.dtype))
    if lazy and given.is_complex():
        given = given.conj()
        assert given.is_conj()
    sum_ = given.resolve_conj().clone()
    noisy = add_noise({of.name: given}, alone(of), source, 3, factor)[of.name]
    assert not noisy.is_conj()
    if source.repeatable:
        expected = add_noise({of.name: sum_.clone()}, alone(of), source, 3)[of.name]
        reals = torch.view_as_real(expected) if expected.is_complex() else expected
        reals.mul_(factor)
        assert torch.equal(noisy, expected)
    else:  # other noise each time: of its size
        parts = 2**0.5 if kind in ("circular", "correlated") else 1
        size = (noisy - factor * sum_).abs().square().mean().sqrt()
        assert size == pytest.approx(factor * of.std * parts, rel=0.2)


def test_the_tails_are_those_of_a_normal_law(source: WhiteSource) -> None:
    """Counts beyond 3, 4 and 4.5 standard deviations against their exact binomial tails."""
    drawn = white(source, 2_000_000).numpy()
    for far in (3.0, 4.0, 4.5):
        for count in (int((drawn > far).sum()), int((drawn < -far).sum())):
            law = stats.binom(len(drawn), stats.norm.sf(far))
            assert min(law.cdf(count), law.sf(count - 1)) > P


# ---------------------------------------------------------------------------------- a whole release

MECHANISM = alone(
    Block("w", (3, 4), "complex64", 1.0, 1.5, "circular"),
    Block("b", (4,), "float32", 1.0, 0.5, "real"),
)


def zero() -> dict[str, Tensor]:
    return {"w": torch.zeros(3, 4, dtype=torch.complex64), "b": torch.zeros(4)}


def test_the_release_is_the_sum_plus_the_noise_of_each_block() -> None:
    release = add_noise(
        {"w": torch.full((3, 4), 2 + 1j), "b": torch.ones(4)}, MECHANISM, SeededNoise(3), 5
    )
    for weight, sum_ in zip(MECHANISM.blocks, (2 + 1j, 1.0), strict=True):
        torch.testing.assert_close(
            release[weight.name], draw(weight, SeededNoise(3), 5, CPU) + sum_
        )


def test_a_sum_in_any_memory_order_gets_the_same_noise() -> None:
    turned = {"w": torch.zeros(4, 3, dtype=torch.complex64).T, "b": torch.zeros(8)[::2]}
    expected = add_noise(zero(), MECHANISM, SeededNoise(3), 5)
    noisy = add_noise(turned, MECHANISM, SeededNoise(3), 5)
    torch.testing.assert_close(noisy, expected, rtol=0, atol=0)


def test_no_noise_free_copy_of_the_sum_stays_behind() -> None:
    total = zero()
    kept = total["w"]
    assert add_noise(total, MECHANISM, SeededNoise(3), 0)["w"] is kept


def test_correlated_noise_follows_its_recurrence_in_any_order_of_steps() -> None:
    strategy = (1.0, 0.5, -0.25)

    def white_of(step: int) -> Tensor:
        out = torch.zeros(3, dtype=torch.float64)
        SeededNoise(3).add_white(White(out, 2.0, (step, "w")))
        return out

    expected: list[Tensor] = []
    for step in range(5):
        past = zip(strategy[1:], reversed(expected), strict=False)
        expected.append(white_of(step) - sum(c * earlier for c, earlier in past))
    correlated = noise.CorrelatedNoise(SeededNoise(3), strategy)
    assert correlated.repeatable
    for step in (0, 1, 4, 2, 2, 3):  # earlier ones, and gaps, as after a kill
        out = torch.ones(3, dtype=torch.float64)
        correlated.add_white(White(out, 2.0, (step, "w"), 0.5))
        torch.testing.assert_close(out, (1 + expected[step]) * 0.5)


def test_correlated_secure_noise_goes_on_and_is_not_drawn_again() -> None:
    correlated = noise.CorrelatedNoise(SecureNoise(), (1.0, 0.5))
    for step in (0, 1, 3):
        correlated.add_white(White(torch.zeros(3), 2.0, (step, "w")))
    with pytest.raises(UserError, match="step 2: its secure noise was drawn before, and is lost"):
        correlated.add_white(White(torch.zeros(3), 2.0, (2, "w")))


# ----------------------------------------------------------------------------------------- on a GPU


def at_once(key: int, step: int) -> Tensor:
    """White numbers [n, 3] from the one stream that serves all requests on a GPU, on a CPU."""
    real = torch.full((SAMPLES,), 3.0)
    pairs = torch.full((SAMPLES,), 1 + 1j)
    requests = White(real, 2.0, ("a", step), 0.5), White(pairs, 5.0, ("b", step))
    SeededNoise(key)._add_at_once([*requests])
    noise_of_real = (2 * real - 3) / 2
    noise_of_pairs = torch.view_as_real(pairs - (1 + 1j)) / 5
    return torch.cat([noise_of_real[:, None], noise_of_pairs], dim=1)


def test_the_stream_of_a_gpu_gives_each_request_its_scale_and_each_key_its_noise() -> None:
    drawn = at_once(7, 0)
    assert_covariance(drawn.double(), torch.eye(3, dtype=torch.float64))
    assert torch.equal(drawn, at_once(7, 0))
    assert_independent([drawn, at_once(7, 1), at_once(8, 0)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["real", "circular", "hermitian"])
def test_noise_on_a_gpu_has_the_same_law(source: WhiteSource, kind: NoiseKind) -> None:
    more = {"fft_dims": (1,)} if kind == "hermitian" else {}
    of_kind, cuda = block(kind, (SAMPLES, 2), **more), torch.device("cuda")
    drawn = draw(of_kind, source, 0, cuda)
    assert drawn.device.type == "cuda"
    if kind == "hermitian":
        drawn = torch.fft.ifft(drawn, dim=1, norm="ortho").real
    rows = coordinates(drawn.cpu())
    assert_covariance(rows, 2.5**2 * torch.eye(rows.shape[1], dtype=torch.float64))
    again = draw(of_kind, source, 0, cuda)
    assert torch.equal(again, draw(of_kind, source, 0, cuda)) == source.repeatable
    assert_independent([again.real, draw(of_kind, source, 1, cuda).real])


# ---------------------------------------------------------------------------------- hedged, secure


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["contiguous", "transposed"])
def test_hedged_noise_is_shared_by_equal_sums_alone(order: tuple[int, int]) -> None:
    mechanism = alone(Block("a", (50, 100), "float32", 1.0, 2.0, "real"))
    shape = [(50, 100)[index] for index in order]
    sums = torch.randn(shape, generator=torch.Generator().manual_seed(1)).permute(order)

    def noise_on(value: Tensor, key: str = "key") -> Tensor:
        noisy = add_noise({"a": value.clone()}, mechanism, noise.HedgedNoise(key), 0)["a"]
        return (noisy - value) / 2.0

    own = noise_on(sums)
    assert torch.equal(noise_on(sums), own)
    other = sums.clone()
    other[7, 0] = other[7, 0].nextafter(torch.tensor(torch.inf))
    for different in (noise_on(other), noise_on(sums, "another")):
        assert abs(float((own * different).mean())) < Z / math.sqrt(5000)


def test_noise_of_every_kind_is_keyed_by_the_whole_sum() -> None:
    """One bit of a block, of any kind, gives all blocks other noise."""
    shape = (40, 50)
    kinds: list[tuple[NoiseKind, dict[str, Any]]] = [
        ("real", {}),
        ("circular", {}),
        ("correlated", {"rho": 0.3}),
        ("real_on_complex", {}),
        ("hermitian", {"fft_dims": (1,)}),
    ]
    blocks = [replace(block(kind, shape, wide=True, **more), name=kind) for kind, more in kinds]
    generator = torch.Generator().manual_seed(1)
    sums = {
        of.name: torch.randn(shape, dtype=getattr(torch, of.dtype), generator=generator)
        for of in blocks
    }

    def noise_on(given: dict[str, Tensor]) -> dict[str, Tensor]:
        total = {name: value.clone() for name, value in given.items()}
        return add_noise(total, alone(*blocks), noise.HedgedNoise("key"), 0)

    own = noise_on(sums)
    assert all(torch.equal(value, own[name]) for name, value in noise_on(sums).items())
    for changed in sums:
        other = {name: value.clone() for name, value in sums.items()}
        number = noise.real_view(other[changed]).view(-1)[7:8]
        number.copy_(number.nextafter(torch.full((1,), torch.inf, dtype=number.dtype)))
        for name, value in noise_on(other).items():
            assert_independent([own[name].real - sums[name].real, value.real - sums[name].real])


def test_noise_keyed_by_the_sum_is_not_correlated_over_steps() -> None:
    banded = replace(MECHANISM, sampling=replace(MECHANISM.sampling, cycle=2), strategy=(1.0, 0.5))
    with pytest.raises(ValueError, match="cannot be correlated over steps"):
        noise.correlate(noise.HedgedNoise("key"), banded)


SECURE = alone(
    Block("real", (301,), "float32", 1.0, 0.7, "real"),
    Block("double", (301,), "float64", 1.0, 3.0, "real"),
    Block("circular", (7, 9), "complex64", 1.0, 1.5, "circular"),
    Block("correlated", (7, 9), "complex64", 1.0, 1.5, "correlated", rho=0.3),
    Block("hermitian", (3, 5), "complex64", 1.0, 1.5, "hermitian", fft_dims=(1,)),
    Block("half", (7,), "complex64", 1.0, 1.5, "real_on_complex"),
)


def sum_of(seed: int) -> dict[str, Tensor]:
    """Sums as examples make them: numbers of every size, with digits of their own."""
    torch.manual_seed(seed)
    numbers = {b.name: torch.randn(b.shape, dtype=getattr(torch, b.dtype)) for b in SECURE.blocks}
    return {name: value * 10.0 ** (seed - 2) for name, value in numbers.items()}


def off_the_grid(release: dict[str, Tensor]) -> dict[str, float]:
    """Each block's share of coordinates off the grid: 2⁻¹⁶ of the largest power of 2 below std."""
    steps = {b.name: 2.0 ** (math.floor(math.log2(b.std)) - 16) for b in SECURE.blocks}
    whole = {name: coordinates(value.unsqueeze(0)) / steps[name] for name, value in release.items()}
    return {name: float((value != value.round()).double().mean()) for name, value in whole.items()}


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_digits_of_a_secure_release_tell_nothing_of_the_sum(seed: int) -> None:
    """Every number that can come out can come out whatever the sum was. In float32 alone, sum and
    noise leave traces: of the sum in the coordinates where they cancel, of the noise where it is
    large."""
    bare = add_noise(sum_of(seed), SECURE, SecureNoise(), 0)
    assert off_the_grid(bare)["real"] > 0.01  # what this test would see
    wide = add_noise(noise.to_float64(sum_of(seed)), SECURE, SecureNoise(), 0)
    release = noise.make_release(wide, SECURE, SecureNoise())
    assert set(off_the_grid(release).values()) == {0.0}
    for b in SECURE.blocks:
        assert str(release[b.name].dtype) == f"torch.{b.dtype}"
    # nor is the grid coarser than it is stated to be
    assert min(off_the_grid({n: value / 2 for n, value in release.items()}).values()) > 0.1


def test_what_several_ranks_reduce_is_rounded_as_a_whole() -> None:
    """The noise-free share of another rank brings its own digits."""
    first, second = (noise.to_float64(sum_of(seed)) for seed in (2, 1))
    noisy = add_noise(first, SECURE, SecureNoise(), 0)
    reduced = {name: value + second[name] for name, value in noisy.items()}
    assert set(off_the_grid(noise.make_release(reduced, SECURE, SecureNoise())).values()) == {0.0}


def test_rounding_leaves_a_secure_release_its_law() -> None:
    mechanism = alone(Block("w", (SAMPLES, 2), "complex64", 1.0, 2.5, "circular"))
    sum_ = torch.full((SAMPLES, 2), 0.3 - 70j, dtype=torch.complex64)
    noisy = add_noise(noise.to_float64({"w": sum_}), mechanism, SecureNoise(), 0)
    noise_left = coordinates(noise.make_release(noisy, mechanism, SecureNoise())["w"] - sum_)
    assert_covariance(noise_left, 2.5**2 * torch.eye(4, dtype=torch.float64))


def test_seeded_releases_are_not_rounded_to_a_grid() -> None:
    total = zero()
    assert noise.make_release(total, MECHANISM, SeededNoise(3))["w"] is total["w"]


def test_each_secure_tensor_has_a_key_of_the_operating_system_and_four_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[bytes] = []

    def spy(count: int) -> bytes:
        taken.append(real(count))
        return taken[-1]

    real = os.urandom
    monkeypatch.setattr(noise.os, "urandom", spy)
    first, other, of_one_stream, of_four = torch.zeros(4, 1000, dtype=torch.float64)
    SecureNoise().add_white(White(first, 3.0, (0, "w")), White(other, 1.0, (0, "w")))
    assert [len(key) for key in taken] == [32, 32]
    for terms, out in ((1, of_one_stream), (4, of_four)):
        add_normals([Request(taken[0], out, 3.0, 1.0)], torch.float64, terms)
    assert torch.equal(first, of_four)
    # The keys differ in each run, so that a few of the numbers may be near each other.
    assert torch.isclose(first, of_one_stream).sum() < 10


@pytest.mark.parametrize("fill", [b"\x00", b"\xff"])
def test_extreme_random_words_stay_inside_the_open_interval(
    monkeypatch: pytest.MonkeyPatch, fill: bytes
) -> None:
    monkeypatch.setattr(noise.os, "urandom", lambda count: fill * count)
    uniform = noise.SecureRandom().random(4)
    assert ((uniform > 0) & (uniform < 1)).all()


def test_secure_uniform_numbers_are_uniform() -> None:
    uniform = noise.SecureRandom().random(SAMPLES)
    assert stats.kstest(uniform, "uniform").pvalue > P


def test_a_secure_choice_is_of_distinct_examples_without_replacement() -> None:
    draw_choice = noise.SecureRandom().choice
    assert sorted(draw_choice(5, size=5, replace=False).tolist()) == list(range(5))
    assert len(draw_choice(5, size=2, replace=False)) == 2
    for size, replaces in ((6, False), (2, True)):
        with pytest.raises(ValueError, match="without replacement"):
            draw_choice(5, size=size, replace=replaces)


def test_a_secure_release_without_noise_is_not_rounded() -> None:
    quiet = alone(Block("w", (3,), "float32", math.inf, 0.0, "none"))
    given = torch.tensor([0.1, 0.2, 0.3])
    wide = add_noise(noise.to_float64({"w": given.clone()}), quiet, SecureNoise(), 0)
    assert torch.equal(noise.make_release(wide, quiet, SecureNoise())["w"], given)
