"""PhaseMNIST: digits with a partner image as imaginary part (Ziller et al. 2021, 5.1, A.2.1)."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from zdp_bench.data import Dataset, DatasetInfo, Examples, Fraction, Splits
from zdp_bench.data.files import digest, note_source
from zdp_bench.data.mnist import CLASSES, Mnist
from zdp_bench.data.stratified import stratified_split
from zdp_bench.errors import UserError, require
from zdp_bench.registry import register

Images = tuple[torch.Tensor, np.ndarray]  # pixels float32 [n, h, w] and labels [n]
# Training images of each digit in the official release: public numbers.
RELEASED = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)


@dataclass(frozen=True)
class Pairing:
    """Which training images become examples: `real[k]` + i·`partner[k]` is example k.

    Attributes:
        real, partner: indices of images [n], `real` in rising order.
        couple: a number that the two examples of one couple of images share [n], and no other
            example.
        left_out: how many images are in no example.
    """

    real: np.ndarray
    partner: np.ndarray
    couple: np.ndarray
    left_out: int

    @property
    def most_of_one(self) -> int:
        """The most examples that any one image is in, as real part or as partner."""
        return int(np.bincount(np.concatenate((self.real, self.partner))).max())


def couple_images(labels: np.ndarray, seed: int) -> Pairing:
    """Pair training images of label L with images of label 9 − L, each image once.

    Images a and b of a couple make two examples, a + i·b of label L and b + i·a of label 9 − L. So
    an image is in exactly two examples, the fewest there can be if every image is some example's
    real part. A couple shares them with no other image, so a federation can keep it at one node.
    Images beyond the rarer label's count are left out; the seed chooses them.

    Labels alone decide who is paired with whom, so labels and pairs count as PUBLIC: the ε of an
    image compares training sets with and without its two examples, all other pairs being the same.
    (To pair the images that are left anew would change hundreds of examples.) The paper draws each
    partner with replacement, for 60,000 examples: there an image may be in any number of them.

    Args:
        labels: [n]
    """
    rng = np.random.default_rng([seed, 0])
    partner = np.full(len(labels), -1)
    for label in range(CLASSES // 2):
        images = rng.permutation(np.flatnonzero(labels == label))
        others = rng.permutation(np.flatnonzero(labels == CLASSES - 1 - label))
        count = min(len(images), len(others))
        partner[images[:count]] = others[:count]
        partner[others[:count]] = images[:count]
    real = np.flatnonzero(partner >= 0)
    if not len(real):
        raise UserError(
            f"no training image of a label L has a partner of label {CLASSES - 1} - L; PhaseMNIST "
            "needs both."
        )
    return Pairing(
        real,
        partner[real],
        couple=np.minimum(real, partner[real]),
        left_out=len(labels) - len(real),
    )


def draw_partners(labels: np.ndarray, seed: int) -> np.ndarray:
    """Draw a partner of label 9 − L for each TEST image of label L, with replacement.

    This is the paper's rule. Nothing protects test images, so one may be many others' partner.

    Args:
        labels: [n]

    Returns:
        Indices of the partners [n].
    """
    rng = np.random.default_rng([seed, 1])
    chosen = np.empty(len(labels), dtype=np.int64)
    for label in range(CLASSES):
        images = np.flatnonzero(labels == label)
        pool = np.flatnonzero(labels == CLASSES - 1 - label)
        if len(images) and not len(pool):
            raise UserError(
                f"no test image of label {CLASSES - 1 - label} exists to pair with those of label "
                f"{label}."
            )
        if len(images):
            chosen[images] = rng.choice(pool, size=len(images), replace=True)
    return chosen


def pair(
    train: Images,
    test: Images,
    seed: int,
) -> tuple[Examples, Examples, Pairing]:
    """Make examples real + i·partner, labelled by the real part: complex64 [n, h, w].

    No test image is in a training example.
    """
    pixels, labels = train
    pairing = couple_images(labels, seed)
    training = Examples(
        torch.complex(pixels[pairing.real], pixels[pairing.partner]),
        torch.from_numpy(labels[pairing.real]),
        torch.from_numpy(pairing.couple),
    )
    pixels, labels = test
    partners = torch.from_numpy(draw_partners(labels, seed))
    testing = Examples(
        torch.complex(pixels, pixels[partners]),
        torch.from_numpy(labels),
    )
    return training, testing, pairing


def make_splits(
    train: Images,
    test: Images,
    seed: int,
    source: str,
    files: str,
) -> Splits:
    """Pair the images of both parts: see `couple_images` and `draw_partners`."""
    training, testing, pairing = pair(train, test, seed)
    total = len(pairing.real) + pairing.left_out
    return Splits(
        training,
        testing,
        input_shape=tuple(train[0].shape[1:]),
        outputs=CLASSES,
        provenance="derived",
        digest=digest(f"phase pairing v2:{seed}:{files}"),
        notes=f"{source}, paired by label with seed {seed} (labels and pairs are public; the paper "
        f"draws partners with replacement): a training image is in {pairing.most_of_one} "
        f"examples, {pairing.left_out:,} of {total:,} are in none",
        unit="image",
    )


@register("dataset", "phasemnist")
@dataclass(frozen=True, kw_only=True)
class PhaseMnist(Mnist):
    """PhaseMNIST from MNIST's idx files: 58,142 / 10,000 complex64 [28, 28].

    The authors' own pairing was never published, so `pairing_seed` draws a new one: 'derived'.
    """

    names_owners: ClassVar[bool] = True

    pairing_seed: int = 9

    def load(self, root: Path) -> Splits:
        images, labels, files, _ = self.read(root)
        source = "official MNIST" if self.check else "unchecked MNIST files"
        train, test = zip(images, labels, strict=True)
        return make_splits(train, test, self.pairing_seed, source, files)

    def released(self, root: Path) -> DatasetInfo | None:
        """As many of each label as the release has, paired."""
        mnist = super().released(root)
        if mnist is None:
            return None
        labels = np.repeat(np.arange(CLASSES), RELEASED)
        pairing = couple_images(labels, self.pairing_seed)
        return replace(
            mnist,
            train=len(pairing.real),
            dtype=torch.complex64,
            examples_per_patient=pairing.most_of_one,
            owners=len(np.unique(pairing.couple)),
        )


@register("dataset", "phase_digits")
@dataclass(frozen=True, kw_only=True)
class PhaseDigits(Dataset):
    """scikit-learn's 1,797 handwritten digits, paired as PhaseMNIST is: complex64 [8, 8].

    They need no download.
    """

    pairing_seed: int = 9
    test_share: Fraction = 0.2

    def load(self, root: Path) -> Splits:
        numbers = _read_digits()
        flat, labels = np.ascontiguousarray(numbers[:, :-1]), numbers[:, -1].astype(np.int64)
        pixels = torch.from_numpy((flat / 16.0).astype(np.float32)).view(-1, 8, 8)  # in [0, 1]
        files = hashlib.sha256(flat.tobytes() + labels.tobytes()).hexdigest()
        note_source(files)
        train, test = self.split(labels)
        return make_splits(
            (pixels[train], labels[train]),
            (pixels[test], labels[test]),
            self.pairing_seed,
            "scikit-learn's digits",
            f"{files}:{self.test_share}",
        )

    def split(self, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the digits to train and to test on, in equal shares of every label."""
        share, count = self.test_share, len(labels)
        fits = CLASSES <= math.ceil(share * count) <= count - CLASSES
        rule = f"must leave {CLASSES} or more digits on both sides"
        require(fits, "dataset.test_share", share, rule)
        return stratified_split(labels, share, self.pairing_seed)


def _read_digits() -> np.ndarray:
    """Return scikit-learn's digits [1797, 65]: the pixels, 0 to 16, and the label.

    Their file is read as `sklearn.datasets.load_digits` reads it, without importing scikit-learn,
    which takes a second.
    """
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
