"""NIfTI volumes: checked by their headers, then read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from zdp_bench.errors import UserError

SUFFIXES = (".nii", ".nii.gz")
LARGEST = 2**28  # voxels; an announced gigabyte is no brain


def identity(path: Path) -> str:
    """A volume's name without its suffixes: `hippocampus_001.nii.gz` -> `hippocampus_001`."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


def volumes(folder: Path, of: str) -> list[Path]:
    """Every NIfTI file in a folder, by name; hidden files (macOS leaves `._*` in the Decathlon's archives) do not count.

    Args:
        of: the data set that wants them, for the sentence.

    Raises:
        UserError: there is no such folder, it holds something else, or a volume stands there twice.
    """
    if not folder.is_dir():
        raise UserError(f"dataset '{of}' expects NIfTI volumes (.nii, .nii.gz) in {folder}, which is no folder.")
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if others := [path for path in paths if not path.name.endswith(SUFFIXES)]:
        raise UserError(f"{others[0]}: is no .nii or .nii.gz; only NIfTI volumes belong in this folder.")
    if not paths:
        raise UserError(f"{folder}: holds no .nii or .nii.gz file.")
    first: dict[str, Path] = {}
    for path in paths:
        if (other := first.setdefault(identity(path), path)) != path:
            raise UserError(f"{path}: is the same volume as {other.name}; remove one of them.")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{path}: is a link that leads out of {folder}; put the file itself there.")
        if not path.is_file():
            raise UserError(f"{path}: is not a file; a NIfTI volume was expected.")
    return paths


def read(path: Path) -> np.ndarray:
    """One volume as float32 [x, y, z].

    Raises:
        UserError: it is no NIfTI file, is cut off, has no three dimensions or no real numbers, or announces too many of them.
    """
    import nibabel

    try:
        image = nibabel.load(path)
        if not isinstance(image, nibabel.Nifti1Image):
            raise UserError(f"{path}: is a {type(image).__name__}, no NIfTI volume.")
        shape, kind = image.shape, image.get_data_dtype()
    except UserError:
        raise
    except Exception as error:  # nibabel and gzip raise whatever their parsers trip over
        raise UserError(f"{path}: is no NIfTI file; it is cut off, damaged or something else ({type(error).__name__}).") from None
    if len(shape) != 3 or 0 in shape:
        raise UserError(f"{path}: has shape {shape} where three dimensions, none of them empty, were expected.")
    if np.prod(shape, dtype=np.float64) > LARGEST:
        raise UserError(f"{path}: announces {' x '.join(map(str, shape))} voxels; at most {LARGEST:,} are read.")
    if kind.kind not in "uif":
        raise UserError(f"{path}: holds {kind} where real numbers were expected.")
    try:
        volume = np.asarray(image.dataobj, dtype=np.float32)
    except Exception as error:
        raise UserError(f"{path}: its voxels cannot be read; it is cut off or damaged ({type(error).__name__}).") from None
    if not np.isfinite(volume).all():
        raise UserError(f"{path}: holds voxels that are no numbers.")
    return volume
