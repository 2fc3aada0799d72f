"""Medical Segmentation Decathlon: axial slices with a binary mask (Ziller et al. 2021, deepee).

    Task03_Liver/dataset.json, imagesTr/liver_0.nii.gz, labelsTr/liver_0.nii.gz, ...

Labels above 0 form one mask, so organ and tumour are not distinguished, as in the paper (Methods:
segmentation).

Parts are split by volume, and ε is per volume, because the release does not say which patient a
volume belongs to. In Task04, volumes 2k − 1 and 2k appear to be the two hippocampi of one person:
their intensities differ by a median factor of 1.11, those of other neighbouring volumes by 1.76.
That person owns twice as many slices, and has a larger ε.

Volumes are reoriented to RAS+ axes (`nifti.py`). Intensities of CT have units, so each CT task has
one intensity window (`windows` in the card). Intensities of MR have none, so each slice is scaled
between its own 1st and 99th percentile, which keeps examples independent of each other.

Slices are converted to bytes once, and memory-mapped from the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from zdp_bench.data import (
    Dataset,
    DatasetInfo,
    Examples,
    Fraction,
    MaxCount,
    Pixels,
    PublicFraction,
    Splits,
    nifti,
)
from zdp_bench.data.augmentation import Affine
from zdp_bench.data.cache import load_or_make
from zdp_bench.data.files import (
    absent,
    card,
    digest,
    holds_any,
    require_distinct,
    require_inside,
    sha256,
)
from zdp_bench.data.nifti import resample, resample_mask, to_bytes
from zdp_bench.data.owners import MAX_MIDDLE, digest_files, place_owners, spread_evenly
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.registry import register

# task -> (folder, number of labelled volumes in the release)
TASKS: dict[str, tuple[str, int]] = {
    "brain": ("Task01_BrainTumour", 484),
    "heart": ("Task02_Heart", 20),
    "liver": ("Task03_Liver", 131),
    "hippocampus": ("Task04_Hippocampus", 260),
    "prostate": ("Task05_Prostate", 32),
    "lung": ("Task06_Lung", 63),
    "pancreas": ("Task07_Pancreas", 281),
    "hepatic_vessel": ("Task08_HepaticVessel", 303),
    "spleen": ("Task09_Spleen", 41),
    "colon": ("Task10_Colon", 126),
}
SLICES = 64  # per volume, by the paper's counts: 5,184 = 81 · 64, 640 = 10 · 64, 2,560 = 40 · 64
# Mean and standard deviation that normalise pixels in [0, 1]: public constants, not estimates.
PIXELS = (0.5, 0.25)
AUGMENT = Affine(
    degrees=10,
    translate=0.05,
    scale=0.1,
    shear=0,
    flip=True,
    noise=0.05,
    fill=(0 - PIXELS[0]) / PIXELS[1],
)


@dataclass(frozen=True)
class LabelledVolume:
    """A volume with its segmentation and the volume's header."""

    name: str
    image: Path
    label: Path
    header: nifti.Header


def find_cases(folder: Path, channel: int = 0) -> list[LabelledVolume]:
    """List the labelled volumes in a folder, sorted by file name, with their headers.

    Args:
        folder: folder of a task.
        channel: index of a channel that every volume must have.
    """
    if not folder.is_dir():
        raise absent(folder, "msd")
    images = _paths_by_name(folder / "imagesTr")
    labels = _paths_by_name(folder / "labelsTr")
    for name in sorted(set(images) ^ set(labels)):
        missing = "labelsTr" if name in images else "imagesTr"
        raise UserError(
            f"{folder / missing}: the volume '{name}' is missing, but the other folder has it."
        )
    if len(images) < 3:
        raise UserError(
            f"{folder}: holds {len(images)} labelled volumes; at least 3 are needed to train, "
            "validate and test."
        )
    cases = []
    for name, image in images.items():
        label = labels[name]
        for path in (image, label):
            require_inside(path, folder)
        header = _read_headers(image, label)
        channels = header.shape[3] if len(header.shape) == 4 else 1
        rule = f"{image} has {channels} channels, counted from 0"
        require(channel < channels, "dataset.channel", channel, rule)
        cases.append(LabelledVolume(name, image, label, header))
    return cases


def _paths_by_name(folder: Path) -> dict[str, Path]:
    """Return the paths of the volumes in a folder by name; reject two files of one name."""
    paths = nifti.paths_of(folder)
    require_distinct(paths, nifti.name_of, "volume")
    return {nifti.name_of(path): path for path in paths}


def _read_headers(image: Path, label: Path) -> nifti.Header:
    """Return the image's header; reject a label that is not at the image's position."""
    header, mask = nifti.read_header(image), nifti.read_mask_header(label)
    nifti.require_same_place(label, mask, header)
    return header


