"""fastMRI's k-space (Zbontar et al. 2018), read slice by slice as examples are drawn.

    singlecoil_train|singlecoil_val/*.h5, each one volume:
        kspace                complex64 [slices, rows, columns]
        reconstruction_esc    float32 [slices, height, width]: the fully sampled magnitude
        attributes            patient_id; without one, a file counts as a patient's only one
    multicoil_train|multicoil_val/*.h5, where there is no single coil (the brain release):
        kspace                complex64 [slices, coils, rows, columns]
        reconstruction_rss    float32 [slices, height, width]: root of the coils' sum of squares

Several coils are combined by that root, of which no phase is left.

So a set need not fit memory. The folders are the release's own split. A training slice gets a new
random mask each time it is drawn; a test slice always the one that fastMRI seeds by its file's
name.

Each slice is an example, as in the paper, and a patient owns `examples_per_patient` of them;
`privacy.unit=patient` protects who owns them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Interval
from torch import Tensor

from zdp_bench.data import Dataset, DatasetInfo, MaxCount, Provenance, Splits
from zdp_bench.data.files import absent, digest, holds_any, list_files, require_inside, sha256
from zdp_bench.data.hdf5 import open_array, read_attribute
from zdp_bench.data.kspace import (
    SSIM_WINDOW,
    Undersampling,
    centre_crop,
    draw_mask,
    fixed_mask,
    undersample,
)
from zdp_bench.errors import UserError, require
from zdp_bench.foreign_files import expect, reading, require_size
from zdp_bench.registry import register

VOLUMES = (973, 199)  # of the knee release, to train and to test on
RELEASED = (34_742, 7_135)  # and their slices: Zbontar et al. 2018, Table 3
FOLDERS, MULTICOIL = ("singlecoil_train", "singlecoil_val"), ("multicoil_train", "multicoil_val")
LARGEST = 4096  # slices, rows or columns; the release has up to 50, 768 and 416
COMBINED = "coils combined by the root of their sum of squares, without a phase"


@dataclass(frozen=True)
class KSpaceVolume:
    """One file, known but not read.

    Attributes:
        shape: slices, rows, columns of k-space.
        image: height, width of the reconstruction.
    """

    path: Path
    shape: tuple[int, int, int]
    image: tuple[int, int]
    patient: str
    coils: int | None = None  # None: a single one, without an axis for them


Sides = tuple[list[KSpaceVolume], list[KSpaceVolume]]  # to train on, to test on


def find_volumes(root: Path) -> Sides:
    """Find and inspect the volumes to train on and to test on."""
    train_folder, test_folder = folders_of(root)
    train = [inspect(path, root) for path in list_volumes(root, train_folder)]
    test = [inspect(path, root) for path in list_volumes(root, test_folder)]
    train_names = {volume.path.name for volume in train}
    for volume in test:
        if volume.path.name in train_names:
            raise UserError(
                f"{root}: {volume.path.name} stands in both {train_folder} and {test_folder}; a "
                "test volume must be unseen."
            )
    _require_ids(train + test)
    return train, test


def _require_ids(volumes: list[KSpaceVolume]) -> None:
    """Reject a patient who is called as a file without a patient_id, which is its own patient."""
    unnamed = {volume.patient for volume in volumes if volume.patient == volume.path.name}
    for volume in volumes:
        if volume.patient in unnamed and volume.patient != volume.path.name:
            raise UserError(
                f"{volume.path}: is of patient {volume.patient!r}, which is the name of a file "
                "without a patient_id; write the patient_id of that file."
            )


def folders_of(root: Path) -> tuple[str, str]:
    """Return the single-coil folders, or the multi-coil ones if there are no others."""
    has_single = (root / FOLDERS[0]).is_dir()
    has_several = (root / MULTICOIL[0]).is_dir()
    return MULTICOIL if has_several and not has_single else FOLDERS


def list_volumes(root: Path, side: str) -> list[Path]:
    """List the files of one side, by name."""
    folder = root / side
    if not folder.is_dir():
        raise absent(folder, "fastmri")
    paths = list_files(
        folder,
        root,
        lambda path: path.suffix == ".h5",
        "is not an .h5 file; only fastMRI's HDF5 files belong here",
    )
    if not paths:
        raise UserError(f"{folder}: contains no .h5 file.")
    return paths


def inspect(path: Path, root: Path) -> KSpaceVolume:
    """Check that one file has the format described above, without reading its arrays."""
    import h5py

    require_inside(path, root)
    with reading(path), h5py.File(path, "r") as file:
        kspace = open_array(file, "kspace")
        target = "reconstruction_rss" if kspace.ndim == 4 else "reconstruction_esc"
        image = open_array(file, target)
        content = (
            f"has kspace {kspace.shape} of {kspace.dtype} and {target} {image.shape} of "
            f"{image.dtype}"
        )
        are_numbers = kspace.dtype.kind == "c" and image.dtype.kind == "f"
        expect(are_numbers, f"{content}, which should be complex and real numbers")
        expect(
            kspace.ndim in (3, 4) and image.ndim == 3 and len(kspace) == len(image),
            f"{content}; (slices, perhaps coils, rows, columns) and as many were expected",
        )
        sides = (*kspace.shape, *image.shape)
        rule = f"{content}; sides lie in 1 to {LARGEST:,}"
        expect(min(sides) > 0 and max(sides) <= LARGEST, rule)
        slices, *coils, rows, columns = kspace.shape
        require_size(*coils, rows, columns)
        height, width = image.shape[1:]
        rule = f"{content}; the image is larger than its k-space"
        expect(height <= rows and width <= columns, rule)
        patient = read_attribute(file, "patient_id") or path.name
        return KSpaceVolume(path, (slices, rows, columns), (height, width), patient, *coils)


def read_slice(volume: KSpaceVolume, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Read a slice of a volume; what is not finite passes.

    An error over a slice's values would tell at which step it was drawn, which no ε covers.

    Returns:
        k-space, complex64 [rows, columns], or [coils, rows, columns]; reconstruction, float32
        [height, width].
    """
    import h5py

    target = "reconstruction_rss" if volume.coils else "reconstruction_esc"
    with reading(volume.path), h5py.File(volume.path, "r") as file:
        kspace = np.asarray(file["kspace"][number], dtype=np.complex64)
        reference = np.asarray(file[target][number], dtype=np.float32)
    return kspace, reference


