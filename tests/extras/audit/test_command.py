"""`zdp-bench audit` of a recipe and of my_script:function: formats, exit codes, mistakes."""

import importlib
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_cli import run as command
from zdp_bench.extras.audit import recipe as module
from zdp_bench.extras.audit.release import Finding

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
PASSES = Finding("case", "claim |x|", math.inf, 1.25, 1e-5, 0.99, "evidence")
FLAGGED = Finding("case", "claim |x|", 1.0, 1.25, 1e-5, 0.99, "evidence")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    scripts = {
        "own_training": SCRIPT,
        "lacks_claim": SCRIPT.replace("CLAIMED", "CLAIM"),
        "lacks_package": "import no_such_package\n",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    for name in scripts:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("second", "code"), [(PASSES, 0), (FLAGGED, 1)])
def test_every_finding_is_shown_and_the_exit_code_says_whether_one_is_flagged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, second: Finding, code: int
) -> None:
    monkeypatch.setattr(module, "audit", lambda *_: iter([PASSES, second]))
    left, out, _ = command(capsys, "audit", "recipe=quickstart", "--format", "rich")
    assert left == code
    assert all(word in out for word in ("passes", second.verdict, "∞"))
    rows = json.loads(command(capsys, "audit", "recipe=quickstart", "--format", "json")[1])
    assert [row["verdict"] for row in rows] == ["passes", second.verdict]
    assert rows[0]["epsilon_claimed"] == "inf"


@pytest.mark.parametrize(("function", "code"), [("right", 0), ("wrong", 1)])
def test_the_exit_code_is_1_when_the_function_is_flagged(
    capsys: pytest.CaptureFixture[str], folder: Path, function: str, code: int
) -> None:
    words = ["audit", "--runs", "200", f"own_training:{function}", "--format", "json"]
    left, out, _ = command(capsys, *words)
    (row,) = json.loads(out)
    assert left == code
    assert (row["case"], row["verdict"]) == (function, "flagged" if code else "passes")
    assert not (folder / "results").exists()


def test_the_path_of_the_file_names_it_too(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    words = ["audit", "../own_training.py:right", "--runs=80", "--format=md"]
    code, out, _ = command(capsys, *words)
    assert code == 0
    for shown in ("| right |", "own_training.py:right", "σ = 1, rate 1, 1 step"):
        assert shown in out


@pytest.mark.parametrize("script", ["statistics.py", "statistics", "./my.script.py"])
def test_a_script_of_any_name_is_the_file_in_the_folder(
    capsys: pytest.CaptureFixture[str], folder: Path, script: str
) -> None:
    """Python's own module of the name was audited, and a dot was taken for a package."""
    (folder / f"{script.removesuffix('.py')}.py").write_text(SCRIPT)
    assert command(capsys, "audit", f"{script}:right", "--runs=40")[0] == 0
    assert sys.modules["statistics"] is statistics


PICKLING = f"""
import pickle
{SCRIPT.replace("wrong", "pickled").replace("std=0.1", "pickle.loads(pickle.dumps(Noise())).std")}
class Noise:
    std = 1.0
"""


@pytest.mark.parametrize("name", ["types", "colorsys", "my.script"])
def test_a_script_of_any_name_can_pickle_its_classes(
    capsys: pytest.CaptureFixture[str], folder: Path, name: str
) -> None:
    """A PicklingError ended the audit, and libraries imported the script as the standard module."""
    (folder / f"{name}.py").write_text(PICKLING)
    code, _, err = command(capsys, "audit", f"./{name}.py:pickled", "--runs=40")
    assert code == 0, err
    if name != "my.script":
        assert Path(importlib.import_module(name).__file__ or "").parent != folder


def test_a_module_is_the_one_that_python_imports_in_the_folder(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """A linked module found no neighbours of the link, and a file came before a package."""
    (folder / "library").mkdir()
    (folder / "library" / "real.py").write_text(f"import beside_link\n{SCRIPT}")
    (folder / "linked.py").symlink_to("library/real.py")
    (folder / "beside_link.py").touch()
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text(SCRIPT)
    (folder / "package.py").write_text("")
    for module_name in ("linked", "package"):
        assert command(capsys, "audit", f"{module_name}:right", "--runs=40")[0] == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["recipe=quickstart", "--confidence", "1.5"], "--confidence=1.5: must lie in"),
        (["recipe=quickstart", "--steps", "0"], "--steps=0: must be at least 1"),
        (["recipe=quickstart", "algorithm.noise_multiplier=0"], "its ε is ∞"),
        (["no_such_script:right"], "module 'no_such_script' not found"),
        (["./none.py:right"], "./none.py: there is no such file"),
        ([":right"], "is neither the name of a module nor the path"),
        (["..own_training:right"], "is neither the name of a module nor the path"),
        (["own_training:rigth"], "function 'rigth' is not known. Did you mean 'right'"),
        (["lacks_claim:right"], "lacks_claim: CLAIMED is not defined"),
        (["lacks_package:right"], "module 'no_such_package' not found"),
        (["own_training:right", "seed=1"], "own_training:right: audit a script's function without"),
        (["own_training:right", "--runs", "3"], "must be at least 40"),
        (["own_training:right", "--runs", "0"], "must be at least 40"),
        (["own_training:right", "--steps", "9"], "--steps needs a recipe"),
        (["recipe=quickstart", "--runs", "50"], "--runs needs my_script:function"),
    ],
)
def test_mistakes_end_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    code, out, err = command(capsys, "audit", *words)
    assert (code, sentence in err) == (2, True), err
    assert "Traceback" not in out + err
