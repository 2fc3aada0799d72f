"""A mechanism's declared z against the gain of its noise, measured on matrices that none of the
code under test builds.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import block_diag

from zdp_bench.privacy import mechanism as module
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.records import format_json, from_json

POISSON = Sampling("poisson", 0.1, 10.0, 100)
UNIFORM = Sampling("uniform", 0.1, 10.0, 100)


def unitary_dft(shape: tuple[int, ...], dims: tuple[int, ...]) -> np.ndarray:
    """The matrix of the unitary DFT over dimensions of a row-major array, from its definition."""
    matrix = np.ones((1, 1), dtype=complex)
    for axis, size in enumerate(shape):
        k = np.arange(size)
        dft = np.exp(-2j * np.pi * np.outer(k, k) / size) / math.sqrt(size)
        matrix = np.kron(matrix, dft if axis in dims else np.eye(size))
    return matrix


def parts(matrix: np.ndarray) -> np.ndarray:
    """A complex map of real vectors as a real map onto (real parts, imaginary parts)."""
    return np.vstack([matrix.real, matrix.imag])


def noise_map(block: Block) -> np.ndarray:
    """ξ = noise_map @ white, in real coordinates (real parts first)."""
    n, s = math.prod(block.shape), block.std
    identity, zero = np.eye(n), np.zeros((n, n))
    match block.noise:
        case "real":
            return s * identity
        case "circular":
            return s * np.eye(2 * n)
        case "correlated":
            return s * np.block(
                [[identity, zero], [block.rho * identity, math.sqrt(1 - block.rho**2) * identity]]
            )
        case "hermitian":
            return s * parts(unitary_dft(block.shape, block.fft_dims))
        case "real_on_complex":
            return s * np.vstack([identity, zero])
        case _:
            return np.zeros((n if block.dtype.startswith("float") else 2 * n, 1))


def share_map(block: Block) -> np.ndarray:
    """The space an example's share ranges over: everything, but for spectra of real signals."""
    if block.noise == "hermitian":
        return parts(unitary_dft(block.shape, block.fft_dims))
    n = math.prod(block.shape)
    return np.eye(n if block.dtype.startswith("float") else 2 * n)


def numeric_gain(mechanism: Mechanism) -> float:
    """The longest shift in units of the noise; ∞ if one meets no noise."""
    maps = []
    for block in mechanism.blocks:
        noise, share = noise_map(block), share_map(block)
        values, vectors = np.linalg.eigh(noise @ noise.T)
        kept = values > 1e-12 * max(values.max(), 1e-300)
        outside = share - vectors[:, kept] @ (vectors[:, kept].T @ share)
        if np.linalg.norm(outside) > 1e-9:
            return math.inf
        whitened = (vectors[:, kept] / np.sqrt(values[kept])).T @ share
        maps.append(block.bound * whitened)  # a share within its bound -> units of noise
    # The sum moves by one share, or by the difference of two: any vector twice as long.
    lengths = [block_diag(*maps)] if mechanism.joint else maps
    longest = math.hypot(*(np.linalg.norm(matrix, 2) for matrix in lengths))
    return longest * (2 if mechanism.sampling.scheme == "uniform" else 1)


REAL = Block("real", (2, 3), "float32", 1.5, 0.7, "real")
CIRCULAR = Block("circular", (3,), "complex64", 1.5, 1.1, "circular")
CORRELATED = Block("correlated", (2,), "complex64", 1.5, 0.9, "correlated", rho=0.6)
ANTI = Block("anti", (2,), "complex64", 1.5, 0.9, "correlated", rho=-0.35)
HERMITIAN = Block("hermitian", (2, 4), "complex64", 1.5, 0.8, "hermitian", fft_dims=(1,))
PLANE = Block("plane", (3, 4), "complex64", 1.5, 0.8, "hermitian", fft_dims=(0, 1))
WIDE = Block("wide", (2,), "float32", 4.0, 0.5, "real")
KINDS = [REAL, CIRCULAR, CORRELATED, ANTI, HERMITIAN, PLANE]


@pytest.mark.parametrize("sampling", [POISSON, UNIFORM], ids=["poisson", "uniform"])
@pytest.mark.parametrize("block", KINDS, ids=lambda block: block.name)
def test_z_is_the_inverse_gain_of_every_kind(block: Block, sampling: Sampling) -> None:
    mechanism = Mechanism((block,), sampling)
    assert 1 / mechanism.z == pytest.approx(numeric_gain(mechanism), rel=1e-9)


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "separate"])
@pytest.mark.parametrize(
    "pair", [*combinations(KINDS, 2)], ids=lambda pair: f"{pair[0].name}-{pair[1].name}"
)
def test_z_of_several_blocks(pair: tuple[Block, ...], joint: bool) -> None:
    mechanism = Mechanism(pair, POISSON if joint else UNIFORM, joint=joint)
    assert 1 / mechanism.z == pytest.approx(numeric_gain(mechanism), rel=1e-9)


