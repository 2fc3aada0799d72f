"""The digest sees whatever may change an example: of every data set, in every file it reads."""

import gzip
import hashlib
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.helpers import copy_folder, dataset
from tests.extras.own_data.own_data import KINDS, write_classes, write_masks, write_png
from zdp_bench.data import N_UNIFORMS, Dataset, Source, Splits, cifar10
from zdp_bench.data.fastmri import FOLDERS, write_volume
from zdp_bench.data.files import collect_sources
from zdp_bench.data.owners import count_owners, identify_owners
from zdp_bench.errors import UserError
from zdp_bench.registry import names

Write = Callable[[Path], object]


def listed(root: Path, column: str) -> None:
    """Pictures that a CSV lists, with their class or their reference, and their patients."""
    lines = [f"path,{column},patient,split"]
    for number in range(12):
        noisy, clean = (f"{kind}/{number:02}.png" for kind in ("noisy", "clean"))
        write_png(root / "own" / noisy, 40 + number)
        write_png(root / "own" / clean, 140 + number)
        target = clean if column == "reference" else f"c{number % 2}"
        lines.append(f"{noisy},{target},p{number // 2},{'train' if number < 8 else 'test'}")
    (root / "own" / "list.csv").write_text("\n".join(lines))


def of_folder(kind: str, **options: Any) -> dict[str, Any]:
    return {"path": "own", "size": 8, "fit": "resize", **KINDS[kind][2], **options}


LISTED = {"path": "own/list.csv", "size": 8}
SLICES = {"height": 8, "width": 8, "slices": 2, "test_share": 0.4}
# name and variant -> (the folders of `small_root`, or what writes the files; options)
CASES: dict[str, tuple[list[str] | Write, dict[str, Any]]] = {
    "chest_xray": (["chest_xray"], {"size": 16}),
    "cifar10": ([cifar10.FOLDER], {"check": False}),
    "cpsc2018": (["CPSC2018"], {"test_share": 0.4}),
    "cpsc2018 skip": (["CPSC2018"], {"test_share": 0.4, "bad_examples": "skip"}),
    "fashion_mnist": (["FashionMNIST"], {"check": False}),
    "fastmri": (["fastMRI"], {"height": 8, "width": 8}),
    "ham10000": (["ham10000"], {"size": 16, "validation_share": 0.2}),
    "ham10000 diagnosis": (["ham10000"], {"size": 16, "target": "diagnosis"}),
    "kspace_from_volumes": (["Task04_Hippocampus"], SLICES),
    "mnist": (["MNIST"], {"check": False}),
    "mri_sequences": (["Task01_BrainTumour"], {"size": 8, "slices": 2, "validation_patients": 1}),
    "mri_sequences_from_volumes": (["Task04_Hippocampus"], {"size": 8, "slices": 2}),
    "msd": (["Task03_Liver"], {"size": 16, "validation_share": 0.2}),
    "msd_volumes": (["Task03_Liver"], {"task": "liver", "shape": [8, 8, 6], "test_share": 0.4}),
    "phasemnist": (["MNIST"], {"check": False}),
    "physionet2012": (["physionet2012"], {"validation_share": 0.3}),
    "public_kspace": ([cifar10.FOLDER], {"train": 8, "test": 4}),
    "roahd": (["roahd"], {}),
    "roahd every lead": (["roahd"], {"low_bins": 4}),
    "speech_commands": (["SpeechCommands"], {"words": ["yes", "no"], "test_share": 0.3}),
    **{
        f"folder {k}": (lambda root, k=k: write_classes(root / "own", k, 3), of_folder(k))
        for k in KINDS
    },
    **{
        f"folder {k} masks": (lambda root, k=k: write_masks(root / "own", k, 6), of_folder(k))
        for k in ("picture", "volume")
    },
    "folder listed": (lambda root: listed(root, "label"), LISTED),
    "folder references": (lambda root: listed(root, "reference"), LISTED),
}
# Owners are the images of a release, by their number in it.
NUMBERED = {"phasemnist", "public_kspace"}
WITHOUT_FILES = {"phase_digits", "synthetic_images"}
# Read by the data set that they stand in for.
STAND_INS = {name for name in names("dataset") if name.endswith(("_synthetic", "phantom"))}


def test_every_registered_data_set_is_here() -> None:
    """A new one needs a line of `CASES`, and then keeps the rules below."""
    assert {case.split()[0] for case in CASES} == {*names("dataset")} - WITHOUT_FILES - STAND_INS


@pytest.fixture
def files_of(
    case: str, small_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Dataset]:
    """A data root with the files of a case, and its data set."""
    source, options = CASES[case]
    if case == "folder image":
        pytest.importorskip("pydicom")
    root = tmp_path / "root"
    root.mkdir()
    for folder in source if isinstance(source, list) else ():
        copy_folder(small_root, root, folder)
    if callable(source):
        source(root)
    monkeypatch.chdir(root)
    monkeypatch.setattr(cifar10, "release_of", lambda paths, of: "binary")
    return root, dataset(case.split()[0], **options)


