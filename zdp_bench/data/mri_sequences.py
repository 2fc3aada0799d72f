"""Classify MRI slices by pulse sequence, from their k-space (Riess et al. 2024, section 5).

Files under the data root:

    Task01_BrainTumour/dataset.json, imagesTr/BRATS_001.nii.gz [240, 240, 155, 4], ...,
        imagesTs/BRATS_485.nii.gz, ...

Each volume is one patient and has four channels: the same slices as FLAIR, T1w, T1gd and T2w. The
20 centre slices of each channel are resized to 32×32 and Fourier transformed (centred, unitary,
both halves kept). This gives 80 examples per patient; the class is the sequence.

The labels are the sequences, so volumes without a segmentation can be used too: training uses the
published training volumes, and the published test volumes are divided into validation and test set.
No patient is in two parts. The counts are the paper's: 38,720 training and 21,280 held-out
examples, where 110 of the 266 held-out patients form the validation set.

The paper says 'normalised by whitening' but does not say with which statistics. Here each example
is whitened with its own, so it depends on no other example and no private statistic is used without
being accounted for.

The k-space arrays are computed once, patient by patient, and memory-mapped from the user's cache
folder.

`mri_sequences_from_volumes` simulates the four contrasts from any folder of single-contrast NIfTI
volumes, which are taken to be T1-weighted (as Task04's hippocampi are). A voxel's intensity, scaled
linearly so that the volume's 1st and 99th percentile become 0 and 1 and clipped to [0, 1], is the
tissue value v: from fluid (dark) through grey matter to white matter and fat (bright). Each
contrast is a function of v:

    T1w    v^γ                     the volume itself
    T1gd   v^γ + 2 · |∇v|          contrast agent gathers at tissue borders, where v changes fast
    T2w    (1 − v)^γ               fluid is bright
    FLAIR  bump(v) · v^(γ / 2)     fluid is suppressed; the bump is a Gaussian at grey matter

γ is drawn per contrast and patient from [0.8, 1.2], and the centre of the bump per patient from
[0.4, 0.5]. Each contrast then gets its own scanner effects: a smooth sensitivity field (the
exponential of a polynomial in x, y, z and their products in pairs, with coefficients up to 0.3) and
Rician noise whose standard deviation is 3 % of the brightest tissue. The random numbers are seeded
by the file's name, so the same file always gives the same patient.

The anatomy is real, but no scanner measured these contrasts: scores are 'derived', and are not
comparable with scores on the volumes of the Medical Segmentation Decathlon. ε is per volume; a
patient with two volumes (Task04, see `msd.py`) has a larger ε.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Interval

from zdp_bench.data import Dataset, DatasetInfo, Examples, Provenance, Splits, nifti
from zdp_bench.data.cache import load_or_make
from zdp_bench.data.files import count_parts, digest, holds_any
from zdp_bench.data.kspace import to_kspace
from zdp_bench.data.owners import digest_files, place_owners
from zdp_bench.errors import UserError, require
from zdp_bench.registry import register

SEQUENCES = ("FLAIR", "T1w", "T1gd", "T2w")  # the order of a volume's channels
FOLDER = "Task01_BrainTumour"
RELEASED = {"imagesTr": 484, "imagesTs": 266}  # number of published volumes
RELEASED_SLICES = 155  # of each
# Smallest standard deviation of a real or imaginary part, relative to the root mean square of an
# example, that is scaled to 1. A smaller one is rounding noise.
MIN_DEVIATION = 1e-6

Patient = tuple[Path, slice]  # a volume, and the axial slices of it that are used
Parts = dict[str, list[Patient]]  # 'train', 'test' and perhaps 'validation'


@dataclass(frozen=True, kw_only=True)
class SequenceSlices(Dataset):
    """k-space, complex64 [1, size, size], of four classes: the sequences.

    Args:
        size: rows and columns of an example.
        slices: number of centre slices per patient and sequence; a volume with fewer slices gives
            all that it has.
    """

    unit: ClassVar[str] = "patient"

    size: Annotated[int, Interval(ge=8, le=512)] = 32
    slices: Annotated[int, Ge(1)] = 20

    def choose_slices(self, volumes: dict[Path, nifti.Header]) -> list[Patient]:
        """Return each volume with its centre slices, or all slices if it has fewer."""
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
        """Return counts and shapes, given the number of patients in each part."""
        examples_per_patient = len(SEQUENCES) * self.slices
        return DatasetInfo(
            train=train * examples_per_patient,
            test=test * examples_per_patient,
            validation=validation * examples_per_patient,
            input_shape=(1, self.size, self.size),
            outputs=len(SEQUENCES),
            dtype=torch.complex64,
            examples_per_patient=examples_per_patient,
            unit=self.unit,
            owners=train,
        )

    def load_parts(
        self,
        parts: Parts,
        provenance: Provenance,
        notes: str,
        read: Callable[[Path], np.ndarray],
        reader_id: str,
    ) -> Splits:
        """Transform the slices of each part's patients to k-space.

        `groups` of the examples contains the number of each example's patient.

        Args:
            parts: the patients of each part.
            provenance: see `Splits`.
            notes: what the volumes are, which begins the notes of `Splits`.
            read: reads a patient's file as four contrasts [X, Y, Z, 4] on RAS+ axes.
            reader_id: identifies `read`, for the cache key and the digest. It must change whenever
                `read` returns other values; `nifti.READING` identifies the NIfTI reader.
        """
        all_paths = [path for each in parts.values() for path, _ in each]
        contents = iter(digest_files(all_paths, [path.name for path in all_paths]))
        files = []
        patients = []
        examples_per_patient: dict[str, list[int]] = {}
        for part, patients_of_part in parts.items():
            examples_per_patient[part] = []
            for path, slices in patients_of_part:
                files.append((part, path.name, next(contents), slices))
                patients.append((path, slices))
                examples_per_patient[part].append(len(SEQUENCES) * (slices.stop - slices.start))
        arrays_digest = digest(repr((reader_id, self.size, files)))
        rows_of_parts, groups = place_owners(examples_per_patient)

        classes = torch.arange(len(SEQUENCES))
        # `transform_slices` returns a patient's examples sequence by sequence.
        labels = torch.cat(
            [classes.repeat_interleave(slices.stop - slices.start) for _, slices in patients]
        )
        kind = f"sequences-{nifti.READING}"
        shape = (len(groups), 1, self.size, self.size)
        blocks = (
            transform_slices(read(path)[:, :, slices], self.size) for path, slices in patients
        )
        array = load_or_make(kind, arrays_digest, shape, np.complex64, blocks)
        kspace = torch.from_numpy(array)
        examples = {}
        for part, rows in rows_of_parts.items():
            examples[part] = Examples(kspace[rows], labels[rows], groups[rows])
        counts = {part: len(patients_of_part) for part, patients_of_part in parts.items()}
        return Splits(
            examples["train"],
            examples["test"],
            input_shape=(1, self.size, self.size),
            outputs=len(SEQUENCES),
            provenance=provenance,
            digest=arrays_digest,
            notes=f"{notes}; k-space of centre slices at {self.size}², each whitened by itself; "
            f"{self.unit}s: {count_parts(counts)}",
            validation=examples["validation"] if parts.get("validation") else None,
            unit=self.unit,
            owner_names=[nifti.name_of(path) for path, _ in patients],
        )


def transform_slices(volume: np.ndarray, size: int) -> np.ndarray:
    """Transform a patient's slices [X, Y, n, 4] to whitened k-space [4·n, 1, size, size]."""
    slices = volume[:, ::-1].transpose(3, 2, 1, 0)  # [4, n, Y, X], rows from anterior to posterior
    planes = torch.from_numpy(np.ascontiguousarray(slices, dtype=np.float32))
    planes = F.interpolate(planes, (size, size), mode="bilinear", antialias=True)
    kspace = to_kspace(planes.double().numpy())  # [4, n, size, size]
    return whiten(kspace).astype(np.complex64).reshape(-1, 1, size, size)


