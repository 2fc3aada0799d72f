"""MIT-BIH Arrhythmia Database: single beats, left bundle branch block (L) against normal (N).

Moody & Mark 2001: 48 half-hour recordings of 47 people, two leads at 360 Hz, each beat annotated.
Only lead MLII is used, which 46 recordings have. Four people have L beats and none of them N, so
there are four positives, however many beats are counted. That is why whole people are held out,
one of the four at a time (`fold`), and why ε of a patient is much larger than that of a beat.

A beat's whole spectrum with its phase tells people apart better than it tells L from N. What is
kept of it: 128 samples around R, standardised, differenced, standardised again; bins 1 to 16 of
their Fourier transform as log(1 + |z|), centred, with a mean square of 1. Each beat is transformed
alone, so this costs no privacy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Interval

from zdp_bench.data import Dataset, DatasetInfo, Examples, Provenance, Share, Splits
from zdp_bench.data.files import count_held_out, digest, require_inside, sha256, try_each
from zdp_bench.data.signals import Record, open_record, read_leads
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import expect, reading
from zdp_bench.registry import register

FOLDER = "mit-bih-arrhythmia-database-1.0.0"
# SHA-256 over the release's 48 recordings, by `digest_files`.
RELEASED = "6172c12983e5aab11fb407a8caa6147754710bf13c372b1b2e39a48b0ab34d05"
RATE = 360  # Hz
LONGEST = 3600 * RATE  # a released recording has half an hour
LEAD = "MLII"
WINDOW = 128  # samples, R in the middle
BINS = 16
SAME_PERSON = {"202": "201"}
BLOCKED = {"109": 2492, "111": 2123, "207": 1457, "214": 2003}  # L beats in the release
ORIGINS = {
    "official": "",
    "derived": "not the whole release as published: ",
    "synthetic": "generated beats: ",
}
NORMAL_PATIENTS = 37  # people with N beats on lead MLII in the release


@dataclass(frozen=True)
class Beats:
    """Where the beats of one recording are: N and L, in samples of lead `channel`."""

    record: Record
    channel: int
    normal: np.ndarray
    blocked: np.ndarray


# By the number of a person's first recording:
Patients = dict[str, list[Beats]]
Counts = dict[str, tuple[int, int]]  # N and L beats that are used


Fold = Annotated[int, Interval(ge=0, lt=len(BLOCKED))]  # each holds out one with L beats


@register("dataset", "mitbih")
@dataclass(frozen=True, kw_only=True)
class MitBih(Dataset):
    """MIT-BIH beats: complex64 [16] with imaginary part 0; label 1 is L, 0 is N.

    A patient with L beats gives only those.

    fold: which of the patients with L beats is held out, from 0, in the order of their numbers.
    test_share: how many of the patients with N beats are held out, drawn by `split_seed`.
    normal_per_patient, blocked_per_patient: at most so many beats of a patient, spread evenly.
    """

    fold: Fold = 0
    test_share: Share = 0.25
    split_seed: int = 0
    normal_per_patient: Annotated[int, Ge(1)] = 100
    blocked_per_patient: Annotated[int, Ge(1)] = 1000

    @property
    def _settings(self) -> str:
        """The options as text, for the digest: a form that older records' data were named by."""
        options = ("fold", "test_share", "split_seed", "normal_per_patient", "blocked_per_patient")
        return f"MitBih({', '.join(f'{key}={getattr(self, key)!r}' for key in options)})"

    def load(self, root: Path) -> Splits:
        """They are 'official' if signals, annotations and the headers' text are the release's."""
        return self.load_folder(root / FOLDER)

    def load_folder(self, folder: Path, synthetic: bool = False) -> Splits:
        """Read and split the recordings of a folder."""
        headers = list_recordings(folder)
        patients = group_by_patient(folder, headers)
        counts = self.count_beats(patients)
        testing = self.hold_out(folder, counts)
        parts: dict[bool, list[tuple[np.ndarray, int, int]]] = {False: [], True: []}
        for number, (name, (_, blocked)) in enumerate(counts.items()):
            beats = transform(self.choose(patients[name], blocked > 0))
            parts[name in testing].append((beats, int(blocked > 0), number))
        files = digest_files(headers)
        released: Provenance = "official" if files == RELEASED else "derived"
        provenance: Provenance = "synthetic" if synthetic else released
        people = [name for name, (_, blocked) in counts.items() if blocked]
        return Splits(
            _join(parts[False]),
            _join(parts[True]),
            input_shape=(BINS,),
            outputs=1,
            provenance=provenance,
            digest=digest(f"{files}:{self._settings}:{LEAD}:{WINDOW}:{BINS}"),
            notes=f"{ORIGINS[provenance]}N beats of {len(counts) - len(people)} patients, "
            f"L beats of {len(people)} ({', '.join(people)}); held out: {people[self.fold]} and "
            f"{len(testing) - 1} patients with N beats, drawn by split_seed={self.split_seed}",
        )

    def info(self, root: Path) -> DatasetInfo:
        """Count by annotations; without recordings, as in the release."""
        folder = root / FOLDER
        if headers := list_recordings(folder):
            counts = self.count_beats(group_by_patient(folder, headers))
        else:
            counts = {f"N{n}": (self.normal_per_patient, 0) for n in range(NORMAL_PATIENTS)}
            for name, beats in BLOCKED.items():
                counts[name] = (0, min(beats, self.blocked_per_patient))
        return self.describe(folder, counts, found=bool(headers))

    def describe(self, folder: Path, counts: Counts, found: bool) -> DatasetInfo:
        """Split patients of whom only the numbers of beats are known."""
        testing = self.hold_out(folder, counts)
        held = sum(sum(counts[name]) for name in testing)
        return DatasetInfo(
            train=sum(sum(count) for count in counts.values()) - held,
            test=held,
            input_shape=(BINS,),
            outputs=1,
            dtype=torch.complex64,
            examples_per_patient=self.most_of_one(counts, testing),
            owners=len(counts) - len(testing),
            found=found,
        )

    def check_files(self, root: Path) -> Iterator[tuple[Path, str]]:
        """Read each recording's header, annotations and lead MLII."""
        yield from try_each(list_recordings(root / FOLDER), read_recording)

    def count_beats(self, patients: Patients) -> Counts:
        """Return {patient: (N, L beats that are used)}, one of them 0; others have no such beat."""
        counts = {}
        for name, recordings in patients.items():
            normal = sum(len(one.normal) for one in recordings)
            blocked = sum(len(one.blocked) for one in recordings)
            if blocked:
                counts[name] = (0, min(blocked, self.blocked_per_patient))
            elif normal:
                counts[name] = (min(normal, self.normal_per_patient), 0)
        return counts

    def hold_out(self, folder: Path, counts: Counts) -> set[str]:
        """Return the patients to test on."""
        blocked = [name for name, (_, count) in counts.items() if count]
        normal = [name for name, (_, count) in counts.items() if not count]
        if len(blocked) < max(2, self.fold + 1):
            raise UserError(
                f"{folder}: L beats on lead {LEAD} are there of {len(blocked)} patients, so "
                f"dataset.fold={self.fold} cannot be held out; the release has {len(BLOCKED)}."
            )
        held = count_held_out(len(normal), self.test_share, "patients with N beats")
        order = np.random.default_rng(self.split_seed).permutation(len(normal))
        return {blocked[self.fold], *(normal[index] for index in order[:held])}

    def most_of_one(self, counts: Counts, testing: set[str]) -> int:
        """The most training beats of any one patient."""
        return max(sum(count) for name, count in counts.items() if name not in testing)

    def choose(self, recordings: list[Beats], blocked: bool) -> np.ndarray:
        """Return the windows [n, 128] of a patient's beats, spread evenly over the recordings."""
        most = self.blocked_per_patient if blocked else self.normal_per_patient
        windows = []
        for one in recordings:
            centres = one.blocked if blocked else one.normal
            reach = np.arange(WINDOW) - WINDOW // 2
            windows.append(read_signal(one)[centres[:, None] + reach])
        every = np.concatenate(windows)
        kept = np.linspace(0, len(every) - 1, min(most, len(every))).round().astype(int)
        return every[kept]


