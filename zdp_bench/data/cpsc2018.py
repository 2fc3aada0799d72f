"""CPSC 2018 twelve-lead ECGs as Fourier spectra of one lead (Ziller et al. 2021, 5.2 and A.2.2).

Both forms the data comes in are read:
    original_mat/     the challenge's own MATLAB structs (`ECG.data` [leads, samples] in mV, 500 Hz) with REFERENCE.csv
    cinc2020_wfdb/    PhysioNet's WFDB: a header that names leads, rate and diagnosis, and the signal in a .mat beside it

A.2.2 says the signal is "trimmed or padded to a length of 5000" and that numpy's FFT is used "whereby the signal was
pre-trimmed to length 512". That is `numpy.fft.fft(signal, n=512)`, which crops its INPUT: only the first 512 samples (one
second) are ever seen. "Channel 3" is read as the third lead of the file, lead III.

Nobody's recordings are linked in the release, so each is taken for a patient of its own.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy.io import loadmat
from sklearn.model_selection import train_test_split

from zdp_bench.data import DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.files import sha256
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.registry import register

log = logging.getLogger(__name__)

RATE = 500  # Hz
LEADS = 12
LONGEST = 200 * RATE  # the longest released record has 144 s; what announces more is no such record
# REFERENCE.csv's codes, in their order from 1, with the SNOMED CT codes of PhysioNet's later releases.
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
# Recordings of each diagnosis in the release (Liu et al. 2018), for who has none of them yet.
RELEASED = dict(zip(DIAGNOSES, (918, 1098, 704, 207, 1695, 556, 672, 825, 202), strict=True))
Norm = Literal["backward", "ortho"]
_BY_CODE = {code: name for name, codes in DIAGNOSES.items() for code in codes}


class BadRecord(Exception):  # noqa: N818 - a fact about a file, which a rule may forgive
    """One recording that cannot be used, and why; the adapter's rule decides what becomes of it."""


@dataclass(frozen=True)
class Recording:
    """One lead of one recording: samples in mV (none where only its header was read), and every diagnosis it carries."""

    name: str
    signal: np.ndarray
    diagnoses: frozenset[str]


def diagnosis(word: str) -> str | None:
    """A diagnosis by our name, from the challenge's number, its text or a SNOMED code; None for one not among the nine."""
    word = word.strip()
    if word.isdigit() and 1 <= int(word) <= len(DIAGNOSES):
        return list(DIAGNOSES)[int(word) - 1]
    return _BY_CODE.get(word) or next(
        (name for name in DIAGNOSES if name.lower() == word.lower()), None
    )


def read_wfdb(header: Path, channel: int, signal: bool = True) -> Recording:
    """One recording of the WFDB form.

    Args:
        signal: whether to read the samples too.

    Raises:
        BadRecord: header and signal disagree, the rate is not 500 Hz, a lead is missing, or the diagnosis is.
    """
    import wfdb

    try:
        described = wfdb.rdheader(str(header.with_suffix("")))
    except Exception as error:  # wfdb raises whatever its parser trips over
        raise BadRecord(f"the header cannot be read ({type(error).__name__})") from None
    if described.fs != RATE:
        raise BadRecord(f"its rate is {described.fs} Hz where {RATE} Hz was expected")
    if (described.n_sig or 0) < LEADS:
        raise BadRecord(
            f"its header names {described.n_sig or 0} leads where {LEADS} were expected"
        )
    if not 0 < (described.sig_len or 0) <= LONGEST:
        raise BadRecord(f"its header announces {described.sig_len or 0:,} samples")
    signals = header.with_suffix(".mat")
    if others := set(described.file_name or []) - {signals.name}:
        raise BadRecord(
            f"its header points to '{sorted(others)[0]}' where {signals.name} was expected"
        )
    if others := set(described.fmt or []) - {"16"}:
        raise BadRecord(
            f"its samples are stored in WFDB's format {sorted(others)[0]} where 16 was expected"
        )
    expected = 24 + 2 * described.n_sig * described.sig_len  # MATLAB 4 header, then 16-bit samples
    if not signals.is_file():
        raise BadRecord(f"its signal file {signals.name} is missing")
    if signals.stat().st_size != expected:
        raise BadRecord(
            f"{signals.name} has {signals.stat().st_size:,} bytes where its header announces {expected:,}"
        )
    samples = np.empty(0)
    if signal:
        try:
            samples = wfdb.rdrecord(str(header.with_suffix("")), channels=[channel - 1]).p_signal[
                :, 0
            ]
        except Exception as error:
            raise BadRecord(f"the signal cannot be read ({type(error).__name__})") from None
    lines = [line.removeprefix("Dx:") for line in described.comments if line.startswith("Dx:")]
    if not lines:
        raise BadRecord("its header has no diagnosis (#Dx)")
    found = {name for word in lines[0].split(",") if (name := diagnosis(word))}
    return Recording(header.stem, samples, frozenset(found))


