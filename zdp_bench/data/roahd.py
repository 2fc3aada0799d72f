"""The ECGs of the R package roahd: one beat each of 100 people, half with left bundle branch block.

They stand in for CPSC 2018's recordings (Ziller et al. 2021, Table 2) where those are not to be
had, and are turned into spectra as those are. They are easier: a beat is registered and smoothed.
Each person has one recording; whole people are held out, as many of either diagnosis.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval

from zdp_bench.data import Dataset, DatasetInfo, Examples, Splits
from zdp_bench.data.cpsc2018 import DIAGNOSES, LEADS, Cpsc2018, Norm, read_wfdb
from zdp_bench.data.files import absent, digest, require_inside, sha256
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import expect, reading
from zdp_bench.registry import register

FOLDER = "roahd/CPSC2018/cinc2020_wfdb"
FOLDS = 10
PEOPLE = 50  # of either diagnosis in the package
CODES = {"RN": DIAGNOSES["Normal"], "RL": DIAGNOSES["LBBB"]}  # what names begin with


@register("dataset", "roahd")
@dataclass(frozen=True, kw_only=True)
class Roahd(Dataset):
    """roahd's ECGs: spectra complex64 [512]; label 1 is left bundle branch block, 0 is normal.

    Args:
        fold: which tenth of the people of either diagnosis is held out.
        low_bins: so many bins of every lead instead, complex64 [12, low_bins]: the lowest but that
            of the mean.
    """

    fold: Annotated[int, Interval(ge=0, lt=FOLDS)] = 0
    split_seed: int = 0
    channel: Annotated[int, Interval(ge=1, le=LEADS)] = 3
    fft_norm: Norm = "backward"
    low_bins: Annotated[int, Interval(ge=1, le=255)] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (LEADS, self.low_bins) if self.low_bins else (self.transform.fft_length,)

    @property
    def transform(self) -> Cpsc2018:
        return Cpsc2018(channel=self.channel, fft_norm=self.fft_norm)

    def load(self, root: Path) -> Splits:
        headers = list_recordings(root)
        x = torch.from_numpy(np.stack([self.spectra(path) for path in headers]))
        y, people = torch.tensor(_targets(headers)), torch.arange(len(headers))
        train, test = self.split(_targets(headers))
        sums = [sha256(file) for path in headers for file in (path, path.with_suffix(".mat"))]
        names = [path.stem for path in headers]
        later = (self.low_bins,) if self.low_bins else ()  # others keep their records' digest
        settings = (self.fold, self.split_seed, self.channel, self.fft_norm, *later)
        return Splits(
            Examples(x[train], y[train], people[train]),
            Examples(x[test], y[test], people[test]),
            input_shape=self.shape,
            outputs=1,
            unit="person",
            provenance="derived",
            digest=digest(f"{' '.join(names)}:{':'.join(sums)}:{settings!r}"),
            notes=f"a beat each of {len(y)} people, {int(y.sum())} with LBBB, registered and "
            f"smoothed; held out: fold {self.fold} of {FOLDS}, drawn by split_seed="
            f"{self.split_seed}",
            owner_names=names,
        )

    def released(self, root: Path) -> DatasetInfo | None:
        if (root / FOLDER).is_dir():
            return None
        train, test = self.split([0, 1] * PEOPLE)
        return DatasetInfo(
            train=len(train),
            test=len(test),
            input_shape=self.shape,
            outputs=1,
            unit="person",
            owners=len(train),
            dtype=torch.complex64,
        )

    def spectra(self, path: Path) -> np.ndarray:
        """Return a recording's spectrum, or the low bins of all leads."""
        leads = range(1, LEADS + 1) if self.low_bins else [self.channel]
        whole = np.stack([self.transform.transform(lead) for lead in read(path, leads).T])
        return whole[:, 1 : 1 + self.low_bins] if self.low_bins else whole[0]

    def split(self, targets: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the people to train and to test on."""
        draw, testing = np.random.default_rng(self.split_seed), list[int]()
        for label in (0, 1):
            people = draw.permutation(np.flatnonzero(np.array(targets) == label))
            testing += people[self.fold :: FOLDS].tolist()
            if not 0 < len(people[self.fold :: FOLDS]) < len(people):
                raise UserError(
                    f"dataset.fold={self.fold}: {len(people)} people of a diagnosis leave none "
                    "for training or for testing."
                )
        return np.setdiff1d(np.arange(len(targets)), testing), np.array(sorted(testing))


def list_recordings(root: Path) -> list[Path]:
    """List the headers by name, also of recordings that have only a signal."""
    folder = root / FOLDER
    every = folder.glob("*") if folder.is_dir() else ()
    stems = {path.stem for path in every if re.fullmatch(r"R[NL]\d{4}", path.stem)}
    if not stems:
        raise absent(folder / "R[NL]*.hea", "roahd")
    return [folder / f"{stem}.hea" for stem in sorted(stems)]


def _targets(headers: list[Path]) -> list[int]:
    return [int(path.stem.startswith("RL")) for path in headers]


def read(path: Path, channels: Sequence[int]) -> np.ndarray:
    """Read leads of a recording: float64 [samples, leads] in mV; its diagnosis is as named."""
    for file in (path, path.with_suffix(".mat")):
        require_inside(file, path.parent)
    found, leads = read_wfdb(path, channels)
    with reading(path):
        codes = CODES[path.stem[:2]]
        expect(len(found) == 1 and found[0] in codes, f"has diagnosis {found}, not {codes[0]}")
    return leads