@dataclass(frozen=True, kw_only=True)
class Decathlon(Dataset):
    """Base class: a task of the decathlon under the data root, split by volume.

    Args:
        task: name of the task, a key of `TASKS`.
        channel: index of the channel to use.
        validation_share: fraction of the volumes that validate; they are assumed to be public.
        test_share: fraction of the volumes to test on.
        split_seed: seed that draws the volumes of each part.
    """

    array: ClassVar[str]  # name of the folder in the cache

    task: str
    channel: Annotated[int, Ge(0)] = 0
    validation_share: PublicFraction
    test_share: Fraction
    split_seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise unknown("dataset.task", self.task, TASKS)

    @property
    def sides(self) -> tuple[int, ...]:
        """The shape of an example, without its channel."""
        raise NotImplementedError

    def count(self, thickness: int, part: str) -> int:
        """Return the number of examples from a volume with `thickness` slices in a part."""
        raise NotImplementedError

    def read(
        self,
        case: LabelledVolume,
        part: str,
    ) -> np.ndarray:
        """Read a volume's examples as bytes [examples, 2, *sides]: image, and mask of 0 and 1."""
        raise NotImplementedError

    def digest_arrays(self, contents: str, cases: Sequence[LabelledVolume]) -> str:
        """Return a digest of the files and of the settings that turn them into arrays.

        Args:
            contents: names and digests of all files.
            cases: the volumes.
        """
        raise NotImplementedError

    @property
    def limits(self) -> tuple[float, float] | None:
        """The card's intensities that become 0 and 255; None for a task without units."""
        window = card("msd").windows.get(self.task)
        return (float(window[0]), float(window[1])) if window else None

    def split(self, volumes: int) -> dict[str, list[int]]:
        """Draw the indices of each part's volumes.

        Args:
            volumes: number of volumes.
        """
        test = round(self.test_share * volumes)
        train = volumes - round(self.validation_share * volumes) - test
        for part, count in (("test", test), ("train", train)):
            rule = f"leaves none of {volumes} volumes to {part}"
            require(count >= 1, "dataset.test_share", self.test_share, rule)
        order = np.random.default_rng(self.split_seed).permutation(volumes).tolist()
        return {
            "train": order[:train],
            "validation": order[train:-test],
            "test": order[-test:],
        }

    def load(self, root: Path) -> Splits:
        """Load the task; 'official' if dataset.json and all released volumes are present.

        `groups` number the volumes.
        """
        folder, num_released = TASKS[self.task]
        cases = find_cases(root / folder, self.channel)
        parts = {
            part: [cases[index] for index in indices]
            for part, indices in self.split(len(cases)).items()
        }
        images = digest_files([case.image for case in cases], [case.name for case in cases])
        contents = [
            f"{case.name}:{image}:{sha256(case.label)}"
            for case, image in zip(cases, images, strict=True)
        ]
        arrays_digest = self.digest_arrays("".join(contents), cases)
        arrays, rows_of_parts, groups = self._load_arrays(parts, arrays_digest)
        examples = {
            part: Examples(arrays[rows, :1], arrays[rows, 1], groups[rows], PIXELS)
            for part, rows in rows_of_parts.items()
        }
        has_index = (root / folder / "dataset.json").is_file()
        is_official = has_index and len(cases) == num_released
        train, validation, test = map(len, parts.values())
        return Splits(
            examples["train"],
            examples["test"],
            input_shape=(1, *self.sides),
            outputs=1,
            provenance="official" if is_official else "derived",
            digest=arrays_digest,
            notes=f"{train} volumes to train, {validation} to validate (public), {test} to test",
            validation=examples["validation"] if len(examples["validation"]) else None,
            unit="volume",
            owner_names=[case.name for case in chain.from_iterable(parts.values())],
        )

    def _load_arrays(
        self, parts: dict[str, list[LabelledVolume]], arrays_digest: str
    ) -> tuple[Tensor, dict[str, slice], Tensor]:
        """Load the examples of all parts from the cache, which is filled first if needed.

        Args:
            parts: the volumes of each part.
            arrays_digest: the cache key.

        Returns:
            Bytes [n, 2, *sides], the rows of each part, and the group of each row [n].
        """
        counts = {
            part: [self.count(case.header.shape[2], part) for case in cases]
            for part, cases in parts.items()
        }
        rows, groups = place_owners(counts)
        shape = (len(groups), 2, *self.sides)
        kind = f"{self.array}-{nifti.READING}"

        def blocks() -> Iterator[np.ndarray]:
            for part, cases in parts.items():
                for case in cases:
                    yield self.read(case, part)

        arrays = torch.from_numpy(load_or_make(kind, arrays_digest, shape, np.uint8, blocks()))
        return arrays, rows, groups

    def published_info(self, root: Path) -> DatasetInfo | None:
        """Describe the released volumes, with the paper's 64 slices each."""
        folder, num_released = TASKS[self.task]
        if holds_any(root / folder):
            return None
        parts = self.split(num_released)
        counts = {part: len(indices) * self.count(SLICES, part) for part, indices in parts.items()}
        return DatasetInfo(
            train=counts["train"],
            test=counts["test"],
            validation=counts["validation"],
            input_shape=(1, *self.sides),
            outputs=1,
            target_shape=self.sides,
            target_dtype=torch.uint8,
            examples_per_patient=self.count(SLICES, "train"),
            unit="volume",
            owners=len(parts["train"]),
            is_estimate=self.count(nifti.MAX_VOXELS, "train") > self.count(SLICES, "train"),
        )


