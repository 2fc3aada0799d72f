"""Which pulse sequence an MRI slice is of, from its k-space (Riess et al. 2024, section 5).

    Task01_BrainTumour/dataset.json, imagesTr/BRATS_001.nii.gz [240, 240, 155, 4], ...,
        imagesTs/BRATS_485.nii.gz, ...

A volume is a patient, and holds the same slices as FLAIR, T1w, T1gd and T2w. The 20 centre slices
of each are resized to 32×32 and Fourier transformed (centred, unitary, both halves kept), which
makes 80 examples a patient; the class is the sequence. The release's training volumes train and its
test volumes test: no segmentation is needed. So no patient is in two parts, and the counts are the
paper's 38,720 and 21,280.

The paper says 'normalised by whitening' and not by which statistics. Here each example is whitened
by its own, so that it depends on no other, and no private statistic enters without an ε.

k-space is made once, patient by patient, and mapped from the user's cache folder.

`mri_sequences_from_volumes` simulates the four contrasts from any folder of NIfTI volumes of one,
which are taken for T1-weighted, as Task04's hippocampi are. Each voxel's place between the volume's
1st and 99th percentile, v in [0, 1], stands for its tissue, from fluid (dark) over grey to white
matter and fat (bright); a sequence is a curve over v:

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

import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Interval

from zdp_bench.data import Dataset, DatasetInfo, Examples, Provenance, Splits, nifti
from zdp_bench.data.cache import load_or_make
from zdp_bench.data.files import count_parts, digest, holds_any, sha256
from zdp_bench.data.kspace import to_kspace
from zdp_bench.data.owners import place_owners
from zdp_bench.errors import UserError, require
from zdp_bench.registry import register

SEQUENCES = ("FLAIR", "T1w", "T1gd", "T2w")  # the order of a volume's channels
FOLDER = "Task01_BrainTumour"
RELEASED = {"imagesTr": 484, "imagesTs": 266}  # volumes
# Of an example's root mean square: a part that varies less is rounding, and is not scaled to 1.
FLAT = 1e-6


Patient = tuple[Path, slice]  # a volume, and which of its axial slices are used
Parts = dict[str, list[Patient]]  # 'train', 'test' and perhaps 'validation'


@dataclass(frozen=True, kw_only=True)
class SequenceSlices(Dataset):
    """k-space complex64 [1, size, size] of four classes, the sequences."""

    unit: ClassVar[str] = "patient"

    size: Annotated[int, Interval(ge=8, le=512)] = 32
    slices: Annotated[int, Ge(1)] = 20

    def choose_slices(self, volumes: dict[Path, nifti.Header]) -> list[Patient]:
        """Take the centre slices of each volume, or all of a thinner one."""
        chosen = []
        for path, header in volumes.items():
            count = min(self.slices, header.shape[2])
            first = (header.shape[2] - count) // 2
            chosen.append((path, slice(first, first + count)))
        return chosen

    def describe(
        self,
        train: int,
        test: int,
        validation: int = 0,
    ) -> DatasetInfo:
        """Return counts and shapes of so many patients."""
        each = len(SEQUENCES) * self.slices
        return DatasetInfo(
            train=train * each,
            test=test * each,
            validation=validation * each,
            input_shape=(1, self.size, self.size),
            outputs=len(SEQUENCES),
            dtype=torch.complex64,
            examples_per_patient=each,
            unit=self.unit,
            owners=train,
        )

    def load_parts(
        self,
        parts: Parts,
        provenance: Provenance,
        notes: str,
        read: Callable[[Path], np.ndarray],
        reading: str,
    ) -> Splits:
        """Transform the slices of these patients; `groups` number the patients.

        Args:
            read: turns a patient's file into four contrasts [X, Y, Z, 4] on RAS+ axes.
            reading: names what `read` does, and changes when it does: for cache and digest.
        """
        files = []
        patients = []
        examples_of: dict[str, list[int]] = {}  # how many each patient of a part has
        for part, patients_of_part in parts.items():
            examples_of[part] = []
            for path, used in patients_of_part:
                files.append((part, path.name, sha256(path), used))
                patients.append((path, used))
                examples_of[part].append(len(SEQUENCES) * (used.stop - used.start))
        arrays = digest(repr((reading, self.size, files)))
        rows, groups = place_owners(examples_of)

        classes = torch.arange(len(SEQUENCES))
        labels = torch.cat(
            [classes.repeat_interleave(used.stop - used.start) for _, used in patients]
        )
        kind = f"sequences-{nifti.READING}"
        shape = (len(groups), 1, self.size, self.size)
        blocks = (transform_slices(read(path)[:, :, used], self.size) for path, used in patients)
        kspace = torch.from_numpy(load_or_make(kind, arrays, shape, np.complex64, blocks))
        examples = {}
        for part, places in rows.items():
            examples[part] = Examples(kspace[places], labels[places], groups[places])
        counts = {part: len(patients_of_part) for part, patients_of_part in parts.items()}
        return Splits(
            examples["train"],
            examples["test"],
            input_shape=(1, self.size, self.size),
            outputs=len(SEQUENCES),
            provenance=provenance,
            digest=arrays,
            notes=f"{notes}; k-space of centre slices at {self.size}², each whitened by itself; "
            f"patients: {count_parts(counts)}",
            validation=examples["validation"] if parts.get("validation") else None,
            unit=self.unit,
            owner_names=[nifti.name_of(path) for path, _ in patients],
        )


def transform_slices(volume: np.ndarray, size: int) -> np.ndarray:
    """Turn a patient's slices [X, Y, n, 4] into whitened k-space [4·n, 1, size, size]."""
    turned = volume[:, ::-1].transpose(3, 2, 1, 0)
    planes = torch.from_numpy(np.ascontiguousarray(turned, dtype=np.float32))
    planes = F.interpolate(planes, (size, size), mode="bilinear", antialias=True)
    kspace = to_kspace(planes.double().numpy())  # [4, n, size, size]
    return whiten(kspace).astype(np.complex64).reshape(-1, 1, size, size)


