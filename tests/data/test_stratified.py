"""The split by classes is scikit-learn's."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from zdp_bench.data.phasemnist import _read_digits
from zdp_bench.data.stratified import stratified_split


@given(
    counts=st.lists(st.integers(2, 40), min_size=2, max_size=12),
    share=st.floats(0.05, 0.9),
    seed=st.integers(0, 2**31),
)
def test_the_split_is_that_of_scikit_learn(counts: list[int], share: float, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)) * 3, counts))
    tested = min(max(math.ceil(share * len(labels)), len(counts)), len(labels) - len(counts))
    share = (tested - 0.5) / len(labels)  # rounded up
    ours = stratified_split(labels, share, seed)
    theirs = train_test_split(
        np.arange(len(labels)), test_size=share, stratify=labels, random_state=seed
    )
    for our_part, their_part in zip(ours, theirs, strict=True):
        assert our_part.tolist() == their_part.tolist()


def test_the_digits_are_those_of_scikit_learn() -> None:
    digits, numbers = load_digits(), _read_digits()
    assert np.array_equal(numbers[:, :-1], digits.data)
    assert np.array_equal(numbers[:, -1], digits.target)
