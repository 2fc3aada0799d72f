"""What is installed: the wheel, the extras, what is missing, and the tables that pages show."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.drivers import ROOT, python
from tests.test_architecture import EXTRAS as EXTRA_FOLDERS
from tests.test_cli import TINY, run
from zdp_bench import assets
from zdp_bench.errors import EXTRAS
from zdp_bench.registry import of_extras


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout and unpacked as pip would."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("not a checkout")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_holds_every_yaml_and_reference_and_says_that_it_is_typed(unpacked: Path) -> None:
    inside = unpacked / "zdp_bench" / "_assets"
    for folder, at, suffix in (
        (assets.CONF, "conf", "yaml"),
        (assets.DATASETS, "datasets", "yaml"),
        (assets.PAPERS, "papers", "yaml"),
        (assets.PAPERS, "papers", "csv"),
        (assets.RECIPES, "recipes", "yaml"),
    ):
        paths = {path.relative_to(folder) for path in folder.rglob(f"*.{suffix}")}
        assert paths
        assert paths == {
            path.relative_to(inside / at) for path in (inside / at).rglob(f"*.{suffix}")
        }
    assert (unpacked / "zdp_bench" / "py.typed").exists()
    assert "make_private" in (unpacked / "zdp_bench" / "__init__.pyi").read_text()


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    run = f"run recipe=quickstart {' '.join(TINY)}"
    table, export = "table zeta_dp_2021/1 --write", "export quickstart --to out"
    for line in (run, table, export, "verify out"):
        python("-m", "zdp_bench", *line.split(), at=tmp_path, PYTHONPATH=str(unpacked))
    assert (tmp_path / "results" / "tables" / "zeta_dp_2021_table1.md").is_file()
    assert len(list((tmp_path / "results" / "runs" / "quickstart").glob("*/record.json"))) == 1


def rows_of(page: str, table: str) -> list[dict[str, str]]:
    """The rows of the Markdown table that begins with the column `table`, by column name."""
    lines = page[page.index(f"| {table} |") :].split("\n\n")[0].splitlines()
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_every_cell_of_the_readmes_table_is_the_committed_one() -> None:
    committed = (ROOT / "results" / "tables" / "zeta_dp_2021_table1.md").read_text()
    by_name = {row["row"]: row for row in reversed(list(rows_of(committed, "row")))}
    shown = rows_of((ROOT / "README.md").read_text(), "row")
    assert len(shown) == 3
    for row in shown:
        assert row.items() <= by_name[row["row"]].items()


def test_what_privacy_costs_is_the_committed_table_in_readme_and_docs() -> None:
    committed = (ROOT / "results" / "tables" / "cost.md").read_text()
    by_name = {row["task"]: row for row in rows_of(committed, "task")}
    elsewhere = {
        "MNIST",
        "Fashion-MNIST",
        "CIFAR-10, learnt from generated pictures",
        "CIFAR-10, scattering, statistics of generated pictures",
        "MRI reconstruction",
    }
    for page, left_out in (("README.md", elsewhere), ("docs/cost.md", set())):
        shown = rows_of((ROOT / page).read_text(), "task")
        assert [row["task"] for row in shown] == [name for name in by_name if name not in left_out]
        assert all(row.items() <= by_name[row["task"]].items() for row in shown)


def test_what_a_caller_changes_nobody_else_sees() -> None:
    path = assets.CONF / "config.yaml"
    assets.read_yaml(path)["defaults"].append({"trainer": "another"})
    assert {"trainer": "another"} not in assets.read_yaml(path)["defaults"]


# extras

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENDS = ("constraints.txt", "constraints-newest.txt")  # of the versions that are supported


def read_pins(name: str) -> dict[str, Version]:
    """Return version by package of a file of pins, with or without hashes."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.rstrip(" \\").split("==") for line in lines if "==" in line]
    return {canonicalize_name(package): Version(version) for package, version in pairs}


