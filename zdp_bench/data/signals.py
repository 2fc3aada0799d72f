"""Read samples of recordings: WAV files, and WFDB records, which are held to their checksums."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

from zdp_bench.foreign_files import expect, reading

AT_ONCE = 2**22  # samples of a lead
LARGEST_HEADER = 2**20  # bytes


def read_wav(path: Path, rate: int, channels: int, longest: int) -> np.ndarray:
    """Return all 16-bit samples of a WAV file, int16 [samples, channels].

    By Python's own `wave`: libsndfile silently shortens what a cut file announces.

    Args:
        longest: the most samples that a header may announce.
    """
    with reading(path), wave.open(str(path)) as file:
        found, count, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
        announced = file.getnframes()
        has = f"has {count} channels of {8 * width}-bit samples at {found} Hz"
        many = "one channel" if channels == 1 else f"{channels} channels"
        fits = (found, count, width) == (rate, channels, 2)
        expect(fits, f"{has}; {many} of 16 bits at {rate} Hz was expected")
        rule = f"announces {announced:,} samples where 1 to {longest:,} were expected"
        expect(0 < announced <= longest, rule)
        samples = np.frombuffer(file.readframes(announced), dtype="<i2")
        there = len(samples) // channels
        rule = f"announces {announced:,} samples, but {there:,} are there"
        expect(len(samples) == announced * channels, rule)
    return samples.reshape(announced, channels)


def read_header(path: Path) -> Any:
    """Return the header of a WFDB record of one segment, as wfdb reads it."""
    import wfdb

    with reading(path, LARGEST_HEADER):
        header = wfdb.rdheader(str(path.with_suffix("")))
        expect(isinstance(header, wfdb.Record), "is of several segments where one was expected")
        expect(bool(header.file_name), "names no signal")
    return header


def read_leads(
    path: Path, header: Any, channels: list[int], end: int | None = None, physical: bool = True
) -> np.ndarray:
    """Return the first `end` samples of some leads: float64 [samples, leads], in their units.

    The leads are read to their ends, where their sums are compared with the header's; one that the
    header has no checksum of is taken as it is.

    Args:
        header: the one of `path`, as wfdb reads it.
        physical: False returns the stored whole numbers.
    """
    import wfdb

    name, total = str(path.with_suffix("")), np.zeros(len(channels), np.int64)
    first: Any = None
    with reading(path):
        step = max(AT_ONCE, end or header.sig_len)
        for start in range(0, header.sig_len, step):
            stop = min(start + step, header.sig_len)
            read = wfdb.rdrecord(
                name, sampfrom=start, sampto=stop, channels=channels, physical=False
            )
            first = first or read
            total += read.d_signal.sum(axis=0, dtype=np.int64)
        sums = header.checksum or [None] * header.n_sig
        samples = np.asarray(first.dac() if physical else first.d_signal, dtype=np.float64)[:end]
        for channel, found in zip(channels, total.tolist(), strict=True):
            same = sums[channel] is None or (found - sums[channel]) % 2**16 == 0
            lead = header.sig_name[channel]
            expect(same, f"the signal of lead {lead} does not have its header's checksum")
        expect(bool(np.isfinite(samples).all()), "holds samples that are no numbers")
    return samples
