"""Imports run one way, and nothing of a developer's machine is in the repository."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from zdp_bench.registry import HOMES, OPTIONAL, of_extras

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zdp_bench"
EXTRAS = sorted(path.parent.name for path in PACKAGE.glob("extras/*/__init__.py"))

# package -> the packages it may import; one that is not listed fails, so that a new one is placed
# with thought
BASE = {"errors", "disk", "foreign_files", "assets", "registry", "caches", "threads", "__init__"}
CORE = {
    "privacy",
    "gradients",
    "nn",
    "algorithms",
    "models",
    "tasks",
    "data",
    "config",
    "records",
    "representations",
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "foreign_files": {"errors"},
    "disk": {"errors", "foreign_files"},
    "assets": set(),
    "__init__": set(),
    "caches": set(),
    "threads": set(),
    "registry": {"errors"},
    "records": BASE,
    "privacy": BASE,
    "nn": BASE,
    "models": BASE | {"nn"},
    "gradients": BASE | {"nn"},
    "algorithms": BASE | {"gradients", "privacy", "nn"},
    "data": BASE,
    "tasks": BASE,
    "representations": BASE | {"data", "config", "nn"},
    "config": BASE | {"privacy", "algorithms"},
    "report": BASE | {"records", "data", "privacy"},
    "training": BASE | CORE,
    "library": BASE | CORE | {"training"},
    "experiments": BASE | CORE | {"training", "report"},
    "cli": BASE | CORE | {"training", "report", "experiments"},
    "extras": BASE | CORE | {"training", "library", "report", "experiments", "cli"},
    "__main__": {"cli"},
}


# What the core, or an extra, imports of an extra where it is used, and does without elsewhere.
OF_EXTRAS = {"library": {"extras.sharing"}}


def package_of(module: str) -> str:
    """'zdp_bench.data.mnist' -> 'data'; of extras 'extras.NAME'; 'zdp_bench' itself '__init__'."""
    parts = module.split(".")
    return ".".join(parts[1 : 3 if parts[1:2] == ["extras"] else 2]) or "__init__"


def imports(path: Path) -> set[str]:
    """Our packages that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {
                package_of(name.name)
                for name in node.names
                if name.name.split(".")[0] == "zdp_bench"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zdp_bench":
            if node.module == "zdp_bench":
                found |= {
                    n.name
                    if (PACKAGE / n.name).exists() or (PACKAGE / f"{n.name}.py").exists()
                    else "__init__"
                    for n in node.names
                }
            else:
                found.add(package_of(node.module or ""))
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_run_one_way(path: Path) -> None:
    here = package_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    allowed = ALLOWED.get(here.partition(".")[0])
    assert allowed is not None, f"{here} has no place in the order of imports yet"
    wrong = imports(path) - allowed - {here} - OF_EXTRAS.get(here, set())
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_says_what_it_is(extra: str) -> None:
    folder = PACKAGE / "extras" / extra
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {extra}\n")
    assert len(text.splitlines()) <= 14
    for part in ("- Verbs: ", "- Pip extra", "- Tests: ", "- Without it: "):
        assert part in text
    assert f"`tests/extras/{extra}`" in text
    assert not [name for name in re.findall(r"`(\w+\.py)`", text) if not (folder / name).is_file()]
    assert list((ROOT / "tests/extras" / extra).glob("test_*.py"))
    pip = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for names in re.findall(r"`zdp-bench\[(.*?)\]`", text):
        assert set(names.split(",")) <= set(pip["optional-dependencies"])
    adds = [(k, n, p) for k in (*HOMES, *OPTIONAL) for n, p in of_extras(k).items()]
    own = [(k, n, p) for k, n, p in adds if f".{extra}." in p]
    assert own or any(f"extras.{extra}" in used for used in OF_EXTRAS.values()), "it adds nothing"
    for kind, name, where in own:
        assert (ROOT / f"{where.partition(':')[0].replace('.', '/')}.py").is_file()
        if kind == "command":
            assert f"`{name}`" in text
        if kind == "dataset":
            assert (folder / "datasets" / f"{name}.yaml").is_file()


def test_the_order_has_no_circle() -> None:
    settled: set[str] = set()
    while len(settled) < len(ALLOWED):
        ready = {
            name
            for name, needs in ALLOWED.items()
            if name not in settled and needs - {name} <= settled
        }
        assert ready, f"a circle among {sorted(set(ALLOWED) - settled)}"
        settled |= ready


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [
        ROOT / name
        for name in listed.stdout.splitlines()
        if not name.startswith((".ci/", "tests/test_architecture"))
    ]


def test_no_machine_path_and_no_registry_host_is_committed() -> None:
    forbidden = re.compile(
        r"(^|[^A-Za-z0-9_.])/(work/|root/|home/\w)|\.\./"
        + r"shared|py"
        + r"pi\.org|python"
        + r"hosted|registry\.npm"
        + "js"
    )
    for path in tracked():
        if path.suffix in (".pdf", ".png", ".pt", ".npz", ".safetensors") or not path.exists():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            assert not forbidden.search(line), (
                f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            )


def test_every_module_opens_with_what_it_is() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_the_list_of_mutants_is_of_lines_and_tests_that_are_there() -> None:
    if not (path := ROOT / ".ci/mutants.toml").exists():
        pytest.skip("not a checkout")
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    assert all((ROOT / test).exists() for tests in listed["tests"].values() for test in tests)
    for excused in listed["equivalent"]:
        text = (PACKAGE / excused["module"]).read_text(encoding="utf-8")
        assert " ".join(excused["line"].split()) in " ".join(text.split()), excused