# What two owners, the second of many, must not be called.
WRONG = {
    "missing": (["unknown"], "'unknown' stands for a missing one"),
    "negative": (["-1"], "'-1' stands for a missing one"),
    "in other case": (["Ab c7", "AB C7"], "differ only in case, spaces, zeros"),
    "with a zero": (["p7", "p07"], "differ only in case, spaces, zeros"),
    "alike": (["p7", "p7"], "'p7' has 2 numbers"),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_are_apart_and_owners_named_or_refused(
    case: str, files_of: tuple[Path, Dataset], tmp_path: Path
) -> None:
    root, of = files_of
    splits, info = of.load(root), of.info(root)
    if known := of.published_info(tmp_path / "empty"):
        for fact in ("input_shape", "dtype", "outputs", "target_shape", "target_dtype", "unit"):
            assert getattr(known, fact) == getattr(info, fact)
    parts = [part for part in (splits.train, splits.test, splits.validation) if part is not None]
    inside = [Counter(_each(part)) for part in parts]
    for first, other in combinations(inside, 2):
        assert not first & other, "an example is in two parts"
    assert of.names_owners == (splits.train.groups is not None)
    if splits.train.groups is None:
        with pytest.raises(UserError, match="does not state who owns"):
            count_owners(splits, "privacy.unit=patient")
    else:
        assert count_owners(splits, "") == info.owners
        # Neighbours differ by an owner: what follows from a number would move all behind it.
        assert bool(splits.owner_names) == (case not in NUMBERED)
        identities = identify_owners(splits, "")[1]
        assert len({*identities}) == len(identities) == info.owners
    # fastMRI took p1, P1 and p01 for three patients, and 'unknown' for one.
    for wrong, (missing_or_twice, says) in WRONG.items() if splits.owner_names else ():
        names_of = [*missing_or_twice, *splits.owner_names[len(missing_or_twice) :]]
        is_right = splits.unit == "volume" and wrong != "alike"  # a file may have any name
        with nullcontext() if is_right else pytest.raises(UserError, match=says):
            replace(splits, owner_names=names_of)
    assert of.load(root).digest == splits.digest
    for seed in ("split_seed", "pairing_seed", "seed"):
        if hasattr(of, seed) and "folder" not in case:  # whose few patients may fall as before
            assert replace(of, **{seed: 1}).load(root).digest != splits.digest


@pytest.mark.parametrize("case", CASES)
def test_hidden_files_of_macos_are_no_examples(
    case: str, files_of: tuple[Path, Dataset], tmp_path: Path
) -> None:
    root, of = files_of
    whole = of.load(root)
    for path in [path for path in root.rglob("*") if path.is_file()]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7Mac OS X")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    again = of.load(root)
    assert (again.digest, again.provenance) == (whole.digest, whole.provenance)
    assert content(again) == content(whole)


# Tables and headers of text that spreadsheets and editors save with a byte order mark.
TEXTS = {
    "folder listed": ["own/list.csv"],
    "ham10000": ["ham10000/HAM10000_metadata.csv"],
    "physionet2012": ["physionet2012/Outcomes-a.txt", "physionet2012/set-a/*.txt"],
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_byte_order_mark_changes_nothing_but_the_digest(
    case: str, files_of: tuple[Path, Dataset], tmp_path: Path
) -> None:
    root, of = files_of
    whole = of.load(root)
    for pattern in TEXTS[case]:
        for path in root.glob(pattern):
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert content(of.load(root)) == content(whole)


def _each(part: Source) -> Iterator[bytes]:
    """Yield a name of each example: its numbers, as they are before anything is drawn."""
    uniforms = torch.zeros(len(part), N_UNIFORMS) if part.is_stochastic else None
    for arrays in zip(*part.batch(torch.arange(len(part)), uniforms), strict=True):
        yield b"".join(array.numpy().tobytes() for array in arrays)


def content(splits: Splits) -> str:
    """Name everything that a run can see of a data set."""
    checksum = hashlib.sha256()
    for part in (splits.train, splits.test, splits.validation):
        if part is None:
            continue
        uniforms = torch.from_numpy(np.random.default_rng(0).random((len(part), N_UNIFORMS)))
        given = uniforms if part.is_stochastic else None
        owners = () if part.groups is None else (part.groups,)
        for array in (*part.batch(torch.arange(len(part)), given), *owners):
            checksum.update(f"{array.shape}{array.dtype}".encode() + array.numpy().tobytes())
    return f"{checksum.hexdigest()}:{splits.examples_per_patient}:{splits.input_shape}"


def numbers(splits: Splits) -> tuple[int, ...]:
    """Return the numbers of examples and of owners, which are public."""
    parts = [part for part in (splits.train, splits.test, splits.validation) if part is not None]
    owners = [len(part.groups.unique()) for part in parts if part.groups is not None]
    return (*map(len, parts), *owners, splits.examples_per_patient)


def changes_of(raw: bytes, draw: random.Random, changes: int) -> Iterator[bytes]:
    """Yield a file's bytes, cut, longer, or changed in one place; of a short text also a number.

    What is packed is changed inside too, where no checksum guards it.
    """
    if raw.startswith(b"\x1f\x8b"):
        inside = bytearray(gzip.decompress(raw))
        inside[-1 - draw.randrange(20)] ^= 1
        yield gzip.compress(inside, 1)
    yield raw[: draw.randrange(len(raw))]
    yield raw + draw.randbytes(100)
    for _ in range(changes):
        made, start = bytearray(raw), draw.randrange(len(raw))
        for place in range(start, min(len(raw), start + draw.choice((1, 2, 900)))):
            made[place] = draw.randrange(256)
        yield bytes(made)
    if raw.isascii() and len(raw) < 4096:
        for number, _ in Counter(re.findall(rb"\d+", raw)).most_common(3):
            other = str(draw.randrange(10 ** len(number))).zfill(len(number)).encode()
            yield re.sub(rb"(?<!\d)" + number + rb"(?!\d)", other, raw)


def choose_files(root: Path, draw: random.Random, most: int) -> list[Path]:
    """Return some files of each folder and name without numbers: headers, lists and labels."""
    kinds: dict[tuple[Any, ...], list[Path]] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = re.sub(r"\d+", "", path.name)
        kinds.setdefault((*path.relative_to(root).parts[:2], name), []).append(path)
    return [path for of in kinds.values() for path in draw.sample(of, min(most, len(of)))]


@pytest.mark.filterwarnings("ignore")  # numpy's, of numbers that are as large as float32's get
@pytest.mark.parametrize(("most", "changes"), [(1, 1), pytest.param(2, 40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_a_changed_file_is_refused_or_another_digest_or_the_same_examples(
    case: str, most: int, changes: int, files_of: tuple[Path, Dataset], tmp_path: Path
) -> None:
    """`changes` of bytes in each of `most` files of a folder and name; a refusal is a sentence."""
    root, of = files_of
    cache = tmp_path / "cache"
    refusals: list[str] = []

    def load() -> tuple[str, str, str, tuple[int, ...]] | None:
        """Return digest, content, notes and numbers; None if a sentence refuses them."""
        shutil.rmtree(cache, ignore_errors=True)  # an array of the same digest would hide a change
        try:
            splits = of.load(root)
            return splits.digest, content(splits), splits.notes, numbers(splits)
        except UserError as error:
            refusals.append(str(error))
            return None

    with collect_sources() as sources:
        whole = load()
    assert sources  # by which a run's spending is found
    assert whole is not None
    draw, wrong, differ = random.Random(case), [], 0
    for path in choose_files(root, draw, most):
        raw = path.read_bytes()
        for changed in changes_of(raw, draw, changes):
            path.write_bytes(changed)
            changed_splits = load()
            differ += changed_splits != whole
            # A record states numbers of examples, and nothing else that follows from them.
            if case != "folder listed":  # whose notes name the classes, which are public
                assert (
                    not changed_splits
                    or changed_splits[3] != whole[3]
                    or changed_splits[2] == whole[2]
                ), changed_splits[2]
            if changed_splits and changed_splits[0] == whole[0] and changed_splits[1] != whole[1]:
                pairs = enumerate(zip(raw, changed, strict=False))
                differing = (place for place, (old, new) in pairs if old != new)
                start = next(differing, min(len(raw), len(changed)))
                wrong.append(f"{path.relative_to(root)}, from byte {start} on")
        path.write_bytes(raw)
    assert not wrong, "\n".join(wrong)
    assert not [refusal for refusal in refusals if "\n" in refusal]
    assert differ


def test_a_digest_is_the_one_of_committed_records(tmp_path: Path) -> None:
    """Drawn volumes would not do, because processors round FFTs and exponentials differently."""
    for number in range(5):
        kspace = np.full((2, 8, 8), number + 1j)
        magnitude = np.zeros((2, 8, 8))
        magnitude[0, 0, 0] = number
        side = FOLDERS[0] if number < 3 else FOLDERS[1]
        path = tmp_path / "fastMRI" / side / f"file{number}.h5"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_volume(path, kspace, magnitude, path.stem, "synthetic")
    data = dataset("fastmri", height=8, width=8).load(tmp_path)
    assert data.digest == "0621e529e466dd0d5acc3383fa4f0fcb51412d7af53a9499dabe37dd15dc37d7"
