"""Imports run one way, and nothing of a developer's machine is in the repository."""

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
BASE = {"errors", "disk", "foreign_files", "assets", "registry", "caches", "lazy", "threads"}
BASE |= {"__init__"}
CORE = {"privacy", "gradients", "nn", "algorithms", "models"}
CORE |= {"tasks", "data", "config", "records", "representations"}
ALLOWED: dict[str, set[str]] = {  # each after those it may import
    "errors": set(),
    "assets": set(),
    "lazy": set(),
    "threads": set(),
    "__init__": set(),
    "foreign_files": {"errors"},
    "registry": {"errors"},
    "disk": {"errors", "foreign_files"},
    "caches": {"disk"},
    "privacy": BASE,
    "records": BASE | {"privacy"},
    "nn": BASE,
    "data": BASE,
    "tasks": BASE,
    "models": BASE | {"nn"},
    "gradients": BASE | {"nn"},
    "algorithms": BASE | {"gradients", "privacy", "nn"},
    "config": BASE | {"privacy", "algorithms"},
    "representations": BASE | {"data", "config", "nn"},
    "report": BASE | {"records", "data", "privacy", "tasks"},
    "training": BASE | CORE,
    "library": BASE | CORE | {"training"},
    "experiments": BASE | CORE | {"training", "report"},
    "cli": BASE | CORE | {"training", "report", "experiments"},
    "extras": BASE | CORE | {"training", "library", "report", "experiments", "cli"},
    "__main__": {"cli", "errors"},
}


def package_of(module: str) -> str:
    """'zdp_bench.data.mnist' -> 'data'; of extras 'extras.NAME'; 'zdp_bench' itself '__init__'."""
    parts = module.split(".")
    return ".".join(parts[1 : 3 if parts[1:2] == ["extras"] else 2]) or "__init__"


def imports(tree: ast.Module) -> set[str]:
    """Our packages that a file imports, anywhere in it."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "zdp_bench":
            modules |= {f"zdp_bench.{name.name}" for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    ours = {package_of(name) for name in modules if name.split(".")[0] == "zdp_bench"}
    return {name if name in ALLOWED or "." in name else "__init__" for name in ours}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_a_module_says_what_it_is_and_imports_run_one_way(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    here = package_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    allowed = ALLOWED.get(here.partition(".")[0])
    assert allowed is not None, f"{here} has no place in the order of imports yet"
    wrong = imports(tree) - allowed - {here}
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_says_what_it_is(extra: str) -> None:
    folder = PACKAGE / "extras" / extra
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {extra}\n")
    assert len(text.splitlines()) <= 14
    for part in ("- Commands: ", "- Extra dependencies: ", "- Tests: ", "- Without it: "):
        assert part in text
    assert f"`tests/extras/{extra}`" in text
    assert not [name for name in re.findall(r"`(\w+\.py)`", text) if not (folder / name).is_file()]
    assert list((ROOT / "tests/extras" / extra).glob("test_*.py"))
    pip = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for names in re.findall(r"`zdp-bench\[(.*?)\]`", text):
        assert set(names.split(",")) <= set(pip["optional-dependencies"])
    adds = [(k, n, p) for k in (*HOMES, *OPTIONAL) for n, p in of_extras(k).items()]
    own = [(k, n, p) for k, n, p in adds if f".{extra}." in p]
    assert own, "it adds nothing"
    for kind, name, where in own:
        assert (ROOT / f"{where.partition(':')[0].replace('.', '/')}.py").is_file()
        if kind == "command":
            assert f"`{name}`" in text
        if kind == "dataset":
            assert (folder / "datasets" / f"{name}.yaml").is_file()


def test_the_order_has_no_circle() -> None:
    for at, name in enumerate(ALLOWED):
        assert ALLOWED[name] <= {*list(ALLOWED)[: at + 1]}, name


def test_no_machine_path_and_no_registry_host_is_committed() -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    folders = r"(?<![A-Za-z0-9_.])/(work/|root/|home/\w)|\.\./" + "shared"
    hosts = "|".join(["py" + r"pi\.org", "python" + "hosted", r"registry\.npm" + "js"])
    forbidden = re.compile(f"({folders}|{hosts}).*")
    binary = (".pdf", ".png", ".pt", ".npz", ".safetensors")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not name.startswith((".ci/", "tests/test_architecture")) and path.suffix not in binary:
            forbidden_match = path.exists() and forbidden.search(path.read_text(encoding="utf-8"))
            assert not forbidden_match, f"{name}: {forbidden_match[0][:120]}"


def test_the_list_of_mutants_is_of_lines_and_tests_that_are_there() -> None:
    if not (path := ROOT / ".ci/mutants.toml").exists():
        pytest.skip("not a checkout")
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    for test in {test for tests in listed["tests"].values() for test in tests}:
        file, _, function = test.partition("::")
        assert (ROOT / file).exists(), test
        assert not function or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), test
    for excused in listed["equivalent"]:
        text = (PACKAGE / excused["module"]).read_text(encoding="utf-8")
        assert " ".join(excused["line"].split()) in " ".join(text.split()), excused