def transform(windows: np.ndarray) -> np.ndarray:
    """Turn windows [n, 128] into complex64 [n, 16]; a flat one into zeros."""
    slopes = _standardise(np.diff(_standardise(windows)), centre=False)
    moduli = np.abs(np.fft.rfft(slopes, n=WINDOW))[:, 1 : BINS + 1]
    return _standardise(np.log1p(moduli)).astype(np.complex64)


def _standardise(rows: np.ndarray, centre: bool = True) -> np.ndarray:
    """Subtract each row's mean, if `centre`, and divide by its standard deviation."""
    centred = rows - rows.mean(1, keepdims=True) if centre else rows
    scaled: np.ndarray = centred / np.maximum(rows.std(1, keepdims=True), 1e-9)
    return scaled


def _join(parts: list[tuple[np.ndarray, int, int]]) -> Examples:
    inputs = torch.from_numpy(np.concatenate([beats for beats, _, _ in parts]))
    each = torch.tensor([len(beats) for beats, _, _ in parts])
    targets, groups = (torch.tensor([part[n] for part in parts]) for n in (1, 2))
    return Examples(inputs, targets.repeat_interleave(each), groups=groups.repeat_interleave(each))


def list_recordings(folder: Path) -> list[Path]:
    """Return the headers of all recordings, by number; those too of which only parts are there.

    A recording that RECORDS lists, or of which any of its three files is there, counts.
    """
    names = {
        path.stem
        for path in folder.glob("*")
        if re.fullmatch(r"\d{3}", path.stem) and path.suffix in (".hea", ".dat", ".atr")
    }
    if (listed := folder / "RECORDS").is_file():
        names |= set(re.findall(r"^\d{3}$", listed.read_text("latin-1"), flags=re.MULTILINE))
    return [folder / f"{name}.hea" for name in sorted(names)]


