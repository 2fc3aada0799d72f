"""Lesions own their pictures: no lesion is in two parts, and each has the diagnosis of its row."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import copy_folder, dataset
from zdp_bench.data.ham10000 import DIAGNOSES, FOLDER, Ham10000, list_pictures
from zdp_bench.representations import targets_of


def test_a_lesion_s_pictures_stay_together() -> None:
    lesions = [f"HAM_{number // 3}" for number in range(90)]
    for seed in range(3):
        rows = Ham10000(validation_share=0.25, split_seed=seed).split(lesions)
        parts = [{lesions[row] for row in part} for part in rows.values()]
        assert all(parts)
        assert sum(map(len, parts)) == 30
        assert sorted(np.concatenate([*rows.values()])) == [*range(90)]


def test_labels_are_those_of_the_metadata(small_root: Path) -> None:
    diagnoses = {of.path.name: of.diagnosis for of in list_pictures(small_root / FOLDER)}
    counts = {name: [*diagnoses.values()].count(name) for name in DIAGNOSES}
    melanoma = dataset("ham10000", size=16).load(small_root)
    labels = [targets_of(part) for part in (melanoma.train, melanoma.test)]
    assert sum(int(part.sum()) for part in labels) == counts["mel"]
    every = dataset("ham10000", size=16, target="diagnosis").load(small_root)
    assert every.outputs == len(DIAGNOSES)
    targets = np.concatenate([targets_of(part) for part in (every.train, every.test)])
    assert np.bincount(targets, minlength=7).tolist() == [counts[name] for name in DIAGNOSES]


def test_a_picture_of_two_lesions_is_told(
    small_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One lesion that counts as two has a larger ε. Two pictures of one lesion may be the same."""
    root = copy_folder(small_root, tmp_path, FOLDER)
    by_lesion = {of.lesion: of.path for of in list_pictures(root / FOLDER)}
    of = dataset("ham10000", size=16)
    notes = of.load(root).notes
    assert "has the same content as" not in caplog.text
    first, second, third, *_ = by_lesion.values()
    shutil.copyfile(first, second)
    shutil.copyfile(first, third)
    assert of.load(root).notes == notes  # a record does not state what training examples are
    assert caplog.text.count("has the same content as") == 1


@pytest.mark.slow
@pytest.mark.real_data
def test_the_real_pictures(data_root: Path) -> None:
    if not (data_root / FOLDER).is_dir():
        pytest.skip(f"{data_root / FOLDER} is missing")
    splits = dataset("ham10000", size=16).load(data_root)
    assert splits.unit == "lesion"
