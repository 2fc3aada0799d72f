"""Audit a function in a user's script, such as `my_script:make_step`.

The script is given as a Python module, in the current folder or on the path, or as the path of its
file. In addition to the function, it defines

    EXAMPLES   the examples that the adversary knows, a list of (x, y)
    CLAIMED    the claim, in a form that `step` takes
    CANARY     optional: the (x, y) that one neighbour has, or a list of them, such as a patient's
    INSTEAD    optional: the (x, y) that the canary replaces
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from zdp_bench.errors import UserError, unknown
from zdp_bench.extras.audit.foreign import step
from zdp_bench.extras.audit.release import Finding


def audit_script(
    word: str,
    runs: int,
    confidence: float,
) -> Finding:
    """Return the finding of an attack on a function in a script.

    Args:
        word: `module:function` or `path.py:function`.
        runs: the number of runs of each neighbour.
        confidence: the confidence of the lower bound on ε.

    Raises:
        UserError: there is no such module or function, or the script does not define EXAMPLES or
            CLAIMED.
    """
    path, _, function = word.rpartition(":")
    contents = vars(_import(path))
    make_step = contents.get(function)
    if not callable(make_step):
        functions = [name for name, value in contents.items() if callable(value)]
        raise unknown(f"{path}: function", function, functions)
    for name in ("EXAMPLES", "CLAIMED"):
        if name not in contents:
            raise UserError(f"{path}: {name} is not defined; see docs/audit_own.md.")
    return step(
        make_step,
        contents["EXAMPLES"],
        contents["CLAIMED"],
        canary=contents.get("CANARY"),
        instead=contents.get("INSTEAD"),
        runs=runs,
        confidence=confidence,
        name=function,
    )


def _import(name: str) -> ModuleType:
    """Import a script by its path, or a module by its name, first from the current folder.

    A file is loaded by its path, because a module of its name, such as Python's own `statistics`,
    may have been imported already, or may be imported by a library later.
    """
    is_path = name.endswith(".py")
    if not is_path and not all(part.isidentifier() for part in name.split(".")):
        raise UserError(
            f"{name}: is neither the name of a module nor the path of a .py file, as in "
            "my_script:make_step."
        )
    path = Path(name if is_path else f"{name}.py").absolute()
    if is_path and not path.is_file():
        raise UserError(f"{name}: there is no such file.")
    # Python finds a script's imports beside the file that a link leads to, and a module's in the
    # current folder, where it prefers a package to a file.
    folder = path.resolve().parent if is_path else Path.cwd()
    is_package = not is_path and Path(name, "__init__.py").is_file()
    is_script = path.is_file() and not is_package
    if is_script and path.stem in sys.stdlib_module_names:
        _import_standard(path.stem, folder)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return _load(path) if is_script else importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{name}: module '{error.name}' not found in {folder}.") from None


def _import_standard(name: str, folder: Path) -> None:
    """Import Python's own module of a name, although a folder on the path has a script of the name.

    A library that imports the module later would find the script.
    """
    entries = [*sys.path]
    sys.path[:] = [entry for entry in entries if Path(entry).resolve() != folder]
    try:
        importlib.import_module(name)
    except ImportError:  # a module of another operating system, which is to stay missing
        sys.modules[name] = None  # type: ignore[assignment]
    finally:
        sys.path[:] = entries


def _load(path: Path) -> ModuleType:
    """Load a file as a module."""
    name = _name_module(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _name_module(path: Path) -> str:
    """Return the name by which a file is imported or, if it is not, a name that no import has."""
    name = path.stem
    if name.isidentifier() and name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is not None and Path(spec.origin or "").resolve() == path.resolve():
            return name
    # Without dots, because pickle imports what is before the first one.
    return f"script {name.replace('.', '_')}"
