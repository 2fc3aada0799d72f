"""Read WAV files of 16-bit samples."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from zdp_bench.errors import UserError


def read_wav(path: Path, rate: int, channels: int, longest: int) -> np.ndarray:
    """Return all samples, int16 [samples, channels].

    By Python's own `wave`: libsndfile silently shortens what a cut file announces.

    Args:
        longest: the most samples that a header may announce.

    Raises:
        UserError: no readable wav file of 16-bit samples, another rate or number of channels, no
            samples or too many, or fewer than announced.
    """
    try:
        with wave.open(str(path)) as file:
            found, count, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            announced = file.getnframes()
            if (found, count, width) != (rate, channels, 2):
                has = f"has {count} channels of {8 * width}-bit samples at {found} Hz"
                many = "one channel" if channels == 1 else f"{channels} channels"
                raise UserError(f"{path}: {has}; {many} of 16 bits at {rate} Hz was expected.")
            if not 0 < announced <= longest:
                raise UserError(
                    f"{path}: announces {announced:,} samples where 1 to {longest:,} were expected."
                )
            samples = np.frombuffer(file.readframes(announced), dtype="<i2")
    except (wave.Error, EOFError, ValueError, RuntimeError) as error:  # wave's, over any header
        raise UserError(
            f"{path}: is not a readable wav file of 16-bit samples "
            f"({str(error) or 'it ends in its header'})."
        ) from None
    if len(samples) != announced * channels:
        there = len(samples) // channels
        raise UserError(f"{path}: announces {announced:,} samples, but {there:,} are there.")
    return samples.reshape(announced, channels)
