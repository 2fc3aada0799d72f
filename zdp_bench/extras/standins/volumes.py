"""A stand-in for the decathlon's liver task: abdominal phantoms as NIfTI files with a dataset.json.

They need no download, and are read as the decathlon is. A phantom is an ellipse of soft tissue with
spine, spleen and liver in Hounsfield units; shape and contrast belong to the patient, half of whom
have a tumour in the liver. Every other volume is stored with its axes turned, as scanners do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.files import write_whole
from zdp_bench.data.formats import nifti
from zdp_bench.data.formats.labelled_volumes import Case, find_cases
from zdp_bench.data.msd import Geometry, LabelledSlices
from zdp_bench.data.msd_volumes import LabelledVolumes
from zdp_bench.errors import require
from zdp_bench.registry import register

WINDOW = (-150.0, 250.0)  # the liver's, in Hounsfield units
SPACING = (5.0, 4.0, 8.0)  # mm; pixels that are not square
GRID = (64, 64, 16)


def draw_abdomen(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw intensities int16 [X, Y, Z] in Hounsfield units, and labels uint8: 1 liver, 2 tumour.

    Both on RAS+ axes.
    """
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in GRID), indexing="ij")

    def ball(centre: tuple[float, float, float], radii: tuple[float, float, float]) -> np.ndarray:
        axes = zip((x, y, z), centre, radii, strict=True)
        inside: np.ndarray = np.sum([((axis - c) / r) ** 2 for axis, c, r in axes], axis=0) < 1
        return inside

    wide, deep = draw.uniform(0.8, 0.95), draw.uniform(0.65, 0.8)
    volume = np.full(GRID, -1000.0)
    volume[ball((0, 0, 0), (wide, deep, 9))] = draw.uniform(20, 40)
    volume[ball((0, -0.5 * deep, 0), (0.12, 0.12, 9))] = 400
    volume[ball((-0.55 * wide, -0.2, 0.1), (0.18, 0.2, 0.6))] = 90
    at = (draw.uniform(0.3, 0.4) * wide, draw.uniform(-0.05, 0.1), draw.uniform(-0.1, 0.1))
    liver = ball(
        at, (draw.uniform(0.38, 0.48) * wide, draw.uniform(0.4, 0.5) * deep, draw.uniform(0.6, 0.9))
    )
    volume[liver] = draw.uniform(95, 125)
    labels = liver.astype(np.uint8)
    if draw.random() < 0.5:
        size = draw.uniform(0.08, 0.16)
        tumour = liver & ball((at[0], at[1] + 0.1, at[2]), (size, size, 2 * size))
        volume[tumour], labels[tumour] = 60, 2
    return (volume + draw.normal(0, 12, GRID)).astype(np.int16), labels


def write_set(folder: Path, volumes: int, seed: int) -> None:
    """Write phantoms with their segmentations and a dataset.json, all or none."""
    listed = []
    with write_whole(folder) as partial:
        for name in ("imagesTr", "labelsTr"):
            (partial / name).mkdir()
        for number in range(volumes):
            name = f"liver_{number}.nii.gz"
            axes = "LPS" if number % 2 else "RAS"
            image, labels = draw_abdomen(np.random.default_rng([seed, number]))
            nifti.write(partial / "imagesTr" / name, image, SPACING, axes)
            nifti.write(partial / "labelsTr" / name, labels, SPACING, axes)
            listed.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
        about = {
            "name": "synthetic abdomen",
            "labels": {"0": "background", "1": "liver", "2": "tumour"},
            "training": listed,
        }
        (partial / "dataset.json").write_text(json.dumps(about, indent=1))


def find_or_write(root: Path, volumes: int, seed: int) -> list[Case]:
    """Return so many phantoms under `synthetic/`, written once."""
    folder = root / "synthetic" / f"abdomen-{volumes}-{seed}"
    if not folder.is_dir():
        write_set(folder, volumes, seed)
    return find_cases(folder)


@register("dataset", "msd_synthetic")
@dataclass(frozen=True, kw_only=True)
class MsdSynthetic(LabelledSlices):
    """Phantoms, written once under `synthetic/` and read as the decathlon's volumes are."""

    volumes: int = 30
    size: int = 64
    seed: int = 0
    max_per_patient: int | None = 16
    validation_share: float = 0.1
    test_share: float = 0.2

    def __post_init__(self) -> None:
        count = self.volumes
        require(3 <= count <= 1000, "dataset.volumes", count, "must lie between 3 and 1000")
        super().__post_init__()
        self.count_parts(count)

    def geometry(self) -> Geometry:
        return Geometry(self.size, "resize", None, WINDOW, 0)

    def load(self, root: Path) -> Splits:
        cases = find_or_write(root, self.volumes, self.seed)
        return self.load_cases(cases, "synthetic", self.seed)

    def info(self, root: Path) -> DatasetInfo:
        return self.describe([Case.announce(GRID[2])] * self.volumes, self.seed)


@register("dataset", "msd_volumes_synthetic")
@dataclass(frozen=True, kw_only=True)
class MsdVolumesSynthetic(LabelledVolumes):
    """The same phantoms as whole volumes, read as the decathlon's are."""

    volumes: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.as_slices().count_parts(self.volumes)

    def as_slices(self) -> MsdSynthetic:
        return MsdSynthetic(
            volumes=self.volumes,
            seed=self.seed,
            validation_share=self.validation_share,
            test_share=self.test_share,
        )

    def load(self, root: Path) -> Splits:
        cases = find_or_write(root, self.volumes, self.seed)
        return self.load_cases(cases, "synthetic", self.seed)

    def info(self, root: Path) -> DatasetInfo:
        return self.describe([Case.announce(GRID[2])] * self.volumes, self.seed)
