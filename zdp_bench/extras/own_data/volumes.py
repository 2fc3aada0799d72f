"""Planes and masks of a person's own NIfTI volumes, as bytes; each plane is axial, on RAS+ axes.

Rows of a plane run from anterior to posterior, columns from left to right.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zdp_bench.data.formats import nifti
from zdp_bench.data.formats.planes import crop_square, resample, resample_mask, to_bytes
from zdp_bench.errors import UserError
from zdp_bench.extras.own_data.form import Form

SUFFIXES = (".nii", ".nii.gz")


def count_planes(path: Path, form: Form) -> int:
    """Return how many examples a volume makes, by its header: its planes, or 1 if it is whole."""
    header = nifti.read_header(path)
    return header.shape[2] if form.depth is None else 1


def extent_of_volume(path: Path, form: Form) -> tuple[int, ...]:
    """Return the voxels along each axis, by the header."""
    return nifti.read_header(path).shape[:3]


def read_volume(path: Path, form: Form) -> np.ndarray:
    """Return bytes [planes, channels, size, size], or [1, depth, channels, size, size].

    Raises:
        UserError: it cannot be read (`nifti.read`), or has another number of channels.
    """
    data = nifti.read(path).data
    data = data[..., None] if data.ndim == 3 else data
    if data.shape[3] != form.channels:
        raise UserError(
            f"{path}: has {data.shape[3]} channels where dataset.channels={form.channels}."
        )
    planes = _choose(_turn(data), form)  # [planes, channels, Y, X]
    image = to_bytes(planes.flatten(0, 1), form.window)
    image = crop_square(image) if form.fit == "crop" else image
    made = resample(image, (form.size, form.size)).round().clamp(0, 255).to(torch.uint8)
    return made.numpy().reshape(-1, *form.image)


def read_volume_mask(path: Path, form: Form) -> np.ndarray:
    """Return bytes [planes, size, size], or [1, depth, size, size]: 1 where a label is above 0.

    Raises:
        UserError: it cannot be read (`nifti.read_labels`), or has channels.
    """
    labels = nifti.read_labels(path).data
    if labels.shape[3:] not in ((), (1,)):
        raise UserError(f"{path}: has shape {list(labels.shape)}; a mask has three dimensions.")
    planes = _choose(_turn((labels > 0).reshape(*labels.shape[:3], 1)), form)[:, 0].float()
    mask = crop_square(planes) if form.fit == "crop" else planes
    return resample_mask(mask, (form.size, form.size)).byte().numpy().reshape(-1, *form.mask)


def _turn(data: np.ndarray) -> Tensor:
    """Turn voxels [X, Y, Z, C] into planes [Z, C, Y, X]."""
    return torch.from_numpy(np.ascontiguousarray(data[:, ::-1].transpose(2, 3, 1, 0)))


def _choose(planes: Tensor, form: Form) -> Tensor:
    """Keep all planes, or `depth` of them from the first to the last, the nearest to even steps."""
    if form.depth is None:
        return planes
    places = np.linspace(0, len(planes) - 1, form.depth).round().astype(int)
    return planes[torch.from_numpy(places)]
