"""Who owns the training examples, and how many owners there are before any is read."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from tests.data.helpers import dataset
from tests.data.test_digests import CASES
from zdp_bench.data import DatasetInfo, Examples, Part, Splits
from zdp_bench.data.nifti import HIPPOCAMPI
from zdp_bench.data.owner_names import require_named
from zdp_bench.data.owners import (
    count_owners,
    identify_examples,
    identify_owners,
    owners_of,
    pick_test_owners,
)
from zdp_bench.errors import UserError
from zdp_bench.library.units import find_owners

FOUR = torch.zeros(4, 1), torch.zeros(4)
PLAIN = Splits(Examples(*FOUR), Examples(*FOUR), (1,), 1, "synthetic", "digest")
OWNED = replace(PLAIN, train=Examples(*FOUR, groups=torch.tensor([5, 2, 5, 2])))


def test_owners_come_from_groups_where_anybody_owns_several() -> None:
    assert owners_of(OWNED, "x").tolist() == [5, 2, 5, 2]
    assert count_owners(OWNED, "x") == 2
    assert owners_of(PLAIN, "x").tolist() == [0, 1, 2, 3]


def test_the_unit_is_the_example_unless_the_data_set_states_owners() -> None:
    """A plug-in without owners was said to have one example of each patient."""
    assert PLAIN.unit == "example"
    assert OWNED.unit == "patient"
    assert replace(PLAIN, examples_per_patient=2).unit == "patient"
    assert replace(PLAIN, unit="image").unit == "image"


@pytest.mark.parametrize("given", [{}, {"examples_per_patient": 1}, {"examples_per_patient": 9}])
def test_the_largest_group_is_counted_whatever_is_given(given: dict[str, int]) -> None:
    """A default of 1 gave a patient with 12 examples the ε of one with a single one."""
    groups = torch.tensor([4, 4, 7, 4])
    splits = replace(PLAIN, train=Examples(*FOUR, groups=groups), **given)
    assert splits.examples_per_patient == 3
    assert owners_of(splits, "x").tolist() == groups.tolist()
    fewer = replace(splits, train=Part(splits.train, torch.tensor([0, 2])))
    assert fewer.examples_per_patient == 1
    assert replace(fewer, train=Part(splits.train, torch.tensor([], dtype=torch.long)))


@pytest.mark.parametrize("part", ["test", "validation"])
def test_an_owner_in_two_parts_is_refused_unless_it_is_meant(part: str) -> None:
    crossing = Examples(*FOUR, groups=torch.tensor([9, 2, 8, 9]))
    rule = rf"1 owners .* in its {part} part too \(the first is group 2"
    with pytest.raises(UserError, match=rule):
        replace(OWNED, **{part: crossing})
    assert replace(OWNED, **{part: crossing}, parts_share_owners=True)
    assert replace(OWNED, **{part: Examples(*FOUR, groups=torch.tensor([9, 1, 8, 9]))})


def test_owners_that_are_not_known_are_refused() -> None:
    several = replace(PLAIN, examples_per_patient=2)
    with pytest.raises(UserError, match="x: a patient owns up to 2 examples"):
        owners_of(several, "x")
    info = DatasetInfo(train=4, test=1, input_shape=(1,), outputs=1, examples_per_patient=2)
    assert count_owners(replace(info, owners=3), "x") == 3
    for silent in (info, replace(info, examples_per_patient=1), several, PLAIN):
        with pytest.raises(UserError, match="x: this data set does not state who owns"):
            count_owners(silent, "x")


def test_an_example_is_identified_by_its_content_whoever_else_is_there() -> None:
    many = 2500  # more than are digested at once
    inputs, targets = torch.randn(many, 2, 3, dtype=torch.complex64), torch.arange(many) % 10
    inputs[9], targets[9] = inputs[4], targets[4]
    inputs[8] = inputs[4]
    whole = identify_examples(Examples(inputs, targets))
    assert len({*whole}) == many - 1
    assert whole[9] == whole[4] != whole[8]  # the same, but for the target of the last
    turned = identify_examples(Examples(inputs.flip(0), targets.flip(0)))
    assert turned == whole[::-1]
    assert identify_examples(Examples(inputs[3:].conj().conj(), targets[3:])) == whole[3:]
    for dtype in (torch.float64, torch.bfloat16, torch.uint8, torch.bool):
        values = torch.arange(2)[:, None].to(dtype)
        assert len({*identify_examples(Examples(values, torch.zeros(2)))}) == 2
    assert identify_examples(Examples(inputs[:0], targets[:0])) == []


def test_an_owner_is_identified_by_name_else_by_number_else_by_its_content() -> None:
    owner_of, numbered = identify_owners(OWNED, "x")
    assert (owner_of.tolist(), numbered) == ([1, 0, 1, 0], [b"2", b"5"])
    names = ["Di", "Cy", "Bo", "Ed", "Fe", "Al"]
    owner_of, named = identify_owners(replace(OWNED, owner_names=names), "x")
    assert (owner_of.tolist(), named) == ([1, 0, 1, 0], [b"Bo", b"Al"])
    single = replace(OWNED, train=Examples(*FOUR, groups=torch.tensor([5, 2, 0, 1])))
    owner_of, named = identify_owners(replace(single, owner_names=names), "x")
    assert (owner_of.tolist(), named) == ([0, 1, 2, 3], [b"Al", b"Bo", b"Di", b"Cy"])
    assert identify_owners(single, "x")[1] == [b"5", b"2", b"0", b"1"]
    assert identify_owners(PLAIN, "x")[1] == identify_examples(PLAIN.train)


@pytest.mark.parametrize("names", [[], [f"p{n}" for n in range(11)]], ids=["numbered", "named"])
def test_an_owner_of_two_examples_more_moves_no_other(names: list[str]) -> None:
    """By content until somebody owned two examples: the first who did moved 9 of 10 others."""

    def identify(owners: list[int]) -> dict[int, bytes]:
        count = len(owners)
        train = Examples(torch.arange(count), torch.zeros(count), torch.tensor(owners))
        owner_of, identities = identify_owners(replace(PLAIN, train=train, owner_names=names), "x")
        return dict(zip(owners, [identities[owner] for owner in owner_of], strict=True))

    few = identify([*range(10)])
    more = identify([*range(10), 10, 10])
    assert few == {owner: more[owner] for owner in few}
    assert len({*more.values()}) == 11


def test_an_owner_without_a_name_is_refused_and_so_are_two_of_one() -> None:
    for names, says in {
        ("a", "b", "c", "d", "e"): r"group 5 has no name: `owner_names` has 5",
        ("a", "b", "c", "a", "e", "f"): "'a' has 2 numbers in `groups`",
    }.items():
        with pytest.raises(UserError, match=says):
            replace(OWNED, owner_names=names)
    files = ("a 11.png", "a1 1.png", "A1 1.png", "-1.png", "nan.png", "0.nii.gz")
    assert replace(OWNED, owner_names=files)  # files' names are exact


SIGNS = ["", " ", "-", "?", "__", "-9", -1, -99, -1.0]
WORDS = ["nan", "None", "n/a", "N.A.", "#N/A", "<NA>", "NULL", "unknown", "not known"]
WORDS += ["TBA", "tbd", "to-do", "x", "XXX", "anon", "No ID", "not recorded", "000-00-0000"]
WORDS += ["unbekannt", "Keine Angabe", "inconnu", "non renseigné", "Desconocido", "okänd", "未知"]
WORDS += ["\u3164", "\u2800\ufe0f", "pd.NA", "1.#QNAN"]
WORDS += ["Ne\u0301zna\u0301my\u0301", "неизвестный"]
MISSING: list[Any] = [*SIGNS, *WORDS]


@pytest.mark.parametrize("missing", MISSING, ids=repr)
def test_a_missing_owner_is_refused_by_name(missing: Any) -> None:
    """Five patients without a name became one, who moved the sum by 2 C."""
    known = ["p1", "p2"] if isinstance(missing, str) else [type(missing)(n) for n in (1, 2)]
    with pytest.raises(UserError, match=f"x: owner {re.escape(repr(missing))} stands for a miss"):
        require_named("x", "owner", [*known, missing])
    column = [*known, missing, *known]
    for owners in (column, [("site a", owner) for owner in column]):
        with pytest.raises(UserError, match=r"unit: owner .* stands for a missing one"):
            find_owners(owners, 5, None)


UNSEEN = ["\ufe0f", "\u115f", "\u3164", "\u2800", "\u200b", "\u2060", "\xad", "\ufeff", "\u034f"]
SPELLINGS = [("p1", f"p1{letter}") for letter in UNSEEN]
SPELLINGS += [("100000", "1e+05"), ("100000", "100000.0"), ("7", "+7"), ("15", "1.5e+01")]
SPELLINGS += [("7a", "07a"), ("p7-a", "p007-a"), ("p1", "'p1'"), ("p1", '"p1"'), ("p 1", "P01")]


@pytest.mark.parametrize("names", SPELLINGS, ids=ascii)
def test_two_spellings_of_one_owner_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(UserError, match="would count as two"):
        require_named("x", "owner", ["q1", "q2", *names])


def test_codes_of_one_length_are_different_owners() -> None:
    codes = ["12345e10", "123450e9", "a01b1cde", "a1b01cde", "00f0204f", "0f00204f"]
    codes += ["1" * 40 + "0", "1" * 40 + "1"]
    codes += ["3.1", "3.10", "3.100"]  # patients of site 3
    require_named("x", "owner", codes)


@pytest.mark.parametrize("kind", [int, str, float])
def test_an_owner_0_is_missing_beside_numbers_that_do_not_count(kind: type) -> None:
    with pytest.raises(UserError, match=r"owner '?0"):
        require_named("x", "owner", [kind(n) for n in (0, 104_233, 98_120)])
    for counted in (range(5), (0, 3, 5, 9)):
        require_named("x", "owner", [kind(n) for n in counted])
    require_named("x", "owner", ["Nan Li", "none-7", "p-1", "1-2", "né", "李", "Xi", "Todorov"])
    require_named("x", "owner", [*"wxyz"])


@pytest.mark.parametrize("code", ["0", "999", "P0", "p999", "unbk", "9"])
def test_a_code_with_far_more_examples_than_any_owner_is_told(
    code: str, caplog: pytest.LogCaptureFixture
) -> None:
    others = [f"p{n % 30 + 10}" if code[0] in "pPu" else str(n % 12 + 1) for n in range(120)]
    few = [other for other in others if other != code]
    require_named("x", "owner", [*few, *[code] * 4])
    find_owners([*few, *["p12" if code[0] in "pPu" else "12"] * 90], len(few) + 90, None)
    assert not caplog.text
    find_owners([*few, *[code] * 90], len(few) + 90, None)
    assert f"unit: owner {code!r} has far more examples than the others; if that" in caplog.text


@pytest.mark.parametrize("seed", range(5))
def test_a_training_owner_more_or_less_moves_no_other(seed: int) -> None:
    """Owners drawn from a list: 35 to 55 of 200 changed sides for one less."""
    owners = [f"p{n}" for n in range(200)]
    classes = [str(n % 3) for n in range(200)]
    held = pick_test_owners(owners, classes, 0.2, seed)
    assert 20 <= len(held) <= 60
    for n, owner in enumerate(owners):
        if owner not in held:
            fewer = [column[:n] + column[n + 1 :] for column in (owners, classes)]
            assert pick_test_owners(*fewer, 0.2, seed) == held
    assert held != pick_test_owners(owners, classes, 0.2, seed + 100)
    few = pick_test_owners(["a", "b", "c", "d"], ["x", "x", "y", "y"], 0.01, seed)
    assert len(few & {"a", "b"}) == len(few & {"c", "d"}) == 1


# case of `test_digests` -> a file, and the file of another owner that gets its content
BRATS = "Task01_BrainTumour/images"
SHARED = {
    "cpsc2018": ("CPSC2018/cinc2020_wfdb/S0000", "CPSC2018/cinc2020_wfdb/S0002"),
    "roahd": ("roahd/CPSC2018/cinc2020_wfdb/RN0000", "roahd/CPSC2018/cinc2020_wfdb/RN0001"),
    "fastmri": ("fastMRI/singlecoil_train/phantom0000", "fastMRI/singlecoil_val/phantom0005"),
    "kspace_from_volumes": (f"{HIPPOCAMPI}/h_0", f"{HIPPOCAMPI}/h_2"),
    "mri_sequences": (f"{BRATS}Tr/BRATS_001", f"{BRATS}Ts/BRATS_006"),
    "mri_sequences_from_volumes": (f"{HIPPOCAMPI}/h_0", f"{HIPPOCAMPI}/h_2"),
    "msd": ("Task03_Liver/imagesTr/liver_0", "Task03_Liver/imagesTr/liver_2"),
    "msd_volumes": ("Task03_Liver/imagesTr/liver_0", "Task03_Liver/imagesTr/liver_2"),
    "speech_commands": (
        "SpeechCommands/speech_commands_v0.02/no/00000000_nohash_0",
        "SpeechCommands/speech_commands_v0.02/no/00000001_nohash_0",
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_file_under_two_owners_is_told_in_every_set(
    case: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pictures alone were compared: five equal volumes were five owners."""
    for file in root.glob("fastMRI/*/*.h5"):  # whose patients are then their files
        with h5py.File(file, "a") as volume:
            volume.attrs.pop("patient_id", None)
    data = dataset(case, **CASES[case][1])
    digest = data.load(root).digest
    assert "has the same content as" not in caplog.text
    stem, copy = SHARED[case]
    name, new_name = Path(stem).name, Path(copy).name
    for file in sorted((root / stem).parent.glob(f"{name}.*")):
        target = root / f"{copy}{''.join(file.suffixes)}"
        assert target.exists()
        content = file.read_bytes()
        if file.suffix == ".hea":  # names its record
            content = content.replace(name.encode(), new_name.encode())
        target.write_bytes(content)
    assert data.load(root).digest != digest
    assert caplog.text.count("has the same content as") == 1


def test_published_examples_without_owners_have_the_unit_example() -> None:
    """`validate` stated an ε per patient of a data set that has none."""
    info = DatasetInfo(train=4, test=1, input_shape=(1,), outputs=1)
    assert (info.unit, replace(info, examples_per_patient=2).unit) == ("example", "patient")
    assert replace(info, owners=4).unit == "patient"
