"""PhaseMNIST: digits with another digit as imaginary part (Ziller et al. 2021, 5.1, A.2.1)."""

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
# Number of training images of each digit in the official release, which is public.
RELEASED = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)


@dataclass(frozen=True)
class Pairing:
    """The training images of each example: example k is image real[k] + i · image partner[k].

    Attributes:
        real, partner: indices of images [n]; `real` is sorted.
        couple: number of each example's couple of images [n]. The two examples of a couple share
            it.
        left_out: number of images that are in no example.
    """

    real: np.ndarray
    partner: np.ndarray
    couple: np.ndarray
    left_out: int

    @property
    def max_examples_per_image(self) -> int:
        """The maximum number of examples that an image is in, as real part or as partner."""
        return int(np.bincount(np.concatenate((self.real, self.partner))).max())


def couple_images(labels: np.ndarray, seed: int) -> Pairing:
    """Pair each training image of label L with one image of label 9 − L.

    A couple of images a and b gives two examples: a + i·b with label L, and b + i·a with label
    9 − L. Each image is therefore in exactly two examples, the fewest possible if every image is
    the real part of one. No other image is in these two, so a federation can keep a couple at one
    node. If a label has more images than its partner label, the seed chooses which are left out.

    Pairs are determined by the labels, so labels and pairs are assumed to be PUBLIC: the ε of an
    image compares training sets with and without its two examples, and all other pairs stay the
    same. (Pairing the remaining images again would change hundreds of examples.) The paper draws
    each partner with replacement, for 60,000 examples, so that an image may be in any number of
    them.

    Args:
        labels: label of each image, [n].
        seed: seed of the pairs.
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

    This is the paper's rule. Test images are not protected, so one may be in many examples.

    Args:
        labels: label of each image, [n].
        seed: seed of the draw.

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
    """Return training and test examples, complex64 [n, h, w], with the label of the real part.

    Parts are paired separately, so no test image is in a training example.
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
    """Pair the images of both parts; see `couple_images` and `draw_partners`.

    Args:
        train, test: the images of each part.
        seed: seed of the pairs.
        source: where the images come from, for the notes.
        files: digest of the images.
    """
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
        f"draws partners with replacement): a training image is in "
        f"{pairing.max_examples_per_image} examples, {pairing.left_out:,} of {total:,} are in none",
        unit="image",
    )


@register("dataset", "phasemnist")
@dataclass(frozen=True, kw_only=True)
class PhaseMnist(Mnist):
    """PhaseMNIST from MNIST's idx files, complex64 [28, 28]: 58,142 to train, 10,000 to test.

    The authors did not publish their pairs, so new ones are drawn and the data are 'derived'.

    Args:
        pairing_seed: seed of the pairs.
    """

    names_owners: ClassVar[bool] = True

    pairing_seed: int = 9

    def load(self, root: Path) -> Splits:
        images, labels, files, _ = self.read(root)
        source = "official MNIST" if self.check else "unchecked MNIST files"
        train, test = zip(images, labels, strict=True)
        return make_splits(train, test, self.pairing_seed, source, files)

    def published_info(self, root: Path) -> DatasetInfo | None:
        """Describe the pairs of the release's images."""
        mnist = super().published_info(root)
        if mnist is None:
            return None
        labels = np.repeat(np.arange(CLASSES), RELEASED)
        pairing = couple_images(labels, self.pairing_seed)
        return replace(
            mnist,
            train=len(pairing.real),
            dtype=torch.complex64,
            examples_per_patient=pairing.max_examples_per_image,
            owners=len(np.unique(pairing.couple)),
        )


@register("dataset", "phase_digits")
@dataclass(frozen=True, kw_only=True)
class PhaseDigits(Dataset):
    """scikit-learn's 1,797 handwritten digits, paired like PhaseMNIST, complex64 [8, 8].

    They need no download.

    Args:
        pairing_seed: seed of the parts and of the pairs.
        test_share: fraction of the digits to test on.
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
        """Draw the indices of the training and the test digits, stratified by label."""
        count = len(labels)
        num_test = math.ceil(self.test_share * count)
        fits = CLASSES <= num_test <= count - CLASSES
        rule = f"must leave {CLASSES} or more digits in both parts"
        require(fits, "dataset.test_share", self.test_share, rule)
        return stratified_split(labels, self.test_share, self.pairing_seed)


def _read_digits() -> np.ndarray:
    """Return scikit-learn's digits [1797, 65]: the pixels, 0 to 16, and the label.

    The file is read as by `sklearn.datasets.load_digits`, but without importing scikit-learn, which
    takes a second.
    """
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
