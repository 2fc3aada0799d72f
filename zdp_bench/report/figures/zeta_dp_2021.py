"""Draws figures of Ziller et al. 2021, examples of its data, and reconstructed images of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.registry import register
from zdp_bench.report import names
from zdp_bench.report.figures import COLOURS, WIDTH
from zdp_bench.report.number_format import epsilon
from zdp_bench.report.papers import recipes_of

SECONDS = 5.0  # of each ECG that are shown
TABLE = "zeta_dp_2021/5"
ROWS = ("mri_nonprivate", "mri_private")
BEST_FIRST = ("official", "derived", "synthetic")


@register("figure", "zeta_dp_2021/fig1")
def example_ecgs(results: Path, data_root: Path) -> Figure:
    """Figure 1: lead III of a normal ECG and of one with a bundle branch block.

    The block is left if there is such an ECG, else right.

    Raises:
        UserError: the data root has neither CPSC 2018 nor its synthetic stand-in, or one of the two
            kinds is missing.
    """
    from zdp_bench.data import cpsc2018 as ecg

    official, synthetic = data_root / "CPSC2018", data_root / "synthetic"
    folders = [official] if official.is_dir() else sorted(synthetic.glob("cpsc2018-*"))
    if not folders:
        raise UserError(
            f"{data_root}: holds no ECGs. Put CPSC 2018 there, or make its stand-in with "
            "`zdp-bench run recipe=ecg dataset=cpsc2018_synthetic`; --root names another folder."
        )
    found: dict[str, ecg.Recording] = {}
    skipping = ecg.Cpsc2018(channel=3, bad_examples="skip")
    for _, one in skipping.read_each(ecg.find_recordings(folders[0])):
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
    import torch

    from zdp_bench.data import speech_commands as speech

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
        shades = _spectrogram(axes, values, limits, speech.RATE / 2000)
        axes.set_title(f"{letter}   {part}")
    real.set_ylabel("frequency in kHz")
    figure.colorbar(shades, ax=imaginary, label="log₁₀ of its modulus")
    return figure


def log_magnitude(part: np.ndarray) -> np.ndarray:
    """Return log₁₀ of |part|, 10⁻⁴ at least: 'log-magnitude transformed for clarity' (caption)."""
    return np.log10(np.maximum(np.abs(part), 1e-4))


def _spectrogram(axes: Axes, part: np.ndarray, limits: np.ndarray, highest: float) -> AxesImage:
    axes.grid(visible=False)
    axes.set_xlabel("time in s")
    return axes.imshow(
        log_magnitude(part).T,
        origin="lower",
        aspect="auto",
        extent=(0, 1, 0, highest),  # s, kHz
        vmin=limits[0],
        vmax=limits[1],
        cmap="cividis",
        interpolation="none",  # a vector file keeps its pixels as they are
    )


@register("figure", "reconstructions")
def reconstructions(results: Path, data_root: Path) -> Figure:
    """One test slice of our MRI runs: reference, zero-filled, and reconstructions, with errors.

    As the paper's Figure 3, but on the data that our runs had: all shown are of one data set. Each
    run left the slice beside its record (`example.npz`), so neither data nor weights are needed.

    Raises:
        UserError: there is no pair of a non-private and a private run.
    """
    runs = choose_runs(records.read_all(results), results)
    examples = [np.load(_example(results, run), allow_pickle=False) for run in runs]
    reference = examples[0]["reference"]
    images = {"reference": reference, _zero_filled(runs[0]): examples[0]["zero_filled"]}
    several = len({repr(run["config"]["model"]) for run in runs}) > 1
    for run, example in zip(runs, examples, strict=True):
        images[_label(run, several)] = example["reconstruction"]

    columns, (height, width) = len(images), reference.shape
    figure = Figure(figsize=(WIDTH, 2 * WIDTH / columns * height / width + 0.75))
    axes = figure.subplots(2, columns, squeeze=False)
    largest = reference.max()
    shades: dict[str, Any] = {"cmap": "viridis", "vmin": 0, "vmax": 0.5 * largest}
    for column, (name, image) in enumerate(images.items()):
        axes[0, column].imshow(image, cmap="gray", vmin=0, vmax=largest)
        axes[0, column].set_title(name, fontsize=7.5, loc="center")
        if column > 0:
            shown = axes[1, column].imshow(np.abs(image - reference), **shades)
    for each in axes.flat:
        each.set_axis_off()
    # The reference has no error: the colour bar takes its place.
    beside = axes[1, 0].inset_axes((0.85, 0.05, 0.08, 0.9))
    bar = figure.colorbar(shown, cax=beside, location="left")
    bar.set_label("|error|", fontsize=7.5)
    bar.set_ticks([0, 0.25 * largest, 0.5 * largest], labels=["0", "¼ max", "½ max"], fontsize=7)
    data = runs[0]["data"]
    of = f"{names.data(data['name'])} ({data['provenance']}), a test slice of {height} x {width}"
    figure.suptitle(f"{of}, 4x acceleration; SSIM over all test volumes", fontsize=8)
    return figure


def choose_runs(every: list[Record], results: Path) -> list[Record]:
    """Return the runs to show, model by model, the non-private before the private ones.

    They are one run of each recipe, of the models that have both, on one data set: of the best
    provenance there is, the one with most such runs.

    Raises:
        UserError: no non-private and private run share data set and model.
    """
    # {(provenance, data set as configured and found): {model: {recipe: run}}}
    by_data: dict[tuple[int, str], dict[str, dict[str, Record]]] = {}
    for run in every:
        if run["claims"]["table"] == TABLE and _example(results, run).is_file():
            provenance = BEST_FIRST.index(run["data"]["provenance"])
            data = provenance, repr(run["config"]["dataset"]) + run["data"]["notes"]
            of_model = by_data.setdefault(data, {}).setdefault(repr(run["config"]["model"]), {})
            of_model.setdefault(run["recipe"], run)
    ranked = []
    for (provenance, data_set), models in by_data.items():
        shown: list[Record] = []
        for _, runs in sorted(models.items()):
            if {run["claims"]["row"] for run in runs.values()} == set(ROWS):
                shown += sorted(runs.values(), key=_place)
        if shown:
            ranked.append((provenance, -len(shown), data_set, shown))
    if ranked:
        return min(ranked, key=lambda found: found[:3])[3]
    raise UserError(
        f"{results}: holds no example of a non-private and a private run of {TABLE} on the same "
        "data. Make them with `zdp-bench run recipe=NAME`, NAME one of "
        f"{', '.join(recipes_of(TABLE))}; dataset=kspace_phantom needs no download."
    )


def _example(results: Path, run: Record) -> Path:
    return records.folder(results, run["recipe"], run["run"]) / "example.npz"


def _place(run: Record) -> tuple[int, float]:
    return ROWS.index(run["claims"]["row"]), run["privacy"]["sampling"]["sample_rate"]


def _zero_filled(run: Record) -> str:
    ssim = run["metrics"].get("zero_filled_ssim")
    return "zero-filled" if ssim is None else f"zero-filled\nSSIM {ssim:.3f}"


def _network(run: Record) -> str:
    return names.model(run["config"]["model"]["name"]).removeprefix("complex ")


def _label(run: Record, by_model: bool) -> str:
    model = f"{_network(run)}\n" if by_model else ""
    ssim = f"SSIM {run['metrics']['ssim']:.3f}"
    if run["claims"]["row"] == "mri_nonprivate":
        return f"{model}non-private\n{ssim}"
    batch = run["privacy"]["sampling"]["expected_batch_size"]
    spent = run["privacy"]["epsilon_tight"]
    return f"{model}private\nbatch {batch:.0f}\ntight ε {epsilon(spent)}\n{ssim}"
