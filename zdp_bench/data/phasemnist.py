"""PhaseMNIST: complex digits whose imaginary part is a partner image (Ziller et al. 2021, 5.1 and A.2.1)."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from zdp_bench.data import DatasetInfo, Examples, Splits
from zdp_bench.data.files import card
from zdp_bench.data.formats.idx import read_idx
from zdp_bench.data.mnist import CLASSES, Normalise, outlined, read, to_float
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
        couple: a number that the two examples of one couple of images share [n], and no other example.
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
    """Pair training images of label L off with images of label 9 − L, each image once: labels [n] -> the pairing.

    Images a and b of a couple make two examples, a + i·b of label L and b + i·a of label 9 − L. So an image is in exactly two
    examples, the fewest there can be where every image is some example's real part, and a couple shares them with no other
    image: a federation can keep it at one node. Images beyond the rarer label's count are left out; the seed chooses them.

    Raises:
        UserError: no image of any label has a partner.
    """
    rng = np.random.default_rng([seed, 0])
    partner = np.full(len(labels), -1)
    for label in range(CLASSES // 2):
        here, there = (
            rng.permutation(np.flatnonzero(labels == one)) for one in (label, CLASSES - 1 - label)
        )
        count = min(len(here), len(there))
        partner[here[:count]], partner[there[:count]] = there[:count], here[:count]
    real = np.flatnonzero(partner >= 0)
    if not len(real):
        raise UserError(
            f"no training image of a label L has a partner of label {CLASSES - 1} - L; PhaseMNIST needs both."
        )
    return Pairing(real, partner[real], np.minimum(real, partner[real]), len(labels) - len(real))


def draw_partners(labels: np.ndarray, seed: int) -> np.ndarray:
    """For each TEST image of label L the index of one with label 9 − L, uniformly with replacement: labels [n] -> indices [n].

    This is the paper's rule. Nothing protects test images, so one may be many others' partner.

    Raises:
        UserError: a label has images and its partner has none.
    """
    rng = np.random.default_rng([seed, 1])
    chosen = np.empty(len(labels), dtype=np.int64)
    for label in range(CLASSES):
        here = np.flatnonzero(labels == label)
        pool = np.flatnonzero(labels == CLASSES - 1 - label)
        if len(here) and not len(pool):
            raise UserError(
                f"no test image of label {CLASSES - 1 - label} is there to pair with those of label {label}."
            )
        if len(here):
            chosen[here] = rng.choice(pool, size=len(here), replace=True)
    return chosen


def pair(train: Images, test: Images, seed: int) -> tuple[Examples, Examples, Pairing]:
    """Examples real + i·partner, labelled by the real part: complex64 [n, h, w]. No test image is in a training example."""
    (pixels, labels), (test_pixels, test_labels) = train, test
    made = couple_images(labels, seed)
    examples = torch.complex(pixels[made.real], pixels[made.partner])
    training = Examples(
        examples, torch.from_numpy(labels[made.real]), torch.from_numpy(made.couple)
    )
    partners = torch.from_numpy(draw_partners(test_labels, seed))
    return (
        training,
        Examples(torch.complex(test_pixels, test_pixels[partners]), torch.from_numpy(test_labels)),
        made,
    )


def _describe(source: str, seed: int, made: Pairing) -> str:
    """What a reader of a number must know of the pairing behind it."""
    total = len(made.real) + made.left_out
    return (
        f"{source}, paired by the paper's rule with seed {seed}: a training image is in {made.most_of_one} examples, "
        f"{made.left_out:,} of {total:,} are in none"
    )


def _digest(files: str, seed: int) -> str:
    return hashlib.sha256(f"phase pairing v2:{seed}:{files}".encode()).hexdigest()


@register("dataset", "phasemnist")
def phasemnist(
    root: Path,
    *,
    pairing_seed: int = 9,
    normalise: Normalise = "standard",
    check: bool = True,
    mirror: str | None = None,
) -> Splits:
    """PhaseMNIST from MNIST's idx files: 58,142 / 10,000 complex64 [28, 28].

    The authors' own pairing was never published, so ours is drawn anew from `pairing_seed`: provenance 'derived'.
    """
    train, test, files, _ = read(root, card("mnist"), check=check, mirror=mirror)
    images, test_images = (
        (to_float(split.images, "mnist", normalise), split.labels) for split in (train, test)
    )
    training, testing, made = pair(images, test_images, pairing_seed)
    return Splits(
        training,
        testing,
        input_shape=tuple(train.images.shape[1:]),
        outputs=CLASSES,
        provenance="derived",
        digest=_digest(files, pairing_seed),
        notes=_describe("official MNIST" if check else "unchecked MNIST files", pairing_seed, made),
        examples_per_patient=made.most_of_one,
        unit="image",
    )


@register("dataset", "phase_digits")
def phase_digits(root: Path, *, pairing_seed: int = 9, test_share: float = 0.2) -> Splits:
    """The embedded default: scikit-learn's 1,797 handwritten digits, paired like PhaseMNIST; complex64 [8, 8]. No download."""
    bunch = load_digits()
    pixels = torch.from_numpy((bunch.images / 16.0).astype(np.float32))  # [1797, 8, 8] in [0, 1]
    labels = bunch.target.astype(np.int64)
    train, test = _split(labels, test_share, pairing_seed)
    training, testing, made = pair(
        (pixels[train], labels[train]), (pixels[test], labels[test]), pairing_seed
    )
    files = hashlib.sha256(bunch.data.tobytes() + bunch.target.tobytes()).hexdigest()
    return Splits(
        training,
        testing,
        input_shape=(8, 8),
        outputs=CLASSES,
        provenance="derived",
        digest=_digest(f"{files}:{test_share}", pairing_seed),
        notes=_describe("scikit-learn's digits", pairing_seed, made),
        examples_per_patient=made.most_of_one,
        unit="image",
    )


