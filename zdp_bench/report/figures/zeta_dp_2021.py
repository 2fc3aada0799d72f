"""Draws Figures 1 and 2 of Ziller et al. 2021 from real or synthetic examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zdp_bench.data import cpsc2018 as ecg
from zdp_bench.data import speech_commands as speech
from zdp_bench.errors import UserError
from zdp_bench.registry import register
from zdp_bench.report.figures import COLOURS, WIDTH

SECONDS = 5.0  # of each ECG that are shown


@register("figure", "zeta_dp_2021/fig1")
def example_ecgs(results: Path, data_root: Path) -> Figure:
    """Figure 1: lead III of a normal ECG and of one with a bundle branch block.

    The block is left if there is such an ECG, else right.

    Raises:
        UserError: the data root has neither CPSC 2018 nor its synthetic stand-in, or one of the two
            kinds is missing.
    """
    official, synthetic = data_root / "CPSC2018", data_root / "synthetic"
    folders = [official] if official.is_dir() else sorted(synthetic.glob("cpsc2018-*"))
    if not folders:
        raise UserError(
            f"{data_root}: holds no ECGs. Put CPSC 2018 there, or make its stand-in with "
            "`zdp-bench run recipe=ecg dataset=cpsc2018_synthetic`; --root names another folder."
        )
    found: dict[str, ecg.Recording] = {}
    for _, one in ecg.Recordings.find(folders[0]).read_all(3, "skip"):
        found.setdefault(one.diagnosis, one)
        if {"Normal", "LBBB"} <= found.keys():
            break
    blocked = next((name for name in ("LBBB", "RBBB") if name in found), None)
    if blocked is None or "Normal" not in found:
        raise UserError(
            f"{folders[0]}: a normal ECG and one with LBBB or RBBB are needed; "
            "--root names another data root."
        )

    figure = Figure(figsize=(WIDTH, 0.55 * WIDTH))
    side = "left" if blocked == "LBBB" else "right"
    shown = {
        "A   sinus rhythm": found["Normal"],
        f"B   {side} bundle branch block": found[blocked],
    }
    source = "CPSC 2018" if folders[0] == official else "synthetic"
    grid = figure.subplots(2, sharex=True, sharey=True)
    for axes, (title, one), colour in zip(grid, shown.items(), COLOURS, strict=False):
        samples = one.signal[: round(SECONDS * ecg.RATE)]
        time = np.arange(len(samples)) / ecg.RATE
        axes.plot(time, samples, color=colour, linewidth=0.8, linestyle="-")
        axes.set_title(f"{title} ({source}, {one.name})")
        axes.set_ylabel("lead III in mV")
        axes.set_xlim(0, SECONDS)
    axes.set_xlabel(f"time in s; the first {512 / ecg.RATE:.2f} s are what the network sees")
    for axes in figure.axes:
        axes.axvline(512 / ecg.RATE, color="0.4", linewidth=0.8, linestyle="--")
    return figure


@register("figure", "zeta_dp_2021/fig2")
def example_word(results: Path, data_root: Path) -> Figure:
    """Figure 2: the waveform of a spoken 'stop', and the parts of its complex spectrogram.

    Raises:
        UserError: the data root has neither Speech Commands nor its synthetic stand-in.
    """
    folders = (data_root / speech.FOLDER, *sorted((data_root / "synthetic").glob("speech-*")))
    clips = next(
        (found for folder in folders if (found := sorted((folder / "stop").glob("*.wav")))), None
    )
    if not clips:
        raise UserError(
            f"{data_root}: holds no word 'stop'. Put Speech Commands there, or make its stand-in "
            "with `zdp-bench run recipe=speech dataset=speech_commands_synthetic`; "
            "--root names another folder."
        )
    wave = speech.read_clip(clips[0])
    spectrum = speech.stft(torch.from_numpy(wave[None]))[0].numpy()  # [124, 129]

    made = "" if clips[0].is_relative_to(data_root / speech.FOLDER) else ", synthetic"
    figure = Figure(figsize=(WIDTH, 0.42 * WIDTH))
    time, real, imaginary = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    # The least and largest sample of each 1/400 s: finer than the panel is in print.
    parts = np.array_split(wave, 400)
    at = np.linspace(0, len(wave) / speech.RATE, len(parts))
    low, high = [part.min() for part in parts], [part.max() for part in parts]
    time.fill_between(at, low, high, color=COLOURS[0], linewidth=0.3)
    time.set(xlabel="time in s", ylabel="amplitude", xlim=(0, 1), title=f"A   'stop'{made}")
    limits = np.percentile(log_magnitude(spectrum.real), [1, 99.9])
    for axes, letter, part, values in (
        (real, "B", "real part", spectrum.real),
        (imaginary, "C", "imaginary part", spectrum.imag),
    ):
        shades = _spectrogram(axes, values, limits)
        axes.set_title(f"{letter}   {part}")
    real.set_ylabel("frequency in kHz")
    figure.colorbar(shades, ax=imaginary, label="log₁₀ of its modulus")
    return figure


def log_magnitude(part: np.ndarray) -> np.ndarray:
    """Return log₁₀ of |part|, 10⁻⁴ at least: 'log-magnitude transformed for clarity' (caption)."""
    return np.log10(np.maximum(np.abs(part), 1e-4))


def _spectrogram(axes: Axes, part: np.ndarray, limits: np.ndarray):  # type: ignore[no-untyped-def]
    extent = (0, 1, 0, speech.RATE / 2000)
    axes.grid(visible=False)
    axes.set_xlabel("time in s")
    return axes.imshow(
        log_magnitude(part).T,
        origin="lower",
        aspect="auto",
        extent=extent,
        vmin=limits[0],
        vmax=limits[1],
        cmap="cividis",
        interpolation="none",  # a vector file keeps its pixels as they are
    )
