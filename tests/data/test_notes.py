"""What a record states of the data is no function of labels and contents of training examples."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.helpers import dataset, write_ecg
from zdp_bench.data import chest_xray, cpsc2018, ham10000, physionet2012, roahd


def change_diagnoses(root: Path) -> None:
    """Make every lesion a melanoma."""
    table = root / ham10000.FOLDER / ham10000.METADATA
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"dx": "mel"} for row in rows)


def change_outcomes(root: Path) -> None:
    """Let every patient of set-a, who are all to train on, die."""
    table = root / physionet2012.FOLDER / "Outcomes-a.txt"
    header, *lines = table.read_text().splitlines()
    changed = [f"{line.rsplit(',', 1)[0]},1" for line in lines]
    table.write_text("\n".join([header, *changed]))


def change_ecg(root: Path) -> None:
    """Change the diagnosis of one recording from the negative to the positive class."""
    for header in sorted((root / cpsc2018.FOLDER).rglob("*.hea")):
        content = header.read_text()
        if "#Dx: Normal" in content:
            header.write_text(content.replace("#Dx: Normal", "#Dx: LBBB"))
            return


def change_film(root: Path) -> None:
    """Make the first film of the train part larger."""
    first, *_ = sorted((root / chest_xray.FOLDER / "train" / "NORMAL").iterdir())
    Image.fromarray(np.zeros((99, 98), dtype=np.uint8)).save(first)


CHANGES: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "chest_xray": (change_film, {"size": 16}),
    "cpsc2018": (change_ecg, {"test_share": 0.4}),
    "ham10000": (change_diagnoses, {"size": 16}),
    "physionet2012": (change_outcomes, {}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_notes_do_not_change_with_labels_and_contents(name: str, root: Path) -> None:
    change, options = CHANGES[name]
    before = dataset(name, **options).load(root)
    change(root)
    after = dataset(name, **options).load(root)
    assert after.digest != before.digest
    assert after.notes == before.notes


def test_notes_on_people_do_not_count_those_with_a_diagnosis(tmp_path: Path) -> None:
    folder = tmp_path / roahd.FOLDER
    notes = set()
    for names in ("RL0 RL1 RL2 RN0 RN1", "RL0 RL1 RN2 RN0 RN1"):
        shutil.rmtree(folder, ignore_errors=True)
        for number, name in enumerate(names.split()):
            write_ecg(folder, f"{name[:2]}000{name[2]}", number, roahd.CODES[name[:2]][0], 1.1)
        notes.add(dataset("roahd").load(tmp_path).notes)
    assert len(notes) == 1
