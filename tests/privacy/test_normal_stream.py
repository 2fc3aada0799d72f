"""Streams of normal numbers: ChaCha's words against the cipher, the normal numbers against
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from zdp_bench import kernels
from zdp_bench.privacy.normal_stream import (
    GROUP,
    TOGETHER,
    _words,
    add_normals,
    hash_key,
    run_parallel,
)

NAME = (7, "noise", 3, "w")
KEY = np.frombuffer(hash_key(NAME), "<u4")


@pytest.fixture(params=["kernel", "numpy"])
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """The compiled stream, and its twin."""
    before = kernels.enabled()
    kernels._enabled = request.param == "kernel"
    yield
    kernels._enabled = before


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


@pytest.mark.parametrize("group", [0, 1, 2**26 - 1, 2**26, 2**39])
@pytest.mark.parametrize("key", [(7, "noise"), ()])
def test_the_words_are_those_of_eight_rounds(key: tuple[int | str, ...], group: int) -> None:
    words, own = _words(hash_key(key), group, 2), np.frombuffer(hash_key(key), "<u4")
    for index, lane in ((0, 0), (0, 63), (1, 1), (1, 31)):
        block = chacha(own, 64 * (group + index) + lane, 4)
        assert np.array_equal(words[index, :, lane], block)


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
    assert len({hash_key(key) for key in keys}) == len(keys)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("n", [1, 2, 3, 1023, 1024, 1025, 5001])
def test_pair_i_is_entries_i_and_half_the_length_further(n: int) -> None:
    """By float64 from the cipher's own words; and whatever was there stays, with the noise
    on top.
    """
    numbers = torch.full((n,), 10.0)
    add_normals(hash_key(NAME), numbers, 0.5)
    out, half = numbers.numpy(), -(-n // 2)
    expected = np.empty(2 * half)
    for pair in range(half):
        group, place = divmod(pair, GROUP)
        word, lane = divmod(place, 64)
        block = (
            chacha(KEY, 64 * group + lane, 4)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("n", [1, 2, 1001, 5 * GROUP * TOGETHER + 7])
def test_the_twins_draw_the_same_numbers(n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernel = torch.randn(n, dtype=dtype)
    twin = kernel.clone()
    add_normals(hash_key(NAME), kernel, 3.0, 0.25)
    with kernels.disabled():
        add_normals(hash_key(NAME), twin, 3.0, 0.25)
    torch.testing.assert_close(kernel, twin, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_draws_the_same(
    threads: int, set_threads: Callable[[int], None]
) -> None:
    alone, shared = torch.zeros(2, 3 * GROUP * TOGETHER + 11)
    add_normals(hash_key(NAME), alone, 1.0)
    set_threads(threads)
    add_normals(hash_key(NAME), shared, 1.0)
    assert torch.equal(alone, shared)


@pytest.mark.parametrize(
    "numbers",
    [torch.zeros(4, dtype=torch.float64), torch.zeros(4, 4).T[:, 1:], torch.zeros(8)[::2]],
)
def test_noise_is_not_added_to_other_memory(numbers: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="32 bits that lie side by side"):
        add_normals(hash_key(NAME), numbers, 1.0)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("count", "unit"), [(0, 5), (1, 5), (99, 10), (100, 10), (101, 1)])
def test_parts_cover_everything_once_and_begin_at_multiples(
    threads: int, count: int, unit: int, set_threads: Callable[[int], None]
) -> None:
    done = np.zeros(count, dtype=int)
    starts = []

    def work(start: int, stop: int) -> None:
        starts.append(start)
        done[start:stop] += 1

    set_threads(threads)
    run_parallel(work, count, unit, min_parallel=20)
    assert (done == 1).all()
    assert all(start % unit == 0 for start in starts)
    assert len(starts) == (threads if count > 20 else 1)


def test_an_error_on_another_thread_is_raised_here(set_threads: Callable[[int], None]) -> None:
    def work(start: int, stop: int) -> None:
        if start:
            raise ZeroDivisionError

    set_threads(2)
    with pytest.raises(ZeroDivisionError):
        run_parallel(work, 100, 1, min_parallel=0)
