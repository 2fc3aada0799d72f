"""The two forms that CPSC 2018's ECGs come in.

original_mat/     the challenge's own MATLAB structs (`ECG.data` [leads, samples] in mV, 500 Hz)
                  with REFERENCE.csv
cinc2020_wfdb/    PhysioNet's WFDB: a header that names leads, rate and diagnosis, and the
                  signal in a .mat beside it

Both may be there. A recording that is in both is read in the challenge's form, and its line in
REFERENCE.csv is its label in either.
"""

from __future__ import annotations

import csv
import math
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.io import loadmat

from zdp_bench.data.files import require_inside
from zdp_bench.data.formats.wfdb_leads import UnreadableSignal, read_leads
from zdp_bench.errors import UserError

RATE = 500  # Hz
LEADS = 12
LONGEST = 200 * RATE  # the longest released recording has 144 s
LARGEST_MAT = 16 * LEADS * LONGEST  # bytes of a MATLAB file, unpacked: twice what LONGEST needs
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
SINUS_RHYTHM = "426783006"  # in CPSC 2018 a normal ECG; elsewhere no more than the rhythm
_BY_CODE = {code: name for name, codes in DIAGNOSES.items() for code in codes}


class BadRecording(Exception):  # noqa: N818 - a fact about a file, which an option may forgive
    """Why one recording cannot be used; `dataset.bad_records` decides whether it is skipped."""


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


def read_wfdb(header: Path, channel: int, signal: bool = True) -> Recording:
    """Read one recording of the WFDB form.

    Args:
        signal: whether to read the samples too.

    Raises:
        BadRecording: header and signal disagree, the rate is not 500 Hz, a lead or the diagnosis is
            missing, or a diagnosis is none of the challenge's.
    """
    import wfdb

    try:
        described = wfdb.rdheader(str(header.with_suffix("")))
    except Exception as error:  # wfdb raises whatever its parser trips over
        raise BadRecording(f"the header cannot be read ({type(error).__name__})") from None
    if not isinstance(described, wfdb.Record):
        raise BadRecording("its header is of several segments where one was expected")
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
            samples = read_leads(header, described, [channel - 1])[:, 0]
        except UnreadableSignal as error:
            raise BadRecording(str(error)) from None
    lines = [line.removeprefix("Dx:") for line in described.comments if line.startswith("Dx:")]
    if not lines:
        raise BadRecording("its header has no diagnosis (#Dx)")
    return Recording(header.stem, samples, first_diagnosis(header.stem, lines[0]))


def first_diagnosis(name: str, line: str) -> str:
    """Return the first diagnosis of a header's list.

    Raises:
        BadRecording: one of the list is none of the challenge's nine, or the recording is of
            another database, where sinus rhythm does not mean a normal ECG.
    """
    words = [word.strip() for word in line.split(",")]
    names = [parse_diagnosis(word) for word in words]
    for word, known in zip(words, names, strict=True):
        if known is None:
            raise BadRecording(f"its diagnosis '{word}' is none of {', '.join(DIAGNOSES)}")
        if word == SINUS_RHYTHM and not re.fullmatch(r"A\d{4}", name):
            raise BadRecording(
                f"its diagnosis {word}, sinus rhythm, means Normal in CPSC 2018 only, "
                "whose recordings are named A0001 to A6877"
            )
    return str(names[0])


def read_matlab(path: Path, channel: int, diagnosis: str) -> Recording:
    """Read one recording of the challenge's own form.

    Raises:
        BadRecording: it is no such struct, or lacks a lead.
    """
    _require_modest(path)
    try:
        signals = np.asarray(loadmat(path, variable_names=["ECG"])["ECG"]["data"][0, 0])
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
    return Recording(path.stem, signals[channel - 1].astype(np.float64), diagnosis)


