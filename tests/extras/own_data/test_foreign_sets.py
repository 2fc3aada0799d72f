"""Public releases, made small in their own layout: from the files to a private record.

docs/own_data.md has what a person types for each; `PRINTED` has what is printed.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.data.helpers import write_ecg
from tests.extras.own_data.own_data import write_nifti
from tests.test_docs import DOCS, exit_code_of
from zdp_bench.data import nifti

PAGE = (DOCS / "own_data.md").read_text(encoding="utf-8")


SHORT = ("trainer.epochs=2",)


def rows() -> dict[str, tuple[str, list[str]]]:
    """The table's rows: set -> what is typed, and what is printed."""
    lines = re.findall(r"^\| ([^|]+) \| `zdp-bench ([^|]+)` \|$", PAGE, re.M)
    return {name: (typed, PRINTED[name]) for names, typed in lines for name in names.split(", ")}


PRINTED = {
    "PTB-XL": ["folder, own: classes 0 IMI, 1 NORM", "ε per patient"],
    "CinC 2020": ["not exactly those of CPSC 2018"],
    "LUDB": ["folder, own: classes 0 Sinus, 1 fibrillation"],
    "fastMRI knee": ["fastmri, derived: files in fastMRI's layout"],
    "fastMRI brain": ["coils combined by the root of their sum of squares"],
    "MSD": ["msd, derived: axial slices", "ε per volume"],
    "BraTS": ["folder, own: a mask for each image", "ε per patient"],
    "CheXpert": ["folder, own: classes 0 effusion, 1 none", "ε per patient"],
    "NIH": ["folder, own: classes 0 Effusion, 1 No Finding", "ε per patient"],
    "Speech Commands": ["speech_commands, derived: 24 clips of 2 words"],
    "ESC-50": ["folder, own: classes 0 dog, 1 rain"],
}


def table(path: Path, head: str, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, *lines]) + "\n")


def film(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (32, 39), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_ptb_xl(root: Path) -> None:
    lines = []
    for n in range(20):
        name = f"records500/00000/{n:05}_hr"
        write_ecg(root / Path(name).parent, f"{n:05}_hr", n)
        codes = "{'IMI': 100.0, 'SR': 0.0}" if n % 2 else "{'NORM': 80.0}"
        lines.append(f'{n},{n // 2}.0,56.0,"{codes}",{n // 2 % 10 + 1},records100/x_lr,{name}')
    head = "ecg_id,patient_id,age,scp_codes,strat_fold,filename_lr,filename_hr"
    table(root / "ptbxl_database.csv", head, *lines)


def write_ludb(root: Path) -> None:
    rhythms = ("Sinus rhythm", '"Atrial fibrillation\nwith aberrant complexes"')
    for n in range(1, 17):
        write_ecg(root / "data", str(n), n)
    lines = [f'{n},F,51,{rhythms[n % 2]},"normal"' for n in range(1, 17)]
    table(root / "ludb.csv", "ID,Sex,Age,Rhythms,Electric axis of the heart", *lines)


def ball(shape: tuple[int, int, int]) -> np.ndarray:
    at = np.indices(shape) - np.reshape(shape, (3, 1, 1, 1)) / 2
    return ((at**2).sum(0) < 9).astype(np.uint8)


def write_brats(root: Path) -> None:
    names = [f"BraTS20_Training_{n:03}" for n in range(1, 13)]
    for n, name in enumerate(names):
        for contrast in ("flair", "t1", "t1ce", "t2"):
            write_nifti(root / name / f"{name}_{contrast}.nii", n, (16, 16, 6))
        nifti.write(root / name / f"{name}_seg.nii", 4 * ball((16, 16, 6)), (1.0, 1.0, 2.0))
    head = "Grade,BraTS_2017_subject_ID,BraTS_2020_subject_ID"
    table(root / "name_mapping.csv", head, *(f"HGG,NA,{name}" for name in names))


def write_chexpert(root: Path) -> None:
    home = "CheXpert-v1.0-small"
    lines = []
    for n in range(20):
        name = f"{home}/train/patient{n // 2:05}/study{n % 2 + 1}/view1_frontal.jpg"
        film(root / name, n)
        lines.append(f"{name},Female,68,Frontal,AP,{('0.0', '1.0', '-1.0', '')[n % 4]}")
    head = "Path,Sex,Age,Frontal/Lateral,AP/PA,Pleural Effusion"
    table(root / home / "train.csv", head, *lines)


def write_nih(root: Path) -> None:
    lines = []
    for n in range(20):
        film(root / f"images/{n // 2:08}_{n % 2:03}.png", n)
        finding = ("No Finding", "Effusion|Infiltration", "Hernia", "Effusion")[n % 4]
        lines.append(f"{n // 2:08}_{n % 2:03}.png,{finding},{n % 2},{n // 2},58,M,PA")
    head = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View"
    table(root / "Data_Entry_2017.csv", head, *lines)


def write_esc_50(root: Path) -> None:
    lines = []
    for n in range(20):
        name = f"{n // 4 + 1}-{n}-A-{n % 2}.wav"
        path = root / "ESC-50-master/audio" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, np.sin(np.arange(22_050) * (1 + n % 2) / 9) / 2, 44_100)
        lines.append(f"{name},{n // 4 + 1},{n % 2},{('dog', 'rain')[n % 2]},True,{n},A")
    head = "filename,fold,target,category,esc10,src_file,take"
    table(root / "ESC-50-master/meta/esc50.csv", head, *lines)


SETS: dict[str, Callable[[Path], None]] = {"PTB-XL": write_ptb_xl, "CheXpert": write_chexpert}
# Lists and files of the kinds above, or whose kind is read in `test_folder.py`.
AT_NIGHT = {"LUDB": write_ludb, "NIH": write_nih, "BraTS": write_brats, "ESC-50": write_esc_50}


def test_each_row_of_the_page_that_reads_a_folder_is_here() -> None:
    own = [name for name, (typed, _) in rows().items() if "dataset.path=" in typed]
    assert sorted(own) == sorted({**SETS, **AT_NIGHT})


@pytest.mark.parametrize(
    "name", [*SETS, *(pytest.param(name, marks=pytest.mark.slow) for name in AT_NIGHT)]
)
def test_a_foreign_set_becomes_a_private_record_in_one_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, printed = rows()[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")  # no sentence is folded
    (SETS | AT_NIGHT)[name](tmp_path)
    script = [sys.executable, str(DOCS / "example" / "list_release.py"), name]
    subprocess.run(script, check=True, capture_output=True, text=True)
    for recipe in ("ball.yaml", "films_private.yaml"):
        shutil.copy(DOCS / "example" / recipe, tmp_path)
    assert exit_code_of(*shlex.split(typed), *SHORT) == 0, capsys.readouterr().err
    out = " ".join(capsys.readouterr().out.split())
    for words in printed:
        assert words in out
    (record,) = (tmp_path / "results").rglob("record.json")
    assert '"epsilon_tight"' in (text := record.read_text())
    assert '"classes":' not in text  # no count of a class is recorded
