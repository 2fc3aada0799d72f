"""The journal of a search as a file that may be damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from zdp_bench.errors import UserError
from zdp_bench.extras.search.journal import read_trials


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
