"""An absurd size is refused at once, by an estimate, and nothing is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import dataset
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.extras.federated import simulation
from zdp_bench.training.progress import Silent
from zdp_bench.training.run import run


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
