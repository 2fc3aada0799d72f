"""The core needs no extra, and a package that is not there is one sentence with the command."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_cli import TINY, run
from tests.test_package import ROOT
from zdp_bench import kernels
from zdp_bench.errors import EXTRAS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {
    "nibabel": ["recipe=msd_hippocampus_private", "dataset=msd_synthetic"],
    "h5py": ["recipe=mri_recon", "dataset=kspace_phantom", "dataset.patients=4"],
    "wfdb": ["recipe=ecg", "dataset=cpsc2018_synthetic"],
    "soundfile": ["recipe=speech", "dataset=speech_commands_synthetic"],
}


@pytest.mark.parametrize("package", NEEDED)
def test_a_missing_package_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    folders = [f"paths.data={tmp_path}", f"paths.results={tmp_path}"]
    for multirun in ([], ["-m", "seed=1"]):
        code, _, err = run(capsys, "run", *NEEDED[package], *folders, *multirun)
        said = f"this needs {package}, which is not installed: "
        command = f"`pip install 'zdp-bench[{EXTRAS[package]}]'`."
        assert (code, said + command in err) == (2, True), err
        assert "Traceback" not in err


def test_windows_without_locks_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    words = ["recipe=quickstart", *TINY, f"paths.results={tmp_path}"]
    code, _, err = run(capsys, "run", *words)
    assert (code, "which Windows lacks: use WSL" in err, err.count("\n")) == (2, True, 1), err


def test_every_extra_that_a_sentence_names_brings_the_package() -> None:
    for package, extra in EXTRAS.items():
        brought = " ".join(PROJECT["optional-dependencies"][extra])
        assert package in brought or (package, extra) == ("ray", "federated")
        assert package not in " ".join(PROJECT["dependencies"])


def test_make_install_takes_every_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    (own,) = [word for word in extras["dev"] if word.startswith("zdp-bench[")]
    assert set(own.removeprefix("zdp-bench[").rstrip("]").split(",")) == set(extras) - {"dev"}


def test_without_numba_the_twins_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_has_numba", lambda: False)
    monkeypatch.setitem(sys.modules, "numba", None)
    words = ["recipe=quickstart", *TINY, f"paths.results={tmp_path}"]
    assert run(capsys, "run", *words)[0] == 0


def test_citation_and_metadata_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {PROJECT['version']}\n" in citation
    assert PROJECT["authors"][0]["name"] in citation
    assert f"license: {PROJECT['license']}\n" in citation
