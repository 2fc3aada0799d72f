"""Medical Segmentation Decathlon tasks as axial slices with a binary mask (Ziller et al. 2021, deepee, Methods: segmentation).

    Task03_Liver/dataset.json, imagesTr/liver_0.nii.gz, labelsTr/liver_0.nii.gz, ...

Every label above 0 is the organ: organ and tumour are one mask, as in the paper. Splits are cut by volume, and ε is stated of a
volume, for the release does not say whose it is. Task04's volumes 2k − 1 and 2k look like one person's two hippocampi (their
intensities differ by a factor of 1.11, other neighbours' by 1.76; medians); that person's ε is of twice as many slices.

Volumes are turned to RAS+ axes first (`nifti.py`), and pixels made square where a scanner's are not. CT has units, so one
intensity window serves all (the card's `windows`); MR has none, so each slice is scaled between its own 1st and 99th
percentile: a record then depends on no other.

Slices are made once, as bytes, and mapped from the user's cache folder: a set of any size streams through training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.data import DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.affine import Affine
from zdp_bench.data.cache import kept
from zdp_bench.data.files import card, holds_any, sha256
from zdp_bench.data.formats import nifti
from zdp_bench.data.formats.labelled_volumes import Case, cases, with_channel
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.registry import register

# task -> (folder, volumes with labels in the release)
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
Fit = Literal["resize", "pad"]
SLICES = 64  # of one volume in the paper's counts: 5,184 = 81 · 64, 640 = 10 · 64, 2,560 = 40 · 64
PIXELS = (
    0.5,
    0.25,
)  # mean and deviation of a pixel in [0, 1]: round numbers of ours, so nothing of the volumes is in them
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
class Geometry:
    """How a slice becomes a square image, and its intensities bytes.

    Attributes:
        size: pixels along a side.
        fit: resize (the slice is stretched to the square) or pad (it keeps its pixels and stands in the middle).
        spacing: mm of a pixel after resampling; None keeps the scanner's, the finer of the two where a pixel is not square.
        window: (low, high) in the file's units, to 0 and 255; None: each slice's own 1st and 99th percentile.
        channel: which of a file's channels, where it has several.
    """

    size: int
    fit: Fit
    spacing: float | None
    window: tuple[float, float] | None
    channel: int


# ------------------------------------------------------------------------------------------------------------- slices


def slices(case: Case, indices: np.ndarray, geometry: Geometry) -> np.ndarray:
    """A case's slices as bytes [n, 2, size, size]: image, and mask of 0 and 1. Rows run from anterior to posterior.

    Raises:
        UserError: a file cannot be read, or a slice does not fit.
    """
    image, label = nifti.read(case.image).data, nifti.read_labels(case.label).data
    if image.ndim == 4:
        image = image[..., geometry.channel]
    if label.ndim == 4:
        label = label[..., 0]
    turned = [
        torch.from_numpy(np.ascontiguousarray(v[:, ::-1, indices].transpose(2, 1, 0)))
        for v in (image, label > 0)
    ]
    pixels, mask = _bytes(turned[0], geometry.window), turned[1].float()  # each [n, Y, X]
    if (target := shape_on_grid(case.header, geometry)) != tuple(pixels.shape[1:]):
        pixels, mask = _resampled(pixels, target), _nearest(mask, target)
    if geometry.fit == "pad":
        pixels, mask = (_padded(v, geometry.size, case.image) for v in (pixels, mask))
    return torch.stack([pixels.round(), mask], dim=1).to(torch.uint8).numpy()


def shape_on_grid(header: nifti.Header, geometry: Geometry) -> tuple[int, int]:
    """(rows, columns) of a slice after resampling, before padding."""
    if geometry.fit == "resize":
        return geometry.size, geometry.size
    (x, y), (dx, dy) = header.shape[:2], header.spacing[:2]
    step = geometry.spacing or min(dx, dy)
    if geometry.spacing is None and abs(dx - dy) < 0.01 * step:
        return y, x
    return max(1, round(y * dy / step)), max(1, round(x * dx / step))


def _bytes(image: Tensor, window: tuple[float, float] | None) -> Tensor:
    """[n, Y, X] in the file's units -> 0 to 255."""
    if window:
        low, high = torch.tensor(window[0]), torch.tensor(window[1])
    else:
        low, high = torch.quantile(image.flatten(1), torch.tensor([0.01, 0.99]), dim=1)[
            :, :, None, None
        ]
    return ((image - low) / (high - low).clamp(min=1e-6)).clamp(0, 1) * 255


def _resampled(image: Tensor, target: tuple[int, int]) -> Tensor:
    return F.interpolate(image.unsqueeze(1), target, mode="bilinear", antialias=True).squeeze(1)


