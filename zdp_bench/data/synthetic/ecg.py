"""A stand-in for CPSC 2018 that needs no download: synthetic beats written in the real WFDB form, read by the real adapter.

Normal beats have a narrow QRS complex; those with left bundle branch block a broad, notched one and a T wave against it
(Surawicz et al. 2009, the criteria: QRS ≥ 120 ms, notched R in I, aVL, V5, V6). Rate, amplitude, baseline wander, mains hum
and muscle noise vary from recording to recording.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy.io import savemat

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.cpsc2018 import LEADS, LONGEST, RATE, Norm, load, parts
from zdp_bench.data.files import made_whole
from zdp_bench.errors import require
from zdp_bench.registry import register

NAMES = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
GAIN = 1000  # units per mV


def wave(t: np.ndarray, centre: float, width: float, height: float) -> np.ndarray:
    """One Gaussian wave: t [samples] in seconds from the R peak."""
    return height * np.exp(-0.5 * ((t - centre) / width) ** 2)


def beat(t: np.ndarray, blocked: bool) -> np.ndarray:
    """One heart beat around its R peak, in mV."""
    p = wave(t, -0.17, 0.025, 0.12)
    if blocked:  # broad, notched QRS; T against it
        return (
            p + wave(t, -0.025, 0.028, 0.9) + wave(t, 0.045, 0.028, 0.8) + wave(t, 0.30, 0.06, -0.3)
        )
    return (
        p
        + wave(t, -0.022, 0.008, -0.12)
        + wave(t, 0.0, 0.011, 1.1)
        + wave(t, 0.024, 0.009, -0.25)
        + wave(t, 0.28, 0.05, 0.3)
    )


def recording(blocked: bool, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Twelve leads of one recording: [12, samples] in mV."""
    t = np.arange(round(seconds * RATE)) / RATE
    signal = np.zeros_like(t)
    moment = rng.uniform(0, 0.8)
    while moment < seconds + 0.5:
        signal += beat(t - moment, blocked)
        moment += rng.normal(0.8, 0.04)
    wander = 0.1 * np.sin(2 * np.pi * rng.uniform(0.1, 0.4) * t + rng.uniform(0, 6.3))
    hum = 0.02 * np.sin(2 * np.pi * 50 * t)
    leads = rng.uniform(0.6, 1.2, LEADS)[:, None] * signal + wander + hum
    return leads + rng.normal(0, 0.05, (LEADS, len(t)))


def write_wfdb(folder: Path, name: str, leads: np.ndarray, diagnosis: str) -> None:
    """One recording in PhysioNet's form: `name.hea`, and `name.mat`, a MATLAB 4 matrix of 16-bit samples behind 24 bytes."""
    units = np.round(leads * GAIN).clip(-32767, 32767).astype(np.int16)  # [12, samples]
    savemat(folder / f"{name}.mat", {"val": units}, format="4")
    lines = [f"{name} {LEADS} {RATE} {units.shape[1]}"]
    for lead, row in zip(NAMES, units, strict=True):
        checksum = int(row.astype(np.int64).sum() & 0xFFFF)
        checksum -= 0x10000 * (checksum > 0x7FFF)
        lines.append(f"{name}.mat 16+24 {GAIN}/mV 16 0 {row[0]} {checksum} 0 {lead}")
    (folder / f"{name}.hea").write_text(
        "\n".join([*lines, f"#Dx: {diagnosis}", ""]), encoding="ascii"
    )


def write_set(folder: Path, count: int, seconds: float, seed: int) -> None:
    """`count` recordings, every other one blocked, under `folder/cinc2020_wfdb`; whole or not at all."""
    with made_whole(folder) as partial:
        (partial / "cinc2020_wfdb").mkdir()
        for number in range(count):
            leads = recording(number % 2 == 1, seconds, np.random.default_rng([seed, number]))
            write_wfdb(
                partial / "cinc2020_wfdb",
                f"S{number:04d}",
                leads,
                "LBBB" if number % 2 else "Normal",
            )


@register("dataset", "cpsc2018_synthetic")
def cpsc2018_synthetic(
    root: Path,
    *,
    count: int = 1125,
    seconds: float = 2.0,
    seed: int = 0,
    fft_norm: Norm = "backward",
    test_share: float = 0.1,
) -> Splits:
    """Synthetic recordings, written once under `synthetic/` of the data root and read as CPSC 2018 is: complex64 [512]."""
    _parts(count, seconds, test_share)
    folder = root / "synthetic" / f"cpsc2018-{count}-{seconds}-{seed}"
    if not folder.is_dir():
        write_set(folder, count, seconds, seed)
    return load(
        folder,
        "synthetic",
        "generated beats: ",
        positive="LBBB",
        negative="Normal",
        channel=3,
        length=5000,
        fft_length=512,
        fft_norm=fft_norm,
        test_share=test_share,
        split_seed=0,
        bad_records="refuse",
    )


def _parts(count: int, seconds: float, test_share: float) -> tuple[int, int]:
    """How many recordings are to train and to test on.

    Raises:
        UserError: an option means nothing.
    """
    require(2 <= count <= 9999, "dataset.count", count, "must lie between 2 and 9,999 recordings")
    fits = 1 <= round(seconds * RATE) <= LONGEST
    require(
        fits,
        "dataset.seconds",
        seconds,
        f"must be positive and at most {LONGEST // RATE}: samples come {RATE} a second",
    )
    return parts(Path("synthetic"), "LBBB", "Normal", [count - count // 2, count // 2], test_share)


@register("outline", "cpsc2018_synthetic")
def outline(
    root: Path, *, count: int, seconds: float, test_share: float, **_: object
) -> DatasetInfo:
    """As many as asked for; 512 samples are seen."""
    train, test = _parts(count, seconds, test_share)
    return DatasetInfo(train, test, (512,), 1, torch.complex64, unit="recording")
