"""A stand-in for the decathlon's liver task that needs no download: abdominal phantoms as real NIfTI files with a dataset.json,
read by the real adapter.

A phantom is an ellipse of soft tissue with spine, spleen and liver in Hounsfield units; shape and contrast belong to the patient,
half of whom have a tumour in the liver. Every other volume is stored with its axes turned, as scanners do.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.files import made_whole
from zdp_bench.data.formats import nifti
from zdp_bench.data.msd import Geometry, check_options, load, sizes
from zdp_bench.errors import require
from zdp_bench.registry import register

WINDOW = (-150.0, 250.0)  # the liver's, in Hounsfield units
SPACING = (5.0, 4.0, 8.0)  # mm; pixels that are not square
GRID = (64, 64, 16)


def abdomen(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(intensities int16 [X, Y, Z] in Hounsfield units, labels uint8: 1 liver, 2 tumour), on RAS+ axes."""
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in GRID), indexing="ij")

    def ball(centre: tuple[float, float, float], radii: tuple[float, float, float]) -> np.ndarray:
        return (
            np.sum(
                [
                    ((axis - c) / r) ** 2
                    for axis, c, r in zip((x, y, z), centre, radii, strict=True)
                ],
                axis=0,
            )
            < 1
        )

    wide, deep = draw.uniform(0.8, 0.95), draw.uniform(0.65, 0.8)
    volume = np.full(GRID, -1000.0)
    volume[ball((0, 0, 0), (wide, deep, 9))] = draw.uniform(20, 40)
    volume[ball((0, -0.5 * deep, 0), (0.12, 0.12, 9))] = 400
    volume[ball((-0.55 * wide, -0.2, 0.1), (0.18, 0.2, 0.6))] = 90
    at = (draw.uniform(0.3, 0.4) * wide, draw.uniform(-0.05, 0.1), draw.uniform(-0.1, 0.1))
    liver = ball(
        at, (draw.uniform(0.38, 0.48) * wide, draw.uniform(0.4, 0.5) * deep, draw.uniform(0.6, 0.9))
    )
    volume[liver] = draw.uniform(95, 125)
    labels = liver.astype(np.uint8)
    if draw.random() < 0.5:
        size = draw.uniform(0.08, 0.16)
        tumour = liver & ball((at[0], at[1] + 0.1, at[2]), (size, size, 2 * size))
        volume[tumour], labels[tumour] = 60, 2
    return (volume + draw.normal(0, 12, GRID)).astype(np.int16), labels


def write_set(folder: Path, volumes: int, seed: int) -> None:
    """`volumes` phantoms with their segmentations and a dataset.json; whole or not at all."""
    listed = []
    with made_whole(folder) as partial:
        for name in ("imagesTr", "labelsTr"):
            (partial / name).mkdir()
        for number in range(volumes):
            name = f"liver_{number}.nii.gz"
            for kind, data in zip(
                ("imagesTr", "labelsTr"),
                abdomen(np.random.default_rng([seed, number])),
                strict=True,
            ):
                nifti.write(
                    partial / kind / name, data, SPACING, axes="LPS" if number % 2 else "RAS"
                )
            listed.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
        about = {
            "name": "synthetic abdomen",
            "labels": {"0": "background", "1": "liver", "2": "tumour"},
            "training": listed,
        }
        (partial / "dataset.json").write_text(json.dumps(about, indent=1))


def _geometry(size: int) -> Geometry:
    return Geometry(size, "resize", None, WINDOW, 0)


def _sizes(
    volumes: int,
    size: int,
    max_per_patient: int | None,
    test_per_patient: int | None,
    validation_share: float,
    test_share: float,
) -> tuple[int, int]:
    """How many volumes are to train and to test on.

    Raises:
        UserError: an option means nothing.
    """
    require(3 <= volumes <= 1000, "dataset.volumes", volumes, "must lie between 3 and 1000")
    check_options(_geometry(size), max_per_patient, test_per_patient)
    return sizes(volumes, validation_share, test_share)


@register("dataset", "msd_synthetic")
def msd_synthetic(
    root: Path,
    *,
    volumes: int = 30,
    size: int = 64,
    seed: int = 0,
    max_per_patient: int | None = 16,
    test_per_patient: int | None = None,
    validation_share: float = 0.1,
    test_share: float = 0.2,
    augment: bool = True,
) -> Splits:
    """Phantoms, written once under `synthetic/` and read as the decathlon's volumes are: float32 [1, size, size] and mask."""
    _sizes(volumes, size, max_per_patient, test_per_patient, validation_share, test_share)
    folder = root / "synthetic" / f"abdomen-{volumes}-{seed}"
    if not folder.is_dir():
        write_set(folder, volumes, seed)
    return load(
        folder,
        "synthetic",
        _geometry(size),
        max_per_patient=max_per_patient,
        test_per_patient=test_per_patient,
        validation_share=validation_share,
        test_share=test_share,
        split_seed=seed,
        augment=augment,
    )


@register("outline", "msd_synthetic")
def outline(
    root: Path,
    *,
    volumes: int,
    size: int,
    max_per_patient: int | None,
    test_per_patient: int | None,
    validation_share: float,
    test_share: float,
    **_: object,
) -> DatasetInfo:
    """Known before anything is drawn."""
    import torch

    train, test = _sizes(
        volumes, size, max_per_patient, test_per_patient, validation_share, test_share
    )
    each, tested = (min(GRID[2], most or GRID[2]) for most in (max_per_patient, test_per_patient))
    validate = (volumes - train - test) * each
    square = (1, size, size)
    return DatasetInfo(
        train * each,
        test * tested,
        square,
        1,
        torch.float32,
        (size, size),
        torch.uint8,
        each,
        validation=validate,
        unit="volume",
    )
