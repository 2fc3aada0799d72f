"""A data root with a little of every set that is got by hand, and a cache for each test."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import write_mini_mnist
from tests.data.helpers import dataset, write_cifar10, write_ecg
from zdp_bench.data import nifti, roahd

# The stand-ins of sets that are got by hand, small.
SMALL: dict[str, dict[str, Any]] = {
    "chest_xray_synthetic": {"count": 60, "seed": 1},
    "cpsc2018_synthetic": {"count": 6, "seed": 1, "test_share": 0.4},
    "ham10000_synthetic": {"count": 40},
    "kspace_phantom": {"patients": 6, "slices": 3, "height": 8, "width": 10},
    "mri_sequences_synthetic": {"patients": 7, "test_share": 0.4},
    "msd_synthetic": {"volumes": 5},
    "physionet2012_synthetic": {"count": 12},
    "speech_commands_synthetic": {"words": ["yes", "no"], "clips_per_word": 10},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_every_set(root: Path) -> None:
    """Write a little of every set that is got by hand, and of MNIST and CIFAR-10."""
    for name, options in SMALL.items():
        dataset(name, **options).write(root)
    people, hippocampi = root / roahd.FOLDER, root / nifti.HIPPOCAMPI
    for number, name in enumerate(("RN0000", "RL0000", "RN0001", "RL0001")):
        write_ecg(people, name, number, roahd.CODES[name[:2]][0], seconds=1.1)
    hippocampi.mkdir(parents=True)
    for number, shape in enumerate([(9, 10, 11), (12, 9, 4), (20, 14, 9), (9, 9, 9), (8, 4, 9)]):
        voxels = np.random.default_rng(number).random(shape)
        nifti.write(hippocampi / f"h_{number}.nii.gz", voxels, (1.0, 1.0, 1.0))
    write_cifar10(root)
    write_mini_mnist(root)
    shutil.copytree(root / "MNIST", root / "FashionMNIST")


@pytest.fixture(scope="session")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data root; to be read only."""
    root = tmp_path_factory.mktemp("small_root")
    write_every_set(root)
    return root


@pytest.fixture
def root(small_root: Path, tmp_path: Path) -> Path:
    """A copy of the data root, to be damaged."""
    return Path(shutil.copytree(small_root, tmp_path / "root"))
