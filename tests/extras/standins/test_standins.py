"""Stand-ins are written once, the same each time, and hold what a model can learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.helpers import dataset
from zdp_bench.errors import UserError
from zdp_bench.extras.standins.ecg import Cpsc2018Synthetic
from zdp_bench.extras.standins.pictures import ChestXraySynthetic
from zdp_bench.extras.standins.speech import SpeechCommandsSynthetic

WORDS = ["yes", "no"]


def test_the_synthetic_films_can_be_told_apart(tmp_path: Path) -> None:
    splits = ChestXraySynthetic(count=80, size=24, test_share=0.4).load(tmp_path)
    assert splits.provenance == "synthetic"
    inputs, targets = splits.test.batch(torch.arange(len(splits.test)))
    bright = inputs.flatten(1).mean(dim=1)
    assert bright[targets == 1].mean() > bright[targets == 0].mean() + bright.std() / 2


def test_the_synthetic_set_is_written_once_and_learnable(tmp_path: Path) -> None:
    first, again = (Cpsc2018Synthetic(count=20).load(tmp_path) for _ in range(2))
    assert first.digest == again.digest
    assert first.provenance == "synthetic"
    assert len(list((tmp_path / "synthetic").iterdir())) == 1
    power = first.train.inputs.abs()[:, 10:30].sum(
        1
    )  # a narrow QRS has more above 10 Hz than a broad one
    assert power[first.train.targets == 0].mean() > 1.3 * power[first.train.targets == 1].mean()


def test_two_lists_of_as_many_synthetic_words_are_two_sets(tmp_path: Path) -> None:
    for words in (["yes", "no"], ["up", "down"], ["no", "yes"]):
        made = SpeechCommandsSynthetic(words=words, clips_per_word=4, test_share=0.5).load(tmp_path)
        assert len(made.train) + len(made.test) == 8
    assert (
        len(list((tmp_path / "synthetic").iterdir())) == 3
    )  # the order, too, says what a word sounds like


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("kspace_phantom", {"patients": 10**9}, "dataset.patients, slices, height and width: "),
        ("chest_xray_synthetic", {"count": 10**9}, "dataset.count: makes about 65,536 GB"),
        ("speech_commands_synthetic", {"clips_per_word": 10**9}, "dataset.clips_per_word: "),
        ("synthetic_images", {"shape": [10**6, 10**6]}, "at most 32 GB are generated"),
    ],
)
def test_an_absurd_size_is_refused_before_the_work(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        dataset(name, **options)
