"""roahd's ECGs: folds of whole people, and a diagnosis that its name states too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.helpers import write_roahd
from zdp_bench.data.roahd import FOLDER, FOLDS, Roahd
from zdp_bench.errors import UserError


def test_ten_folds_test_each_person_once_and_as_many_of_either_diagnosis() -> None:
    targets = [0, 1] * 50
    tested = []
    for fold in range(FOLDS):
        train, test = Roahd(fold=fold).split(targets)
        assert sum(targets[person] for person in test) == len(test) / 2 == 5
        assert {*train} & {*test} == set()
        tested += test.tolist()
    assert sorted(tested) == list(range(100))
    moved = Roahd(split_seed=1).split(targets)[1]
    assert moved.tolist() != Roahd().split(targets)[1].tolist()


def test_a_diagnosis_that_the_name_contradicts_is_refused(tmp_path: Path) -> None:
    write_roahd(tmp_path / FOLDER)
    header = tmp_path / FOLDER / "RL0002.hea"
    header.write_text(header.read_text().replace("164909002", "426783006"))
    with pytest.raises(UserError, match=r"RL0002\.hea: has diagnosis .*not 164909002"):
        Roahd().load(tmp_path)


def test_too_few_people_for_a_fold_are_refused(tmp_path: Path) -> None:
    write_roahd(tmp_path / FOLDER, people=3)
    with pytest.raises(UserError, match="3 people of a diagnosis"):
        Roahd(fold=3).load(tmp_path)
