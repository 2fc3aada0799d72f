"""Who owns the training examples, and how many owners there are before any is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zdp_bench.data import DatasetInfo, Examples, Part, Splits
from zdp_bench.data.owners import count_owners, owners_of
from zdp_bench.errors import UserError

FOUR = torch.zeros(4, 1), torch.zeros(4)
PLAIN = Splits(Examples(*FOUR), Examples(*FOUR), (1,), 1, "synthetic", "digest")
OWNED = replace(PLAIN, train=Examples(*FOUR, groups=torch.tensor([5, 2, 5, 2])))


def test_owners_come_from_groups_where_anybody_owns_several() -> None:
    assert owners_of(OWNED, "x").tolist() == [5, 2, 5, 2]
    assert count_owners(OWNED, "x") == 2
    assert owners_of(PLAIN, "x").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("given", [{}, {"examples_per_patient": 1}, {"examples_per_patient": 9}])
def test_the_largest_group_is_counted_whatever_is_given(given: dict[str, int]) -> None:
    """A default of 1 gave a patient with 12 examples the ε of one with a single one."""
    groups = torch.tensor([4, 4, 7, 4])
    one = replace(PLAIN, train=Examples(*FOUR, groups=groups), **given)
    assert one.examples_per_patient == 3
    assert owners_of(one, "x").tolist() == groups.tolist()
    fewer = replace(one, train=Part(one.train, torch.tensor([0, 2])))
    assert fewer.examples_per_patient == 1
    assert replace(fewer, train=Part(one.train, torch.tensor([], dtype=torch.long)))


@pytest.mark.parametrize("part", ["test", "validation"])
def test_an_owner_in_two_parts_is_refused_unless_it_is_meant(part: str) -> None:
    crossing = Examples(*FOUR, groups=torch.tensor([9, 2, 8, 9]))
    with pytest.raises(UserError, match=rf"1 owners .* in its {part} part too \(group 2 is the"):
        replace(OWNED, **{part: crossing})
    assert replace(OWNED, **{part: crossing}, parts_share_owners=True)
    assert replace(OWNED, **{part: Examples(*FOUR, groups=torch.tensor([9, 1, 8, 9]))})


def test_owners_that_are_not_known_are_refused() -> None:
    several = replace(PLAIN, examples_per_patient=2)
    with pytest.raises(UserError, match="x: a patient owns up to 2 records"):
        owners_of(several, "x")
    info = DatasetInfo(train=4, test=1, input_shape=(1,), outputs=1, examples_per_patient=2)
    with pytest.raises(UserError, match="x: a patient owns up to 2 records"):
        count_owners(info, "x")
    assert count_owners(replace(info, owners=3), "x") == 3
    assert count_owners(replace(info, examples_per_patient=1), "x") == 4
