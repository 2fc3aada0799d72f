"""A stand-in for the decathlon's brains: heads in four contrasts, in Task01's layout.

They need no download, and are read as the decathlon is. A head is a skull with grey and white
matter, two ventricles, and in half of the patients a tumour with a rim that takes up contrast
agent. A table says how bright a tissue is in each sequence; each patient's differs a little. Every
other file is stored with its axes turned, as scanners do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.files import write_whole
from zdp_bench.data.formats import nifti
from zdp_bench.data.mri_sequences import SEQUENCES, MriSequences, Patient, SequenceSlices
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


def draw_head(random: np.random.Generator) -> np.ndarray:
    """Draw one patient in the four sequences: int16 [X, Y, Z, 4], on RAS+ axes."""
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in GRID), indexing="ij", sparse=True)
    looks = {
        tissue: np.array(row) * random.uniform(0.85, 1.15, len(SEQUENCES))
        for tissue, row in LOOKS.items()
    }
    volume = np.zeros((*GRID, len(SEQUENCES)))

    def put(tissue: str, at: tuple[float, ...], radii: tuple[float, ...]) -> None:
        ball = sum(((axis - c) / r) ** 2 for axis, c, r in zip((x, y, z), at, radii, strict=True))
        volume[ball < 1] = looks[tissue]

    wide, long = random.uniform(0.7, 0.8), random.uniform(0.8, 0.92)
    for tissue, share in (("skull", 1.0), ("grey", 0.9), ("white", 0.72)):
        put(tissue, (0, 0, 0), (wide * share, long * share, 1.6 * share))
    for side in (-1, 1):
        radii = (random.uniform(0.06, 0.1), random.uniform(0.25, 0.35), 0.7)
        put("fluid", (side * 0.15, 0, 0.1), radii)
    if random.random() < 0.5:
        at = tuple(random.uniform(-limit, limit) for limit in (0.4, 0.4, 0.3))
        across = random.uniform(0.15, 0.25)
        put("rim", at, (across, across, 3 * across))
        put("tumour", at, (0.7 * across, 0.7 * across, 2 * across))
    noise = random.normal(0, 20, (2, *volume.shape))
    return np.hypot(volume + noise[0], noise[1]).astype(np.int16)


def write_set(folder: Path, train: int, test: int, seed: int) -> None:
    """Write patients in Task01's folders, with a dataset.json, all or none."""
    with write_whole(folder) as partial:
        for name in ("imagesTr", "imagesTs"):
            (partial / name).mkdir()
        for number in range(train + test):
            side = "imagesTr" if number < train else "imagesTs"
            head = draw_head(np.random.default_rng([seed, number]))
            axes = "LPS" if number % 2 else "RAS"
            nifti.write(partial / side / f"BRATS_{number + 1:03d}.nii.gz", head, SPACING, axes)
        about = {
            "name": "synthetic heads",
            "modality": {str(i): name for i, name in enumerate(SEQUENCES)},
        }
        (partial / "dataset.json").write_text(json.dumps(about, indent=1))


@register("dataset", "mri_sequences_synthetic")
@dataclass(frozen=True, kw_only=True)
class MriSequencesSynthetic(SequenceSlices):
    """Drawn heads, written once under `synthetic/` and read as the decathlon's are."""

    patients: int = 30
    slices: int = 4
    test_share: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        count, test = self.patients, self.test_patients
        require(2 <= count <= 1000, "dataset.patients", count, "must lie between 2 and 1000")
        rule = f"leaves {test} of {count} patients to test"
        require(0 < test < count, "dataset.test_share", self.test_share, rule)

    @property
    def test_patients(self) -> int:
        return round(self.test_share * self.patients)

    def load(self, root: Path) -> Splits:
        train, test = self.patients - self.test_patients, self.test_patients
        folder = root / "synthetic" / f"heads-{train}-{test}-{self.seed}"
        if not folder.is_dir():
            write_set(folder, train, test, self.seed)
        reader = MriSequences(size=self.size, slices=self.slices, validation_patients=0)
        return reader.load_folder(folder, "synthetic", "drawn heads in four contrasts")

    def info(self, root: Path) -> DatasetInfo:
        one, test = Patient.centre(GRID[2], self.slices), self.test_patients
        return self.describe({"train": [one] * (self.patients - test), "test": [one] * test})
