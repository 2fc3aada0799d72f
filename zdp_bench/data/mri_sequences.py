"""MRI pulse sequences in k-space (Riess et al. 2024, section 5): which of four contrasts is a slice?

From each patient's 4-D volume [X, Y, Z, 4] the centre slices of every sequence are taken, resized to 32 x 32, Fourier transformed
(orthonormal, two-sided: nothing of the spectrum is dropped although the slice is real) and whitened. The paper does not say over
what it whitens; here each record is whitened by itself, mean zero and the covariance of real and imaginary parts the identity, so
that no statistic of other patients enters a record unpaid.

A patient owns `slices` x 4 records: 80 in the paper, whose ε are 'per patient'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.data import Provenance, Records, Splits, nifti
from zdp_bench.data.cache import kept
from zdp_bench.data.files import sha256
from zdp_bench.errors import UserError, require
from zdp_bench.registry import register

SEQUENCES = ("FLAIR", "T1w", "T1gd", "T2w")  # the order of the Decathlon's channels, dataset.json of Task01_BrainTumour
FOLDER = "Task01_BrainTumour"
EPSILON = 1e-5  # of the whitening, as in the paper's Listing 4


def centre(depth: int, slices: int) -> range:
    """The `slices` central of `depth` slices."""
    start = (depth - slices) // 2
    return range(start, start + slices)


def whitened(kspace: Tensor) -> Tensor:
    """complex [n, H, W] -> complex [n, H, W]: each record with mean zero and Cov(Re, Im) = I, W = Cov^(-1/2), symmetric."""
    parts = torch.view_as_real(kspace - kspace.mean(dim=(1, 2), keepdim=True)).flatten(1, 2)  # [n, H·W, 2]
    covariance = parts.mT @ parts / parts.shape[1]  # [n, 2, 2]
    values, vectors = torch.linalg.eigh(covariance.double())
    inverse_root = vectors @ torch.diag_embed((values + EPSILON).rsqrt()) @ vectors.mT
    return torch.view_as_complex((parts @ inverse_root.to(parts.dtype)).unflatten(1, kspace.shape[1:]).contiguous())


def records_of(volume: np.ndarray, slices: int, size: int) -> Tensor:
    """One patient [X, Y, Z, 4] -> whitened k-space, complex64 [4·slices, size, size], sequence by sequence."""
    cut = volume[:, :, centre(volume.shape[2], slices), :]  # [X, Y, slices, 4]
    images = torch.from_numpy(np.ascontiguousarray(cut.transpose(3, 2, 0, 1))).float().flatten(0, 1)  # [4·slices, X, Y]
    scale = images.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-12)  # units are the scanner's own; also keeps ε harmless
    small = F.interpolate((images / scale).unsqueeze(1), (size, size), mode="bilinear", antialias=True).squeeze(1)
    return whitened(torch.fft.fftshift(torch.fft.fft2(small, norm="ortho"), dim=(1, 2))).to(torch.complex64)


def volumes_of(folder: Path, dataset: str) -> list[Path]:
    """The 4-D volumes of a folder, by name.

    Raises:
        UserError: there is none, or one leads out of the folder.
    """
    if not folder.is_dir():
        raise UserError(
            f"dataset '{dataset}' expects 4-D NIfTI volumes in {folder}. Unpack the Decathlon's Task01_BrainTumour.tar under the "
            "data root (see datasets/mri_sequences.yaml), or use dataset=mri_sequences_synthetic."
        )
    paths = nifti.paths_of(folder)
    if not paths:
        raise UserError(f"{folder}: holds no .nii or .nii.gz file.")
    for path in paths:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{path}: is a link that leads out of {folder}; put the file itself there.")
    names = [nifti.name_of(path) for path in paths]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{path}: is the same patient as another file of {folder}; remove one of them.")
    return paths


def read_patient(path: Path, slices: int) -> np.ndarray:
    """float32 [X, Y, Z, 4].

    Raises:
        UserError: no 4-D volume of four sequences, fewer slices than are asked for, or not readable.
    """
    shape = nifti.read_header(path).shape
    if len(shape) != 4 or shape[3] != len(SEQUENCES):
        raise UserError(f"{path}: has shape {list(shape)} where [X, Y, Z, 4] was expected: {', '.join(SEQUENCES)}.")
    if shape[2] < slices:
        raise UserError(f"{path}: has {shape[2]} slices where dataset.slices={slices} were asked for.")
    return nifti.read(path).data


def part(paths: Sequence[Path], patients: range, digest: str, slices: int, size: int) -> Records:
    """The records of some patients: inputs complex64 [n, 1, size, size], the sequence as target, the patient as group."""
    each = len(SEQUENCES) * slices

    def fill(whole: np.ndarray) -> None:
        for place, path in enumerate(paths):
            whole[place * each : (place + 1) * each] = records_of(read_patient(path, slices), slices, size).numpy()

    inputs = kept("mri_sequences", digest, (len(paths) * each, size, size), np.complex64, fill)
    targets = torch.arange(len(SEQUENCES)).repeat_interleave(slices).repeat(len(paths))
    return Records(torch.from_numpy(inputs).unsqueeze(1), targets, torch.tensor(list(patients)).repeat_interleave(each))


def load(train: Sequence[Path], test: Sequence[Path], provenance: Provenance, notes: str, *, slices: int, size: int) -> Splits:
    """k-space of all patients: complex64 [1, size, size], four classes; no patient on both sides."""
    require(slices > 0, "dataset.slices", slices, "must be at least 1")
    require(size >= 8, "dataset.size", size, "must be at least 8")
    digests = {}
    for name, paths in (("train", train), ("test", test)):
        files = "".join(f"{path.name}:{sha256(path)}" for path in paths)
        digests[name] = hashlib.sha256(f"{files}:{slices}:{size}".encode()).hexdigest()
    return Splits(
        part(train, range(len(train)), digests["train"], slices, size),
        part(test, range(len(train), len(train) + len(test)), digests["test"], slices, size),
        input_shape=(1, size, size),
        outputs=len(SEQUENCES),
        provenance=provenance,
        digest=hashlib.sha256(f"{digests['train']}:{digests['test']}".encode()).hexdigest(),
        notes=notes,
        records_per_patient=len(SEQUENCES) * slices,
    )


def split_patients(paths: Sequence[Path], test_share: float, seed: int) -> tuple[list[Path], list[Path]]:
    """(train, test) of whole patients.

    Raises:
        UserError: one side would be empty.
    """
    held = round(test_share * len(paths))
    remain = f"leaves {len(paths) - held} patients to train and {held} to test"
    require(0 < held < len(paths), "dataset.test_share", test_share, remain)
    chosen = set(np.random.default_rng(seed).choice(len(paths), held, replace=False).tolist())
    sides: tuple[list[Path], list[Path]] = ([], [])
    for place, path in enumerate(paths):
        sides[place in chosen].append(path)
    return sides


@register("dataset", "mri_sequences")
def mri_sequences(root: Path, *, slices: int = 20, size: int = 32) -> Splits:
    """Brain MRI of the Medical Segmentation Decathlon: its 484 labelled patients train, its 266 others test, as in the paper."""
    folder = root / FOLDER
    train, test = (volumes_of(folder / side, "mri_sequences") for side in ("imagesTr", "imagesTs"))
    whole = (len(train), len(test)) == (484, 266)
    notes = "" if whole else f"{len(train)} and {len(test)} of the release's 484 and 266 patients"
    return load(train, test, "official" if whole else "derived", notes, slices=slices, size=size)
