"""The ECGs of the R package roahd: one beat each of 100 people, half with left bundle branch block.

They replace the recordings of CPSC 2018 (Ziller et al. 2021, Table 2) if those are not available,
and are converted to spectra in the same way. The task is easier, because beats are registered and
smoothed. Each person has one recording; the test part has as many people with either diagnosis.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Interval

from zdp_bench.data import Dataset, DatasetInfo, Examples, Splits
from zdp_bench.data.cpsc2018 import DIAGNOSES, LEADS, Cpsc2018, FftNorm, read_wfdb
from zdp_bench.data.files import absent, digest, require_inside, sha256
from zdp_bench.data.owners import digest_files
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import expect, reading
from zdp_bench.registry import register

FOLDER = "roahd/CPSC2018/cinc2020_wfdb"
FOLDS = 10
PEOPLE = 50  # with each diagnosis
CODES = {
    "RN": DIAGNOSES["Normal"],
    "RL": DIAGNOSES["LBBB"],
}  # beginning of a name -> codes of its diagnosis


@register("dataset", "roahd")
@dataclass(frozen=True, kw_only=True)
class Roahd(Dataset):
    """Spectra of ECGs, complex64 [512]; label 1 is left bundle branch block, 0 is normal.

    Args:
        fold: index of the tenth of the people to test on.
        split_seed: seed that draws the folds.
        channel: lead to use, counted from 1.
        fft_norm: normalisation of `numpy.fft.fft`.
        low_bins: use this number of frequency bins of all leads instead, complex64 [12, low_bins]:
            the lowest ones, without that of the mean.
    """

    num_folds: ClassVar[int] = FOLDS

    fold: Annotated[int, Interval(ge=0, lt=FOLDS)] = 0
    split_seed: int = 0
    channel: Annotated[int, Interval(ge=1, le=LEADS)] = 3
    fft_norm: FftNorm = "backward"
    low_bins: Annotated[int, Interval(ge=1, le=255)] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (LEADS, self.low_bins) if self.low_bins else (self.transform.fft_length,)

    @property
    def transform(self) -> Cpsc2018:
        return Cpsc2018(channel=self.channel, fft_norm=self.fft_norm)

    def load(self, root: Path) -> Splits:
        headers = list_recordings(root)
        names = [path.stem for path in headers]
        targets = [int(name.startswith("RL")) for name in names]
        train, test = self.split(targets)
        x = torch.from_numpy(np.stack([self.spectra(path) for path in headers]))
        y = torch.tensor(targets)
        people = torch.arange(len(headers))
        signals = digest_files([path.with_suffix(".mat") for path in headers], names)
        checksums = []
        for path, signal in zip(headers, signals, strict=True):
            checksums += [sha256(path), signal]
        settings = [self.fold, self.split_seed, self.channel, self.fft_norm]
        if self.low_bins:  # otherwise, the digest of older records stays the same
            settings.append(self.low_bins)
        contents = f"{' '.join(names)}:{':'.join(checksums)}:{tuple(settings)!r}"
        return Splits(
            Examples(x[train], y[train], people[train]),
            Examples(x[test], y[test], people[test]),
            input_shape=self.shape,
            outputs=1,
            unit="person",
            provenance="derived",
            digest=digest(contents),
            notes=f"a beat each of {len(y)} people, healthy or with LBBB, registered and "
            f"smoothed; held out: fold {self.fold} of {FOLDS}, drawn by split_seed="
            f"{self.split_seed}",
            owner_names=names,
        )

    def published_info(self, root: Path) -> DatasetInfo | None:
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
        """Return the spectrum of a recording's lead, or the low bins of all leads."""
        if self.low_bins is None:
            (lead,) = read(path, [self.channel]).T
            return self.transform.transform(lead)
        leads = read(path, range(1, LEADS + 1)).T
        spectra = np.stack([self.transform.transform(lead) for lead in leads])
        return spectra[:, 1 : 1 + self.low_bins]

    def split(self, targets: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the people to train on and of those to test on."""
        random = np.random.default_rng(self.split_seed)
        testing = list[int]()
        for label in (0, 1):
            people = random.permutation(np.flatnonzero(np.array(targets) == label))
            held = people[self.fold :: FOLDS]
            testing += held.tolist()
            if not 0 < len(held) < len(people):
                raise UserError(
                    f"dataset.fold={self.fold}: {len(people)} people of a diagnosis leave none "
                    "for training or for testing."
                )
        return np.setdiff1d(np.arange(len(targets)), testing), np.array(sorted(testing))


def list_recordings(root: Path) -> list[Path]:
    """List the paths of headers, sorted by name, even if a recording has only a signal."""
    folder = root / FOLDER
    stems = {path.stem for path in folder.glob("*") if re.fullmatch(r"R[NL]\d{4}", path.stem)}
    if not stems:
        raise absent(folder / "R[NL]*.hea", "roahd")
    return [folder / f"{stem}.hea" for stem in sorted(stems)]


def read(path: Path, channels: Sequence[int]) -> np.ndarray:
    """Read leads of a recording, float64 [samples, leads] in mV.

    Its diagnosis must be the one that its name states.
    """
    for file in (path, path.with_suffix(".mat")):
        require_inside(file, path.parent)
    diagnoses, leads = read_wfdb(path, channels)
    codes = CODES[path.stem[:2]]
    with reading(path):
        is_as_named = len(diagnoses) == 1 and diagnoses[0] in codes
        expect(is_as_named, f"has diagnosis {diagnoses}, not {codes[0]}")
    return leads
