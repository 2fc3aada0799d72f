"""A stand-in for the Decathlon's brains that needs no download: phantom heads, four contrasts, in its 4-D NIfTI layout.

A head is nested ellipsoids of scalp, skull, liquid, grey and white matter with ventricles and sometimes a lesion, its shape a
patient's own; the contrasts are those of `mri_sequences_from_volumes`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter

from zdp_bench.data import Splits, nifti
from zdp_bench.data.files import made_whole
from zdp_bench.data.mri_sequences import load, split_patients, volumes_of
from zdp_bench.data.mri_sequences_from_volumes import four_contrasts
from zdp_bench.registry import register

SHAPE = (48, 56, 28)
# from outside in: relative radius, and tissue u (0 liquid, 1 fat): scalp, skull, liquid, grey matter, white matter, ventricles
SHELLS = ((1.0, 0.95), (0.93, 0.15), (0.86, 0.05), (0.8, 0.55), (0.62, 0.8), (0.22, 0.05))


def head(random: np.random.Generator) -> np.ndarray:
    """A patient's tissue u in [0, 1], [48, 56, 28]."""
    axes = [np.linspace(-1.1, 1.1, n) for n in SHAPE]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"))  # [3, X, Y, Z]
    centre, radii = random.uniform(-0.06, 0.06, (3, 1, 1, 1)), random.uniform(0.85, 1.0, (3, 1, 1, 1))
    folds = gaussian_filter(random.normal(size=SHAPE), 2)  # the cortex is folded
    distance = np.sqrt((((grid - centre) / radii) ** 2).sum(axis=0)) + 0.05 * folds / folds.std()
    u = np.zeros(SHAPE)
    for radius, level in SHELLS:
        u[distance < radius] = level
    if random.random() < 0.5:  # a lesion, between liquid and grey matter
        place = random.uniform(-0.4, 0.4, (3, 1, 1, 1))
        u[((grid - place) ** 2).sum(axis=0) < random.uniform(0.1, 0.25) ** 2] = 0.35
    return np.clip(gaussian_filter(u, 0.6) + 0.02 * random.normal(size=SHAPE), 0, 1)


def write_set(folder: Path, patients: int, seed: int) -> None:
    """`patients` 4-D volumes; whole or not at all."""
    with made_whole(folder) as partial:
        for number in range(patients):
            random = np.random.default_rng([seed, number])
            nifti.write(partial / f"BRATS_{number:03d}.nii.gz", four_contrasts(head(random), random), (4.0, 4.0, 5.0))


@register("dataset", "mri_sequences_synthetic")
def mri_sequences_synthetic(
    root: Path, *, patients: int = 60, slices: int = 20, size: int = 32, test_share: float = 0.35, seed: int = 0
) -> Splits:
    """Phantom heads, written once under `synthetic/` and read as the Decathlon's are: complex64 [1, size, size]."""
    folder = root / "synthetic" / f"mri-sequences-{patients}-{seed}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_set(folder, patients, seed)
    train, test = split_patients(volumes_of(folder, "mri_sequences_synthetic"), test_share, seed)
    return load(train, test, "synthetic", f"{patients} phantom heads", slices=slices, size=size)
