"""A stand-in for CPSC 2018 without a download: synthetic ECGs in WFDB's format.

Normal beats have a narrow QRS complex. Beats with left bundle branch block have a broad, notched
QRS complex and a T wave of opposite sign (criteria in Surawicz et al. 2009: QRS ≥ 120 ms, notched R
in I, aVL, V5, V6). The times of the beats, the amplitudes, baseline wander and muscle noise vary
between recordings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval
from scipy.io import savemat

from zdp_bench.data.cpsc2018 import FOLDER, LEAD_NAMES, LEADS, MAX_SAMPLES, RATE, Cpsc2018
from zdp_bench.extras.standins.drawing import StandIn
from zdp_bench.registry import register

GAIN = 1000  # units per mV


# The waves of a beat: centre relative to the R peak and width, both in seconds, and height in mV.
NORMAL = (
    (-0.17, 0.025, 0.12),
    (-0.022, 0.008, -0.12),
    (0.0, 0.011, 1.1),
    (0.024, 0.009, -0.25),
    (0.28, 0.05, 0.3),
)
BLOCKED = (  # broad, notched QRS; T of opposite sign
    (-0.17, 0.025, 0.12),
    (-0.025, 0.028, 0.9),
    (0.045, 0.028, 0.8),
    (0.30, 0.06, -0.3),
)


def draw_beat(t: np.ndarray, blocked: bool) -> np.ndarray:
    """Return one heart beat in mV at times t, [samples], in seconds from the R peak."""
    waves = []
    for centre, width, height in BLOCKED if blocked else NORMAL:
        distance = (t - centre) / width
        waves.append(height * np.exp(-0.5 * distance**2))
    return np.asarray(np.sum(waves, axis=0))


def draw_recording(
    blocked: bool,
    seconds: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the twelve leads of a recording in mV, [12, samples]."""
    t = np.arange(round(seconds * RATE)) / RATE
    signal = np.zeros_like(t)
    beat_time = rng.uniform(0, 0.8)
    while beat_time < seconds + 0.5:
        signal += draw_beat(t - beat_time, blocked)
        beat_time += rng.normal(0.8, 0.04)
    frequency = rng.uniform(0.1, 0.4)
    phase = rng.uniform(0, 6.3)
    wander = 0.1 * np.sin(2 * np.pi * frequency * t + phase)
    hum = 0.02 * np.sin(2 * np.pi * 50 * t)
    gains = rng.uniform(0.6, 1.2, LEADS)[:, None]
    muscle_noise = rng.normal(0, 0.05, (LEADS, len(t)))
    return gains * signal + wander + hum + muscle_noise


def write_wfdb(
    folder: Path,
    name: str,
    leads: np.ndarray,
    diagnosis: str,
) -> None:
    """Write a recording's header, `name.hea`, and its 16-bit samples, `name.mat`.

    The header states that the samples begin at byte 24, after MATLAB 4's header.
    """
    units = np.round(leads * GAIN).clip(-32767, 32767)
    units = units.astype(np.int16)  # [12, samples]
    savemat(folder / f"{name}.mat", {"val": units}, format="4")
    lines = [f"{name} {LEADS} {RATE} {units.shape[1]}"]
    for lead, row in zip(LEAD_NAMES, units, strict=True):
        checksum = row.sum(dtype=np.int16)  # WFDB's: the sum's lower 16 bits, signed
        lines.append(f"{name}.mat 16+24 {GAIN}/mV 16 0 {row[0]} {checksum} 0 {lead}")
    text = "\n".join([*lines, f"#Dx: {diagnosis}", ""])
    (folder / f"{name}.hea").write_text(text, encoding="ascii")


@register("dataset", "cpsc2018_synthetic")
@dataclass(frozen=True, kw_only=True)
class Cpsc2018Synthetic(StandIn, Cpsc2018):
    """Synthetic recordings in CPSC 2018's layout, half of them with left bundle branch block."""

    drawn: ClassVar[tuple[str, ...]] = ("count", "seconds", "seed")

    count: Annotated[int, Interval(ge=2, le=9999)] = 1125
    seconds: Annotated[float, Interval(ge=0.01, le=MAX_SAMPLES / RATE)] = 2.0
    seed: int = 0

    def write(self, folder: Path) -> None:
        inside = folder / FOLDER / "cinc2020_wfdb"
        inside.mkdir(parents=True)
        for number in range(self.count):
            is_blocked = number % 2 == 1
            rng = np.random.default_rng([self.seed, number])
            leads = draw_recording(is_blocked, self.seconds, rng)
            write_wfdb(inside, f"S{number:04d}", leads, "LBBB" if is_blocked else "Normal")
