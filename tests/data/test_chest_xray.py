"""Chest films: splits by patient, dropped copies, augmentation, and broken films."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.helpers import copy_folder
from zdp_bench.config.plugins import check_options
from zdp_bench.data import Part, files
from zdp_bench.data.chest_xray import (
    AUGMENT,
    FOLDER,
    ChestXray,
    Film,
    find_films,
    patient_of,
    read_film,
)
from zdp_bench.errors import UserError
from zdp_bench.extras.standins.films import ChestXraySynthetic


@pytest.fixture
def root(small_root: Path, tmp_path: Path) -> Path:
    """A data root with 60 drawn films in Kermany's folders."""
    return copy_folder(small_root, tmp_path, FOLDER)


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
    made = ChestXray(validation_share=0.0, max_per_patient=2).split(found, digests, 0)
    assert [f.path.name for f in made.train] == [
        f"person{p}_virus_{n}.jpeg" for p, n in ((2, 2), (2, 3), (3, 6), (4, 7))
    ]
    assert [f.path.name for f in made.crossing] == ["person1_virus_1.jpeg"]
    assert (made.copies, made.over_bound, made.most_of_one) == (2, 1, 2)
    whole = ChestXray(validation_share=0.1).split(found, list("abcdefghij"), 0)
    people = [{f.patient for f in part} for part in (whole.train, whole.validation, whole.test)]
    assert people[1]
    assert not people[0] & people[1]
    assert not (people[0] | people[1]) & people[2]


def test_the_set_is_bytes_until_drawn_and_repeatable(root: Path) -> None:
    splits = ChestXray(size=32).load(root)
    assert isinstance(splits.train, Part)
    assert splits.train.whole.inputs.dtype == torch.uint8
    inputs, targets = splits.train.batch(torch.arange(3))
    assert (inputs.dtype, inputs.shape, targets.shape) == (torch.float32, (3, 1, 32, 32), (3,))
    assert inputs.min() >= -2
    assert inputs.max() <= 2
    assert splits.provenance == "derived"
    assert splits.validation is not None
    assert "patients stood in both parts" in splits.notes
    groups = [set(part.groups.tolist()) for part in (splits.train, splits.validation, splits.test)]
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert max(np.bincount(splits.train.groups)) == splits.examples_per_patient
    again = ChestXray(size=32).load(root)
    assert again.digest == splits.digest
    assert torch.equal(again.train.batch(torch.arange(3))[0], inputs)
    bounded = ChestXray(size=32, max_per_patient=1).load(root)
    assert bounded.examples_per_patient == 1
    assert len(bounded.train) == len(groups[0])
    assert bounded.digest != splits.digest


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


def test_augmentation_moves_each_example_by_its_own_uniforms_alone() -> None:
    images = torch.randn(4, 1, 24, 24)
    uniforms = torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    changed = AUGMENT.images(images, uniforms)
    assert not torch.allclose(changed, images)
    for index in range(4):  # whatever stands beside it
        torch.testing.assert_close(
            AUGMENT.images(images[index : index + 1], uniforms[index : index + 1])[0],
            changed[index],
        )
    still = torch.full((4, 8), 0.5, dtype=torch.float64)  # the middle of every range: nothing moves
    torch.testing.assert_close(AUGMENT.images(images, still), images)
    assert AUGMENT.images(images[:0], uniforms[:0]).shape == (0, 1, 24, 24)
    dark = AUGMENT.images(torch.full((1, 1, 24, 24), -2.0), uniforms[:1])
    torch.testing.assert_close(
        dark, torch.full((1, 1, 24, 24), -2.0)
    )  # no seam where black comes in


