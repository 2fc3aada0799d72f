"""CPSC 2018 twelve-lead ECGs as Fourier spectra of one lead (Ziller et al. 2021, 5.2 and A.2.2).

A.2.2 says the signal is "trimmed or padded to a length of 5000" and that numpy's FFT is used
"whereby the signal was pre-trimmed to length 512". That is `numpy.fft.fft(signal, n=512)`, which
crops its INPUT: only the first 512 samples (one second) are ever seen. "Channel 3" is read as the
third lead of the file, lead III.

A recording counts by its FIRST diagnosis, as the paper's 1,125 recordings do (918 and 207).

Nobody's recordings are linked in the release, so each is taken for a patient of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from sklearn.model_selection import train_test_split

from zdp_bench.data import Dataset, DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.bad_records import BadRecords, note_skipped, refuse_or_skip
from zdp_bench.data.files import earlier_name, sha256
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

# Recordings of each first diagnosis in the release (Liu et al. 2018).
RELEASED = dict(zip(DIAGNOSES, (918, 1098, 704, 207, 1695, 556, 672, 825, 202), strict=True))
RELEASE = frozenset(f"A{number:04d}" for number in range(1, 6878))  # its recordings' names
FOLDER = "CPSC2018"
Norm = Literal["backward", "ortho"]


@register("dataset", "cpsc2018")
@dataclass(frozen=True, kw_only=True)
class Cpsc2018(Dataset):
    """CPSC 2018: spectra complex64 [fft_length]; label 1 is `positive`, 0 is `negative`.

    Recordings whose first diagnosis is neither are left out.
    """

    positive: str = "LBBB"
    negative: str = "Normal"
    channel: int = 3
    length: int = 5000
    fft_length: int = 512
    fft_norm: Norm = "backward"
    test_share: float = 0.1
    split_seed: int = 0
    bad_records: BadRecords = "refuse"

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
        """No checksums were published: 'official' if the release's recordings, all, were read."""
        return self.load_folder(root / FOLDER)

    def load_folder(self, folder: Path, synthetic: bool = False) -> Splits:
        """Read and split the recordings of a folder."""
        inputs, targets, digest, names, skipped = [], [], hashlib.sha256(), set(), 0
        for path, one in read_all(folder, self.channel):
            if isinstance(one, BadRecording):
                refuse_or_skip(self.bad_records, f"{path}: {one}.")
                skipped += 1
                continue
            names.add(one.name)
            if (target := self.label(one)) is not None:
                inputs.append(self.transform(one.signal))
                targets.append(target)
                files = dict.fromkeys((path.with_suffix(".mat"), path))  # the header has units
                sums = ":".join(map(sha256, files))
                digest.update(f"{path.name}:{sums}:{target}".encode())
        train, test = self.split(folder, targets)
        what = (self.positive, self.negative, self.channel, self.length, self.fft_length)
        settings = (*what, self.fft_norm, self.test_share, self.split_seed)
        digest.update(repr(settings).encode())
        provenance: Provenance = "official" if names == RELEASE else "derived"
        notes = {"official": "", "derived": "an excerpt of the release: "}[provenance]
        if synthetic:
            provenance, notes = "synthetic", "generated beats: "
        x, y = torch.from_numpy(np.stack(inputs)), torch.tensor(targets)
        return Splits(
            Examples(x[train], y[train]),
            Examples(x[test], y[test]),
            input_shape=(self.fft_length,),
            outputs=1,
            provenance=provenance,
            digest=earlier_name(digest.hexdigest()),
            notes=f"{notes}{targets.count(0)} {self.negative}, {targets.count(1)} {self.positive}"
            + (f", {said}" if (said := note_skipped(skipped, 0)) else ""),
            unit="recording",
        )

    def info(self, root: Path) -> DatasetInfo:
        """Count by headers and REFERENCE.csv, or as in the release.

        Only a bad signal changes the counts; where those are skipped, signals are read.
        """
        folder = root / FOLDER
        if not list_recordings(folder):
            targets = [0] * RELEASED[self.negative] + [1] * RELEASED[self.positive]
            return self.describe(folder, targets, found=False)
        targets = []
        for path, one in read_all(folder, self.channel, self.bad_records == "skip"):
            if isinstance(one, BadRecording):
                refuse_or_skip(self.bad_records, f"{path}: {one}.")
            elif (target := self.label(one)) is not None:
                targets.append(target)
        return self.describe(folder, targets, found=True)

    def describe(self, folder: Path, targets: list[int], found: bool) -> DatasetInfo:
        train, test = self.split(folder, targets)
        return DatasetInfo(
            train=len(train),
            test=len(test),
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
        """Return 1 or 0; None for a recording whose first diagnosis is another."""
        return {self.negative: 0, self.positive: 1}.get(one.diagnosis)

    def transform(self, signal: np.ndarray) -> np.ndarray:
        """Trim or pad [samples] in mV to `length`, then transform: complex64 [fft_length]."""
        padded = np.zeros(self.length)
        padded[: min(self.length, len(signal))] = signal[: self.length]
        return np.fft.fft(padded, n=self.fft_length, norm=self.fft_norm).astype(np.complex64)

    def split(self, folder: Path, targets: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the recordings to train on and to test on, stratified and seeded.

        Raises:
            UserError: a part would lack one of the two diagnoses.
        """
        counts = [targets.count(0), targets.count(1)]
        if min(counts) < 2:
            raise UserError(
                f"{folder}: holds {counts[0]} recordings of {self.negative} and {counts[1]} of "
                f"{self.positive}; training and test part need one of each."
            )
        held = math.ceil(self.test_share * len(targets))  # as scikit-learn rounds
        if 2 <= held <= len(targets) - 2:
            train, test = train_test_split(
                np.arange(len(targets)),
                test_size=self.test_share,
                random_state=self.split_seed,
                stratify=targets,
            )
            if all(len({targets[index] for index in part}) == 2 for part in (train, test)):
                return train, test
        raise UserError(
            f"dataset.test_share={self.test_share}: of {counts[0]} recordings of {self.negative} "
            f"and {counts[1]} of {self.positive}, {held} to test on leave one part without one of "
            "the two."
        )