def test_separate_bounds_may_differ_and_add_up() -> None:
    mechanism = Mechanism((REAL, WIDE), POISSON, joint=False)
    assert mechanism.z == pytest.approx(1 / math.hypot(1.5 / 0.7, 4.0 / 0.5))
    assert 1 / mechanism.z == pytest.approx(numeric_gain(mechanism), rel=1e-9)


@pytest.mark.parametrize(
    "naked",
    [
        Block("half", (2,), "complex64", 1.5, 1.0, "real_on_complex"),
        Block("none", (2,), "float32", 1.5, 1.0, "none"),
        Block("line", (2,), "complex64", 1.5, 1.0, "correlated", rho=1.0),
        Block("mirrored", (2,), "complex64", 1.5, 1.0, "correlated", rho=-1.0),
        Block("silent", (2,), "float32", 1.5, 0.0, "real"),
    ],
    ids=lambda block: block.name,
)
@pytest.mark.parametrize("joint", [True, False])
def test_a_direction_without_noise_makes_z_zero(naked: Block, joint: bool) -> None:
    mechanism = Mechanism((REAL, naked), POISSON, joint=joint)
    assert numeric_gain(mechanism) == math.inf
    assert mechanism.z == 0.0


def test_an_unbounded_share_makes_z_zero_and_is_private_if_it_has_noise() -> None:
    for std, is_private in ((0.0, False), (1.0, True)):
        unbounded = Mechanism((Block("b", (2,), "float32", math.inf, std, "real"),), POISSON)
        assert (unbounded.z, unbounded.is_private) == (0.0, is_private)


HERMITIAN_OF = {"dtype": "complex64", "noise": "hermitian"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"std": math.inf}, "std must be finite"),
        ({"std": math.nan}, "std must be finite"),
        ({"std": -1.0}, "std must be finite"),
        ({"bound": 0.0}, "bound must be positive"),
        ({"rho": 0.5}, "rho belongs to noise 'correlated'"),
        ({"dtype": "complex64"}, "does not fit dtype complex64"),
        ({"dtype": "complex64", "noise": "correlated", "rho": 1.5}, "rho must lie in"),
        ({"dtype": "complex64", "noise": "correlated", "rho": -1.5}, "rho must lie in"),
        ({"fft_dims": (0,)}, "names the transformed dimensions"),
        (HERMITIAN_OF, "names the transformed dimensions"),
        (HERMITIAN_OF | {"fft_dims": (2,)}, "do not name dimensions"),
        (HERMITIAN_OF | {"fft_dims": (1, -1)}, "do not name dimensions"),
        (HERMITIAN_OF | {"fft_dims": (-3,)}, "do not name dimensions"),
    ],
)
def test_blocks_that_mean_nothing_are_refused(changes: dict, says: str) -> None:
    fields = {"dtype": "float32", "bound": 1.0, "std": 1.0, "noise": "real"} | changes
    with pytest.raises(ValueError, match=says):
        Block("b", (2, 2), **fields)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_a_sample_rate_is_a_chance(rate: float) -> None:
    with pytest.raises(ValueError, match="sample_rate"):
        Sampling("poisson", rate, 1.0, 10)


def test_blocks_have_one_bound_together_unless_it_is_said() -> None:
    with pytest.raises(ValueError, match="same bound"):
        Mechanism((REAL, WIDE), POISSON)


def test_a_mechanism_comes_back_from_its_description() -> None:
    whole = Block("whole", (2,), "float32", 1, 1, "real")  # 1 and 1.0 have other digests
    unbounded = Block("free", (2,), "float32", math.inf, 0.0, "none")
    spectrum = Block("s", (4, 3), "complex64", 1.5, 0.7, "hermitian", fft_dims=(0, 1))
    mechanism = Mechanism((whole, unbounded, spectrum), UNIFORM, joint=False)
    read = from_json(format_json(mechanism.as_dict()))
    for plain in (mechanism.as_dict(), read):
        assert Mechanism.from_dict(plain) == mechanism
        assert Mechanism.from_dict(plain).digest() == mechanism.digest()
    del read["blocks"][0]["bound"]
    with pytest.raises(ValueError, match="describes no mechanism"):
        Mechanism.from_dict(read)


