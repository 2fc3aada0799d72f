"""Streams of normal numbers, against float64 from the cipher's own words."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from zdp_bench.privacy.normal_stream import PAIRS, Request, _box_muller, add_normals, hash_key

KEY = hash_key((7, "noise", 3, "w"))
DTYPES = [torch.float32, torch.float64]


def test_parts_of_a_key_are_told_apart() -> None:
    keys = [(1, "a"), ("1", "b"), (1, "a", ""), (11, "a"), (1, "a, b"), (1, "a", "b"), ()]
    assert len({hash_key(key) for key in keys}) == len(keys)


def expected(numbers: int, dtype: torch.dtype, terms: int) -> np.ndarray:
    """The numbers of KEY's stream by the definition, in float64."""
    size = dtype.itemsize
    pieces = []
    for number, start in enumerate(range(0, numbers, 2 * PAIRS)):
        count = min(2 * PAIRS, numbers - start)
        half = -(-count // 2)
        piece = np.zeros(2 * half)
        for term in range(terms):
            nonce = bytes(8) + number.to_bytes(4, "little") + term.to_bytes(4, "little")
            cipher = Cipher(ChaCha20(KEY, nonce), mode=None).encryptor()
            words = np.frombuffer(cipher.update(bytes(2 * size * half)), f"i{size}")
            radii, angles = words.reshape(2, -1)
            uniform = radii * 2.0 ** (1 - 8 * size)
            radius = np.sqrt(-np.log(uniform**2 + 2.0 ** (-16 * size)))
            angle = angles * (2 * math.pi * 2.0 ** (-8 * size))
            piece += np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        pieces.append(piece[:count] / math.sqrt(terms))
    return np.concatenate(pieces)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 1025, 2 * PAIRS, 4 * PAIRS + 7])
@pytest.mark.parametrize("terms", [1, 4])
def test_numbers_are_those_of_the_cipher(dtype: torch.dtype, n: int, terms: int) -> None:
    """And what is there already stays, with the noise on top."""
    out = torch.full((n,), 10.0, dtype=dtype)
    add_normals([Request(KEY, out, 0.5, 0.25)], dtype, terms)
    exact = (10 + 0.5 * expected(n, dtype, terms)) * 0.25
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    np.testing.assert_allclose(out.numpy(), exact, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_words_give_finite_numbers(dtype: torch.dtype) -> None:
    kind = torch.int32 if dtype == torch.float32 else torch.int64
    limits = torch.iinfo(kind)
    words = torch.tensor([0, -1, 1, limits.min, limits.max], dtype=kind)
    radii, *waves = _box_muller(words.repeat(5), words.repeat_interleave(5), dtype)
    for wave in waves:
        assert torch.isfinite(radii * wave).all()
        assert (radii * wave).abs().max() < (6.7 if dtype == torch.float32 else 9.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_draws_the_same(
    threads: int, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    alone, shared = torch.zeros(2, 6 * PAIRS + 11, dtype=dtype)
    set_threads(1)
    add_normals([Request(KEY, alone, 1.0, 1.0)], dtype)
    set_threads(threads)
    add_normals([Request(KEY, shared, 1.0, 1.0)], dtype)
    assert torch.equal(alone, shared)