def read_matlab(path: Path, channel: int, diagnoses: frozenset[str]) -> Recording:
    """One recording of the challenge's own form.

    Raises:
        BadRecord: it is no such struct, or lacks a lead.
    """
    try:
        signals = np.asarray(loadmat(path)["ECG"]["data"][0, 0])
    except Exception as error:  # scipy raises many kinds over what is no MATLAB file
        raise BadRecord(
            f"is not a struct 'ECG' with a field 'data' ({type(error).__name__})"
        ) from None
    if signals.ndim != 2 or signals.shape[0] != LEADS:
        raise BadRecord(f"its data has shape {signals.shape} where ({LEADS}, samples) was expected")
    if not np.issubdtype(signals.dtype, np.number) or np.iscomplexobj(signals):
        raise BadRecord(f"its samples are {signals.dtype}, not real numbers")
    if not 0 < signals.shape[1] <= LONGEST:
        raise BadRecord(f"it holds {signals.shape[1]:,} samples")
    return Recording(path.stem, signals[channel - 1].astype(np.float64), diagnoses)


def read_reference(path: Path) -> dict[str, frozenset[str]]:
    """REFERENCE.csv: recording -> its one to three diagnoses.

    Raises:
        UserError: the file has other columns, an unknown label, or a recording twice.
    """
    labels: dict[str, frozenset[str]] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        head = next(rows, [])
        if not head or head[0].strip().lower() != "recording":
            raise UserError(
                f"{path}: its first line is {head} where 'Recording,First_label,Second_label,Third_label' was expected."
            )
        for number, row in enumerate(rows, start=2):
            if not row:
                continue
            names = [diagnosis(word) for word in row[1:] if word.strip()]
            if not names or None in names:
                raise UserError(
                    f"{path}, line {number}: labels {row[1:]}; each must be a number from 1 to {len(DIAGNOSES)}."
                )
            if row[0] in labels:
                raise UserError(
                    f"{path}, line {number}: recording {row[0]} stands here a second time."
                )
            labels[row[0]] = frozenset(name for name in names if name)
    return labels


def _listed(folder: Path) -> tuple[Path | None, list[Path]]:
    """REFERENCE.csv where there is one, and the recordings: `original_mat/*.mat` beside it, or else `cinc2020_wfdb/*.hea`."""
    matlab, wfdb_form = folder / "original_mat", folder / "cinc2020_wfdb"
    reference = next(
        (p for p in (matlab / "REFERENCE.csv", folder / "REFERENCE.csv") if p.is_file()), None
    )
    return reference, sorted(matlab.rglob("*.mat")) if reference else sorted(
        wfdb_form.rglob("*.hea")
    )


