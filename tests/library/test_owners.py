"""With `unit=` whole owners are drawn, each is clipped as one share, and ε is the owner's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from tests.library.conftest import Make
from tests.library.small import EXAMPLES, data, loss, network, reading, train
from zdp_bench import UserError
from zdp_bench.library.units import find_owners
from zdp_bench.privacy.accounting import pld

# 15 owners of one to eight examples, whose examples are not side by side
OWNERS = [f"person {int(2 * (7 * index % EXAMPLES) ** 0.5)}" for index in range(EXAMPLES)]
PEOPLE = sorted(set(OWNERS))
# 120 owners of two examples each, which is public
MANY: dict[str, Any] = {
    "unit": lambda index: index // 2,
    "dataset": [data()[index % EXAMPLES] for index in range(240)],
    "batch_size": 24,
    "sample_rate": None,
    "expected_batch": None,
}
BOUND = 0.5  # below some norms, and above others


class Table:
    """What a table of pandas is to `unit`: as many columns as there are examples."""

    columns = range(EXAMPLES)

    def __len__(self) -> int:
        return EXAMPLES

    def __iter__(self) -> Any:
        return iter(self.columns)


def mean_gradients(model: nn.Module, owners: list[str]) -> dict[str, dict[str, Tensor]]:
    """The gradient of each owner's mean loss, by torch.func."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    inputs, targets = data().tensors

    def of_mean(moved: dict[str, Tensor], at: list[int]) -> Tensor:
        return loss(functional_call(model, moved, (inputs[at],)), targets[at]).mean()

    return {
        owner: grad(of_mean)(parameters, [i for i, own in enumerate(owners) if own == owner])
        for owner in set(owners)
    }


@pytest.mark.parametrize(
    ("form", "micro_batch"), [("column", None), ("function", 7), ("array", None)]
)
def test_a_step_without_noise_is_the_mean_over_owners_clipped(
    make: Make, form: str, micro_batch: int | None
) -> None:
    unit: Any = {
        "column": OWNERS,
        "function": lambda index: OWNERS[index],
        "array": np.array([PEOPLE.index(owner) for owner in OWNERS]),
    }[form]
    model, before = network(), network()
    changed = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, "micro_batch": micro_batch}
    drawn = {"sample_rate": 1.0, "expected_batch": len(PEOPLE), "max_examples": 8}
    train(make(model, unit=unit, epochs=1, **drawn, **changed))
    factors, sums = [], {name: torch.zeros_like(p) for name, p in before.named_parameters()}
    for gradients in mean_gradients(before, OWNERS).values():
        norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
        factors.append(min(1.0, BOUND / norm))
        for name, g in gradients.items():
            sums[name] += factors[-1] * g
    assert any(factor < 1.0 for factor in factors)
    assert any(factor == 1.0 for factor in factors)
    for name, p in before.named_parameters():
        expected = p - 0.5 * sums[name] / len(PEOPLE)
        parameter = dict(model.named_parameters())[name]
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_owners_are_drawn_and_epsilon_is_theirs(make: Make) -> None:
    rate = 24 / 120
    private = make(**MANY | {"epochs": 3})
    assert private.plan.sampling.records == 120
    train(private)
    assert private.steps == round(3 / rate)
    assert private.epsilon == pld(1.2, rate, private.steps, 1e-3)
    report = private.report()
    assert (report["epsilon_of"], report["examples_per_owner"]) == ("owner", 2)
    assert report["sampling"]["records"] == 120


def test_a_drawn_owner_brings_all_examples_or_so_many(make: Make) -> None:
    for most in (8, 2):
        private = make(unit=OWNERS, sample_rate=0.4, max_examples=most, count_earlier=True)
        with reading() as seen:
            train(private, most=4)
        assert seen
        for drawn in seen:
            for owner in {OWNERS[index] for index in drawn}:
                brought = sum(OWNERS[index] == owner for index in drawn)
                assert brought == min(OWNERS.count(owner), most)


def test_a_seed_covers_who_owns_what(make: Make, tmp_path: Path) -> None:
    def key(name: str, **given: Any) -> str:
        private = make(ledger=tmp_path / f"{name}.jsonl", seed=3, **{"max_examples": 8} | given)
        return private.keys.step_key(private.model, private.ledger)

    swapped = [OWNERS[1], OWNERS[0], *OWNERS[2:]]
    keys = [
        key("one", unit=OWNERS),
        key("two", unit=swapped),
        key("three", unit=OWNERS, max_examples=2),
        key("four", max_examples=None),
    ]
    assert len(set(keys)) == 4
    assert key("five", unit=[owner.upper() for owner in OWNERS]) == keys[0]  # the same partition


