"""Every data set can be described before it is read, and its outline is what its adapter then makes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import write_mini_mnist
from zdp_bench import assets
from zdp_bench.data import DatasetInfo, Splits, chest_xray, cifar10, speech_commands
from zdp_bench.data.formats import nifti
from zdp_bench.data.synthetic import ecg, films, speech
from zdp_bench.errors import UserError
from zdp_bench.registry import lookup, names


def options(name: str, **changes: Any) -> dict[str, Any]:
    body = assets.read_yaml(assets.group(assets.DATASETS)[name])
    return {key: value for key, value in body.items() if key not in ("name", "card")} | changes


# What a record, or several, belong to where no patient is known.
UNITS = {
    **dict.fromkeys(
        ("mnist", "fashion_mnist", "phasemnist", "phase_digits", "cifar10", "synthetic_images"),
        "image",
    ),
    **dict.fromkeys(
        ("msd", "msd_synthetic", "kspace_from_volumes", "mri_sequences_from_volumes"), "volume"
    ),
    **dict.fromkeys(("cpsc2018", "cpsc2018_synthetic"), "recording"),
    **dict.fromkeys(("speech_commands", "speech_commands_synthetic"), "speaker"),
}


@pytest.mark.parametrize("name", sorted(assets.group(assets.DATASETS)))
def test_every_data_set_has_an_outline(name: str, tmp_path: Path) -> None:
    assert name in names("outline")
    said: DatasetInfo = lookup("outline", name)(tmp_path, **options(name))
    assert said.train > 0 < said.test
    assert 1 <= said.examples_per_patient <= said.train
    assert said.unit == UNITS.get(name, "patient")


SMALL: dict[str, dict[str, Any]] = {
    "phase_digits": {"test_share": 0.3},
    "synthetic_images": {"train": 30, "test": 20},
    "cpsc2018_synthetic": {"count": 45, "seconds": 1.1},
    "speech_commands_synthetic": {
        "words": ["yes", "no"],
        "clips_per_word": 60,
        "frame_step": 256,
        "grid": [9, 5],
    },
    "chest_xray_synthetic": {"count": 60, "size": 16},
    "mri_sequences_synthetic": {"patients": 4, "size": 16},
    "msd_synthetic": {"volumes": 5, "size": 16, "test_share": 0.4},
    "kspace_phantom": {"patients": 5, "height": 8, "width": 10, "unit": "volume"},
}


def held_against(name: str, root: Path, **changes: Any) -> DatasetInfo:
    """What an outline says must be what its adapter then makes; `validate` counts ε by it."""
    chosen = options(name, **changes)
    said: DatasetInfo = lookup("outline", name)(root, **chosen)
    assert said.found
    made: Splits = lookup("dataset", name)(root, **chosen)
    inputs, targets = made.train.batch(torch.arange(1))
    assert (said.train, said.test) == (len(made.train), len(made.test))
    assert said.validation == len(made.validation or ())
    assert (said.examples_per_patient, said.unit) == (made.examples_per_patient, made.unit)
    assert (said.input_shape, said.outputs) == (tuple(made.input_shape), made.outputs)
    assert (said.dtype, said.target_dtype) == (inputs.dtype, targets.dtype)
    assert (tuple(inputs.shape[1:]), tuple(targets.shape[1:])) == (
        said.input_shape,
        said.target_shape,
    )
    return said


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", SMALL)
def test_an_outline_is_what_the_adapter_makes(name: str, tmp_path: Path) -> None:
    held_against(name, tmp_path, **SMALL[name])


def test_an_excerpt_of_the_recordings_is_counted_and_not_the_releases(tmp_path: Path) -> None:
    """Five recordings are five records: the release's 1,125 would understate ε thirty-fold."""
    ecg.write_set(tmp_path / "CPSC2018", 5, 2.0, seed=1)
    said = held_against("cpsc2018", tmp_path, test_share=0.3)
    assert (said.train, said.test) == (3, 2)
    with pytest.raises(UserError, match="0 recordings of RBBB and 0 of AF"):
        lookup("outline", "cpsc2018")(
            tmp_path, **options("cpsc2018", positive="AF", negative="RBBB")
        )
    (tmp_path / "CPSC2018" / "cinc2020_wfdb" / "S0002.mat").write_bytes(b"cut")
    assert held_against("cpsc2018", tmp_path, test_share=0.3, bad_records="skip").train == 2