def recordings(
    folder: Path, channel: int, signals: bool = True
) -> Iterator[tuple[Path, Recording | BadRecord]]:
    """Every recording under `original_mat/` (where REFERENCE.csv is) or else `cinc2020_wfdb/`, with what is wrong with it.

    Args:
        signals: whether to read samples; without, only headers and REFERENCE.csv are.

    Raises:
        UserError: there is neither form, a name stands twice, or a file leads out of the folder.
    """
    reference, paths = _listed(folder)
    labels = read_reference(reference) if reference else {}
    if not paths:
        raise UserError(
            f"dataset 'cpsc2018' finds no recordings under {folder}: neither original_mat/*.mat with a REFERENCE.csv nor "
            "cinc2020_wfdb/*.hea. Put them there (see datasets/cpsc2018.yaml), or use dataset=cpsc2018_synthetic."
        )
    if not reference:  # a signal whose header is gone would be passed over without a word
        headers = {path.stem for path in paths}
        paths += sorted(
            path for path in (folder / "cinc2020_wfdb").rglob("*.mat") if path.stem not in headers
        )
    seen: set[str] = set()
    for path in paths:
        if path.stem in seen:
            raise UserError(
                f"{path}: a recording named {path.stem} is already there; each may stand once."
            )
        seen.add(path.stem)
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{path}: is a link that leads out of {folder}; put the file itself there."
            )
        try:
            if not reference and path.suffix == ".mat":
                raise BadRecord(f"its header {path.stem}.hea is missing")
            if reference and path.stem not in labels:
                raise BadRecord("has no line in REFERENCE.csv")
            if not reference:
                one = read_wfdb(path, channel, signals)
            elif signals:
                one = read_matlab(path, channel, labels[path.stem])
            else:
                one = Recording(path.stem, np.empty(0), labels[path.stem])
            if not np.isfinite(one.signal).all():
                raise BadRecord(f"lead {channel} holds samples that are no numbers")
            yield path, one
        except BadRecord as error:
            yield path, error


@register("check", "cpsc2018")
def check(root: Path) -> Iterator[tuple[Path, str]]:
    """Every recording, and what is wrong with it."""
    for path, one in recordings(root / "CPSC2018", channel=3):
        yield path, f"{path}: {one}." if isinstance(one, BadRecord) else ""


def spectrum(signal: np.ndarray, length: int, fft_length: int, norm: Norm) -> np.ndarray:
    """[samples] in mV -> complex64 [fft_length]: trim or pad at the end to `length`, then `numpy.fft.fft(·, fft_length)`."""
    padded = np.zeros(length)
    padded[: min(length, len(signal))] = signal[:length]
    return np.fft.fft(padded, n=fft_length, norm=norm).astype(np.complex64)


def _check(positive: str, negative: str, channel: int, length: int, fft_length: int) -> None:
    for key, word in (("positive", positive), ("negative", negative)):
        if word not in DIAGNOSES:
            raise unknown(f"dataset.{key}", word, DIAGNOSES)
    require(
        positive != negative,
        "dataset.negative",
        negative,
        "must be another diagnosis than dataset.positive",
    )
    require(1 <= channel <= LEADS, "dataset.channel", channel, f"must lie between 1 and {LEADS}")
    require(
        1 <= length <= LONGEST,
        "dataset.length",
        length,
        f"must lie between 1 and {LONGEST:,} samples",
    )
    require(
        1 <= fft_length <= LONGEST,
        "dataset.fft_length",
        fft_length,
        f"must lie between 1 and {LONGEST:,} samples",
    )


def _label(one: Recording, positive: str, negative: str) -> int | None:
    """1 or 0; None for a recording that carries both diagnoses or neither."""
    has = positive in one.diagnoses, negative in one.diagnoses
    return int(has[0]) if has[0] != has[1] else None


def _forgive(path: Path, why: BadRecord, bad_records: str) -> None:
    """Pass over a recording, or refuse it where that is the rule.

    Raises:
        UserError: the rule is to refuse.
    """
    if bad_records == "refuse":
        raise UserError(f"{path}: {why}. Remove it, or set dataset.bad_records=skip.")
    log.warning("%s: %s; skipped", path, why)


def parts(
    folder: Path, positive: str, negative: str, counts: list[int], test_share: float
) -> tuple[int, int]:
    """How many of the recordings (of `negative` and of `positive`) are to train and to test on: as scikit-learn rounds.

    Raises:
        UserError: there are too few, or the share leaves none on one side.
    """
    if (both := sum(counts)) < 2:
        raise UserError(
            f"{folder}: holds {counts[0]} recordings of {negative} and {counts[1]} of {positive}; a split needs at least two."
        )
    require(
        0 < test_share < 1,
        "dataset.test_share",
        test_share,
        "must lie between 0 and 1, and be neither",
    )
    held = math.ceil(test_share * both)
    require(
        held < both,
        "dataset.test_share",
        test_share,
        f"leaves none of {both} recordings to train on",
    )
    return both - held, held


