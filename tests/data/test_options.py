"""Options that mean nothing are refused with their key, by `validate` (info) and by a run
(load).
"""

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
    ("cpsc2018", {"test_share": 1}, "dataset.test_share=1: must lie between 0 and 1"),
    ("cpsc2018", {"test_share": 0.99}, "dataset.test_share=0.99: of 4 recordings of Normal"),
    ("cpsc2018", {"negative": "LBBB"}, "dataset.negative=LBBB: must be another"),
    ("cpsc2018", {"positive": "LBB"}, "Did you mean 'LBBB'"),
    ("mitbih", {"fold": 4}, "dataset.fold=4: must lie between 0 and 3"),
    ("mitbih", {"test_share": 1}, "dataset.test_share=1: must lie between 0 and 1"),
    ("mitbih", {"test_share": 0.05}, "dataset.test_share=0.05: leaves 5 patients with N beats"),
    ("mitbih", {"normal_per_patient": 0}, "dataset.normal_per_patient=0: must be at least 1"),
    ("mitbih", {"blocked_per_patient": 0}, "dataset.blocked_per_patient=0: must be at least 1"),
    ("cpsc2018_synthetic", {"seconds": 0}, "dataset.seconds=0: must be positive"),
    ("cpsc2018_synthetic", {"seconds": -1}, "dataset.seconds=-1: must be positive"),
    ("cpsc2018_synthetic", {"count": 0}, "dataset.count=0: must lie between 2 and"),
    ("cpsc2018_synthetic", {"test_share": 1}, "dataset.test_share=1: must lie between"),
    ("chest_xray", {"size": 4}, "dataset.size=4: must lie between 8 and 1024"),
    ("chest_xray_synthetic", {"size": 4}, "dataset.size=4: must lie between 8 and 1024"),
    ("chest_xray_synthetic", {"count": 0}, "dataset.count=0: must be at least 50"),
    (
        "speech_commands",
        {"clips_per_word": 0, "words": ["yes", "no"]},
        "dataset.clips_per_word=0: must be at least 1",
    ),
    (
        "speech_commands",
        {"test_share": 2, "words": ["yes", "no"]},
        "dataset.test_share=2: must lie between",
    ),
    (
        "speech_commands_synthetic",
        {"clips_per_word": 0},
        "dataset.clips_per_word=0: must be at least 1",
    ),
    ("speech_commands_synthetic", {"words": ["yes"]}, "dataset.words=.*two different"),
    ("kspace_phantom", {"height": 6}, "dataset.height=6: must be at least 7"),
    ("kspace_phantom", {"width": 6}, "dataset.width=6: must be at least 7"),
    ("kspace_phantom", {"patients": 1}, "dataset.patients=1: must be at least 2"),
    ("kspace_phantom", {"test_share": 0.99}, "dataset.test_share=0.99: leaves 0 patients to train"),
    ("kspace_phantom", {"slices": 0}, "dataset.slices=0: must be at least 1"),
    ("fastmri", {"width": 0}, "dataset.width=0: must be at least 7"),
    ("kspace_from_volumes", {"height": 6}, "dataset.height=6: must be at least 7"),
    (
        "kspace_from_volumes",
        {"folder": "/etc"},
        "dataset.folder=/etc: must be a folder under the data root",
    ),
    (
        "kspace_from_volumes",
        {"folder": "../other"},
        r"dataset.folder=\.\./other: must be a folder under",
    ),
    (
        "mri_sequences_from_volumes",
        {"folder": "a/../../b"},
        "dataset.folder=a/../../b: must be a folder under",
    ),
    ("mri_sequences_from_volumes", {"size": 4}, "dataset.size=4: must lie between 8 and"),
    ("synthetic_images", {"test": 0}, "dataset.test=0: must be at least 10"),
    ("synthetic_images", {"train": 9}, "dataset.train=9: must be at least 10"),
    ("msd_synthetic", {"volumes": 0}, "dataset.volumes=0: must lie between 3 and"),
    ("msd_synthetic", {"max_per_patient": 0}, "dataset.max_per_patient=0: must be at least 1"),
    ("msd", {"spacing": 1}, "dataset.spacing=1: .*dataset.fit=pad"),
    ("msd", {"window": [3, 1]}, "dataset.window="),
    ("mri_sequences_synthetic", {"patients": 0}, "dataset.patients=0: must lie between 2 and"),
    ("mri_sequences_synthetic", {"slices": 0}, "dataset.slices=0: must be at least 1"),
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
