"""The stream of normal numbers, taken apart: ChaCha's words against the cipher, Box and Muller against float64."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numba import njit

from zdp_bench.kernels import chacha_normal
from zdp_bench.kernels.chacha_normal import (
    CHUNK,
    SHARE,
    Stream,
    _add_normals,
    add_normals,
    fill_words,
    hashed,
)


def key_words(key: tuple[int | str, ...]) -> np.ndarray:
    """A stream's key as the cipher takes it."""
    return np.frombuffer(hashed(key), "<u4")


NAME = (7, "noise", 3, "w")
KEY = key_words(NAME)
EDGES = [
    0,
    1,
    2,
    2**23,
    2**24 - 1,
    2**29 - 1,
    2**29,
    2**30,
    2**31 - 1,
    2**31,
    2**31 + 2**29,
    3 * 2**29,
    3 * 2**30,
    2**32 - 1,
]


def chacha(key: np.ndarray, block: int, double_rounds: int) -> np.ndarray:
    """One block by the book (Bernstein 2008): uint32 [16]."""
    constants = np.frombuffer(b"expand 32-byte k", "<u4")
    start = np.concatenate(
        [constants, key, np.array([block % 2**32, block >> 32, 0, 0], dtype="<u4")]
    ).astype(np.uint32)
    x = start.copy()

    def turn(a: np.uint32, bits: int) -> np.uint32:
        return (a << np.uint32(bits)) | (a >> np.uint32(32 - bits))

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for one, other, moved, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[one] += x[other]
            x[moved] = turn(x[moved] ^ x[one], bits)

    with np.errstate(over="ignore"):
        for _ in range(double_rounds):
            for i in range(4):
                quarter(i, 4 + i, 8 + i, 12 + i)
            for i in range(4):
                quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        return x + start


@pytest.mark.parametrize("block", [0, 5, 2**32 - 1, 2**32, 2**40 + 3])
def test_the_reference_is_the_cipher_at_twenty_rounds(block: int) -> None:
    counter = (block % 2**64).to_bytes(8, "little") + bytes(8)
    stream = Cipher(ChaCha20(KEY.tobytes(), counter), mode=None).encryptor().update(bytes(64))
    assert np.array_equal(chacha(KEY, block, 10), np.frombuffer(stream, "<u4"))


@pytest.mark.parametrize("first", [0, 64, 2**32 - 64, 2**32, 2**45])
@pytest.mark.parametrize("key", [(7, "noise"), (), (0, 0, "a")])
def test_the_words_are_those_of_eight_rounds(key: tuple[int | str, ...], first: int) -> None:
    words = np.empty(2 * CHUNK, np.uint32)
    fill_words(key_words(key), np.uint64(first), words)
    for lane in (0, 1, 31, 63):
        assert np.array_equal(
            words.reshape(16, 64)[:, lane], chacha(key_words(key), first + lane, 4)
        )


def test_parts_of_a_key_are_told_apart() -> None:
    keys: list[tuple[int | str, ...]] = [
        (1, "a"),
        ("1", "b"),
        (1, "a", ""),
        (11, "a"),
        (1, "a, b"),
        (1, "a", "b"),
        (),
    ]
    assert len({hashed(key) for key in keys}) == len(keys)


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


@pytest.mark.parametrize("n", [1, 2, 3, 1023, 1024, 1025, 5001])
def test_pair_i_is_entries_i_and_half_the_length_further(n: int) -> None:
    """By float64 from the cipher's own words; and whatever was there stays, with the noise on top."""
    numbers = torch.full((n,), 10.0)
    add_normals(Stream(hashed(NAME), numbers, 0.5))
    out, half = numbers.numpy(), -(-n // 2)
    expected = np.empty(2 * half)
    for pair in range(half):
        chunk, place = divmod(pair, CHUNK)
        word, lane = divmod(place, 64)
        block = (
            chacha(KEY, 64 * chunk + lane, 4)
            if pair < 40 or pair % 97 == 0 or pair == half - 1
            else None
        )
        if block is None:
            expected[[pair, half + pair]] = np.nan
            continue
        radius = math.sqrt(-2 * math.log((int(block[word]) + 0.5) * 2.0**-32))
        angle = int(block[8 + word].view(np.int32)) * math.pi * 2.0**-31
        expected[pair], expected[half + pair] = radius * math.cos(angle), radius * math.sin(angle)
    looked_at = ~np.isnan(expected[:n])
    np.testing.assert_allclose(out[looked_at], 10 + 0.5 * expected[:n][looked_at], atol=2e-6)
    assert (out != 10).all()


def test_a_stream_has_the_same_bits_in_every_version() -> None:
    """All lanes, a chunk cut short and an odd end, on every processor: ledgers repeat releases by it."""
    numbers = torch.zeros(1501)
    add_normals(Stream(hashed(("known",)), numbers, 1.0))
    digest = hashlib.sha256(numbers.numpy().astype("<f4").tobytes()).hexdigest()
    assert digest == "a9c7cddb8520c7bd811964ce9c195cff17de7d112c1291ae29bdc1a5ed9ef831"


def test_a_sum_is_scaled_after_noise_is_added() -> None:
    numbers, noise = torch.arange(751) * (2 - 1j), torch.zeros(751, dtype=torch.complex64)
    expected = numbers.clone()
    add_normals(Stream(hashed(NAME), noise, 3.0))
    add_normals(Stream(hashed(NAME), numbers, 3.0, times=0.25))
    torch.testing.assert_close(numbers, (expected + noise) * 0.25)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_stream_of_many_shares_is_its_chunks_each_alone(
    threads: int, set_threads: Callable[[int], None]
) -> None:
    """Whoever takes which share, a pair is what its place in the stream says."""
    half = 3 * SHARE + CHUNK + 11
    whole, head = torch.zeros(2 * half), torch.zeros(2 * half)
    set_threads(threads)
    add_normals(Stream(hashed(NAME), whole, 1.0))
    for start in range(0, half, CHUNK):
        _add_normals(
            KEY, head.numpy(), np.float32(1), np.float32(1), start, min(start + CHUNK, half)
        )
    assert torch.equal(whole, head)


def test_complex_numbers_are_twice_as_many_real_ones() -> None:
    numbers, pairs = torch.zeros(1000), torch.zeros(20, 25, dtype=torch.complex64)
    add_normals(Stream(hashed(NAME), numbers, 2.0), Stream(hashed(NAME), pairs, 2.0))
    assert torch.equal(torch.view_as_real(pairs).flatten(), numbers)


@pytest.mark.parametrize(
    "numbers", [torch.zeros(4, dtype=torch.float64), torch.zeros(4, 4).T, torch.zeros(8)[::2]]
)
def test_noise_is_not_laid_over_other_memory(numbers: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="32 bits that lie side by side"):
        add_normals(Stream(hashed(NAME), numbers[:, 1:] if numbers.dim() == 2 else numbers, 1.0))
