"""Find the volumes of a decathlon task, pair them with their segmentations, compare their headers.

Only names and headers are read; `msd.py` reads the voxels.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zdp_bench.data.bad_records import BadRecords, refuse_damage, skip_unreadable
from zdp_bench.data.files import require_inside
from zdp_bench.data.formats import nifti
from zdp_bench.errors import UserError

Pair = tuple[Path, Path]  # image and segmentation


@dataclass(frozen=True)
class Case:
    """One volume with its segmentation, and what its header announces."""

    name: str
    image: Path
    label: Path
    header: nifti.Header

    @classmethod
    def announce(cls, thickness: int) -> Case:
        """A case without files, of so many slices."""
        return cls("", Path(), Path(), nifti.Header((1, 1, thickness), (1.0, 1.0, 1.0)))

    def slices(self, most: int | None) -> np.ndarray:
        """Indices of the used slices: all, or `most` spread evenly from the first to the last."""
        count = self.header.shape[2]
        if most is None or most >= count:
            return np.arange(count)
        return np.unique(np.round(np.linspace(0, count - 1, most)).astype(int))


def find_cases(folder: Path, channel: int = 0, bad_records: BadRecords | None = None) -> list[Case]:
    """List every labelled volume by name: from dataset.json, or else by the names of the files.

    Args:
        channel: that each volume must have.
        bad_records: if they are skipped, every voxel is read, and damaged volumes are left out.

    Raises:
        UserError: folder or files are missing, dataset.json is damaged, or image and segmentation
            do not belong together.
    """
    pairs = list_pairs(folder)
    pairs = skip_unreadable(bad_records, pairs, read_pair, lambda pair: pair[0])
    found = []
    for image, label in pairs:
        with refuse_damage(image):
            case = open_pair(image, label)
        channels = (*case.header.shape, 1)[3]
        if channel >= channels:
            has = (
                f"{channels} channels, counted from 0"
                if channels > 1
                else "one channel, which is 0"
            )
            raise UserError(f"dataset.channel={channel}: {image} has {has}.")
        found.append(case)
    if len(found) < 3:
        raise UserError(
            f"{folder}: holds {len(found)} labelled volumes; at least 3 are needed to train, "
            "validate and test."
        )
    if twice := [name for name, count in Counter(case.name for case in found).items() if count > 1]:
        raise UserError(f"{folder}: volume '{twice[0]}' stands there twice.")
    return found


def list_pairs(folder: Path) -> list[Pair]:
    """Return (image, segmentation) of every labelled volume, by name; none is opened.

    Raises:
        UserError: the folder is missing, or a file leads out of it or stands alone.
    """
    if not folder.is_dir():
        raise UserError(
            f"dataset 'msd' expects {folder} with imagesTr/ and labelsTr/. Unpack the task's "
            "archive there (see datasets/msd.yaml), or use dataset=msd_synthetic."
        )
    pairs = _pair_by_json(folder) if (folder / "dataset.json").is_file() else _pair_by_name(folder)
    for path in (path for pair in pairs for path in pair):
        require_inside(path, folder)
    return sorted(pairs)


def open_pair(image: Path, label: Path) -> Case:
    """Read both headers.

    Raises:
        UserError: a file is missing or damaged, or they do not belong together.
    """
    header, mask = nifti.read_header(image), nifti.read_header(label)
    if header.shape[:3] != mask.shape[:3]:
        raise UserError(
            f"{label}: has {list(mask.shape[:3])} voxels, but its image has "
            f"{list(header.shape[:3])}."
        )
    if not np.allclose(header.spacing, mask.spacing, rtol=1e-2):
        raise UserError(
            f"{label}: its voxels measure {mask.spacing} mm, but its image's {header.spacing} mm."
        )
    return Case(nifti.name_of(image), image, label, header)


def read_pair(pair: Pair) -> None:
    """Read both files whole.

    Raises:
        UserError: see `open_pair`, or voxels cannot be read.
    """
    open_pair(*pair)
    nifti.read(pair[0])
    nifti.read_labels(pair[1])


def _pair_by_json(folder: Path) -> list[tuple[Path, Path]]:
    path = folder / "dataset.json"
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["training"]
        return [(folder / str(entry["image"]), folder / str(entry["label"])) for entry in listed]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(
            f"{path}: does not list its training volumes ({type(error).__name__}); unpack the "
            "archive again, or delete the file to pair volumes by name."
        ) from None


def _pair_by_name(folder: Path) -> list[tuple[Path, Path]]:
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
