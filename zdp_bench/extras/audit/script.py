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
from typing import Any

from zdp_bench.errors import UserError, unknown
from zdp_bench.extras.audit.foreign import step
from zdp_bench.extras.audit.release import Finding


def audit_script(word: str, runs: int, confidence: float) -> Finding:
    """Return the finding for the function that `module:function` names."""
    path, _, function = word.rpartition(":")
    given = vars(_import(path))
    make_step = given.get(function)
    if not callable(make_step):
        raise unknown(f"{path}: function", function, [n for n, v in given.items() if callable(v)])
    if lacking := [name for name in ("EXAMPLES", "CLAIMED") if name not in given]:
        raise UserError(f"{path}: has no {lacking[0]}; docs/audit_own.md says what it holds.")
    stated = (given["EXAMPLES"], given["CLAIMED"], given.get("CANARY"), given.get("INSTEAD"))
    return step(make_step, *stated, runs, confidence, name=function)


def _import(name: str) -> Any:
    here = Path.cwd()
    if name.endswith(".py"):
        here, name = Path(name).resolve().parent, Path(name).stem
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))  # where `python my_script.py` would look too
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{name}: module '{error.name}' not found in {here}.") from None
