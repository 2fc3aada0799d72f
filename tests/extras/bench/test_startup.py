"""The bench of start-up: every command answers on copies of one run."""

from pathlib import Path

import pytest

from tests.test_records import record, save
from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.extras.bench import startup


def test_a_record_is_copied_as_often_as_asked(tmp_path: Path) -> None:
    save(tmp_path, record("quickstart", 0))
    startup.copy_record(tmp_path, 5)
    every = records.read_all(tmp_path)
    assert [run.seed for run in every] == [0, 1, 2, 3, 4]
    assert len({run.run for run in every}) == 5


def test_the_ratio_is_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_take_time", lambda command: 2.0 if "-c" in command else 1.0)
    rows = startup._compare("case", tmp_path)
    ratios = {row["side"]: row["ratio"] for row in rows}
    assert ratios[startup.TORCH] == 1.0
    assert ratios.keys() == {startup.TORCH, *startup.COMMANDS}
    assert ratios["results"] == 0.5
    assert all(row["milliseconds"] in (1000.0, 2000.0) for row in rows)


def test_a_command_that_fails_is_no_time() -> None:
    with pytest.raises(UserError, match="is not known"):
        startup._take_time([*startup._ZDP, "resluts"])
