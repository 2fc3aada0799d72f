"""The journal of a search as a file that may be damaged."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("optuna")

from tests.privacy.test_composition import run_on
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.extras.search import journal
from zdp_bench.extras.search.journal import Journal, make_record, read_trials
from zdp_bench.extras.search.space import read_search
from zdp_bench.privacy.composition import compose_epsilon
from zdp_bench.tasks.metric import ACCURACY


@pytest.mark.parametrize(
    "change",
    [
        lambda record: [],
        lambda record: record | {"trials": 3},
        lambda record: record | {"trials": [7]},
        lambda record: record | {"trials": [record["trials"][0] | {"noise": 3}]},
        lambda record: record | {"trials": [record["trials"][0] | {"run": None}]},
        lambda record: record | {"trials": [record["trials"][0] | {"state": None}]},
        lambda record: record | {"trials": [record["trials"][0] | {"score": "0.5"}]},
        lambda record: {},
    ],
)
def test_a_damaged_record_of_a_search_is_one_sentence(
    tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    path = tmp_path / "search.json"
    trial = {"trial": 1, "values": {}, "noise": [], "run": "a" * 64, "state": "done"}
    trial |= {"score": 0.5}
    record = {"trials": [trial], "data": {"digest": "d"}}
    path.write_text(json.dumps(record))
    assert read_trials(path, "d") == {1: trial}
    path.write_text(json.dumps(change(record)))
    with pytest.raises(UserError, match=r"search\.json: is damaged at .*Delete it, and search"):
        read_trials(path, "d")


OF_OWNER = run_on("a:1 b:1 c:2")
OF_EXAMPLE = replace(OF_OWNER, by_owner=False, shares_per_owner=2)
OWNERS_SHARE = [OF_OWNER.spent, replace(OF_OWNER.spent, examples=2)]


@pytest.mark.parametrize(
    ("unit", "runs", "epsilon", "epsilon_of_owner"),
    [
        ("patient", [OF_OWNER, OF_EXAMPLE], OWNERS_SHARE, None),
        ("patient", [OF_EXAMPLE], OWNERS_SHARE[1:], None),  # it stood there with an example's ε
        ("example", [OF_OWNER, OF_EXAMPLE], None, OWNERS_SHARE),
        ("example", [OF_OWNER], None, OWNERS_SHARE[:1]),  # and here with an owner's
        ("example", [OF_EXAMPLE], OWNERS_SHARE[:1], OWNERS_SHARE[1:]),
    ],
)
def test_the_epsilon_of_a_search_is_that_of_the_unit_that_its_noise_is_chosen_for(
    monkeypatch: pytest.MonkeyPatch, unit: str, runs: Any, epsilon: Any, epsilon_of_owner: Any
) -> None:
    """A search per patient beside runs per example said that its ε was unknown."""
    words = ("recipe=quickstart", "optimizer.lr=0.1,0.2", f"privacy.unit={unit}")
    config = configured(["recipe=quickstart", f"privacy.unit={unit}"])
    data = Mock(unit="patient", digest="d", validation=range(9))
    monkeypatch.setattr(journal, "read_spendings_of_recipe", lambda *_: runs)
    search = Journal(Path("search.json"), read_search(words, trials=1), config, data, ACCURACY, {})
    privacy = make_record(search)["privacy"]
    delta = config.privacy.delta
    for key, spent in (("epsilon_all", epsilon), ("epsilon_all_unit", epsilon_of_owner)):
        expected = None if spent is None else pytest.approx(compose_epsilon(spent, delta))
        assert privacy[key] == expected, key
