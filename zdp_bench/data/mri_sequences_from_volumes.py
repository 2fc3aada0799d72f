"""Four simulated contrasts of real anatomy, for who has not the Decathlon's brains: any folder of T1-weighted NIfTI volumes.

A voxel's intensity u in [0, 1] (0 liquid, 1 fat and white matter, as in a T1-weighted image) is read as tissue, and each
sequence's textbook signal is computed from that tissue's relaxation (Bernstein, King and Zhou 2004, ch. 14):

    T1 = 4.0 − 3.2·u s       T2 = 0.07 + 1.9·(1 − u)³ s       PD = 1 − 0.3·u
    T1w    PD·(1 − e^(−TR/T1))·e^(−TE/T2)                 TR 0.5, TE 0.01
    T1gd   the same after contrast agent: 1/T1 + 4.5·c, c smooth spots placed by the volume's name
    T2w    the same with                                  TR 4.0, TE 0.1
    FLAIR  PD·|1 − 2·e^(−TI/T1) + e^(−TR/T1)|·e^(−TE/T2)   TR 9.0, TI 2.5, TE 0.12

and 2 % Rician noise is added. The anatomy is real, the contrasts are not: provenance 'derived'.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter

from zdp_bench.data import Splits, nifti
from zdp_bench.data.files import made_whole, sha256
from zdp_bench.data.mri_sequences import load, split_patients, volumes_of
from zdp_bench.errors import UserError
from zdp_bench.registry import register

NOISE = 0.02  # of the brightest voxel


def four_contrasts(u: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Tissue u in [0, 1], [X, Y, Z] -> FLAIR, T1w, T1gd, T2w, float32 [X, Y, Z, 4], each with its brightest voxel near 1."""
    t1, t2, density = 4.0 - 3.2 * u, 0.07 + 1.9 * (1 - u) ** 3, 1 - 0.3 * u
    spots = gaussian_filter(random.normal(size=u.shape), 2.5)
    agent = np.clip(spots / np.abs(spots).max() - 0.35, 0, None)
    enhanced = 1 / (1 / t1 + 4.5 * agent)

    def spin_echo(t1: np.ndarray, tr: float, te: float) -> np.ndarray:
        return density * (1 - np.exp(-tr / t1)) * np.exp(-te / t2)

    flair = density * np.abs(1 - 2 * np.exp(-2.5 / t1) + np.exp(-9.0 / t1)) * np.exp(-0.12 / t2)
    signals = np.stack([flair, spin_echo(t1, 0.5, 0.01), spin_echo(enhanced, 0.5, 0.01), spin_echo(t1, 4.0, 0.1)], axis=-1)
    signals /= signals.max(axis=(0, 1, 2))
    real, imaginary = random.normal(scale=NOISE, size=(2, *signals.shape))
    return np.hypot(signals + real, imaginary).astype(np.float32)


def tissue(volume: np.ndarray) -> np.ndarray:
    """A T1-weighted volume as u in [0, 1]: its 1st to 99th percentile, cut."""
    low, high = np.percentile(volume, [1, 99])
    return np.clip((volume - low) / max(high - low, 1e-12), 0, 1)


def write_set(folder: Path, paths: list[Path]) -> None:
    """A 4-D volume for each volume, under the same name; whole or not at all."""
    with made_whole(folder) as partial:
        for path in paths:
            volume = nifti.read(path)
            if volume.data.ndim != 3:
                raise UserError(f"{path}: has shape {list(volume.data.shape)} where one T1-weighted volume was expected.")
            name = nifti.name_of(path)
            made = four_contrasts(tissue(volume.data), np.random.default_rng([ord(letter) for letter in name]))
            nifti.write(partial / f"{name}.nii.gz", made, volume.spacing)


@register("dataset", "mri_sequences_from_volumes")
def mri_sequences_from_volumes(
    root: Path, *, folder: str, slices: int = 20, size: int = 32, test_share: float = 0.35, split_seed: int = 0
) -> Splits:
    """Simulated sequences of the volumes in `folder` of the data root: complex64 [1, size, size].

    `test_share` is the paper's, 266 of 750 patients.
    """
    paths = volumes_of(root / folder, "mri_sequences_from_volumes")
    files = "".join(f"{path.name}:{sha256(path)}" for path in paths)
    made = root / "derived" / f"sequences-{hashlib.sha256(files.encode()).hexdigest()[:16]}"
    if not made.is_dir():
        made.parent.mkdir(parents=True, exist_ok=True)
        write_set(made, paths)
    train, test = split_patients(volumes_of(made, "mri_sequences_from_volumes"), test_share, split_seed)
    notes = f"four contrasts simulated from the {len(paths)} volumes in {folder}"
    return load(train, test, "derived", notes, slices=slices, size=size)
