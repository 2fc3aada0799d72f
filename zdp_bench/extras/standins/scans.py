"""Stand-ins for MRI and CT without a download, read like the releases of fastMRI and the decathlon.

`kspace_phantom` stands in for fastMRI. As in Shepp and Logan's phantom (1974), a head is a bright
rim around tissue with inner structures, which vary between patients. The image is multiplied by the
smooth sensitivity and phase of a coil, and complex Gaussian noise is added to its k-space. As in
fastMRI, k-space is oversampled along the readout. The other data sets are blobs. Every other NIfTI
file is stored with other axes, as scanners differ too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Interval

from zdp_bench.data import Fraction, MaxCount, Pixels, PublicFraction, nifti
from zdp_bench.data.derived_kspace import draw_phase
from zdp_bench.data.fastmri import FOLDERS, FastMri, Side, write_volume
from zdp_bench.data.files import count_held_out
from zdp_bench.data.kspace import centre_crop, to_image, to_kspace
from zdp_bench.data.mri_sequences import FOLDER as HEADS
from zdp_bench.data.mri_sequences import MriSequences
from zdp_bench.data.msd import TASKS, Msd
from zdp_bench.data.msd_volumes import MsdVolumes
from zdp_bench.extras.standins.drawing import StandIn, draw_blobs
from zdp_bench.registry import register

COIL_NOISE = 0.01  # standard deviation of real and imaginary parts, for tissue of magnitude 1


def draw_phantom(
    slices: int,
    rows: int,
    columns: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Return the magnitude image of one patient, [slices, rows, columns]."""
    z, y, x = np.meshgrid(
        np.linspace(-0.5, 0.5, slices),
        np.linspace(-1, 1, rows),
        np.linspace(-1, 1, columns),
        indexing="ij",
    )

    def inside(
        centre: np.ndarray,
        radii: np.ndarray,
        angle: float,
    ) -> np.ndarray:
        """Return the mask of an ellipsoid."""
        dz = z - centre[0]
        dy = y - centre[1]
        dx = x - centre[2]
        across = dy * np.cos(angle) + dx * np.sin(angle)
        along = dx * np.cos(angle) - dy * np.sin(angle)
        square = (dz / radii[0]) ** 2 + (across / radii[1]) ** 2
        return square + (along / radii[2]) ** 2 < 1

    middle = np.zeros(3)
    skull = np.array([1.0, *random.uniform(0.75, 0.9, 2)])
    brain = skull - np.array([0, 0.1, 0.1])
    image = 0.9 * inside(middle, skull, 0.0)
    image = image - 0.5 * inside(middle, brain, 0.0)
    for _ in range(10):
        centre = random.uniform(-0.5, 0.5, 3) * np.array([0.6, 1, 1])
        radii = np.array([random.uniform(0.3, 0.6), *random.uniform(0.08, 0.3, 2)])
        brightness = random.uniform(-0.2, 0.3)
        angle = random.uniform(0, np.pi)
        image = image + brightness * inside(centre, radii, angle)
    return image.clip(0, None)


