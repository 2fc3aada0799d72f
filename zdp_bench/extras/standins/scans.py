"""Stand-ins for MRI and CT: drawn heads and abdomens in the layouts of fastMRI and the decathlon.

They need no download, and are read as the releases are.

- `kspace_phantom`, for fastMRI: as Shepp and Logan's (1974), a head is a bright rim around tissue
  with inner structures that vary from patient to patient. It is multiplied by a coil's smooth
  sensitivity and phase; complex Gaussian noise is added to its k-space, which reaches beyond the
  image along the readout as fastMRI's does.
- `mri_sequences_synthetic`, for Task01: a skull with grey and white matter, two ventricles, and in
  half of the patients a tumour with a rim that takes up contrast agent. A table says how bright a
  tissue is in each sequence; each patient's differs a little.
- `msd_synthetic`, for Task03: an ellipse of soft tissue with spine, spleen and liver in Hounsfield
  units; shape and contrast belong to the patient, half of whom have a tumour in the liver.

Every other NIfTI file is stored with its axes turned, as scanners do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Interval

from zdp_bench.data import DatasetInfo, Most, Pixels, PublicShare, Splits, nifti
from zdp_bench.data.derived_kspace import draw_phase
from zdp_bench.data.fastmri import FOLDERS, KSpaceSlices, find_volumes, write_volume
from zdp_bench.data.files import count_held_out, write_whole
from zdp_bench.data.kspace import centre_crop, to_image, to_kspace
from zdp_bench.data.mri_sequences import SEQUENCES, MriSequences, Patient, SequenceSlices
from zdp_bench.data.msd import Geometry, LabelledSlices, LabelledVolume, find_cases
from zdp_bench.data.msd_volumes import LabelledVolumes
from zdp_bench.errors import require
from zdp_bench.extras.standins import require_modest
from zdp_bench.registry import register

COIL_NOISE = 0.01  # standard deviation of each part of k-space, where tissue has magnitude 1


def draw_phantom(slices: int, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Draw the magnitude [slices, rows, columns] of one patient."""
    z, y, x = np.meshgrid(
        np.linspace(-0.5, 0.5, slices),
        np.linspace(-1, 1, rows),
        np.linspace(-1, 1, columns),
        indexing="ij",
    )

    def inside(centre: np.ndarray, radii: np.ndarray, turned: float) -> np.ndarray:
        across = (y - centre[1]) * np.cos(turned) + (x - centre[2]) * np.sin(turned)
        along = (x - centre[2]) * np.cos(turned) - (y - centre[1]) * np.sin(turned)
        return ((z - centre[0]) / radii[0]) ** 2 + (across / radii[1]) ** 2 + (
            along / radii[2]
        ) ** 2 < 1

    skull = np.array([1.0, *random.uniform(0.75, 0.9, 2)])
    nowhere = np.zeros(3)
    image = 0.9 * inside(nowhere, skull, 0.0) - 0.5 * inside(
        nowhere, skull - np.array([0, 0.1, 0.1]), 0.0
    )
    for _ in range(10):
        centre = random.uniform(-0.5, 0.5, 3) * np.array([0.6, 1, 1])
        radii = np.array([random.uniform(0.3, 0.6), *random.uniform(0.08, 0.3, 2)])
        image = image + random.uniform(-0.2, 0.3) * inside(centre, radii, random.uniform(0, np.pi))
    return image.clip(0, None)


