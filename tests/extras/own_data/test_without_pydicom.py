"""Without pydicom, a DICOM file ends in one sentence with the command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.extras.own_data.own_data import write_dicom
from tests.test_cli import run


def test_dicom_without_pydicom_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ill", "well"):
        for patient in range(4):
            write_dicom(tmp_path / "films" / name / f"p{patient}" / "0.dcm", 9)
    for module in [name for name in sys.modules if name.startswith("pydicom.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    words = ["recipe=quickstart", "dataset=folder", "model=real_mlp", "algorithm=dp_sgd"]
    words += [f"dataset.path={tmp_path / 'films'}", "dataset.window=[0,255]"]
    code, _, err = run(capsys, "run", *words, f"paths.results={tmp_path}")
    said = "this needs pydicom, which is not installed: `pip install 'zdp-bench[medical]'`."
    assert (code, said in err) == (2, True), err
    assert "Traceback" not in err