def group_by_patient(folder: Path, headers: list[Path]) -> Patients:
    """Find the beats of each patient in these recordings; 201 and 202 are of one."""
    if not headers:
        raise UserError(
            f"dataset 'mitbih' finds no recordings under {folder}: *.hea, *.dat and *.atr of the "
            "release. Put them there (see datasets/mitbih.yaml)."
        )
    patients: Patients = {}
    for header in headers:
        if (beats := find_beats(header)) is not None:
            patients.setdefault(SAME_PERSON.get(header.stem, header.stem), []).append(beats)
    return patients


def find_beats(header: Path) -> Beats | None:
    """Read a recording's header and annotations; None without lead MLII.

    Beats whose window leaves the recording are dropped.
    """
    import wfdb

    signal, notes = header.with_suffix(".dat"), header.with_suffix(".atr")
    for path in (header, notes):
        require_inside(path, header.parent)
    record = open_record(header, RATE, LONGEST)
    with reading(header):
        others = ", ".join(path.name for path in record.files[1:])
        expect(record.files == [header, signal], f"names {others}, not {signal.name} alone")
    with reading(notes, 4 * signal.stat().st_size):
        expect(notes.read_bytes().endswith(b"\0\0"), "is cut off")
        read = wfdb.rdann(str(header.with_suffix("")), "atr")
        places, symbols = np.asarray(read.sample), np.asarray(read.symbol)
        inside = not len(places) or 0 <= places.min() <= places.max() < record.length
        expect(inside, f"annotates beats outside of the recording's {record.length:,} samples")
    if LEAD not in record.leads:
        return None
    whole = (places >= WINDOW // 2) & (places <= record.length - WINDOW // 2)
    normal, blocked = (places[whole & (symbols == symbol)] for symbol in "NL")
    return Beats(record, record.leads.index(LEAD), normal, blocked)


def read_recording(header: Path) -> None:
    """Read all of a recording that is used."""
    if (beats := find_beats(header)) is not None:
        read_signal(beats)


def read_signal(beats: Beats) -> np.ndarray:
    """Read lead MLII: float64 [samples] in the file's units."""
    return read_leads(beats.record, [beats.channel], physical=False)[:, 0]


def digest_files(headers: list[Path]) -> str:
    """Return the SHA-256 of recordings; of a header only its text, as line ends vary."""
    found = []
    for header in headers:
        lines = [line.strip() for line in header.read_text("latin-1").splitlines()]
        rest = [sha256(header.with_suffix(suffix)) for suffix in (".dat", ".atr")]
        found.append(":".join([header.stem, *filter(None, lines), *rest]))
    return digest("\n".join(found))