def _nearest(mask: Tensor, target: tuple[int, int]) -> Tensor:
    return F.interpolate(mask.unsqueeze(1), target, mode="nearest-exact").squeeze(1)


def _padded(image: Tensor, size: int, path: Path) -> Tensor:
    rows, columns = image.shape[-2:]
    if max(rows, columns) > size:
        raise UserError(
            f"{path}: its slices have {rows}×{columns} pixels and do not fit into dataset.size={size}: take a larger one, "
            "or dataset.fit=resize."
        )
    top, left = (size - rows) // 2, (size - columns) // 2
    return F.pad(image, (left, size - columns - left, top, size - rows - top))


# -------------------------------------------------------------------------------------------------------------- splits


def parts(
    found: list[Case], validation_share: float, test_share: float, seed: int
) -> dict[str, list[Case]]:
    """Volumes to train, validate and test: disjoint, seeded.

    Raises:
        UserError: the shares leave a part empty.
    """
    order = [found[index] for index in np.random.default_rng(seed).permutation(len(found))]
    train, test = sizes(len(found), validation_share, test_share)
    return {"train": order[:train], "validation": order[train:-test], "test": order[-test:]}


def sizes(count: int, validation_share: float, test_share: float) -> tuple[int, int]:
    """How many of `count` volumes are to train and to test on; the others validate.

    Raises:
        UserError: the shares leave a part empty.
    """
    validate, test = round(validation_share * count), round(test_share * count)
    require(
        0 <= validation_share < 1,
        "dataset.validation_share",
        validation_share,
        "must lie in [0, 1)",
    )
    require(test >= 1, "dataset.test_share", test_share, f"leaves none of {count} volumes to test")
    train = count - validate - test
    require(
        train >= 1, "dataset.test_share", test_share, f"leaves none of {count} volumes to train"
    )
    return train, test


def load(
    folder: Path,
    provenance: Provenance,
    geometry: Geometry,
    *,
    max_per_patient: int | None,
    test_per_patient: int | None,
    validation_share: float,
    test_share: float,
    split_seed: int,
    augment: bool,
) -> Splits:
    """Slices float32 [1, size, size] with masks uint8 [size, size]; `groups` number the volumes."""
    check_options(geometry, max_per_patient, test_per_patient)
    found = with_channel(cases(folder), geometry.channel)
    split = parts(found, validation_share, test_share, split_seed)
    most = {"train": max_per_patient, "validation": max_per_patient, "test": test_per_patient}
    chosen = [
        (case, case.slices(most[part])) for part, members in split.items() for case in members
    ]
    files = hashlib.sha256(
        "".join(f"{c.name}:{sha256(c.image)}:{sha256(c.label)}" for c in found).encode()
    ).hexdigest()
    settings = repr((geometry, most, validation_share, test_share, split_seed))
    made = hashlib.sha256(f"{files}:{settings}".encode()).hexdigest()
    counts = [len(indices) for _, indices in chosen]
    size = geometry.size

    def fill(whole: np.ndarray) -> None:
        start = 0
        for case, indices in chosen:
            whole[start : start + len(indices)] = slices(case, indices, geometry)
            start += len(indices)

    whole = torch.from_numpy(
        kept(f"slices-{nifti.READING}", made, (sum(counts), 2, size, size), np.uint8, fill)
    )
    groups = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor(counts))
    records, first = {}, 0
    for (
        part,
        members,
    ) in split.items():  # each part is one stretch of the mapped file, so nothing is copied
        rows = slice(first, first + sum(len(case.slices(most[part])) for case in members))
        records[part] = Examples(whole[rows, :1], whole[rows, 1], groups[rows], PIXELS)
        first = rows.stop
    people = {part: len(members) for part, members in split.items()}
    return Splits(
        records["train"],
        records["test"],
        input_shape=(1, size, size),
        outputs=1,
        provenance=provenance,
        digest=hashlib.sha256(f"{made}:{augment}:{PIXELS}".encode()).hexdigest(),
        notes=f"axial slices of {people['train']} volumes to train, {people['validation']} to validate (public), "
        f"{people['test']} to test; labels above 0 are one mask; {geometry.fit} to {size}²",
        examples_per_patient=max(len(case.slices(max_per_patient)) for case in split["train"]),
        augment=AUGMENT.images if augment else None,
        augment_targets=AUGMENT.masks if augment else None,
        validation=records["validation"] if people["validation"] else None,
        unit="volume",
    )


