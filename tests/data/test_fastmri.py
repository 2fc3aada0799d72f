"""fastMRI: masks equal its own, fixed to test and random to train; files are read lazily."""

import os
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from zdp_bench.data import N_UNIFORMS, Source
from zdp_bench.data.fastmri import FOLDERS, MULTICOIL, FastMri, find_volumes
from zdp_bench.data.finite import count_not_finite
from zdp_bench.data.kspace import (
    Undersampling,
    centre_crop,
    draw_mask,
    fixed_mask,
    to_image,
    to_kspace,
    undersample,
)
from zdp_bench.errors import UserError

HOW = Undersampling(acceleration=4, center_fraction=0.08, height=8, width=7)


def fastmris_mask(
    columns: int, acceleration: int, centre_fraction: float, file_name: str
) -> np.ndarray:
    """RandomMaskFunc of Zbontar et al., seeded as theirs, with numpy's global generator."""
    state = np.random.get_state()
    np.random.seed(tuple(map(ord, file_name)))
    np.random.randint(0, 1)  # their choice among one pair of acceleration and centre fraction
    low = round(columns * centre_fraction)
    mask = np.random.uniform(size=columns) < (columns / acceleration - low) / (columns - low)
    pad = (columns - low + 1) // 2
    mask[pad : pad + low] = True
    np.random.set_state(state)
    return mask


@pytest.mark.parametrize("columns", [368, 372, 50, 33])
@pytest.mark.parametrize("name", ["file1000001.h5", "file1002570.h5"])
def test_a_files_mask_is_fastmris(columns: int, name: str) -> None:
    assert np.array_equal(fixed_mask(columns, HOW, name), fastmris_mask(columns, 4, 0.08, name))


def test_a_mask_keeps_a_quarter_on_average_and_always_the_centre() -> None:
    random = np.random.default_rng(0)
    masks = np.stack([draw_mask(320, HOW, random) for _ in range(300)])
    assert abs(masks.mean() - 0.25) < 0.005
    always = np.flatnonzero(masks.all(axis=0))
    # 26 = round(0.08 * 320) columns round column 160, the zero frequency
    assert list(always) == list(range(147, 173))
    assert len(np.unique(masks, axis=0)) == 300


def test_the_transforms_are_unitary_centred_and_each_others_inverse() -> None:
    image = np.zeros((5, 6), dtype=np.complex64)
    image[2, 3] = 1  # the centre, whose spectrum is flat
    assert np.allclose(to_kspace(image), 1 / np.sqrt(30))
    noise = np.random.default_rng(0).normal(size=(2, 5, 6)) + 1j
    assert np.allclose(to_image(to_kspace(noise)), noise)
    assert np.isclose(np.linalg.norm(to_kspace(noise)), np.linalg.norm(noise))
    assert to_kspace(image).dtype == np.complex64


def test_the_crop_rounds_as_fastmri_does() -> None:
    image = np.arange(7 * 9).reshape(7, 9)
    assert centre_crop(image, 4, 4)[0, 0] == image[1, 2]
    assert centre_crop(image[None], 7, 9).shape == (1, 7, 9)


def test_an_input_has_unit_deviation_and_a_full_mask_loses_nothing() -> None:
    random = np.random.default_rng(1)
    kspace = (random.normal(size=(16, 12)) + 1j * random.normal(size=(16, 12))).astype(np.complex64)
    image, magnitude = undersample(kspace, np.ones(12, dtype=bool), HOW, (16, 12))
    assert image.shape == magnitude.shape == (8, 7)
    assert image.dtype == np.complex64
    assert magnitude.dtype == np.float32
    assert np.isclose(np.abs(image).std(ddof=1), 1, atol=1e-5)
    assert np.allclose(magnitude, np.abs(centre_crop(to_image(kspace), 8, 7)), atol=1e-6)
    assert np.allclose(np.angle(image), np.angle(centre_crop(to_image(kspace), 8, 7)), atol=1e-4)
    for made in undersample(0 * kspace, np.ones(12, dtype=bool), HOW, (16, 12)):
        assert not made.any()  # no NaN of an empty slice


SLICES, ROWS, COLUMNS, SIDE = 5, 24, 18, 16
SMALL = {"height": 16, "width": 12}