def requirements() -> list[Requirement]:
    """Return what the package and its extras require, but for itself."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    every = [Requirement(line) for group in groups for line in group]
    return [needed for needed in every if needed.name != PROJECT["name"]]


@pytest.mark.parametrize("name", ENDS)
def test_each_file_of_pins_has_every_requirement_in_its_range(name: str) -> None:
    pins = read_pins(name)
    for needed in requirements():
        version = pins[canonicalize_name(needed.name)]
        assert needed.specifier.contains(version), f"{needed} {version}"


@pytest.mark.parametrize("package", ["torch", "flwr"])
def test_the_tested_versions_are_the_ends_of_the_range(package: str) -> None:
    """A minor version beyond the newest that CI tests, or below the oldest, is not claimed."""
    (needed,) = [needed for needed in requirements() if needed.name == package]
    bounds = {bound.operator: Version(bound.version) for bound in needed.specifier}
    oldest, newest = (read_pins(name)[package] for name in ENDS)
    assert oldest.release[:2] == bounds[">="].release[:2]
    assert (newest.major, newest.minor + 1) == bounds["<"].release[:2]


def test_the_image_installs_the_pinned_versions_by_hash() -> None:
    pins = read_pins("constraints.txt")
    for name in ("requirements-torch.txt", "requirements-image.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")
        locked = read_pins(name)
        assert locked.items() <= (pins | {"setuptools": locked.get("setuptools")}).items()
        assert all("--hash=sha256:" in part for part in re.split(r"\n(?=\w)", text.strip()))
        assert "://" not in text
    core = [Requirement(line) for line in PROJECT["dependencies"]]
    locked = read_pins("requirements-torch.txt") | read_pins("requirements-image.txt")
    assert {canonicalize_name(needed.name) for needed in core} <= {*locked}


NEEDED = {
    "nibabel": ["recipe=msd_hippocampus_private", "dataset=msd_synthetic"],
    "h5py": ["recipe=mri_recon", "dataset=kspace_phantom", "dataset.patients=4"],
    "wfdb": ["-m", "recipe=ecg", "dataset=cpsc2018_synthetic", "seed=1"],
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
    code, _, err = run(capsys, "run", *NEEDED[package], *folders)
    message = f"this needs {package}, which is not installed: "
    command = f"`pip install 'zdp-bench[{EXTRAS[package]}]'`."
    assert (code, message + command in err) == (2, True), err
    assert "Traceback" not in err


def test_windows_without_locks_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    words = ["recipe=quickstart", *TINY, f"paths.results={tmp_path}"]
    code, _, err = run(capsys, "run", *words)
    assert (code, "does not have: use WSL" in err, err.count("\n")) == (2, True, 1), err


def test_every_extra_that_a_sentence_names_brings_the_package() -> None:
    for package, extra in EXTRAS.items():
        brought = " ".join(PROJECT["optional-dependencies"][extra])
        assert package in brought
        assert package not in " ".join(PROJECT["dependencies"])


def test_make_install_takes_every_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    (own,) = [word for word in extras["dev"] if word.startswith("zdp-bench[")]
    assert set(own.removeprefix("zdp-bench[").rstrip("]").split(",")) == set(extras) - {"dev"}


def test_citation_and_metadata_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {PROJECT['version']}\n" in citation
    assert PROJECT["authors"][0]["name"] in citation
    assert f"license: {PROJECT['license']}\n" in citation


COPIED = ("zdp_bench", "conf", "datasets", "papers", "recipes", "tests")
IMPORT_ALL = """
import importlib, pkgutil, zdp_bench
for module in pkgutil.walk_packages(zdp_bench.__path__, "zdp_bench."):
    if ".extras." not in module.name and "__main__" not in module.name:
        importlib.import_module(module.name)
"""
CORE_TESTS = [
    "tests/test_architecture.py",
    "tests/config/test_compose.py",
    "tests/training/test_step.py",
    "tests/report/test_results.py",
]
CORE_COMMANDS = [
    ["-c", IMPORT_ALL],
    ["-m", "zdp_bench", "--help"],
    ["-m", "zdp_bench", "list"],
    ["-m", "zdp_bench", "run", "recipe=quickstart", *TINY],
    ["-m", "zdp_bench", "table", "zeta_dp_2021/1"],
    ["-m", "pytest", "-q", *CORE_TESTS],
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", EXTRA_FOLDERS)
def test_the_core_works_without_it(extra: str, tmp_path: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.rmtree(tmp_path / "zdp_bench/extras" / extra)
    shutil.rmtree(tmp_path / "tests/extras" / extra)
    here: dict[str, Any] = {"at": tmp_path, "PYTHONPATH": str(tmp_path)}
    for words in CORE_COMMANDS:
        python(*words, **here)
    for verb, where in of_extras("command").items():
        if f".{extra}." in where:
            message = python("-m", "zdp_bench", verb, leaves=2, **here).stderr
            assert f"'{verb}' belongs to an extra that is not installed" in message


def test_the_image_installs_every_requirement_of_its_extras() -> None:
    image_extras = runpy.run_path(str(ROOT / ".ci/pins.py"))["EXTRAS"]
    locked = read_pins("requirements-torch.txt") | read_pins("requirements-image.txt")
    requirements = list(PROJECT["dependencies"])
    for extra in image_extras:
        requirements += PROJECT["optional-dependencies"][extra]
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate():
            assert canonicalize_name(requirement.name) in locked, requirement.name
