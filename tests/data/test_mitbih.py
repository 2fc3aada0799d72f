"""MIT-BIH: which beats are used, how patients are split, and that each fold holds others out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.helpers import assert_refused
from zdp_bench.data import Examples, Splits
from zdp_bench.data.mitbih import BINS, FOLDER, MitBih, group_by_patient, list_recordings, transform

SMALL: dict[str, Any] = {"test_share": 0.4, "normal_per_patient": 5, "blocked_per_patient": 4}


def parts_of(splits: Splits) -> tuple[Examples, Examples]:
    train, test = splits.train, splits.test
    assert isinstance(train, Examples)
    assert isinstance(test, Examples)
    return train, test


def test_a_beat_is_what_the_docstring_says() -> None:
    window = np.random.default_rng(0).normal(size=128)
    slopes = np.diff((window - window.mean()) / window.std())
    slopes /= slopes.std()
    moduli = [
        abs(sum(slopes[t] * np.exp(-2j * np.pi * k * t / 128) for t in range(127)))
        for k in range(1, BINS + 1)
    ]
    logs = np.log(1 + np.array(moduli))
    logs -= logs.mean()
    expected = logs / np.sqrt((logs**2).mean())
    (beat,) = transform(window[None])
    np.testing.assert_allclose(beat, expected, rtol=1e-5, atol=1e-6)
    (louder,) = transform(3 * window[None] + 100)
    np.testing.assert_allclose(louder, beat, rtol=1e-4, atol=1e-5)
    assert not transform(np.full((1, 128), 7.0)).any()


def test_beats_of_a_patient_are_bounded_and_on_one_side(small_root: Path) -> None:
    """201 and 202 are one person; 100's other lead, V and edge beats, and 102 are left out."""
    train, test = parts_of(MitBih(**SMALL).load(small_root))
    assert train.groups is not None
    assert test.groups is not None
    assert not set(train.groups.tolist()) & set(test.groups.tolist())
    every = torch.cat([train.groups, test.groups])
    labels = torch.cat([train.targets, test.targets])
    assert len(every.unique()) == 9  # 5 with N beats, of 6 recordings; 4 with L beats
    assert every[labels == 0].bincount().max() == 5
    assert every[labels == 1].bincount().max() == 4
    assert test.targets.sum() == 4
    assert (test.targets == 0).sum() == 10
    splits = MitBih(**SMALL | {"blocked_per_patient": 1000}).load(small_root)
    assert splits.examples_per_patient == 8


def test_each_fold_holds_another_patient_out(small_root: Path) -> None:
    held = []
    for fold in range(4):
        train, test = parts_of(MitBih(fold=fold, **SMALL).load(small_root))
        assert test.groups is not None
        held.append(set(test.groups[test.targets == 1].tolist()))
        assert len(held[-1]) == 1
        assert train.targets.sum() == 12
    assert len(set.union(*held)) == 4
    other = MitBih(split_seed=1, **SMALL).load(small_root)
    assert other.digest != MitBih(**SMALL).load(small_root).digest
    assert other.provenance == "derived"
    assert other.notes.startswith("not the whole release")


def test_line_ends_of_headers_change_no_digest(small_root: Path, root: Path) -> None:
    before = MitBih(**SMALL).load(small_root).digest
    header = root / FOLDER / "100.hea"
    header.write_bytes(header.read_bytes().replace(b"\n", b"\r\n"))
    assert MitBih(**SMALL).load(root).digest == before


def test_too_few_patients_with_blocked_beats_are_refused(root: Path) -> None:
    for path in (root / FOLDER).glob("2[01][74].*"):
        path.unlink()
    assert_refused(lambda: MitBih(fold=3, **SMALL).load(root), FOLDER, "of 2 patients.*fold=3")
    assert_refused(lambda: MitBih(fold=3, **SMALL).info(root), FOLDER, "of 2 patients.*fold=3")


@pytest.mark.slow
@pytest.mark.real_data
def test_the_real_recordings(data_root: Path) -> None:
    if not list_recordings(data_root / FOLDER):
        pytest.skip("MIT-BIH is not under the data root")
    splits = MitBih(fold=2).load(data_root)
    train, test = parts_of(splits)
    assert splits.provenance == "official"
    assert (len(train), len(test), splits.examples_per_patient) == (5800, 1900, 1000)
    assert (int(train.targets.sum()), int(test.targets.sum())) == (3000, 1000)
    assert train.groups is not None
    assert test.groups is not None
    assert (len(train.groups.unique()), len(test.groups.unique())) == (31, 10)
    patients = group_by_patient(data_root / FOLDER, list_recordings(data_root / FOLDER))
    normal = sum(len(one.normal) for members in patients.values() for one in members)
    blocked = {
        name: count
        for name, members in patients.items()
        if (count := sum(len(one.blocked) for one in members))
    }
    assert normal == 74_780  # 75,052 but 262 without MLII, and those at the edges
    assert blocked == {"109": 2492, "111": 2123, "207": 1457, "214": 2002}
