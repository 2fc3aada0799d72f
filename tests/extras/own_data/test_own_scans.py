"""docs/own_data.md from an empty folder: private at the patient's ε of 8, and it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.test_docs import write_own_data
from tests.training.test_run import Silent
from zdp_bench.config import compose, parse
from zdp_bench.data import nifti
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing.export import export
from zdp_bench.extras.sharing.loading import predict_file
from zdp_bench.training.run import run

LEARNED = 0.8  # Dice; whoever answers 'nothing' has 0, and 'everything' 0.2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_folder_of_scans_trains_at_a_patient_s_epsilon_of_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_own_data(tmp_path)
    record = run(parse(compose(["recipe=./ball.yaml"])), Silent()).record
    privacy = record["privacy"]
    assert record["data"]["provenance"] == "own"
    assert (privacy["epsilon_of"], privacy["unit"]) == ("patient", "patient")
    assert 7.9 < privacy["epsilon_tight"] == privacy["epsilon_patient"] <= 8
    assert (privacy["sampling"]["records"], privacy["records_per_patient"]) == (120, 6)
    assert record["metrics"]["dice"] > LEARNED

    export(Path("results"), "ball", Path("model"))
    held, out = Path("scans/p000_scan.nii.gz"), Path("ball.npy")
    assert predict_file(Path("model"), held, out) == (6, 1, 16, 16)
    found = np.load(out)[:, 0] > 0
    ball = nifti.read_labels(Path("scans/p000_ball.nii.gz"))[:, ::-1].transpose(2, 1, 0)
    assert (found & (ball > 0)).sum() > 0.9 * (ball > 0).sum()
    assert found.mean() < 0.2
    with pytest.raises(UserError, match=r"make_scans\.py: holds no PNG, JPEG"):
        predict_file(Path("model"), Path("make_scans.py"), out)
    with pytest.raises(UserError, match=r"none\.nii: there is no such file"):
        predict_file(Path("model"), Path("none.nii"), out)
