"""CPSC 2018 twelve-lead ECGs as Fourier spectra of one lead (Ziller et al. 2021, 5.2 and A.2.2).

Appendix A.2.2 says that the signal is "trimmed or padded to a length of 5000" and that NumPy's FFT
is used, "whereby the signal was pre-trimmed to length 512". This is `numpy.fft.fft(signal, n=512)`,
which crops its INPUT, so only the first 512 samples (one second) have any effect. "Channel 3" is
taken to be the third lead of the file, lead III.

`CPSC2018/cinc2020_wfdb/` contains the recordings as distributed by the PhysioNet/Computing in
Cardiology Challenge 2020, in WFDB format: a header that states leads, rate and diagnoses, and the
signal in a .mat file beside it. (The MATLAB files of CPSC 2018 itself are not read.)

The class of a recording is its FIRST diagnosis. This gives the paper's 1,125 recordings: 918 Normal
and 207 LBBB.

The release does not say which recordings are of the same patient, so ε is per recording.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval

from zdp_bench.data import Dataset, DatasetInfo, Examples, Fraction, Splits
from zdp_bench.data.files import (
    BadExamples,
    absent,
    find_visible,
    note_skipped,
    read_each,
    require_inside,
    sha256,
)
from zdp_bench.data.owners import warn_of_shared_files
from zdp_bench.data.signals import find_channels, open_record, read_leads
from zdp_bench.data.stratified import stratified_split
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.foreign_files import expect, reading
from zdp_bench.registry import register

FOLDER = "CPSC2018"
FftNorm = Literal["backward", "ortho"]
RATE = 500  # Hz
# The leads in the order of the release, which `channel` counts.
LEAD_NAMES = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
LEADS = len(LEAD_NAMES)
MAX_SAMPLES = 200 * RATE  # the longest released recording lasts 144 s
Samples = Annotated[int, Interval(ge=1, le=MAX_SAMPLES)]
# The diagnoses of CPSC 2018, with their SNOMED CT codes.
DIAGNOSES: dict[str, tuple[str, ...]] = {
    "Normal": ("426783006",),
    "AF": ("164889003",),
    "I-AVB": ("270492004",),
    "LBBB": ("164909002", "733534002"),
    "RBBB": ("59118001", "713427006"),
    "PAC": ("284470004",),
    "PVC": ("164884008", "427172004"),
    "STD": ("429622005",),
    "STE": ("164931005",),
}
# Number of recordings in the release with each first diagnosis (Liu et al. 2018).
RELEASED_COUNTS = {
    "Normal": 918,
    "AF": 1098,
    "I-AVB": 704,
    "LBBB": 207,
    "RBBB": 1695,
    "PAC": 556,
    "PVC": 672,
    "STD": 825,
    "STE": 202,
}
RELEASED_NAMES = frozenset(f"A{number:04d}" for number in range(1, 6878))
SINUS_RHYTHM = "426783006"  # means a normal ECG in CPSC 2018, but only the rhythm elsewhere
# SNOMED CT code or abbreviation -> abbreviation
_BY_CODE = {code: name for name, codes in DIAGNOSES.items() for code in (name, *codes)}


# Unit of a lead in a WFDB header -> its size in mV.
UNITS = {"V": 1000.0, "mV": 1.0, "uV": 0.001, "nV": 0.000_001}


def read_wfdb(path: Path, channels: Sequence[int]) -> tuple[list[str], np.ndarray]:
    """Read a recording's diagnosis codes, and leads [samples, channels] in mV.

    Args:
        path: path of the header. The path of a signal, which `find_recordings` lists if it has no
            header, is rejected.
        channels: leads to read, counted from 1 in `LEAD_NAMES`. They are found by their names.
    """
    with reading(path):
        expect(path.suffix == ".hea", "has no header beside it")
    record = open_record(path, RATE, MAX_SAMPLES)
    signals = path.with_suffix(".mat")
    with reading(path):
        fault = f"names {len(record.leads)} leads where at least {LEADS} were expected"
        expect(len(record.leads) >= LEADS, fault)
        others = ", ".join(file.name for file in record.files[1:])  # after the header
        expect(record.files == [path, signals], f"names {others} where {signals.name} was expected")
        diagnoses = [line for line in record.comments if line.startswith("Dx:")]
        expect(bool(diagnoses), "has no diagnosis (#Dx)")
        names = [name.casefold() for name in record.leads]
        wanted = [LEAD_NAMES[channel - 1].casefold() for channel in channels]
        indices = find_channels("leads", names, wanted)
        units = [record.header.units[index] for index in indices]
        for unit in units:
            expect(unit in UNITS, f"has a lead in '{unit}', but {', '.join(UNITS)} were expected")
    codes = diagnoses[0].removeprefix("Dx:").split(",")
    millivolts_per_unit = np.array([UNITS[unit] for unit in units])
    leads = read_leads(record, indices) * millivolts_per_unit
    return [code.strip() for code in codes], leads


def first_diagnosis(path: Path, codes: list[str]) -> str:
    """Return the first diagnosis of a recording.

    Raises:
        UserError: A diagnosis is none of the nine of CPSC 2018, or is sinus rhythm in another
            database's recording, where it does not mean a normal ECG.
    """
    is_of_release = path.stem in RELEASED_NAMES
    with reading(path):
        for code in codes:
            fault = f"has diagnosis '{code}', which is none of {', '.join(DIAGNOSES)}"
            expect(code in _BY_CODE, fault)
            expect(
                is_of_release or code != SINUS_RHYTHM,
                f"has diagnosis {code}, sinus rhythm, which means Normal in CPSC 2018 only, whose "
                "recordings are named A0001 to A6877",
            )
    return _BY_CODE[codes[0]]


def find_recordings(folder: Path) -> list[Path]:
    """List the headers in `cinc2020_wfdb`.

    A signal without a header is listed too, so that reading it raises an error.

    Raises:
        UserError: There is no recording, a name occurs twice, or a link leads out of the folder.
    """
    home = folder / "cinc2020_wfdb"
    headers = find_visible(home, "**/*.hea")
    stems_with_header = {path.stem for path in headers}
    signals = find_visible(home, "**/*.mat")
    paths = headers + [path for path in signals if path.stem not in stems_with_header]
    if not paths:
        raise absent(home / "*.hea", "cpsc2018")
    count_of_stem = Counter(path.stem for path in paths)
    for path in paths:
        if count_of_stem[path.stem] > 1:
            raise UserError(
                f"{path}: a recording named {path.stem} occurs twice; each may occur once."
            )
        require_inside(path, folder)
    return paths


@register("dataset", "cpsc2018")
@dataclass(frozen=True, kw_only=True)
class Cpsc2018(Dataset):
    """Spectra of ECGs, complex64 [fft_length]; label 1 is `positive` and 0 is `negative`.

    Recordings with another first diagnosis are left out.

    Args:
        positive, negative: the two diagnoses, keys of `DIAGNOSES`.
        channel: lead to use, counted from 1 in `LEAD_NAMES`.
        length: number of samples to which a signal is trimmed or padded.
        fft_length: number of samples to which the FFT crops or pads its input.
        fft_norm: normalisation of `numpy.fft.fft`.
        test_share: fraction of the recordings to test on.
        split_seed: seed of the split into training and test recordings.
        bad_examples: whether an unusable recording raises an error (refuse) or is left out (skip).
    """

    names_owners: ClassVar[bool] = False  # the release does not say whose a recording is

    positive: str = "LBBB"
    negative: str = "Normal"
    channel: Annotated[int, Interval(ge=1, le=LEADS)] = 3
    length: Samples = 5000
    fft_length: Samples = 512
    fft_norm: FftNorm = "backward"
    test_share: Fraction = 0.1
    split_seed: int = 0
    bad_examples: BadExamples = "refuse"

    def __post_init__(self) -> None:
        for key in ("positive", "negative"):
            if getattr(self, key) not in DIAGNOSES:
                raise unknown(f"dataset.{key}", getattr(self, key), DIAGNOSES)
        rule = "must differ from dataset.positive"
        require(self.positive != self.negative, "dataset.negative", self.negative, rule)

    def load(self, root: Path) -> Splits:
        """Load the recordings.

        They are 'official' if their names are exactly those of the release, which has no checksums.
        """
        folder = root / FOLDER
        recordings = find_recordings(folder)
        inputs: list[np.ndarray] = []
        targets: list[int] = []
        names: set[str] = set()
        signals: dict[Path, str] = {}  # signal file -> its digest
        digest = hashlib.sha256()
        for path, (diagnosis, signal) in read_each(recordings, self.read, self.bad_examples):
            names.add(path.stem)
            if diagnosis not in (self.negative, self.positive):
                continue
            target = int(diagnosis == self.positive)
            inputs.append(self.transform(signal))
            targets.append(target)
            file = path.with_suffix(".mat")
            signals[file] = sha256(file)
            checksums = f"{signals[file]}:{sha256(path)}"
            digest.update(f"{path.name}:{checksums}:{target}".encode())
        warn_of_shared_files([*signals], [file.stem for file in signals], [*signals.values()])
        settings = (
            self.positive,
            self.negative,
            self.channel,
            self.length,
            self.fft_length,
            self.fft_norm,
            self.test_share,
            self.split_seed,
        )
        digest.update(repr(settings).encode())
        is_whole = names == RELEASED_NAMES
        notes = f"{len(targets):,} recordings of {self.negative} or {self.positive}"
        if not is_whole:
            notes += ", not exactly those of CPSC 2018"
        skipped = note_skipped(len(recordings) - len(names))
        if skipped:
            notes += f", {skipped}"
        train, test = self.split(folder, targets)
        x = torch.from_numpy(np.stack(inputs))
        y = torch.tensor(targets)
        return Splits(
            Examples(x[train], y[train]),
            Examples(x[test], y[test]),
            input_shape=(self.fft_length,),
            outputs=1,
            provenance="official" if is_whole else "derived",
            digest=digest.hexdigest(),
            notes=notes,
            unit="recording",
        )

    def published_info(self, root: Path) -> DatasetInfo | None:
        """Return the published counts and shapes; None if the files are there to be counted."""
        folder = root / FOLDER
        if find_visible(folder, "cinc2020_wfdb/**/*.*"):
            return None
        counts = RELEASED_COUNTS
        targets = [0] * counts[self.negative] + [1] * counts[self.positive]
        train, test = self.split(folder, targets)
        return DatasetInfo(
            train=len(train),
            test=len(test),
            input_shape=(self.fft_length,),
            outputs=1,
            dtype=torch.complex64,
            unit="recording",
        )

    def read(self, path: Path) -> tuple[str, np.ndarray]:
        """Read the first diagnosis of a recording, and its lead `channel` [samples] in mV."""
        codes, leads = read_wfdb(path, [self.channel])
        return first_diagnosis(path, codes), leads[:, 0]

    def transform(self, signal: np.ndarray) -> np.ndarray:
        """Trim or pad a signal [samples] to `length`; return its FFT, complex64 [fft_length]."""
        padded = np.zeros(self.length)
        padded[: min(self.length, len(signal))] = signal[: self.length]
        return np.fft.fft(padded, n=self.fft_length, norm=self.fft_norm).astype(np.complex64)

    def split(
        self,
        folder: Path,
        targets: list[int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the indices of the training and the test recordings, stratified by class."""
        counts = [targets.count(0), targets.count(1)]
        if min(counts) < 2:
            raise UserError(
                f"{folder}: holds {counts[0]} recordings of {self.negative} and {counts[1]} of "
                f"{self.positive}; the training and the test part each need at least one of both."
            )
        num_test = math.ceil(self.test_share * len(targets))  # rounded as in `stratified_split`
        if 2 <= num_test <= len(targets) - 2:  # each part needs a recording of both classes
            train, test = stratified_split(np.array(targets), self.test_share, self.split_seed)
            train_classes = {targets[index] for index in train}
            test_classes = {targets[index] for index in test}
            if train_classes == test_classes == {0, 1}:
                return train, test
        raise UserError(
            f"dataset.test_share={self.test_share}: of {counts[0]} recordings of {self.negative} "
            f"and {counts[1]} of {self.positive}, the test part takes {num_test}, so it or the "
            "training part lacks one of these classes."
        )
