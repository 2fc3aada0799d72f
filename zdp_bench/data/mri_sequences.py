"""Which pulse sequence an MRI slice is of, from its k-space (Riess et al. 2024, section 5): brains in four contrasts.

    Task01_BrainTumour/dataset.json, imagesTr/BRATS_001.nii.gz [240, 240, 155, 4], ..., imagesTs/BRATS_485.nii.gz, ...

A volume is a patient, and holds the same slices as FLAIR, T1w, T1gd and T2w. The 20 centre slices of each are resized to 32×32
and Fourier transformed (centred, unitary, both halves kept), which makes 80 records a patient; the class is the sequence. The
release's training volumes train and its test volumes test: what their segmentations hold back is not needed here. So no patient
is in two parts, and the counts are the paper's 38,720 and 21,280.

The paper says 'normalised by whitening' and not by which statistics. Here each record is whitened by its own, so that it depends
on no other, and nothing private goes into the data unpaid for.

k-space is made once, patient by patient, and mapped from the user's cache folder: a set of any size streams through training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from zdp_bench.data import DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.cache import kept
from zdp_bench.data.files import holds_any, sha256
from zdp_bench.data.formats import nifti
from zdp_bench.data.formats.kspace import to_kspace
from zdp_bench.errors import UserError, require
from zdp_bench.registry import register

SEQUENCES = ("FLAIR", "T1w", "T1gd", "T2w")  # the order of a volume's channels
FOLDER = "Task01_BrainTumour"
RELEASED = {"imagesTr": 484, "imagesTs": 266}  # volumes
FLAT = 1e-6  # of a record's root mean square: a part that varies less is rounding, and is not blown up to 1

Read = Callable[[Path], np.ndarray]  # a patient's file -> [X, Y, Z, 4], on RAS+ axes


@dataclass(frozen=True)
class Patient:
    """One volume in four contrasts, and which of its axial slices are used."""

    path: Path
    slices: slice

    @property
    def records(self) -> int:
        return len(SEQUENCES) * (self.slices.stop - self.slices.start)


def check_options(size: int, slices: int) -> None:
    """Refuse sizes that mean nothing, before anything is read or drawn."""
    require(8 <= size <= 512, "dataset.size", size, "must lie between 8 and 512 pixels")
    require(slices > 0, "dataset.slices", slices, "must be at least 1")


def patients(found: dict[Path, nifti.Header], slices: int) -> list[Patient]:
    """The patients of a folder, each with its centre slices: `slices` of them, or all of a thinner volume."""
    chosen = []
    for path, header in found.items():
        count = min(slices, depth := header.shape[2])
        first = (depth - count) // 2
        chosen.append(Patient(path, slice(first, first + count)))
    return chosen


def records_of(volume: np.ndarray, size: int) -> np.ndarray:
    """Slices [X, Y, n, 4] of one patient as whitened k-space: complex64 [4·n, 1, size, size], one sequence after the other."""
    pictures = torch.from_numpy(
        np.ascontiguousarray(volume[:, ::-1].transpose(3, 2, 1, 0), dtype=np.float32)
    )  # [4, n, Y, X]
    resized = (
        F.interpolate(pictures, (size, size), mode="bilinear", antialias=True).double().numpy()
    )
    return whitened(to_kspace(resized)).astype(np.complex64).reshape(-1, 1, size, size)


def whitened(kspace: np.ndarray) -> np.ndarray:
    """Each record [..., rows, columns] with mean 0, and both parts uncorrelated and of variance 1, by its own statistics.

    In the spectrum of a real image X(−k) is the conjugate of X(k): its imaginary part has mean 0, and is uncorrelated with the
    real one. So whitening is a shift and two divisions. A part that is 0 but for rounding stays next to 0.
    """
    centred = kspace - kspace.mean(axis=(-2, -1), keepdims=True)
    floor = (
        FLAT * np.sqrt((np.abs(kspace) ** 2).mean(axis=(-2, -1), keepdims=True))
        + np.finfo(np.float64).tiny
    )
    real, imag = (
        part / np.maximum(part.std(axis=(-2, -1), keepdims=True), floor)
        for part in (centred.real, centred.imag)
    )
    return real + 1j * imag


def drawn(found: list[Patient], count: int, seed: int) -> tuple[list[Patient], list[Patient]]:
    """(`count` patients drawn by the seed, the others), each in the order of the names."""
    chosen = set(np.random.default_rng(seed).permutation(len(found))[:count].tolist())
    return [p for i, p in enumerate(found) if i in chosen], [
        p for i, p in enumerate(found) if i not in chosen
    ]


def load(
    parts: dict[str, list[Patient]],
    read: Read,
    origin: str,
    provenance: Provenance,
    notes: str,
    *,
    size: int,
) -> Splits:
    """k-space complex64 [1, size, size] and the number of its sequence; `groups` number the patients.

    Args:
        parts: the patients of 'train', 'test' and 'validation'; the last may be empty.
        read: how a patient's file becomes four contrasts.
        origin: how that is done, in words that change when it does: part of what the cache and the digest go by.
    """
    everyone = [patient for members in parts.values() for patient in members]
    told = [
        (part, p.path.name, sha256(p.path), p.slices)
        for part, members in parts.items()
        for p in members
    ]
    made = hashlib.sha256(repr((origin, size, told)).encode()).hexdigest()
    ends = list(accumulate(patient.records for patient in everyone))

    def fill(whole: np.ndarray) -> None:
        for patient, end in zip(everyone, ends, strict=True):
            volume = read(patient.path)
            whole[end - patient.records : end] = records_of(volume[:, :, patient.slices], size)

    whole = torch.from_numpy(
        kept(f"sequences-{nifti.READING}", made, (ends[-1], 1, size, size), np.complex64, fill)
    )
    groups = torch.repeat_interleave(
        torch.arange(len(everyone)), torch.tensor([p.records for p in everyone])
    )
    labels = torch.cat(
        [torch.arange(4).repeat_interleave(p.records // len(SEQUENCES)) for p in everyone]
    )
    split, first = {}, 0
    for (
        part,
        members,
    ) in parts.items():  # each part is one stretch of the mapped file, so nothing is copied
        rows = slice(first, first + sum(p.records for p in members))
        split[part] = Examples(whole[rows], labels[rows], groups[rows])
        first = rows.stop
    counts = ", ".join(f"{len(members)} to {doing}" for doing, members in _said(parts))
    return Splits(
        split["train"],
        split["test"],
        input_shape=(1, size, size),
        outputs=len(SEQUENCES),
        provenance=provenance,
        digest=made,
        notes=f"{notes}; k-space of centre slices at {size}², each whitened by itself; patients: {counts}",
        examples_per_patient=max(patient.records for patient in parts["train"]),
        validation=split["validation"] if parts.get("validation") else None,
    )


def _said(parts: dict[str, list[Patient]]) -> list[tuple[str, list[Patient]]]:
    doing = {"train": "train", "validation": "validate (public)", "test": "test"}
    return [(doing[part], members) for part, members in parts.items() if members]


def outlined(parts: dict[str, list[Patient]], size: int) -> DatasetInfo:
    """What `load` will make of these patients."""
    counts = {part: sum(patient.records for patient in members) for part, members in parts.items()}
    each = max(patient.records for patient in parts["train"])
    return DatasetInfo(
        counts["train"],
        counts["test"],
        (1, size, size),
        len(SEQUENCES),
        torch.complex64,
        examples_per_patient=each,
        validation=counts.get("validation", 0),
    )


# ---------------------------------------------------------------------------------------------------------- the decathlon


def read_contrasts(path: Path) -> np.ndarray:
    """A file that holds the four contrasts as its channels: float32 [X, Y, Z, 4].

    Raises:
        UserError: see `nifti.read`.
    """
    return nifti.read(path).data


def parts_of(
    folder: Path, slices: int, validation_patients: int, split_seed: int
) -> dict[str, list[Patient]]:
    """The patients to train, to validate and to test on; those that validate are drawn from the test volumes, as the paper's.

    Raises:
        UserError: a folder is missing, holds something else than volumes of four channels, or a patient is in both.
    """
    for name in RELEASED:
        if not (folder / name).is_dir():
            raise UserError(
                f"dataset 'mri_sequences' expects {folder / name} with volumes of four channels. Unpack the decathlon's "
                f"{FOLDER}.tar there (see datasets/mri_sequences.yaml), or use dataset=mri_sequences_from_volumes or "
                "dataset=mri_sequences_synthetic."
            )
    train, held = (
        nifti.volumes(folder / name, "mri_sequences", len(SEQUENCES)) for name in RELEASED
    )
    names = {nifti.name_of(path) for path in train}
    if both := [path for path in held if nifti.name_of(path) in names]:
        raise UserError(
            f"{both[0]}: the same patient is in imagesTr; each may be in one part only."
        )
    left = len(held) - validation_patients
    require(
        0 <= validation_patients < len(held),
        "dataset.validation_patients",
        validation_patients,
        f"leaves {left} patients to test",
    )
    validate, test = drawn(patients(held, slices), validation_patients, split_seed)
    return {"train": patients(train, slices), "validation": validate, "test": test}


@register("dataset", "mri_sequences")
def mri_sequences(
    root: Path,
    *,
    size: int = 32,
    slices: int = 20,
    validation_patients: int = 110,
    split_seed: int = 0,
) -> Splits:
    """Task01 of the decathlon under the data root: complex64 [1, size, size] of four classes."""
    check_options(size, slices)
    folder = root / FOLDER
    parts = parts_of(folder, slices, validation_patients, split_seed)
    whole = (folder / "dataset.json").is_file() and all(
        len(nifti.paths_of(folder / n)) == c for n, c in RELEASED.items()
    )
    return load(
        parts,
        read_contrasts,
        "channels",
        "official" if whole else "derived",
        "four sequences",
        size=size,
    )


@register("outline", "mri_sequences")
def outline(
    root: Path, *, size: int, slices: int, validation_patients: int, split_seed: int
) -> DatasetInfo:
    """From headers alone; without volumes, as many as the release has."""
    check_options(size, slices)
    if holds_any(root / FOLDER):
        return outlined(parts_of(root / FOLDER, slices, validation_patients, split_seed), size)
    each = len(SEQUENCES) * slices
    train, test = RELEASED["imagesTr"] * each, (RELEASED["imagesTs"] - validation_patients) * each
    shape = (1, size, size)
    validate = validation_patients * each
    return DatasetInfo(
        train,
        test,
        shape,
        len(SEQUENCES),
        torch.complex64,
        examples_per_patient=each,
        found=False,
        validation=validate,
    )


@register("check", "mri_sequences")
def check(root: Path) -> Iterator[tuple[Path, str]]:
    """Every volume, and what is wrong with it."""
    for name in RELEASED:
        yield from nifti.inspected(root / FOLDER / name, "mri_sequences", len(SEQUENCES))