def _split(labels: np.ndarray, test_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the digits to train and to test on, in equal shares of every label.

    Raises:
        UserError: a class would be empty on one side.
    """
    count = len(labels)
    held = math.ceil(test_share * count) if 0 < test_share < 1 else 0
    rule = f"must leave {CLASSES} digits or more to train and to test on; {held} of {count:,} are to test on"
    require(CLASSES <= held <= count - CLASSES, "dataset.test_share", test_share, rule)
    train, test = train_test_split(
        np.arange(count), test_size=test_share, stratify=labels, random_state=seed
    )
    return train, test


@register("outline", "phasemnist")
def phasemnist_outline(root: Path, *, pairing_seed: int, **_: object) -> DatasetInfo:
    """What the labels leave after pairing: the files' own labels, or the release's counts where they are not there."""
    mnist = outlined(root, card("mnist"), torch.complex64)
    labels = np.repeat(np.arange(CLASSES), RELEASED)
    if mnist.found:
        labels = read_idx(root / card("mnist").files[1].path, dims=1)
    return _count_pairs(mnist, couple_images(labels, pairing_seed))


@register("outline", "phase_digits")
def phase_digits_outline(root: Path, *, pairing_seed: int, test_share: float) -> DatasetInfo:
    """What the bundled labels leave after the split and the pairing."""
    labels = load_digits().target
    train, test = _split(labels, test_share, pairing_seed)
    whole = DatasetInfo(len(train), len(test), (8, 8), CLASSES, torch.complex64, unit="image")
    return _count_pairs(whole, couple_images(labels[train], pairing_seed))


def _count_pairs(images: DatasetInfo, made: Pairing) -> DatasetInfo:
    """Turn the outline of images into that of the examples which `made` makes of them."""
    return replace(images, train=len(made.real), examples_per_patient=made.most_of_one)
