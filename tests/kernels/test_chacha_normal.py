"""The compiled stream of normal numbers: its words, logarithm and angles, and its bits for ever."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from zdp_bench.kernels import chacha_normal
from zdp_bench.kernels.chacha_normal import GROUP, _fill_words
from zdp_bench.privacy.normal_stream import _words, hash_key

NAME = (7, "noise", 3, "w")
EDGES = [0, 1, 2, 2**23, 2**24 - 1, 2**29 - 1, 2**29, 2**30, 2**31 - 1, 2**31, 3 * 2**30, 2**32 - 1]


@pytest.mark.parametrize("group", [0, 1, 2**26 - 1, 2**26, 2**39])
def test_words_are_those_of_the_twin(group: int) -> None:
    words, key = np.empty(2 * GROUP, np.uint32), hash_key(NAME)
    _fill_words(np.frombuffer(key, "<u4"), np.uint64(64 * group), words)
    assert np.array_equal(words.reshape(16, 64), _words(key, group, 1)[0])


@njit
def _every_radius(words: Any, out: Any) -> None:
    for i in range(len(words)):
        out[i] = chacha_normal._radius(words[i])


@njit
def _every_angle(words: Any, cosines: Any, sines: Any) -> None:
    for i in range(len(words)):
        cosines[i], sines[i] = chacha_normal._cosine_and_sine(words[i])


def all_over() -> np.ndarray:
    """The edges, both ends, and every 4,093rd word between."""
    ends = [
        np.arange(2**16),
        2**32 - 1 - np.arange(2**16),
        np.arange(0, 2**32, 4093),
        np.array(EDGES),
    ]
    return np.concatenate(ends).astype(np.uint32)


def test_the_radius_is_that_of_float64_for_words_all_over() -> None:
    words = all_over()
    found = np.empty(len(words), np.float32)
    _every_radius(words, found)
    uniform = (words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)).astype(
        np.float64
    )
    expected = np.sqrt(-2 * np.log(uniform))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=4e-7, atol=1e-7)
    assert found.max() == pytest.approx(math.sqrt(66 * math.log(2)))  # word 0: 6.76
    assert found.min() == 0


def test_cosine_and_sine_are_those_of_float64_for_words_all_over() -> None:
    words = all_over()
    cosines, sines = np.empty(len(words), np.float32), np.empty(len(words), np.float32)
    _every_angle(words, cosines, sines)
    angle = words.view(np.int32).astype(np.float64) * math.pi * 2.0**-31
    np.testing.assert_allclose(cosines, np.cos(angle), rtol=0, atol=1.2e-7)
    np.testing.assert_allclose(sines, np.sin(angle), rtol=0, atol=1.2e-7)


def test_a_stream_has_the_same_bits_in_every_version() -> None:
    """On every processor, with a group cut short and an odd end: ledgers repeat releases by it."""
    numbers = torch.zeros(1501)
    chacha_normal.add_normals(hash_key(("known",)), numbers, 1.0)
    digest = hashlib.sha256(numbers.numpy().astype("<f4").tobytes()).hexdigest()
    assert digest == "a9c7cddb8520c7bd811964ce9c195cff17de7d112c1291ae29bdc1a5ed9ef831"
