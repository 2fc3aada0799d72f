"""Every data set is described without its files, by the release's counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import dataset
from zdp_bench import assets

# What owns examples where no patient is known.
UNITS = {
    **dict.fromkeys(("mnist", "fashion_mnist", "phasemnist", "phase_digits"), "image"),
    **dict.fromkeys(("cifar10", "public_kspace", "synthetic_images"), "image"),
    **dict.fromkeys(
        (*("msd", "msd_volumes"), *("kspace_from_volumes", "mri_sequences_from_volumes")), "volume"
    ),
    "roahd": "person",
    **dict.fromkeys(("chest_xray", "fastmri", "mri_sequences"), "patient"),
    "cpsc2018": "recording",
    "speech_commands": "speaker",
}


# `folder` has no files but a person's own; a stand-in is made.
OWN = {name for name in assets.group(assets.DATASETS) if name.endswith(("_synthetic", "phantom"))}


@pytest.mark.parametrize("name", sorted({*assets.group(assets.DATASETS)} - {"folder"} - OWN))
def test_every_data_set_is_described_without_its_files(name: str, tmp_path: Path) -> None:
    info = dataset(name).info(tmp_path)
    assert info.train > 0 < info.test
    assert 1 <= info.examples_per_patient <= info.train
    assert info.unit == UNITS.get(name, info.unit)
    assert not list(tmp_path.iterdir())


RELEASED: list[tuple[str, dict[str, Any], tuple[int, int, int]]] = [
    ("phasemnist", {}, (58_142, 10_000, 2)),
    ("chest_xray", {"validation_share": 0.0}, (4135, 1062, 30)),
    ("cpsc2018", {}, (1012, 113, 1)),
    ("roahd", {}, (90, 10, 1)),
    ("mri_sequences_from_volumes", {}, (208 * 80, 52 * 80, 80)),
    ("fastmri", {}, (34_742, 7_135, 50)),
    ("msd", {}, (5184, 2560, 64)),  # the paper's 81, 10 and 40 volumes
    (
        "msd",
        {"task": "brain", "validation_share": 0.0, "max_per_patient": 5},
        (336 * 5, 148 * 64, 5),
    ),
]


@pytest.mark.parametrize(("name", "changes", "counts"), RELEASED)
def test_without_files_the_counts_are_the_releases(
    tmp_path: Path, name: str, changes: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    info = dataset(name, **changes).info(tmp_path)
    assert (info.train, info.test, info.examples_per_patient, info.found) == (*counts, False)
