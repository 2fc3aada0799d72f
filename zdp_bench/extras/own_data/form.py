"""What a file of a person's own becomes: the options of `dataset=folder` that decide its tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fit = Literal["resize", "crop"]


@dataclass(frozen=True)
class Form:
    """Sizes and public constants; none is computed from the data.

    Attributes:
        size, fit: pixels along a side, and how an image becomes a square.
        channels: of an image, a volume or a recording.
        window: (low, high) in the file's units, shown as black and white; None: each plane's own
            1st and 99th percentile.
        depth: planes of a volume that are one example together; None: each plane is an example.
        length: samples of a recording, which is cut or padded with zeros.
        rate: samples a second that every recording must have; 0 where there are none.
        leads: names of a WFDB record's signals; None: its first.
        spectrum: samples of a short-time Fourier window; None: the samples themselves.
    """

    size: int = 64
    fit: Fit = "resize"
    channels: int = 1
    window: tuple[float, float] | None = None
    depth: int | None = None
    length: int = 0
    rate: int = 0
    leads: tuple[str, ...] | None = None
    spectrum: int | None = None

    @property
    def image(self) -> tuple[int, ...]:
        """Shape of a picture or a plane, or of a whole volume."""
        plane = (self.channels, self.size, self.size)
        return plane if self.depth is None else (self.depth, *plane)

    @property
    def mask(self) -> tuple[int, ...]:
        """Shape of an image's mask."""
        plane = (self.size, self.size)
        return plane if self.depth is None else (self.depth, *plane)

    @property
    def signal(self) -> tuple[int, ...]:
        """Shape of a recording, or of its spectrogram [channels, frames, bins]."""
        if self.spectrum is None:
            return self.channels, self.length
        frames = 1 + (self.length - self.spectrum) // (self.spectrum // 2)
        return self.channels, frames, self.spectrum // 2 + 1