@pytest.mark.parametrize(
    ("scheme", "rate", "cycle", "message"),
    [
        ("uniform", 0.1, 2, "only Poisson sampling goes in cycles"),
        ("poisson", 0.1, 0, "of 1 step or more"),
        ("full", 0.5, 1, "a full batch has a sample_rate of 1"),
    ],
)
def test_sampling_that_no_accountant_knows_is_refused(
    scheme: Any, rate: float, cycle: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(scheme, rate, 10.0, 100, cycle)


@pytest.mark.parametrize(("steps", "own"), [(0, 0), (1, 1), (3, 1), (4, 2), (9, 3)])
def test_an_example_may_be_drawn_for_one_step_of_each_cycle(steps: int, own: int) -> None:
    assert Sampling("poisson", 0.1, 10.0, 100, 3).steps_of_one(steps) == own


@pytest.mark.parametrize("cycle", [1, 3])
def test_a_description_is_plain_and_names_a_cycle_and_an_infinite_bound(cycle: int) -> None:
    block = Block("w", (2,), "float32", math.inf, 0.0, "none")
    whole = Mechanism((block,), Sampling("poisson", 0.1, 10.0, 100, cycle))
    plain = whole.as_dict()
    assert plain["blocks"][0]["bound"] == "inf"
    assert plain["sampling"].get("cycle", 1) == cycle
    assert ("cycle" in plain["sampling"]) == (cycle > 1)
    assert "strategy" not in plain
    assert Mechanism.from_dict(plain) == whole


def test_a_digest_is_the_same_from_version_to_version() -> None:
    """Ledgers state it: one of an earlier version would belong to another mechanism."""
    block = Block("w", (2, 3), "complex64", 1.5, 0.7, "correlated", rho=0.25)
    expected = "b02e731285246d79dbd04d24aece122bc1b4b20f2a9dfb5b4ec36460ac948105"
    assert Mechanism((block,), POISSON).digest() == expected


def test_dimensions_may_be_counted_from_the_last() -> None:
    for dims in ((-1,), (-2,), (0, -1)):
        Block("b", (2, 3), "complex64", 1.0, 1.0, "hermitian", fft_dims=dims)


@pytest.mark.parametrize(
    ("scheme", "adjacency", "shift"),
    [
        ("poisson", "add_or_remove_one", 1),
        ("full", "add_or_remove_one", 1),
        ("uniform", "replace_one", 2),
        ("shuffled", "replace_one", 2),
    ],
)
def test_each_scheme_has_its_neighbours(scheme: Any, adjacency: str, shift: int) -> None:
    sampling = Sampling(scheme, 1.0, 100.0, 100)
    assert (sampling.adjacency, sampling.shift) == (adjacency, shift)
    unit = Mechanism.of_z(1.3, sampling)
    assert unit.blocks == (Block("unit", (1,), "float64", 1.0, shift * 1.3, "real"),)
    assert unit.z == pytest.approx(1.3, rel=1e-12)


@pytest.mark.parametrize(("records", "held"), [(0, 3), (2, 2), (3, 3), (5, 3)])
def test_a_training_set_holds_no_more_examples_than_it_has(records: int, held: int) -> None:
    assert Sampling("poisson", 0.1, 10.0, records).cap_examples(3) == held


def test_the_steps_of_one_example_are_those_of_a_sampling_without_a_cycle() -> None:
    in_cycles = Sampling("poisson", 0.1, 10.0, 100, cycle=3)
    assert in_cycles.of_one == Sampling("poisson", 0.1, 10.0, 100)
    assert Sampling("uniform", 0.126, 10.0, 100).batch_size == 13


def test_correlated_noise_moves_by_the_length_of_its_strategy() -> None:
    in_cycles = Sampling("poisson", 0.1, 10.0, 100, cycle=3)
    banded = Mechanism((REAL,), in_cycles, strategy=(1.0, 0.5, -0.25))
    assert banded.reach == pytest.approx(math.sqrt(1 + 0.25 + 0.0625))
    assert banded.z == pytest.approx(0.7 / 1.5 / banded.reach)
    assert Mechanism.from_dict(banded.as_dict()) == banded
    for strategy in ((0.5, 1.0), (), (1.0, 0.5, 0.5, 0.5)):
        with pytest.raises(ValueError, match="a strategy must begin with 1"):
            Mechanism((REAL,), in_cycles, strategy=strategy)


def test_the_limits_of_counts_and_noise() -> None:
    """Configurations, ledgers and bundles of every version are held to them."""
    assert module.MAX_COUNT == 1_000_000_000
    assert (module.MIN_NOISE, module.MAX_NOISE) == (0.0001, 1_000_000.0)


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_a_sampling_that_covers_another_draws_at_least_as_many(count: int) -> None:
    """Against scipy's tails, of random samplings; of two of the same kind, not always either."""
    rng = np.random.default_rng(count)
    covered = 0
    for _ in range(300):
        tails, samplings = [], []
        scheme = ("poisson", "uniform")[int(rng.integers(2))]
        for _ in range(2):
            records = int(rng.integers(4, 60))
            batch, held = int(rng.integers(1, records)), min(count, records)
            samplings.append(Sampling(scheme, batch / records, batch, records))
            law = stats.binom(held, batch / records)
            if scheme == "uniform":
                law = stats.hypergeom(records, held, batch)
            tails.append(law.sf(np.arange(count)))
        first, other = samplings
        if first.covers(other, count):
            covered += 1
            assert (tails[0] >= tails[1] - 1e-12).all()
    assert covered > 20
    assert not Sampling("full", 1.0, 9, 9).covers(UNIFORM, count)
