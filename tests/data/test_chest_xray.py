"""Chest films: splits by patient, dropped copies, and resizing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zdp_bench.data.chest_xray import ChestXray, Film, patient_of, read_film


def film(name: str, part: str = "train") -> Film:
    path = Path("chest_xray") / part / "PNEUMONIA" / name
    return Film(path, part, 1, patient_of(path))


def test_patients_are_read_from_names() -> None:
    names = {
        "person12_bacteria_45.jpeg": "person12",
        "person12_virus_46.jpeg": "person12",
        "person1660_virus_2869_1.jpeg": "person1660",
        "IM-0115-0001.jpeg": "IM-0115",
        "IM-0115-0001-0002.jpeg": "IM-0115",
        "NORMAL2-IM-0587-0001-0002.jpeg": "NORMAL2-IM-0587",
    }
    assert {name: patient_of(Path(name)) for name in names} == names


def test_nobody_crosses_and_what_is_left_out_is_counted() -> None:
    """person1 is in both parts; films 4 and 5 are equal, and so are film 8 and a test film."""
    found = [
        film("person1_virus_1.jpeg"),
        *(film(f"person2_virus_{n}.jpeg") for n in (2, 3, 4, 5)),
        film("person3_virus_6.jpeg"),
        film("person4_virus_7.jpeg"),
        film("person5_virus_8.jpeg"),
        film("person1_virus_9.jpeg", "test"),
        film("person6_virus_10.jpeg", "test"),
    ]
    digests = ["a", "b", "c", "d", "d", "e", "f", "g", "h", "g"]
    made = ChestXray(validation_share=0.0, max_per_patient=2).split(found, digests)
    assert [f.path.name for f in made.train] == [
        f"person{p}_virus_{n}.jpeg" for p, n in ((2, 2), (2, 3), (3, 6), (4, 7))
    ]
    assert [f.path.name for f in made.crossing] == ["person1_virus_1.jpeg"]
    assert (made.copies, made.over_bound) == (2, 1)
    whole = ChestXray(validation_share=0.1).split(found, list("abcdefghij"))
    people = [{f.patient for f in part} for part in (whole.train, whole.validation, whole.test)]
    assert people[1]
    assert not people[0] & people[1]
    assert not (people[0] | people[1]) & people[2]


def test_a_film_is_resized_over_its_whole_support(tmp_path: Path) -> None:
    """A grid finer than the new pixels comes out grey, not as the pixels that happen to be hit."""
    pixels = np.indices((64, 64)).sum(axis=0) % 2 * 255
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "a.jpeg", quality=100)
    small = read_film(tmp_path / "a.jpeg", 16)[2:-2, 2:-2]
    assert abs(small.astype(float) - 127).max() < 3
    Image.fromarray(np.stack([pixels] * 3, axis=-1).astype(np.uint8)).save(
        tmp_path / "rgb.jpeg", quality=100
    )
    assert read_film(tmp_path / "rgb.jpeg", 16).shape == (16, 16)


@pytest.mark.slow
@pytest.mark.real_data
def test_the_real_films(data_root: Path) -> None:
    splits = ChestXray(size=16).load(data_root)
    assert len(splits.test) == 1062
    assert splits.provenance == "derived"
    assert "0 patients stood in both parts" in splits.notes
    assert "19 copies" in splits.notes