def test_the_synthetic_films_can_be_told_apart(tmp_path: Path) -> None:
    splits = ChestXraySynthetic(count=80, size=24, test_share=0.4).load(tmp_path)
    assert splits.provenance == "synthetic"
    inputs, targets = splits.test.batch(torch.arange(len(splits.test)))
    lungs = (
        inputs[:, 0, 6:18].flatten(1).std(dim=1)
    )  # clouds lower the contrast of dark lungs against the body
    order = lungs.argsort()
    assert (
        targets[order[: len(order) // 2]].float().mean()
        > targets[order[len(order) // 2 :]].float().mean()
    )


@pytest.mark.real_data
def test_the_real_films(data_root: Path) -> None:
    splits, info = ChestXray(size=16).load(data_root), ChestXray(size=16).info(data_root)
    assert (len(splits.train), len(splits.test)) == (info.train, info.test)
    assert len(splits.test) == 1062
    assert splits.provenance == "derived"
    assert "0 patients stood in both parts" in splits.notes
    assert "19 copies" in splits.notes


# ----------------------------------------------------------------------------------- broken films


def png(path: Path) -> None:
    Image.new("L", (20, 20)).save(path, format="PNG")


def tiny(path: Path) -> None:
    Image.new("L", (4, 4)).save(path)


def huge(path: Path) -> None:
    Image.new("L", (9000, 8)).save(path)


def bomb(path: Path) -> None:
    """A file of a few hundred bytes whose header announces 20,000 by 20,000 pixels."""
    Image.new("L", (16, 16)).save(path)
    whole = bytearray(path.read_bytes())
    sides = whole.find(b"\xff\xc0") + 5
    whole[sides : sides + 4] = 2 * (20_000).to_bytes(2, "big")
    path.write_bytes(bytes(whole))


def outside(path: Path) -> None:
    shutil.copy(path, path.parents[3] / "elsewhere.jpeg")
    path.unlink()
    os.symlink(path.parents[3] / "elsewhere.jpeg", path)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "no readable JPEG"),
    "a web page": (lambda path: path.write_bytes(b"<html>not found</html>"), "no readable JPEG"),
    "random bytes": (lambda path: path.write_bytes(bytes(range(256)) * 4), "no readable JPEG"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:300]), "no readable JPEG"),
    "a PNG by another name": (png, "no readable JPEG"),
    "four pixels": (tiny, "4×4 pixels"),
    "a poster": (huge, "9000×8 pixels"),
    "a bomb": (bomb, "has more pixels than any film"),
    "a link out of the folder": (outside, "leads out of"),
    "a text file beside it": (
        lambda path: path.with_name("readme.txt").write_text("hello"),
        "not a JPEG file",
    ),
    "a folder by its name": (lambda path: (path.unlink(), path.mkdir()), "not a JPEG file"),
    "a name without a patient": (
        lambda path: path.rename(path.with_name("scan7.jpeg")),
        "does not tell the patient",
    ),
    "an empty class": (lambda path: [p.unlink() for p in path.parent.iterdir()], "holds no film"),
    "no such class": (lambda path: shutil.rmtree(path.parent), "is missing"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_film_is_refused_by_name(root: Path, how: str) -> None:
    spoil, message = BROKEN[how]
    path = find_films(root / FOLDER)[0].path
    spoil(path)
    with pytest.raises(UserError, match=message) as error:
        ChestXray(size=16).load(root)
    assert "chest_xray" in str(error.value)
    problems = [said for _, said in files.check_files(root, files.card("chest_xray")) if said]
    assert problems == [str(error.value).split(" dataset.bad_records")[0]]


def test_wrong_options_are_refused(root: Path) -> None:
    for options, message in (
        ({"validation_share": 1.0}, r"dataset\.validation_share=1\.0"),
        ({"max_per_patient": 0}, r"dataset\.max_per_patient=0"),
    ):
        with pytest.raises(UserError, match=message):
            ChestXray(**options).load(root)
    with pytest.raises(UserError, match="Did you mean"):
        check_options("dataset", ChestXray, {"sise": 3})
    with pytest.raises(UserError, match="chest_xray_synthetic"):
        ChestXray().load(root / "nowhere")


def test_films_that_are_not_the_releases_parts_say_so(root: Path) -> None:
    splits = ChestXray(size=16).load(root)
    assert splits.provenance == "derived"
    assert "not the release's parts" in splits.notes
    assert "where it has 5,216 + 624" in splits.notes