def test_a_ledger_of_other_owners_is_refused(make: Make) -> None:
    train(make(**MANY), most=1)
    swapped = [index // 2 for index in (2, 1, 0, *range(3, 240))]
    with pytest.raises(UserError, match="belongs to another node or other owners"):
        make(**MANY | {"unit": swapped})
    assert make(**MANY, max_examples=2).ledger.releases == 1


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"unit": "patient"}, r"str was given, but a column of 60 owners .*table\["),
        ({"unit": OWNERS[1:]}, "names the owners of 59 examples, but the dataset has 60"),
        ({"unit": [None, *OWNERS[1:]]}, "owner of example 0 is None: every example needs"),
        ({"unit": lambda _: object()}, "that is a string or a number"),
        ({"unit": set(range(EXAMPLES))}, "a value of type set was given"),
        ({"unit": list}, "the class list was given"),
        ({"unit": Table()}, r'a value of type Table was given.*table\["patient"\] or'),
        ({"unit": np.array(["2020-01-01", "NaT"] * 30, "M8[ns]")}, "'NaT' stands for a missing"),
        (MANY | {"dataset": data(), "unit": OWNERS}, "with n = 15, adding or removing one"),
        ({"max_examples": 2}, "has an effect with unit= only"),
        (
            {"unit": OWNERS, "algorithm": "gredp", "max_examples": 2},
            "cannot clip several.* Use band_mf or dp_sgd or zeta_dp_sgd, or",
        ),
    ],
)
def test_what_cannot_be_a_unit_is_refused(
    make: Make, changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        make(**changed)


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ([0, "0"], r"of several types \(int, str\)"),
        ([1, 2.0], r"of several types \(float, int\)"),
        ([("a", 1), ("a", "1")], r"of several types \(str and int, str and str\)"),
        (["p1", "p1 "], r"owner 'p1' and owner 'p1 ' differ only in"),
        ([b"p1", b"p1\t"], "differ only in"),
        (["p1", "p1\u200b"], "differ only in"),
        (["Ren\u00e9", "Rene\u0301"], "differ only in"),
        (["1", "1.0"], "differ only in"),
        (["7", "007"], "differ only in"),
        (["P 7", "p007.0"], "differ only in"),
        ([("site", "1"), ("Site", "1")], "differ only in"),
    ],
)
def test_one_owner_who_is_written_in_two_ways_is_refused(column: list[Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        find_owners(column, len(column), None)


def test_owners_of_other_names_are_others() -> None:
    column = ["0.5", "0.05", "1.2.0", "1.2", "10", "100", "a01b2", "a1b02", "y-", "y_", "0", "p0"]
    owners = find_owners(column, len(column), None)
    assert owners is not None
    assert owners.count == len(column)


def test_tensors_of_one_number_are_one_owner() -> None:
    """Tensors compare by identity, so that nobody would own two examples."""
    column = torch.tensor([4, 4, 7])
    sites, patients = np.array([0, 0, 1]), np.array([5, 5, 5])
    pairs = list(zip(sites, patients, strict=True))
    rows = np.stack([sites, patients], axis=1)
    dates = np.array([4, 4, 7], "M8[D]")
    for unit in (
        dates,
        [*zip(dates)],
        column,
        [*column],
        lambda index: column[index],
        pairs,
        rows,
        torch.tensor(rows),
    ):
        owners = find_owners(unit, 3, None)
        assert owners is not None
        assert owners.count == 2
        assert owners.largest == 2


def test_trainings_of_other_units_have_no_epsilon_together(make: Make, tmp_path: Path) -> None:
    """Families of two under trainings by person: 3.59 was stated where 6.48 was spent."""
    given = MANY | {"batch_size": None, "sample_rate": 0.1, "expected_batch": 12, "max_examples": 2}
    by_person, again, by_family = (
        make(**given | {"unit": lambda i, many=many: i // many}, ledger=tmp_path / f"{n}.jsonl")
        for n, many in enumerate((2, 2, 4))
    )
    assert by_person.epsilon_with(again) == 0.0
    with pytest.raises(UserError, match="all trainings need the same delta and unit"):
        by_person.epsilon_with(again, by_family)
