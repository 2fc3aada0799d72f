"""Draws reconstructed images of our MRI runs, as Figure 3 of Ziller et al. 2021."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.registry import register
from zdp_bench.report import names
from zdp_bench.report.figures import WIDTH
from zdp_bench.report.number_format import epsilon
from zdp_bench.report.papers import recipes_of

TABLE = "zeta_dp_2021/5"
ROWS = ("mri_nonprivate", "mri_private")
BEST_FIRST = ("official", "derived", "synthetic")


@register("figure", "reconstructions")
def reconstructions(results: Path) -> Figure:
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
        f"{results}: has no non-private and private run of {TABLE} on the same "
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
