"""CPSC 2018 twelve-lead ECGs as Fourier spectra of one lead (Ziller et al. 2021, 5.2 and A.2.2).

A.2.2 says the signal is "trimmed or padded to a length of 5000" and that numpy's FFT is used
"whereby the signal was pre-trimmed to length 512". That is `numpy.fft.fft(signal, n=512)`, which
crops its INPUT: only the first 512 samples (one second) are ever seen. "Channel 3" is read as the
third lead of the file, lead III.

The recordings come in two forms, and both may be there. A recording that is in both is read in the
challenge's form, and its line in REFERENCE.csv is its label in either.

    original_mat/     the challenge's own MATLAB structs (`ECG.data` [leads, samples] in mV, 500 Hz)
                      with REFERENCE.csv
    cinc2020_wfdb/    PhysioNet's WFDB: a header that names leads, rate and diagnosis, and the
                      signal in a .mat beside it

A recording counts by its FIRST diagnosis, as the paper's 1,125 recordings do (918 and 207).

Nobody's recordings are linked in the release, so each is taken for a patient of its own.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from zdp_bench.data import Dataset, DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.files import (
    BadExamples,
    earlier_name,
    note_skipped,
    read_each,
    require_inside,
    sha256,
    try_each,
)
from zdp_bench.data.signals import open_record, read_leads
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.foreign_files import expect, reading
from zdp_bench.registry import register

FOLDER = "CPSC2018"
Norm = Literal["backward", "ortho"]
RATE = 500  # Hz
LEADS = 12
LONGEST = 200 * RATE  # the longest released recording has 144 s
LARGEST_MAT = 16 * LEADS * LONGEST  # bytes of a MATLAB file, unpacked: twice what LONGEST needs
LARGEST_CSV = 2**24  # bytes; the release's has 160,000
COMPRESSED = 15  # MATLAB's type code
# REFERENCE.csv's codes, in their order from 1, with the SNOMED CT codes of PhysioNet's later
# releases.
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
# Recordings of each first diagnosis in the release (Liu et al. 2018).
RELEASED = dict(zip(DIAGNOSES, (918, 1098, 704, 207, 1695, 556, 672, 825, 202), strict=True))
RELEASE = frozenset(f"A{number:04d}" for number in range(1, 6878))  # its recordings' names
SINUS_RHYTHM = "426783006"  # in CPSC 2018 a normal ECG; elsewhere no more than the rhythm
_BY_CODE = {code: name for name, codes in DIAGNOSES.items() for code in codes}


@dataclass(frozen=True)
class Recording:
    """One lead of one recording: samples in mV (none if only its header was read), diagnosis."""

    name: str
    signal: np.ndarray
    diagnosis: str


def parse_diagnosis(word: str) -> str | None:
    """Translate a number, text or SNOMED code; None for another diagnosis."""
    word = word.strip()
    if word.isdigit() and 1 <= int(word) <= len(DIAGNOSES):
        return list(DIAGNOSES)[int(word) - 1]
    return _BY_CODE.get(word) or next(
        (name for name in DIAGNOSES if name.lower() == word.lower()), None
    )


def read_wfdb(path: Path, channel: int, signal: bool = True) -> Recording:
    """Read one recording of the WFDB form: its header, `path`, and the signal beside it.

    Args:
        signal: whether to read the samples too.
    """
    record, signals = open_record(path, RATE, LONGEST), path.with_suffix(".mat")
    with reading(path):
        rule = f"names {len(record.leads)} leads where {LEADS} were expected"
        expect(len(record.leads) >= LEADS, rule)
        others = ", ".join(file.name for file in record.files[1:])
        expect(record.files == [path, signals], f"names {others} where {signals.name} was expected")
        comments = record.header.comments or []
        first = [line for line in comments if line.startswith("Dx:")]
        expect(bool(first), "has no diagnosis (#Dx)")
        diagnosis = _first_diagnosis(path.stem, first[0].removeprefix("Dx:"))
    lead = read_leads(record, [channel - 1])[:, 0] if signal else np.empty(0)
    return Recording(path.stem, lead, diagnosis)


def _first_diagnosis(name: str, line: str) -> str:
    """Return the first diagnosis of a header's list.

    Refuse a list with others than the challenge's nine, and sinus rhythm in a recording of another
    database, where it does not mean a normal ECG.
    """
    words = [word.strip() for word in line.split(",")]
    names = [parse_diagnosis(word) for word in words]
    for word, known in zip(words, names, strict=True):
        rule = f"which is none of {', '.join(DIAGNOSES)}"
        expect(known is not None, f"has diagnosis '{word}', {rule}")
        ours = word != SINUS_RHYTHM or re.fullmatch(r"A\d{4}", name) is not None
        only = "means Normal in CPSC 2018 only, whose recordings are named A0001 to A6877"
        expect(ours, f"has diagnosis {word}, sinus rhythm, which {only}")
    return str(names[0])


def read_matlab(path: Path, channel: int, diagnosis: str) -> Recording:
    """Read one recording of the challenge's own form."""
    from scipy.io import loadmat

    with reading(path, LARGEST_MAT):
        _require_modest(path.read_bytes())
        signals = np.asarray(loadmat(path, variable_names=["ECG"])["ECG"]["data"][0, 0])
        rule = f"has data of shape {signals.shape} where ({LEADS}, samples) was expected"
        expect(signals.ndim == 2 and signals.shape[0] == LEADS, rule)
        real = np.issubdtype(signals.dtype, np.number) and not np.iscomplexobj(signals)
        expect(real, f"has samples of {signals.dtype}, not real numbers")
        expect(0 < signals.shape[1] <= LONGEST, f"holds {signals.shape[1]:,} samples")
        lead = signals[channel - 1].astype(np.float64)
        expect(bool(np.isfinite(lead).all()), "holds samples that are no numbers")
    return Recording(path.stem, lead, diagnosis)


