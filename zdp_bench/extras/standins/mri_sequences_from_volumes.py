"""Four simulated contrasts of real anatomy, from any folder of NIfTI volumes of one contrast.

The volumes are taken for T1-weighted, as the hippocampi are. Each voxel's place between the
volume's 1st and 99th percentile, v in [0, 1], stands for its tissue, from fluid (dark) over grey to
white matter and fat (bright); a sequence is a curve over v:

    T1w    v^γ                              the volume itself
    T1gd   v^γ, and bright where v changes fastest: contrast agent gathers at tissue borders
    T2w    (1 − v)^γ                        fluid bright
    FLAIR  a bump over grey matter          fluid suppressed, white matter grey

γ varies by 20 % from patient to patient, and the bump's place by 0.05. Every sequence then gets a
scanner's share of its own: a smooth field of sensitivity (e to a polynomial of mixed second order,
coefficients up to 0.3) and Rician noise of 3 % of the brightest tissue. All of it is drawn from the
file's name, so that a volume is always the same patient. The anatomy is real; no scanner made these
contrasts, and numbers from here are 'derived', never the decathlon's. ε is stated of a volume; who
owns two of them (Task04, see `msd.py`) has a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.files import count_held_out, holds_any, resolve_folder
from zdp_bench.data.formats import nifti
from zdp_bench.data.mri_sequences import (
    SEQUENCES,
    Parts,
    Patient,
    SequenceSlices,
    draw_patients,
)
from zdp_bench.registry import register

# Counts up when a curve or a draw below changes: cached arrays go by it.
SIMULATION = "simulated contrasts 1"
NOISE = 0.03  # of the brightest tissue
FIELD = 0.3  # largest part of a coefficient of the sensitivity's polynomial
SPREAD = 0.2  # of γ


def map_to_contrasts(volume: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Turn a volume of one contrast [X, Y, Z] into four.

    Returns:
        float32 [X, Y, Z, 4] in the order of `SEQUENCES`, in [0, about 2].
    """
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
    scans = [scan(curves[name], random) for name in SEQUENCES]
    return np.stack(scans, axis=-1).astype(np.float32)


def scan(picture: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Add a coil's sensitivity and the noise of a magnitude image to [X, Y, Z]."""
    axes = (np.linspace(-1, 1, n) for n in picture.shape)
    x, y, z = np.meshgrid(*axes, indexing="ij", sparse=True)
    terms = (x, y, z, x * y, y * z, x * z)
    coefficients = random.uniform(-FIELD, FIELD, len(terms))
    field = sum(c * term for c, term in zip(coefficients, terms, strict=True))
    noise = random.normal(0, NOISE, (2, *picture.shape))
    return np.hypot(picture * np.exp(field) + noise[0], noise[1])


def simulate_contrasts(path: Path) -> np.ndarray:
    """Simulate the four contrasts of a file, seeded by its name: [X, Y, Z, 4]."""
    seed = [ord(letter) for letter in nifti.name_of(path)]
    return map_to_contrasts(nifti.read(path).data, np.random.default_rng(seed))


@register("dataset", "mri_sequences_from_volumes")
@dataclass(frozen=True, kw_only=True)
class MriSequencesFromVolumes(SequenceSlices):
    """Simulated sequences of the volumes in `folder` of the data root."""

    unit: ClassVar[str] = "volume"

    folder: str = nifti.HIPPOCAMPI
    test_share: float = 0.2
    split_seed: int = 0

    def load(self, root: Path) -> Splits:
        notes = f"four contrasts simulated from the volumes in {self.folder}"
        parts = self.split(self.find(root))
        return self.load_parts(parts, "derived", notes, simulate_contrasts, SIMULATION)

    def info(self, root: Path) -> DatasetInfo:
        """Count by headers; without volumes, as many as the default folder has."""
        found = holds_any(resolve_folder(root, self.folder))
        released = [Patient.centre(self.slices, self.slices)] * nifti.N_HIPPOCAMPI
        return self.describe(self.split(self.find(root) if found else released), found)

    def check_files(self, root: Path) -> Iterator[tuple[Path, str]]:
        """Read every volume of the folder."""
        return nifti.check_files(root / self.folder, "mri_sequences_from_volumes")

    def find(self, root: Path) -> list[Patient]:
        folder = resolve_folder(root, self.folder)
        return self.choose_slices(nifti.find_volumes(folder, "mri_sequences_from_volumes"))

    def split(self, found: list[Patient]) -> Parts:
        held = count_held_out(len(found), self.test_share, "volumes")
        test, train = draw_patients(found, held, self.split_seed)
        return {"train": train, "test": test}
