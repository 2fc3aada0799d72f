"""Find what to audit in a script of the user's: `my_script:make_step`.

The script is a Python module in the current folder or on the path, or the path of its file. Beside
the function it holds

    EXAMPLES   the other examples, a list of (x, y)
    CLAIMED    what is claimed; `step` says in which forms
    CANARY     (x, y), or a list of them, a patient's; optional
    INSTEAD    (x, y), what the canary replaces; optional
"""

from __future__ import annotations

import importlib
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
    """Return the finding for the function that `module:function` names.

    Raises:
        UserError: there is no such module or function, or the script lacks what it must hold.
    """
    path, _, function = word.rpartition(":")
    contents = vars(_import(path))
    make_step = contents.get(function)
    if not callable(make_step):
        functions = [name for name, value in contents.items() if callable(value)]
        raise unknown(f"{path}: function", function, functions)
    for name in ("EXAMPLES", "CLAIMED"):
        if name not in contents:
            raise UserError(f"{path}: has no {name}; docs/audit_own.md says what it holds.")
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
    folder = Path.cwd()
    if name.endswith(".py"):
        folder = Path(name).resolve().parent
        name = Path(name).stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # where `python my_script.py` would look too
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{name}: module '{error.name}' not found in {folder}.") from None