def arrays(number: int, slices: int = SLICES) -> dict[str, np.ndarray]:
    real, imaginary = np.random.default_rng(number).normal(size=(2, slices, ROWS, COLUMNS))
    kspace = (real + 1j * imaginary).astype(np.complex64)
    image = np.abs(centre_crop(to_image(kspace), SIDE, SIDE))
    return {"kspace": kspace, "reconstruction_esc": image.astype(np.float32)}


def write(path: Path, number: int, patient: str | None = None, **changed: object) -> Path:
    """One file in the published layout; `changed` replaces data sets, None leaves one out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = arrays(number) | changed
    with h5py.File(path, "w") as file:
        for name, value in content.items():
            if value is not None:
                file[name] = value
        file.attrs["patient_id"] = patient or f"p{number}"
    return path


def write_set(root: Path) -> None:
    """Three volumes to train on and two to test on."""
    for number, side in enumerate((FOLDERS[0], FOLDERS[0], FOLDERS[0], FOLDERS[1], FOLDERS[1])):
        path = root / "fastMRI" / side / f"file100000{number}.h5"
        write(path, number, patient=f"p{'00122'[number]}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_set(tmp_path)
    return tmp_path


def everything(of: Source, seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(of), N_UNIFORMS
    uniforms = None if seed is None else torch.from_numpy(np.random.default_rng(seed).random(shape))
    return of.batch(torch.arange(len(of)), uniforms)


def test_every_slice_is_an_example_and_a_patient_owns_several(root: Path) -> None:
    splits = FastMri(**SMALL).load(root)
    assert (len(splits.train), len(splits.test)) == (15, 10)
    assert splits.input_shape == (1, 16, 12)
    assert splits.provenance == "derived"
    assert splits.examples_per_patient == 10  # p0 has two of the three training volumes
    # patients keep together, wherever they are dealt; volumes are measured one by one
    assert sorted(Counter(splits.train.groups.tolist()).values()) == [5, 10]
    assert splits.test.groups.tolist() == [15] * 5 + [16] * 5


def test_a_patient_on_both_sides_is_refused_but_in_the_release(root: Path) -> None:
    write(root / "fastMRI" / FOLDERS[1] / "file1000009.h5", 9, patient="p0")
    with pytest.raises(UserError, match=r"patient p0 .*singlecoil_train"):
        FastMri(**SMALL).load(root)
    splits = FastMri(**SMALL).read_splits(find_volumes(root / "fastMRI"), "official", "")
    assert "1 patients have volumes on both sides" in splits.notes


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("p1", "P1", "differ only in case"),
        ("p1", "p01", "differ only in case"),
        ("unknown", "p5", "'unknown' stands for a missing one"),
        ("None", "p5", "'None' stands for a missing one"),
        ("-1", "5", "'-1' stands for a missing one"),
        ("0", "104233", "'0' stands for a missing one"),
    ],
)
@pytest.mark.parametrize("side", FOLDERS)
def test_patients_are_named_and_in_one_spelling(
    side: str, first: str, second: str, says: str, root: Path
) -> None:
    write(root / "fastMRI" / FOLDERS[0] / "a.h5", 7, patient=first)
    write(root / "fastMRI" / side / "b.h5", 8, patient=second)
    with pytest.raises(UserError, match=says):
        FastMri(**SMALL).load(root)


def test_a_file_without_a_patient_is_nobody_elses(root: Path) -> None:
    unnamed = write(root / "fastMRI" / FOLDERS[0] / "p9.h5", 7)
    with h5py.File(unnamed, "a") as file:
        del file.attrs["patient_id"]
    write(root / "fastMRI" / FOLDERS[0] / "a.h5", 8, patient="p9")
    splits = FastMri(**SMALL).load(root)
    assert [*splits.owner_names] == ["p9", "p0", "p1", "p9.h5", "p2"]
    write(root / "fastMRI" / FOLDERS[1] / "b.h5", 9, patient="p9.h5")
    with pytest.raises(UserError, match=r"b\.h5: .*'p9\.h5'"):
        FastMri(**SMALL).load(root)


HUGE = float(np.finfo(np.float32).max)
WHOLE = {**arrays(0), "double": arrays(0)["kspace"].astype(np.complex128)}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["kspace", "reconstruction_esc", "double"])
@pytest.mark.parametrize("value", [np.nan, np.inf, HUGE, 1e300])
def test_reading_a_slice_tells_nothing_of_its_values(name: str, value: float, root: Path) -> None:
    """An error or a warning at the step that draws a slice is a release that no ε covers."""
    changed = WHOLE[name].copy()
    with np.errstate(over="ignore"):
        changed[[1, 3], :4] = value
    written = {"kspace" if name == "double" else name: changed}
    write(root / "fastMRI" / FOLDERS[0] / "file1000000.h5", 0, patient="p0", **written)
    splits = FastMri(**SMALL).load(root)
    everything(splits.train, seed=1)
    train, test = count_not_finite(splits)
    is_kept = (name, value) == ("reconstruction_esc", HUGE)
    assert (train.not_finite, test.not_finite) == (0 if is_kept else 2, 0)


def test_a_test_example_is_the_slice_under_its_files_mask(root: Path) -> None:
    inputs, targets = FastMri(**SMALL).load(root).test.batch(torch.tensor([7, 2]))
    how = Undersampling(4, 0.08, 16, 12)
    for row, (number, which) in enumerate([(4, 2), (3, 2)]):
        content = arrays(number)
        mask = fixed_mask(COLUMNS, how, f"file100000{number}.h5")
        zero_filled = centre_crop(to_image(content["kspace"][which] * mask), 16, 12)
        whole = centre_crop(content["reconstruction_esc"][which], 16, 12)
        scaled = zero_filled / np.abs(zero_filled).std(ddof=1)
        assert np.allclose(targets[row].numpy(), [whole, np.abs(zero_filled)], atol=1e-6)
        assert np.allclose(inputs[row, 0].numpy(), scaled, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(24, 18), (25, 19), (24, 19), (25, 18)])
@pytest.mark.parametrize(("height", "width"), [(16, 12), (15, 11), (16, 11), (15, 16)])
@pytest.mark.parametrize(("folders", "num_coils"), [(FOLDERS, 1), (MULTICOIL, 3)])
def test_input_and_reference_show_the_same_pixels(
    rows: int,
    columns: int,
    height: int,
    width: int,
    folders: tuple[str, str],
    num_coils: int,
    tmp_path: Path,
) -> None:
    """Without undersampling, the zero-filled image is the reference, for odd differences too."""
    real, imaginary = np.random.default_rng(0).normal(size=(2, 2, num_coils, rows, columns))
    kspace = (real + 1j * imaginary).astype(np.complex64)
    image = np.sqrt((np.abs(to_image(kspace)) ** 2).sum(axis=1))
    reconstruction = centre_crop(image, SIDE, SIDE).astype(np.float32)
    is_single = num_coils == 1
    changed = {
        "kspace": kspace[:, 0] if is_single else kspace,
        "reconstruction_esc": reconstruction if is_single else None,
        "reconstruction_rss": None if is_single else reconstruction,
    }
    for folder in folders:
        write(tmp_path / "fastMRI" / folder / f"{folder}.h5", 0, patient=folder, **changed)
    crop = {"height": height, "width": width}
    splits = FastMri(**crop, acceleration=1, center_fraction=1).load(tmp_path)
    for part in (splits.train, splits.test):
        reference, zero_filled = everything(part)[1].unbind(1)
        torch.testing.assert_close(zero_filled, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [9, 10, 13])
def test_a_reconstruction_that_is_wider_than_its_kspace_is_cropped_to_it(
    columns: int, root: Path
) -> None:
    """As in fastMRI's code ("FLAIR 203"): the k-space shows the reconstruction's middle columns."""
    image = np.random.default_rng(0).random((1, SIDE, SIDE)).astype(np.float32)
    narrow = to_kspace(centre_crop(image, SIDE, columns)).astype(np.complex64)
    for folder in FOLDERS:
        path = root / "fastMRI" / folder / f"flair_{folder}.h5"
        write(path, 0, patient=folder, kspace=narrow, reconstruction_esc=image)
    splits = FastMri(height=16, width=12).load(root)
    num_left_out = 0 if columns >= 12 else 2
    assert (f"{num_left_out} volumes smaller than 16 by 12" in splits.notes) == bool(num_left_out)
    how = {"height": 16, "width": 8, "acceleration": 1, "center_fraction": 1}
    for part in (FastMri(**how).load(root).train, FastMri(**how).load(root).test):
        reference, zero_filled = part.batch(torch.tensor([len(part) - 1]))[1][0]
        torch.testing.assert_close(zero_filled, reference, rtol=1e-4, atol=1e-5)


def test_an_image_with_more_rows_than_its_kspace_is_refused(root: Path) -> None:
    tall = np.ones((SLICES, ROWS + 1, SIDE), dtype=np.float32)
    write(root / "fastMRI" / FOLDERS[0] / "tall.h5", 0, reconstruction_esc=tall)
    with pytest.raises(UserError, match=r"tall\.h5: .*more rows than its k-space"):
        FastMri(**SMALL).load(root)


def test_training_masks_are_decided_by_a_examples_uniforms_alone(root: Path) -> None:
    train = FastMri(**SMALL).load(root).train
    first, again, other = (everything(train, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    changed = (first[0] != other[0]).flatten(1).any(dim=1)
    assert changed.float().mean() > 0.8
    assert torch.equal(first[1][:, 0], other[1][:, 0])  # the reference is the same
    uniforms = torch.from_numpy(np.random.default_rng(1).random((len(train), N_UNIFORMS)))
    assert torch.equal(train.batch(torch.tensor([9]), uniforms[9:10])[0], first[0][9:10])
    test = FastMri(**SMALL).load(root).test
    assert torch.equal(everything(test, seed=1)[0], everything(test)[0])


def test_no_file_stays_open_and_nothing_is_read_before_it_is_drawn(root: Path) -> None:
    splits = FastMri(**SMALL).load(root)
    everything(splits.test)
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not any(name.endswith(".h5") for name in opened)
    empty = splits.train.batch(torch.arange(0))
    assert empty[0].shape == (0, 1, 16, 12)
    assert empty[1].shape == (0, 2, 16, 12)


def test_volumes_that_are_too_small_are_left_out_and_counted(root: Path) -> None:
    narrow = arrays(8)["reconstruction_esc"][:, :, :11]
    write(root / "fastMRI" / FOLDERS[0] / "narrow.h5", 8, reconstruction_esc=narrow)
    notes = FastMri(**SMALL).load(root).notes
    assert "1 volumes smaller than 16 by 12 left out" in notes


def coils_of(number: int) -> dict[str, np.ndarray]:
    """Three coils: the single one's k-space times three sensitivities."""
    single = arrays(number)
    kspace = np.stack([single["kspace"] * (c + 1) for c in range(3)], axis=1)
    rss = np.sqrt((np.abs(centre_crop(to_image(kspace), SIDE, SIDE)) ** 2).sum(axis=1))
    return {"kspace": kspace, "reconstruction_rss": rss.astype(np.float32)}