def whiten(kspace: np.ndarray) -> np.ndarray:
    """Whiten each example [..., rows, columns] by its own statistics.

    Its mean becomes 0; real and imaginary part are uncorrelated and of variance 1. In the spectrum
    of a real image X(−k) is the conjugate of X(k): its imaginary part has mean 0, and is
    uncorrelated with the real one. So whitening is a shift and two divisions. A part that is 0 but
    for rounding stays next to 0.
    """
    centred = kspace - kspace.mean(axis=(-2, -1), keepdims=True)
    power = (np.abs(kspace) ** 2).mean(axis=(-2, -1), keepdims=True)
    floor = FLAT * np.sqrt(power) + np.finfo(np.float64).tiny
    real = _scale(centred.real, floor)
    imag = _scale(centred.imag, floor)
    return real + 1j * imag


def _scale(part: np.ndarray, floor: np.ndarray) -> np.ndarray:
    deviation = part.std(axis=(-2, -1), keepdims=True)
    return part / np.maximum(deviation, floor)


def draw_patients(
    patients: list[Patient], count: int, seed: int
) -> tuple[list[Patient], list[Patient]]:
    """Draw `count` patients; return them and the others, each in the order of their names."""
    order = np.random.default_rng(seed).permutation(len(patients))
    drawn = [patients[index] for index in sorted(order[:count])]
    others = [patients[index] for index in sorted(order[count:])]
    return drawn, others


# ------------------------------------------------------------------------------- the decathlon


