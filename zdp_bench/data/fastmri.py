"""fastMRI's k-space (Zbontar et al. 2018), read slice by slice when a batch is drawn.

    singlecoil_train|singlecoil_val/*.h5, each one volume:
        kspace                complex64 [slices, rows, columns]
        reconstruction_esc    float32 [slices, height, width]: the fully sampled magnitude
        attributes            patient_id; without it, the file counts as a patient of its own
    multicoil_train|multicoil_val/*.h5, used if there are no single-coil files (the brain release):
        kspace                complex64 [slices, coils, rows, columns]
        reconstruction_rss    float32 [slices, height, width]: root of the coils' sum of squares

Several coils are combined by that root of the sum of squares, which loses the phase.

Slices are read when they are drawn, so the data set need not fit in memory. The folders are the
release's own split. A training slice gets a new random mask each time it is drawn. A test slice
always gets the same mask, which fastMRI seeds with the file's name.

Each slice is an example, as in the paper. A patient owns up to `examples_per_patient` of them;
`privacy.unit=patient` protects the patient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Interval
from torch import Tensor

from zdp_bench.data import Dataset, DatasetInfo, MaxCount, Provenance, Splits
from zdp_bench.data.files import absent, digest, holds_any, list_files, require_inside
from zdp_bench.data.hdf5 import open_array, open_file, read_attribute
from zdp_bench.data.kspace import (
    SSIM_WINDOW,
    Undersampling,
    centre_crop,
    draw_mask,
    fixed_mask,
    undersample,
)
from zdp_bench.data.owners import digest_files
from zdp_bench.errors import UserError, require
from zdp_bench.foreign_files import expect, reading, require_size
from zdp_bench.registry import register

# (training, test) part of the knee release: Zbontar et al. 2018, Table 3
RELEASED_VOLUMES = (973, 199)
RELEASED_SLICES = (34_742, 7_135)
AVERAGE_SLICES = 36  # per volume of the release, rounded up
MAX_RELEASED_SLICES = 50  # of one volume
FOLDERS = ("singlecoil_train", "singlecoil_val")
MULTICOIL = ("multicoil_train", "multicoil_val")
MAX_LENGTH = 4096  # of an axis; the release has up to 50 slices, 768 rows and 416 columns
COMBINED = "coils combined by the root of their sum of squares, without a phase"


@dataclass(frozen=True)
class KSpaceVolume:
    """What is known of a file without reading its arrays.

    Attributes:
        path: path of the file.
        shape: (slices, rows, columns) of k-space.
        image: (height, width) of the reconstruction.
        patient: name of the patient.
        coils: number of coils. None: a single coil, for which k-space has no axis.
    """

    path: Path
    shape: tuple[int, int, int]
    image: tuple[int, int]
    patient: str
    coils: int | None = None

    @property
    def field_of_view(self) -> tuple[int, int]:
        """The (height, width) in pixels that both k-space and the reconstruction show.

        Some FLAIR volumes of the brain release have fewer columns of k-space than the
        reconstruction. As in fastMRI's own code, both are then cropped to these columns.
        """
        _, _, columns = self.shape
        height, width = self.image
        return height, min(width, columns)


VolumesOfParts = tuple[list[KSpaceVolume], list[KSpaceVolume]]  # (training, test)


def find_volumes(root: Path) -> VolumesOfParts:
    """Find and inspect the training and test volumes under `root`."""
    train_folder, test_folder = folders_of(root)
    train = [inspect(path, root) for path in list_volumes(root, train_folder)]
    test = [inspect(path, root) for path in list_volumes(root, test_folder)]
    train_names = {volume.path.name for volume in train}
    for volume in test:
        if volume.path.name in train_names:
            raise UserError(
                f"{root}: {volume.path.name} is in both {train_folder} and {test_folder}; a "
                "test volume must be unseen."
            )
    _require_distinct_patients(train + test)
    return train, test


def _require_distinct_patients(volumes: list[KSpaceVolume]) -> None:
    """Reject a patient_id that equals the name of a file without a patient_id.

    Such a file is named after itself, so two patients would have one name.
    """
    files_without_id = {each.path.name for each in volumes if each.patient == each.path.name}
    for volume in volumes:
        if volume.patient in files_without_id and volume.patient != volume.path.name:
            raise UserError(
                f"{volume.path}: is of patient {volume.patient!r}, which is the name of a file "
                "without a patient_id; write the patient_id of that file."
            )


def folders_of(root: Path) -> tuple[str, str]:
    """Return the (training, test) folders: multi-coil only if there are no single-coil files."""
    has_single = holds_any(root / FOLDERS[0])
    has_several = holds_any(root / MULTICOIL[0])
    return MULTICOIL if has_several and not has_single else FOLDERS


def list_volumes(root: Path, folder_name: str) -> list[Path]:
    """List the files in one of the folders, sorted by name."""
    folder = root / folder_name
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
    """Check a file's format, without reading its arrays, and return what it contains."""
    require_inside(path, root)
    with reading(path), open_file(path) as file:
        kspace = open_array(file, "kspace")
        target = "reconstruction_rss" if kspace.ndim == 4 else "reconstruction_esc"
        image = open_array(file, target)
        content = (
            f"has kspace {kspace.shape} of {kspace.dtype} and {target} {image.shape} of "
            f"{image.dtype}"
        )
        are_numbers = kspace.dtype.kind == "c" and image.dtype.kind == "f"
        expect(are_numbers, f"{content}, but complex and real numbers were expected")
        expect(
            kspace.ndim in (3, 4) and image.ndim == 3 and len(kspace) == len(image),
            f"{content}, but (slices, optionally coils, rows, columns) and (slices, height, width) "
            "were expected",
        )
        lengths = (*kspace.shape, *image.shape)
        rule = f"{content}; axes must have 1 to {MAX_LENGTH:,} elements"
        expect(min(lengths) > 0 and max(lengths) <= MAX_LENGTH, rule)
        slices, *coils, rows, columns = kspace.shape
        require_size(*coils, rows, columns)
        height, width = image.shape[1:]
        expect(height <= rows, f"{content}; the image has more rows than its k-space")
        patient = read_attribute(file, "patient_id") or path.name
        shape = slices, rows, columns
        return KSpaceVolume(path, shape, (height, width), patient, coils[0] if coils else None)