def test_several_coils_are_combined(tmp_path: Path) -> None:
    root = tmp_path / "fastMRI"
    for number in range(4):
        path = root / f"multicoil_{'val' if number == 3 else 'train'}" / f"file_{number}.h5"
        write(path, number, reconstruction_esc=None, **coils_of(number))
    splits = FastMri(**SMALL).load(tmp_path)
    assert (len(splits.train), len(splits.test)) == (15, 5)
    assert "coils combined by the root of their sum of squares, without a phase" in splits.notes
    inputs, targets = splits.test.batch(torch.arange(5))
    assert inputs.dtype == torch.complex64
    assert not inputs.imag.any()
    rss = centre_crop(coils_of(3)["reconstruction_rss"], 16, 12)
    np.testing.assert_array_equal(targets[:, 0], rss)
    (root / "singlecoil_train").mkdir()
    (root / "singlecoil_train" / ".DS_Store").touch()
    assert FastMri(**SMALL).info(tmp_path).found  # a folder without files hides no others
    (root / "singlecoil_train" / ".DS_Store").unlink()
    (root / "singlecoil_train").rmdir()
    crossing = write(
        root / "multicoil_val" / "b.h5", 2, "p0", reconstruction_esc=None, **coils_of(2)
    )
    with pytest.raises(UserError, match=r"p0 has volumes in multicoil_train and in multicoil_val;"):
        FastMri(**SMALL).load(tmp_path)
    crossing.unlink()
    (root / "multicoil_train").rename(root / "singlecoil_train")
    (root / "multicoil_val").rename(root / "singlecoil_val")
    assert FastMri(**SMALL).load(tmp_path).digest == splits.digest  # the files tell, not the folder
    write(root / "singlecoil_train" / "a.h5", 5)
    assert "without a phase" in FastMri(**SMALL).load(tmp_path).notes
