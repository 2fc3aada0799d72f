"""Four simulated contrasts of real anatomy: any folder of NIfTI volumes of one contrast, for want of the decathlon's brains.

The volumes are taken for T1-weighted, as the hippocampi are. Each voxel's place between the volume's 1st and 99th percentile,
v in [0, 1], stands for its tissue, from fluid (dark) over grey to white matter and fat (bright); a sequence is a curve over v:

    T1w    v^γ                              the volume itself
    T1gd   v^γ, and bright where v changes fastest: contrast agent gathers at the borders of tissues
    T2w    (1 − v)^γ                        fluid bright
    FLAIR  a bump over grey matter          fluid suppressed, white matter grey

γ varies by 20 % from patient to patient, and the bump's place by 0.05. Every sequence then gets a scanner's share of its own: a
smooth field of sensitivity (e to a polynomial of mixed second order, coefficients up to 0.3) and Rician noise of 3 % of the
brightest tissue. All of it is drawn from the file's name, so that a volume is always the same patient. The anatomy is real; no
scanner made these contrasts, and numbers from here are 'derived', never the decathlon's. ε is stated of a volume; who owns two of
them (Task04, see `msd.py`) has a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.files import holds_any, within
from zdp_bench.data.formats import nifti
from zdp_bench.data.mri_sequences import (
    SEQUENCES,
    Patient,
    check_options,
    drawn,
    load,
    outlined,
    patients,
)
from zdp_bench.errors import require
from zdp_bench.registry import register

SIMULATION = "simulated contrasts 1"  # counts up when a curve or a draw below changes: cached arrays go by it
NOISE = 0.03  # of the brightest tissue
FIELD = 0.3  # largest part of a coefficient of the sensitivity's polynomial
SPREAD = 0.2  # of γ


def contrasts(volume: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A volume of one contrast [X, Y, Z] as four: float32 [X, Y, Z, 4], in the order of `SEQUENCES`, in [0, about 2]."""
    low, high = np.percentile(volume, (1, 99))
    tissue = ((volume - low) / max(high - low, np.finfo(np.float32).tiny)).clip(0, 1)
    border = np.sqrt(sum(slope**2 for slope in np.gradient(tissue)))
    gamma = 1 + random.uniform(-SPREAD, SPREAD, len(SEQUENCES))
    grey = random.uniform(0.4, 0.5)
    curves = {
        "FLAIR": np.exp(-(((tissue - grey) / 0.25) ** 2)) * tissue ** (0.5 * gamma[0]),
        "T1w": tissue ** gamma[1],
        "T1gd": tissue ** gamma[2] + 2 * border,
        "T2w": (1 - tissue) ** gamma[3],
    }
    return np.stack([scanned(curves[name], random) for name in SEQUENCES], axis=-1).astype(
        np.float32
    )


def scanned(picture: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """What a scanner adds to [X, Y, Z]: its coil's sensitivity and the noise of a magnitude image."""
    x, y, z = np.meshgrid(
        *(np.linspace(-1, 1, n) for n in picture.shape), indexing="ij", sparse=True
    )
    field = sum(
        c * term
        for c, term in zip(
            random.uniform(-FIELD, FIELD, 6), (x, y, z, x * y, y * z, x * z), strict=True
        )
    )
    noise = random.normal(0, NOISE, (2, *picture.shape))
    return np.hypot(picture * np.exp(field) + noise[0], noise[1])


def simulated(path: Path) -> np.ndarray:
    """The four contrasts of a file, by its name: [X, Y, Z, 4]."""
    return contrasts(
        nifti.read(path).data,
        np.random.default_rng([ord(letter) for letter in nifti.name_of(path)]),
    )


def parts_of(
    folder: Path, slices: int, test_share: float, split_seed: int
) -> dict[str, list[Patient]]:
    """The patients to train and to test on.

    Raises:
        UserError: the folder holds something else than volumes, or too few of them.
    """
    found = patients(nifti.volumes(folder, "mri_sequences_from_volumes"), slices)
    held = round(test_share * len(found))
    left = len(found) - held
    require(
        held > 0 < left,
        "dataset.test_share",
        test_share,
        f"leaves {left} volumes to train on, {held} to test on",
    )
    test, train = drawn(found, held, split_seed)
    return {"train": train, "test": test}


@register("dataset", "mri_sequences_from_volumes")
def mri_sequences_from_volumes(
    root: Path,
    *,
    folder: str = nifti.HIPPOCAMPI,
    size: int = 32,
    slices: int = 20,
    test_share: float = 0.2,
    split_seed: int = 0,
) -> Splits:
    """Simulated sequences of the volumes in `folder` of the data root: complex64 [1, size, size] of four classes."""
    check_options(size, slices)
    parts = parts_of(within(root, folder), slices, test_share, split_seed)
    notes = f"four contrasts simulated from the volumes in {folder}"
    return replace(load(parts, simulated, SIMULATION, "derived", notes, size=size), unit="volume")


@register("outline", "mri_sequences_from_volumes")
def outline(
    root: Path, *, folder: str, size: int, slices: int, test_share: float, split_seed: int
) -> DatasetInfo:
    """From headers alone; without volumes, as many as the default folder of the release has."""
    check_options(size, slices)
    if holds_any(within(root, folder)):
        return replace(
            outlined(parts_of(root / folder, slices, test_share, split_seed), size), unit="volume"
        )
    each, test = len(SEQUENCES) * slices, round(test_share * 260)
    sizes = ((260 - test) * each, test * each, (1, size, size), len(SEQUENCES), torch.complex64)
    return DatasetInfo(*sizes, examples_per_patient=each, found=False, unit="volume")


@register("check", "mri_sequences_from_volumes")
def check(root: Path) -> Iterator[tuple[Path, str]]:
    """Every volume of the default folder, and what is wrong with it."""
    return nifti.inspected(root / nifti.HIPPOCAMPI, "mri_sequences_from_volumes")
