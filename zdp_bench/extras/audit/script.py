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
from zdp_bench.extras.audit.foreign import RUNS, step
from zdp_bench.extras.audit.release import Finding


def audit_script(word: str, runs: int | None, confidence: float) -> Finding:
    """Return the finding for the function that `module:function` names.

    Raises:
        UserError: there is no such module or function, the module lacks EXAMPLES or CLAIMED, or
            what `step` raises.
    """
    path, _, function = word.rpartition(":")
    module = _import(path)
    module_name = module.__name__
    given = vars(module)
    make_step = given.get(function)
    if not callable(make_step):
        own = [n for n, v in given.items() if getattr(v, "__module__", None) == module_name]
        public = [name for name in own if callable(given[name]) and not name.startswith("_")]
        raise unknown(f"{module_name}: function", function, public)
    for needed, what in (
        ("EXAMPLES", "a list of (x, y)"),
        ("CLAIMED", "such as {'noise_multiplier': 1.0, 'sample_rate': 0.1, 'steps': 10}"),
    ):
        if needed not in given:
            raise UserError(f"{module_name}: has no {needed}; define it, {what}.")
    return step(
        make_step,
        given["EXAMPLES"],
        given["CLAIMED"],
        given.get("CANARY"),
        given.get("INSTEAD"),
        RUNS if runs is None else runs,
        confidence,
        name=function,
    )


def _import(name: str) -> Any:
    here = Path.cwd()
    if name.endswith(".py"):
        if not (file := Path(name)).is_file():
            raise UserError(f"{name}: file not found.")
        here, name = file.resolve().parent, file.stem
    folder = str(here)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # where `python my_script.py` would look too
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{name}: module not found; run the command in the script's folder, or give the "
                "path of its file, as in ./my_script.py:function."
            ) from None
        raise UserError(
            f"{name}: needs the package '{error.name}', which is not installed."
        ) from None