def whiten(kspace: np.ndarray) -> np.ndarray:
    """Whiten each example [..., rows, columns] with its own statistics.

    Its mean becomes 0; its real and imaginary part become uncorrelated, with variance 1.

    General whitening needs the 2×2 covariance of real and imaginary part. The spectrum of a real
    image is Hermitian, X(−k) = conj X(k), so its parts are already uncorrelated and the imaginary
    one has mean 0: subtracting the mean and scaling each part is enough. A part that is 0 except
    for rounding errors stays close to 0.
    """
    centred = kspace - kspace.mean(axis=(-2, -1), keepdims=True)
    power = (np.abs(kspace) ** 2).mean(axis=(-2, -1), keepdims=True)
    min_deviation = MIN_DEVIATION * np.sqrt(power) + np.finfo(np.float64).tiny
    real = _scale(centred.real, min_deviation)
    imag = _scale(centred.imag, min_deviation)
    return real + 1j * imag


def _scale(part: np.ndarray, min_deviation: np.ndarray) -> np.ndarray:
    deviation = part.std(axis=(-2, -1), keepdims=True)
    return part / np.maximum(deviation, min_deviation)


def draw_patients(
    patients: list[Patient], count: int, seed: int
) -> tuple[list[Patient], list[Patient]]:
    """Draw `count` patients at random; return them and the others, each in the given order."""
    order = np.random.default_rng(seed).permutation(len(patients))
    drawn = [patients[index] for index in sorted(order[:count])]
    others = [patients[index] for index in sorted(order[count:])]
    return drawn, others


# ---------------------------------------------------- the Medical Segmentation Decathlon