@register("dataset", "mri_sequences")
@dataclass(frozen=True, kw_only=True)
class MriSequences(SequenceSlices):
    """Task01 of the decathlon under the data root."""

    validation_patients: Annotated[int, Ge(0)] = 110
    split_seed: int = 0

    def load(self, root: Path) -> Splits:
        """A folder with dataset.json and as many volumes as were released is 'official'.

        Those that validate are drawn from the test volumes, as the paper does.
        """
        folder = root / FOLDER
        train = nifti.find_volumes(folder / "imagesTr", "mri_sequences", len(SEQUENCES))
        held = nifti.find_volumes(folder / "imagesTs", "mri_sequences", len(SEQUENCES))
        names = {nifti.name_of(path) for path in train}
        for path in held:
            if nifti.name_of(path) in names:
                raise UserError(
                    f"{path}: the same patient is in imagesTr; each may be in one part only."
                )
        self.count_test(len(held))
        validation, test = draw_patients(
            self.choose_slices(held),
            self.validation_patients,
            self.split_seed,
        )
        parts = {"train": self.choose_slices(train), "validation": validation, "test": test}
        is_complete = [len(train), len(held)] == list(RELEASED.values())
        is_whole = is_complete and (folder / "dataset.json").is_file()
        provenance: Provenance = "official" if is_whole else "derived"
        return self.load_parts(parts, provenance, "four sequences", nifti.read, "channels")

    def count_test(self, held: int) -> int:
        count = self.validation_patients
        rule = f"leaves {held - count} patients to test"
        require(count < held, "dataset.validation_patients", count, rule)
        return held - count

    def released(self, root: Path) -> DatasetInfo | None:
        if holds_any(root / FOLDER):
            return None
        train, held = RELEASED.values()
        return self.describe(train, self.count_test(held), self.validation_patients)


# Counts up when a curve or a draw below changes: cached arrays go by it.
SIMULATION = "simulated contrasts 1"
NOISE = 0.03  # of the brightest tissue
FIELD = 0.3  # largest part of a coefficient of the sensitivity's polynomial
SPREAD = 0.2  # of γ


def map_to_contrasts(volume: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Turn a volume [X, Y, Z] into contrasts [X, Y, Z, 4] in [0, about 2], as in `SEQUENCES`."""
    low, high = np.percentile(volume, (1, 99))
    width = max(high - low, np.finfo(np.float32).tiny)
    tissue = ((volume - low) / width).clip(0, 1)
    border = np.sqrt(sum(slope**2 for slope in np.gradient(tissue)))
    flair, t1w, t1gd, t2w = 1 + random.uniform(-SPREAD, SPREAD, len(SEQUENCES))  # each one's γ
    grey = random.uniform(0.4, 0.5)
    bump = np.exp(-(((tissue - grey) / 0.25) ** 2))
    contrasts = [
        bump * tissue ** (0.5 * flair),
        tissue**t1w,
        tissue**t1gd + 2 * border,
        (1 - tissue) ** t2w,
    ]
    scans = [scan(contrast, random) for contrast in contrasts]
    return np.stack(scans, axis=-1).astype(np.float32)


def scan(picture: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Add a coil's sensitivity and the noise of a magnitude image to [X, Y, Z]."""
    axes = [np.linspace(-1, 1, side) for side in picture.shape]
    x, y, z = np.meshgrid(*axes, indexing="ij", sparse=True)
    terms = (x, y, z, x * y, y * z, x * z)
    coefficients = random.uniform(-FIELD, FIELD, len(terms))
    field = sum(map(operator.mul, coefficients, terms))
    real_noise, imag_noise = random.normal(0, NOISE, (2, *picture.shape))
    return np.hypot(picture * np.exp(field) + real_noise, imag_noise)


def simulate_contrasts(path: Path) -> np.ndarray:
    """Simulate the four contrasts of a file, seeded by its name: [X, Y, Z, 4]."""
    seed = [ord(letter) for letter in nifti.name_of(path)]
    return map_to_contrasts(nifti.read(path), np.random.default_rng(seed))


@register("dataset", "mri_sequences_from_volumes")
@dataclass(frozen=True, kw_only=True)
class MriSequencesFromVolumes(SequenceSlices, nifti.OfVolumes):
    """Simulated sequences of the volumes in `folder` of the data root."""

    name: ClassVar[str] = "mri_sequences_from_volumes"
    unit: ClassVar[str] = "volume"

    def load(self, root: Path) -> Splits:
        notes = f"four contrasts simulated from the volumes in {self.folder}"
        volumes = self.choose_slices(self.find(root))
        test, train = draw_patients(volumes, self.count_test(len(volumes)), self.split_seed)
        parts = {"train": train, "test": test}
        return self.load_parts(parts, "derived", notes, simulate_contrasts, SIMULATION)