def check_options(
    geometry: Geometry, max_per_patient: int | None, test_per_patient: int | None
) -> None:
    """Refuse options that mean nothing, before anything is read or drawn."""
    require(
        8 <= geometry.size <= 1024,
        "dataset.size",
        geometry.size,
        "must lie between 8 and 1024 pixels",
    )
    require(
        geometry.spacing is None or geometry.spacing > 0,
        "dataset.spacing",
        geometry.spacing,
        "must be positive, in mm",
    )
    unused = "would change nothing: a slice is stretched to the square; set dataset.fit=pad"
    require(
        geometry.spacing is None or geometry.fit == "pad",
        "dataset.spacing",
        geometry.spacing,
        unused,
    )
    require(geometry.channel >= 0, "dataset.channel", geometry.channel, "must be 0 or more")
    if geometry.window:
        require(
            geometry.window[0] < geometry.window[1],
            "dataset.window",
            geometry.window,
            "must be [low, high] with low < high",
        )
    for key, value in (
        ("max_per_patient", max_per_patient),
        ("test_per_patient", test_per_patient),
    ):
        require(value is None or value > 0, f"dataset.{key}", value, "must be at least 1")


def _of_task(root: Path, task: str) -> tuple[Path, Provenance]:
    """The task's folder, and whether it holds what was released: by dataset.json and the number of volumes."""
    if task not in TASKS:
        raise unknown("dataset.task", task, TASKS)
    name, volumes = TASKS[task]
    whole = (root / name / "dataset.json").is_file() and len(
        nifti.paths_of(root / name / "labelsTr")
    ) == volumes
    return root / name, "official" if whole else "derived"


def _window(task: str, given: list[float] | None) -> tuple[float, float] | None:
    """The window of a task: the one given, or the card's; None for a task without units."""
    window: Any = given or card("msd").windows.get(task)
    require(window is None or len(window) == 2, "dataset.window", window, "must be [low, high]")
    return (float(window[0]), float(window[1])) if window else None


@register("dataset", "msd")
def msd(
    root: Path,
    *,
    task: str = "liver",
    size: int = 256,
    fit: Fit = "resize",
    spacing: float | None = None,
    window: list[float] | None = None,
    channel: int = 0,
    max_per_patient: int | None = SLICES,
    test_per_patient: int | None = None,
    validation_share: float = 0.076,
    test_share: float = 0.305,
    split_seed: int = 0,
    augment: bool = True,
) -> Splits:
    """A task of the decathlon under the data root: float32 [1, size, size] and its binary mask.

    max_per_patient: at most so many slices of a volume are trained on, spread evenly: bounds what a patient contributes.
    test_per_patient: the same for testing; null: all slices, so that Dice is that of whole volumes.
    """
    folder, provenance = _of_task(root, task)
    return load(
        folder,
        provenance,
        Geometry(size, fit, spacing, _window(task, window), channel),
        max_per_patient=max_per_patient,
        test_per_patient=test_per_patient,
        validation_share=validation_share,
        test_share=test_share,
        split_seed=split_seed,
        augment=augment,
    )


@register("outline", "msd")
def outline(
    root: Path,
    *,
    task: str,
    size: int,
    fit: Fit,
    spacing: float | None,
    window: list[float] | None,
    channel: int,
    max_per_patient: int | None,
    test_per_patient: int | None,
    validation_share: float,
    test_share: float,
    split_seed: int,
    **_: object,
) -> DatasetInfo:
    """From headers alone; without volumes, as many as the release has, with the paper's 64 slices each."""
    folder, _provenance = _of_task(root, task)
    check_options(
        Geometry(size, fit, spacing, _window(task, window), channel),
        max_per_patient,
        test_per_patient,
    )
    if not holds_any(folder):
        volumes, each = TASKS[task][1], max_per_patient or SLICES
        train, test = sizes(volumes, validation_share, test_share)
        return DatasetInfo(
            train * each,
            test * (test_per_patient or SLICES),
            examples_per_patient=each,
            found=False,
            validation=(volumes - train - test) * each,
            input_shape=(1, size, size),
            outputs=1,
            target_shape=(size, size),
            target_dtype=torch.uint8,
            unit="volume",
        )
    split = parts(with_channel(cases(folder), channel), validation_share, test_share, split_seed)
    own = [len(case.slices(max_per_patient)) for case in split["train"]]
    tested = sum(len(case.slices(test_per_patient)) for case in split["test"])
    validate = sum(len(case.slices(max_per_patient)) for case in split["validation"])
    return DatasetInfo(
        sum(own),
        tested,
        examples_per_patient=max(own),
        validation=validate,
        input_shape=(1, size, size),
        outputs=1,
        target_shape=(size, size),
        target_dtype=torch.uint8,
        unit="volume",
    )


@register("check", "msd")
def check(root: Path) -> Iterator[tuple[Path, str]]:
    """Every labelled volume and its segmentation, of each task that is there, and what is wrong with it."""
    for folder, _volumes in TASKS.values():
        for case in cases(root / folder) if (root / folder / "labelsTr").is_dir() else []:
            for path, read in ((case.image, nifti.read), (case.label, nifti.read_labels)):
                try:
                    read(path)
                    yield path, ""
                except UserError as error:
                    yield path, str(error)
