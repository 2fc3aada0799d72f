"""Read leads of a WFDB record, and hold them to their checksums, which wfdb leaves aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

AT_ONCE = 2**22  # samples of a lead


class UnreadableSignal(Exception):  # noqa: N818 - a fact about a file, which callers name
    """What is wrong with a signal, in words that follow its file's name."""


def read_leads(
    path: Path, header: Any, channels: list[int], end: int | None = None, physical: bool = True
) -> np.ndarray:
    """Return the first `end` samples of some leads: float64 [samples, leads], in their units.

    The leads are read to their ends, where their sums are compared with the header's; one that the
    header has no checksum of is taken as it is.

    Args:
        header: the one of `path`, as wfdb reads it.
        physical: False returns the stored whole numbers.

    Raises:
        UnreadableSignal: a lead cannot be read, or has another checksum.
    """
    import wfdb

    name, total = str(path.with_suffix("")), np.zeros(len(channels), np.int64)
    first: Any = None
    try:
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
    except Exception as error:  # wfdb raises whatever it trips over
        raise UnreadableSignal(f"its signal cannot be read ({type(error).__name__})") from None
    for channel, found in zip(channels, total.tolist(), strict=True):
        if sums[channel] is not None and (found - sums[channel]) % 2**16:
            lead = header.sig_name[channel]
            raise UnreadableSignal(f"lead {lead} does not have its header's checksum")
    return samples
