"""Hydra's sweep grammar becomes a search space; what all trials share is refused."""

from typing import Any

import pytest

pytest.importorskip("optuna")

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from zdp_bench.errors import UserError
from zdp_bench.extras.search.space import grid_of, read_search

KEY = "optimizer.lr"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("interval(0.01,1)", FloatDistribution(0.01, 1.0)),
        ("tag(log,interval(0.01,1))", FloatDistribution(0.01, 1.0, log=True)),
        ("int(interval(1,5))", IntDistribution(1, 5)),
        ("0.1,1e-3", CategoricalDistribution(["0.1", "0.001"])),
        ("choice(a,b)", CategoricalDistribution(["a", "b"])),
        ("range(1,7,2)", CategoricalDistribution(["1", "3", "5"])),
        ("[8],[8,4]", CategoricalDistribution(["[8]", "[8,4]"])),
        ("null,1", CategoricalDistribution(["null", "1"])),
    ],
)
def test_hydras_grammar_becomes_a_distribution(values: str, expected: BaseDistribution) -> None:
    search = read_search(["recipe=quickstart", f"{KEY}={values}"], trials=3)
    assert search.searched == {KEY: expected}
    assert search.fixed == ("recipe=quickstart",)


def test_a_trials_words_are_what_a_run_takes() -> None:
    words = ["recipe=quickstart", "+optimizer.momentum=0.5,0.9", f"{KEY}=interval(0,1)"]
    words = read_search(words, trials=3).overrides_of({"+optimizer.momentum": "0.9", KEY: 1e-05})
    assert words == ["recipe=quickstart", "+optimizer.momentum=0.9", "optimizer.lr=1e-05"]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("recipe=a,b", "a search has one recipe"),
        ("dataset=mnist,phasemnist", "all trials train on one data set"),
        ("dataset.augment=true,false", "all trials train on one data set"),
        ("seed=1,2", "the seed is not a hyper-parameter"),
        ("privacy.delta=1e-5,1e-6", "at one δ"),
        ("privacy.unit=example,patient", "protect one unit"),
        ("execution.deterministic=true,false", "it does not change results"),
        ("optimizer.lr=tag(log,interval(0,1))", "must hold for `log=True`"),
        ("optimizer.lr=interval(0,inf)", "an end of the interval is not finite"),
        ("optimizer.lr=tag(log,choice(1,2))", "give an interval"),
        ("optimizer.lr=range(2,2)", "is an empty range"),
        ("optimizer.lr=glob(a*)", "list the values"),
        ("optimizer.lr=shuffle(0.1,0.2,0.3)", "Remove shuffle"),
        ("optimizer.lr=shuffle(range(1,4))", "Remove shuffle"),
        ("optimizer.lr=1", "no key has several values"),
        ("optimizer.lr=choice(1", "close every bracket"),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(word: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_search([word], trials=3)


@pytest.mark.parametrize(
    ("words", "trials"),
    [
        (["a.b=1,2"], 1_000_000_000),
        (["a.b=1,2"], 0),
        ([f"a.k{number}=range(0,100)" for number in range(9)], None),
    ],
)
def test_a_search_of_too_many_trials_is_refused(words: list[str], trials: int | None) -> None:
    """Calibration took minutes, and a list of all combinations the memory."""
    with pytest.raises(UserError, match=r"trials"):
        read_search(words, trials=trials)


def test_a_grid_has_every_combination() -> None:
    words = ["a.b=1,2", "c.d=x,y,z"]
    assert read_search(words, "grid").trials == 6
    assert read_search(words, "grid", 99).trials == 6
    assert read_search(words) == read_search(words, "grid")
    assert read_search(words, trials=3).sampler == "tpe"
    every = grid_of(read_search(words, "grid").searched)
    assert len(every) == 6
    assert every[1] == {"a.b": "1", "c.d": "y"}


@pytest.mark.parametrize(
    ("words", "options", "sentence"),
    [
        (["x.y=interval(0,1)"], {"trials": None}, r"--trials N is missing"),
        ([], {"trials": None, "sampler": "tpe"}, r"--trials N is missing"),
        (["privacy.target_epsilon=2"], {"epsilon": 1.0}, "privacy.target_epsilon with --epsilon"),
        (["x.y=interval(0,1)"], {"sampler": "grid"}, "with infinitely many values"),
    ],
)
def test_options_that_contradict_are_one_sentence(
    words: list[str], options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        read_search(["optimizer.lr=1,2", *words], **{"trials": 3} | options)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trials", 0),
        ("trials", -3),
        ("trials", 10**10),
        ("epsilon", 0.0),
        ("epsilon", -1.0),
        ("epsilon", float("nan")),
        ("epsilon", float("inf")),
    ],
)
def test_a_number_of_trials_or_an_epsilon_out_of_range_is_one_sentence(
    option: str, value: float, sampler: Any
) -> None:
    options: Any = {"trials": 3, "epsilon": 1.0} | {option: value}
    with pytest.raises(UserError, match=rf"^--{option}={value}: must be [a-z0-9 .]*\.$"):
        read_search(["optimizer.lr=1,2"], sampler, **options)


def test_more_trials_go_on_with_the_same_search_but_not_with_what_was_promised() -> None:
    def named(sampler: Any, trials: int, epsilon: float | None = None) -> str:
        return read_search(["optimizer.lr=1,2"], sampler, trials, epsilon).name

    assert named("tpe", 3) == named("tpe", 9) != named("random", 3)
    assert named("random", 3, 1.0) != named("random", 9, 1.0)