HEADER = """<?xml version="1.0"?>
<ismrmrdHeader xmlns="http://www.ismrm.org/ISMRMRD"><encoding>
<encodedSpace><matrixSize><x>{rows}</x><y>{columns}</y><z>1</z></matrixSize></encodedSpace>
<reconSpace><matrixSize><x>{height}</x><y>{width}</y><z>1</z></matrixSize></reconSpace>
</encoding></ismrmrdHeader>
"""


def write_volume(
    path: Path,
    kspace: np.ndarray,
    reconstruction: np.ndarray,
    patient: str,
    acquisition: str,
) -> None:
    """Write one volume in fastMRI's format, for sets that are made here.

    Args:
        kspace: complex [slices, rows, columns].
        reconstruction: real [slices, height, width].
    """
    import h5py

    _, rows, columns = kspace.shape
    _, height, width = reconstruction.shape
    with h5py.File(path, "w") as file:
        file["kspace"] = kspace.astype(np.complex64)
        file["reconstruction_esc"] = reconstruction.astype(np.float32)
        file["ismrmrd_header"] = HEADER.format(
            rows=rows, columns=columns, height=height, width=width
        )
        file.attrs["acquisition"] = acquisition
        file.attrs["patient_id"] = patient
        file.attrs["max"] = float(reconstruction.max())
        file.attrs["norm"] = float(np.linalg.norm(reconstruction))


