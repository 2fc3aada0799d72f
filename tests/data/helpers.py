"""What tests of data sets share: their options, how files are broken, and how a refusal reads."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image
from scipy.spatial.transform import Rotation

from zdp_bench import assets
from zdp_bench.config.plugins import check_plugin
from zdp_bench.data import Dataset, cifar10
from zdp_bench.errors import UserError
from zdp_bench.extras.standins import ecg
from zdp_bench.registry import lookup


def dataset(name: str, **changes: Any) -> Dataset:
    """A data set with the options of its YAML, but for `changes`, as a configuration makes it."""
    body = assets.read_yaml(assets.group(assets.DATASETS)[name])
    options = {key: value for key, value in body.items() if key != "card"}
    made: Dataset = lookup("dataset", name)(**check_plugin("dataset", options | changes).options)
    return made


def copy_folder(source: Path, target: Path, folder: str | Path) -> Path:
    """Copy one folder of a data root to another root, and return that."""
    shutil.copytree(source / folder, target / folder)
    return target


def assert_refused(load: Callable[[], object], names: str, says: str) -> None:
    """Loading ends in one UserError of one line that names `names` and matches `says`."""
    with pytest.raises(UserError) as caught:
        load()
    sentence = str(caught.value)
    assert "\n" not in sentence, sentence
    assert sentence.endswith("."), sentence
    assert names in sentence, sentence
    assert re.search(says, sentence), sentence


def write_cifar10(root: Path, count: int = 20) -> Path:
    """Write CIFAR-10's six files, so many random images in each; return their folder."""
    folder = root / cifar10.FOLDER
    folder.mkdir()
    for number, name in enumerate(cifar10.BATCHES):
        draw = np.random.default_rng(number)
        rows = draw.integers(0, 256, (count, cifar10.RECORD), dtype=np.uint8)
        rows[:, 0] = np.arange(count) % cifar10.CLASSES
        rows.tofile(folder / name)
    return folder


def write_ecg(
    folder: Path, name: str, number: int, diagnosis: str = "", seconds: float = 2.0
) -> None:
    """Write a recording of twelve leads; those of odd numbers show left bundle branch block."""
    folder.mkdir(parents=True, exist_ok=True)
    leads = ecg.draw_recording(number % 2 == 1, seconds, np.random.default_rng(number))
    ecg.write_wfdb(folder, name, leads, diagnosis)


# ------------------------------------------------------------------------- what is done to a file

Spoil = Callable[[Path], object]


def put(content: bytes) -> Spoil:
    return lambda path: path.write_bytes(content)


def change(how: Callable[[bytes], bytes]) -> Spoil:
    return lambda path: path.write_bytes(how(path.read_bytes()))


def keep(count: int) -> Spoil:
    """Cut a file after so many bytes; a negative count is of those at its end."""
    return change(lambda whole: whole[:count])


def overwrite(place: int, new: bytes) -> Spoil:
    return change(lambda whole: whole[:place] + new + whole[place:][len(new) :])


def edit(old: str, new: str) -> Spoil:
    return lambda path: path.write_text(path.read_text().replace(old, new))


EMPTY, WEB_PAGE = put(b""), put(b"<html>not found</html>" * 50)


# ------------------------------------------------------------------- where a volume lies in space


def move(how: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    """Give a NIfTI file another affine; its voxels stay as they are stored."""

    def act(path: Path) -> None:
        image: Any = nibabel.load(path)
        nibabel.save(
            nibabel.Nifti1Image(np.asanyarray(image.dataobj).copy(), how(image.affine)), path
        )

    return act


def shift(affine: np.ndarray, axis: int, distance: float) -> np.ndarray:
    """Move along one of the patient's axes, in mm."""
    moved = affine.copy()
    moved[axis, 3] += distance
    return moved


def scale(affine: np.ndarray, axis: int, factor: float) -> np.ndarray:
    """Stretch one stored axis; -1 flips it and leaves the first voxel in its place."""
    factors = np.ones(4)
    factors[axis] = factor
    return affine @ np.diag(factors)


def rotate(affine: np.ndarray, axis: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate round an axis in mm through the first voxel."""
    turn = np.eye(4)
    turn[:3, :3] = Rotation.from_rotvec(
        axis / np.linalg.norm(axis) * np.radians(degrees)
    ).as_matrix()
    turned = turn @ affine
    turned[:3, 3] = affine[:3, 3]
    return turned


def swap(affine: np.ndarray, first: int, second: int) -> np.ndarray:
    """Exchange two stored axes, and keep the first voxel in its place."""
    order = [0, 1, 2, 3]
    order[first], order[second] = second, first
    return affine[:, order]


def diagonal(affine: np.ndarray) -> np.ndarray:
    """The axis from the first voxel to the last of a volume of 12 × 10 × 4: both stay."""
    return affine[:3, :3] @ [11, 9, 3]


AXES = np.eye(3)
# Affines that put a mask of 12 × 10 × 4 voxels elsewhere than its image.
ELSEWHERE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **{f"origin {n}": partial(shift, axis=n, distance=5.0) for n in range(3)},
    **{f"spacing {n}": partial(scale, axis=n, factor=1.5) for n in range(3)},
    **{f"flip {n}": partial(scale, axis=n, factor=-1) for n in range(3)},
    **{f"rotation {n}": partial(rotate, axis=AXES[n], degrees=20) for n in range(3)},
    "rotation of a little": partial(rotate, axis=AXES[2], degrees=8),
    "rotation round its diagonal": lambda affine: rotate(affine, diagonal(affine), 40),
    "axes swapped": partial(swap, first=0, second=1),
    "no affine": lambda affine: np.eye(4),
}


def bomb(path: Path) -> None:
    """Write a JPEG of a few hundred bytes whose header announces 20,000 by 20,000 pixels."""
    Image.new("L", (16, 16)).save(path, format="JPEG")
    overwrite(path.read_bytes().find(b"\xff\xc0") + 5, 2 * (20_000).to_bytes(2, "big"))(path)