def test_the_releases_numbers_are_those_of_the_two_diagnoses(tmp_path: Path) -> None:
    (tmp_path / "CPSC2018" / "cinc2020_wfdb").mkdir(parents=True)  # empty
    numbers = {}
    for word in ("LBBB", "AF"):
        said = lookup("outline", "cpsc2018")(tmp_path, **options("cpsc2018", positive=word))
        assert not said.found
        numbers[word] = (said.train, said.test)
    assert numbers == {"LBBB": (1012, 113), "AF": (1814, 202)}


@pytest.mark.parametrize("split", ["speaker", "random"])
def test_an_excerpt_of_the_clips_is_counted(tmp_path: Path, split: str) -> None:
    speech.write_set(tmp_path / speech_commands.FOLDER, ["yes", "no"], 12, seed=0)
    held_against("speech_commands", tmp_path, words=["yes", "no"], clips_per_word=10, split=split)


def test_an_excerpt_of_the_films_is_counted_without_its_copies(tmp_path: Path) -> None:
    folder = tmp_path / chest_xray.FOLDER
    films.write_set(folder, 60, 0.3, seed=1)
    one = next((folder / "train" / "PNEUMONIA").iterdir())
    shutil.copy(one, one.with_name("person999_virus_1.jpeg"))
    held_against("chest_xray", tmp_path, size=16)


@pytest.mark.parametrize("unit", ["slice", "volume"])
def test_an_excerpt_of_the_volumes_is_counted(tmp_path: Path, unit: str) -> None:
    phantom = options("kspace_phantom", patients=6, slices=3, height=8, width=10)
    lookup("dataset", "kspace_phantom")(tmp_path, **phantom)
    next((tmp_path / "synthetic").iterdir()).rename(tmp_path / "fastMRI")
    held_against("fastmri", tmp_path, height=8, width=9, unit=unit, slices=2)
    (tmp_path / "volumes").mkdir()
    for number, shape in enumerate(
        [(9, 10, 11), (12, 9, 4), (20, 14, 9), (9, 9, 9), (8, 4, 9)]
    ):  # some are too small
        nifti.write(
            tmp_path / "volumes" / f"v{number}.nii.gz",
            np.random.default_rng(number).random(shape),
            (1.0, 1.0, 1.0),
        )
    for axis in (0, 2):
        chosen = {
            "folder": "volumes",
            "height": 9,
            "width": 9,
            "axis": axis,
            "test_share": 0.4,
            "split_seed": 1,
        }
        held_against("kspace_from_volumes", tmp_path, **chosen, unit=unit, slices=2)


def test_other_digits_and_pictures_are_counted(tmp_path: Path) -> None:
    write_mini_mnist(tmp_path)
    for name in ("mnist", "phasemnist"):
        held_against(name, tmp_path, check=False)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name in cifar10.BATCHES:
        record = bytes(cifar10.RECORD)
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(3 * record)
    assert held_against("cifar10", tmp_path, check=False).train == 15


REAL: dict[str, dict[str, Any]] = {
    "mnist": {},
    "phasemnist": {},
    "cifar10": {"check": False},
    "cpsc2018": {"positive": "RBBB"},
    "speech_commands": {"words": ["yes", "no"]},
    "chest_xray": {"size": 16},
    "msd": {"task": "hippocampus", "size": 16},
    "kspace_from_volumes": {},
    "mri_sequences_from_volumes": {"size": 8, "slices": 2},
}


@pytest.mark.real_data
@pytest.mark.parametrize("name", REAL)
def test_the_real_files_are_what_their_outline_says(name: str, data_root: Path) -> None:
    chosen = options(name, **REAL[name])
    if not lookup("outline", name)(data_root, **chosen).found:
        pytest.skip(f"{name} is not under the data root")
    if name == "speech_commands":
        chosen["words"] = sorted(
            p.name for p in (data_root / speech_commands.FOLDER).iterdir() if p.is_dir()
        )[-2:]
    held_against(name, data_root, **{key: chosen[key] for key in REAL[name]})
