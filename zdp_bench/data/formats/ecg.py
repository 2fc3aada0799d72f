"""The two forms that CPSC 2018's ECGs come in.

original_mat/     the challenge's own MATLAB structs (`ECG.data` [leads, samples] in mV, 500 Hz)
                  with REFERENCE.csv
cinc2020_wfdb/    PhysioNet's WFDB: a header that names leads, rate and diagnosis, and the
                  signal in a .mat beside it
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.io import loadmat

from zdp_bench.data.files import require_inside
from zdp_bench.errors import UserError

RATE = 500  # Hz
LEADS = 12
LONGEST = 200 * RATE  # the longest released recording has 144 s
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
_BY_CODE = {code: name for name, codes in DIAGNOSES.items() for code in codes}


class BadRecording(Exception):  # noqa: N818 - a fact about a file, which an option may forgive
    """Why one recording cannot be used; `dataset.bad_records` decides whether it is skipped."""


@dataclass(frozen=True)
class Recording:
    """One lead of one recording: samples in mV (none if only its header was read), diagnoses."""

    name: str
    signal: np.ndarray
    diagnoses: frozenset[str]


def parse_diagnosis(word: str) -> str | None:
    """Translate a number, text or SNOMED code; None for another diagnosis."""
    word = word.strip()
    if word.isdigit() and 1 <= int(word) <= len(DIAGNOSES):
        return list(DIAGNOSES)[int(word) - 1]
    return _BY_CODE.get(word) or next(
        (name for name in DIAGNOSES if name.lower() == word.lower()), None
    )


def read_wfdb(header: Path, channel: int, signal: bool = True) -> Recording:
    """Read one recording of the WFDB form.

    Args:
        signal: whether to read the samples too.

    Raises:
        BadRecording: header and signal disagree, the rate is not 500 Hz, or a lead or the diagnosis
            is missing.
    """
    import wfdb

    try:
        described = wfdb.rdheader(str(header.with_suffix("")))
    except Exception as error:  # wfdb raises whatever its parser trips over
        raise BadRecording(f"the header cannot be read ({type(error).__name__})") from None
    if described.fs != RATE:
        raise BadRecording(f"its rate is {described.fs} Hz where {RATE} Hz was expected")
    if (described.n_sig or 0) < LEADS:
        raise BadRecording(
            f"its header names {described.n_sig or 0} leads where {LEADS} were expected"
        )
    if not 0 < (described.sig_len or 0) <= LONGEST:
        raise BadRecording(f"its header announces {described.sig_len or 0:,} samples")
    signals = header.with_suffix(".mat")
    if others := set(described.file_name or []) - {signals.name}:
        raise BadRecording(
            f"its header points to '{sorted(others)[0]}' where {signals.name} was expected"
        )
    if others := set(described.fmt or []) - {"16"}:
        raise BadRecording(
            f"its samples are stored in WFDB's format {sorted(others)[0]} where 16 was expected"
        )
    expected = 24 + 2 * described.n_sig * described.sig_len  # MATLAB 4 header, then 16-bit samples
    if not signals.is_file():
        raise BadRecording(f"its signal file {signals.name} is missing")
    if signals.stat().st_size != expected:
        raise BadRecording(
            f"{signals.name} has {signals.stat().st_size:,} bytes where its header announces "
            f"{expected:,}"
        )
    samples = np.empty(0)
    if signal:
        try:
            read = wfdb.rdrecord(str(header.with_suffix("")), channels=[channel - 1])
            samples = read.p_signal[:, 0]
        except Exception as error:
            raise BadRecording(f"the signal cannot be read ({type(error).__name__})") from None
    lines = [line.removeprefix("Dx:") for line in described.comments if line.startswith("Dx:")]
    if not lines:
        raise BadRecording("its header has no diagnosis (#Dx)")
    found = {name for word in lines[0].split(",") if (name := parse_diagnosis(word))}
    return Recording(header.stem, samples, frozenset(found))


def read_matlab(path: Path, channel: int, diagnoses: frozenset[str]) -> Recording:
    """Read one recording of the challenge's own form.

    Raises:
        BadRecording: it is no such struct, or lacks a lead.
    """
    try:
        signals = np.asarray(loadmat(path)["ECG"]["data"][0, 0])
    except Exception as error:  # scipy raises many kinds over what is no MATLAB file
        raise BadRecording(
            f"is not a struct 'ECG' with a field 'data' ({type(error).__name__})"
        ) from None
    if signals.ndim != 2 or signals.shape[0] != LEADS:
        raise BadRecording(
            f"its data has shape {signals.shape} where ({LEADS}, samples) was expected"
        )
    if not np.issubdtype(signals.dtype, np.number) or np.iscomplexobj(signals):
        raise BadRecording(f"its samples are {signals.dtype}, not real numbers")
    if not 0 < signals.shape[1] <= LONGEST:
        raise BadRecording(f"it holds {signals.shape[1]:,} samples")
    return Recording(path.stem, signals[channel - 1].astype(np.float64), diagnoses)


def read_reference(path: Path) -> dict[str, frozenset[str]]:
    """Read REFERENCE.csv: recording -> its one to three diagnoses.

    Raises:
        UserError: the file has other columns, an unknown label, or a recording twice.
    """
    labels: dict[str, frozenset[str]] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        head = next(rows, [])
        if not head or head[0].strip().lower() != "recording":
            raise UserError(
                f"{path}: its first line is {head} where "
                "'Recording,First_label,Second_label,Third_label' was expected."
            )
        for number, row in enumerate(rows, start=2):
            if not row:
                continue
            names = [parse_diagnosis(word) for word in row[1:] if word.strip()]
            if not names or None in names:
                raise UserError(
                    f"{path}, line {number}: labels {row[1:]}; each must be a number from 1 to "
                    f"{len(DIAGNOSES)}."
                )
            if row[0] in labels:
                raise UserError(
                    f"{path}, line {number}: recording {row[0]} stands here a second time."
                )
            labels[row[0]] = frozenset(name for name in names if name)
    return labels


def list_recordings(folder: Path) -> tuple[Path | None, list[Path]]:
    """List REFERENCE.csv, if there is one, and the recordings.

    These are `original_mat/*.mat` beside REFERENCE.csv, or else `cinc2020_wfdb/*.hea`.
    """
    matlab = folder / "original_mat"
    for reference in (matlab / "REFERENCE.csv", folder / "REFERENCE.csv"):
        if reference.is_file():
            return reference, sorted(matlab.rglob("*.mat"))
    return None, sorted((folder / "cinc2020_wfdb").rglob("*.hea"))


def read_all(
    folder: Path, channel: int, signals: bool = True
) -> Iterator[tuple[Path, Recording | BadRecording]]:
    """Yield every recording of a folder, or what is wrong with it.

    Args:
        signals: False reads headers and REFERENCE.csv only.

    Raises:
        UserError: there is neither form, a name is there twice, or a file leads out of the folder.
    """
    reference, paths = list_recordings(folder)
    labels = read_reference(reference) if reference else {}
    if not paths:
        raise UserError(
            f"dataset 'cpsc2018' finds no recordings under {folder}: neither original_mat/*.mat "
            "with a REFERENCE.csv nor cinc2020_wfdb/*.hea. Put them there (see "
            "datasets/cpsc2018.yaml), or use dataset=cpsc2018_synthetic."
        )
    if not reference:  # a signal without a header must not be skipped silently
        headers = {path.stem for path in paths}
        found = (folder / "cinc2020_wfdb").rglob("*.mat")
        paths += sorted(path for path in found if path.stem not in headers)
    seen: set[str] = set()
    for path in paths:
        if path.stem in seen:
            raise UserError(
                f"{path}: a recording named {path.stem} is already there; each may stand once."
            )
        seen.add(path.stem)
        require_inside(path, folder)
        try:
            if not reference and path.suffix == ".mat":
                raise BadRecording(f"its header {path.stem}.hea is missing")
            if reference and path.stem not in labels:
                raise BadRecording("has no line in REFERENCE.csv")
            if not reference:
                one = read_wfdb(path, channel, signals)
            elif signals:
                one = read_matlab(path, channel, labels[path.stem])
            else:
                one = Recording(path.stem, np.empty(0), labels[path.stem])
            if not np.isfinite(one.signal).all():
                raise BadRecording(f"lead {channel} holds samples that are no numbers")
            yield path, one
        except BadRecording as error:
            yield path, error