def _require_modest(path: Path) -> None:
    """Refuse a MATLAB file that unpacks to more than a recording needs, before scipy unpacks it.

    The format (MATLAB 5): 128 bytes; then elements of type, length and bytes, which may be
    compressed. Each array in one has a header with its dimensions.

    Raises:
        BadRecording: it does, or is of another format.
    """
    if (size := path.stat().st_size) > LARGEST_MAT:
        raise BadRecording(f"has {size:,} bytes, more than any recording of this set")
    raw = path.read_bytes()
    if raw[126:128] not in (b"IM", b"MI"):
        raise BadRecording("is not a struct 'ECG' with a field 'data' (no MATLAB 5 file)")
    order = "<" if raw[126:128] == b"IM" else ">"
    flags, dimensions = struct.pack(order + "II", 6, 8), struct.pack(order + "I", 5)
    start = 128
    while start + 8 <= len(raw):
        kind, length = struct.unpack_from(order + "II", raw, start)
        body = raw[start + 8 : start + 8 + length]
        if kind == COMPRESSED:
            try:
                body = zlib.decompressobj().decompress(body, LARGEST_MAT)
            except zlib.error:
                raise BadRecording("its compressed data is damaged") from None
        shapes = re.finditer(re.escape(flags) + b".{8}" + re.escape(dimensions), body, re.DOTALL)
        for found in shapes:
            (count,) = struct.unpack_from(order + "I", body.ljust(found.end() + 4), found.end())
            sides = body[found.end() + 4 : found.end() + 4 + min(count, 32)]
            whole = sides[: len(sides) // 4 * 4]
            if math.prod(side for (side,) in struct.iter_unpack(order + "I", whole)) > len(body):
                raise BadRecording("announces a larger array than it holds")
        if len(body) >= LARGEST_MAT:
            raise BadRecording(f"unpacks to {LARGEST_MAT:,} bytes or more")
        start += 8 + length


def read_reference(path: Path) -> dict[str, str]:
    """Read REFERENCE.csv: recording -> the first of its one to three diagnoses.

    Raises:
        UserError: the file is no UTF-8 text or table, has other columns, an unknown label, or a
            recording twice.
    """
    labels: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        rows = iter(list(csv.reader(lines)))
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; save it as UTF-8.") from None
    except csv.Error as error:
        raise UserError(f"{path}: is no table of comma-separated values ({error}).") from None
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
            raise UserError(f"{path}, line {number}: recording {row[0]} stands here a second time.")
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


def read_all(
    folder: Path, channel: int, signals: bool = True
) -> Iterator[tuple[Path, Recording | BadRecording]]:
    """Yield every recording of a folder, or what is wrong with it.

    Args:
        signals: False reads headers and REFERENCE.csv only.

    Raises:
        UserError: there is neither form, a name is there twice in one of them, or a file leads out
            of the folder.
    """
    reference, paths = find_reference(folder), list_recordings(folder)
    labels = read_reference(reference) if reference else {}
    if not paths:
        raise UserError(
            f"dataset 'cpsc2018' finds no recordings under {folder}: neither original_mat/*.mat "
            "with a REFERENCE.csv nor cinc2020_wfdb/*.hea. Put them there (see "
            "datasets/cpsc2018.yaml), or use dataset=cpsc2018_synthetic."
        )
    seen: set[str] = set()
    for path in paths:
        if path.stem in seen:
            raise UserError(
                f"{path}: a recording named {path.stem} is already there; each may stand once."
            )
        seen.add(path.stem)
        require_inside(path, folder)
        try:
            yield path, _read(path, folder, channel, labels, signals)
        except BadRecording as error:
            yield path, error
        except OSError as error:
            yield path, BadRecording(f"cannot be read ({error.strerror or type(error).__name__})")


def _read(
    path: Path, folder: Path, channel: int, labels: dict[str, str], signal: bool
) -> Recording:
    """Read a recording of either form; `labels` are REFERENCE.csv's."""
    label = labels.get(path.stem)
    if path.suffix == ".hea":
        one = read_wfdb(path, channel, signal)
        one = replace(one, diagnosis=label or one.diagnosis)
    elif not path.is_relative_to(folder / "original_mat"):
        raise BadRecording(f"its header {path.stem}.hea is missing")
    elif label is None:
        raise BadRecording("has no line in REFERENCE.csv")
    elif signal:
        one = read_matlab(path, channel, label)
    else:
        one = Recording(path.stem, np.empty(0), label)
    if not np.isfinite(one.signal).all():
        raise BadRecording(f"lead {channel} holds samples that are no numbers")
    return one
