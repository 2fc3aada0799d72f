"""Options that mean nothing are refused with their key, by `validate` and by a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import dataset
from zdp_bench.errors import UserError

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("cpsc2018", {"length": 0}, "dataset.length=0: must lie between 1 and"),
    ("cpsc2018", {"fft_length": -1}, "dataset.fft_length=-1: must lie between 1 and"),
    ("cpsc2018", {"test_share": 0}, "dataset.test_share=0: must lie between 0 and 1"),
    ("cpsc2018", {"test_share": 0.99}, "dataset.test_share=0.99: of 4 recordings of Normal"),
    ("cpsc2018", {"negative": "LBBB"}, "dataset.negative=LBBB: must be another"),
    ("cpsc2018", {"positive": "LBB"}, "Did you mean 'LBBB'"),
    ("mitbih", {"fold": 4}, "dataset.fold=4: must lie between 0 and 3"),
    ("mitbih", {"test_share": 1}, "dataset.test_share=1: must lie between 0 and 1"),
    ("mitbih", {"test_share": 0.05}, "dataset.test_share=0.05: leaves 5 patients with N beats"),
    ("mitbih", {"normal_per_patient": 0}, "dataset.normal_per_patient=0: must be at least 1"),
    ("mitbih", {"blocked_per_patient": 0}, "dataset.blocked_per_patient=0: must be at least 1"),
    ("cpsc2018_synthetic", {"seconds": 0}, "dataset.seconds=0: must be positive"),
    ("cpsc2018_synthetic", {"count": 0}, "dataset.count=0: must lie between 2 and"),
    ("cpsc2018_synthetic", {"test_share": 1}, "dataset.test_share=1: must lie between"),
    ("chest_xray", {"size": 4}, "dataset.size=4: must lie between 8 and 1024"),
    ("chest_xray_synthetic", {"count": 0}, "dataset.count=0: must be at least 50"),
    (
        "speech_commands",
        {"clips_per_word": 0, "words": ["yes", "no"]},
        "dataset.clips_per_word=0: must be at least 1",
    ),
    ("speech_commands_synthetic", {"words": ["yes"]}, "dataset.words=.*two different"),
    ("kspace_phantom", {"height": 6}, "dataset.height=6: must be at least 7"),
    ("kspace_phantom", {"patients": 1}, "dataset.patients=1: must be at least 2"),
    ("kspace_phantom", {"test_share": 0.99}, "dataset.test_share=0.99: leaves 0 patients to train"),
    ("kspace_phantom", {"slices": 0}, "dataset.slices=0: must be at least 1"),
    ("fastmri", {"width": 0}, "dataset.width=0: must be at least 7"),
    ("kspace_from_volumes", {"folder": "../other"}, r"dataset.folder=\.\./other: must be a"),
    ("mri_sequences_from_volumes", {"folder": "a/../../b"}, "dataset.folder=a/../../b: must be a"),
    ("phase_digits", {"test_share": 0.004}, r"dataset.test_share=0.004.*10 digits or more"),
    ("synthetic_images", {"test": 0}, "dataset.test=0: must be at least 10"),
    ("msd_synthetic", {"volumes": 0}, "dataset.volumes=0: must lie between 3 and"),
    ("msd_synthetic", {"max_per_patient": 0}, "dataset.max_per_patient=0: must be at least 1"),
    ("msd", {"spacing": 1}, "dataset.spacing=1: .*dataset.fit=pad"),
    ("mri_sequences_synthetic", {"patients": 0}, "dataset.patients=0: must lie between 2 and"),
    ("mri_sequences_synthetic", {"slices": 0}, "dataset.slices=0: must be at least 1"),
    ("chest_xray", {"validation_share": 1.0}, "dataset.validation_share=1.0: must lie"),
    ("chest_xray", {"max_per_patient": 0}, "dataset.max_per_patient=0: must be at least 1"),
    ("cpsc2018", {"channel": 13}, "dataset.channel=13: must lie between 1 and 12"),
    ("cifar10", {"augment": "cropflip"}, "'cropflip' is not known. Did you mean 'crop_flip'"),
    ("fastmri", {"acceleration": 0.5}, "dataset.acceleration=0.5: must be 1 or more"),
    ("fastmri", {"center_fraction": 0.3}, "dataset.center_fraction=0.3: must lie"),
    ("fastmri", {"unit": "volume"}, "dataset.slices=null: unit=volume needs a number"),
    ("fastmri", {"height": 17, "width": 12}, "dataset.height=17: .* as large as 17 by 12"),
    ("mri_sequences", {"size": 4}, "dataset.size=4: must lie between 8 and 512"),
    ("mri_sequences", {"validation_patients": 3}, "patients=3: leaves 0 patients to test"),
    ("mri_sequences_from_volumes", {"test_share": 0.0}, "dataset.test_share=0.0: leaves 5 volumes"),
    ("mri_sequences_synthetic", {"test_share": 1.0}, "dataset.test_share=1.0: leaves 30 of 30"),
    ("kspace_from_volumes", {"axis": 3}, "dataset.axis=3: must be 0, 1 or 2"),
    ("msd", {"task": "livr"}, "Did you mean 'liver'"),
    ("msd", {"window": [3.0]}, r"must be \[low, high\]"),
    ("msd", {"spacing": 0.0}, "dataset.spacing=0.0: must be positive"),
    ("msd", {"test_share": 0.0}, "none of 5 volumes to test"),
    ("msd", {"test_share": 1.0, "validation_share": 0.0}, "none of 5 volumes to train"),
    ("msd", {"channel": 3}, "dataset.channel=3: .*liver_0.* has 1 channels"),
    ("public_kspace", {"columns": 64}, "dataset.columns=64: must lie between 40 and 63"),
    ("public_kspace", {"rows": 31}, "dataset.rows=31: must lie between 32 and 63"),
    ("public_kspace", {"train": 0}, "dataset.train=0: must lie between 1 and CIFAR-10's 50,000"),
    ("public_kspace", {"slices": 3}, "dataset.slices=3: must be null"),
    ("public_kspace", {"unit": "volume", "slices": 3}, "unit=volume: a picture is a slice"),
    ("speech_commands", {"words": ["yes", "nope"]}, "the word 'nope'. Did you mean 'no'"),
    ("speech_commands", {"words": ["yes", "yes"]}, "at least two different words"),
    ("speech_commands", {"bins": 130}, "dataset.bins=130: must lie between 1 and 129"),
    ("speech_commands", {"frame_step": 0}, "dataset.frame_step=0: must lie between"),
    ("speech_commands", {"grid": [200, 10]}, "must be two numbers, at most 124 frames"),
    ("speech_commands", {"words": ["yes", "no"], "test_share": 0.0}, "leaves 20 clips to train"),
]


@pytest.mark.parametrize("method", ["info", "load"])
@pytest.mark.parametrize(
    ("name", "changed", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_option_that_means_nothing_is_refused_by_its_key(
    small_root: Path, method: str, name: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        getattr(dataset(name, **changed), method)(small_root)
    assert "\n" not in str(caught.value)
    assert not (small_root / "synthetic").exists()  # refused before anything is drawn


EMPTY = {
    "chest_xray": "dataset=chest_xray_synthetic",
    "cifar10": r"not under .*cifar-10-batches-bin or cifar-10-batches-py .*paths\.data",
    "cpsc2018": "dataset=cpsc2018_synthetic",
    "fastmri": "sign up for it .*kspace_phantom",
    "kspace_from_volumes": "is no folder",
    "mitbih": "finds no recordings",
    "mri_sequences": "dataset=mri_sequences_synthetic",
    "mri_sequences_from_volumes": "is no folder",
    "msd": "dataset=msd_synthetic",
    "speech_commands": "dataset=speech_commands_synthetic",
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_root_says_what_belongs_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=EMPTY[name]):
        dataset(name).load(tmp_path)
