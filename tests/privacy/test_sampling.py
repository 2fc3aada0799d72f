"""Sampling: each scheme draws what its guarantee assumes."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
from scipy import stats

from zdp_bench.privacy import sampling


def test_a_shuffled_epoch_sees_every_example_once() -> None:
    batches = [
        sampling.shuffled(23, 5, position, np.random.default_rng(7)) for position in range(5)
    ]
    assert sorted(np.concatenate(batches).tolist()) == list(range(23))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]


def test_a_number_below_the_rate_draws_its_example() -> None:
    """Not one that equals it: the multiples of 2⁻⁵³ below the rate have just that probability."""
    rng = Mock(random=lambda examples: np.arange(examples) / 4)
    assert sampling.poisson(4, 0.5, rng).tolist() == [0, 1]


NAMES = [f"patient {number}".encode() for number in range(6000)]


def test_a_place_follows_from_an_identity_alone_and_from_the_key() -> None:
    places = sampling.place_each(NAMES, 11, b"a")
    for removed in range(50):
        rest = NAMES[:removed] + NAMES[removed + 1 :]
        assert (sampling.place_each(rest, 11, b"a") == np.delete(places, removed)).all()
    assert (sampling.place_each(NAMES[::-1], 11, b"a") == places[::-1]).all()
    twice = sampling.place_each([*NAMES, NAMES[7], NAMES[7]], 11, b"a")
    assert (twice == [*places, places[7], places[7]]).all()
    assert (sampling.place_each(NAMES, 11, b"b") != places).mean() > 0.8
    assert len(sampling.place_each([], 11, b"a")) == 0


@pytest.mark.parametrize("count", [1, 2, 11, 100])
@pytest.mark.parametrize("key", [b"a", b"cyclic sampling."])
def test_places_are_all_used_and_as_large_as_chance_makes_them(count: int, key: bytes) -> None:
    """Neither more uneven than a multinomial draw, nor more even, which needs the others."""
    sizes = np.bincount(sampling.place_each(NAMES, count, key), minlength=count)
    assert len(sizes) == count
    assert sizes.sum() == len(NAMES)
    if count > 1:
        statistic = ((sizes - len(NAMES) / count) ** 2).sum() / (len(NAMES) / count)
        assert 1e-3 < stats.chi2(count - 1).cdf(statistic) < 1 - 1e-3


def test_each_example_has_numbers_of_its_own_whoever_stands_beside_it() -> None:
    together = sampling.uniforms_of(np.array([3, 8, 4_000_000_000]), 8, b"k" * 16)
    assert together.shape == (3, 8)
    for place, record in enumerate((3, 8, 4_000_000_000)):
        assert (sampling.uniforms_of(np.array([record]), 8, b"k" * 16)[0] == together[place]).all()
    assert sampling.uniforms_of(np.array([], dtype=np.int64), 8, b"k" * 16).shape == (0, 8)
    assert (sampling.uniforms_of(np.array([3]), 5, b"k" * 16)[0] == together[0, :5]).all()


def test_numbers_are_uniform_and_independent_over_examples_places_and_steps() -> None:
    first, second = (sampling.uniforms_of(np.arange(40_000), 8, key * 16) for key in (b"a", b"b"))
    for drawn in (first, second):
        assert ((drawn >= 0) & (drawn < 1)).all()
        assert stats.kstest(drawn.ravel(), "uniform").pvalue > 1e-6
        assert np.abs(np.corrcoef(drawn.T) - np.eye(8)).max() < 6.5 / np.sqrt(len(drawn))
    for a, b in ((first, second), (first[1:], first[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 6.5 / np.sqrt(a.size)


def test_numbers_of_a_key_are_the_same_from_version_to_version() -> None:
    """A run repeats from commit to commit: if these change, say so in the changelog."""
    numbers = sampling.uniforms_of(np.array([3]), 3, b"k" * 16)
    np.testing.assert_allclose(
        numbers, [[0.490930087593, 0.421032022187, 0.297369369932]], rtol=1e-9
    )
    identities = [b"a", b"b", b"c"]
    assert sampling.place_each(identities, 1000, b"key").tolist() == [786, 803, 631]
    assert sampling.subsets(identities, 1000).tolist() == [454, 11, 85]
