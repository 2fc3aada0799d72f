"""Stand-ins are written once, the same each time, and hold what a model can learn."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.conftest import SMALL
from tests.data.helpers import dataset
from zdp_bench.data import Splits
from zdp_bench.errors import UserError

STAND_INS = {**SMALL, "msd_volumes_synthetic": {"volumes": 5, "shape": [8, 8, 6]}}


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_is_written_once_and_read_as_its_release(name: str, tmp_path: Path) -> None:
    options = {**STAND_INS[name], "seed": 2}
    first, again = (dataset(name, **options).load(tmp_path) for _ in range(2))
    assert first.digest == again.digest
    assert first.provenance == "synthetic"
    assert len(list((tmp_path / "synthetic").iterdir())) == 1
    other = dataset(name, **options | {"seed": 3}).load(tmp_path)
    assert other.digest != first.digest
    assert len(list((tmp_path / "synthetic").iterdir())) == 2
    assert dataset(name, **options).info(tmp_path).found


@pytest.mark.parametrize("name", ["msd_synthetic", "msd_volumes_synthetic"])
@pytest.mark.parametrize("task", ["spleen", "brain"])
def test_an_abdomen_is_of_the_task_that_is_asked_for(name: str, task: str, tmp_path: Path) -> None:
    """Only files of the liver task were written."""
    assert len(dataset(name, **STAND_INS[name], task=task).load(tmp_path).train)


def test_more_pictures_than_memory_holds_are_refused() -> None:
    """They took more than 16 GB."""
    with pytest.raises(UserError, match="makes more than 200,000,000 numbers"):
        dataset("synthetic_images", shape=[3, 999_999], train=100, test=100)
    assert dataset("synthetic_images", shape=[3, 224, 224])


def test_generated_patients_are_not_called_a_release(tmp_path: Path) -> None:
    options = STAND_INS["mri_sequences_synthetic"] | {"validation_patients": 99}
    with pytest.raises(UserError, match=r"less than the number of test patients, \d+\.$"):
        dataset("mri_sequences_synthetic", **options).load(tmp_path)


def _differ(splits: Splits, measure: Any) -> float:
    """Return how far the classes' means of a measure lie apart, in its deviations."""
    inputs, targets = splits.test.batch(torch.arange(len(splits.test)))
    of = measure(inputs)
    return float((of[targets == 1].mean() - of[targets == 0].mean()) / of.std())


def test_films_and_beats_can_be_told_apart(tmp_path: Path) -> None:
    films = dataset("chest_xray_synthetic", count=80, size=24).load(tmp_path)
    assert _differ(films, lambda x: x.flatten(1).mean(dim=1)) > 0.5
    beats = dataset("cpsc2018_synthetic", count=40, test_share=0.5).load(tmp_path)
    assert _differ(beats, lambda x: x.abs()[:, 10:30].sum(1)) < -0.5  # a narrow QRS has more there