@register("dataset", "mri_sequences")
@dataclass(frozen=True, kw_only=True)
class MriSequences(SequenceSlices):
    """The brain tumour task of the Medical Segmentation Decathlon (Task01).

    Args:
        validation_patients: number of published test patients used for validation instead.
        split_seed: seed that draws these patients.
    """

    validation_patients: Annotated[int, Ge(0)] = 110
    split_seed: int = 0

    def load(self, root: Path) -> Splits:
        """Load Task01; 'official' if dataset.json and all published volumes are present.

        Validation patients are drawn from the published test volumes, as in the paper.
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
        self.require_test_patients(len(held))
        validation, test = draw_patients(
            self.choose_slices(held),
            self.validation_patients,
            self.split_seed,
        )
        parts = {"train": self.choose_slices(train), "validation": validation, "test": test}
        has_all_volumes = [len(train), len(held)] == list(RELEASED.values())
        is_official = has_all_volumes and (folder / "dataset.json").is_file()
        provenance: Provenance = "official" if is_official else "derived"
        return self.load_parts(parts, provenance, "four sequences", nifti.read, "channels")

    def require_test_patients(self, num_held: int) -> None:
        """Raise a `UserError` if validation takes all `num_held` published test patients."""
        count = self.validation_patients
        rule = f"must be less than the number of test patients, {num_held}"
        require(count < num_held, "dataset.validation_patients", count, rule)

    def published_info(self, root: Path) -> DatasetInfo | None:
        if holds_any(root / FOLDER):
            return None
        num_train, num_held = RELEASED.values()
        self.require_test_patients(num_held)
        num_test = num_held - self.validation_patients
        released = replace(self, slices=min(self.slices, RELEASED_SLICES))
        return released.describe(num_train, num_test, self.validation_patients)


# ------------------------------------------------------------------------- simulated contrasts

# Increment when a curve or a random draw below changes; part of the cache key.
SIMULATION = "simulated contrasts 1"
NOISE = 0.03  # standard deviation of the noise, where the brightest tissue is 1
MAX_COEFFICIENT = 0.3  # of the polynomial in the sensitivity field's exponent
GAMMA_SPREAD = 0.2  # γ is drawn from [1 - GAMMA_SPREAD, 1 + GAMMA_SPREAD]


def map_to_contrasts(volume: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Simulate contrasts [X, Y, Z, 4], in the order of `SEQUENCES`, of a volume [X, Y, Z].

    The module's docstring gives the formulas. Values lie between 0 and about 2.
    """
    low, high = np.percentile(volume, (1, 99))
    value_range = max(high - low, np.finfo(np.float32).tiny)
    tissue = ((volume - low) / value_range).clip(0, 1)
    # Along an axis of one voxel, a gradient is not defined.
    axes = [axis for axis, side in enumerate(tissue.shape) if side > 1]
    border = np.sqrt(sum(np.gradient(tissue, axis=axis) ** 2 for axis in axes))
    gammas = 1 + random.uniform(-GAMMA_SPREAD, GAMMA_SPREAD, len(SEQUENCES))
    gamma_flair, gamma_t1w, gamma_t1gd, gamma_t2w = gammas
    grey_matter = random.uniform(0.4, 0.5)
    bump = np.exp(-(((tissue - grey_matter) / 0.25) ** 2))
    contrasts = [
        bump * tissue ** (0.5 * gamma_flair),
        tissue**gamma_t1w,
        tissue**gamma_t1gd + 2 * border,
        (1 - tissue) ** gamma_t2w,
    ]
    scans = [scan(contrast, random) for contrast in contrasts]
    return np.stack(scans, axis=-1).astype(np.float32)


def scan(contrast: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Apply a random coil sensitivity to a contrast [X, Y, Z], and add Rician noise."""
    axes = [np.linspace(-1, 1, side) for side in contrast.shape]
    x, y, z = np.meshgrid(*axes, indexing="ij", sparse=True)
    terms = (x, y, z, x * y, y * z, x * z)
    coefficients = random.uniform(-MAX_COEFFICIENT, MAX_COEFFICIENT, len(terms))
    pairs = zip(coefficients, terms, strict=True)
    exponent = sum(coefficient * term for coefficient, term in pairs)
    real_noise, imag_noise = random.normal(0, NOISE, (2, *contrast.shape))
    return np.hypot(contrast * np.exp(exponent) + real_noise, imag_noise)


def simulate_contrasts(path: Path) -> np.ndarray:
    """Read a volume and simulate its four contrasts [X, Y, Z, 4], seeded by the file's name."""
    seed = [ord(letter) for letter in nifti.name_of(path)]
    return map_to_contrasts(nifti.read(path), np.random.default_rng(seed))


@register("dataset", "mri_sequences_from_volumes")
@dataclass(frozen=True, kw_only=True)
class MriSequencesFromVolumes(SequenceSlices, nifti.OfVolumes):
    """Sequences simulated from the volumes in `folder` of the data root.

    `OfVolumes` finds the volumes and splits them; `SequenceSlices` makes the examples.
    """

    name: ClassVar[str] = "mri_sequences_from_volumes"
    unit: ClassVar[str] = "volume"

    def load(self, root: Path) -> Splits:
        notes = f"four contrasts simulated from the volumes in {self.folder}"
        volumes = self.choose_slices(self.find(root))
        test, train = draw_patients(volumes, self.count_test(len(volumes)), self.split_seed)
        parts = {"train": train, "test": test}
        return self.load_parts(parts, "derived", notes, simulate_contrasts, SIMULATION)
