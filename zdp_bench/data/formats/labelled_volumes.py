"""A task's folder of the decathlon: its volumes with their segmentations, found, paired and held against one another.

Nothing but names and headers is read; what becomes of the voxels is `msd.py`'s.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zdp_bench.data.formats import nifti
from zdp_bench.errors import UserError


@dataclass(frozen=True)
class Case:
    """One volume with its segmentation, and what its header announces."""

    name: str
    image: Path
    label: Path
    header: nifti.Header

    def slices(self, most: int | None) -> np.ndarray:
        """Indices of the slices that are used: all, or `most` spread evenly from the first to the last."""
        count = self.header.shape[2]
        if most is None or most >= count:
            return np.arange(count)
        return np.unique(np.round(np.linspace(0, count - 1, most)).astype(int))


def cases(folder: Path) -> list[Case]:
    """Every labelled volume, by name: from dataset.json where it is, else by the names of the files. Headers are read.

    Raises:
        UserError: folder or files are missing, dataset.json is damaged, or image and segmentation do not belong together.
    """
    if not folder.is_dir():
        raise UserError(
            f"dataset 'msd' expects {folder} with imagesTr/ and labelsTr/. Unpack the task's archive there (see "
            "datasets/msd.yaml), or use dataset=msd_synthetic."
        )
    pairs = _from_json(folder) if (folder / "dataset.json").is_file() else _from_names(folder)
    found = []
    for image, label in sorted(pairs):
        for path in (image, label):
            if not path.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{path}: leads out of {folder}; put the file itself there.")
        header, mask = nifti.read_header(image), nifti.read_header(label)
        if header.shape[:3] != mask.shape[:3]:
            raise UserError(
                f"{label}: has {list(mask.shape[:3])} voxels, but its image has {list(header.shape[:3])}."
            )
        if not np.allclose(header.spacing, mask.spacing, rtol=1e-2):
            raise UserError(
                f"{label}: its voxels measure {mask.spacing} mm, but its image's {header.spacing} mm."
            )
        found.append(Case(nifti.name_of(image), image, label, header))
    if len(found) < 3:
        raise UserError(
            f"{folder}: holds {len(found)} labelled volumes; at least 3 are needed to train, validate and test."
        )
    if twice := [name for name, count in Counter(case.name for case in found).items() if count > 1]:
        raise UserError(f"{folder}: volume '{twice[0]}' stands there twice.")
    return found


def with_channel(found: list[Case], channel: int) -> list[Case]:
    """The same cases, each of which has this channel.

    Raises:
        UserError: one has not.
    """
    for case in found:
        there = (*case.header.shape, 1)[3]
        if channel >= there:
            has = f"{there} channels, counted from 0" if there > 1 else "one channel, which is 0"
            raise UserError(f"dataset.channel={channel}: {case.image} has {has}.")
    return found


def _from_json(folder: Path) -> list[tuple[Path, Path]]:
    path = folder / "dataset.json"
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["training"]
        return [(folder / str(entry["image"]), folder / str(entry["label"])) for entry in listed]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(
            f"{path}: does not list its training volumes ({type(error).__name__}); unpack the archive again, or delete the "
            "file to pair volumes by name."
        ) from None


def _from_names(folder: Path) -> list[tuple[Path, Path]]:
    images = {nifti.name_of(path): path for path in nifti.paths_of(folder / "imagesTr")}
    labels = {nifti.name_of(path): path for path in nifti.paths_of(folder / "labelsTr")}
    if not images:
        raise UserError(f"{folder / 'imagesTr'}: holds no NIfTI volume.")
    if alone := sorted(set(images) ^ set(labels)):
        missing = "labelsTr" if alone[0] in images else "imagesTr"
        raise UserError(
            f"{folder / missing}: lacks the volume '{alone[0]}', which the other folder has."
        )
    return [(images[name], labels[name]) for name in images]
