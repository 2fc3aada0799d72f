"""Stand-ins are written once, the same each time, and hold what a model can learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.helpers import dataset
from zdp_bench.config import configured
from zdp_bench.data.fastmri import KSpaceExamples
from zdp_bench.errors import UserError
from zdp_bench.extras.federated import simulation
from zdp_bench.extras.standins.ecg import Cpsc2018Synthetic
from zdp_bench.extras.standins.pictures import ChestXraySynthetic
from zdp_bench.extras.standins.scans import KSpacePhantom, MriSequencesSynthetic, MsdSynthetic
from zdp_bench.extras.standins.speech import SpeechCommandsSynthetic
from zdp_bench.training.progress import Silent
from zdp_bench.training.run import run

WORDS = ["yes", "no"]


def test_the_synthetic_films_can_be_told_apart(tmp_path: Path) -> None:
    splits = ChestXraySynthetic(count=80, size=24, test_share=0.4).load(tmp_path)
    assert splits.provenance == "synthetic"
    inputs, targets = splits.test.batch(torch.arange(len(splits.test)))
    lungs = (
        inputs[:, 0, 6:18].flatten(1).std(dim=1)
    )  # clouds lower the contrast of dark lungs against the body
    order = lungs.argsort()
    assert (
        targets[order[: len(order) // 2]].float().mean()
        > targets[order[len(order) // 2 :]].float().mean()
    )


def test_the_synthetic_set_is_written_once_and_learnable(tmp_path: Path) -> None:
    first, again = (Cpsc2018Synthetic(count=20).load(tmp_path) for _ in range(2))
    assert first.digest == again.digest
    assert first.provenance == "synthetic"
    assert len(list((tmp_path / "synthetic").iterdir())) == 1
    power = first.train.inputs.abs()[:, 10:30].sum(
        1
    )  # a narrow QRS has more above 10 Hz than a broad one
    assert power[first.train.targets == 0].mean() > 1.3 * power[first.train.targets == 1].mean()


def test_the_synthetic_set_is_read_by_the_real_adapter(tmp_path: Path) -> None:
    splits = MriSequencesSynthetic(patients=4, size=16, slices=2, test_share=0.25).load(tmp_path)
    assert (len(splits.train), len(splits.test), splits.provenance) == (3 * 8, 8, "synthetic")
    assert len(list((tmp_path / "synthetic").rglob("BRATS_*.nii.gz"))) == 4


def test_the_synthetic_liver_is_brighter_than_what_is_round_it(tmp_path: Path) -> None:
    splits = MsdSynthetic(volumes=4, size=32, test_share=0.25, validation_share=0.0).load(tmp_path)
    inputs, masks = splits.train.batch(torch.arange(len(splits.train)))
    body = (inputs[:, 0] > -1.5) & (masks == 0)
    assert inputs[:, 0][masks > 0].mean() > inputs[:, 0][body].mean() + 0.3
    assert splits.validation is None


def test_two_lists_of_as_many_synthetic_words_are_two_sets(tmp_path: Path) -> None:
    for words in (["yes", "no"], ["up", "down"], ["no", "yes"]):
        made = SpeechCommandsSynthetic(words=words, clips_per_word=4, test_share=0.5).load(tmp_path)
        assert len(made.train) + len(made.test) == 8
    assert (
        len(list((tmp_path / "synthetic").iterdir())) == 3
    )  # the order, too, says what a word sounds like


def test_the_synthetic_words_can_be_told_apart(tmp_path: Path) -> None:
    splits = SpeechCommandsSynthetic(words=WORDS, clips_per_word=20, test_share=0.3).load(tmp_path)
    assert splits.provenance == "synthetic"

    def peakedness(
        examples: Any,
    ) -> torch.Tensor:  # 'no' holds its formants still, 'yes' glides through a band: [n]
        shape = torch.nn.functional.normalize(examples.inputs[:, 0].abs().mean(dim=1))  # [n, 129]
        return shape.pow(4).sum(dim=1)

    yes, no = (peakedness(splits.train)[splits.train.targets == label].mean() for label in (0, 1))
    guessed = (peakedness(splits.test) - yes).abs() > (peakedness(splits.test) - no).abs()
    assert (guessed.long() == splits.test.targets).float().mean() > 0.8


def test_the_phantom_is_read_as_fastmri_is_and_is_the_same_each_time(tmp_path: Path) -> None:
    splits = KSpacePhantom(patients=4, test_share=0.25).load(tmp_path / "a")
    again = KSpacePhantom(patients=4, test_share=0.25).load(tmp_path / "b")
    assert splits.provenance == "synthetic"
    assert splits.examples_per_patient == 2
    assert (len(splits.train), len(splits.test)) == (6, 2)
    one, two = splits.test, again.test
    assert isinstance(one, KSpaceExamples)
    assert isinstance(two, KSpaceExamples)
    inputs, targets = one.batch(torch.arange(2))
    assert torch.equal(targets, two.batch(torch.arange(2))[1])
    reference, zero_filled = targets.unbind(dim=1)
    assert (
        reference[:, 16, 20].min() > 3 * reference[:, 0, 0].max()
    )  # a head in the middle, air in the corner
    assert (reference - zero_filled).square().sum() > 0.02 * reference.square().sum()
    assert inputs.angle().std() > 0.3  # the coil's phase
    assert (
        KSpacePhantom(patients=4, test_share=0.25, seed=1).load(tmp_path / "a").digest
        != splits.digest
    )


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("kspace_phantom", {"patients": 10**9}, "dataset.patients, slices, height and width: "),
        ("kspace_phantom", {"height": 10**6, "width": 10**6}, "makes about 240,000 GB"),
        ("chest_xray_synthetic", {"count": 10**9}, "dataset.count: makes about 65,536 GB"),
        ("speech_commands_synthetic", {"clips_per_word": 10**9}, "dataset.clips_per_word: "),
        ("synthetic_images", {"shape": [8, 8], "train": 10**9}, "makes about 1,024 GB"),
        ("synthetic_images", {"shape": [10**6, 10**6]}, "at most 32 GB are generated"),
    ],
)
def test_an_absurd_size_is_refused_before_the_work(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        dataset(name, **options)


def test_more_nodes_than_patients_are_refused_before_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "server_app", lambda *_: pytest.fail("it began"))
    words = ["recipe=quickstart", "federated.nodes=100000", f"paths.results={tmp_path}"]
    with pytest.raises(UserError, match=r"federated\.nodes=100000: the training set has only"):
        run(configured(words), Silent(), runner=simulation.run_simulated)
