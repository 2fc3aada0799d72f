"""The wheel carries all it needs and works in an empty folder; the pins are pins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from zdp_bench import assets

ROOT = Path(__file__).resolve().parent.parent


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
def test_the_wheel_holds_every_yaml_and_reference(unpacked: Path) -> None:
    inside = unpacked / "zdp_bench" / "_assets"
    for folder, at, suffix in (
        (assets.CONF, "conf", "yaml"),
        (assets.DATASETS, "datasets", "yaml"),
        (assets.PAPERS, "papers", "yaml"),
        (assets.PAPERS, "papers", "csv"),
        (assets.RECIPES, "recipes", "yaml"),
    ):
        found = {path.relative_to(folder) for path in folder.rglob(f"*.{suffix}")}
        assert found
        assert found == {
            path.relative_to(inside / at) for path in (inside / at).rglob(f"*.{suffix}")
        }


@pytest.mark.slow
def test_the_wheel_says_that_it_is_typed(unpacked: Path) -> None:
    assert (unpacked / "zdp_bench" / "py.typed").exists()
    assert "make_private" in (unpacked / "zdp_bench" / "__init__.pyi").read_text()


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    words = [
        "run",
        "recipe=quickstart",
        "trainer.epochs=1",
        "trainer.sample_rate=0.2",
        "model.hidden=[4]",
        "threads=1",
    ]
    for command in (words, ["table", "zeta_dp_2021/1"]):
        run_from_the_wheel(unpacked, tmp_path, "-m", "zdp_bench", *command)
    assert (tmp_path / "results" / "tables" / "zeta_dp_2021_table1.md").is_file()
    assert len(list((tmp_path / "results" / "runs" / "quickstart").glob("*/record.json"))) == 1


@pytest.mark.slow
def test_the_wheel_makes_a_model_of_timm_private(unpacked: Path, tmp_path: Path) -> None:
    """The script of the library's page, copied into an empty folder."""
    pytest.importorskip("timm")
    shutil.copy(ROOT / "docs" / "example" / "timm_model.py", tmp_path)
    printed = run_from_the_wheel(unpacked, tmp_path, "timm_model.py")
    assert printed.splitlines()[-1] == "ε = 8.00"
    assert (tmp_path / "timm-run" / "ledger.jsonl").is_file()


def run_from_the_wheel(unpacked: Path, folder: Path, *words: str) -> str:
    """Carry out Python with the wheel's packages in a folder, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_constraints_are_pins_without_addresses() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9_.\-]+==[A-Za-z0-9_.+\-]+", line), line


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE)
    done = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for target in targets:
        assert re.search(rf"make {target}\s+\S", done.stdout), target


def rows_of(page: str, table: str) -> list[dict[str, str]]:
    """The rows of the Markdown table that begins with the column `table`, by column name."""
    lines = page[page.index(f"| {table} |") :].split("\n\n")[0].splitlines()
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_every_cell_of_the_readmes_table_is_the_committed_one() -> None:
    committed = (ROOT / "results" / "tables" / "zeta_dp_2021_table1.md").read_text()
    by_name = {row["row"]: row for row in rows_of(committed, "row")}
    shown = rows_of((ROOT / "README.md").read_text(), "row")
    assert len(shown) == 3
    for row in shown:
        assert row.items() <= by_name[row["row"]].items()
