"""fastMRI's single-coil HDF5 files (Zbontar et al. 2018), read slice by slice as they are drawn: a set need not fit memory.

Each file is one volume:
    kspace                complex64 [slices, rows, columns]
    reconstruction_esc    float32 [slices, height, width]: the fully sampled magnitude, what is to be reconstructed
    ismrmrd_header        XML
    attributes            acquisition, max, norm, patient_id

`singlecoil_train/` and `singlecoil_val/` are the release's own split. A training slice gets a new random mask each time it is
drawn; a test slice always the one that fastMRI seeds by its file's name.

The sampling unit, and so what ε protects, is a key. `slice`, as the paper has it: each slice is a record, and a patient owns
`examples_per_patient` of them. `volume`: a record is the middle `slices` slices of a volume, its loss their mean.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from zdp_bench.data import DatasetInfo, Provenance, Splits
from zdp_bench.data.files import holds_any
from zdp_bench.data.formats.kspace import (
    Undersampling,
    centre_crop,
    fixed_mask,
    random_mask,
    undersampled,
)
from zdp_bench.errors import UserError, require
from zdp_bench.registry import register

Unit = Literal["slice", "volume"]
FOLDERS = ("singlecoil_train", "singlecoil_val")
VOLUMES = (973, 199)  # of the knee release, to train and to test on
RELEASED = (34_742, 7_135)  # and their slices: Zbontar et al. 2018, Table 3
LARGEST = 4096  # slices, rows or columns; the release has up to 50, 768 and 416


@dataclass(frozen=True)
class Volume:
    """One file, known but not read.

    Attributes:
        shape: slices, rows, columns of k-space.
        image: height, width of the reconstruction.
    """

    path: Path
    shape: tuple[int, int, int]
    image: tuple[int, int]
    patient: str
    stamp: str  # what of the file enters the data set's digest


def inspect(path: Path, root: Path) -> Volume:
    """Check one file without reading its arrays.

    Raises:
        UserError: it is no file of the format described above; says what is wrong.
    """
    import h5py

    if not path.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{path}: is a link that leads out of {root}; put the file itself there.")
    if not path.is_file():
        raise UserError(f"{path}: is not a file; an HDF5 file was expected.")
    try:
        with h5py.File(path, "r") as file:
            for name in ("kspace", "reconstruction_esc", "ismrmrd_header"):
                if not isinstance(file.get(name), h5py.Dataset):
                    raise UserError(
                        f"{path}: has no data set '{name}'; fastMRI's single-coil files of train and val have it."
                    )
            kspace, image, header = (
                file["kspace"],
                file["reconstruction_esc"],
                file["ismrmrd_header"],
            )
            if kspace.dtype.kind != "c":
                raise UserError(
                    f"{path}: its kspace is {kspace.dtype} where complex numbers were expected."
                )
            if image.dtype.kind != "f":
                raise UserError(
                    f"{path}: its reconstruction_esc is {image.dtype} where real numbers were expected."
                )
            if kspace.ndim != 3 or image.ndim != 3 or len(kspace) != len(image):
                raise UserError(
                    f"{path}: its kspace {kspace.shape} and reconstruction_esc {image.shape} are not [slices, rows, columns] of "
                    "the same slices; multi-coil files are not read."
                )
            if 0 in (*kspace.shape, *image.shape):
                raise UserError(
                    f"{path}: its kspace {kspace.shape} or reconstruction_esc {image.shape} is empty."
                )
            if max(*kspace.shape, *image.shape) > LARGEST:
                raise UserError(
                    f"{path}: announces kspace {kspace.shape} and reconstruction_esc {image.shape}; no side may exceed "
                    f"{LARGEST:,}."
                )
            if image.shape[1] > kspace.shape[1] or image.shape[2] > kspace.shape[2]:
                raise UserError(
                    f"{path}: its reconstruction {image.shape[1:]} is larger than its k-space {kspace.shape[1:]}."
                )
            if header.shape != () or header.dtype.kind not in "SO":
                raise UserError(f"{path}: its ismrmrd_header is no single piece of text.")
            patient = str(file.attrs.get("patient_id", path.stem))
            said = {name: str(file.attrs.get(name)) for name in ("acquisition", "max", "norm")}
            stamp = f"{path.parent.name}/{path.name}:{path.stat().st_size}:{kspace.shape}:{image.shape}:{patient}:{said}"
            return Volume(path, kspace.shape, image.shape[1:], patient, stamp)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: is no whole HDF5 file; it is cut off, damaged or something else ({_why(error)})."
        ) from None


def _why(error: Exception) -> str:
    """HDF5's own words, without its addresses."""
    inside = re.search(r"\((.*)\)", str(error).replace("\n", " "))
    return re.sub(
        r",? ?(base_addr|stored_eof|eof|sblock->)[^,)]*",
        "",
        inside[1] if inside else type(error).__name__,
    )