@dataclass(frozen=True)
class KSpaceExamples:
    """Examples on disk; each is read when it is drawn, and its file is closed again.

    Attributes:
        starts: the volume and first slice of each example [n, 2].
        is_stochastic: True if masks are drawn anew each time (training), False if they are fixed by
            the files' names.
        groups: the volume of each example [n], for metrics; in training its patient, who may have
            several volumes.
    """

    volumes: tuple[KSpaceVolume, ...]
    starts: Tensor
    how: Undersampling
    is_stochastic: bool
    groups: Tensor

    def __len__(self) -> int:
        return len(self.starts)

    def batch(
        self,
        indices: Tensor,
        uniforms: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read the examples at `indices` [B].

        Args:
            uniforms: [B, any] numbers that random masks are drawn from.

        Returns:
            inputs complex64 [B, 1, H, W], zero-filled and in units of the slice's own standard
            deviation; targets float32 [B, 2, H, W], the reference and the zero-filled magnitude in
            the scanner's units.
        """
        with np.errstate(all="ignore"):  # numpy's warnings would tell of values too
            return self._read(indices, uniforms)

    def _read(
        self,
        indices: Tensor,
        uniforms: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        size = self.how.height, self.how.width
        inputs = torch.zeros(len(indices), 1, *size, dtype=torch.complex64)
        targets = torch.zeros(len(indices), 2, *size)
        for row, (number, slice_number) in enumerate(self.starts[indices].tolist()):
            volume = self.volumes[number]
            columns = volume.shape[2]
            if self.is_stochastic and uniforms is not None:
                seed = (uniforms[row].numpy() * 2**32).astype(np.uint32)
                mask = draw_mask(columns, self.how, np.random.default_rng(seed))
            else:
                mask = fixed_mask(columns, self.how, volume.path.name)
            kspace, reference = read_slice(volume, slice_number)
            image, zero_filled = undersample(kspace, mask, self.how)
            inputs[row, 0] = torch.from_numpy(image)
            targets[row, 0] = torch.from_numpy(centre_crop(reference, *size).copy())
            targets[row, 1] = torch.from_numpy(zero_filled)
        return inputs, targets


Side = Annotated[int, Ge(SSIM_WINDOW)]  # of an image


@dataclass(frozen=True, kw_only=True)
class KSpaceSlices(Dataset):
    """Undersampled slices complex64 [1, height, width] of volumes in fastMRI's layout."""

    owner: ClassVar[str] = "patient"

    acceleration: Annotated[float, Interval(ge=1, lt=math.inf)] = 4.0
    center_fraction: float = 0.08
    height: Side = 32
    width: Side = 40
    slices: MaxCount = None
    unit: Literal["slice"] = "slice"  # what an example is

    def __post_init__(self) -> None:
        self.how()

    def how(self) -> Undersampling:
        return Undersampling(self.acceleration, self.center_fraction, self.height, self.width)

    def read_splits(
        self,
        sides: Sides,
        provenance: Provenance,
        notes: str,
    ) -> Splits:
        """Take the volumes that are large enough; the notes count those that are not.

        Raises:
            UserError: no volume is left on one side, or, of files that are not official, a patient
                is on both.
        """
        crossing = self._find_crossing(sides, provenance)
        train, test = ([volume for volume in side if self._fits(volume)] for side in sides)
        size = f"{self.height} by {self.width}"
        rule = f"no volume to train on, or none to test on, is as large as {size}"
        require(bool(train and test), "dataset.height", self.height, rule)
        files = [[(volume.path.name, sha256(volume.path)) for volume in side] for side in sides]
        examples = self._examples(train, is_training=True)
        settings = (repr(files), self.how(), self.unit, self.slices)
        all_notes = [notes, self._note_volumes(train, test)]
        if train[0].coils:
            all_notes.append(COMBINED)
        left_out = sum(map(len, sides)) - len(train) - len(test)
        if left_out:
            all_notes.append(f"{left_out} volumes smaller than {size} left out")
        if crossing:
            all_notes.append(f"{len(crossing)} patients have volumes on both sides")
        return Splits(
            examples,
            self._examples(test, is_training=False, first_group=len(examples)),
            input_shape=(1, self.height, self.width),
            outputs=1,
            provenance=provenance,
            digest=digest(repr(settings)),
            notes="; ".join(note for note in all_notes if note),
            unit=self.owner,
            owner_names=[] if self.owner == "image" else _owner_names(train + test),
        )

    @staticmethod
    def _find_crossing(sides: Sides, provenance: Provenance) -> set[str]:
        """Return the patients of both sides, which only official files may have."""
        train, test = sides
        crossing = {volume.patient for volume in train} & {volume.patient for volume in test}
        if crossing and provenance != "official":
            raise UserError(
                f"{train[0].path.parent.parent}: patient {min(crossing)} has volumes in "
                f"{' and in '.join(FOLDERS)}; a test patient must be unseen. Move them to one side."
            )
        return crossing

    def _note_volumes(
        self,
        train: list[KSpaceVolume],
        test: list[KSpaceVolume],
    ) -> str:
        slices = "all slices" if self.slices is None else f"the middle {self.slices} slices"
        return (
            f"{len(train):,} volumes to train on and {len(test):,} to test on, {slices} of each at "
            f"{self.height} x {self.width}, {self.acceleration:g} times undersampled; a example is "
            f"a {self.unit}"
        )

    def describe(self, train: int, test: int) -> DatasetInfo:
        """Return counts and shapes of so many volumes of the size that is asked for."""
        each = self.slices or 36
        return DatasetInfo(
            train=train * each,
            test=test * each,
            input_shape=(1, self.height, self.width),
            outputs=1,
            dtype=torch.complex64,
            target_shape=(2, self.height, self.width),
            target_dtype=torch.float32,
            examples_per_patient=each,
            unit=self.owner,
            owners=train,
        )

    def _fits(self, volume: KSpaceVolume) -> bool:
        height, width = volume.image
        return height >= self.height and width >= self.width

    def _examples(
        self,
        volumes: list[KSpaceVolume],
        is_training: bool,
        first_group: int = 0,
    ) -> KSpaceExamples:
        """Take the middle slices of some volumes, an example each.

        Args:
            is_training: examples are grouped by owner, and their masks are drawn; else by volume,
                and their masks are fixed.
            first_group: the number of the first volume's group, in other parts than training.
        """
        starts = []
        for number, volume in enumerate(volumes):
            used = min(self.slices or LARGEST, volume.shape[0])
            first = (volume.shape[0] - used) // 2
            starts += [(number, first + offset) for offset in range(used)]
        numbers = [number for number, _ in starts]
        if not is_training:
            groups = [first_group + number for number in numbers]
        elif self.owner == "image":  # each is its own, and a file holds many
            groups = list(range(len(starts)))
        else:
            owners = {name: number for number, name in enumerate(_owner_names(volumes))}
            groups = [owners[volumes[number].patient] for number in numbers]
        return KSpaceExamples(
            tuple(volumes),
            torch.tensor(starts),
            self.how(),
            is_stochastic=is_training,
            groups=torch.tensor(groups),
        )


def _owner_names(volumes: list[KSpaceVolume]) -> list[str]:
    """Return the patients of some volumes, each once, by their number in `groups`."""
    return list(dict.fromkeys(volume.patient for volume in volumes))


@register("dataset", "fastmri")
@dataclass(frozen=True, kw_only=True)
class FastMri(KSpaceSlices):
    """fastMRI under `fastMRI/`, of a single coil or of several."""

    height: Side = 320
    width: Side = 320

    def load(self, root: Path) -> Splits:
        """Files have no published checksums: with all the release's slices they are 'official'."""
        sides = find_volumes(root / "fastMRI")
        slices = tuple(sum(volume.shape[0] for volume in side) for side in sides)
        if slices == RELEASED:
            return self.read_splits(sides, "official", "")
        return self.read_splits(sides, "derived", "files in fastMRI's layout")

    def released(self, root: Path) -> DatasetInfo | None:
        """At most 50 slices of a volume."""
        if holds_any(root / "fastMRI" / folders_of(root / "fastMRI")[0]):
            return None
        known = self.describe(*VOLUMES)
        if self.slices:
            return known
        return replace(
            known,
            train=RELEASED[0],
            test=RELEASED[1],
            examples_per_patient=50,
        )
