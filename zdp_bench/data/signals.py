"""Read recordings: sound files with soundfile and WFDB records with wfdb."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zdp_bench.data.files import is_file_name, require_inside
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import Unavailable, Unfit, expect, read_text, reading

MAX_HEADER = 2**20  # bytes
TRUNCATED = re.compile(r"data : (\d+) \(should be (\d+)\)")  # in libsndfile's log of a WAV file
NAMES_A_FILE = re.compile(r"[-\w]+\.\w+(/\d+)?")
# WFDB format that can be read -> bits of a stored sample; 0: compressed with FLAC, so it varies
BITS = {
    "80": 8,
    "160": 16,
    "212": 12,
    "16": 16,
    "61": 16,
    "24": 24,
    "32": 32,
    "508": 0,
    "516": 0,
    "524": 0,
}


@contextmanager
def open_sound(
    path: Path,
    rate: int,
    channels: int,
    max_samples: int,
) -> Iterator[Any]:
    """Open a WAV, FLAC or OGG file and check its header.

    Args:
        path: path of the file.
        rate: sampling rate that the file must have, in Hz; 0: any.
        channels: number of channels that it must have; 0: any.
        max_samples: maximum number of samples that its header may announce.
    """
    import soundfile

    with reading(path), soundfile.SoundFile(path) as file:
        fits = rate in (0, file.samplerate) and channels in (0, file.channels)
        expected = "one channel" if channels == 1 else f"{channels} channels"
        expect(
            fits,
            f"has {file.channels} channels at {file.samplerate} Hz; {expected} at {rate} Hz was "
            "expected",
        )
        truncated = TRUNCATED.search(file.extra_info)
        if truncated:
            announced, stored = truncated.groups()
            raise Unfit(
                f"announces {announced} bytes of samples, but has {stored}; it is truncated"
            )
        rule = f"announces {file.frames:,} samples where 1 to {max_samples:,} were expected"
        expect(0 < file.frames <= max_samples, rule)
        yield file


def read_sound(
    path: Path,
    rate: int,
    channels: int,
    max_samples: int,
) -> np.ndarray:
    """Read all samples of a sound file, float32 [samples, channels]; integers are scaled to ±1."""
    with open_sound(path, rate, channels, max_samples) as file:
        samples: np.ndarray = file.read(dtype="float32", always_2d=True)
        rule = f"announces {file.frames:,} samples, but {len(samples):,} are there"
        expect(len(samples) == file.frames, rule)
        expect(bool(np.isfinite(samples).all()), "contains samples that are not finite")
    return samples


# ---------------------------------------------------------------------------------------- WFDB


@dataclass(frozen=True)
class Record:
    """A WFDB record whose header was read.

    Attributes:
        path: path of the header.
        header: the header, as wfdb's object.
        comments: lines of the header after a #.
        leads: names of the leads.
        length: number of samples per lead.
        files: paths of all its files, the header first.
    """

    path: Path
    header: Any
    comments: list[str]
    leads: list[str]
    length: int
    files: list[Path]


def open_record(
    path: Path,
    rate: float,
    max_samples: int,
) -> Record:
    """Read the header of a record and check its signal files, which must be in its folder.

    Args:
        path: path of the header, a .hea file.
        rate: sampling rate that the record must have, in Hz; 0: any.
        max_samples: maximum number of samples that the header may announce.
    """
    import wfdb

    with reading(path):
        expect(
            path.suffix == ".hea", f"has the suffix {path.suffix}; WFDB needs .hea, so rename it"
        )
        text = read_text(path, MAX_HEADER, "latin-1")
        lines = [line.strip() for line in text.splitlines()]
        comments = [line.strip(" \t#") for line in lines if line.startswith("#")]
        _require_ascii(line for line in lines if not line.startswith("#"))
        name = next(iter(text.split()), "")
        stem = name.partition(".")[0]
        rule = f"calls itself '{name}'; WFDB expects only the name, '{stem}'"
        expect(not NAMES_A_FILE.fullmatch(name), rule)
        header = wfdb.rdheader(str(path.with_suffix("")))
        rule = f"has a rate of {float(header.fs):g} Hz where {rate:g} Hz was expected"
        expect(rate in (0, header.fs), rule)
        has_segments = isinstance(header, wfdb.MultiRecord)
        rule = "is a record of several segments; join them (wfdb.rdrecord, wrsamp)"
        expect(not has_segments, rule)
        expect(bool(header.file_name), "names no signal")
        are_named = len(header.file_name) == header.n_sig and all(header.sig_name)
        has_one_rate = set(header.samps_per_frame) == {1}
        expect(are_named and has_one_rate, "has unnamed leads, or leads of several rates")
        return _open_signals(path, header, comments, max_samples)


def signal_names(header: Path) -> set[str]:
    """Return the names of the signal files in a record's header; none if it cannot be read."""
    try:
        with reading(header):
            lines = read_text(header, MAX_HEADER, "latin-1").splitlines()
            _, *leads = [line for line in lines if line.strip() and not line.startswith("#")]
            return {lead.split()[0] for lead in leads}
    except Unavailable:
        raise
    except UserError:
        return set()