def paths_of(root: Path, folder: str) -> list[Path]:
    """Every file of one folder, by name.

    Raises:
        UserError: the folder is missing or empty, or holds something else.
    """
    here = root / folder
    if not here.is_dir():
        raise UserError(
            f"{here} is missing. fastMRI is free but not to be passed on: sign up for it (see datasets/fastmri.yaml) and unpack "
            f"{', '.join(FOLDERS)} under {root}, or use dataset=kspace_from_volumes or dataset=kspace_phantom."
        )
    others = sorted(
        path.name
        for path in here.iterdir()
        if path.suffix != ".h5" and not path.name.startswith(".")
    )
    if others:
        raise UserError(
            f"{here / others[0]}: is no .h5 file; only fastMRI's HDF5 files belong here."
        )
    paths = sorted(path for path in here.glob("*.h5") if not path.name.startswith("."))
    if not paths:
        raise UserError(f"{here}: holds no .h5 file.")
    return paths


def volumes(root: Path, folder: str) -> list[Volume]:
    """Every volume of one folder, by name.

    Raises:
        UserError: see `paths_of`, or a file is not what it should be.
    """
    return [inspect(path, root) for path in paths_of(root, folder)]


@register("check", "fastmri")
def check(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file of both folders, and what is wrong with its layout; its arrays are not read."""
    for folder in FOLDERS:
        for path in paths_of(root / "fastMRI", folder):
            try:
                inspect(path, root / "fastMRI")
                yield path, ""
            except UserError as error:
                yield path, str(error)


@dataclass(frozen=True)
class KSpaceRecords:
    """Records that lie on disk; each is read when it is drawn, and its file is closed again.

    Attributes:
        starts: the volume and first slice of each record [n, 2].
        slices: how many slices a record has; None where it is a single slice, without an axis for them.
        is_stochastic: whether a record's mask is drawn anew each time (training) or fixed by its file's name.
        groups: what belongs together [n]: a volume's records, to be measured; in training a patient's, who may have several.
    """

    volumes: tuple[Volume, ...]
    starts: Tensor
    how: Undersampling
    slices: int | None
    is_stochastic: bool
    groups: Tensor

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Tensor, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The records at `indices` [B].

        Args:
            uniforms: uniform numbers [B, any] that a record's mask is drawn from, where masks are random.

        Returns:
            inputs complex64 [B, 1, H, W], zero-filled and in units of the slice's own standard deviation; targets float32
            [B, 2, H, W], the reference and the zero-filled magnitude in the scanner's units. With `slices`, [B, slices, ...].

        Raises:
            UserError: a file has gone, is damaged, or holds what is no number.
        """
        count = self.slices or 1
        inputs = torch.zeros(
            len(indices), count, 1, self.how.height, self.how.width, dtype=torch.complex64
        )
        targets = torch.zeros(len(indices), count, 2, self.how.height, self.how.width)
        for row, (which, first) in enumerate(self.starts[indices].tolist()):
            volume = self.volumes[which]
            columns = volume.shape[2]
            kspace, reference = read(volume, first, count)
            if self.is_stochastic and uniforms is not None:
                seed = (uniforms[row].numpy() * 2**32).astype(np.uint32)
                mask = random_mask(columns, self.how, np.random.default_rng(seed))
            else:
                mask = fixed_mask(columns, self.how, volume.path.name)
            for number in range(count):
                image, zero_filled = undersampled(kspace[number], mask, self.how)
                inputs[row, number, 0] = torch.from_numpy(image)
                targets[row, number, 0] = torch.from_numpy(
                    centre_crop(reference[number], self.how.height, self.how.width).copy()
                )
                targets[row, number, 1] = torch.from_numpy(zero_filled)
        return (inputs, targets) if self.slices else (inputs[:, 0], targets[:, 0])


def read(volume: Volume, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` slices of k-space, complex64 [count, rows, columns], and of the reconstruction, float32 [count, height, width].

    Raises:
        UserError: they cannot be read, or hold what is no number.
    """
    import h5py

    try:
        with h5py.File(volume.path, "r") as file:
            kspace = np.asarray(file["kspace"][first : first + count], dtype=np.complex64)
            reference = np.asarray(
                file["reconstruction_esc"][first : first + count], dtype=np.float32
            )
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise UserError(f"{volume.path}: slice {first} cannot be read ({_why(error)}).") from None
    if not (np.isfinite(kspace).all() and np.isfinite(reference).all()):
        raise UserError(f"{volume.path}: slice {first} holds samples that are no numbers.")
    return kspace, reference


Sides = tuple[list[Volume], list[Volume]]


def scan(root: Path) -> Sides:
    """The volumes to train on and to test on, each file checked but not read.

    Raises:
        UserError: a folder or file is not what it should be, or a volume stands on both sides.
    """
    train, test = (volumes(root, folder) for folder in FOLDERS)
    if twice := {volume.path.name for volume in train} & {volume.path.name for volume in test}:
        raise UserError(
            f"{root}: {sorted(twice)[0]} stands in both {FOLDERS[0]} and {FOLDERS[1]}; a test volume must be unseen."
        )
    return train, test


def as_splits(
    sides: Sides,
    provenance: Provenance,
    notes: str,
    *,
    how: Undersampling,
    unit: Unit,
    slices: int | None,
) -> Splits:
    """Train and test records of the volumes that are large enough; the notes count those that are not.

    Raises:
        UserError: an option means nothing, or a side has no volume that is large enough.
    """
    require(
        slices is None or slices > 0,
        "dataset.slices",
        slices,
        "must be at least 1, or null for all",
    )
    together = slices if unit == "volume" else None
    require(
        unit == "slice" or together is not None,
        "dataset.slices",
        slices,
        "unit=volume needs a number, one for all records",
    )
    train, test = (
        [volume for volume in side if _fits(volume, how, together or 1)] for side in sides
    )
    left_out = sum(map(len, sides)) - len(train) - len(test)
    asked = f"{how.height} by {how.width}" + (f" with {together} slices" if together else "")
    if not train or not test:
        raise UserError(
            f"dataset.height={how.height}: no volume to train on, or none to test on, is as large as {asked}. "
            "Set dataset.height, dataset.width or dataset.slices to less."
        )
    both = len({volume.patient for volume in train} & {volume.patient for volume in test})
    records = [_records(side, how, unit, slices, side is train) for side in (train, test)]
    of_patient = Counter(records[0].groups.tolist())
    which_slices = "all slices" if slices is None else f"the middle {slices} slices"
    said = [
        notes,
        f"{len(train):,} volumes to train on and {len(test):,} to test on, {which_slices} of each at {how.height} x {how.width}, "
        f"{how.acceleration:g} times undersampled; a record is a {unit}",
        f"{left_out} volumes smaller than {asked} left out" if left_out else "",
        f"{both} patients have volumes on both sides" if both else "",
    ]
    stamps = [[volume.stamp for volume in side] for side in (train, test)]
    return Splits(
        records[0],
        records[1],
        input_shape=(*([together] if together else []), 1, how.height, how.width),
        outputs=1,
        provenance=provenance,
        digest=hashlib.sha256(repr((stamps, how, unit, slices)).encode()).hexdigest(),
        notes="; ".join(part for part in said if part),
        examples_per_patient=max(of_patient.values()),
    )


def outlined(splits: Splits, found: bool = True) -> DatasetInfo:
    """What volumes that are known, but not read, are as records."""
    *slices, _channel, height, width = splits.input_shape
    sizes = (
        tuple(splits.input_shape),
        1,
        torch.complex64,
        (*slices, 2, height, width),
        torch.float32,
    )
    return DatasetInfo(
        len(splits.train), len(splits.test), *sizes, splits.examples_per_patient, found
    )


def announced(name: str, shape: tuple[int, int, int]) -> Volume:
    """A volume that is no file yet: its k-space will have the size of its image."""
    return Volume(Path(name), shape, shape[1:], name, name)


def _fits(volume: Volume, how: Undersampling, slices: int) -> bool:
    return (
        volume.shape[0] >= slices and volume.image[0] >= how.height and volume.image[1] >= how.width
    )


def _records(
    found: list[Volume], how: Undersampling, unit: Unit, slices: int | None, is_stochastic: bool
) -> KSpaceRecords:
    """The middle `slices` slices (None: all) of some volumes, a record each or one record a volume."""
    starts = []
    for which, volume in enumerate(found):
        used = min(slices or LARGEST, volume.shape[0])
        first = (volume.shape[0] - used) // 2
        starts += [(which, first + number) for number in range(used if unit == "slice" else 1)]
    patients = {
        patient: number
        for number, patient in enumerate(dict.fromkeys(volume.patient for volume in found))
    }
    groups = torch.tensor(
        [patients[found[which].patient] if is_stochastic else which for which, _ in starts]
    )
    return KSpaceRecords(
        tuple(found),
        torch.tensor(starts),
        how,
        slices if unit == "volume" else None,
        is_stochastic,
        groups,
    )


@register("dataset", "fastmri")
def fastmri(
    root: Path,
    *,
    acceleration: float = 4.0,
    center_fraction: float = 0.08,
    height: int = 320,
    width: int = 320,
    slices: int | None = None,
    unit: Unit = "slice",
) -> Splits:
    """Single-coil fastMRI under `fastMRI/`: complex64 [1, 320, 320]. No checksum of single files is published: 'official' if all
    the release's slices are there."""
    how = Undersampling(acceleration, center_fraction, height, width)
    sides = scan(root / "fastMRI")
    whole = tuple(sum(volume.shape[0] for volume in side) for side in sides) == RELEASED
    return as_splits(
        sides,
        "official" if whole else "derived",
        "" if whole else "an excerpt of the release",
        how=how,
        unit=unit,
        slices=slices,
    )


@register("outline", "fastmri")
def outline(
    root: Path,
    *,
    acceleration: float,
    center_fraction: float,
    height: int,
    width: int,
    slices: int | None,
    unit: Unit,
) -> DatasetInfo:
    """From the files' headers. Without files, the release: 973 and 199 volumes, 34,742 and 7,135 slices, at most 50 of one."""
    how = Undersampling(acceleration, center_fraction, height, width)
    found = holds_any(root / "fastMRI" / FOLDERS[0])
    if found:
        sides = scan(root / "fastMRI")
    else:
        sizes = [(count, (slices or 36, height, width)) for count in VOLUMES]
        train, test = (
            [announced(f"{side}{n}", size) for n in range(count)]
            for side, (count, size) in enumerate(sizes)
        )
        sides = train, test
    said = outlined(as_splits(sides, "official", "", how=how, unit=unit, slices=slices), found)
    if found or unit == "volume" or slices:
        return said
    return replace(said, train=RELEASED[0], test=RELEASED[1], examples_per_patient=50)


# ---------------------------------------------------------------------------------------------------------- writing

HEADER = """<?xml version="1.0"?>
<ismrmrdHeader xmlns="http://www.ismrm.org/ISMRMRD"><encoding>
<encodedSpace><matrixSize><x>{rows}</x><y>{columns}</y><z>1</z></matrixSize></encodedSpace>
<reconSpace><matrixSize><x>{height}</x><y>{width}</y><z>1</z></matrixSize></reconSpace>
</encoding></ismrmrdHeader>
"""


def write(
    path: Path, kspace: np.ndarray, reconstruction: np.ndarray, patient: str, acquisition: str
) -> None:
    """One volume in fastMRI's layout, for sets that are made here."""
    import h5py

    (_, rows, columns), (_, height, width) = kspace.shape, reconstruction.shape
    with h5py.File(path, "w") as file:
        file["kspace"] = kspace.astype(np.complex64)
        file["reconstruction_esc"] = reconstruction.astype(np.float32)
        file["ismrmrd_header"] = HEADER.format(
            rows=rows, columns=columns, height=height, width=width
        )
        said = {"acquisition": acquisition, "patient_id": patient}
        file.attrs.update(
            said
            | {"max": float(reconstruction.max()), "norm": float(np.linalg.norm(reconstruction))}
        )
