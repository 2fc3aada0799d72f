"""Every data set's info is what it then loads, and is known without its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.helpers import dataset
from zdp_bench import assets
from zdp_bench.data import Dataset, DatasetInfo, Splits
from zdp_bench.errors import UserError

# What owns examples where no patient is known.
UNITS = {
    **dict.fromkeys(("mnist", "fashion_mnist", "phasemnist", "phase_digits"), "image"),
    **dict.fromkeys(("cifar10", "public_kspace", "synthetic_images"), "image"),
    **dict.fromkeys(
        (
            *("msd", "msd_volumes"),
            *("kspace_from_volumes", "mri_sequences_from_volumes"),
        ),
        "volume",
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
    ("msd", {"test_per_patient": 64}, (5184, 2560, 64)),  # the paper's 81, 10 and 40 volumes
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


def assert_described(of: Dataset, root: Path) -> tuple[DatasetInfo, Splits]:
    """Hold the info to what is loaded: `validate` counts ε by it."""
    info, splits = of.info(root), of.load(root)
    assert info.found
    # The base class describes what was loaded.
    loaded = type("Loaded", (Dataset,), {"load": lambda self, root: splits})().info(root)
    assert replace(info, classes={}) == loaded  # no loaded data has names of classes
    inputs, _ = splits.train.batch(torch.arange(2))
    assert tuple(inputs.shape[1:]) == info.input_shape
    return info, splits


K_SPACE = {"height": 8, "width": 8, "slices": 2}
LOADED: list[tuple[str, dict[str, Any]]] = [
    ("msd_volumes", {"task": "liver", "shape": [8, 9, 5], "test_share": 0.4}),
    ("cpsc2018", {"test_share": 0.3}),
    ("speech_commands", {"words": ["yes", "no"], "clips_per_word": 8, "split": "speaker"}),
    ("speech_commands", {"words": ["yes", "no"], "clips_per_word": 8, "split": "random"}),
    ("chest_xray", {"size": 16, "max_per_patient": 2, "split_seed": 1}),
    ("msd", {"size": 16, "max_per_patient": 5, "test_per_patient": 7, "validation_share": 0.2}),
    ("mri_sequences", {"size": 16, "slices": 3, "validation_patients": 1}),
    ("mri_sequences_from_volumes", {"size": 16, "slices": 3}),
    ("fastmri", {**K_SPACE, "unit": "slice"}),
    ("fastmri", {**K_SPACE, "unit": "volume"}),
    ("kspace_from_volumes", {**K_SPACE, "axis": 0, "test_share": 0.4, "split_seed": 1}),
    ("kspace_from_volumes", {**K_SPACE, "axis": 2, "test_share": 0.4, "split_seed": 1}),
    (
        "kspace_from_volumes",
        {**K_SPACE, "axis": 2, "test_share": 0.4, "split_seed": 1, "unit": "volume"},
    ),
]


@pytest.mark.parametrize(("name", "changes"), LOADED)
def test_the_info_is_what_is_loaded(
    small_root: Path, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    if writes := name == "kspace_from_volumes":
        (tmp_path / "Task04_Hippocampus").symlink_to(small_root / "Task04_Hippocampus")
    assert_described(dataset(name, **changes), tmp_path if writes else small_root)


def test_an_excerpt_is_counted_and_not_the_release(root: Path) -> None:
    """Eight recordings are eight examples: the release's 1,125 would understate ε thirty-fold."""
    few = dataset("cpsc2018", test_share=0.3, bad_examples="skip")
    info, _ = assert_described(few, root)
    assert (info.train, info.test) == (5, 3)
    with pytest.raises(UserError, match="0 recordings of RBBB and 0 of AF"):
        dataset("cpsc2018", positive="AF", negative="RBBB").info(root)
    (root / "CPSC2018" / "cinc2020_wfdb" / "S0002.mat").write_bytes(b"cut")
    assert assert_described(few, root)[0].train == 4


REAL: dict[str, dict[str, Any]] = {
    "cpsc2018": {"positive": "RBBB", "negative": "AF", "test_share": 0.3},
    "msd": {"task": "hippocampus", "size": 16},
}


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", REAL)
def test_the_real_files_are_what_their_info_says(name: str, data_root: Path) -> None:
    real = dataset(name, **REAL[name])
    if not real.info(data_root).found:
        pytest.skip(f"{name} is not under the data root")
    assert_described(real, data_root)
