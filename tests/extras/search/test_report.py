"""What a search shows: lines and a table of its trials, its ε, its commands."""

import shlex
from typing import Any

import pytest

pytest.importorskip("optuna")

from zdp_bench.extras.search import report as module


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ({"state": "done", "score": 0.87654}, "validation roc_auc 0.8765"),
        ({"state": "done", "score": None}, "validation roc_auc is not finite"),
        ({"state": "failed", "score": None}, "diverged"),  # as earlier versions saved it
        ({"state": "failed", "score": None, "reason": "no ε left"}, "no ε left"),
        ({"state": "deleted", "score": 0.87654}, "validation roc_auc 0.8765, its run was deleted"),
        ({"state": "deleted", "score": None}, "its run was deleted before it ended"),
    ],
)
def test_the_line_of_a_trial_states_how_it_ended(outcome: dict[str, Any], expected: str) -> None:
    trial = {"trial": 1, "values": {"optimizer.lr": "0.1"}, **outcome}
    line = module.describe_trial(trial, 2, "roc_auc")
    assert line == f"trial 1 of 2: optimizer.lr=0.1: {expected}"


def test_a_narrow_terminal_shows_the_score_and_the_searched_values() -> None:
    values = {"algorithm.max_grad_norm": "0.5"}
    best = {"trial": 1, "values": values, "state": "done", "score": 0.9, "run": "a" * 64}
    record = {
        "recipe": "quickstart",
        "sampler": "grid",
        "metric": "roc_auc",
        "direction": "maximize",
        "searched": {"algorithm.max_grad_norm": "0.5,1"},
        "trials": [best | {"test": 0.8, "epsilon_tight": 2.0, "noise": []}],
        "best": None,
        "data": {"validation": 100},
        "privacy": {"delta": 1e-5, "epsilon_all": None, "epsilon_all_unit": None, "runs": 1},
        "ended_by": "",
    }
    page = module.sheet(record)
    assert set(page.important) <= set(page.columns)
    caption = str(page.as_rich(width=64).caption)
    assert caption == "No room for state, test roc auc: use a wider terminal or --format csv."


@pytest.mark.parametrize(
    ("of_run", "of_owner", "epsilon_of", "expected"),
    [
        (2.0, None, "example", "2 for an example (δ"),
        (2.0, 5.0, "example", "2 for an example, 5 for a patient (δ"),
        (2.0, None, "patient", "2 for a patient (δ"),
        (None, None, "patient", "unknown: its runs differ in sampling"),
    ],
)
def test_the_epsilon_of_a_search_states_whom_it_protects(
    of_run: float | None, of_owner: float | None, epsilon_of: str, expected: str
) -> None:
    privacy = {"delta": 1e-5, "epsilon_all": of_run, "epsilon_all_unit": of_owner, "runs": 3}
    privacy |= {"epsilon_of": epsilon_of, "unit": "patient"}
    record = {"privacy": privacy, "recipe": "r", "data": {"validation": 9}, "best": None}
    note = module._notes(record | {"trials": [], "ended_by": ""})[0]
    assert note.startswith(f"ε of the whole search: {expected}")


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_the_commands_that_a_search_prints_read_keys_with_a_plus(plus: str) -> None:
    fixed = [f"{plus}seed=7", f"{plus}paths.results='/a b'", "trainer.epochs=1"]
    trial = {"trial": 1, "values": {}, "run": "a" * 64, "state": "done", "score": 0.9, "noise": []}
    record = {"recipe": "r", "recipe_as_typed": "recipe=r", "metric": "accuracy"}
    record |= {"best": 1, "trials": [trial], "fixed": ["recipe=r", *fixed]}
    _, export, repeat = module._commands(record)
    assert export.endswith("--results '/a b'")
    words = shlex.split(repeat.partition(": zdp-bench ")[2])
    assert words == ["run", "-m", "recipe=r", *fixed[1:], "seed=1,2,3"]