def read_slice(volume: KSpaceVolume, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Read one slice of a volume, without checking that its values are finite.

    An error about a slice's values would reveal at which step it was drawn, which ε does not cover.

    Args:
        number: index of the slice.

    Returns:
        The k-space, complex64 [rows, columns] or [coils, rows, columns], and the reconstruction,
        float32 [height, width].
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
    """Write a volume in fastMRI's format, for generated and derived data sets.

    Args:
        kspace: complex [slices, rows, columns].
        reconstruction: real [slices, height, width].
        patient: the patient_id.
        acquisition: the name of the acquisition.
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
    """Examples on disk. Each is read when it is drawn, and its file is then closed.

    Attributes:
        volumes: the files.
        slices: (index of the volume, index of the slice) of each example, [n, 2].
        how: the undersampling and the crop.
        is_stochastic: True if a new mask is drawn each time (training), False if the file's name
            determines the mask.
        groups: in training, the patient of each example [n]; a patient may have several volumes. In
            test, its volume, for metrics.
    """

    volumes: tuple[KSpaceVolume, ...]
    slices: Tensor
    how: Undersampling
    is_stochastic: bool
    groups: Tensor

    def __len__(self) -> int:
        return len(self.slices)

    def batch(
        self,
        indices: Tensor,
        uniforms: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read the examples at `indices` [B].

        Args:
            indices: positions of the examples.
            uniforms: random numbers [B, N_UNIFORMS], whose rows seed the masks.

        Returns:
            Inputs complex64 [B, 1, H, W]: zero-filled images, divided by the standard deviation of
            their magnitude. Targets float32 [B, 2, H, W]: the reference and the zero-filled
            magnitude, both in the scanner's units.
        """
        with np.errstate(all="ignore"):  # numpy's warnings would also reveal values
            return self._read(indices, uniforms)

    def _read(
        self,
        indices: Tensor,
        uniforms: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        size = self.how.height, self.how.width
        inputs = torch.zeros(len(indices), 1, *size, dtype=torch.complex64)
        targets = torch.zeros(len(indices), 2, *size)
        for row, (volume_index, slice_index) in enumerate(self.slices[indices].tolist()):
            volume = self.volumes[volume_index]
            columns = volume.shape[2]
            if self.is_stochastic and uniforms is not None:
                seed = (uniforms[row].numpy() * 2**32).astype(np.uint32)
                mask = draw_mask(columns, self.how, np.random.default_rng(seed))
            else:
                mask = fixed_mask(columns, self.how, volume.path.name)
            kspace, reference = read_slice(volume, slice_index)
            image, zero_filled = undersample(kspace, mask, self.how, volume.field_of_view)
            reference = centre_crop(reference, *volume.field_of_view)
            inputs[row, 0] = torch.from_numpy(image)
            targets[row, 0] = torch.from_numpy(centre_crop(reference, *size).copy())
            targets[row, 1] = torch.from_numpy(zero_filled)
        return inputs, targets


Side = Annotated[int, Ge(SSIM_WINDOW)]  # length of a side of an image, in pixels


@dataclass(frozen=True, kw_only=True)
class KSpaceSlices(Dataset):
    """Undersampled slices, complex64 [1, height, width], of volumes in fastMRI's layout.

    Args:
        acceleration, center_fraction, height, width: see `Undersampling`.
        slices: use only this number of middle slices per volume. Default: all.
        unit: what an example is. Who owns examples is `owner`.
    """

    owner: ClassVar[str] = "patient"

    acceleration: Annotated[float, Interval(ge=1, lt=math.inf)] = 4.0
    center_fraction: float = 0.08
    height: Side = 32
    width: Side = 40
    slices: MaxCount = None
    unit: Literal["slice"] = "slice"

    def __post_init__(self) -> None:
        self.how()  # rejects combinations that `Undersampling` rejects

    def how(self) -> Undersampling:
        """Return the undersampling and the crop."""
        return Undersampling(self.acceleration, self.center_fraction, self.height, self.width)

    def read_splits(
        self,
        parts: VolumesOfParts,
        provenance: Provenance,
        notes: str,
    ) -> Splits:
        """Return the slices of the volumes that are large enough; notes count the others.

        Args:
            parts: the training and the test volumes.
            provenance: see `Splits`.
            notes: what the volumes are, which begins the notes of `Splits`.

        Raises:
            UserError: A part has no volume that is large enough, or a patient is in both parts of
                files that are not official.
        """
        crossing = self._find_crossing(parts, provenance)
        train, test = ([volume for volume in part if self._fits(volume)] for part in parts)
        size = f"{self.height} by {self.width}"
        rule = f"no volume to train on, or none to test on, is as large as {size}"
        require(bool(train and test), "dataset.height", self.height, rule)
        volumes = [volume for part in parts for volume in part]
        paths, patients = [each.path for each in volumes], [each.patient for each in volumes]
        digests = dict(zip(paths, digest_files(paths, patients), strict=True))
        files = [[(volume.path.name, digests[volume.path]) for volume in part] for part in parts]
        examples = self._examples(train, is_training=True)
        settings: tuple[Any, ...] = (repr(files), self.how(), self.unit, self.slices)
        # Earlier versions cropped only once. If that gave the same pixels, the digest is as it was.
        if any(self._is_moved_by_first_crop(volume) for volume in train + test):
            settings = (*settings, "cropped to the image first")
        all_notes = [notes, self._note_volumes(train, test)]
        if any(volume.coils for volume in train + test):
            all_notes.append(COMBINED)
        left_out = sum(map(len, parts)) - len(train) - len(test)
        if left_out:
            all_notes.append(f"{left_out} volumes smaller than {size} left out")
        if crossing:
            all_notes.append(f"{len(crossing)} patients have volumes on both sides")
        return Splits(
            examples,
            # Above all groups of training: an equal number would be the same owner.
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
    def _find_crossing(parts: VolumesOfParts, provenance: Provenance) -> set[str]:
        """Return the patients in both parts; reject them unless files are official."""
        train, test = parts
        crossing = {volume.patient for volume in train} & {volume.patient for volume in test}
        if crossing and provenance != "official":
            raise UserError(
                f"{train[0].path.parent.parent}: patient {min(crossing)} has volumes in "
                f"{train[0].path.parent.name} and in {test[0].path.parent.name}; a test patient "
                "must be unseen. Move them to one side."
            )
        return crossing

    def _note_volumes(
        self,
        train: list[KSpaceVolume],
        test: list[KSpaceVolume],
    ) -> str:
        which = "all slices" if self.slices is None else f"the middle {self.slices} slices"
        return (
            f"{len(train):,} volumes to train on and {len(test):,} to test on, {which} of each at "
            f"{self.height} x {self.width}, {self.acceleration:g} times undersampled; each example "
            f"is a {self.unit}"
        )

    def describe(self, train: int, test: int) -> DatasetInfo:
        """Return counts and shapes, given the number of volumes in each part."""
        slices_per_volume = self.slices or AVERAGE_SLICES
        return DatasetInfo(
            train=train * slices_per_volume,
            test=test * slices_per_volume,
            input_shape=(1, self.height, self.width),
            outputs=1,
            dtype=torch.complex64,
            target_shape=(2, self.height, self.width),
            target_dtype=torch.float32,
            examples_per_patient=slices_per_volume,
            unit=self.owner,
            owners=train,
            is_estimate=self.slices is None,
        )

    def _fits(self, volume: KSpaceVolume) -> bool:
        height, width = volume.field_of_view
        return height >= self.height and width >= self.width

    def _is_moved_by_first_crop(self, volume: KSpaceVolume) -> bool:
        """Return True if a crop after that to the field of view starts elsewhere than one alone."""
        crop = self.height, self.width
        view = volume.field_of_view
        for side, middle, inner in zip(volume.shape[1:], view, crop, strict=True):
            if (side - inner) // 2 != (side - middle) // 2 + (middle - inner) // 2:
                return True
        return False

    def _examples(
        self,
        volumes: list[KSpaceVolume],
        is_training: bool,
        first_group: int = 0,
    ) -> KSpaceExamples:
        """Return the middle slices of volumes, each as one example.

        Args:
            volumes: the volumes.
            is_training: True groups examples by owner and draws their masks at random. False groups
                them by volume and fixes their masks.
            first_group: group of the first volume, if not for training.
        """
        pairs = []  # see `KSpaceExamples.slices`
        for index, volume in enumerate(volumes):
            count = min(self.slices or MAX_LENGTH, volume.shape[0])
            first = (volume.shape[0] - count) // 2
            pairs += [(index, first + offset) for offset in range(count)]
        volume_indices = [index for index, _ in pairs]
        if not is_training:
            groups = [first_group + index for index in volume_indices]
        elif self.owner == "image":  # each slice is an owner's only image
            groups = list(range(len(pairs)))
        else:
            owners = {name: number for number, name in enumerate(_owner_names(volumes))}
            groups = [owners[volumes[index].patient] for index in volume_indices]
        return KSpaceExamples(
            tuple(volumes),
            torch.tensor(pairs),
            self.how(),
            is_stochastic=is_training,
            groups=torch.tensor(groups),
        )


def _owner_names(volumes: list[KSpaceVolume]) -> list[str]:
    """Return each patient once, training's first, in the order of their numbers in `groups`."""
    return list(dict.fromkeys(volume.patient for volume in volumes))


@register("dataset", "fastmri")
@dataclass(frozen=True, kw_only=True)
class FastMri(KSpaceSlices):
    """The fastMRI release under `fastMRI/` of the data root, single-coil or multi-coil."""

    height: Side = 320
    width: Side = 320

    def load(self, root: Path) -> Splits:
        """Load the volumes; 'official' if there are as many slices as in the release.

        The release has no published checksums.
        """
        parts = find_volumes(root / "fastMRI")
        totals = tuple(sum(volume.shape[0] for volume in part) for part in parts)
        if totals == RELEASED_SLICES:
            return self.read_splits(parts, "official", "")
        return self.read_splits(parts, "derived", "files in fastMRI's layout")

    def published_info(self, root: Path) -> DatasetInfo | None:
        """Describe the knee release; return None if there are files, which may differ from it."""
        folder = root / "fastMRI"
        if holds_any(folder / folders_of(folder)[0]):
            return None
        release = self.describe(*RELEASED_VOLUMES)
        if self.slices:
            return release
        train, test = RELEASED_SLICES
        return replace(
            release,
            train=train,
            test=test,
            examples_per_patient=MAX_RELEASED_SLICES,
            is_estimate=False,
        )
