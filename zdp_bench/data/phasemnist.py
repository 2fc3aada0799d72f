"""PhaseMNIST: complex digits whose imaginary part is a partner image (Ziller et al. 2021, 5.1 and A.2.1)."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from zdp_bench.data import Outline, Records, Splits
from zdp_bench.data.files import card
from zdp_bench.data.mnist import CLASSES, Normalise, outlined, read, to_float
from zdp_bench.errors import require
from zdp_bench.registry import register

DIGITS = 1797  # in scikit-learn's set


def partners(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """For each image of label L the index of one with label 9 − L, uniformly with replacement: labels [n] -> indices [n]."""
    chosen = np.empty(len(labels), dtype=np.int64)
    for label in range(CLASSES):
        here = np.flatnonzero(labels == label)
        pool = np.flatnonzero(labels == CLASSES - 1 - label)
        if len(here) and not len(pool):
            raise ValueError(f"no image of label {CLASSES - 1 - label} to pair with label {label}")
        if len(here):
            chosen[here] = rng.choice(pool, size=len(here), replace=True)
    return chosen


def pair(images: torch.Tensor, labels: np.ndarray, seed: int, split: int) -> Records:
    """real + i·partner, labelled by the real part: float32 [n, h, w] -> complex64 [n, h, w].

    The partner comes from the same split, so no test image is ever trained on.
    """
    chosen = torch.from_numpy(partners(labels, np.random.default_rng([seed, split])))
    return Records(torch.complex(images, images[chosen]), torch.from_numpy(labels))


def _digest(files: str, seed: int) -> str:
    return hashlib.sha256(f"phase pairing v1:{seed}:{files}".encode()).hexdigest()


@register("dataset", "phasemnist")
def phasemnist(
    root: Path, *, pairing_seed: int = 9, normalise: Normalise = "standard", check: bool = True, mirror: str | None = None
) -> Splits:
    """PhaseMNIST from MNIST's idx files: 60,000 / 10,000 complex64 [28, 28].

    The authors' own pairing was never published, so ours is drawn anew from `pairing_seed`: provenance 'derived'.
    """
    train, test, files, _ = read(root, card("mnist"), check=check, mirror=mirror)
    training, testing = (
        pair(to_float(split.images, "mnist", normalise), split.labels, pairing_seed, n) for n, split in enumerate((train, test))
    )
    return Splits(
        training,
        testing,
        input_shape=tuple(train.images.shape[1:]),
        outputs=CLASSES,
        provenance="derived",
        digest=_digest(files, pairing_seed),
        notes=("official MNIST" if check else "unchecked MNIST files") + f", paired by the paper's rule with seed {pairing_seed}",
    )


@register("dataset", "phase_digits")
def phase_digits(root: Path, *, pairing_seed: int = 9, test_share: float = 0.2) -> Splits:
    """The embedded default: scikit-learn's 1,797 handwritten digits, paired like PhaseMNIST; complex64 [8, 8]. No download."""
    bunch = load_digits()
    pixels = torch.from_numpy((bunch.images / 16.0).astype(np.float32))  # [1797, 8, 8] in [0, 1]
    labels = bunch.target.astype(np.int64)
    _held(len(labels), test_share)
    train, test = train_test_split(np.arange(len(labels)), test_size=test_share, stratify=labels, random_state=pairing_seed)
    training, testing = (pair(pixels[part], labels[part], pairing_seed, n) for n, part in enumerate((train, test)))
    files = hashlib.sha256(bunch.data.tobytes() + bunch.target.tobytes()).hexdigest()
    return Splits(
        training,
        testing,
        input_shape=(8, 8),
        outputs=CLASSES,
        provenance="derived",
        digest=_digest(f"{files}:{test_share}", pairing_seed),
        notes=f"scikit-learn's digits, paired by PhaseMNIST's rule with seed {pairing_seed}",
    )


def _held(count: int, test_share: float) -> int:
    """How many of `count` digits are to test on.

    Raises:
        UserError: a class would be empty on one side.
    """
    held = math.ceil(test_share * count) if 0 < test_share < 1 else 0
    rule = f"must leave {CLASSES} digits or more to train and to test on; {held} of {count:,} are to test on"
    require(CLASSES <= held <= count - CLASSES, "dataset.test_share", test_share, rule)
    return held


@register("outline", "phasemnist")
def phasemnist_outline(root: Path, **_: object) -> Outline:
    """As many as MNIST's headers announce."""
    return outlined(root, card("mnist"), torch.complex64)


@register("outline", "phase_digits")
def phase_digits_outline(root: Path, *, test_share: float, **_: object) -> Outline:
    """The embedded 1,797."""
    held = _held(DIGITS, test_share)
    return Outline(DIGITS - held, held, (8, 8), CLASSES, torch.complex64)
