"""Figure 3 of Ziller et al. 2021: an image, and what is made of a quarter of its k-space without and with privacy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from zdp_bench import assets, records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.registry import register
from zdp_bench.report.figures import WIDTH

TABLE = "zeta_dp_2021/5"
ROWS = ("mri_nonprivate", "mri_private")
BEST_FIRST = ("official", "derived", "synthetic")


@register("figure", "zeta_dp_2021/fig3")
def reconstructions(results: Path, data_root: Path) -> Figure:
    """One test slice: reference, zero-filled, and the reconstructions of Table 5's runs, each above its error.

    Runs of one data set stand side by side, model by model: of the best provenance there is, and there of the one with most
    recipes. Each run left the slice beside its record (`example.npz`), so neither data nor weights are needed.

    Raises:
        UserError: there is no such pair of runs.
    """
    runs = chosen(records.read_all(results), results)
    examples = [np.load(_example(results, run), allow_pickle=False) for run in runs]
    reference = examples[0]["reference"]
    images = {"reference": reference, "zero-filled": examples[0]["zero_filled"]}
    several = len({repr(run["config"]["model"]) for run in runs}) > 1
    images |= {
        _label(run, several): example["reconstruction"]
        for run, example in zip(runs, examples, strict=True)
    }

    columns, (height, width) = len(images), reference.shape
    figure = Figure(figsize=(WIDTH, 2 * WIDTH / columns * height / width + 0.75))
    axes = figure.subplots(2, columns, squeeze=False)
    largest, errors = (
        reference.max(),
        {name: np.abs(image - reference) for name, image in images.items()},
    )
    shades: dict[str, Any] = {"cmap": "viridis", "vmin": 0, "vmax": 0.5 * largest}
    for column, (name, image) in enumerate(images.items()):
        axes[0, column].imshow(image, cmap="gray", vmin=0, vmax=largest)
        axes[0, column].set_title(name, fontsize=7.5, loc="center")
        if column == 0:
            continue
        shown = axes[1, column].imshow(errors[name], **shades)
    for each in axes.flat:
        each.set_axis_off()
    beside = axes[1, 0].inset_axes(
        (0.85, 0.05, 0.08, 0.9)
    )  # the reference has no error: its place is free
    bar = figure.colorbar(shown, cax=beside, location="left")
    bar.set_label("|error|", fontsize=7.5)
    bar.set_ticks([0, 0.25 * largest, 0.5 * largest], labels=["0", "¼ max", "½ max"], fontsize=7)
    data = runs[0]["data"]
    of = f"{data['name']} ({data['provenance']}), a test slice of {height} x {width}"
    figure.suptitle(f"{of}, 4x acceleration; SSIM over all test volumes", fontsize=8)
    return figure


def chosen(every: list[Record], results: Path) -> list[Record]:
    """One run of each recipe on one data set, of the models that have both a non-private and a private one; these in that order.

    Raises:
        UserError: no non-private and private run share data set and model.
    """
    of: dict[
        tuple[int, str], dict[str, dict[str, Record]]
    ] = {}  # data set as configured and found, model, recipe
    for run in every:
        if run["claims"]["table"] == TABLE and _example(results, run).is_file():
            data = (
                BEST_FIRST.index(run["data"]["provenance"]),
                repr(run["config"]["dataset"]) + run["data"]["notes"],
            )
            of.setdefault(data, {}).setdefault(repr(run["config"]["model"]), {}).setdefault(
                run["recipe"], run
            )
    ranked = []
    for (provenance, data_set), models in of.items():
        pairs = [
            runs.values()
            for _, runs in sorted(models.items())
            if {r["claims"]["row"] for r in runs.values()} == set(ROWS)
        ]
        in_order = [run for runs in pairs for run in sorted(runs, key=_place)]
        ranked += [(provenance, -len(in_order), data_set, in_order)] if pairs else []
    if ranked:
        return min(ranked, key=lambda found: found[:3])[3]
    recipes = [
        name
        for name, path in assets.group(assets.RECIPES).items()
        if _claims(path).get("table") == TABLE
    ]
    raise UserError(
        f"{results}: holds no example of a non-private and a private run of {TABLE} on the same data. Make them with "
        f"`zdp-bench run recipe=NAME`, NAME one of {', '.join(recipes)}; dataset=kspace_phantom needs no download."
    )


def _claims(recipe: Path) -> dict[str, Any]:
    return assets.read_yaml(recipe).get("claims") or {}


def _example(results: Path, run: Record) -> Path:
    return records.folder(results, run["recipe"], run["run"]) / "example.npz"


def _place(run: Record) -> tuple[int, float]:
    return ROWS.index(run["claims"]["row"]), run["privacy"]["sampling"]["sample_rate"]


def _label(run: Record, by_model: bool) -> str:
    model = f"{run['config']['model']['name'].removeprefix('complex_')}\n" if by_model else ""
    if run["claims"]["row"] == "mri_nonprivate":
        return f"{model}non-private\nSSIM {run['metrics']['ssim']:.3f}"
    batch = run["privacy"]["sampling"]["expected_batch_size"]
    return f"{model}private, batch {batch:.0f}\nε {run['privacy']['epsilon_tight']:.2g}, SSIM {run['metrics']['ssim']:.3f}"
