"""A stand-in for CPSC 2018: synthetic beats in WFDB's form, read as the release is.

They need no download. Normal beats have a narrow QRS complex; those with left bundle branch block a
broad, notched one and a T wave against it (Surawicz et al. 2009, the criteria: QRS ≥ 120 ms,
notched R in I, aVL, V5, V6). Rate, amplitude, baseline wander, mains hum and muscle
noise vary from recording to recording.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval
from scipy.io import savemat

from zdp_bench.data.cpsc2018 import FOLDER, LEADS, LONGEST, RATE, Cpsc2018
from zdp_bench.extras.standins.drawing import StandIn
from zdp_bench.registry import register

NAMES = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
GAIN = 1000  # units per mV


def draw_beat(t: np.ndarray, blocked: bool) -> np.ndarray:
    """Draw one heart beat in mV: t [samples] in seconds from the R peak."""
    waves = [(-0.17, 0.025, 0.12)]  # centre, width, height
    if blocked:  # broad, notched QRS; T against it
        waves += [(-0.025, 0.028, 0.9), (0.045, 0.028, 0.8), (0.30, 0.06, -0.3)]
    else:
        waves += [(-0.022, 0.008, -0.12), (0.0, 0.011, 1.1)]
        waves += [(0.024, 0.009, -0.25), (0.28, 0.05, 0.3)]
    drawn = [high * np.exp(-0.5 * ((t - centre) / width) ** 2) for centre, width, high in waves]
    return np.asarray(np.sum(drawn, axis=0))


def draw_recording(blocked: bool, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Draw twelve leads of one recording: [12, samples] in mV."""
    t = np.arange(round(seconds * RATE)) / RATE
    signal = np.zeros_like(t)
    moment = rng.uniform(0, 0.8)
    while moment < seconds + 0.5:
        signal += draw_beat(t - moment, blocked)
        moment += rng.normal(0.8, 0.04)
    wander = 0.1 * np.sin(2 * np.pi * rng.uniform(0.1, 0.4) * t + rng.uniform(0, 6.3))
    hum = 0.02 * np.sin(2 * np.pi * 50 * t)
    leads = rng.uniform(0.6, 1.2, LEADS)[:, None] * signal + wander + hum
    return leads + rng.normal(0, 0.05, (LEADS, len(t)))


def write_wfdb(folder: Path, name: str, leads: np.ndarray, diagnosis: str) -> None:
    """Write `name.hea`, and `name.mat`: 16-bit samples behind MATLAB 4's 24 bytes."""
    units = np.round(leads * GAIN).clip(-32767, 32767).astype(np.int16)  # [12, samples]
    savemat(folder / f"{name}.mat", {"val": units}, format="4")
    lines = [f"{name} {LEADS} {RATE} {units.shape[1]}"]
    for lead, row in zip(NAMES, units, strict=True):
        checksum = int(row.astype(np.int64).sum() & 0xFFFF)
        checksum -= 0x10000 * (checksum > 0x7FFF)
        lines.append(f"{name}.mat 16+24 {GAIN}/mV 16 0 {row[0]} {checksum} 0 {lead}")
    text = "\n".join([*lines, f"#Dx: {diagnosis}", ""])
    (folder / f"{name}.hea").write_text(text, encoding="ascii")


@register("dataset", "cpsc2018_synthetic")
@dataclass(frozen=True, kw_only=True)
class Cpsc2018Synthetic(StandIn, Cpsc2018):
    """Synthetic recordings in CPSC 2018's form."""

    drawn: ClassVar[tuple[str, ...]] = ("count", "seconds", "seed")

    count: Annotated[int, Interval(ge=2, le=9999)] = 1125
    seconds: Annotated[float, Interval(ge=0.01, le=LONGEST / RATE)] = 2.0
    seed: int = 0

    def write(self, folder: Path) -> None:
        inside = folder / FOLDER / "cinc2020_wfdb"
        inside.mkdir(parents=True)
        for number in range(self.count):
            blocked, rng = number % 2 == 1, np.random.default_rng([self.seed, number])
            leads = draw_recording(blocked, self.seconds, rng)
            write_wfdb(inside, f"S{number:04d}", leads, "LBBB" if blocked else "Normal")
