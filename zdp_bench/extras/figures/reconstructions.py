"""Draw reconstructed images of our MRI runs, like Figure 3 of Ziller et al. 2021."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
from matplotlib.figure import Figure

from zdp_bench import records
from zdp_bench.data import Provenance
from zdp_bench.errors import UserError
from zdp_bench.extras.figures.drawing import WIDTH
from zdp_bench.foreign_files import MAX_JSON, expect, open_regular, reading
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Record
from zdp_bench.report import names
from zdp_bench.report.papers import recipes_of

TABLE = "zeta_dp_2021/5"
ROWS = ("mri_nonprivate", "mri_private")
TOLERANCE = 1e-3  # of the largest value: another machine rounds a reference differently
BEST_FIRST = get_args(Provenance)


def draw_reconstructions(name: str, results: Path) -> Figure:
    """Draw a test slice: the reference, the zero-filled image, and those of our runs, with errors.

    All images are from one data set. A run saves the slice next to its record (`example.npz`), so
    neither data nor weights are needed.
    """
    runs = choose_runs(records.read_all(results), results)
    slices = _read_slices([_example(results, run) for run in runs])
    reference = slices[0]["reference"]
    zero_filled_ssim = runs[0].metrics.get("zero_filled_ssim", np.nan)
    images = {
        "reference": reference,
        f"zero-filled\nSSIM {zero_filled_ssim:.3f}": slices[0]["zero_filled"],
    }
    for run, arrays in zip(runs, slices, strict=True):
        images[_label(run)] = arrays["reconstruction"]
    largest = reference.max()
    rows, columns = reference.shape
    height = WIDTH / len(images) * rows / columns
    figure = Figure(figsize=(WIDTH, 2 * height + 1.1))
    axes = figure.subplots(2, len(images))
    for (above, below), (title, image) in zip(axes.T, images.items(), strict=True):
        above.imshow(
            image,
            cmap="gray",
            vmin=0,
            vmax=largest,
        )
        above.set_title(title, fontsize=7.5, loc="center")
        above.set_axis_off()
        error = np.abs(image - reference)
        error_image = below.imshow(
            error,
            cmap="viridis",
            vmin=0,
            vmax=0.5 * largest,
        )
        below.set_axis_off()
    axes[1, 0].set_visible(False)  # the reference has no error
    bar = figure.colorbar(
        error_image,
        ax=axes[1],
        label="|error|",
        ticks=[0, 0.5 * largest],
    )
    bar.set_ticklabels(["0", "½ max"])
    data = runs[0].data
    title = f"{names.words(data.name)} ({data.provenance}), a test slice"
    figure.suptitle(f"{title}, 4x acceleration; SSIM over all test volumes", fontsize=8)
    return figure


def choose_runs(all_records: list[Record], results: Path) -> list[Record]:
    """Return the runs to show, sorted by model, each model's non-private run first.

    There is one run of each recipe of every model that has both non-private and private runs. All
    are on the same data: those with the best provenance and, among equals, the most such runs and
    the last one.

    Raises:
        UserError: no model has both runs on the same data.
    """
    candidates = [
        run for run in all_records if run.claims.table == TABLE and _example(results, run).is_file()
    ]
    choices = []
    by_data = records.group_by(candidates, lambda run: (run.data.provenance, run.data.digest))
    for runs in by_data.values():
        provenance = runs[0].data.provenance
        chosen = []
        by_model = records.group_by(runs, lambda run: str(run.config.get("model")))
        for _, model_runs in sorted(by_model.items()):
            by_row = records.group_by(model_runs, lambda run: (run.claims.row or "", run.recipe))
            if {row for row, _ in by_row} == set(ROWS):
                chosen += [by_row[key][0] for key in sorted(by_row)]
        if chosen:
            last = max(run.measured.started_utc for run in chosen)
            choices.append((-BEST_FIRST.index(provenance), len(chosen), last, chosen))
    if not choices:
        raise UserError(
            f"{results}: has no non-private and private run of {TABLE} on the same "
            "data. Run `zdp-bench run recipe=NAME`, with NAME one of "
            f"{', '.join(recipes_of(TABLE))}; dataset=kspace_phantom needs no download."
        )
    *_, chosen = max(choices, key=lambda choice: choice[:3])
    return chosen


def _example(results: Path, run: Record) -> Path:
    return records.folder(results, run.recipe, run.run) / "example.npz"


def _read_slices(paths: list[Path]) -> list[dict[str, np.ndarray]]:
    """Return the images of test slices, which must have the same reference."""
    slices = [read_example(path) for path in paths]
    first = slices[0]["reference"]
    for path, images in zip(paths, slices, strict=True):
        reference = images["reference"]
        is_same = reference.shape == first.shape and np.allclose(
            reference, first, atol=TOLERANCE * first.max()
        )
        if not is_same:
            raise UserError(
                f"{path}: its reference is another image than that of {paths[0]}. Delete the run "
                "whose data have changed, and repeat it."
            )
    return slices


def read_example(path: Path) -> dict[str, np.ndarray]:
    """Return the images [rows, columns] of a test slice, all of one shape and finite."""
    with (
        reading(path, MAX_JSON),
        open_regular(path) as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        unpacked = sum(entry.file_size for entry in arrays.zip.infolist())
        expect(unpacked <= MAX_JSON, f"unpacks to more than {MAX_JSON:,} bytes")
        images = {name: arrays[name] for name in ("reference", "zero_filled", "reconstruction")}
        shapes = {image.shape for image in images.values()}
        expect(len(shapes) == 1 and len(shapes.pop()) == 2, "has images of several shapes")
        are_numbers = all(image.size and image.dtype.kind == "f" for image in images.values())
        expect(are_numbers, "has images without numbers")
        are_finite = all(np.isfinite(image).all() for image in images.values())
        expect(are_finite, "has images with NaN or ∞")
        expect(images["reference"].max() > 0, "has a reference without a positive value")
    return images


def _label(run: Record) -> str:
    """Return the title of a run's image: its network, SSIM and, if private, batch size and ε."""
    name = records.flatten(run.config).get("model.name", "network")
    network = names.words(str(name)).removeprefix("complex ")
    ssim = f"SSIM {run.metrics.get('ssim', np.nan):.3f}"
    if run.claims.row == ROWS[0]:
        return f"{network}\nnon-private\n{ssim}"
    batch = run.privacy.sampling.expected_batch_size
    tight = show_epsilon(run.privacy.epsilon_tight)
    return f"{network}\nprivate\nbatch {batch:.0f}\ntight ε {tight}\n{ssim}"