def _require_ascii(lines: Iterable[str]) -> None:
    """Reject characters that are not ASCII, because wfdb drops them and would read `1é0` as 10."""
    for line in lines:
        if not line.isascii():
            letter = next(letter for letter in line if not letter.isascii())
            raise Unfit(
                f"has {letter!r} in the line '{line[:40]}', but WFDB allows only ASCII characters; "
                "remove it"
            )


def _open_signals(
    path: Path,
    header: Any,
    comments: list[str],
    max_samples: int,
) -> Record:
    """Compare the sizes of a record's signal files with its header."""
    bits: dict[str, int] = {}  # file -> bits of one sample of all its leads
    starts: dict[str, int] = {}
    leads = zip(header.file_name, header.fmt, header.byte_offset, strict=True)
    for name, storage, offset in leads:
        expect(is_file_name(name), f"names the file {name}, which is missing beside it")
        expect(storage in BITS, f"is stored in format {storage}; {', '.join(BITS)} can be read")
        bits[name] = bits.get(name, 0) + BITS[storage]
        starts.setdefault(name, offset or 0)
    sizes = {}
    for name in bits:
        file = path.parent / name
        require_inside(file, path.parent)
        with reading(file):
            sizes[name] = file.stat().st_size - starts[name]
    length = header.sig_len
    if length is None:
        expect(all(bits.values()), "announces no length, and neither does FLAC")
        length = min(8 * sizes[name] // bits[name] for name in bits)
    expect(0 < length <= max_samples, f"announces {length:,} samples")
    for name, size in sizes.items():
        announced = bits[name] * length // 8
        with reading(path.parent / name):
            rule = f"has {size:,} bytes where its header announces {announced:,}; it is truncated"
            expect(size >= announced, rule)
    expect(not any(header.skew), "has leads that are skewed in time; align them first")
    files = [path, *(path.parent / name for name in bits)]
    return Record(path, header, comments, list(header.sig_name), length, files)


def find_channels(what: str, names: Sequence[str], wanted: Iterable[str]) -> list[int]:
    """Return the indices of the wanted channels in a file that names its channels.

    Args:
        what: what the file calls its channels: leads or columns.
        names: the file's names.
        wanted: the names to find.

    Raises:
        Unfit: a wanted name is missing, or the file repeats it.
    """
    indices = []
    for name in wanted:
        rule = f"has the {what} {', '.join(names) or 'without names'}, and '{name}' was expected"
        expect(names.count(name) == 1, rule)
        indices.append(names.index(name))
    return indices


def read_leads(
    record: Record,
    channels: list[int],
    end: int | None = None,
) -> np.ndarray:
    """Read leads of a record, float64 [samples, leads], in physical units.

    Leads are always read completely, and compared with the checksums in the header, if there are
    any.

    Args:
        record: the record.
        channels: indices of the leads, from 0.
        end: number of samples to return. Default: all.
    """
    import wfdb

    header, name = record.header, str(record.path.with_suffix(""))
    with reading(record.path):
        signals: Any = wfdb.rdrecord(name, channels=channels, physical=False)
        checksums = header.checksum or [None] * header.n_sig
        totals = signals.d_signal.sum(axis=0, dtype=np.int64).tolist()
        for channel, total in zip(channels, totals, strict=True):
            checksum = checksums[channel]
            is_same = checksum is None or (total - checksum) % 2**16 == 0
            lead = record.leads[channel]
            expect(is_same, f"the signal of lead {lead} does not have its header's checksum")
        samples = np.asarray(signals.dac(), dtype=np.float64)[:end]
        with np.errstate(over="ignore"):
            is_finite = bool(np.isfinite(samples.astype(np.float32)).all())
        expect(is_finite, "contains samples that are not finite, or not in float32")
    return samples
