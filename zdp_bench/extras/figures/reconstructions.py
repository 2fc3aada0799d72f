"""Draws reconstructed images of our MRI runs, as Figure 3 of Ziller et al. 2021."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.extras.figures.drawing import WIDTH
from zdp_bench.records import Record
from zdp_bench.report import names
from zdp_bench.report.number_format import epsilon
from zdp_bench.report.papers import recipes_of

TABLE = "zeta_dp_2021/5"
ROWS = ("mri_nonprivate", "mri_private")
BEST_FIRST = ("official", "derived", "synthetic")


def draw_reconstructions(name: str, results: Path) -> Figure:
    """Draw one test slice: the reference, zero-filled, and our MRI runs' images, with errors.

    All shown are of one data set. Each run left the slice beside its record (`example.npz`), so
    neither data nor weights are needed.
    """
    runs = choose_runs(records.read_all(results), results)
    examples = [np.load(_example(results, run), allow_pickle=False) for run in runs]
    reference = examples[0]["reference"]
    zero_filled = f"zero-filled\nSSIM {runs[0].metrics.get('zero_filled_ssim', np.nan):.3f}"
    images = {"reference": reference, zero_filled: examples[0]["zero_filled"]}
    images |= {_label(r): e["reconstruction"] for r, e in zip(runs, examples, strict=True)}
    largest = reference.max()
    height = WIDTH / len(images) * reference.shape[0] / reference.shape[1]
    figure = Figure(figsize=(WIDTH, 2 * height + 1.1))
    axes = figure.subplots(2, len(images))
    for (above, below), (title, image) in zip(axes.T, images.items(), strict=True):
        above.imshow(image, cmap="gray", vmin=0, vmax=largest)
        above.set_title(title, fontsize=7.5, loc="center")
        error = np.abs(image - reference)
        shown = below.imshow(error, cmap="viridis", vmin=0, vmax=0.5 * largest)
        above.set_axis_off()
        below.set_axis_off()
    axes[1, 0].set_visible(False)  # the reference has no error
    bar = figure.colorbar(shown, ax=axes[1], label="|error|", ticks=[0, 0.5 * largest])
    bar.set_ticklabels(["0", "½ max"])
    data = runs[0].data
    of = f"{names.words(data.name)} ({data.provenance}), a test slice"
    figure.suptitle(f"{of}, 4x acceleration; SSIM over all test volumes", fontsize=8)
    return figure


def choose_runs(every: list[Record], results: Path) -> list[Record]:
    """Return the runs to show, model by model, the non-private before the private ones.

    They are one run of each recipe, of the models that have both, on one data set: of the best
    provenance there is, the one with most such runs.
    """
    # data -> model -> (row, recipe) -> run
    found: dict[tuple[int, str], dict[str, dict[tuple[str, str], Record]]] = {}
    for run in every:
        if run.claims.table == TABLE and _example(results, run).is_file():
            best = BEST_FIRST.index(run.data.provenance)
            data = best, f"{run.config['dataset']}{run.data.notes}"
            of_model = found.setdefault(data, {}).setdefault(str(run.config["model"]), {})
            of_model.setdefault((run.claims.row or "", run.recipe), run)
    choices = []
    for (best, data_set), models in sorted(found.items()):
        pairs = [of for _, of in sorted(models.items()) if {row for row, _ in of} == {*ROWS}]
        shown = [of[at] for of in pairs for at in sorted(of)]
        choices += [(best, -len(shown), data_set, shown)] if shown else []
    if choices:
        return min(choices, key=lambda choice: choice[:3])[3]
    raise UserError(
        f"{results}: has no non-private and private run of {TABLE} on the same "
        "data. Make them with `zdp-bench run recipe=NAME`, NAME one of "
        f"{', '.join(recipes_of(TABLE))}; dataset=kspace_phantom needs no download."
    )


def _example(results: Path, run: Record) -> Path:
    return records.folder(results, run.recipe, run.run) / "example.npz"


def _label(run: Record) -> str:
    network = names.words(run.config["model"]["name"]).removeprefix("complex ")
    private = "non-private"
    if run.claims.row != ROWS[0]:
        batch = run.privacy.sampling.expected_batch_size
        private = f"private\nbatch {batch:.0f}\ntight ε {epsilon(run.privacy.epsilon_tight)}"
    return f"{network}\n{private}\nSSIM {run.metrics['ssim']:.3f}"
