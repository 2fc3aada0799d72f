"""A data root with a little of every set that is got by hand, and a cache for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import write_roahd
from zdp_bench.data import (
    chest_xray,
    cifar10,
    cpsc2018,
    mri_sequences,
    nifti,
    roahd,
    speech_commands,
)
from zdp_bench.extras.standins import ecg, pictures, scans, speech


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data root; to be read only."""
    root = tmp_path_factory.mktemp("small_root")
    ecg.write_recordings(root / cpsc2018.FOLDER, 6, 2.0, seed=1)
    write_roahd(root / roahd.FOLDER, people=2)
    (root / speech_commands.FOLDER).parent.mkdir()
    speech.write_set(root / speech_commands.FOLDER, ["yes", "no"], 10, seed=0)
    pictures.write_films(root / chest_xray.FOLDER, 60, seed=1)
    scans.write_heads(root / mri_sequences.FOLDER, 4, 3, seed=0)
    scans.write_abdomens(root / "Task03_Liver", 5, seed=0)
    scans.KSpacePhantom(patients=6, slices=3, height=8, width=10).write(root)
    hippocampi = root / nifti.HIPPOCAMPI
    hippocampi.mkdir(parents=True)
    for number, shape in enumerate([(9, 10, 11), (12, 9, 4), (20, 14, 9), (9, 9, 9), (8, 4, 9)]):
        voxels = np.random.default_rng(number).random(shape)
        nifti.write(hippocampi / f"h_{number}.nii.gz", voxels, (1.0, 1.0, 1.0))
    (root / cifar10.FOLDER).mkdir()
    for name in cifar10.BATCHES:
        (root / cifar10.FOLDER / name).write_bytes(3 * bytes(cifar10.RECORD))
    return root


@pytest.fixture
def root(small_root: Path, tmp_path: Path) -> Path:
    """A copy of the data root, to be damaged."""
    return Path(shutil.copytree(small_root, tmp_path / "root"))
