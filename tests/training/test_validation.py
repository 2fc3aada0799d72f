"""Owners held out of any data set to validate on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zdp_bench.config import configured
from zdp_bench.data import DatasetInfo, Examples, Splits
from zdp_bench.errors import UserError
from zdp_bench.training.setup import describe_data, load_data
from zdp_bench.training.validation import expect_held_out, hold_out, pick_owners

OWNERS = 400
SHARE = 0.25
TEST = Examples(torch.zeros(1, 2), torch.zeros(1))


def own(owners: range, named: bool = True) -> Splits:
    """Two examples of each owner, or one of each without a name."""
    numbers = torch.tensor(owners).repeat_interleave(2 if named else 1)
    inputs = torch.stack([numbers, torch.arange(len(numbers))], dim=1).float()
    train = Examples(inputs, numbers, numbers if named else None)
    names = [f"patient {number}" for number in range(OWNERS)] if named else []
    return Splits(train, TEST, (2,), 1, "own", "digest", owner_names=names)


def held_out(data: Splits) -> set[int]:
    held = pick_owners(data, SHARE)
    return {*data.train.batch(torch.arange(len(data.train)))[1][torch.from_numpy(held)].tolist()}


@pytest.mark.parametrize("named", [True, False])
def test_an_owner_less_moves_no_other(named: bool) -> None:
    whole = held_out(own(range(OWNERS), named))
    assert len(whole) == pytest.approx(SHARE * OWNERS, rel=0.25)
    without = held_out(own(range(50, OWNERS), named)) if named else held_out(own(range(50), named))
    rest = range(50, OWNERS) if named else range(50)
    assert without == whole & {*rest}


def test_owners_are_held_out_whole_and_once() -> None:
    data = own(range(OWNERS))
    held = pick_owners(data, SHARE)
    made = hold_out(data, held, SHARE)
    assert made.validation is not None
    groups = [
        {*part.groups.tolist()} for part in (made.train, made.validation) if part.groups is not None
    ]
    assert not groups[0] & groups[1]
    assert groups[0] | groups[1] == {*range(OWNERS)}
    assert made.digest != data.digest
    assert "held out to validate" in made.notes


def test_what_cannot_be_held_out_is_refused() -> None:
    data = own(range(OWNERS))
    with pytest.raises(UserError, match="has validation examples of its own"):
        pick_owners(replace(data, validation=TEST), SHARE)
    with pytest.raises(UserError, match="0 of 2 training examples"):
        pick_owners(own(range(1)), 0.001)
    unknown = Examples(torch.zeros(8, 2), torch.zeros(8))
    with pytest.raises(UserError, match=r"dataset\.validation_share: .* 3"):
        pick_owners(Splits(unknown, TEST, (2,), 1, "own", "", examples_per_patient=3), SHARE)


def test_counts_are_those_of_what_a_run_loads(tmp_path: Path) -> None:
    words = ["recipe=quickstart", "dataset.validation_share=0.2", f"paths.data={tmp_path}"]
    config = configured(words)
    info, data = describe_data(config), load_data(config)
    assert data.validation is not None
    assert (info.train, info.validation) == (len(data.train), len(data.validation))
    assert data.train.groups is not None
    assert info.owners == len(data.train.groups.unique())
    release = DatasetInfo(train=1000, test=1, input_shape=(1,), outputs=1, owners=50)
    counts = expect_held_out(release, 0.1)
    assert (counts.train, counts.validation, counts.owners) == (900, 100, 45)