def _require_modest(raw: bytes) -> None:
    """Refuse a MATLAB file that unpacks to more than a recording needs, before scipy unpacks it.

    The format (MATLAB 5): 128 bytes; then elements of type, length and bytes, which may be
    compressed. Each array in one has a header with its dimensions.
    """
    expect(raw[126:128] in (b"IM", b"MI"), "is not a struct 'ECG' (no MATLAB 5 file)")
    order = "<" if raw[126:128] == b"IM" else ">"
    flags, dimensions = struct.pack(order + "II", 6, 8), struct.pack(order + "I", 5)
    start = 128
    while start + 8 <= len(raw):
        kind, length = struct.unpack_from(order + "II", raw, start)
        body = raw[start + 8 : start + 8 + length]
        if kind == COMPRESSED:
            body = zlib.decompressobj().decompress(body, LARGEST_MAT)
        shapes = re.finditer(re.escape(flags) + b".{8}" + re.escape(dimensions), body, re.DOTALL)
        for found in shapes:
            (count,) = struct.unpack_from(order + "I", body.ljust(found.end() + 4), found.end())
            sides = body[found.end() + 4 : found.end() + 4 + min(count, 32)]
            whole = sides[: len(sides) // 4 * 4]
            cells = math.prod(side for (side,) in struct.iter_unpack(order + "I", whole))
            expect(cells <= len(body), "announces a larger array than it holds")
        expect(len(body) < LARGEST_MAT, f"unpacks to {LARGEST_MAT:,} bytes or more")
        start += 8 + length


def read_reference(path: Path) -> dict[str, str]:
    """Read REFERENCE.csv: recording -> the first of its one to three diagnoses."""
    labels: dict[str, str] = {}
    with reading(path, LARGEST_CSV):
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
        head = rows[0] if rows else []
        rule = "'Recording,First_label,Second_label,Third_label' was expected"
        begins = bool(head) and head[0].strip().lower() == "recording"
        expect(begins, f"begins with the line {head} where {rule}")
        for number, row in enumerate(rows[1:], start=2):
            if row:
                names = [parse_diagnosis(word) for word in row[1:] if word.strip()]
                rule = f"each must be a number from 1 to {len(DIAGNOSES)}"
                known = bool(names) and None not in names
                expect(known, f"has in line {number} the labels {row[1:]}; {rule}")
                expect(row[0] not in labels, f"has in line {number} {row[0]} a second time")
                labels[row[0]] = str(names[0])
    return labels


def find_reference(folder: Path) -> Path | None:
    """Return REFERENCE.csv, in `original_mat` or beside it; None if it is in neither."""
    places = (folder / "original_mat", folder)
    return next((found for one in places if (found := one / "REFERENCE.csv").is_file()), None)


def list_recordings(folder: Path) -> list[Path]:
    """List `original_mat/*.mat`, if REFERENCE.csv is there, and `cinc2020_wfdb/*.hea`.

    A recording in both forms is listed in the first. A signal of the second form without a header
    is listed too, so that it is not passed over silently.
    """
    matlab, wfdb = folder / "original_mat", folder / "cinc2020_wfdb"
    first = sorted(matlab.rglob("*.mat")) if find_reference(folder) else []
    headers = sorted(wfdb.rglob("*.hea"))
    named = {path.stem for path in headers}
    lone = sorted(path for path in wfdb.rglob("*.mat") if path.stem not in named)
    listed = {path.stem for path in first}
    return first + [path for path in headers + lone if path.stem not in listed]


@dataclass(frozen=True)
class Recordings:
    """The recordings of a folder in either form, and REFERENCE.csv's labels."""

    path: Path
    paths: list[Path]
    labels: dict[str, str]

    @classmethod
    def find(cls, folder: Path) -> Recordings:
        """List the recordings, each of which may stand once and inside of the folder."""
        reference, paths = find_reference(folder), list_recordings(folder)
        if not paths:
            raise UserError(
                f"dataset 'cpsc2018' finds no recordings under {folder}: neither "
                "original_mat/*.mat with a REFERENCE.csv nor cinc2020_wfdb/*.hea. Put them there "
                "(see datasets/cpsc2018.yaml), or use dataset=cpsc2018_synthetic."
            )
        names = Counter(path.stem for path in paths)
        for path in paths:
            if names[path.stem] > 1:
                raise UserError(
                    f"{path}: a recording named {path.stem} is there twice; each may stand once."
                )
            require_inside(path, folder)
        return cls(folder, paths, read_reference(reference) if reference else {})

    def read(self, path: Path, channel: int, signal: bool = True) -> Recording:
        """Read a recording, or its diagnosis only."""
        label = self.labels.get(path.stem)
        if path.suffix == ".hea":
            one = read_wfdb(path, channel, signal)
            return replace(one, diagnosis=label or one.diagnosis)
        with reading(path):
            expect(path.is_relative_to(self.path / "original_mat"), "has no header beside it")
            expect(label is not None, "has no line in REFERENCE.csv")
        if signal:
            return read_matlab(path, channel, str(label))
        return Recording(path.stem, np.empty(0), str(label))

    def read_all(
        self, channel: int, bad_examples: BadExamples, signal: bool = True
    ) -> Iterator[tuple[Path, Recording]]:
        """Yield every recording that can be read; others are refused or skipped."""

        def read(path: Path) -> Recording:
            return self.read(path, channel, signal)

        return read_each(self.paths, read, bad_examples)


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
    bad_examples: BadExamples = "refuse"

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
        found, inputs, targets = Recordings.find(folder), [], []
        digest, names = hashlib.sha256(), set()
        for path, one in found.read_all(self.channel, self.bad_examples):
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
        notes = {"official": "", "derived": "recordings in CPSC 2018's form: "}[provenance]
        if synthetic:
            provenance, notes = "synthetic", "generated beats: "
        skipped = note_skipped(len(found.paths) - len(names))
        x, y = torch.from_numpy(np.stack(inputs)), torch.tensor(targets)
        return Splits(
            Examples(x[train], y[train]),
            Examples(x[test], y[test]),
            input_shape=(self.fft_length,),
            outputs=1,
            provenance=provenance,
            digest=earlier_name(digest.hexdigest()),
            notes=f"{notes}{targets.count(0)} {self.negative}, {targets.count(1)} {self.positive}"
            + (f", {skipped}" if skipped else ""),
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
        skips = self.bad_examples == "skip"
        read = Recordings.find(folder).read_all(self.channel, self.bad_examples, signal=skips)
        labels = [self.label(one) for _, one in read]
        return self.describe(folder, [label for label in labels if label is not None], found=True)

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
        found = Recordings.find(root / FOLDER)
        return try_each(found.paths, lambda path: found.read(path, self.channel))

    def label(self, one: Recording) -> int | None:
        """Return 1 or 0; None for a recording whose first diagnosis is another."""
        return {self.negative: 0, self.positive: 1}.get(one.diagnosis)

    def transform(self, signal: np.ndarray) -> np.ndarray:
        """Trim or pad [samples] in mV to `length`, then transform: complex64 [fft_length]."""
        padded = np.zeros(self.length)
        padded[: min(self.length, len(signal))] = signal[: self.length]
        return np.fft.fft(padded, n=self.fft_length, norm=self.fft_norm).astype(np.complex64)

    def split(self, folder: Path, targets: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the recordings to train and to test on, stratified and seeded."""
        from sklearn.model_selection import train_test_split  # which takes half a second

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
