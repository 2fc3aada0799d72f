"""`zdp_bench.load` and `zdp-bench predict`: the same model, in another process."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import zdp_bench
from tests.training.test_run import configured
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.loading import config_of, predict_file
from zdp_bench.extras.sharing.verification import verify
from zdp_bench.training.run import Outcome
from zdp_bench.training.setup import ModelSetup

INPUTS = torch.randn(5, 8, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))


def trained(finished: Outcome) -> torch.nn.Module:
    """The model as the run itself had it."""
    saved = torch.load(finished.path.parent / "checkpoint.pt", weights_only=True)["model"]
    model = ModelSetup.of(configured(finished.path.parents[3])).model
    model.load_state_dict(saved)
    return model.eval()


def test_predict_writes_what_the_run_s_model_gives(
    exported: Path, finished: Outcome, tmp_path: Path
) -> None:
    np.save(tmp_path / "in.npy", INPUTS.to(torch.complex64).numpy())
    assert not zdp_bench.load(exported).training
    assert predict_file(exported, tmp_path / "in.npy", tmp_path / "out.npy") == (5, 10)
    with torch.no_grad():
        expected = trained(finished)(INPUTS).numpy()
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_inputs_that_do_not_fit_are_refused(exported: Path, tmp_path: Path) -> None:
    def refuse(name: str, words: str, out: str = "out.npy") -> None:
        with pytest.raises(UserError, match=words):
            predict_file(exported, tmp_path / name, tmp_path / out)

    np.save(tmp_path / "wide.npy", np.zeros((2, 9, 8)))
    refuse("wide.npy", r"holds float64 \[2, 9, 8\], where the model takes complex64 \[n, 8, 8\]")
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    refuse("objects.npy", "objects.npy: cannot be read")
    refuse("none.npy", "none.npy: is missing")
    refuse("film.png", r"INPUTS .*film.png: must end with .npy")
    refuse("wide.npy", r"--out .*out.txt: must end with", out="out.txt")


def test_the_configuration_is_the_run_s_own(finished: Outcome) -> None:
    assert config_of(finished.record).resolved == configured(
        finished.path.parents[3], "trainer.epochs=1"
    ).resolved | {"paths": config_of(finished.record).resolved["paths"]}


def test_a_folder_that_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not an exported model, because it has no record.json"):
        zdp_bench.load(tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        zdp_bench.laod  # noqa: B018


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden", [10**7, 10**7]),
        ("hidden", [1] * 100_000),
        ("outputs", 10**12),
        ("input_shape", [2**14, 2**14]),
        ("input_shape", [2**40, 2**40]),
    ],
)
def test_no_model_is_made_that_is_larger_than_its_weights(
    folder: Path, key: str, value: object
) -> None:
    path = folder / "record.json"
    record = json.loads(path.read_text())
    section = record["config"]["model"] if key == "hidden" else record["data"]["example"]
    section[key] = value
    path.write_text(json.dumps(record))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for use in (zdp_bench.load, verify):
        begun = time.monotonic()
        with pytest.raises(UserError):
            use(folder)
        assert time.monotonic() - begun < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
