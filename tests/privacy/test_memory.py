"""What was computed is remembered exactly, and for its own question alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zdp_bench import assets
from zdp_bench.privacy import memory
from zdp_bench.privacy.accounting import rdp_epsilon, tight_epsilon
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.memory import call_cached

PACKAGE = Path(memory.__file__).parent.parent
EVEN = Sampling("poisson", 0.01, 10, 1000)
CALLS: list[Any] = []
TRUTH = {"answer": 0.1 + 0.2}


def slow(name: str, more: float = 0.0) -> float:
    CALLS.append(name)
    return TRUTH[name] + more


def pair(low: float, high: float | None) -> tuple[float, float | None]:
    CALLS.append(low)
    return low, high


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(TRUTH, "answer", 0.1 + 0.2)
    CALLS.clear()
    return tmp_path / "zdp-bench" / "numbers"


def test_whatever_a_number_depends_on_is_another_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (
        (tight_epsilon, Mechanism.of_z(1.0, EVEN), 500, 1e-5),
        (rdp_epsilon, Mechanism.of_z(1.0, EVEN), 500, 1e-5),
        (tight_epsilon, Mechanism.of_z(1.1, EVEN), 500, 1e-5),
        (tight_epsilon, Mechanism.of_z(1.0, replace(EVEN, scheme="uniform")), 500, 1e-5),
        (tight_epsilon, Mechanism.of_z(1.0, replace(EVEN, sample_rate=0.02)), 500, 1e-5),
        (tight_epsilon, Mechanism.of_z(1.0, EVEN), 501, 1e-5),
        (tight_epsilon, Mechanism.of_z(1.0, EVEN), 500, 2e-5),
    )
    for _ in range(2):
        for function, *arguments in asked:
            assert call_cached(function, *arguments) == function(*arguments)
    assert len(list(folder.iterdir())) == len(asked)
    call_cached(slow, "answer")
    for changed, other in (("version", str), ("sys", SimpleNamespace(modules={__name__: assets}))):
        memory._code.cache_clear()  # another process
        monkeypatch.setattr(memory, changed, other)
        call_cached(slow, "answer")
    memory._code.cache_clear()
    assert len(CALLS) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: json.dumps(kept)[:20],
        lambda kept: "[1, 2]",
        lambda kept: json.dumps(kept | {"number": kept["number"] - 1e-9}),
        lambda kept: json.dumps({"number": 1.0, "seal": memory._seal("another question", 1.0)}),
    ],
    ids=["cut", "list", "another number", "another question's"],
)
def test_a_damaged_or_foreign_file_is_ignored_and_mended(damage: Any, folder: Path) -> None:
    right = call_cached(slow, "answer")
    (file,) = folder.iterdir()
    whole = file.read_text()
    file.write_text(damage(json.loads(whole)))
    assert call_cached(slow, "answer") == right
    assert file.read_text() == whole


def test_a_number_is_read_to_its_last_bit(folder: Path) -> None:
    asked = [(0.1 + 0.2, None), (math.inf, 1.0)]
    for _ in range(2):
        assert [call_cached(pair, *arguments) for arguments in asked] == [
            [0.1 + 0.2, None],
            [math.inf, 1.0],
        ]
    assert len(CALLS) == 2


def test_a_folder_that_cannot_be_written_only_costs_time(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("")
    for _ in range(2):
        assert call_cached(slow, "answer") == 0.1 + 0.2
    assert len(CALLS) == 2


def test_two_processes_at_once_read_whole_numbers(folder: Path) -> None:
    code = (
        "from statistics import fmean\nfrom zdp_bench.privacy.memory import call_cached\n"
        "assert all(call_cached(fmean, [i, 1]) == (i + 1) / 2 for i in range(200) for _ in 'abc')"
    )
    several = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait() for process in several] == [0, 0]
    assert len(list(folder.iterdir())) == len(list(folder.glob("*.json"))) == 200


def files_with(words: str) -> set[str]:
    """Return the files of the package that contain some words."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if words in path.read_text(encoding="utf-8")
    }


def test_what_a_run_audit_or_verify_states_is_never_remembered() -> None:
    using = files_with("privacy.memory import")
    recalling = files_with("recall_claimed_epsilon")
    recalled_by = {"report/cells.py", "report/epsilon.py", "experiments/validate.py"}
    assert recalling == {"privacy/accountants.py"} | recalled_by
    shown = {f"report/{name}.py" for name in ("epsilon", "budget", "grids")}
    shown.add("experiments/validate.py")  # before a run
    no_epsilon = {"experiments/claims.py", "report/comparisons.py"}  # jobs of recipes; p of t-tests
    assert using == {"privacy/calibration.py", "privacy/accountants.py"} | shown | no_epsilon
