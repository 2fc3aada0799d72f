"""Every data set can be described before it is read, and its outline is what its adapter then makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zdp_bench import assets
from zdp_bench.data import Outline, Splits
from zdp_bench.registry import lookup, names


def options(name: str, **changes: Any) -> dict[str, Any]:
    body = assets.read_yaml(assets.group(assets.DATASETS)[name])
    return {key: value for key, value in body.items() if key not in ("name", "card")} | changes


@pytest.mark.parametrize("name", sorted(assets.group(assets.DATASETS)))
def test_every_data_set_has_an_outline(name: str, tmp_path: Path) -> None:
    assert name in names("outline")
    said: Outline = lookup("outline", name)(tmp_path, **options(name))
    assert said.train > 0 < said.test
    assert 1 <= said.records_per_patient <= said.train


SMALL: dict[str, dict[str, Any]] = {
    "phase_digits": {},
    "cpsc2018_synthetic": {"count": 40, "seconds": 1.1},
    "speech_commands_synthetic": {"words": ["yes", "no"], "clips_per_word": 60},
    "chest_xray_synthetic": {"count": 60, "size": 16},
    "mri_sequences_synthetic": {"patients": 4, "size": 16},
    "msd_synthetic": {"volumes": 5, "size": 16, "test_share": 0.4},
}


@pytest.mark.parametrize("name", SMALL)
def test_an_outline_is_what_the_adapter_makes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen = options(name, **SMALL[name])
    said: Outline = lookup("outline", name)(tmp_path, **chosen)
    made: Splits = lookup("dataset", name)(tmp_path, **chosen)
    inputs, targets = made.train.batch(torch.arange(2))
    assert (said.input_shape, said.outputs) == (made.input_shape, made.outputs)
    assert (said.dtype, said.target_dtype) == (inputs.dtype, targets.dtype)
    assert (tuple(inputs.shape[1:]), tuple(targets.shape[1:])) == (said.input_shape, said.target_shape)
    # Patients are cut whole, so that small sets miss a share by one of them.
    assert abs(said.train - len(made.train)) <= max(0.15 * said.train, 4)
