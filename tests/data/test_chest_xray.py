"""Chest films: splits by patient, dropped copies, and resizing."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zdp_bench.data.chest_xray import FOLDER, ChestXray, Film, patient_of
from zdp_bench.data.pictures import read_picture


def film(patient: int, number: int, part: str) -> Film:
    path = Path("chest_xray") / part / "PNEUMONIA" / f"person{patient}_virus_{number}.jpeg"
    return Film(path, part, 1, patient_of(path))


def test_patients_are_read_from_names() -> None:
    for patient, rest in (
        ("person12", ("_bacteria_45", "_virus_46")),
        ("person1660", ("_virus_2869_1",)),
        ("IM-0115", ("-0001", "-0001-0002")),
        ("NORMAL2-IM-0587", ("-0001-0002",)),
    ):
        assert {patient_of(Path(f"{patient}{of}.jpeg")) for of in rest} == {patient}


def test_nobody_crosses_and_what_is_left_out_is_counted() -> None:
    """person1 is in both parts; films 4 and 5 are equal, and so are film 8 and a test film."""
    training = ((1, 1), (2, 2), (2, 3), (2, 4), (2, 5), (3, 6), (4, 7), (5, 8))
    films = [film(p, n, part="train") for p, n in training]
    films += [film(p, n, part="test") for p, n in ((1, 9), (6, 10))]
    digests = ["a", "b", "c", "d", "d", "e", "f", "g", "h", "g"]
    made = ChestXray(validation_share=0.0, max_per_patient=2).split(films, digests)
    assert made.train == [films[n] for n in (1, 2, 5, 6)]
    assert made.crossing == [films[0]]
    assert (made.copies, made.over_bound) == (2, 1)
    whole = ChestXray(validation_share=0.1).split(films, list("abcdefghij"))
    people = [{f.patient for f in part} for part in (whole.train, whole.validation, whole.test)]
    assert people[1]
    assert not people[0] & people[1]
    assert not (people[0] | people[1]) & people[2]


def test_films_of_a_patient_do_not_decide_which_of_another_are_kept() -> None:
    """Dropped as a copy of another patient's, a film came back when that patient was removed."""
    all_films = [film(patient, number, part="train") for patient in range(8) for number in range(3)]
    all_films += [film(9, 1, part="test")]
    digests = [f"{patient}" if patient % 2 else "shared" for patient in range(8) for _ in range(3)]
    dataset = ChestXray(validation_share=0.0)
    whole = dataset.split(all_films, [*digests, "test"]).train
    assert len(whole) == 8  # one film of each patient
    for patient in range(8):
        rows = [row for row in range(24) if row // 3 != patient]
        films = [all_films[row] for row in rows]
        rest = dataset.split(
            [*films, all_films[24]], [*(digests[row] for row in rows), "test"]
        ).train
        assert rest == [kept for kept in whole if kept.patient != f"person{patient}"]


def test_films_that_validate_are_not_trained_on() -> None:
    films = [film(patient, 1, part="train") for patient in range(8)]
    films += [film(9, 1, part="test")]
    digests = ["shared" if row % 2 else str(row) for row in range(9)]
    digest_of = dict(zip(films, digests, strict=True))
    split = ChestXray(validation_share=0.4).split(films, digests)
    assert split.copies
    validation = {digest_of[kept] for kept in split.validation}
    assert not validation & {digest_of[kept] for kept in split.train}


def test_two_patients_with_the_same_film_are_told(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = ChestXray(size=16).load(root)
    assert "has the same content as" not in caplog.text
    first, *_, last = sorted((root / FOLDER / "train" / "NORMAL").iterdir())
    assert patient_of(first) != patient_of(last)
    last.write_bytes(first.read_bytes())
    after = ChestXray(size=16).load(root)
    assert caplog.text.count("has the same content as") == 1
    assert after.notes == before.notes


def test_a_film_is_resized_over_its_whole_support(tmp_path: Path) -> None:
    """A grid finer than the new pixels comes out grey, not as the pixels that happen to be hit."""
    pixels = np.indices((64, 64)).sum(axis=0) % 2 * 255
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "a.jpeg", quality=100)
    small = read_picture(tmp_path / "a.jpeg", 16)[0, 2:-2, 2:-2]
    assert abs(small.astype(float) - 127).max() < 3
    colours = Image.fromarray(np.stack([pixels] * 3, axis=-1).astype(np.uint8))
    colours.save(tmp_path / "rgb.jpeg", quality=100)
    assert read_picture(tmp_path / "rgb.jpeg", 16).shape == (1, 16, 16)


@pytest.mark.slow
@pytest.mark.real_data
def test_the_real_films(data_root: Path) -> None:
    splits = ChestXray(size=16).load(data_root)
    assert len(splits.test) == 1062
    assert splits.provenance == "derived"
    assert "0 patients were in both parts" in splits.notes