def scan(
    slices: int,
    height: int,
    width: int,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a patient's k-space [slices, 2·height, width + 4] and its cropped magnitude image.

    The magnitude is [slices, height, width].
    """
    rows, columns = 2 * height, width + 4
    image = np.zeros((slices, rows, columns))
    top = height // 2
    image[:, top : top + height, 2 : 2 + width] = draw_phantom(slices, height, width, random)
    y = np.linspace(-1, 1, rows)[:, None]
    x = np.linspace(-1, 1, columns)
    dy = y - random.uniform(-0.3, 0.3)
    dx = x - random.uniform(-0.5, 0.5)
    sensitivity = np.exp(-(dy**2 + dx**2) / 4)
    phase = draw_phase(rows, columns, random)
    kspace = to_kspace(image * sensitivity * np.exp(1j * phase))
    real = random.normal(size=kspace.shape)
    imag = random.normal(size=kspace.shape)
    kspace = kspace + COIL_NOISE * (real + 1j * imag)
    return kspace, np.abs(centre_crop(to_image(kspace), height, width))


@register("dataset", "kspace_phantom")
@dataclass(frozen=True, kw_only=True)
class KSpacePhantom(StandIn, FastMri):
    """Generated volumes in fastMRI's layout; the last patients are the test set."""

    drawn: ClassVar[tuple[str, ...]] = (
        "patients",
        "slices",
        "height",
        "width",
        "test_share",
        "seed",
    )

    patients: Annotated[int, Interval(ge=2, le=1000)] = 10
    height: Side = 32
    width: Side = 40
    slices: Annotated[int, Interval(ge=1, le=100)] | None = 2
    test_share: Fraction = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.count_test()

    def count_test(self) -> int:
        return count_held_out(self.patients, self.test_share, "patients")

    def write(self, folder: Path) -> None:
        train = self.patients - self.count_test()
        for number in range(self.patients):
            random = np.random.default_rng([self.seed, number])
            kspace, magnitude = scan(self.slices or 2, self.height, self.width, random)
            name = f"phantom{number:04d}"
            side = FOLDERS[0] if number < train else FOLDERS[1]
            path = folder / "fastMRI" / side / f"{name}.h5"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_volume(path, kspace, magnitude, name, "synthetic")


GRID = (40, 40, 12)  # voxels
SPACING = (5.0, 4.0, 10.0)  # mm; pixels are not square, as in some scans


def draw_head(random: np.random.Generator) -> np.ndarray:
    """Return one patient's four sequences, int16 [X, Y, Z, 4], on RAS+ axes."""
    tissue = draw_blobs(GRID, 4, random)
    flair = 4 * tissue * (1 - tissue)
    contrasts = [flair, tissue, tissue**3, 1 - tissue]
    head = 1000 * np.stack(contrasts, axis=-1)
    noise = random.normal(0, 20, head.shape)
    return (head + noise).astype(np.int16)


def draw_abdomen(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return one patient's intensities and labels, each [X, Y, Z].

    Intensities are int16 in Hounsfield units, labels uint8: 1 for the organ, 2 for a tumour.
    """
    organ = draw_blobs(GRID, 1, random)
    labels = (organ > 0.5).astype(np.uint8) + (organ > 0.9)
    intensity = np.where(labels > 0, 100, -60)
    noise = random.normal(0, 12, GRID)
    return (intensity + noise).astype(np.int16), labels


def _write(
    path: Path,
    data: np.ndarray,
    number: int,
) -> None:
    """Write a NIfTI file, with other axes if the patient's number is odd."""
    path.parent.mkdir(parents=True, exist_ok=True)
    axes = "LPS" if number % 2 else "RAS"
    nifti.write(path.with_name(f"{path.name}.nii.gz"), data, SPACING, axes)


@register("dataset", "mri_sequences_synthetic")
@dataclass(frozen=True, kw_only=True)
class MriSequencesSynthetic(StandIn, MriSequences):
    """Blobs in four contrasts, in the layout of the decathlon's Task01."""

    drawn: ClassVar[tuple[str, ...]] = ("patients", "test_share", "seed")

    patients: Annotated[int, Interval(ge=2, le=1000)] = 30
    slices: Annotated[int, Ge(1)] = 4
    validation_patients: Annotated[int, Ge(0)] = 0
    test_share: Fraction = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        count_held_out(self.patients, self.test_share, "patients")

    def write(self, folder: Path) -> None:
        train = self.patients - count_held_out(self.patients, self.test_share, "patients")
        for number in range(self.patients):
            path = folder / HEADS / ("imagesTr" if number < train else "imagesTs")
            head = draw_head(np.random.default_rng([self.seed, number]))
            _write(path / f"BRATS_{number + 1:03d}", head, number)


class Abdomens(StandIn):
    """Blobs as labelled volumes, in the layout of a task of the decathlon."""

    drawn: ClassVar[tuple[str, ...]] = ("task", "volumes", "seed")
    task: str
    volumes: int
    seed: int

    def write(self, folder: Path) -> None:
        for number in range(self.volumes):
            random = np.random.default_rng([self.seed, number])
            image, labels = draw_abdomen(random)
            home, name = folder / TASKS[self.task][0], f"{self.task}_{number}"
            _write(home / "imagesTr" / name, image, number)
            _write(home / "labelsTr" / name, labels, number)


@register("dataset", "msd_synthetic")
@dataclass(frozen=True, kw_only=True)
class MsdSynthetic(Abdomens, Msd):
    """Slices of the generated abdomens."""

    volumes: Annotated[int, Interval(ge=3, le=1000)] = 30
    seed: int = 0
    size: Pixels = 64
    max_per_patient: MaxCount = 16
    validation_share: PublicFraction = 0.1
    test_share: Fraction = 0.2


@register("dataset", "msd_volumes_synthetic")
@dataclass(frozen=True, kw_only=True)
class MsdVolumesSynthetic(Abdomens, MsdVolumes):
    """Volumes of the generated abdomens."""

    task: str = "liver"
    volumes: Annotated[int, Interval(ge=3, le=1000)] = 30
    seed: int = 0
