"""CPSC 2018 twelve-lead ECGs as Fourier spectra of one lead (Ziller et al. 2021, 5.2 and A.2.2).

A.2.2 says the signal is "trimmed or padded to a length of 5000" and that numpy's FFT is used
"whereby the signal was pre-trimmed to length 512". That is `numpy.fft.fft(signal, n=512)`, which
crops its INPUT: only the first 512 samples (one second) are ever seen. "Channel 3" is read as the
third lead of the file, lead III.

Nobody's recordings are linked in the release, so each is taken for a patient of its own.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from sklearn.model_selection import train_test_split

from zdp_bench.data import Dataset, DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.files import sha256
from zdp_bench.data.formats.ecg import (
    DIAGNOSES,
    LEADS,
    LONGEST,
    BadRecording,
    Recording,
    list_recordings,
    read_all,
)
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.registry import register

log = logging.getLogger(__name__)

# Recordings of each diagnosis in the release (Liu et al. 2018).
RELEASED = dict(zip(DIAGNOSES, (918, 1098, 704, 207, 1695, 556, 672, 825, 202), strict=True))
FOLDER = "CPSC2018"
Norm = Literal["backward", "ortho"]


@register("dataset", "cpsc2018")
@dataclass(frozen=True, kw_only=True)
class Cpsc2018(Dataset):
    """CPSC 2018: spectra complex64 [fft_length]; label 1 is `positive`, 0 is `negative`.

    Recordings that carry both diagnoses or neither are left out.
    """

    positive: str = "LBBB"
    negative: str = "Normal"
    channel: int = 3
    length: int = 5000
    fft_length: int = 512
    fft_norm: Norm = "backward"
    test_share: float = 0.1
    split_seed: int = 0
    bad_records: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        for key in ("positive", "negative"):
            if getattr(self, key) not in DIAGNOSES:
                raise unknown(f"dataset.{key}", getattr(self, key), DIAGNOSES)
        rule = "must be another diagnosis than dataset.positive"
        require(self.positive != self.negative, "dataset.negative", self.negative, rule)
        rule = f"must lie between 1 and {LEADS}"
        require(1 <= self.channel <= LEADS, "dataset.channel", self.channel, rule)
        for key in ("length", "fft_length"):
            samples, rule = getattr(self, key), f"must lie between 1 and {LONGEST:,} samples"
            require(1 <= samples <= LONGEST, f"dataset.{key}", samples, rule)
        rule = "must lie between 0 and 1, and be neither"
        require(0 < self.test_share < 1, "dataset.test_share", self.test_share, rule)

    def load(self, root: Path) -> Splits:
        """No checksums were published: 'derived' unless all 6,877 recordings are there."""
        folder = root / FOLDER
        if sum(1 for _ in folder.rglob("A*.mat")) >= 6877:
            return self.load_folder(folder, "official", "")
        return self.load_folder(folder, "derived", "an excerpt of the release: ")

    def load_folder(self, folder: Path, provenance: Provenance, notes: str) -> Splits:
        """Read and split the recordings of a folder."""
        inputs, targets, digest, skipped = [], [], hashlib.sha256(), 0
        for path, one in read_all(folder, self.channel):
            if isinstance(one, BadRecording):
                self.skip(path, one)
                skipped += 1
            elif (target := self.label(one)) is not None:
                inputs.append(self.transform(one.signal))
                targets.append(target)
                digest.update(f"{path.name}:{sha256(path.with_suffix('.mat'))}:{target}".encode())
        counts = [targets.count(0), targets.count(1)]
        left, _ = self.count_parts(folder, counts)
        what = (self.positive, self.negative, self.channel, self.length, self.fft_length)
        settings = (*what, self.fft_norm, self.test_share, self.split_seed)
        digest.update(repr(settings).encode())
        enough = min(counts) >= 2 and round(self.test_share * len(targets)) >= 2 <= left
        train, test = train_test_split(
            np.arange(len(targets)),
            test_size=self.test_share,
            random_state=self.split_seed,
            stratify=targets if enough else None,
        )
        x, y = torch.from_numpy(np.stack(inputs)), torch.tensor(targets)
        return Splits(
            Examples(x[train], y[train]),
            Examples(x[test], y[test]),
            input_shape=(self.fft_length,),
            outputs=1,
            provenance=provenance,
            digest=digest.hexdigest(),
            notes=f"{notes}{counts[0]} {self.negative}, {counts[1]} {self.positive}"
            + (f", {skipped} unusable skipped" if skipped else ""),
            unit="recording",
        )

    def info(self, root: Path) -> DatasetInfo:
        """Count by headers and REFERENCE.csv, or as in the release.

        Only a bad signal changes the counts; where those are skipped, signals are read.
        """
        folder = root / FOLDER
        counts = [RELEASED[self.negative], RELEASED[self.positive]]
        if found := bool(list_recordings(folder)[1]):
            counts = [0, 0]
            for path, one in read_all(folder, self.channel, self.bad_records == "skip"):
                if isinstance(one, BadRecording):
                    self.skip(path, one)
                elif (target := self.label(one)) is not None:
                    counts[target] += 1
        return self.describe(folder, counts, found)

    def describe(self, folder: Path, counts: list[int], found: bool) -> DatasetInfo:
        train, test = self.count_parts(folder, counts)
        return DatasetInfo(
            train=train,
            test=test,
            input_shape=(self.fft_length,),
            outputs=1,
            dtype=torch.complex64,
            unit="recording",
            found=found,
        )

    def check_files(self, root: Path) -> Iterator[tuple[Path, str]]:
        """Read every recording."""
        for path, one in read_all(root / FOLDER, self.channel):
            yield path, f"{path}: {one}." if isinstance(one, BadRecording) else ""

    def label(self, one: Recording) -> int | None:
        """Return 1 or 0; None for a recording that carries both diagnoses or neither."""
        positive, negative = (name in one.diagnoses for name in (self.positive, self.negative))
        return int(positive) if positive != negative else None

    def transform(self, signal: np.ndarray) -> np.ndarray:
        """Trim or pad [samples] in mV to `length`, then transform: complex64 [fft_length]."""
        padded = np.zeros(self.length)
        padded[: min(self.length, len(signal))] = signal[: self.length]
        return np.fft.fft(padded, n=self.fft_length, norm=self.fft_norm).astype(np.complex64)

    def skip(self, path: Path, why: BadRecording) -> None:
        """Warn of a recording that cannot be used.

        Raises:
            UserError: `bad_records` is 'refuse'.
        """
        if self.bad_records == "refuse":
            raise UserError(f"{path}: {why}. Remove it, or set dataset.bad_records=skip.")
        log.warning("%s: %s; skipped", path, why)

    def count_parts(self, folder: Path, counts: list[int]) -> tuple[int, int]:
        """Return how many recordings are to train and to test on, rounded as scikit-learn does.

        Args:
            counts: of `negative` and of `positive`.

        Raises:
            UserError: there are too few, or the share leaves none on one side.
        """
        if (both := sum(counts)) < 2:
            raise UserError(
                f"{folder}: holds {counts[0]} recordings of {self.negative} and {counts[1]} of "
                f"{self.positive}; a split needs at least two."
            )
        held = math.ceil(self.test_share * both)
        rule = f"leaves none of {both} recordings to train on"
        require(held < both, "dataset.test_share", self.test_share, rule)
        return both - held, held
