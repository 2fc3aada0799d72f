"""`zdp-bench audit` of a recipe and of my_script:function: formats, exit codes, mistakes."""

import importlib
import json
import math
import statistics
import sys
from collections.abc import Iterator
from contextlib import suppress
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


def forget(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let modules be imported anew during a test."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]


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


RUN_ONCE = "import pathlib\npathlib.Path('has_run').touch(exist_ok=False)\n"


@pytest.mark.parametrize("is_on_path", [False, True])
@pytest.mark.parametrize("name", ["types", "colorsys", "msvcrt", "my.script", "my-script"])
def test_a_script_of_any_name_is_run_once_and_can_pickle_its_classes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    name: str,
    is_on_path: bool,
) -> None:
    """A PicklingError ended the audit, and libraries imported the script as the standard module.

    In a folder that was on the path already, they still did, and the script ran twice.
    """
    if name != "types":  # which is always imported already
        forget(monkeypatch, name)
    if is_on_path:
        monkeypatch.syspath_prepend(folder)
    (folder / f"{name}.py").write_text(RUN_ONCE + PICKLING)
    code, _, err = command(capsys, "audit", f"./{name}.py:pickled", "--runs=40")
    assert code == 0, err
    if name in sys.stdlib_module_names:
        with suppress(ImportError):  # of another operating system
            assert Path(importlib.import_module(name).__file__ or "").parent != folder


@pytest.mark.parametrize("name", ["my-audit", "my.audit", "types"])
def test_a_script_of_any_name_can_import_a_neighbour_of_a_similar_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, name: str
) -> None:
    """The script got the neighbour's name, so that it imported itself."""
    forget(monkeypatch, "my_audit", "types_")
    for neighbour in ("my_audit", "types_"):
        (folder / f"{neighbour}.py").write_text(f"in_{neighbour} = 1\n")
    script = f"from my_audit import in_my_audit\nfrom types_ import in_types_\n{SCRIPT}"
    (folder / f"{name}.py").write_text(script)
    code, _, err = command(capsys, "audit", f"./{name}.py:right", "--runs=40")
    assert code == 0, err


def test_a_script_is_the_module_that_its_neighbour_imports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    forget(monkeypatch, "neighbour_of_own")
    (folder / "neighbour_of_own.py").write_text("import own_training\n")
    script = f"{RUN_ONCE}{SCRIPT}\nimport neighbour_of_own\n"
    (folder / "own_training.py").write_text(script)
    code, _, err = command(capsys, "audit", "./own_training.py:right", "--runs=40")
    assert code == 0, err


def test_a_module_is_the_one_that_python_imports_in_the_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """A linked module found no neighbours of the link, and a file came before a package.

    So did Python's own module.
    """
    forget(monkeypatch, "linked", "package", "colorsys")
    (folder / "library").mkdir()
    (folder / "library" / "real.py").write_text(f"import beside_link\n{SCRIPT}")
    (folder / "linked.py").symlink_to("library/real.py")
    (folder / "beside_link.py").touch()
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text(SCRIPT)
    (folder / "package.py").write_text("")
    (folder / "colorsys").mkdir()
    (folder / "colorsys" / "__init__.py").write_text(SCRIPT)
    for module_name in ("colorsys", "linked", "package"):
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