def scan(
    slices: int, height: int, width: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Scan one patient.

    Returns:
        k-space [slices, 2·height, width + 4]; the reconstruction's magnitude [slices, height,
        width].
    """
    rows, columns = 2 * height, width + 4
    image = np.zeros((slices, rows, columns))
    image[:, height // 2 : height // 2 + height, 2 : 2 + width] = draw_phantom(
        slices, height, width, random
    )
    y, x = np.meshgrid(np.linspace(-1, 1, rows), np.linspace(-1, 1, columns), indexing="ij")
    coil = np.exp(
        -((y - random.uniform(-0.3, 0.3)) ** 2 + (x - random.uniform(-0.5, 0.5)) ** 2) / 4
    )
    kspace = to_kspace(image * coil * np.exp(1j * draw_phase(rows, columns, random)))
    kspace = kspace + COIL_NOISE * (
        random.normal(size=kspace.shape) + 1j * random.normal(size=kspace.shape)
    )
    return kspace, np.abs(centre_crop(to_image(kspace), height, width))


def write_kspace(
    folder: Path, patients: int, slices: int, height: int, width: int, seed: int, testing: int
) -> None:
    """Write volumes, the last `testing` of them to test on, all or none."""
    with write_whole(folder) as partial:
        for side in FOLDERS:
            (partial / side).mkdir()
        for number in range(patients):
            kspace, magnitude = scan(slices, height, width, np.random.default_rng([seed, number]))
            name, side = f"phantom{number:04d}", FOLDERS[int(number >= patients - testing)]
            write_volume(partial / side / f"{name}.h5", kspace, magnitude, name, "synthetic")


@register("dataset", "kspace_phantom")
@dataclass(frozen=True, kw_only=True)
class KSpacePhantom(KSpaceSlices):
    """Drawn volumes, written once under `synthetic/` and read as fastMRI is."""

    patients: Annotated[int, Ge(2)] = 10
    seed: int = 0
    slices: Annotated[int, Ge(1)] = 2
    test_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        voxels = self.patients * self.slices * self.height * self.width
        keys = "dataset.patients, slices, height and width"
        require_modest(keys, 12 * voxels)  # k-space and magnitude
        self.count_test()

    def count_test(self) -> int:
        return count_held_out(self.patients, self.test_share, "patients")

    def load(self, root: Path) -> Splits:
        shape = (self.slices, self.height, self.width)
        size = f"{self.slices}-{self.height}x{self.width}"
        name = f"kspace-{self.patients}-{size}-{self.test_share}-{self.seed}"
        made = root / "synthetic" / name
        if not made.is_dir():
            write_kspace(made, self.patients, *shape, self.seed, self.count_test())
        notes = "ellipsoids seen by one coil, with noise"
        return self.read_splits(find_volumes(made), "synthetic", notes)

    def info(self, root: Path) -> DatasetInfo:
        drawn, train = self.announce(self.patients), self.patients - self.count_test()
        return self.describe((drawn[:train], drawn[train:]))


HEAD_GRID = (40, 40, 12)
HEAD_SPACING = (5.0, 5.0, 10.0)  # mm
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
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in HEAD_GRID), indexing="ij", sparse=True)
    looks = {
        tissue: np.array(row) * random.uniform(0.85, 1.15, len(SEQUENCES))
        for tissue, row in LOOKS.items()
    }
    volume = np.zeros((*HEAD_GRID, len(SEQUENCES)))

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


def write_heads(folder: Path, train: int, test: int, seed: int) -> None:
    """Write patients in Task01's folders, with a dataset.json, all or none."""
    with write_whole(folder) as partial:
        for name in ("imagesTr", "imagesTs"):
            (partial / name).mkdir()
        for number in range(train + test):
            side = "imagesTr" if number < train else "imagesTs"
            head = draw_head(np.random.default_rng([seed, number]))
            axes = "LPS" if number % 2 else "RAS"
            nifti.write(partial / side / f"BRATS_{number + 1:03d}.nii.gz", head, HEAD_SPACING, axes)
        about = {
            "name": "synthetic heads",
            "modality": {str(i): name for i, name in enumerate(SEQUENCES)},
        }
        (partial / "dataset.json").write_text(json.dumps(about, indent=1))


@register("dataset", "mri_sequences_synthetic")
@dataclass(frozen=True, kw_only=True)
class MriSequencesSynthetic(SequenceSlices):
    """Drawn heads, written once under `synthetic/` and read as the decathlon's are."""

    patients: Annotated[int, Interval(ge=2, le=1000)] = 30
    slices: Annotated[int, Ge(1)] = 4
    test_share: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        count, test = self.patients, self.test_patients
        rule = f"leaves {test} of {count} patients to test"
        require(0 < test < count, "dataset.test_share", self.test_share, rule)

    @property
    def test_patients(self) -> int:
        return round(self.test_share * self.patients)

    def load(self, root: Path) -> Splits:
        train, test = self.patients - self.test_patients, self.test_patients
        folder = root / "synthetic" / f"heads-{train}-{test}-{self.seed}"
        if not folder.is_dir():
            write_heads(folder, train, test, self.seed)
        reader = MriSequences(size=self.size, slices=self.slices, validation_patients=0)
        return reader.load_folder(folder, "synthetic", "drawn heads in four contrasts")

    def info(self, root: Path) -> DatasetInfo:
        one, test = Patient.centre(HEAD_GRID[2], self.slices), self.test_patients
        return self.describe({"train": [one] * (self.patients - test), "test": [one] * test})