@register("dataset", "msd")
@dataclass(frozen=True, kw_only=True)
class Msd(Decathlon):
    """Axial slices, float32 [1, size, size], with masks, uint8 [size, size].

    Args:
        size: rows and columns of an example.
        fit: "resize" stretches a slice to the square. "pad" keeps its resolution and places it in
            the middle; pixels that are not square are resampled to the length of the shorter side.
        max_per_patient: maximum number of training (and validation) slices per volume, spread
            evenly (`spread_evenly`), which bounds the contribution of a patient. Test volumes are
            always used whole, so that Dice is measured per volume.
        augment: augment training slices with random affine maps, flips and noise.
    """

    array: ClassVar[str] = "slices"

    task: str = "liver"
    size: Pixels = 256
    fit: Literal["resize", "pad"] = "resize"
    max_per_patient: MaxCount = SLICES
    validation_share: PublicFraction = 0.076
    test_share: Fraction = 0.305
    augment: bool = True

    @property
    def sides(self) -> tuple[int, ...]:
        return self.size, self.size

    @property
    def max_slices(self) -> dict[str, int | None]:
        """The maximum number of slices per volume in each part; None: all."""
        bound = self.max_per_patient
        return {"train": bound, "validation": bound, "test": None}

    def count(self, thickness: int, part: str) -> int:
        return min(self.max_slices[part] or thickness, thickness)

    def read(
        self,
        case: LabelledVolume,
        part: str,
    ) -> np.ndarray:
        thickness = case.header.shape[2]
        return self.read_slices(case, spread_evenly(thickness, self.count(thickness, part)))

    def digest_arrays(self, contents: str, cases: Sequence[LabelledVolume]) -> str:
        # Records identify data by this digest, so the text keeps the form of an earlier version,
        # where these were fields of two classes.
        settings = (
            f"(Geometry(size={self.size}, fit={self.fit!r}, spacing=None, window={self.limits}, "
            f"channel={self.channel}), {self.max_slices}, {self.validation_share}, "
            f"{self.test_share}, {self.split_seed})"
        )
        # That version took the first and the last slice of a volume if it took one or two.
        if self.max_per_patient is not None and self.max_per_patient <= MAX_MIDDLE:
            settings += ", from the middle"
        return digest(f"{digest(contents)}:{settings}")

    def load(self, root: Path) -> Splits:
        splits = super().load(root)
        return replace(
            splits,
            digest=digest(f"{splits.digest}:{self.augment}:{PIXELS}"),
            notes=f"axial slices of {splits.notes}; labels above 0 are one mask; "
            f"{self.fit} to {self.size}²",
            augment=AUGMENT.images if self.augment else None,
            augment_targets=AUGMENT.masks if self.augment else None,
        )

    def read_slices(
        self,
        case: LabelledVolume,
        indices: np.ndarray,
    ) -> np.ndarray:
        """Read slices at `indices` [n] as bytes [n, 2, size, size], anterior rows first."""
        volume, organ = read_case(case, self.channel)
        planes = nifti.turn_planes(volume[:, :, indices])  # [n, Y, X]
        mask = nifti.turn_planes(organ[:, :, indices]).float()
        pixels = to_bytes(planes, self.limits)
        target = (self.size, self.size) if self.fit == "resize" else square_pixels(case.header)
        if target != tuple(pixels.shape[1:]):
            pixels = resample(pixels, target)
            mask = resample_mask(mask, target)
        if self.fit == "pad":
            pixels = _pad(pixels, self.size, case.image)
            mask = _pad(mask, self.size, case.image)
        return torch.stack([pixels.round(), mask], dim=1).to(torch.uint8).numpy()


def square_pixels(header: nifti.Header) -> tuple[int, int]:
    """Return the (rows, columns) of a slice resampled to square pixels of its finer spacing."""
    x, y = header.shape[:2]
    dx, dy = header.spacing[:2]
    step = min(dx, dy)
    if abs(dx - dy) < 0.01 * step:
        return y, x
    return max(1, round(y * dy / step)), max(1, round(x * dx / step))


def read_case(case: LabelledVolume, channel: int) -> tuple[np.ndarray, np.ndarray]:
    """Read one channel of a volume, float32 [X, Y, Z], and its mask: labels above 0."""
    image = nifti.read(case.image)
    if image.ndim == 4:
        image = image[..., channel]
    labels = nifti.read_labels(case.label)
    if labels.ndim == 4:
        labels = labels[..., 0]
    return image, labels > 0


def _pad(
    image: Tensor,
    size: int,
    path: Path,
) -> Tensor:
    rows, columns = image.shape[-2:]
    if max(rows, columns) > size:
        raise UserError(
            f"{path}: its slices have {rows}×{columns} pixels and do not fit dataset.size={size}. "
            "Use a larger size, or dataset.fit=resize."
        )
    top = (size - rows) // 2
    left = (size - columns) // 2
    return F.pad(image, (left, size - columns - left, top, size - rows - top))
