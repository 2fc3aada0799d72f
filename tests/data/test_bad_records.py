"""`dataset.bad_records`: one damaged file ends the run with a name, or is skipped and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.helpers import copy_folder
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest
from zdp_bench.data import Dataset
from zdp_bench.data.bad_records import note_skipped
from zdp_bench.data.chest_xray import FOLDER as FILMS
from zdp_bench.data.chest_xray import ChestXray
from zdp_bench.data.mitbih import FOLDER as BEATS
from zdp_bench.data.mitbih import MitBih
from zdp_bench.data.msd import Msd
from zdp_bench.data.speech_commands import FOLDER as CLIPS
from zdp_bench.data.speech_commands import SpeechCommands
from zdp_bench.errors import UserError

Make = Callable[..., Dataset]


def films(**options: str) -> Dataset:
    return ChestXray(size=16, validation_share=0.1, **options)  # type: ignore[arg-type]


def clips(**options: str) -> Dataset:
    return SpeechCommands(words=["yes", "no"], test_share=0.3, **options)  # type: ignore[arg-type]


def beats(**options: str) -> Dataset:
    return MitBih(test_share=0.4, **options)  # type: ignore[arg-type]


def volumes(**options: str) -> Dataset:
    return Msd(size=32, validation_share=0.0, test_share=0.4, **options)  # type: ignore[arg-type]


READERS = [
    pytest.param(films, FILMS, "train/*/*.jpeg", id="chest_xray"),
    pytest.param(clips, CLIPS, "yes/*.wav", id="speech_commands"),
    pytest.param(beats, BEATS, "100.dat", id="mitbih"),
    pytest.param(volumes, Path("Task03_Liver"), "imagesTr/*", id="msd"),
]


def damage(root: Path, folder: Path, pattern: str) -> Path:
    """Cut the last file of the pattern to half its bytes."""
    path = sorted((root / folder).glob(pattern))[-1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


@pytest.mark.parametrize(("make", "folder", "pattern"), READERS)
def test_a_damaged_file_is_refused_by_name_or_skipped_with_a_count(
    make: Make,
    folder: Path,
    pattern: str,
    small_root: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = copy_folder(small_root, tmp_path, folder)
    whole = make(bad_records="skip").load(root)
    assert "skipped" not in whole.notes
    assert whole.digest == make().load(root).digest  # nothing was left out
    path = damage(root, folder, pattern)
    with pytest.raises(UserError) as caught:
        make().load(root)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith("dataset.bad_records=skip leaves such files out.")
    with caplog.at_level(logging.WARNING):
        splits = make(bad_records="skip").load(root)
    assert splits.notes.count("1 unusable skipped") == 1
    assert splits.provenance == "derived"
    assert splits.digest != whole.digest
    assert [str(path) in text for text in caplog.messages] == [True]
    left = sum(map(len, (splits.train, splits.test, splits.validation or ())))
    assert left < sum(map(len, (whole.train, whole.test, whole.validation or ())))
    info = make(bad_records="skip").info(root)
    assert (info.train, info.test) == (len(splits.train), len(splits.test))


@pytest.mark.parametrize(("make", "folder", "pattern"), READERS)
def test_a_file_that_leads_elsewhere_or_is_missing_in_all_is_not_skipped(
    make: Make, folder: Path, pattern: str, tmp_path: Path
) -> None:
    """Skipping is for single files: without any, there is no data set."""
    with pytest.raises(UserError, match=r"expects|finds no recordings"):
        make(bad_records="skip").load(tmp_path)


@pytest.mark.parametrize("name", ["chest_xray", "speech_commands", "mitbih", "msd"])
def test_the_key_changes_no_digest_of_an_older_record(name: str) -> None:
    words = ["recipe=quickstart", f"dataset={name}", "model=lenet5"]
    without, null, skip = (
        experiment_digest(parse(compose([*words, *more])))
        for more in ([], ["dataset.bad_records=null"], ["dataset.bad_records=skip"])
    )
    assert without == null != skip


def test_a_count_of_none_says_nothing() -> None:
    assert note_skipped(3, 3) == ""
    assert note_skipped(1_003, 2) == "1,001 unusable skipped"
