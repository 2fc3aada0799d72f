"""`zdp-bench audit my_script:function`: exit codes, what the script may hold, and mistakes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extras.audit.test_cases import zdp_bench

SCRIPT = """
import torch

EXAMPLES = [(torch.zeros(2), 0)]
CLAIMED = {"noise_multiplier": 1.0}
CANARY = (torch.ones(2), 0)
INSTEAD = (-torch.ones(2), 0)

def right(examples, seed, std=1.0):
    noise = std * torch.randn(2, generator=torch.Generator().manual_seed(seed))
    return {"sum": torch.stack([x / 2**0.5 for x, _ in examples]).sum(dim=0) + noise}

def wrong(examples, seed):
    return right(examples, seed, std=0.1)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_training.py").write_text(SCRIPT)
    (tmp_path / "lacks_claim.py").write_text(SCRIPT.replace("CLAIMED", "CLAIM"))
    (tmp_path / "lacks_package.py").write_text("import no_such_package\n")
    yield tmp_path
    for name in ("own_training", "lacks_claim", "lacks_package"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("function", "code"), [("right", 0), ("wrong", 1)])
def test_the_exit_code_is_1_when_the_function_is_flagged(
    capsys: pytest.CaptureFixture[str], folder: Path, function: str, code: int
) -> None:
    words = ["--runs", "200", f"own_training:{function}", "--format", "json"]
    left, out, _ = zdp_bench(capsys, *words)
    (row,) = json.loads(out)
    assert left == code
    assert row["case"] == function
    assert row["verdict"] == ("flagged" if code else "passes")
    assert not (folder / "results").exists()


def test_the_path_of_the_file_names_it_too(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    code, out, _ = zdp_bench(capsys, "../own_training.py:right", "--runs=80", "--format=md")
    assert code == 0
    assert "| right |" in out
    assert "own_training.py:right" in out
    assert "σ = 1, rate 1, 1 step" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["no_such_script:right"], "module 'no_such_script' not found"),
        (["./none.py:right"], "module 'none' not found"),
        (["own_training:rigth"], "function 'rigth' is not known. Did you mean 'right'"),
        (["lacks_claim:right"], "lacks_claim: has no CLAIMED"),
        (["lacks_package:right"], "module 'no_such_package' not found"),
        (["own_training:right", "seed=1"], "own_training:right: a script's function is audited"),
        (["own_training:right", "--runs", "3"], "must be at least 40"),
    ],
)
def test_mistakes_end_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    code, out, err = zdp_bench(capsys, *words)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in out + err
