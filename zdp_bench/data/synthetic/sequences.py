"""A stand-in for the decathlon's brains that needs no download: heads in four contrasts, as 4-D NIfTI files in Task01's layout.

They are read by the real adapter. A head is a skull with grey and white matter, two ventricles, and in half of the patients a
tumour with a rim that takes up contrast agent. What a tissue looks like in each sequence is a table, shaken a little for each
patient. Every other file is stored with its axes turned, as scanners do.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.files import made_whole
from zdp_bench.data.formats import nifti
from zdp_bench.data.mri_sequences import SEQUENCES, check_options, load, parts_of, read_contrasts
from zdp_bench.errors import require
from zdp_bench.registry import register

GRID = (40, 40, 12)
SPACING = (5.0, 5.0, 10.0)  # mm
# tissue -> intensity in FLAIR, T1w, T1gd, T2w; air is 0
LOOKS = {
    "skull": (200, 450, 600, 150),
    "grey": (500, 350, 380, 550),
    "white": (400, 550, 570, 350),
    "fluid": (80, 120, 130, 950),
    "tumour": (850, 280, 300, 800),
    "rim": (700, 320, 950, 600),
}


def head(random: np.random.Generator) -> np.ndarray:
    """One patient in the four sequences: int16 [X, Y, Z, 4], on RAS+ axes."""
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in GRID), indexing="ij", sparse=True)
    looks = {
        tissue: np.array(row) * random.uniform(0.85, 1.15, len(SEQUENCES))
        for tissue, row in LOOKS.items()
    }
    volume = np.zeros((*GRID, len(SEQUENCES)))

    def put(tissue: str, at: tuple[float, float, float], radii: tuple[float, float, float]) -> None:
        ball = sum(((axis - c) / r) ** 2 for axis, c, r in zip((x, y, z), at, radii, strict=True))
        volume[ball < 1] = looks[tissue]

    wide, long = random.uniform(0.7, 0.8), random.uniform(0.8, 0.92)
    for tissue, share in (("skull", 1.0), ("grey", 0.9), ("white", 0.72)):
        put(tissue, (0, 0, 0), (wide * share, long * share, 1.6 * share))
    for side in (-1, 1):
        put(
            "fluid",
            (side * 0.15, 0, 0.1),
            (random.uniform(0.06, 0.1), random.uniform(0.25, 0.35), 0.7),
        )
    if random.random() < 0.5:
        at, across = (
            (random.uniform(-0.4, 0.4), random.uniform(-0.4, 0.4), random.uniform(-0.3, 0.3)),
            random.uniform(0.15, 0.25),
        )
        put("rim", at, (across, across, 3 * across))
        put("tumour", at, (0.7 * across, 0.7 * across, 2 * across))
    noise = random.normal(0, 20, (2, *volume.shape))
    return np.hypot(volume + noise[0], noise[1]).astype(np.int16)


def write_set(folder: Path, train: int, test: int, seed: int) -> None:
    """`train` and `test` patients in Task01's folders, with a dataset.json; whole or not at all."""
    with made_whole(folder) as partial:
        for name in ("imagesTr", "imagesTs"):
            (partial / name).mkdir()
        for number in range(train + test):
            path = (
                partial
                / ("imagesTr" if number < train else "imagesTs")
                / f"BRATS_{number + 1:03d}.nii.gz"
            )
            nifti.write(
                path,
                head(np.random.default_rng([seed, number])),
                SPACING,
                axes="LPS" if number % 2 else "RAS",
            )
        about = {
            "name": "synthetic heads",
            "modality": {str(i): name for i, name in enumerate(SEQUENCES)},
        }
        (partial / "dataset.json").write_text(json.dumps(about, indent=1))


def _held(patients: int, size: int, slices: int, test_share: float) -> int:
    """How many patients are to test on.

    Raises:
        UserError: an option means nothing.
    """
    check_options(size, slices)
    test = round(test_share * patients)
    require(2 <= patients <= 1000, "dataset.patients", patients, "must lie between 2 and 1000")
    require(
        0 < test < patients,
        "dataset.test_share",
        test_share,
        f"leaves {test} of {patients} patients to test",
    )
    return test


@register("dataset", "mri_sequences_synthetic")
def mri_sequences_synthetic(
    root: Path,
    *,
    patients: int = 30,
    size: int = 32,
    slices: int = 4,
    test_share: float = 0.3,
    seed: int = 0,
) -> Splits:
    """Heads, written once under `synthetic/` and read as the decathlon's are: complex64 [1, size, size] of four classes."""
    test = _held(patients, size, slices, test_share)
    folder = root / "synthetic" / f"heads-{patients - test}-{test}-{seed}"
    if not folder.is_dir():
        write_set(folder, patients - test, test, seed)
    parts = parts_of(folder, slices, validation_patients=0, split_seed=seed)
    return load(
        parts, read_contrasts, "channels", "synthetic", "drawn heads in four contrasts", size=size
    )


@register("outline", "mri_sequences_synthetic")
def outline(
    root: Path, *, patients: int, size: int, slices: int, test_share: float, **_: object
) -> DatasetInfo:
    """Known before anything is drawn."""
    each, test = len(SEQUENCES) * min(slices, GRID[2]), _held(patients, size, slices, test_share)
    shape = (1, size, size)
    return DatasetInfo(
        (patients - test) * each,
        test * each,
        shape,
        len(SEQUENCES),
        torch.complex64,
        examples_per_patient=each,
    )
