"""Read recordings, WAV or WFDB, as samples of one length or as spectrograms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from zdp_bench.data.files import require_inside
from zdp_bench.data.formats.wav import read_wav
from zdp_bench.data.formats.wfdb_leads import UnreadableSignal, read_leads
from zdp_bench.errors import UserError
from zdp_bench.extras.own_data.form import Form

LONGEST = 2**28  # samples; a header that announces more is damaged
LARGEST_HEADER = 2**20  # bytes
# WFDB's formats that are read: bits of a sample on the disk.
BITS = {"80": 8, "212": 12, "16": 16, "61": 16, "24": 24, "32": 32}


def read_wav_clip(path: Path, form: Form) -> np.ndarray:
    """Return samples between -1 and 1: float32 [1, channels, length], or `to_spectrum`'s.

    Raises:
        UserError: see `read_wav`.
    """
    samples = read_wav(path, form.rate, form.channels, LONGEST)
    return _shape(samples.T[:, : form.length] / np.float32(2**15), form)


def read_wfdb(path: Path, form: Form) -> np.ndarray:
    """Return samples in the header's units: float32 [1, channels, length], or `to_spectrum`'s.

    Args:
        path: the header, .hea.

    Raises:
        UserError: header and signal files disagree, another rate, or a lead that is missing.
    """
    header = _read_header(path, form)
    names = list(header.sig_name)
    for lead in form.leads or ():
        if names.count(lead) != 1:
            raise UserError(f"{path}: has the leads {', '.join(names)}, and '{lead}' was expected.")
    if len(names) < form.channels:
        raise UserError(
            f"{path}: has {len(names)} leads where dataset.channels={form.channels} were expected."
        )
    chosen = [names.index(lead) for lead in form.leads] if form.leads else [*range(form.channels)]
    end = min(form.length, header.sig_len)
    try:
        samples = read_leads(path, header, chosen, end).astype(np.float32).T
    except UnreadableSignal as error:
        raise UserError(f"{path}: {error}.") from None
    if samples.shape != (len(chosen), end) or not np.isfinite(samples).all():
        raise UserError(f"{path}: holds samples that are no numbers.")
    return _shape(samples, form)


def count_record(path: Path, form: Form) -> int:
    """Return 1, the examples of a record, if its header can be read.

    Raises:
        UserError: see `read_wfdb`.
    """
    _read_header(path, form)
    return 1


def files_of_record(path: Path, form: Form) -> list[Path]:
    """Return a record's header and the files that it names."""
    named = dict.fromkeys(_read_header(path, form).file_name)
    return [path, *(path.parent / name for name in named)]


def _read_header(path: Path, form: Form) -> Any:
    """Read a header and hold its signal files to it; no file outside its folder is touched."""
    import wfdb

    if path.stat().st_size > LARGEST_HEADER:
        raise UserError(f"{path}: has {path.stat().st_size:,} bytes, more than a header of WFDB.")
    try:
        header = wfdb.rdheader(str(path.with_suffix("")))
        usual = isinstance(header, wfdb.Record) and len(header.file_name) == header.n_sig
        rate, length = float(header.fs), int(header.sig_len or 0)
        signals = list(zip(header.file_name, header.fmt, header.byte_offset, strict=True))
        usual = usual and all(header.sig_name) and {*header.samps_per_frame} == {1}
    except Exception as error:  # wfdb raises whatever its parser trips over
        raise UserError(
            f"{path}: is no readable header of WFDB ({type(error).__name__}); it is damaged or "
            "something else."
        ) from None
    if not usual:
        raise UserError(f"{path}: has segments, unnamed leads or leads of several rates.")
    if rate != form.rate:
        raise UserError(f"{path}: its rate is {rate:g} Hz where {form.rate} Hz was expected.")
    if not 0 < length <= LONGEST:
        raise UserError(f"{path}: announces {length:,} samples.")
    bits = dict.fromkeys((name for name, *_ in signals), 0)
    for name, stored, _ in signals:
        if Path(name).name != name or ":" in name:
            raise UserError(f"{path}: names the file {name}, which is not beside it.")
        if stored not in BITS:
            known = ", ".join(BITS)
            raise UserError(f"{path}: is stored in format {stored}; {known} can be read.")
        bits[name] += BITS[stored]
    for name, each in bits.items():
        file = path.parent / name
        require_inside(file, path.parent)
        start = next(offset or 0 for other, _, offset in signals if other == name)
        announced = start + each * length // 8
        if not file.is_file():
            raise UserError(f"{path}: its signal file {name} is missing.")
        if (size := file.stat().st_size) < announced:
            raise UserError(
                f"{file}: has {size:,} bytes where its header announces {announced:,}; it is cut "
                "off."
            )
    return header


def _shape(samples: np.ndarray, form: Form) -> np.ndarray:
    """Pad samples [channels, up to length] with zeros at their end; or make their spectrogram."""
    whole = np.zeros((form.channels, form.length), dtype=np.float32)
    whole[:, : samples.shape[1]] = samples
    return (whole if form.spectrum is None else to_spectrum(whole, form.spectrum))[None]


def to_spectrum(samples: np.ndarray, window: int) -> np.ndarray:
    """Return complex64 [channels, frames, bins] of samples [channels, n].

    Hann windows of `window` samples, each half a window after the last; window // 2 + 1 bins.
    """
    found = torch.stft(
        torch.from_numpy(samples),
        window,
        max(1, window // 2),
        window=torch.hann_window(window),
        center=False,
        return_complex=True,
    )
    return found.transpose(1, 2).contiguous().numpy()
