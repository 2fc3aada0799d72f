"""Imports run one way, and nothing of a developer's machine is in the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zdp_bench"

# room -> the rooms it may import; a room not listed is a mistake, so that a new one is placed with thought
BASE = {"errors", "assets", "registry", "__init__"}
DATA_SIDE = {"data", "tasks", "report", "records"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "assets": set(),
    "__init__": set(),
    "registry": {"errors"},
    "compiled": set(),
    "privacy": {"compiled"},
    "optimizers": set(),
    "memory": BASE | {"gradients"},
    "vectors": set(),
    "nn": BASE | {"compiled", "vectors"},
    "models": BASE | {"nn"},
    "gradients": BASE | {"nn", "compiled", "vectors"},
    "algorithms": BASE | {"gradients", "privacy", "nn"},
    "survival": BASE,
    "distributed": BASE,
    "devices": BASE,
    "engine": BASE | {"algorithms", "gradients", "memory", "nn", "privacy", "distributed"},
    "data": BASE,
    "tasks": BASE,
    "records": BASE,
    "report": BASE | {"records", "data", "privacy"},
    "config": BASE | {"privacy"},
    "checkpoint": BASE | {"privacy"},
    "batchnorm": BASE,
    "checks": BASE | {"algorithms", "gradients", "memory", "privacy", "nn"},
    "evaluation": BASE | {"data", "tasks", "records", "gradients"},
    "machine": BASE,
    "parts": BASE
    | {"config", "data", "tasks", "algorithms", "gradients", "memory", "optimizers", "privacy", "checks", "evaluation"}
    | {"batchnorm", "distributed", "devices"},
    "experiment": BASE
    | {"config", "data", "tasks", "records", "checkpoint", "engine", "algorithms", "gradients", "privacy", "evaluation"}
    | {"batchnorm", "distributed", "devices", "survival", "machine", "parts"},
    "cost": BASE | {"config", "data", "tasks", "engine", "algorithms", "gradients", "privacy", "devices", "machine", "parts"},
    "federated": BASE
    | DATA_SIDE
    | {
        "config",
        "checkpoint",
        "experiment",
        "parts",
        "evaluation",
        "machine",
        "engine",
        "algorithms",
        "gradients",
        "privacy",
        "distributed",
        "devices",
        "survival",
    },
    "terminal": BASE,
    "tensorboard": BASE | {"config", "experiment"},
    "sweep": BASE | DATA_SIDE | {"config", "experiment", "terminal", "distributed", "survival", "tensorboard", "federated"},
    "audit": BASE
    | DATA_SIDE
    | {"config", "parts", "devices", "engine", "algorithms", "gradients", "privacy", "models", "nn", "terminal", "machine"},
    "bench": BASE
    | DATA_SIDE
    | {"config", "experiment", "engine", "algorithms", "gradients", "privacy", "models", "nn", "terminal"},
    "validate": BASE
    | DATA_SIDE
    | {"devices", "config", "parts", "algorithms", "gradients", "privacy", "batchnorm", "cost", "federated"},
    "range_test": BASE | DATA_SIDE | {"config", "parts", "evaluation", "devices", "engine", "algorithms", "privacy", "machine"},
    "reproduce": BASE | DATA_SIDE | {"config", "experiment", "devices", "sweep", "terminal", "bench", "cost"},
    "cli": BASE
    | DATA_SIDE
    | {"config", "sweep", "terminal", "audit", "bench", "privacy", "validate", "range_test"}
    | {"distributed", "survival", "reproduce", "federated"},
    "__main__": {"cli"},
}


def room(module: str) -> str:
    """'zdp_bench.data.mnist' -> 'data'; 'zdp_bench' itself -> '__init__'."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> set[str]:
    """The rooms of ours that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {room(name.name) for name in node.names if name.name.split(".")[0] == "zdp_bench"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zdp_bench":
            if node.module == "zdp_bench":
                found |= {
                    n.name if (PACKAGE / n.name).exists() or (PACKAGE / f"{n.name}.py").exists() else "__init__"
                    for n in node.names
                }
            else:
                found.add(room(node.module or ""))
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert here in ALLOWED, f"{here} has no place in the order of imports yet"
    wrong = imports(path) - ALLOWED[here] - {here}
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_order_has_no_circle() -> None:
    settled: set[str] = set()
    while len(settled) < len(ALLOWED):
        ready = {name for name, needs in ALLOWED.items() if name not in settled and needs - {name} <= settled}
        assert ready, f"a circle among {sorted(set(ALLOWED) - settled)}"
        settled |= ready


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if not name.startswith((".ci/", "tests/test_architecture"))]


def test_no_machine_path_and_no_registry_host_is_committed() -> None:
    forbidden = re.compile(
        r"(^|[^A-Za-z0-9_.])/(work/|root/|home/\w)|\.\./" + r"shared|py" + r"pi\.org|python" + r"hosted|registry\.npm" + "js"
    )
    for path in tracked():
        if path.suffix in (".png", ".pt", ".npz") or not path.exists():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            assert not forbidden.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"


def test_every_module_opens_with_what_it_is() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"