WINDOW = (-150.0, 250.0)  # the liver's, in Hounsfield units
ABDOMEN_SPACING = (5.0, 4.0, 8.0)  # mm; pixels that are not square
ABDOMEN_GRID = (64, 64, 16)


def draw_abdomen(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw intensities int16 [X, Y, Z] in Hounsfield units, and labels uint8: 1 liver, 2 tumour.

    Both on RAS+ axes.
    """
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in ABDOMEN_GRID), indexing="ij")

    def ball(centre: tuple[float, float, float], radii: tuple[float, float, float]) -> np.ndarray:
        axes = zip((x, y, z), centre, radii, strict=True)
        inside: np.ndarray = np.sum([((axis - c) / r) ** 2 for axis, c, r in axes], axis=0) < 1
        return inside

    wide, deep = draw.uniform(0.8, 0.95), draw.uniform(0.65, 0.8)
    volume = np.full(ABDOMEN_GRID, -1000.0)
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
    return (volume + draw.normal(0, 12, ABDOMEN_GRID)).astype(np.int16), labels


def write_abdomens(folder: Path, volumes: int, seed: int) -> None:
    """Write phantoms with their segmentations and a dataset.json, all or none."""
    listed = []
    with write_whole(folder) as partial:
        for name in ("imagesTr", "labelsTr"):
            (partial / name).mkdir()
        for number in range(volumes):
            name = f"liver_{number}.nii.gz"
            axes = "LPS" if number % 2 else "RAS"
            image, labels = draw_abdomen(np.random.default_rng([seed, number]))
            nifti.write(partial / "imagesTr" / name, image, ABDOMEN_SPACING, axes)
            nifti.write(partial / "labelsTr" / name, labels, ABDOMEN_SPACING, axes)
            listed.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
        about = {
            "name": "synthetic abdomen",
            "labels": {"0": "background", "1": "liver", "2": "tumour"},
            "training": listed,
        }
        (partial / "dataset.json").write_text(json.dumps(about, indent=1))


def find_or_write_abdomens(root: Path, volumes: int, seed: int) -> list[LabelledVolume]:
    """Return so many phantoms under `synthetic/`, written once."""
    folder = root / "synthetic" / f"abdomen-{volumes}-{seed}"
    if not folder.is_dir():
        write_abdomens(folder, volumes, seed)
    return find_cases(folder)


@register("dataset", "msd_synthetic")
@dataclass(frozen=True, kw_only=True)
class MsdSynthetic(LabelledSlices):
    """Phantoms, written once under `synthetic/` and read as the decathlon's volumes are."""

    volumes: Annotated[int, Interval(ge=3, le=1000)] = 30
    size: Pixels = 64
    seed: int = 0
    max_per_patient: Most = 16
    validation_share: PublicShare = 0.1
    test_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.count_parts(self.volumes)

    def geometry(self) -> Geometry:
        return Geometry(self.size, "resize", None, WINDOW, 0)

    def load(self, root: Path) -> Splits:
        cases = find_or_write_abdomens(root, self.volumes, self.seed)
        return self.load_cases(cases, "synthetic", self.seed)

    def info(self, root: Path) -> DatasetInfo:
        return self.describe([LabelledVolume.announce(ABDOMEN_GRID[2])] * self.volumes, self.seed)


@register("dataset", "msd_volumes_synthetic")
@dataclass(frozen=True, kw_only=True)
class MsdVolumesSynthetic(LabelledVolumes):
    """The same phantoms as whole volumes, read as the decathlon's are."""

    volumes: Annotated[int, Interval(ge=3, le=1000)] = 30
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
        cases = find_or_write_abdomens(root, self.volumes, self.seed)
        return self.load_cases(cases, "synthetic", self.seed)

    def info(self, root: Path) -> DatasetInfo:
        return self.describe([LabelledVolume.announce(ABDOMEN_GRID[2])] * self.volumes, self.seed)
