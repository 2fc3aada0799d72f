"""MNIST and PhaseMNIST: an image is in two training examples or in none, and labels add up to 9."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from zdp_bench.data import Splits
from zdp_bench.data.mnist import Mnist
from zdp_bench.data.phasemnist import (
    RELEASED,
    PhaseDigits,
    PhaseMnist,
    couple_images,
    draw_partners,
    pair,
)
from zdp_bench.errors import UserError


def count_by_pixels(splits: Splits) -> Counter[bytes]:
    """How many training examples each image is in, an image told by its pixels."""
    examples = splits.train.batch(torch.arange(len(splits.train)))[0]
    images = torch.cat([examples.real, examples.imag])
    return Counter(image.numpy().tobytes() for image in images)


@given(
    labels=arrays(np.int64, st.integers(0, 60), elements=st.integers(0, 9)),
    seed=st.integers(0, 2**53),
)
def test_an_image_is_in_two_examples_or_in_none(labels: np.ndarray, seed: int) -> None:
    counts = np.bincount(labels, minlength=10)
    expected = 2 * np.minimum(counts, counts[::-1])[:5].sum()
    if not expected:
        with pytest.raises(UserError, match="has a partner"):
            couple_images(labels, seed)
        return
    made = couple_images(labels, seed)
    assert len(made.real) == expected == len(labels) - made.left_out
    assert (labels[made.real] + labels[made.partner] == 9).all()
    uses = np.bincount(np.concatenate((made.real, made.partner)))
    assert (uses % 2 == 0).all()
    assert sorted(made.real) == sorted(made.partner) == sorted(set(made.real))
    assert made.max_examples_per_image == 2
    # A couple's two examples share their images with no other.
    assert (np.bincount(made.couple)[made.couple] == 2).all()
    for couple in np.unique(made.couple):
        assert len({*made.real[made.couple == couple], *made.partner[made.couple == couple]}) == 2


@given(counts=st.lists(st.integers(1, 9), min_size=10, max_size=10), seed=st.integers(0, 1000))
def test_examples_hold_the_images_they_say(counts: list[int], seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(10), counts))
    # an image's only pixel is its index
    pixels = torch.arange(len(labels), dtype=torch.float32).view(-1, 1, 1)
    train, test, made = pair((pixels, labels), (pixels, labels), seed)
    for examples in (train, test):
        real, partner = examples.inputs.real.flatten().long(), examples.inputs.imag.flatten().long()
        assert (labels[real] == examples.targets.numpy()).all()
        assert (labels[partner] == 9 - examples.targets.numpy()).all()
    # no test image is left out
    assert test.inputs.real.flatten().tolist() == list(range(len(labels)))
    assert made.left_out == len(labels) - len(train)
    used = Counter(train.inputs.real.flatten().tolist() + train.inputs.imag.flatten().tolist())
    assert set(used.values()) == {2}


def test_an_image_less_takes_its_two_examples_and_no_other() -> None:
    """What the ε of an image compares: labels and pairs stay, and the sum moves by 2 C at most."""
    labels = np.random.default_rng(0).integers(0, 10, 120)
    images = torch.rand(120, 3, 3, generator=torch.Generator().manual_seed(0)), labels
    whole, _, made = pair(images, images, 9)
    share = whole.inputs / torch.linalg.vector_norm(whole.inputs, dim=(1, 2), keepdim=True)
    for image in range(120):
        blank = images[0].index_fill(0, torch.tensor([image]), 0.0)
        changed, _, again = pair((blank, labels), images, 9)
        moved = (changed.inputs != whole.inputs).flatten(1).any(1)
        assert np.array_equal(again.couple, made.couple)
        assert int(moved.sum()) == 2 * int(image in made.real)
        assert len(made.couple[moved.numpy()]) == 0 or len({*made.couple[moved.numpy()]}) == 1
        assert torch.linalg.vector_norm(share[moved].sum(0)) <= 2 + 1e-6


def test_the_seed_draws_couples_and_who_is_left_out() -> None:
    labels = np.repeat([0, 9], [20, 10])
    drawn = [couple_images(labels, seed) for seed in range(400)]
    assert (drawn[3].partner == couple_images(labels, 3).partner).all()
    kept = sum(np.bincount(made.real, minlength=30) for made in drawn)
    assert (kept[20:] == 400).all()
    assert (np.abs(kept[:20] - 200) < 6 * 10).all()  # binomial: 400 draws of a half
    couples = sum(np.bincount(made.partner[made.real == 25], minlength=30) for made in drawn)
    assert (np.abs(couples[:20] - 20) < 6 * math.sqrt(19)).all()


def test_test_partners_are_uniform_with_replacement() -> None:
    labels = np.repeat(np.arange(10), 100)
    drawn = np.stack([draw_partners(labels, seed) for seed in range(200)])
    assert (labels[drawn] == 9 - labels).all()
    # each partner expected 200 times
    counts = np.bincount(drawn[:, labels == 3].ravel(), minlength=1000)[labels == 6]
    assert abs(counts.mean() - 200) < 1e-9
    assert (np.abs(counts - 200) < 6 * np.sqrt(200)).all()
    with pytest.raises(UserError, match="no test image of label 9"):
        draw_partners(np.zeros(3, dtype=np.int64), 0)


def test_the_digits_are_in_two_examples_each_by_their_pixels(tmp_path: Path) -> None:
    splits = PhaseDigits().load(tmp_path)
    assert (len(splits.train), len(splits.test)) == (1426, 360)
    assert (splits.input_shape, splits.outputs) == ((8, 8), 10)
    assert splits.train.inputs.dtype == torch.complex64
    assert set(count_by_pixels(splits).values()) == {2}
    assert (splits.examples_per_patient, splits.unit) == (2, "image")
    assert "a training image is in 2 examples, 11 of 1,437 are in none" in splits.notes


@pytest.mark.real_data
def test_official_mnist_is_what_was_released(data_root: Path) -> None:
    splits = Mnist().load(data_root)
    assert (len(splits.train), len(splits.test), splits.provenance) == (60_000, 10_000, "official")
    assert splits.train.inputs.shape == (60_000, 28, 28)
    # standardised by the published constants
    assert abs(float(splits.train.inputs.mean())) < 1e-3
    assert abs(float(splits.train.inputs.std()) - 1) < 1e-3
    assert torch.bincount(splits.train.targets).tolist() == list(RELEASED)


@pytest.mark.slow
@pytest.mark.real_data
def test_phasemnist_pairs_every_image_with_the_complement(data_root: Path) -> None:
    splits = PhaseMnist(normalise="unit").load(data_root)
    plain = Mnist(normalise="unit").load(data_root)
    assert splits.provenance == "derived"
    assert (len(splits.train), len(splits.test)) == (58_142, 10_000)
    assert "1,858 of 60,000 are in none" in splits.notes
    assert set(count_by_pixels(splits).values()) == {2}
    assert torch.equal(splits.test.inputs.real, plain.test.inputs)
