"""Every data set is described without its files, and refuses options that mean nothing by key."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from tests.data.helpers import dataset
from zdp_bench.data import files
from zdp_bench.errors import UserError
from zdp_bench.registry import lookup, names

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("cpsc2018", {"test_share": 0.99}, "dataset.test_share=0.99: of 3 recordings of Normal"),
    (
        "cpsc2018",
        {"test_share": 0.1},
        "0.1: of 3 recordings of Normal and 3 of LBBB, the test part takes 1",
    ),
    ("cpsc2018", {"negative": "LBBB"}, "dataset.negative=LBBB: must differ"),
    ("cpsc2018", {"positive": "LBB"}, "Did you mean 'LBBB'"),
    ("cpsc2018_synthetic", {"seconds": 0}, "dataset.seconds=0: must be greater"),
    ("speech_commands_synthetic", {"words": ["yes"]}, "dataset.words=.*at least 2 items"),
    ("ham10000", {"test_share": 0.999}, "dataset.test_share=0.999: leaves 0 pictures to train"),
    ("ham10000", {"validation_share": 0.999}, "dataset.validation_share=0.999: leaves none"),
    ("kspace_phantom", {"test_share": 0.99}, "dataset.test_share=0.99: leaves 0 patients to train"),
    ("kspace_from_volumes", {"folder": "../other"}, r"dataset.folder=\.\./other: must be a"),
    ("mri_sequences_from_volumes", {"folder": "a/../../b"}, "dataset.folder=a/../../b: must be a"),
    ("phase_digits", {"test_share": 0.004}, r"dataset.test_share=0.004.*10 or more digits"),
    ("synthetic_images", {"test": 0}, "dataset.test=0: must be at least 10"),
    ("cifar10", {"augment": "cropflip"}, "'cropflip' is not known. Did you mean 'crop_flip'"),
    ("fastmri", {"center_fraction": 0.3}, "dataset.center_fraction=0.3: must lie"),
    ("fastmri", {"height": 17, "width": 12}, "dataset.height=17: .* as large as 17 by 12"),
    (
        "mri_sequences",
        {"validation_patients": 3},
        "must be less than the number of test patients, 3",
    ),
    (
        "mri_sequences_from_volumes",
        {"test_share": 0.01},
        "dataset.test_share=0.01: leaves 5 volumes",
    ),
    ("msd", {"task": "livr"}, "Did you mean 'liver'"),
    ("msd", {"test_share": 0.01}, "none of 5 volumes to test"),
    ("msd", {"test_share": 0.99, "validation_share": 0.0}, "none of 5 volumes to train"),
    ("msd", {"channel": 3}, "dataset.channel=3: .*liver_0.* has 1 channels"),
    ("physionet2012", {"validation_share": 0.999}, "dataset.validation_share=0.999: leaves none"),
    ("physionet2012", {"norm": 1e39}, r"dataset.norm=1e\+39: must be"),
    ("physionet2012", {"norm": 1e-300}, "dataset.norm=1e-300: must be"),
    ("public_kspace", {"columns": 64}, "dataset.columns=64: must lie between 40 and 63"),
    ("public_kspace", {"rows": 31}, "dataset.rows=31: must lie between 32 and 63"),
    ("public_kspace", {"slices": 3}, "dataset.slices=3: must be null"),
    ("roahd", {"fold": 3}, "dataset.fold=3: 2 people of a diagnosis leave none"),
    ("speech_commands", {"words": ["yes", "nope"]}, "the word 'nope'. Did you mean 'no'"),
    ("speech_commands", {"words": ["yes", "yes"]}, "must name each word once"),
    ("speech_commands", {"grid": [200, 10]}, "must be two numbers, at most 124 frames"),
    ("speech_commands", {"words": ["yes", "no"], "test_share": 0.0}, "leaves 20 clips to train"),
]


def test_every_share_of_a_data_set_has_a_range() -> None:
    """A test_share of ∞ ended in a traceback."""
    for name in names("dataset"):
        for key in get_type_hints(lookup("dataset", name)):
            if key.endswith("_share"):
                with pytest.raises(UserError, match=rf"^dataset\.{key}=inf: must be"):
                    dataset(name, **{key: math.inf})


def ends_of(hint: Any) -> Iterator[float]:
    """Yield numbers just outside of what a type allows."""
    for rule in getattr(hint, "__metadata__", ()):
        for end, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if (limit := getattr(rule, end, None)) is not None and not math.isinf(limit):
                yield limit + step
    for inner in get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else ():
        yield from ends_of(inner)


BOUNDED = [
    (name, key, value)
    for name in names("dataset")
    for key, hint in get_type_hints(lookup("dataset", name), include_extras=True).items()
    for value in ends_of(hint)
]


def test_an_option_outside_of_its_range_is_refused_by_its_key() -> None:
    assert len(BOUNDED) > 100
    for name, key, value in BOUNDED:
        with pytest.raises(UserError, match=rf"^dataset\.{key}={value}: must be"):
            dataset(name, **{key: value})


@pytest.mark.parametrize("method", ["info", "load"])
@pytest.mark.parametrize(
    ("name", "changed", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_option_that_means_nothing_is_refused_by_its_key(
    small_root: Path, method: str, name: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        getattr(dataset(name, **changed), method)(small_root)
    assert "\n" not in str(caught.value)
    assert not (small_root / "synthetic").exists()  # refused before anything is drawn


@pytest.mark.parametrize("name", [of.name for of in files.cards() if of.holds])
def test_an_empty_root_says_what_belongs_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(files.tell_source(files.card(name)))):
        dataset(name).load(tmp_path)


# What owns examples where no patient is known.
UNITS = {
    "image": "mnist fashion_mnist phasemnist phase_digits cifar10 public_kspace synthetic_images",
    "volume": "msd msd_volumes kspace_from_volumes mri_sequences_from_volumes",
    "lesion": "ham10000",
    "patient": "chest_xray fastmri mri_sequences physionet2012",
    "person": "roahd",
    "recording": "cpsc2018",
    "speaker": "speech_commands",
}
# `folder` has no files but a person's own; a stand-in is made.
OWN = {name for name in names("dataset") if name.endswith(("_synthetic", "phantom"))}


@pytest.mark.parametrize("name", sorted({*names("dataset")} - {"folder"} - OWN))
def test_every_data_set_is_described_without_its_files(name: str, tmp_path: Path) -> None:
    info = dataset(name).info(tmp_path)
    assert info.train > 0 < info.test
    assert 1 <= info.examples_per_patient <= info.train
    assert {unit for unit, sets in UNITS.items() if name in sets.split()} <= {info.unit}
    assert not list(tmp_path.iterdir())


BRAIN = {"task": "brain", "max_per_patient": 5}
RELEASED: list[tuple[str, dict[str, Any], tuple[int, int, int]]] = [
    ("phasemnist", {}, (58_142, 10_000, 2)),
    ("chest_xray", {"validation_share": 0.0}, (4737, 624, 18)),
    ("cpsc2018", {}, (1012, 113, 1)),
    ("ham10000", {}, (8012, 2003, 6)),
    ("physionet2012", {"validation_share": 0.5}, (2000, 4000, 1)),
    ("roahd", {}, (90, 10, 1)),
    ("mri_sequences_from_volumes", {}, (208 * 80, 52 * 80, 80)),
    ("fastmri", {}, (34_742, 7_135, 50)),
    ("msd", {}, (5184, 2560, 64)),  # the paper's 81, 10 and 40 volumes
    ("msd", {**BRAIN, "validation_share": 0.0}, (336 * 5, 148 * 64, 5)),
    ("mri_sequences", {"slices": 1000}, (484 * 620, 156 * 620, 620)),  # a volume has 155
]


@pytest.mark.parametrize(("name", "changes", "counts"), RELEASED)
def test_without_files_the_counts_are_the_releases(
    tmp_path: Path, name: str, changes: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    info = dataset(name, **changes).info(tmp_path)
    assert (info.train, info.test, info.examples_per_patient, info.found) == (*counts, False)


@pytest.mark.parametrize(
    ("name", "changes", "is_estimate"),
    [
        ("speech_commands", {}, True),  # of a speaker, 20 on average; some have over a hundred
        ("msd", {"max_per_patient": 64}, False),
        ("msd", {"max_per_patient": None}, True),
        ("msd", {"max_per_patient": 200}, True),
        ("msd_volumes", {}, False),
        ("kspace_from_volumes", {"slices": None}, True),
        ("kspace_from_volumes", {}, False),
        ("public_kspace", {}, False),
        ("fastmri", {}, False),
    ],
)
def test_a_guess_at_the_largest_number_of_an_owner_is_no_fact(
    tmp_path: Path, name: str, changes: dict[str, Any], is_estimate: bool
) -> None:
    assert dataset(name, **changes).info(tmp_path).is_estimate == is_estimate