def load(
    folder: Path,
    provenance: Provenance,
    notes: str,
    *,
    positive: str,
    negative: str,
    channel: int,
    length: int,
    fft_length: int,
    fft_norm: Norm,
    test_share: float,
    split_seed: int,
    bad_records: str,
) -> Splits:
    """Spectra and labels (1 for `positive`) of the recordings that carry exactly one of the two diagnoses."""
    _check(positive, negative, channel, length, fft_length)
    inputs, targets, digest, skipped = [], [], hashlib.sha256(), 0
    for path, one in recordings(folder, channel):
        skipped += isinstance(one, BadRecord)
        if isinstance(one, Recording) and (target := _label(one, positive, negative)) is not None:
            inputs.append(spectrum(one.signal, length, fft_length, fft_norm))
            targets.append(target)
            digest.update(f"{path.name}:{sha256(path.with_suffix('.mat'))}:{target}".encode())
        elif isinstance(one, BadRecord):
            _forgive(path, one, bad_records)
    counts = [targets.count(0), targets.count(1)]
    left, _ = parts(folder, positive, negative, counts, test_share)
    digest.update(
        repr(
            (positive, negative, channel, length, fft_length, fft_norm, test_share, split_seed)
        ).encode()
    )
    stratify = (
        targets if min(counts) >= 2 and round(test_share * len(targets)) >= 2 <= left else None
    )
    train, test = train_test_split(
        np.arange(len(targets)), test_size=test_share, random_state=split_seed, stratify=stratify
    )
    x, y = torch.from_numpy(np.stack(inputs)), torch.tensor(targets)
    return Splits(
        Examples(x[train], y[train]),
        Examples(x[test], y[test]),
        input_shape=(fft_length,),
        outputs=1,
        provenance=provenance,
        digest=digest.hexdigest(),
        notes=f"{notes}{counts[0]} {negative}, {counts[1]} {positive}"
        + (f", {skipped} unusable skipped" if skipped else ""),
        unit="recording",
    )


@register("dataset", "cpsc2018")
def cpsc2018(
    root: Path,
    *,
    positive: str = "LBBB",
    negative: str = "Normal",
    channel: int = 3,
    length: int = 5000,
    fft_length: int = 512,
    fft_norm: Norm = "backward",
    test_share: float = 0.1,
    split_seed: int = 0,
    bad_records: Literal["refuse", "skip"] = "refuse",
) -> Splits:
    """CPSC 2018 under `CPSC2018/`: complex64 [512] spectra, 1 for `positive`. No checksums were published: 'derived' unless
    all 6,877 recordings are there."""
    folder = root / "CPSC2018"
    here = sum(1 for _ in folder.rglob("A*.mat"))
    whole = here >= 6877
    return load(
        folder,
        "official" if whole else "derived",
        "" if whole else "an excerpt of the release: ",
        positive=positive,
        negative=negative,
        channel=channel,
        length=length,
        fft_length=fft_length,
        fft_norm=fft_norm,
        test_share=test_share,
        split_seed=split_seed,
        bad_records=bad_records,
    )


@register("outline", "cpsc2018")
def outline(
    root: Path,
    *,
    positive: str,
    negative: str,
    channel: int,
    length: int,
    fft_length: int,
    test_share: float,
    bad_records: str,
    **_: object,
) -> DatasetInfo:
    """From headers and REFERENCE.csv, so that only a bad signal changes the counts; where those are skipped, signals are read."""
    _check(positive, negative, channel, length, fft_length)
    folder = root / "CPSC2018"
    counts = [RELEASED[negative], RELEASED[positive]]
    if found := bool(_listed(folder)[1]):
        counts = [0, 0]
        for path, one in recordings(folder, channel, signals=bad_records == "skip"):
            if isinstance(one, BadRecord):
                _forgive(path, one, bad_records)
            elif (target := _label(one, positive, negative)) is not None:
                counts[target] += 1
    train, test = parts(folder, positive, negative, counts, test_share)
    return DatasetInfo(
        train, test, (fft_length,), 1, torch.complex64, found=found, unit="recording"
    )
